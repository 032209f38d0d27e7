"""The progress of a function or command: a callback, a bar in a terminal or in a notebook, or single lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from reshard.errors import format_size
from reshard.option import format_duration

if TYPE_CHECKING:
    from reshard.models.jobs import Progress


# Progress on stderr, of local conversions and of a service's jobs: a bar on a terminal, else single lines.

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
        with _progress_bar() as show:
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
def _progress_bar() -> Generator[Show]:
    # The import of rich.progress takes 60 ms, so it happens only if a bar is shown.
    from rich import console as screen, progress as bars, table

    console = screen.Console(stderr=True)
    width = max(4, min(40, console.width - _FACTS_COLUMNS))
    # Facts are never cut off: on a narrow terminal they take a second line.
    facts = bars.TextColumn("{task.fields[facts]}", table_column=table.Column(overflow="fold"))
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=width), facts)
    with bars.Progress(*columns, console=console, transient=True) as bar:
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


_REDRAWN_EVERY_S = 0.2


@contextmanager
def progress_of(
    on_progress: Callable[[Progress], None] | None,
    bar: bool | None,  # noqa: FBT001 - None is a third value
) -> Generator[Callable[[Progress], None] | None]:
    """The function that is told the progress for as long as the context lasts; None if nobody wants to know.

    Args:
        on_progress: The caller's own function.
        bar: True for a bar, False for none; None for a bar in a terminal or a notebook, unless the caller has a
            function of its own, or a variable forbids bars.
    """
    wanted = bar if bar is not None else on_progress is None and _has_screen()
    if not wanted:
        yield on_progress
        return
    with _bar() as show:
        yield show if on_progress is None else _both(show, on_progress)


def _both(first: Callable[[Progress], None], second: Callable[[Progress], None]) -> Callable[[Progress], None]:
    def told(progress: Progress) -> None:
        first(progress)
        second(progress)

    return told


def _has_screen() -> bool:
    if any(os.environ.get(name) for name in _OFF_VARIABLES):
        return False
    return in_notebook() or sys.stderr.isatty()


def in_notebook() -> bool:
    """True in a kernel of Jupyter, in whatever front end. IPython is not imported for that."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def _bar() -> Generator[Callable[[Progress], None]]:
    if in_notebook():
        shown = _NotebookBar()
        try:
            yield shown.show
        finally:
            shown.close()
        return
    with progress_shown(quiet=False) as show:
        yield show


class _NotebookBar:
    """A bar of plain HTML, which every front end shows, also in a saved notebook, and without widgets."""

    def __init__(self) -> None:
        from IPython import display  # pyright: ignore[reportMissingImports,reportUnknownVariableType]

        self._html: Any = display.HTML  # pyright: ignore[reportUnknownMemberType]
        self._handle: Any = display.display(self._html("planning"), display_id=True)  # pyright: ignore[reportUnknownMemberType]
        self._drawn_at = 0.0
        self._last = ""

    def show(self, progress: Progress) -> None:
        """Draw the bar again, a few times a second."""
        self._last = (
            f'<progress max="{max(1, progress.bytes_total)}" value="{progress.bytes_done}" '
            f'style="width:20em;vertical-align:middle"></progress> {escape(_words(progress))}'
        )
        if time.monotonic() - self._drawn_at >= _REDRAWN_EVERY_S:
            self._drawn_at = time.monotonic()
            self._handle.update(self._html(self._last))

    def close(self) -> None:
        """Take the bar away: the result says what was done."""
        self._handle.update(self._html(""))


def _words(progress: Progress) -> str:
    words = [progress.phase]
    if progress.bytes_total:
        words.append(f"{format_size(progress.bytes_done)} of {format_size(progress.bytes_total)}")
    if progress.rate_bytes_per_s:
        words.append(f"{format_size(progress.rate_bytes_per_s)}/s")
    if progress.eta_s is not None:
        words.append(f"{progress.eta_s:.0f} s left")
    return ", ".join(words)
