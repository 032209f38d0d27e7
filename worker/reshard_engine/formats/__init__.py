"""Formats: one package for each family of checkpoints, and the registry of all formats."""
