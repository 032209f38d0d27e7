"""Checks before, during and after a run, and the manifest that states their results."""
