//! Requests of eight connections, in pieces and interleaved, for a store's server without sockets. What the bytes mean
//! is said at `comm_store::fuzzing::server`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // Small enough that the limit is met.
    comm_store::fuzzing::server(data, 1 << 20);
});
