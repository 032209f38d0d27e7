"""Bounds of the pickle interpreter: all are settings, defaults pass real checkpoints with room to spare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PickleLimits:
    """What one pickle may cost before it is refused."""

    stream_bytes: int = 256 << 20
    opcodes: int = 50_000_000
    node_bytes: int = 1 << 30
    mark_depth: int = 1_000
    value_depth: int = 200
    """Also of walks over finished values: 200 levels of ours are 600 of Python's stack, which has 1,000."""
    text_bytes: int = 64 << 20
    line_bytes: int = 4 << 10
    name_chars: int = 256
    name_dots: int = 8
    long_bytes: int = 1 << 10
    digits: int = 4_300
    dims: int = 64


DEFAULT_LIMITS = PickleLimits()
