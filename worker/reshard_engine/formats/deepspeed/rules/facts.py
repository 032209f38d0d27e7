"""Conversions of metadata from checkpoints and users to the types that it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from reshard.errors import SourceError

MAX_ITEMS = 1 << 18


def as_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """A mapping; None is an empty one.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SourceError("rules.invalid", f"{what} is no mapping")
    return cast("Mapping[str, Any]", value)


def as_items(value: Any, what: str) -> Sequence[Any]:
    """A list or tuple; None is an empty one.

    Raises:
        SourceError: `rules.invalid` for anything else, and for more than `MAX_ITEMS` items.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise SourceError("rules.invalid", f"{what} is no list")
    found = cast("Sequence[Any]", value)
    if len(found) > MAX_ITEMS:
        raise SourceError("rules.invalid", f"{what} has more than {MAX_ITEMS} items")
    return found


def as_texts(value: Any, what: str) -> list[str]:
    """A list of texts, or the keys of a mapping.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    items = list(as_mapping(value, what)) if isinstance(value, Mapping) else list(as_items(value, what))
    if not all(isinstance(i, str) for i in items):
        raise SourceError("rules.invalid", f"{what} holds something that is no text")
    return items


def as_count(value: Any, what: str) -> int:
    """A positive integer.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    if type(value) is not int or not 0 < value < 1 << 48:
        raise SourceError("rules.invalid", f"{what} is no positive number")
    return value


def as_number(value: Any, what: str) -> float:
    """A number.

    Raises:
        SourceError: `rules.invalid` for anything else, and for a NaN.
    """
    if (type(value) is not int and type(value) is not float) or value != value:  # noqa: PLR0124 - a nan
        raise SourceError("rules.invalid", f"{what} is no number")
    return float(value)


def as_lengths(value: Any, what: str, *, max_items: int = 16, least: int = 0) -> tuple[int, ...]:
    """A list of integers that are lengths, offsets or strides.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    items = as_items(value, what) if value is not None else (None,)
    if len(items) > max_items or not all(type(n) is int and least <= n < 1 << 48 for n in items):
        raise SourceError("rules.invalid", f"{what} is no list of lengths")
    return tuple(items)
