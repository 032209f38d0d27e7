"""Columns of progress bars in the units of every other line. Imports rich: only where a bar is drawn."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text

from reshard.errors import format_size


class SpeedColumn(ProgressColumn):
    """Bytes a second in binary units; rich's own column is decimal."""

    def render(self, task: Task) -> Text:
        """The speed of the last seconds, or of the whole when it is over."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_size(speed)}/s", style="progress.data.speed")
