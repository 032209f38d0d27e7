"""Formats: one package for each family of checkpoints, and the tables of those that can be read and written."""
