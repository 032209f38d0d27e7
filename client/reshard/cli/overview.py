"""The help of `reshard` itself: its commands as plain text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Overview(TyperGroup):
    """A group of commands that prints its help without rich, whose import takes longer than all the rest of `--help`.

    The help of each command is still drawn by typer with rich: its panels keep thirty options readable.
    """

    def __init__(self, **settings: Any) -> None:
        """Make the group as typer does, without markup."""
        super().__init__(**settings)
        self.rich_markup_mode = None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List every command with the first paragraph of its help; click would cut it at the width of the terminal."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(n, _first_paragraph(c.help)) for n, c in commands if c and not c.hidden])


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())
