"""Output of the demo: steps with the seconds since its start, lines, and commands with what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

_BEGAN = time.monotonic()
_INDENT = "  "


def elapsed_s() -> float:
    """Seconds since the demo began."""
    return time.monotonic() - _BEGAN


def say(text: str = "") -> None:
    """Print one line, at once; a terminal that is narrower gets it in several."""
    for line in text.splitlines() or [""]:
        sys.stdout.write("\n".join(fitting(line)) + "\n")
    sys.stdout.flush()


def step(text: str) -> None:
    """Head a part of the demo."""
    head = f"[{elapsed_s():3.0f} s] {text}"
    say(f"\n{_bold(head)}")


def run(name: str, *arguments: str, lines: int = 100) -> None:
    """Run a program of this environment, and show the command and so many lines of its output.

    Raises:
        RuntimeError: It failed.
    """
    say(f"{_INDENT}$ {name} {' '.join(arguments)}")
    with subprocess.Popen(
        [program(name), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is the demo's
    ) as process:
        try:
            count = 0
            for count, line in enumerate(process.stdout or (), start=1):
                if count <= lines:
                    say(f"{_INDENT}{line.rstrip()}")
            if count > lines:
                say(f"{_INDENT}  ({count - lines} more lines)")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"`{name} {arguments[0]}` ended with status {process.returncode}")


def program(name: str) -> str:
    """The path of a program of this Python's environment, or of PATH.

    Raises:
        RuntimeError: There is none.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: run `make setup`")
    return found


def shown(path: Path) -> str:
    """A path as a user in this directory types it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns of numbers, aligned on the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        say(_INDENT + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def fitting(line: str) -> list[str]:
    """A line as the lines that a terminal has room for. A command stays one, so that it can be copied."""
    words = line.lstrip()
    indent = line[: len(line) - len(words)]
    if not sys.stdout.isatty() or words.startswith(("$", ".venv")):
        return [line]
    columns = shutil.get_terminal_size().columns
    more = indent + "    "
    return textwrap.wrap(words, columns, initial_indent=indent, subsequent_indent=more, break_long_words=False) or [""]


def _bold(text: str) -> str:
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") in {None, "", "dumb"}
    return text if plain else f"\033[1m{text}\033[0m"
