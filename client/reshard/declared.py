"""All options of a conversion, each with what its field declares: the one list that flags, keywords and pages share."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError

from reshard.errors import RequestError, listed
from reshard.installed_formats import former_names, known_targets, option_fields, plain_kind
from reshard.option import Option, Place, Section, option_of
from reshard.options import ConversionOptions, SourceChoices, SourceSpec
from reshard.targets import options_of_others
from reshard.wire_model import said_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

    from reshard.models.jobs import ConvertRequest

_SECTIONS = tuple(Section)
_SECTIONS_OF_ENSURE: Mapping[str, str] = {"": Section.TARGET, Section.DEEPSPEED: Section.LAYOUT}
"""The parts of the help of `ensure` that have other names than those of a conversion."""
_WORDS = (
    (re.compile(r"--to ([\w]+)"), r'`to="\1"`'),
    (re.compile(r"\ba ([\w-]+) SRC\b"), r"a \1 source"),
    (re.compile(r"\bSRC\b"), "the source"),
    (re.compile(r"\bDST\b"), "the target"),
)
_FLAG = re.compile(r"--([a-z][a-z-]*)")
_WORD = re.compile(r"[\w.-]+")


@dataclass(frozen=True, eq=False)
class Declared:
    """One option: its field, and where that is."""

    field: str
    within: tuple[str, ...]
    """The place of the model that has the field, within a request: `("layout",)`, `("options", "deepspeed")`."""
    info: FieldInfo
    option: Option
    as_in_source: bool = False
    """True if None stands for what the source has, not for the field's default."""

    @property
    def name(self) -> str:
        """The name of the flag and of the keyword argument, with underscores."""
        return self.option.name or self.field

    @property
    def flag(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def former(self) -> tuple[str, ...]:
        """Former names, which still work."""
        return former_names(self.field, self.info)

    @property
    def kind(self) -> Any:
        """The type of what the flag takes: bool, int, float, str, a `StrEnum`, or what `parse` takes."""
        return self.option.takes if self.option.parse is not None else plain_kind(self.info) or str

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a closed list; empty for any other option."""
        return tuple(self.kind) if issubclass(self.kind, StrEnum) else ()

    @property
    def section(self) -> str:
        """The part of the help that the flag is in."""
        return self.option.section or f"Format {self.within[-1]}"

    @property
    def default(self) -> Any:
        """The default of the flag and of the keyword argument; None stands for that of the field."""
        own = self.option.section and self.option.parse is None and not self.as_in_source
        return self.info.get_default() if own else None

    @property
    def help(self) -> str:
        """The text of the flag."""
        return self.option.help or self.info.description or ""

    @property
    def meaning(self) -> str:
        """The text for who writes a keyword argument or a field: no flags, and the choices of a closed list."""
        text = self.help
        for found, put in _WORDS:
            text = found.sub(put, text)
        text = _FLAG.sub(lambda flag: f"`{flag[1].replace('-', '_')}`", text)
        missing = [c for c in self.choices if not re.search(rf"\b{re.escape(c)}\b", text)]
        listed = ", ".join(f"`{c}`" for c in self.choices)
        return f"{text[:1].upper()}{text[1:]}{f' One of {listed}.' if missing else ''}"

    @property
    def label(self) -> str:
        """The label on pages."""
        return self.option.label or self.field.replace("_", " ")

    @property
    def place(self) -> str:
        """The place of the field in the body of `POST /v1/jobs`."""
        return ".".join((*self.within, self.field))

    @property
    def names_place(self) -> bool:
        """True if the value is a path or a URL."""
        return any(isinstance(m, Place) for m in self.info.metadata)

    def problem_of(self, text: str) -> str | None:
        """What is wrong with a text as a value of the field, in words; None if nothing is."""
        try:
            TypeAdapter(cast("Any", Annotated)[self.info.annotation, *self.info.metadata]).validate_python(text)
        except ValidationError as error:
            return said_of(error.errors(include_url=False, include_input=False)[0])
        return None

    def value(self, given: Any) -> Any:
        """The value of the field, from that of the flag or of the keyword argument.

        Raises:
            RequestError: `request.invalid`.
        """
        text = os.fspath(cast("os.PathLike[str]", given)) if isinstance(given, os.PathLike) else given
        if self.option.parse is not None and isinstance(text, str):
            return self.option.parse(self.option.takes(text))
        is_number = isinstance(text, int) and not isinstance(text, bool)
        return str(text) if is_number and self.choices else text


@cache
def declared_options() -> dict[str, Declared]:
    """Every option by the name of its keyword argument: in the order of the help, then those of formats' own sections.

    Raises:
        RequestError: `request.bad_format`: a format of another package cannot be used.
    """
    found = sorted((*options_of_source().values(), *_others()), key=_order)
    return {d.name: d for d in found}


@cache
def options_of_source() -> dict[str, Declared]:
    """The options of a source, in the order of the help."""
    fields = {n: info for n, info in SourceSpec.model_fields.items() if n != "url"}
    found = sorted((Declared(n, ("source",), info, option_of(info)) for n, info in fields.items()), key=_order)
    return {d.name: d for d in found}


def options_of_layout() -> dict[str, Declared]:
    """The options that decide the bytes of a target; those of a run have nothing to decide without one."""
    return {name: option for name, option in declared_options().items() if not option.option.of_run}


def options_of_target(name: str) -> dict[str, Declared]:
    """The options that decide the bytes of one target: those that it takes, and those that every target takes."""
    of_others = options_of_others(name, known_targets())
    return {name: option for name, option in options_of_layout().items() if name not in of_others}


def given_options(request: ConvertRequest) -> Iterator[tuple[Declared, Any]]:
    """The options that decide the bytes of a target and that a request gives, with their values."""
    for option in options_of_layout().values():
        model: Any = request
        for name in option.within:
            model = getattr(model, name, None)
        value = getattr(model, option.field, None)
        if value is not None and value != option.info.get_default():
            yield option, value


def refuse_options_of_others(request: ConvertRequest) -> None:
    """Refuse options that the request's target does not take, and a target without an option that it needs.

    Raises:
        RequestError: `request.invalid`.
    """
    targets = known_targets()
    target = targets[request.to]
    of_others = options_of_others(target.name, targets)
    given = {option.name: option for option, _ in given_options(request)}
    wrong = [option for name, option in given.items() if name in of_others]
    if wrong:
        flags = listed([o.flag for o in wrong])
        taking = [known.name for known in targets.values() if {o.name for o in wrong} <= {*known.options}]
        where = f"; {'it is' if len(wrong) == 1 else 'they are'} for --to {', '.join(taking)}" if taking else ""
        raise RequestError(
            "request.invalid",
            f"--to {target.name} does not take {flags}{where}",
            fix=f"leave out {flags}, or --to {taking[0]}"
            if taking
            else f"leave out {flags}, or each with a --to of its own",
        )
    if lacking := [name for name in target.needs if name not in given]:
        option = declared_options()[lacking[0]]
        raise RequestError(
            "request.invalid",
            f"--to {target.name} needs {option.flag}: {option.help.rstrip('.').lower()}",
            fix=f"add {option.flag} N",
        )


def flags_of(request: ConvertRequest) -> list[str]:
    """The flags of `reshard convert SRC DST` that ask for the bytes of the request's target.

    Places, and files whose texts are in the request, are placeholders such as DIR: they lie elsewhere for who reads it.
    """
    flags = ["--to", str(request.to)]
    for option, value in given_options(request):
        if option.field == "profile":
            continue
        if isinstance(value, bool):
            flags.append(option.flag if value else f"--no-{option.flag[2:]}")
            continue
        is_word = option.option.parse is None or _WORD.fullmatch(str(value)) is not None
        known = is_word and not option.names_place and option.kind is not Path
        flags += [option.flag, str(value) if known else option.option.metavar or "FILE"]
    return flags


def present_names(given: Mapping[str, Any], options: Mapping[str, Declared]) -> dict[str, Any]:
    """What was given of flags or keyword arguments, with the former names of options replaced by their names.

    Raises:
        RequestError: `request.invalid`: an option was given under two names.
    """
    names = {former: option.name for option in options.values() for former in option.former}
    for former in names.keys() & given.keys():
        if names[former] in given:
            raise RequestError(
                "request.invalid",
                f"{former} is the former name of {names[former]}, and both were given",
                fix=f"leave {former} out",
            )
    return {names.get(name, name): value for name, value in given.items()}


def choices_of_source() -> dict[str, Declared]:
    """The options that choose what of a checkpoint is read."""
    return {n: d for n, d in options_of_source().items() if d.field in SourceChoices.model_fields}


@cache
def options_of_ensure() -> dict[str, Declared]:
    """The options that `ensure` has, with its texts and defaults: the source's choices first, then the conversion's."""
    found = {n: o for n, o in options_of_source().items() if n != "profile"}
    for name, option in declared_options().items():
        if (default := option.option.ensure) is not None:
            section = _SECTIONS_OF_ENSURE.get(option.option.section, option.option.section)
            text = (
                f"{option.help.partition('; default:')[0].rstrip('.')}; default: {default}." if default else option.help
            )
            shown = replace(option.option, help=text, section=section)
            found[name] = replace(option, option=shown, as_in_source=bool(default))
    return found


@cache
def options_of_cuts() -> dict[str, Declared]:
    """The options that say how tensor parallelism cut either side of a comparison."""
    found = {n: declared_options()[n] for n in ("rules", "family")}
    return {n: replace(o, option=replace(o.option, help=o.help.replace("SRC", "side"))) for n, o in found.items()}


def _others() -> Iterator[Declared]:
    for name, info in ConversionOptions.model_fields.items():
        yield Declared(name, (), info, option_of(info))
    for name, (within, info) in option_fields().items():
        yield Declared(name, within, info, option_of(info))


def _order(option: Declared) -> tuple[int, int]:
    section = option.option.section
    return (_SECTIONS.index(Section(section)) if section else len(_SECTIONS), option.option.place)
