"""Checkpoints of Megatron-core: `torch_dist`, with the optimizer."""
