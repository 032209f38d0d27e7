"""What tests measured, shown at the end of a run, whether they failed or not."""

from __future__ import annotations

_LINES: list[str] = []


def say(*lines: str) -> None:
    """Show lines in the summary of this run."""
    _LINES.extend(lines)


def said() -> list[str]:
    """Everything so far."""
    return list(_LINES)
