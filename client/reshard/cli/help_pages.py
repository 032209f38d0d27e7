"""Help of commands: plain text in sections, one style at every level, and no option is ever cut off.

typer's own help needs rich, whose import takes longer than the rest of `--help`, and cuts long options at 80 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from reshard.cli.colours import Style, painted_on_stdout
from reshard.cli.examples import examples_of
from reshard.option import Section

SOURCE = Section.SOURCE
TARGET = Section.TARGET
LAYOUT = Section.LAYOUT
WORLD = "Target layout"
ADAPTERS = Section.ADAPTERS
PICTURE = "Picture"
COMPARISON = "Comparison"
CHECKING = Section.CHECKING
RESOURCES = Section.RESOURCES
JOB = "Job"
TENANT = "Tenant"
SERVICE = "Service"
GENERAL = "General"
_ORDER = (
    *(
        "Options",
        SOURCE,
        TARGET,
        LAYOUT,
        WORLD,
        ADAPTERS,
        PICTURE,
        COMPARISON,
        CHECKING,
        RESOURCES,
        JOB,
        TENANT,
        SERVICE,
    ),
)
HERE = "Checkpoints, on this machine"
SCRIPTS = "In place of DeepSpeed's scripts"
REMOTE = "With a service (RESHARD_URL, RESHARD_TOKEN)"
OPERATION = "To run a service"
_WIDEST = 28
"""Longest name of an option beside which its text begins; the text of a longer one begins below it."""
_LONGEST_LIST = 56
MOST_COLUMNS = 120


class HelpedCommand(TyperCommand):
    """A command with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text, examples, arguments, and options by section."""
        parameters: list[Any] = [p for p in self.get_params(ctx) if not getattr(p, "hidden", False)]
        arguments = [p for p in parameters if p.param_type_name == "argument"]
        words = [_named(p) if p.required else f"[{_named(p)}]" for p in arguments]
        _begin(self, ctx, formatter, " ".join(["[OPTIONS]", *words]))
        _section(formatter, "Arguments", [(_named(p), p.help or "") for p in arguments])
        for heading, found in _by_section(parameters):
            _section(formatter, heading, [_option_row(p) for p in found])


_MEANT = {
    "ls": ("list",),
    "rm": ("remove", "revoke"),
    "delete": ("remove", "revoke"),
    "add": ("create",),
    "inspect": ("show",),
    "describe": ("show",),
    "get": ("show",),
    "status": ("show",),
    "stop": ("cancel",),
    "kill": ("cancel",),
}
"""Names that people type, and the commands that they mean in groups without a command of that name."""


class HelpedGroup(TyperGroup):
    """A group of commands with our help, which takes the names that other programs have for its commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the first word."""
        if args and args[0] not in self.commands:
            args = [next((name for name in _MEANT.get(args[0], ()) if name in self.commands), args[0]), *args[1:]]
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text, examples, commands by section, and options."""
        _begin(self, ctx, formatter, "[OPTIONS] COMMAND [ARGS]...")
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = _panel(command) or "Commands"
                sections.setdefault(heading, []).append((name, first_paragraph(command.help)))
        for heading, rows in sections.items():
            _section(formatter, heading, rows)
        options = [p for p in self.get_params(ctx) if not getattr(p, "hidden", False)]
        _section(formatter, GENERAL, [_option_row(p) for p in options])


class Commands(typer.Typer):
    """A typer app whose commands have our help."""

    def __init__(self, **settings: Any) -> None:
        """Make the app as typer does."""
        names = {"help_option_names": ["-h", "--help"], "max_content_width": MOST_COLUMNS}
        own: dict[str, Any] = {"cls": HelpedGroup, "rich_markup_mode": None, "context_settings": names}
        super().__init__(**own | settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Register a command with our help."""
        own: dict[str, Any] = {"cls": HelpedCommand}
        return super().command(name, **own | settings)


def first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((text or "").partition("\n\n")[0].split())


def _begin(command: Any, ctx: Any, formatter: Any, usage: str) -> None:
    formatter.write_usage(ctx.command_path, usage, prefix=painted_on_stdout("Usage:", Style.HEADING) + " ")
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(cleandoc(command.help or ""))
    words = ctx.command_path.partition(" ")[2]
    if found := examples_of(words):
        formatter.write_paragraph()
        formatter.write(painted_on_stdout("Examples:", Style.HEADING) + "\n")
        for remark, line in found:
            formatter.write(painted_on_stdout(f"  # {remark}", Style.FAINT) + f"\n  {line}\n")


def _section(formatter: Any, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        formatter.write_paragraph()
        formatter.write(painted_on_stdout(f"{heading}:", Style.HEADING) + "\n")
        with formatter.indentation():
            formatter.write_dl(rows, col_max=_WIDEST)


def _by_section(parameters: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Options by section: in our order, then sections of formats of other packages, then the general ones."""
    sections: dict[str, list[Any]] = {}
    for parameter in parameters:
        if parameter.param_type_name == "option":
            heading = GENERAL if parameter.name == "help" else _panel(parameter) or "Options"
            sections.setdefault(heading, []).append(parameter)
    last = [heading for heading in sections if heading not in (*_ORDER, GENERAL)]
    for heading in (*_ORDER, *last, GENERAL):
        if heading in sections:
            yield heading, sections[heading]


def _panel(thing: Any) -> str | None:
    # typer marks "not given" by an object of its own.
    panel = getattr(thing, "rich_help_panel", None)
    return panel if isinstance(panel, str) else None


def _named(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _option_row(option: Any) -> tuple[str, str]:
    """The name of an option with the word for its value, and its text with default and repetition."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names = f"{names}, {', '.join(option.secondary_opts)}"
    text = option.help or ""
    if not option.is_flag:
        word = _value_word(option)
        if len(word) > _LONGEST_LIST and "|" in word:
            text = f"{text} One of {', '.join(word.split('|'))}."
            word = option.name.upper().replace("_", "-")
        names = f"{names} {word}"
    facts = ["required"] if option.required else []
    default = option.default
    if default not in (None, False, (), []) and default is not True:
        facts.append(f"default: {getattr(default, 'value', default)}")
    return names, f"{text} [{', '.join(facts)}]" if facts else text


_WORDS: tuple[tuple[type, str], ...] = ((int, "N"), (float, "X"), (Path, "PATH"))


def _value_word(option: Any) -> str:
    """The word in upper case for an option's value, or its choices."""
    if option.metavar:
        return option.metavar
    # Older versions of typer have click's type, newer ones the annotation.
    kind = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    for wanted, word in _WORDS:
        if isinstance(kind, type) and issubclass(kind, wanted):
            return word
    return "TEXT"
