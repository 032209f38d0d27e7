"""The pointer beside a target, such as `latest`: whether a conversion writes it, and what it named before.

Runs resume from what the pointer names. So a target in the directory of a run changes the checkpoint that the run
resumes from; the user hears of it, and a move to an earlier step needs `--overwrite`. In a directory of no run, such as
the user's own, a pointer is a stray file, and would make the directory look like a run.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from reshard.choices import RECORDS
from reshard.errors import (
    RequestError,
    SourceError,
    printable,
)
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import known_files
from reshard_engine.formats.sources import pointed_tag
from reshard_engine.storage.local import translated
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import join
from reshard_engine.tensors.layout import Pointer

_NUMBERED = re.compile(r"(\D*(?:step|iter|epoch|ckpt|checkpoint)\D*)(\d+)", re.IGNORECASE)
"""A tag that begins with a word for progress and a number: `global_step100`, `step-100`, `checkpoint-100`."""
_MOST_NEIGHBOURS = 1_000
"""Names that are listed beside a target; an object store gives as many with one request."""
_MOST_TAGS = 16
"""Directories beside a target that are looked into."""


@dataclass(frozen=True, slots=True)
class PointerMove:
    """A pointer that names another existing checkpoint until the conversion ends."""

    pointer: str
    directory: str
    before: str
    after: str
    earlier: bool
    """True if the target is certainly of an earlier step than the checkpoint that the pointer names."""

    def __str__(self) -> str:
        """The move as a warning."""
        step = ", an earlier step" if self.earlier else ""
        return (
            f"{self.pointer}: {printable(self.before)} -> {printable(self.after)}{step} "
            f"(without a tag, runs that load {printable(self.directory)} take the new one)"
        )


def has_save_directory(target: Location, pointer: Pointer) -> bool:
    """True if the directory around a target is a save directory, in which a pointer belongs.

    It is one if any of this holds:

    - It has a pointer: `latest` or `latest_universal`.
    - It holds nothing but the target, and is not the working directory. It may not exist yet.
    - It holds another tag directory: its name has a word for progress and a number (`global_step100`), and it is a
      checkpoint itself. Of a large directory any 1,000 names are considered, and 16 of those directories.

    What unfinished conversions leave there does not count.
    """
    save, tag = _save_directory(target, pointer)
    store, own, known = save.store, tag.partition("/")[0], known_files()
    if any(store.stat(join(save.path, name)) is not None for name in (pointer.name, *known.pointers)):
        return True
    there = store.list_directory(save.path, most=_MOST_NEIGHBOURS)
    names = (*there.by_name, *there.directories)
    if all(name == own or (name.startswith(".") and RECORDS in name) for name in names):
        return not _is_working_directory(save.url)
    tags = [name for name in there.directories if name != own and _NUMBERED.match(name)][:_MOST_TAGS]
    return any(known.holds_checkpoint(_names_in(save, name)) for name in tags)


def _names_in(save: Location, name: str) -> list[str]:
    there = save.store.list_directory(join(save.path, name), most=_MOST_NEIGHBOURS)
    return [*there.by_name, *there.directories]


def _is_working_directory(url: str) -> bool:
    try:
        with translated(url):
            return os.path.samefile(url, os.curdir)
    except SourceError as error:
        if error.code != "source.not_found":
            raise
    return False


def pointer_move(target: Location, pointer: Pointer | None, checkpoint: Checkpoint) -> PointerMove | None:
    """The move of the pointer; None if it names nothing else that exists."""
    if pointer is None:
        return None
    save, tag = _save_directory(target, pointer)
    before = pointed_tag(save, pointer.name)
    if before is None or before == tag:
        return None
    return PointerMove(pointer.name, save.url, before, tag, _is_earlier(before, tag, checkpoint.tag))


def refuse_earlier(move: PointerMove | None, *, overwrite: bool) -> None:
    """Refuse a move to an earlier step, after which a newer checkpoint would not be resumed from.

    Raises:
        RequestError: `request.target_exists`.
    """
    if move is None or overwrite or not move.earlier:
        return
    directory, before, after = printable(move.directory), printable(move.before), printable(move.after)
    raise RequestError(
        "request.target_exists",
        f"`{move.pointer}` of {directory} names {before}, and {after} is of an earlier step: "
        f"runs would resume from it and no longer from {before}",
        fix=f"choose a target in another directory, such as {directory}_resharded/{after}, "
        f"or add --overwrite (`{move.pointer}` will name {after})",
        details={"pointer": move.pointer, "names": before},
    )


def _save_directory(target: Location, pointer: Pointer) -> tuple[Location, str]:
    place = Location(target.store, pointer.directory(target.path), pointer.directory(target.url))
    return place, pointer.tag


def _is_earlier(before: str, after: str, tag: str | None) -> bool:
    """True if both names count the same and the target's number is smaller; its own name tells more than its source's.

    Names that do not count, such as `best` or `dp8`, have no order.
    """
    there = _NUMBERED.match(before)
    for name in (after, tag or ""):
        here = _NUMBERED.match(name)
        if there and here and here[1] == there[1]:
            return int(here[2]) < int(there[2])
    return False
