"""The command line of reshard."""
