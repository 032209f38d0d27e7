"""Gathering: for one chunk of a target file at a time, source extents are read, computed with and put in place."""
