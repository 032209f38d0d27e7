"""The keyword arguments of the functions of `import reshard`, as wire models."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reshard.errors import SEE_HELP
from reshard.models import ConvertRequest, Progress, SourceSpec
from reshard.nested_options import nested
from reshard.option_files import read_order, read_rules
from reshard.sizes import SIZE_FIELDS, parse_percent, size_of
from reshard.validation import invalid

if TYPE_CHECKING:
    from reshard.client import Client

PathLike = str | os.PathLike[str]
"""A local path, or a URL such as `s3://bucket/key` as text."""
Order = PathLike | Sequence[str]
"""An order of parameters: `model`, `groups`, a list of names, or a file with a name a line."""
OnProgress = Callable[[Progress], None]
KEYWORDS = {**{field: keyword for keyword, field in SIZE_FIELDS.items()}, "url": "source"}
"""Fields of requests whose keyword arguments have other names."""
_DEFAULT_IF_NONE = ("torch_file", "missing_moments")
"""Keyword arguments whose None stands for a default of the format's own, as on the command line."""


def request_of(given: dict[str, Any], fix: str, *, to_service: bool) -> ConvertRequest:
    """The wire model of a conversion, from the arguments of a function.

    Args:
        given: The arguments by name.
        fix: The fix of an error that has none of its own.
        to_service: True if another process will read and write.

    Raises:
        RequestError: `request.invalid`.
    """
    said = dict(given)
    source, target = said.pop("source"), said.pop("target")
    chosen: dict[str, Any] = {name: said.pop(name) for name in (*SourceSpec.model_fields,) if name != "url"}
    for keyword, field in SIZE_FIELDS.items():
        if (size := said.pop(keyword)) is not None:
            said[field] = size_of(size)
    said["rules"] = None if said["rules"] is None else rules_of(said["rules"])
    said["options"] = dict(said["options"] or {})
    for name in _DEFAULT_IF_NONE:
        if said[name] is None:
            del said[name]
    for name in ("model_files", "base", "trainer_files"):
        if said[name] is not None:
            said[name] = for_service(said[name]) if to_service else os.fspath(said[name])
    if isinstance(said["zero_stage"], int):
        said["zero_stage"] = str(said["zero_stage"])
    said["source"] = source_of(for_service(source) if to_service else source, **chosen)
    said["target"] = for_service(target) if to_service else os.fspath(target)
    try:
        return ConvertRequest.model_validate(nested(said))
    except ValidationError as error:
        found = invalid(error, KEYWORDS, keywords=True)
        found.fix = fix if found.fix == SEE_HELP else found.fix
        raise found from None


def source_of(
    place: PathLike, tag: str | None, profile: str | None, *, param_order: Order | None = None, **keys: str | None
) -> SourceSpec:
    """The wire model of a source.

    Args:
        place: The checkpoint.
        tag: Its tag.
        profile: Its storage profile.
        param_order: The order of the optimizer's parameters, as in `SourceChoices`, or a file with the names.
        **keys: `model_key`, `optimizer_key`, `scheduler_key`, `buffers`.

    Raises:
        RequestError: `request.invalid`.
    """
    if isinstance(param_order, str | os.PathLike):
        param_order = read_order(os.fspath(param_order))
    try:
        return SourceSpec.model_validate(
            {"url": os.fspath(place), "tag": tag, "profile": profile, "param_order": param_order, **keys}
        )
    except ValidationError as error:
        raise invalid(error, KEYWORDS, keywords=True) from None


def for_service(place: PathLike) -> str:
    """A local path as an absolute one: the service may have another working directory and home directory."""
    text = os.fspath(place)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def rules_of(place: PathLike) -> str:
    """The text of a file of rules.

    Raises:
        RequestError: `request.invalid`.
    """
    return read_rules(Path(place))


def fraction_of(sample: float | str | None) -> float | None:
    """A fraction that is given as a number, or as a text such as `2%`.

    Raises:
        RequestError: `request.invalid`.
    """
    return parse_percent(sample) if isinstance(sample, str) else sample


def client_of(url: str, token: str | None) -> Client:
    """A client of the service at `url`. It is imported here: httpx takes longer to import than all else."""
    from reshard.client import Client

    return Client(url, token)
