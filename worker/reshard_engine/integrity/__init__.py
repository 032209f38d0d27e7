"""Integrity: CRC-32s, digests of logical tensors, the manifest, and files compared with it."""
