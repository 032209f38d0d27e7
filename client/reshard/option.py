"""The declaration of an option, and how its values are read: sizes, and files whose texts go into a request.

`reshard.declared` lists the options of all models with what their fields say.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import currentframe
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.choices import ParamOrder
from reshard.errors import RequestError, counted, format_size, printable

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PathLike = str | os.PathLike[str]
"""A local path, or a URL such as `s3://bucket/key` as text."""
_Value = TypeVar("_Value")
Order = PathLike | Sequence[str]
"""An order of parameters: `model`, `groups`, a list of names, or a file with a name a line."""


def renamed_argument(name: str, value: _Value | None, former: str, given: _Value | None) -> _Value:
    """The value of an argument that had another name in the release before, which works for this release.

    Args:
        name: The name of the argument.
        value: Its value; None if it was not given.
        former: Its former name.
        given: The value under the former name.

    Raises:
        TypeError: Neither was given, or both were.
    """
    if given is None:
        if value is None:
            raise TypeError(f"missing the argument {name!r}")
        return value
    if value is not None:
        raise TypeError(f"{former!r} is the former name of the argument {name!r}, and both were given")
    warn_of_former(f"{former!r} is now {name!r}; the former name works for this release")
    return given


def warn_of_former(text: str) -> None:
    """Warn of a former name or place, at the line outside this package: a plain script shows those of its own lines."""
    # `skip_file_prefixes` came with Python 3.12.
    frame, level = currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "reshard":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DeprecationWarning, stacklevel=level)


class Section(StrEnum):
    """The parts of a command's help, in their order."""

    SOURCE = "Source"
    TARGET = "Target"
    LAYOUT = "Target layout"
    DEEPSPEED = "DeepSpeed (--to zero)"
    FSDP_RANKS = "Files of FSDP's ranks (--to fsdp_ranks, torch_checkpointing)"
    MEGATRON = "Megatron-core (--to megatron)"
    ADAPTERS = "LoRA adapters"
    CHECKING = "Checking"
    RESOURCES = "Resources"


class Place:
    """Marks an option that is a URL from which the engine reads: a service allows it only below its roots."""


@dataclass(frozen=True, eq=False)
class Option:
    """The declaration of an option, in the metadata of its field.

    A field without it is an option, too, if it has a `description`.

    The flag of an option that is in no section of ours has no default: None stands for that of the field. So does the
    flag of one with `parse`.
    """

    help: str = ""
    """The text of the flag; by default the field's `description`."""
    section: str = ""
    """The part of the help in which the flag is; by default that of the format."""
    place: int = 1 << 10
    """The place within the section. Options without one come last, in the order of their fields."""
    name: str = ""
    """The name of the flag and of the keyword argument, with underscores; by default that of the field."""
    metavar: str | None = None
    """The word for the value in the help."""
    parse: Callable[[Any], Any] | None = None
    """Makes the field's value from what the flag takes. A keyword argument takes either."""
    takes: type = str
    """The type of a flag whose option has `parse`."""
    also: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other words for choices, and the choices."""
    label: str = ""
    """The label of the field on pages; by default its name."""
    of_run: bool = False
    """True if it says how the conversion runs: the bytes of the target are the same with any value."""
    ensure: str | None = None
    """The words for the default of `ensure`, if that has the option; empty for the same default as here."""
    digested: str = ""
    """The name in digests, which stays when an option of a format is renamed; by default that of the field.

    `FORMAT.NAME` for an option that is neutral now: digests have it among the options of that format, and so had
    requests of 0.1.0. Other options of the conversion, and those of a source, are in digests by their fields: they
    cannot be renamed.
    """


def option_of(info: FieldInfo) -> Option:
    """The declaration of a field's option; an empty one if the field has none."""
    return next((m for m in info.metadata if isinstance(m, Option)), Option())


# The files that options name and whose texts go into a request: rules, and orders of parameters.

