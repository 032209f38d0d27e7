"""A conversion into an existing directory: written to a hidden directory inside, then renamed file by file.

DeepSpeed's scripts write into an output directory that exists. Conversions of reshard create their target, so only the
commands and functions that replace these scripts use this module.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress

from reshard.errors import RequestError, printable
from reshard.models.jobs import ConvertRequest, ConvertResult, Progress
from reshard_engine.execute.sinks.local import INNER
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.local_writes import sync_directory, writing
from reshard_engine.storage.locations import Location, open_location

_IN_THE_WAY = frozenset({"request.target_exists", "request.overlap"})


def convert_into(
    request: ConvertRequest,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ConvertResult:
    """Convert into a local directory that may exist: replace files of the same names, and keep the other files.

    Files are replaced when all new ones are complete and verified; an index comes last. A killed run leaves the
    directory as it was, with a hidden directory to resume from. No manifest is written, because it would list the
    whole directory.

    Raises:
        ReshardError: As `Conversion`; `request.target_exists` if a directory has the name of a new file.
    """
    try:
        return Conversion.prepare(request).run(on_progress=on_progress, should_stop=should_stop)
    except RequestError as error:
        target = open_location(request.target, request.target_profile)
        if error.code not in _IN_THE_WAY or target.store.scheme != "file" or not os.path.isdir(target.path):
            raise
    inner = os.path.join(target.path, INNER)
    hidden = request.model_copy(update={"target": inner, "overwrite": True})
    result = Conversion.prepare(hidden).run(on_progress=on_progress, should_stop=should_stop)
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
    # A manifest lists a whole directory, so that of an earlier conversion would be wrong from now on.
    moved_out(inner, {name: name for name in names}, target.path, without=MANIFEST_NAME)


def moved_out(inner: str, names: Mapping[str, str], directory: str, *, without: str | None = None) -> None:
    """Rename files of a finished conversion into a directory, in order, and remove the rest of the conversion.

    Args:
        inner: The conversion's target.
        names: Its files, each with its new name.
        directory: The directory that gets the files; it is synced.
        without: A file to remove from the directory.
    """
    with writing(directory):
        for name, new in names.items():
            os.replace(os.path.join(inner, name), os.path.join(directory, new))
        if without is not None:
            with suppress(FileNotFoundError):
                os.remove(os.path.join(directory, without))
        shutil.rmtree(inner, ignore_errors=True)
        sync_directory(directory)


def _stale(directory: str, names: list[str]) -> list[str]:
    """Weights of an earlier conversion with another number of files: loaders may take them for these."""
    stem = names[0].partition(".")[0].partition("-")[0]
    weights = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.(bin|safetensors)(\.index\.json)?")
    return sorted(name for name in os.listdir(directory) if name not in names and weights.fullmatch(name))
