"""The flags of a conversion, defined once for every command that takes them.

`takes_conversion` gives a command with a parameter `flags: ConversionFlags` all these options. `OptionsCommand` makes
them when the command runs or shows its help: `reshard --help` needs none, and loads no models.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from reshard.choices import TargetFormat
from reshard.cli.help_pages import TARGET, HelpedCommand
from reshard.errors import RequestError, printable

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.declared import Declared
    from reshard.models.jobs import ConvertRequest, PlanSummary
    from reshard.options import SourceSpec
    from reshard.targets import Target


# Options with a closed list of values: they take what people type, and suggest the value that was meant.

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

_WITH_FRAMEWORKS = {
    name: f"--to dcp --framework {name} (FSDP), or --to zero --dp N (DeepSpeed)"
    for name in ("accelerate", "trainer", "lightning")
}
TARGET_FIXES: Mapping[str, str] = {
    **_WITH_FRAMEWORKS,
    **{f"zero{stage}": f"--to zero --zero-stage {stage} --dp N" for stage in range(4)},
    "gguf": "--to safetensors --model-files DIR, then llama.cpp's convert_hf_to_gguf.py (DIR: config and tokenizer)",
    "torchtitan": "--to dcp --framework torchtitan",
    **{name: f"--to fsdp_ranks --rank-framework {name} --dp N" for name in ("verl", "skyrl")},
    "megatron-deepspeed": "--to zero --dp N, or --to universal",
}
"""Names that people type for a target and that need more words, and these words."""


def choice(kind: type[ChoiceT], *names: str, also: Mapping[str, str] | None = None, **settings: Any) -> Any:
    """A typer option whose values are the members of a list.

    Args:
        kind: The list.
        names: Names of the option, if it has another than its parameter.
        also: Other words for values, and the values.
        settings: Other settings of `typer.Option`.
    """
    values = tuple(member.value for member in kind)
    parser = _parser(kind, values, also or {})
    completed = {"autocompletion": _completion(values)}
    return typer.Option(*names, parser=parser, metavar="|".join(values), **completed, **settings)


def chosen(text: str, values: Iterable[str], also: Mapping[str, str]) -> str:
    """The value that a text names, in any case of letters, or by another of its names.

    Raises:
        BadParameter: None of the values; the message names the one that is most like it.
    """
    listed = tuple(values)
    by_name = {value.lower(): value for value in listed} | {k: v for k, v in also.items() if v in listed}
    word = text.strip().lower()
    if (found := by_name.get(word)) is not None:
        return found
    close = get_close_matches(word, by_name, n=1, cutoff=0.6)
    meant = f"; did you mean {by_name[close[0]]}?" if close else ""
    raise typer.BadParameter(f"{printable(text, max_chars=64)!r} is not one of {', '.join(listed)}{meant}")


def _parser(kind: type[ChoiceT], values: tuple[str, ...], also: Mapping[str, str]) -> Callable[[str], ChoiceT]:
    def parse(text: str) -> ChoiceT:
        return kind(chosen(text, values, also))

    return parse


def _completion(values: tuple[str, ...]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


_OF_FORMATS = "options_of_formats"
_GIVEN: ContextVar[Mapping[str, Any]] = ContextVar("_GIVEN")
"""The flags of the command that runs, by their names."""


def target_name(text: str) -> str:
    """Check the name of a target and return it.

    Raises:
        BadParameter: No installed format writes this target.
        RequestError: `request.invalid`: several words are needed to name it, which the fix says.
    """
    if text in tuple(TargetFormat):
        return text
    return target_among(tuple(_known_targets()), text)


def target_among(names: Sequence[str], text: str) -> str:
    """The one of these targets that a text names; says so if the text is another name of it.

    Raises:
        BadParameter: It names none of them.
        RequestError: `request.invalid`: several words are needed to name it, which the fix says.
    """
    word = text.strip().lower()
    if word not in names and (fix := TARGET_FIXES.get(word)) is not None:
        raise RequestError("request.invalid", f"--to {word} is not a target", fix=fix)
    value = chosen(text, names, {other: t.name for t in _known_targets().values() for other in t.also})
    if value != text.strip().lower():
        sys.stderr.write(f"--to {printable(text, max_chars=64)}: taken as {value}\n")
    return value


def _complete_target(incomplete: str) -> list[str]:
    return [name for name in _known_targets() if name.startswith(incomplete)]


_ToFlag = Annotated[
    str,
    typer.Option(
        "--to",
        parser=target_name,
        metavar="FORMAT",
        autocompletion=_complete_target,
        help="Format to write, one of those below.",
        rich_help_panel=TARGET,
    ),
]
_OfFormatsFlag = Annotated[str | None, typer.Option("--options-of-formats", hidden=True)]


class CheckpointFlags:
    """The options that say which checkpoint of a place is read, and how where its files leave several ways."""

    def __init__(self, **given: Any) -> None:
        """Take the values by the names of the flags; what is left out has its default."""
        self._given = given

    @classmethod
    def options(cls) -> dict[str, Declared]:
        """The declared options among the flags, by their names."""
        return {name: option for name, option in _declared().options_of_source().items() if name != "profile"}

    @property
    def tag(self) -> str | None:
        """The checkpoint's tag."""
        return self._given.get("tag")

    def given(self) -> dict[str, Any]:
        """The flags that were given, as keyword arguments."""
        return {name: value for name, value in self._given.items() if value is not None}

    def values(self) -> dict[str, Any]:
        """The values of the fields whose flags were given, or have a default.

        Raises:
            RequestError: `request.invalid`.
        """
        return _models().values_of(self.options(), self.given())

    def spec(self, url: str) -> SourceSpec:
        """Make the wire model of a source.

        Raises:
            RequestError: `request.invalid`.
        """
        return _models().spec_of(url, self.given())

    def words(self) -> str:
        """The flags of the source that were given, as they are typed behind a command; empty if none was."""
        said = ((option.flag, self._given.get(name)) for name, option in _declared().options_of_source().items())
        return "".join(f" {flag} {shlex.quote(value)}" for flag, value in said if value is not None)


