"""Parses JSON from checkpoints, within bounds, and refuses JSON that parsers read differently."""

from __future__ import annotations

import json
from typing import Any

from reshard.errors import SourceError, printable

MAX_STRUCTURE = 2_000_000
"""Largest number of commas and opening brackets: about 250,000 tensors, and 64 bytes of memory each at worst."""


def parse_json(data: bytes, *, code: str, what: str) -> Any:
    """Parse a JSON document in UTF-8.

    Duplicate keys, lone surrogates, NaN and infinities are refused: parsers disagree about them.

    Args:
        data: The document; the caller bounds its length.
        code: Code of the error for anything that is not such a document.
        what: The name of the document in errors.

    Raises:
        SourceError: `code`, or `checkpoint.too_large` if it would take too much memory.
    """
    structure = data.count(b",") + data.count(b"[") + data.count(b"{")
    if structure > MAX_STRUCTURE:
        raise SourceError(
            "checkpoint.too_large",
            f"{what} has {structure} parts, the limit is {MAX_STRUCTURE}",
            fix="copy the file again; if it is right, please report it with its size",
        )

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            name = next(k for k, _ in items if k in seen or seen.add(k))
            raise SourceError(code, f"{what} has the key {printable(name)!r} twice")
        return found

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise SourceError(code, f"{what} is not valid JSON: {printable(str(error))}") from None
    return value
