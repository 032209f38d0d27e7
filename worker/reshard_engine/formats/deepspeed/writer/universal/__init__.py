"""The writer of universal checkpoints."""
