"""Storage: local files and object stores through one small protocol."""
