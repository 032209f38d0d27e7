"""Columns of progress bars, in binary units. Imported only to draw a bar, because it needs rich."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text

from reshard.errors import format_size


class SpeedColumn(ProgressColumn):
    """Bytes a second in binary units; rich's own column uses decimal ones."""

    def render(self, task: Task) -> Text:
        """The speed of the last seconds, or the mean speed of a finished task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_size(speed)}/s", style="progress.data.speed")
