//! Links and the endpoint that moves framed channels over them.
