"""The help of `reshard` itself: its commands, as plain text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Overview(TyperGroup):
    """The app's commands. Typer draws help with rich, whose import takes longer than everything else that this needs.

    The help of each command stays typer's: its panels are what keeps thirty options readable.
    """

    def __init__(self, **settings: Any) -> None:
        """As typer makes it, without markup."""
        super().__init__(**settings)
        self.rich_markup_mode = None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Every command with the first paragraph of its help: click cuts it where a line of the terminal ends."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(n, _first_paragraph(c.help)) for n, c in commands if c and not c.hidden])


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())
