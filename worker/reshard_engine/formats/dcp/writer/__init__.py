"""The writer of PyTorch's distributed checkpoints."""
