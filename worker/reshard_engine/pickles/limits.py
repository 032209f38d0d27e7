"""Bounds of the pickle interpreter. Real checkpoints need less than a tenth of each; the environment can set some."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import RequestError, printable


@dataclass(frozen=True, slots=True)
class PickleLimits:
    """The bounds on the work, memory and nesting of one pickle."""

    stream_bytes: int = 256 << 20
    opcodes: int = 50_000_000
    node_bytes: int = 2 << 30
    """Bytes, counted when values are made, freed or not. The pickle of a mixture of experts with a trillion parameters
    counts 192 MiB."""
    mark_depth: int = 1_000
    value_depth: int = 200
    """Levels of nesting, also of walks over finished values: 200 levels take 600 frames of Python's stack of 1,000."""
    text_bytes: int = 64 << 20
    line_bytes: int = 4 << 10
    name_chars: int = 1 << 10
    name_dots: int = 64
    foreign_names: int = 10_000
    """Number of different names that are not on the allow-list; manifests and inspections list all of them."""
    long_bytes: int = 1 << 10
    digits: int = 4_300
    dims: int = 64


DEFAULT_LIMITS = PickleLimits()


_SETTINGS = {
    "RESHARD_PICKLE_STREAM_BYTES": "stream_bytes",
    "RESHARD_PICKLE_OPCODES": "opcodes",
    "RESHARD_PICKLE_NODE_BYTES": "node_bytes",
}
"""The bounds that decide time and memory, by environment variable. The other bounds are fixed."""


def configured_limits(environ: Mapping[str, str] = os.environ) -> PickleLimits:
    """The bounds with the values of the environment. Probes and engine processes inherit the environment.

    Raises:
        RequestError: `request.invalid` for a value that is not a positive number.
    """
    chosen: dict[str, int] = {}
    for key, bound in _SETTINGS.items():
        text = environ.get(key)
        if text is None:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) == 0:
            raise RequestError("request.invalid", f"{key} is {printable(text)!r}", fix=f"set {key} to a whole number")
        chosen[bound] = int(text)
    return PickleLimits(**chosen)
