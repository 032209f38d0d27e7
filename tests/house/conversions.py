"""Conversions by the engine in the process of the test, and the errors of those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from house.expected import raised
from house.requests import asked
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertResult
from reshard.options import SourceSpec


def convert(
    source: Path | str, target: Path | str, to: str = "universal", *, tag: str | None = None, **options: Any
) -> ConvertResult:
    """Convert; options of formats, and `layout`, are keyword arguments as the fields of the request are."""
    spec = SourceSpec(url=str(source), tag=tag)
    return load_engine().convert(asked(source=spec, target=str(target), to=to, **options))


def refused_conversion(
    convert: Callable[..., object], source: Any, target: Path, *args: Any, **options: Any
) -> ReshardError:
    """The error of `convert(source, target, ...)`, which must not have made the target."""
    error = raised(ReshardError, convert, source, target, *args, **options)
    assert not target.exists()
    return error
