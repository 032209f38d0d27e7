"""The writers of consolidated weights."""
