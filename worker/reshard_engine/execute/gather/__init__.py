"""Gathering: source extents read, computed with and put in place, for one chunk of a target file at a time."""
