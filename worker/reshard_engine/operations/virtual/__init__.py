"""Targets that are never written: their files, the programs that load them, and their mounts."""
