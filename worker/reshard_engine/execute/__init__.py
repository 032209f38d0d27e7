"""Execution: units read extents, cast them and write chunks; a journal keeps finished units; the commit is last."""
