"""The declaration of an option: metadata of its field in a model, from which flag, keyword argument and labels follow.

`reshard.declared` lists the options of all models with what their fields say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PathLike = str | os.PathLike[str]
"""A local path, or a URL such as `s3://bucket/key` as text."""
Order = PathLike | Sequence[str]
"""An order of parameters: `model`, `groups`, a list of names, or a file with a name a line."""


class Section(StrEnum):
    """The parts of a command's help, in their order."""

    SOURCE = "Source"
    TARGET = "Target"
    LAYOUT = "Target layout (--to zero)"
    ADAPTERS = "LoRA adapters"
    CHECKING = "Checking"
    RESOURCES = "Resources"


class Place:
    """Marks an option that is a URL from which the engine reads: a service allows it only below its roots."""


@dataclass(frozen=True, eq=False)
class Option:
    """What a field says about its option. A field without it is an option, too, if it has a `description`.

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
    """What the flag of an option with `parse` takes."""
    also: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other words for choices, and the choices."""
    label: str = ""
    """The label of the field on pages; by default its name."""
