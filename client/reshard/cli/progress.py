"""The progress of a local conversion on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.cli.sizes import format_size

if TYPE_CHECKING:
    from reshard.models import Progress

_LINE_EVERY_S = 10.0
_OFF_VARIABLES = ("RESHARD_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


def _shows_bar() -> bool:
    return sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


@contextmanager
def progress_shown(*, quiet: bool) -> Generator[Callable[[Progress], None]]:
    """A function that shows progress for as long as the context lasts."""
    if quiet or any(os.environ.get(name) for name in _OFF_VARIABLES):
        yield _nothing
    elif _shows_bar():
        with _bar() as show:
            yield show
    else:
        yield _Lines().show


def _nothing(_progress: Progress) -> None:
    return


@contextmanager
def _bar() -> Generator[Callable[[Progress], None]]:
    # The import of rich.progress takes 60 ms, so it happens only if a bar is shown.
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn

    from reshard.cli.bars import SpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"))
    with Bar(*columns, SpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None, size="")

        def show(progress: Progress) -> None:
            size = (
                f"{format_size(progress.bytes_done)} of {format_size(progress.bytes_total)}"
                if progress.bytes_total
                else ""
            )
            total = progress.bytes_total or None
            bar.update(task, description=progress.phase, completed=progress.bytes_done, total=total, size=size)

        yield show


class _Lines:
    """Writes one line when the phase changes, and one every ten seconds."""

    def __init__(self) -> None:
        self._written_at = 0.0
        self._phase = ""

    def show(self, progress: Progress) -> None:
        """Write a line if it is time."""
        now = time.monotonic()
        if progress.phase == self._phase and now - self._written_at < _LINE_EVERY_S:
            return
        self._phase, self._written_at = progress.phase, now
        sys.stderr.write(line_of(progress) + "\n")
        sys.stderr.flush()


def line_of(progress: Progress) -> str:
    """Progress as one line: phase, share, bytes, rate, time left."""
    if not progress.bytes_total:
        return progress.phase
    share = 100 * progress.bytes_done // progress.bytes_total
    line = f"{progress.phase} {share}% {format_size(progress.bytes_done)}/{format_size(progress.bytes_total)}"
    if progress.rate_bytes_per_s and progress.phase == "running":
        line += f" {format_size(progress.rate_bytes_per_s)}/s"
        line += f" eta {progress.eta_s:.0f}s" if progress.eta_s is not None else ""
    return line
