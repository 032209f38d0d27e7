"""Colours of the terminal: only where there is one that has them, and never under `NO_COLOR` or `TERM=dumb`.

Source: no-color.org, and ECMA-48 (SGR) for the codes.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import TextIO

_RESET = "\x1b[0m"


class Style(StrEnum):
    """Styles by their meaning. Each is readable on a dark and on a light background, and none stands for a word."""

    HEADING = "\x1b[1m"
    FAINT = "\x1b[2m"
    ERROR = "\x1b[1;31m"
    WARNING = "\x1b[33m"
    GOOD = "\x1b[32m"
    BUSY = "\x1b[36m"


def has_colours(stream: TextIO) -> bool:
    """True if a stream is a terminal that shows colours and the user has not switched them off."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def painted(text: str, style: Style | None, stream: TextIO) -> str:
    """The text in a style, or the text alone where the stream has no colours."""
    return f"{style.value}{text}{_RESET}" if style is not None and text and has_colours(stream) else text


def painted_on_stdout(text: str, style: Style | None) -> str:
    """The text in a style if stdout has colours."""
    return painted(text, style, sys.stdout)


def painted_on_stderr(text: str, style: Style | None) -> str:
    """The text in a style if stderr has colours."""
    return painted(text, style, sys.stderr)


def complain(code: str, message: str, fix: str) -> None:
    """Write an error and what the user can do to stderr."""
    sys.stderr.write(f"{painted_on_stderr('error:', Style.ERROR)} {code}: {message}\n")
    if fix:
        sys.stderr.write(f"{painted_on_stderr('fix:', Style.HEADING)} {fix}\n")


def warn(text: str) -> None:
    """Write a warning to stderr."""
    sys.stderr.write(f"{painted_on_stderr('warning:', Style.WARNING)} {text}\n")
