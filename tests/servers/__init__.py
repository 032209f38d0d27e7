"""Real servers for tests: started on free loopback ports, stopped by their process id, skipped never."""
