"""Sinks: local directories and object stores that a conversion writes to, with their journals and commits."""
