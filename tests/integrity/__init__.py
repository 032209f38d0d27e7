"""The two levels of checking."""
