"""Torch files as they are: any tree with its tensors, read and written again."""
