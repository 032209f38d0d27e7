"""The library: geometry, shard map, plan, execute, readers, writers, storage. Needs no service."""
