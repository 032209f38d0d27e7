"""Pickles without Python's unpickler: parsed into inert nodes, written from inert nodes."""
