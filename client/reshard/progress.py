"""The progress of a function: a callback of the caller, a bar in a terminal, or a bar in a notebook."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from reshard.errors import format_size
from reshard.progress_bars import progress_shown

if TYPE_CHECKING:
    from reshard.models import Progress

_REDRAWN_EVERY_S = 0.2
_OFF_VARIABLES = ("RESHARD_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


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
