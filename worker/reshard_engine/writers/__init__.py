"""Writers: each lays out one target format as a pure function of the checkpoint and the request."""
