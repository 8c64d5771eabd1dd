//! Both ends of the proof of a secret, on bytes of strangers: a hello, a proof, a challenge.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    comm_store::fuzzing::handshake(data);
});
