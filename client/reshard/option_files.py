"""The files that options name and whose texts go into a request: rules, and orders of parameters."""

from __future__ import annotations

from pathlib import Path

from reshard.choices import ParamOrder
from reshard.errors import RequestError, printable

_MAX_RULES_BYTES = 1 << 16
_MAX_ORDER_BYTES = 1 << 26


def read_rules(path: Path) -> str:
    """Read the text of a rules file.

    Raises:
        RequestError: `request.invalid` if the file cannot be read, is not text or is too large.
    """
    return _read_text(path, "--rules", _MAX_RULES_BYTES, fix="name a YAML file that you may read: docs/rules.md")


def read_order(order: str | None) -> str | tuple[str, ...] | None:
    """The order of parameters: one of the words for it, or the names in a file, one a line.

    Raises:
        RequestError: `request.invalid` if the file cannot be read, is not text or is too large.
    """
    if order is None or order in tuple(ParamOrder):
        return order
    text = _read_text(Path(order), "--param-order", _MAX_ORDER_BYTES, fix="name a file with a parameter's name a line")
    return tuple(line for line in map(str.strip, text.splitlines()) if line)


def _read_text(path: Path, flag: str, limit_bytes: int, *, fix: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
        text = data.decode()
    except OSError as error:
        said = f"{flag} {printable(str(path))}: {error.strerror}"
        raise RequestError("request.invalid", said, fix=fix) from None
    except UnicodeDecodeError:
        raise RequestError("request.invalid", f"{flag} {printable(str(path))} is not text", fix=fix) from None
    if len(data) > limit_bytes:
        raise RequestError(
            "request.invalid",
            f"{flag} {printable(str(path))} has more than {limit_bytes} bytes",
            fix=f"give {flag} a file of at most {limit_bytes} bytes",
        )
    return text
