"""The progress of a local conversion on stderr."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.cli import bars

if TYPE_CHECKING:
    from reshard.models import Progress


@contextmanager
def progress_shown(*, quiet: bool) -> Generator[Callable[[Progress], None]]:
    """A function that shows progress for as long as the context lasts."""
    with bars.shown(quiet=quiet) as show:

        def show_phase(progress: Progress) -> None:
            show(progress.phase, progress)

        yield show_phase
