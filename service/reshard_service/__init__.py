"""The REST API of reshard: accepts jobs, shows them, and rings the workers."""