_MAX_RULES_BYTES = 1 << 16
_MAX_ORDER_BYTES = 1 << 26
_FAMILY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def read_rules(path: Path) -> str:
    """Read the text of a rules file.

    Raises:
        RequestError: `request.invalid` if the file cannot be read, is not text or is too large.
    """
    return _read_text(path, "--rules", _MAX_RULES_BYTES, fix="name a YAML file that you may read: docs/rules.md")


def read_args(path: Path) -> str:
    """Read the text of a file of arguments.

    Raises:
        RequestError: `request.invalid` if the file cannot be read, is not text or is too large.
    """
    fix = 'name a JSON file such as {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}'
    return _read_text(path, "--megatron-args", _MAX_RULES_BYTES, fix=fix)


def read_family(said: str | Path) -> str:
    """A family of rules by its name, or the text of the file that is named.

    Raises:
        RequestError: `request.invalid` if the file cannot be read, is not text or is too large.
    """
    if isinstance(said, str) and (_FAMILY.fullmatch(said) or "\n" in said):
        return said
    return _read_text(
        Path(said),
        "--hf-rules",
        _MAX_RULES_BYTES,
        fix="name a family such as llama, or a YAML file: docs/formats/megatron-hf.md",
    )


def read_order(order: str | None) -> str | tuple[str, ...] | None:
    """The order of parameters: one of the words for it, or the names in a file, one a line.

    Raises:
        RequestError: `request.invalid` if the file cannot be read, is not text or is too large.
    """
    if order is None or order in tuple(ParamOrder):
        return order
    text = _read_text(Path(order), "--param-order", _MAX_ORDER_BYTES, fix="name a file with a parameter's name a line")
    return tuple(line for line in map(str.strip, text.splitlines()) if line)


def _read_text(path: Path, flag: str, limit_bytes: int, *, fix: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
        text = data.decode()
    except OSError as error:
        said = f"{flag} {printable(str(path))}: {error.strerror}"
        raise RequestError("request.invalid", said, fix=fix) from None
    except UnicodeDecodeError:
        raise RequestError("request.invalid", f"{flag} {printable(str(path))} is not text", fix=fix) from None
    if len(data) > limit_bytes:
        raise RequestError(
            "request.invalid",
            f"{flag} {printable(str(path))} has more than {limit_bytes} bytes",
            fix=f"give {flag} a file of at most {limit_bytes} bytes",
        )
    return text


# Sizes, percentages and times as texts: `5GB` is decimal, `1GiB` is binary.

__all__ = ["counted", "format_duration", "format_size", "parse_percent", "parse_size", "size_of"]
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")
_SIZE = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?\s*([a-z]{0,3})")


def parse_size(text: str) -> int:
    """The number of bytes of a text such as `5GB`, `1.5GiB` or `4096`.

    Raises:
        RequestError: `request.invalid`.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[3] not in _UNITS:
        raise RequestError(
            "request.invalid", f"{printable(text)!r} is not a size", fix="write 5GB (decimal) or 1GiB (binary)"
        )
    scale = _UNITS[match[3]]
    fraction = match[2] or ""
    return int(match[1]) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)


def size_of(size: int | str) -> int:
    """A size of a function's caller: a number of bytes, or a text as for `parse_size`.

    Raises:
        RequestError: `request.invalid`.
    """
    return size if isinstance(size, int) else parse_size(size)


def parse_percent(text: str) -> float:
    """The fraction of a text such as `2%`, in `(0, 1]`.

    Raises:
        RequestError: `request.invalid`.
    """
    match = _PERCENT.fullmatch(text.strip())
    fraction = 0.0 if match is None else float(match[1]) / 100
    if not 0 < fraction <= 1:
        raise RequestError(
            "request.invalid",
            f"{printable(text)!r} is not a percentage above 0 and at most 100",
            fix="write 2% for a fiftieth",
        )
    return fraction


def format_duration(seconds: float) -> str:
    """A time in its two largest units: `42s`, `3m05s`, `2h07m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole // 60 % 60:02d}m"
