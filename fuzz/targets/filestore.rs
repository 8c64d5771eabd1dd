//! Files of a file store, their names and keys.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    comm_store::fuzzing::files(data);
});
