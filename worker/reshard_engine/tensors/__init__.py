"""Tensors as data: element types, shard maps, views, tensor-parallel cuts, and the shapes of target files."""
