"""Progress on stderr, of local conversions and of a service's jobs: a bar on a terminal, else single lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.sizes import format_duration, format_size

if TYPE_CHECKING:
    from reshard.models import Progress

Show = Callable[[str, "Progress | None"], None]
"""Shows a phase, or the state of a job, and how far it is."""
_LINE_EVERY_S = 10.0
_FACTS_COLUMNS = 62
"""Columns that the facts beside a bar take at most, with the name of the phase."""
_OFF_VARIABLES = ("RESHARD_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


@contextmanager
def shown(*, quiet: bool) -> Generator[Show]:
    """A function that shows progress for as long as the context lasts."""
    if quiet or any(os.environ.get(name) for name in _OFF_VARIABLES):
        yield _nothing
    elif sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb":
        with _bar() as show:
            yield show
    else:
        yield _Lines().show


@contextmanager
def progress_shown(*, quiet: bool) -> Generator[Callable[[Progress], None]]:
    """A function that shows the progress of a local conversion for as long as the context lasts."""
    with shown(quiet=quiet) as show:

        def show_phase(progress: Progress) -> None:
            show(progress.phase, progress)

        yield show_phase


def line_of(phase: str, progress: Progress | None) -> str:
    """Progress as one line: phase, share, bytes, rate, time left, and the bytes that a resumed run kept."""
    facts = facts_of(progress)
    return f"{phase} {facts}" if facts else phase


def facts_of(progress: Progress | None) -> str:
    """The share of the work that is done, bytes, rate, time left and kept bytes; empty if the size is not known."""
    if progress is None or not progress.bytes_total:
        return ""
    written = f"{format_size(progress.bytes_done)} of {format_size(progress.bytes_total)}"
    if progress.phase in {"verifying", "committing"}:
        # The bytes of commit files come last, so a share of all bytes says nothing about these phases.
        return f"{written} written"
    share = 100 * progress.bytes_done // progress.bytes_total
    parts = [f"{share}%", written]
    if progress.rate_bytes_per_s and progress.phase == "running":
        parts.append(f"{format_size(progress.rate_bytes_per_s)}/s")
        parts += [] if progress.eta_s is None else [f"eta {format_duration(progress.eta_s)}"]
    if progress.bytes_kept:
        parts.append(f"{format_size(progress.bytes_kept)} kept")
    return "  ".join(parts)


def _nothing(_phase: str, _progress: Progress | None) -> None:
    return


@contextmanager
def _bar() -> Generator[Show]:
    # The import of rich.progress takes 60 ms, so it happens only if a bar is shown.
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    width = max(4, min(40, console.width - _FACTS_COLUMNS))
    # Facts are never cut off: on a narrow terminal they take a second line.
    facts = TextColumn("{task.fields[facts]}", table_column=Column(overflow="fold"))
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=width), facts)
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("planning", total=None, facts="")

        def show(phase: str, progress: Progress | None) -> None:
            # The rate is the run's own: rich would count bytes of an earlier attempt as written in the first moment.
            if progress is None or not progress.bytes_total:
                bar.update(task, description=phase)
                return
            done, total = progress.bytes_done, progress.bytes_total
            bar.update(task, description=phase, completed=done, total=total, facts=facts_of(progress))

        yield show


class _Lines:
    """Writes one line when the phase changes, and one every ten seconds."""

    def __init__(self) -> None:
        self._written_at = 0.0
        self._phase = ""

    def show(self, phase: str, progress: Progress | None) -> None:
        """Write a line if it is time."""
        now = time.monotonic()
        if phase == self._phase and now - self._written_at < _LINE_EVERY_S:
            return
        self._phase, self._written_at = phase, now
        sys.stderr.write(line_of(phase, progress) + "\n")
        sys.stderr.flush()