class EnsureFlags(CheckpointFlags):
    """The options of `ensure`: the checkpoint, and the layout that a run needs."""

    @classmethod
    def options(cls) -> dict[str, Declared]:
        """The declared options among the flags, by their names."""
        return _declared().options_of_ensure()


class CutFlags(CheckpointFlags):
    """The options of a comparison that say how tensor parallelism cut its sides."""

    @classmethod
    def options(cls) -> dict[str, Declared]:
        """The declared options among the flags, by their names."""
        return _declared().options_of_cuts()


class SourceFlags(CheckpointFlags):
    """The options of a source: its checkpoint, and the credentials to read it with."""

    @classmethod
    def options(cls) -> dict[str, Declared]:
        """The declared options among the flags, by their names."""
        return _declared().options_of_source()


class ConversionFlags(SourceFlags):
    """The options of a conversion."""

    @classmethod
    def options(cls) -> dict[str, Declared]:
        """The declared options among the flags, by their names."""
        return _declared().declared_options()

    def request(self, source: str, target: str) -> ConvertRequest:
        """Make the wire model from the flags.

        Raises:
            RequestError: `request.invalid`.
        """
        return _models().request_of(source, target, self.given(), self._given.get(_OF_FORMATS))

    def planned(self, context: typer.Context, plan: str, *places: str | None) -> ConvertRequest:
        """Read the request of a plan file, with the options of the run that were typed beside it.

        Raises:
            RequestError: `request.invalid`: the file is no plan, or what was typed would change it.
        """
        if any(place is not None for place in places):
            raise RequestError(
                "request.invalid", "SRC and DST are in the plan that --plan names", fix="leave SRC and DST out"
            )
        typed = {n: v for n, v in self._given.items() if _is_typed(context, n)}
        return _models().planned_request(plan, typed)


