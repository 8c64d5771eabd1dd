//! Rendezvous stores of rustcomms: TcpStore client and server, MemoryStore, PrefixStore.
