//! The opening of a data connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    backend_tcp::fuzzing::greeting(data);
});
