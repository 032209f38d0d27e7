"""Reshard: any sharding of a training checkpoint into any other, bit for bit."""
