"""Parses pickles into inert nodes, and writes pickles from inert nodes, without Python's unpickler."""
