"""Sizes, percentages and times as texts: `5GB` is decimal, `1GiB` is binary."""

from __future__ import annotations

import re

from reshard.errors import RequestError, counted, format_size, printable

__all__ = ["counted", "format_duration", "format_size", "parse_percent", "parse_size", "size_of"]
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")
_SIZE = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?\s*([a-z]{0,3})")


def parse_size(text: str) -> int:
    """The number of bytes of a text such as `5GB`, `1.5GiB` or `4096`.

    Raises:
        RequestError: `request.invalid`.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[3] not in _UNITS:
        raise RequestError(
            "request.invalid", f"{printable(text)!r} is not a size", fix="write 5GB (decimal) or 1GiB (binary)"
        )
    scale = _UNITS[match[3]]
    fraction = match[2] or ""
    return int(match[1]) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)


def size_of(size: int | str) -> int:
    """A size of a function's caller: a number of bytes, or a text as for `parse_size`.

    Raises:
        RequestError: `request.invalid`.
    """
    return size if isinstance(size, int) else parse_size(size)


def parse_percent(text: str) -> float:
    """The fraction of a text such as `2%`, in `(0, 1]`.

    Raises:
        RequestError: `request.invalid`.
    """
    match = _PERCENT.fullmatch(text.strip())
    fraction = 0.0 if match is None else float(match[1]) / 100
    if not 0 < fraction <= 1:
        raise RequestError(
            "request.invalid",
            f"{printable(text)!r} is not a percentage above 0 and at most 100",
            fix="write 2% for a fiftieth",
        )
    return fraction


def format_duration(seconds: float) -> str:
    """A time in its two largest units: `42s`, `3m05s`, `2h07m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole // 60 % 60:02d}m"
