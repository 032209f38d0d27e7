"""Consolidated weights: safetensors and `torch.save` files, whole or in shards with an index."""
