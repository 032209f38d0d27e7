"""The clients of a reshard service."""
