"""Directories of torch_checkpointing: each item of each rank in a file of its own."""
