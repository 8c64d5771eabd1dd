//! The embedded CPU backend of rustcomms: ranks are processes joined by sockets.
