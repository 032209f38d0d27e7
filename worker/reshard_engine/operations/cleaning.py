"""`reshard clean` removes files of unfinished conversions; `reshard slim` removes what no tensor of a file uses."""

from __future__ import annotations

import os
from collections.abc import Callable

from reshard.errors import RequestError, printable
from reshard.models.jobs import CleanReport, ConvertRequest, Progress, SlimResult
from reshard_engine.operations.conversion import Conversion, sink_for
from reshard_engine.operations.into_directory import moved_out
from reshard_engine.storage.locations import WRITABLE_URLS, Location, open_location
from reshard_engine.storage.protocol import parent_and_name

IDLE_S = 3_600.0
"""Seconds after its last write for which an unfinished conversion in an object store counts as running."""


def clean_target(target: Location, *, dry_run: bool, idle_s: float = IDLE_S) -> CleanReport:
    """Remove files that unfinished conversions into a target left, except those in use.

    A finished target stays. On local storage a running conversion holds a lock, which ends with its process. An object
    store has no such lock: a conversion that has written within `idle_s` counts as running.

    Raises:
        RequestError: `request.unknown_scheme` for storage that is only read.
    """
    sink = sink_for(target)
    if sink is None:
        raise RequestError(
            "request.unknown_scheme",
            f"nothing can be written to {printable(target.url)}, so no conversion left files there",
            fix=f"name {WRITABLE_URLS}",
        )
    found, below = sink.leftovers(idle_s=idle_s), sink.targets_below()
    removed = not dry_run and sink.clean(found)
    return CleanReport(target=target.url, removed=removed, leftovers=tuple(found), below=tuple(below))


# `reshard slim`: rewrites torch files with only the used parts of storages, and reports the savings.


def slim(
    request: ConvertRequest,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SlimResult:
    """Run a conversion to `slim`. The target of a local file is a file, that of a directory a directory.

    Raises:
        RequestError: `request.target_exists` if the target exists and may not be overwritten.
        ReshardError: As `Conversion`.
    """
    source = open_location(request.source.url, request.source.profile)
    target = open_location(request.target, request.target_profile)
    one_file = source.store.stat(source.path) is not None and target.store.scheme == "file"
    place = target.path
    if one_file:
        parent, name = parent_and_name(target.path)
        if os.path.isdir(place):
            place = os.path.join(place, parent_and_name(source.path)[1])
            parent, name = parent_and_name(place)
        if os.path.realpath(place) == os.path.realpath(source.path):
            raise RequestError("request.overlap", f"{printable(place)} is the source", fix="write beside it")
        if os.path.lexists(place) and not request.overwrite:
            raise RequestError("request.target_exists", f"{printable(place)} exists", fix="--overwrite replaces it")
        request = request.model_copy(update={"target": os.path.join(parent, f".{name}.slim"), "overwrite": True})
    conversion = Conversion.prepare(request)
    before = sum(f.size_bytes for f in conversion.checkpoint.files)
    result = conversion.run(on_progress=on_progress, should_stop=should_stop)
    if one_file:
        directory, name = parent_and_name(place)
        moved_out(request.target, {result.files[0].path: name}, directory)
    return SlimResult(
        target=place if one_file else result.target,
        files=len(result.files),
        source_bytes=before,
        target_bytes=sum(f.size_bytes for f in result.files),
        already_done=result.already_done,
    )
