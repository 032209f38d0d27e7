"""One conversion on many workers: the protocol in simulation, and real processes that are killed."""
