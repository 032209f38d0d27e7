"""Consolidated weights: one file, or shards with an index; no optimizer, no masters."""
