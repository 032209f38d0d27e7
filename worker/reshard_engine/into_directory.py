"""A conversion into a directory that holds other things: converted in it out of sight, then renamed file by file.

What DeepSpeed's scripts do with an output directory that exists: they write into it. Conversions of ours make their
target, so this is only for the commands and functions that stand in for those.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from reshard.errors import RequestError, printable
from reshard.models import ConvertRequest, ConvertResult, Progress
from reshard_engine.conversion import Conversion
from reshard_engine.execute.local_sink import writing
from reshard_engine.manifest import MANIFEST_NAME
from reshard_engine.storage.locations import Location, open_location

_INNER = ".reshard-into"
_IN_THE_WAY = frozenset({"request.target_exists", "request.overlap"})


@dataclass(frozen=True, slots=True)
class _Watch:
    on_progress: Callable[[Progress], None] | None
    should_stop: Callable[[], bool] | None

    def run(self, request: ConvertRequest) -> ConvertResult:
        return Conversion.prepare(request).run(on_progress=self.on_progress, should_stop=self.should_stop)


def convert_into(
    request: ConvertRequest,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ConvertResult:
    """Convert; where a local directory is in the way, replace the files of the same names in it and keep the rest.

    They are replaced when all new ones are complete and verified, the file that names the others last. A run that is
    killed leaves the directory as it was, beside what it resumes from. There is no manifest, which would list all of
    the directory.

    Raises:
        ReshardError: As `Conversion`; `request.target_exists` if a directory is where a file is to go.
    """
    watch = _Watch(on_progress, should_stop)
    try:
        return watch.run(request)
    except RequestError as error:
        target = open_location(request.target, request.target_profile)
        if error.code not in _IN_THE_WAY or target.store.scheme != "file" or not os.path.isdir(target.path):
            raise
    inner = os.path.join(target.path, _INNER)
    result = watch.run(request.model_copy(update={"target": inner, "overwrite": True}))
    names = [f.path for f in result.files]
    _move(inner, target, sorted(names, key=lambda name: name.endswith(".index.json")))
    stale = _stale(target.path, names)
    warnings = (f"left as they were: {', '.join(printable(n) for n in stale)}",) if stale else ()
    return result.model_copy(update={"target": target.url, "warnings": (*result.warnings, *warnings)})


def _move(inner: str, target: Location, names: list[str]) -> None:
    for name in names:
        place = os.path.join(target.path, name)
        if os.path.isdir(place):
            raise RequestError("request.target_exists", f"{printable(place)} is a directory", fix="remove it")
    with writing(target.path):
        for name in names:
            os.replace(os.path.join(inner, name), os.path.join(target.path, name))
        # A manifest lists all of a directory: one of an earlier conversion would be wrong from now on.
        with suppress(FileNotFoundError):
            os.remove(os.path.join(target.path, MANIFEST_NAME))
        shutil.rmtree(inner, ignore_errors=True)
        descriptor = os.open(target.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _stale(directory: str, names: list[str]) -> list[str]:
    """Weights of an earlier conversion with another number of files: loaders may take them for these."""
    stem = names[0].partition(".")[0].partition("-")[0]
    weights = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.(bin|safetensors)(\.index\.json)?")
    return sorted(name for name in os.listdir(directory) if name not in names and weights.fullmatch(name))
