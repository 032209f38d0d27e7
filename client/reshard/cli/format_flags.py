"""Flags for the options of formats of other packages, one for each field of their options."""

from __future__ import annotations

import copy
import inspect
import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reshard.cli.choosing import choice
from reshard.cli.help_pages import HelpedCommand

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_GATHERED = "options_of_formats"


class ConversionCommand(HelpedCommand):
    """A command with the flags of `ConversionFlags` and those of formats of other packages.

    The formats are looked up only when this command runs or shows its help, because reading the metadata of packages
    takes longer than the start of another command.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's own parameters, then the flags of formats."""
        from reshard.installed_formats import installed_formats, target_names

        own = super().get_params(ctx)
        if not installed_formats():
            return own
        own = [copy.copy(p) for p in own]
        for parameter in own:
            if parameter.name == "to":
                parameter.metavar = "|".join(target_names())
        return [*own, *_flags()]

    def invoke(self, ctx: Any) -> Any:
        """Run the command with the values of the formats' flags collected in `options_of_formats`."""
        said = {f.name: ctx.params.pop(f.name, None) for f in _flags()}
        if given := {name: value for name, value in said.items() if value is not None}:
            ctx.params[_GATHERED] = json.dumps(given)
        return super().invoke(ctx)


def _flags() -> list[Any]:
    """One option of the command line for each option of a format."""
    from reshard.installed_formats import installed_formats

    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(f.name, name, info)
        )
        for f in installed_formats()
        if f.options is not None
        for name, info in f.options.model_fields.items()
    ]

    def command(**_: Any) -> None:
        """Carries the parameters; it is never called."""

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return [p for p in typer.main.get_command(app).params if p.name != "help"] if parameters else []


def _annotation(format_name: str, name: str, info: FieldInfo) -> Any:
    """The type and the option of one field; None stands for its default."""
    from reshard.installed_formats import plain_kind

    kind = plain_kind(info)
    bounds = {word: getattr(m, bound) for m in info.metadata for word, bound in _BOUNDS if hasattr(m, bound)}
    flag = f"--{name.replace('_', '-')}"
    declared = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
    shown: dict[str, Any] = {"help": info.description or "", "rich_help_panel": f"Format {format_name}"}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return Annotated[kind | None, choice(kind, flag, **shown)]
    option = typer.Option(declared, **shown, **(bounds if kind in (int, float) else {}))
    return Annotated[kind | None, option]


_BOUNDS = (("min", "ge"), ("max", "le"))
