//! What a store's server might answer, for each call of a client. What the bytes mean is said at
//! `comm_store::fuzzing::client`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    comm_store::fuzzing::client(data);
});
