"""Readers: each understands one family's metadata, and none touches tensor bytes but scalars."""
