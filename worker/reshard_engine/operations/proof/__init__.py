"""Proof that a checkpoint is what it was: digests of its state, and signed statements about it."""
