"""Execution: units read extents, cast, write chunks; a journal remembers; the commit comes last."""