class LayoutFlags(ConversionFlags):
    """The options of a target that is not written: those that decide its bytes."""

    @classmethod
    def options(cls) -> dict[str, Declared]:
        """The declared options among the flags, by their names."""
        return _declared().options_of_layout()


def _declared() -> Any:
    from reshard import declared

    return declared


def _known_targets() -> dict[str, Target]:
    from reshard.installed_formats import known_targets

    return known_targets()


def _models() -> Any:
    from reshard.cli import given

    return given


class OptionsCommand(HelpedCommand):
    """A command with flags for declared options, among them those of formats of other packages.

    They are made when this command runs or shows its help, because the models and the metadata of packages take longer
    to load than another command takes to start.
    """

    _own: list[Any]
    _all: list[Any] | None = None

    @property
    def params(self) -> list[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The arguments, then the flags of our options, then the other flags of the command.

        It is one list: typer appends its own `--help` to it, and takes that away again.
        """
        if self._all is None:
            own = sorted(self._own, key=lambda p: p.param_type_name != "argument")
            count = sum(p.param_type_name == "argument" for p in own)
            self._all = [*own[:count], *self._flags(of_others=False), *own[count:]]
        return self._all

    @params.setter
    def params(self, own: list[Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._own = own

    def get_params(self, ctx: Any) -> list[Any]:
        """As `params`, with the flags of formats of other packages behind the others."""
        parameters: list[Any] = super().get_params(ctx)
        taken = _taken_by(self)
        if not any(issubclass(kind, ConversionFlags) for kind, _ in taken.values()):
            return parameters
        for parameter in parameters:
            if parameter.name == "to":
                parameter.targets = _known_targets()
        return [*parameters, *self._flags(of_others=True)]

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its flags for options are not arguments of its function."""
        own = {parameter.name for parameter in self._own}
        token = _GIVEN.set({name: ctx.params.pop(name) for name in set(ctx.params) - own})
        try:
            return super().invoke(ctx)
        finally:
            _GIVEN.reset(token)

    def _flags(self, *, of_others: bool) -> list[Any]:
        return _made(
            [
                parameter
                for kind, side in _taken_by(self).values()
                for parameter in _parameters(kind, side, of_others=of_others)
            ]
        )


class PlannedCommand(OptionsCommand):
    """A command that takes a plan file, `--plan`, in place of what it needs otherwise: SRC, DST and `--to`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Beside a plan none of them is required."""
        if any(word == "--plan" or word.startswith("--plan=") for word in args):
            for parameter in self.get_params(ctx):
                parameter.required = False
        return super().parse_args(ctx, args)


def save_plan(path: Path, request: ConvertRequest, summary: PlanSummary) -> None:
    """Write a plan to a file, for `--plan`.

    Raises:
        RequestError: `request.invalid`.
    """
    _models().plan_files.save_plan(path, request, summary)


def _is_typed(context: typer.Context, name: str) -> bool:
    """True if the user typed a flag, with whatever value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _taken_by(command: Any) -> dict[str, tuple[type[CheckpointFlags], str]]:
    """The classes of flags that the function of a command takes, by parameter, each with the letter of its side."""
    return command.callback.takes


def signed(function: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """The function, with these parameters for whoever asks for its signature, as typer does."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def _made(parameters: Sequence[inspect.Parameter]) -> list[Any]:
    """The options of the command line for parameters of a function."""

    def command(**_: Any) -> None:
        """Carries the parameters; it is never called."""

    app = typer.Typer(add_completion=False)
    app.command()(signed(command, parameters))
    return [p for p in typer.main.get_command(app).params if p.name != "help"] if parameters else []


def _parameters(kind: type[CheckpointFlags], side: str, *, of_others: bool) -> Iterator[inspect.Parameter]:
    """The parameters for a class of flags; with `of_others` those for formats that an entry point names, else ours."""
    whole = issubclass(kind, ConversionFlags)
    needs_to = whole and not of_others
    for option in kind.options().values():
        if bool(option.option.section) is of_others:
            continue
        if needs_to and option.section == TARGET:
            needs_to = False
            yield _parameter("to", _ToFlag, inspect.Parameter.empty)
        name = f"{option.name}_{side}" if side else option.name
        yield _parameter(name, _annotation(option, side), option.default)
        for former in option.former:
            yield _parameter(former, _annotation(option, former=former), None)
    if whole and not of_others:
        yield _parameter(_OF_FORMATS, _OfFormatsFlag, None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _annotation(option: Declared, side: str = "", *, former: str = "") -> Any:
    """The type and the flag of an option; `side` is the letter of one of two sources, `former` a name it had."""
    kind, flag = option.kind, option.flag
    shown: dict[str, Any] = {"help": option.help, "rich_help_panel": option.section}
    if side:
        flag, shown["help"] = f"{flag}-{side}", f"{side.upper()}: {option.help}"
    if former:
        flag, shown = f"--{former.replace('_', '-')}", {"hidden": True}
    if option.choices:
        return Annotated[kind | None, choice(kind, flag, also=option.option.also, **shown)]
    if kind is bool and option.default is not False:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    if kind is int:
        bounds = {word: getattr(m, bound) for m in option.info.metadata for word, bound in _BOUNDS if hasattr(m, bound)}
        shown |= bounds
    if kind is float:
        # typer has no word for a bound that is not itself a value.
        shown |= {"parser": _within(option), "metavar": "X"}
    if option.option.metavar is not None:
        shown["metavar"] = option.option.metavar
    return Annotated[kind | None, typer.Option(flag, **shown)]


_BOUNDS = (("min", "ge"), ("max", "le"))


def _within(option: Declared) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if (problem := option.problem_of(text)) is not None:
            raise typer.BadParameter(f"{printable(text, max_chars=64)} {problem}")
        return float(text)

    return parse


def takes_conversion(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `ConversionFlags` in place of its parameter `flags`."""
    return _taking(command, {"flags": (ConversionFlags, "")})


def takes_layout(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `LayoutFlags` in place of its parameter `flags`."""
    return _taking(command, {"flags": (LayoutFlags, "")})


def takes_source(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `SourceFlags` in place of its parameter `flags`."""
    return _taking(command, {"flags": (SourceFlags, "")})


def takes_cut_source(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a source in place of `flags`, and with `cuts`: how its tensors are cut."""
    return _taking(command, {"flags": (SourceFlags, ""), "cuts": (CutFlags, "")})


def takes_ensured(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `EnsureFlags` in place of its parameter `flags`."""
    return _taking(command, {"flags": (EnsureFlags, "")})


def takes_two_sources(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--tag-a`, `--tag-b` and the like in place of `flags_a` and `flags_b`, and with `cuts`."""
    return _taking(command, {"flags_a": (SourceFlags, "a"), "flags_b": (SourceFlags, "b"), "cuts": (CutFlags, "")})


def _taking(
    command: Callable[..., None], taken: Mapping[str, tuple[type[CheckpointFlags], str]]
) -> Callable[..., None]:
    """The command as `OptionsCommand` calls it: flags of these classes in place of the parameters of these names."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        given = _GIVEN.get()
        made = {
            name: kind(
                **{
                    n.removesuffix(f"_{side}") if side else n: value
                    for n, value in given.items()
                    if not side or n.endswith(f"_{side}")
                }
            )
            for name, (kind, side) in taken.items()
        }
        command(*args, **made, **kwargs)

    own = inspect.signature(command, eval_str=True).parameters
    run.takes = taken  # type: ignore[attr-defined]
    return signed(run, [p for name, p in own.items() if name not in taken])
