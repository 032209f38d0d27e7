"""Checkpoints of Megatron-core: `torch_dist` and the directories of model-parallel ranks, with the optimizer."""
