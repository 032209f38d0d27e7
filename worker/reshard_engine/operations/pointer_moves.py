"""Tells where a conversion moves the pointer beside its target, such as `latest`, from another checkpoint to its own.

Runs resume from what the pointer names. So a target in the directory of a run changes the checkpoint that the run
resumes from; the user hears of it, and a move to an earlier step needs `--overwrite`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import known_files
from reshard_engine.formats.sources import pointed_tag
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.layout import Pointer

_NUMBERED = re.compile(r"(\D*(?:step|iter|epoch|ckpt|checkpoint)\D*)(\d+)", re.IGNORECASE)
"""A tag that begins with a word for progress and a number: `global_step100`, `step-100`, `checkpoint-100`."""
_LIKE_A_TAG = re.compile(r"step|iter|epoch|ckpt|checkpoint|pytorch_model", re.IGNORECASE)


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


def pointer_warnings(
    target: Location, pointer: Pointer | None, checkpoint: Checkpoint, move: PointerMove | None
) -> Iterator[str]:
    """Yield what the user may not expect of the file beside the target."""
    if move is not None:
        yield str(move)
    if pointer is not None and _is_taken_for_a_save_directory(target, pointer, checkpoint):
        save, tag = _save_directory(target, pointer)
        yield (
            f"{printable(target.url)} is the tag directory, and `{pointer.name}` is written beside it: "
            f"load_checkpoint({printable(save.url)!r}, tag={printable(tag)!r})"
        )


def _save_directory(target: Location, pointer: Pointer) -> tuple[Location, str]:
    place = Location(target.store, pointer.directory(target.path), pointer.directory(target.url))
    return place, pointer.content.decode()


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


def _is_taken_for_a_save_directory(target: Location, pointer: Pointer, checkpoint: Checkpoint) -> bool:
    """True if the name is no tag's, and the directory around it holds other things, but no checkpoints."""
    parent, name = _save_directory(target, pointer)
    if target.store.scheme != "file" or name == checkpoint.tag or _LIKE_A_TAG.search(name):
        return False
    listing = parent.store.list_directory(parent.path)
    files = {f.path.rpartition("/")[2] for f in listing.files}
    others = {n for n in (*files, *listing.directories) if n != name and not n.startswith(".")}
    return bool(others) and files.isdisjoint(known_files().pointers)
