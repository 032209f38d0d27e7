"""The REST API of reshard: accepts jobs, shows them, and wakes the workers."""
