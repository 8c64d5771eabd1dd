//! What ranks put into the store for each other: cards, settings, verdicts, stamps.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    backend_tcp::fuzzing::records(data);
});
