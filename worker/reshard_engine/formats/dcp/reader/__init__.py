"""The readers of PyTorch's distributed checkpoints."""
