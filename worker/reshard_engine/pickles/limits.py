"""Bounds of the pickle interpreter: real checkpoints pass a tenth of each; the environment sets the costly ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import RequestError, printable


@dataclass(frozen=True, slots=True)
class PickleLimits:
    """What one pickle may cost before it is refused."""

    stream_bytes: int = 256 << 20
    opcodes: int = 50_000_000
    node_bytes: int = 2 << 30
    """Counted when values are made, freed or not; the skeleton of a trillion parameters in experts counts 192 MiB."""
    mark_depth: int = 1_000
    value_depth: int = 200
    """Also of walks over finished values: 200 levels of ours are 600 of Python's stack, which has 1,000."""
    text_bytes: int = 64 << 20
    line_bytes: int = 4 << 10
    name_chars: int = 1 << 10
    name_dots: int = 64
    foreign_names: int = 10_000
    """Different names that are not on the allow-list: manifests and inspections list them all."""
    long_bytes: int = 1 << 10
    digits: int = 4_300
    dims: int = 64


DEFAULT_LIMITS = PickleLimits()


_SETTINGS = {
    "RESHARD_PICKLE_STREAM_BYTES": "stream_bytes",
    "RESHARD_PICKLE_OPCODES": "opcodes",
    "RESHARD_PICKLE_NODE_BYTES": "node_bytes",
}
"""The bounds that decide time and memory; the others are as generous as a reader's own safety allows."""


def configured_limits(environ: Mapping[str, str] = os.environ) -> PickleLimits:
    """The bounds that the environment sets, in whole numbers; probes and engine processes inherit them.

    Raises:
        RequestError: `request.invalid` for a value that is no positive number.
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
