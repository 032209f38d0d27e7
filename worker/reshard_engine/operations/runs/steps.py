"""The steps of a run: which are complete, and which is the newest.

`steps_of` is the only judge of what is complete and what is the newest: `reshard ls`, `inspect`, `prune`, `ensure` and
the fixes of errors ask it.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cached_property, partial
from traceback import clear_frames
from typing import Any
from urllib.parse import quote, unquote

from reshard.choices import SEALED, EmptyWeights, OpaquePolicy
from reshard.errors import RequestError, ReshardError, SourceError, listed, printable
from reshard.models.reports import RunListing, RunStep
from reshard.options import SourceSpec
from reshard.wire_model import WireModel
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.model_weights import refuse_placeholders
from reshard_engine.formats.sources import (
    Found,
    find_checkpoint,
    holds_pointer,
    is_file_of_format,
    is_tag,
    nothing_at,
    pointers_in,
    read_checkpoint,
    refuse_unfinished,
    state_here,
)
from reshard_engine.formats.trainer_files import STATE_LIMIT_BYTES, TRAINER_STATE, best_checkpoint_in, best_of_callbacks
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, join, parent_and_name, read_bytes
from reshard_engine.storage.urls import has_plain_segments

_MOST_ENTRIES = 10_000
_READ_AT_ONCE = 8
"""Checkpoints of an object store whose metadata are read together."""
_REMOVING = ".reshard-removing-"
"""Begins the name of a local directory that is being removed, and of the object that says so of a prefix."""
_CONVERTING = re.compile(r"\.(.+)\.reshard-(?:claim|old|[0-9a-f]{16}(?:\.\w+)?)")
"""Claims, journals and staging directories of conversions, beside their target."""
STEP_WORD = re.compile(r"\D*(?:step|iter|epoch|ckpt|checkpoint)\D*\d+", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}")
_MOST_MARK_BYTES = 256 << 20
_NOT_ONE_CHECKPOINT = frozenset({"source.unknown_kind", "source.not_found"})
_NAMED_IN_A_FIX = 32
"""For the fix of an error, so many entries of a run are judged: those with the highest numbers."""
_MOST_LINKS = 3
"""So many links into a checkpoint are listed with it."""
_OF_A_CHOICE = ("checkpoint.ambiguous", "checkpoint.unexplained", "rules.", "source.unsupported", "source.too_slow")
"""Errors that another checkpoint of the same run would raise as well."""


class RemovalMark(WireModel):
    """The record beside a checkpoint of the files that are removed of it."""

    first: int
    """So many of the files go before the others, in this order."""
    files: tuple[tuple[str, str, float | None], ...]
    """Paths relative to the run, each with its pin and the time of its last write: on S3 a pin is an ETag, which is the
    same for the same bytes."""


@dataclass(frozen=True)
class Surroundings:
    """The facts of a run's directory about its entries; they are read anew before each removal."""

    run: Location
    listing: Listing
    named: Mapping[str, Sequence[str]]
    """The pointers, trackers and links by the entry that they name."""
    converting: frozenset[str]
    links: frozenset[str]

    @classmethod
    def of(cls, run: Location) -> Surroundings:
        """Read the directory, its pointers and its trackers."""
        listing = run.store.list_directory(run.path)
        names = {*listing.by_name, *listing.directories}
        named = defaultdict[str, list[str]](list)
        for pointer, path in pointers_in(run, listing):
            for entry in _entries(run, names, path):
                named[entry].append(pointer)
        for best in _best_in(run, names, listing.by_name.get(TRAINER_STATE)):
            named[best].append(TRAINER_STATE)
        links = frozenset(n for n in names if run.store.scheme == "file" and os.path.islink(join(run.path, n)))
        for link in sorted(links):
            place = os.path.relpath(os.path.realpath(join(run.path, link)), os.path.realpath(run.path))
            named[place].append(f"link {link}")
        return cls(
            run,
            listing,
            named,
            frozenset(m[1] for n in names if (m := _CONVERTING.fullmatch(n)) is not None),
            links,
        )

    def pointers_to(self, name: str) -> tuple[str, ...]:
        """The pointers, trackers and links that name an entry, or something in it."""
        return tuple(
            p for path, found in self.named.items() if path == name or path.startswith(f"{name}/") for p in found
        )

    @cached_property
    def _marks(self) -> Mapping[str, tuple[str, Removal] | None]:
        # Each takes a read and a listing, which a removal that asks what is protected need not wait for.
        names = (*self.listing.by_name, *self.listing.directories)
        return {name: _removal_in(self.run, name) for name in names if name.startswith(_REMOVING)}

    @property
    def removing(self) -> Mapping[str, Removal]:
        """The removals that have marks, by checkpoint."""
        return dict(removal for removal in self._marks.values() if removal is not None)

    @property
    def foreign_marks(self) -> list[str]:
        """Names that begin as marks of removals do, and that `prune` does not write."""
        return sorted(name for name, removal in self._marks.items() if removal is None)

    @property
    def hidden(self) -> frozenset[str]:
        """The checkpoints that lack files because their removal was interrupted."""
        return frozenset(name for name, removal in self.removing.items() if removal is Removal.UNDER_WAY)

    def protects(self, name: str) -> str:
        """Why an entry may not be removed, whatever the policy says; empty if it may."""
        if found := self.pointers_to(name):
            return f"named by {', '.join(found)}"
        if name.partition("/")[0] in self.converting:
            return "a conversion into it has not ended, or has left files: reshard clean"
        if behind_link(self.run, join(self.run.path, name)):
            return "a part of its path is a link: its files may belong to another run"
        return ""


def behind_link(run: Location, path: str) -> bool:
    """True if a local path below a run is a link, or leads through one: what it names may lie outside the run."""
    if run.store.scheme != "file" or path == run.path:
        return False
    return os.path.realpath(path) != join(os.path.realpath(run.path), path[len(run.path) + 1 :])


def _entries(run: Location, names: Collection[str], path: str) -> list[str]:
    """The paths relative to a run of the entries that a pointer may name, however the pointer spells it.

    A pointer may contain the path from another directory, or that of another machine (`out/run/checkpoint-100`). Unless
    the run certainly has that path, its last segment counts as well: to keep one checkpoint too many is harmless.
    """
    plain = path.removeprefix(f"{run.url}/").replace("\\", "/")
    local = run.store.scheme == "file"
    if local and "\0" not in plain:
        # The links of the path are followed: a run may hold a link to itself.
        target = os.path.realpath(os.path.join(run.path, path if path.startswith("/") else plain))
        inner = os.path.relpath(target, os.path.realpath(run.path))
        if os.path.lexists(target) and inner != os.curdir and not inner.startswith(os.pardir):
            return [inner]
    inner = posixpath.normpath(plain.strip("/")) if plain.strip("/") else ""
    whole = [inner] if not local and inner.partition("/")[0] in names else []
    return list(dict.fromkeys([*whole, inner.rpartition("/")[2]]))


def _best_in(run: Location, names: Collection[str], state: ObjectInfo | None) -> list[str]:
    """The entries that a `trainer_state.json` may name as the best checkpoint; empty without a record."""
    if state is None:
        return []
    # A long log may make the state larger than is read; the Trainer sorts its keys, so that this one comes early.
    file = SourceFile(run.store, TRAINER_STATE, (state,))
    best = best_checkpoint_in(file.read(0, min(state.size_bytes, STATE_LIMIT_BYTES)))
    return _entries(run, names, best) if best else []


# Listing.


def steps_of(run: Location, *, most: int | None = None) -> RunListing:
    """List the checkpoints of a run, by step. Only metadata is read.

    Args:
        run: The directory of the run.
        most: Judge only so many entries, those with the highest numbers in their names.

    Raises:
        SourceError: `source.not_found`; and what is wrong with a pointer of the run.
        RequestError: `request.invalid`: the directory is a checkpoint, or has too many entries.
    """
    return listed_with_files(run, Surroundings.of(run), most)[0]


def listed_with_files(
    run: Location, around: Surroundings, most: int | None = None
) -> tuple[RunListing, Mapping[str, ObjectInfo]]:
    """The checkpoints of a run, and the files of the run by their relative paths."""
    listing = around.listing
    if not listing.files and not listing.directories:
        raise nothing_at(run)
    candidates = _candidates(run, around)
    if most is not None:
        candidates = sorted(candidates, key=lambda name: (-1 if (n := number_of(name)) is None else n, name))[-most:]
    local = run.store.scheme == "file"
    below, links = files_below(run, candidates) if local else (run.files(), {})
    sizes = _sizes(below, candidates)
    # SeaweedFS 4 lists a prefix for a while after its last object is gone.
    names = [name for name, (files, _) in sizes.items() if files or local]
    at_once = 1 if local else _READ_AT_ONCE
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(partial(_step, run, around, _Contents(below, sizes, links)), names))
    steps = _with_steps([step for step in found if step is not None])
    others = [name for name, step in zip(names, found, strict=True) if step is None] + around.foreign_marks
    run_listing = RunListing(
        url=run.url,
        steps=tuple(sorted(steps, key=_place_in_list)),
        newest=_newest(steps),
        others=tuple(others),
        removing=tuple(sorted(around.removing)),
    )
    return run_listing, below


def _place_in_list(step: RunStep) -> tuple[int, str]:
    number = number_of(step.name) if step.step is None else step.step
    return (-1 if number is None else number, step.name)


def _newest(steps: Iterable[RunStep]) -> str | None:
    """The name of the newest complete checkpoint. Of two of one step, a name that says the step comes before others."""
    complete = [s for s in steps if s.complete and s.step is not None]
    states = [s for s in complete if s.of_training] or complete
    return max(states, key=lambda s: (s.step, number_of(s.name) == s.step, s.name)).name if states else None


def _candidates(run: Location, around: Surroundings) -> list[str]:
    """The entries of a run that may be checkpoints, among them what pointers name deeper below."""
    listing = around.listing
    here = state_here(run, listing)
    if here:
        raise RequestError(
            "request.invalid",
            f"{printable(run.url)} is a checkpoint, and not the directory of a run",
            fix=f"name the directory around it: reshard ls {shlex.quote(printable(parent_and_name(run.url)[0]))}",
        )
    # Files beside weights in the directory itself are parts of these.
    single = {} if here is False else listing.by_name
    files = [name for name, info in single.items() if is_file_of_format(info)]
    deep = [path for path in around.named if "/" in path and has_plain_segments(path)]
    names = [n for n in (*listing.directories, *files) if not n.startswith(".") and has_plain_segments(n)]
    left_out = around.links | around.hidden
    names = [n for n in names if n not in left_out]
    if len(names) > _MOST_ENTRIES:
        raise RequestError(
            "request.invalid",
            f"{printable(run.url)} has {len(names):,} entries, and at most {_MOST_ENTRIES:,} are looked into",
            fix="name the directory of one run",
        )
    return sorted(dict.fromkeys([*names, *deep]))


def files_below(run: Location, names: Iterable[str]) -> tuple[dict[str, ObjectInfo], dict[str, list[str]]]:
    """The files of entries of a local run, by their paths relative to it, and links by the entry that they lead into.

    Links to directories are not followed: one may lead to a data set, or to the root of a file system.
    """
    files, links = dict[str, ObjectInfo](), defaultdict[str, list[str]](list)
    home = os.path.realpath(run.path)
    for name in names:
        place = join(run.path, name)
        paths: list[str] = []
        for top, directories, here in os.walk(place):
            paths += (join(top, file) for file in here)
            for link in filter(os.path.islink, (join(top, entry) for entry in (*directories, *here))):
                entry = os.path.relpath(os.path.realpath(link), home).partition("/")[0]
                if entry not in (os.curdir, os.pardir, name):
                    links[entry].append(f"link {link[len(run.path) + 1 :]}")
        for path in paths or [place]:
            with suppress(ReshardError):  # a link may lead to a place that may not be read
                if (info := run.store.stat(path)) is not None:
                    files[path[len(run.path) + 1 :]] = info
    return files, links


def _sizes(below: Mapping[str, ObjectInfo], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Files and bytes of each of the entries, from one listing of the run."""
    found = dict[str, tuple[int, int]](dict.fromkeys(names, (0, 0)))
    for path, info in below.items():
        parts = path.strip("/").split("/")  # some file systems of fsspec begin paths with a slash
        for count in range(1, len(parts) + 1):
            if (name := "/".join(parts[:count])) in found:
                files, size = found[name]
                found[name] = (files + 1, size + info.size_bytes)
    return found


@dataclass(frozen=True)
class _Contents:
    """What the entries of a run contain."""

    files: Mapping[str, ObjectInfo]
    """By path relative to the run."""
    sizes: Mapping[str, tuple[int, int]]
    """Number and bytes of the files of each entry."""
    links: Mapping[str, Sequence[str]]
    """Links in other entries, by the entry that they lead into."""


def _step(
    run: Location,
    around: Surroundings,
    contents: _Contents,
    name: str,
) -> RunStep | None:
    """One checkpoint; None if the entry is not one checkpoint."""
    place = run.child(*name.split("/"))
    entries = {*around.listing.by_name, *around.listing.directories}
    files, size_bytes = contents.sizes[name]
    seen = RunStep(
        name=name,
        files=files,
        size_bytes=size_bytes,
        complete=False,
        named_by=(*around.pointers_to(name), *contents.links.get(name, ())[:_MOST_LINKS]),
        in_use=name.partition("/")[0] in around.converting,
        sealed=f"{name}{SEALED}" in around.listing.by_name,
        best=tuple(_best_in(run, entries, contents.files.get(f"{name}/{TRAINER_STATE}"))),
    )
    try:
        refuse_unfinished(run, around.listing)
        found = find_checkpoint(place, None)
        if _is_run(place, name, found):
            return None
        read = read_checkpoint(place, None, OpaqueLedger(OpaquePolicy.KEEP))
        refuse_placeholders(read, EmptyWeights.REFUSE, lambda: "")
    except (SourceError, RequestError) as error:
        if error.code in _NOT_ONE_CHECKPOINT:
            return None
        return seen.model_copy(update={"code": error.code, "detail": printable(error.message, max_chars=1_024)})
    facts = {
        "format": read.format,
        "world": dict(read.world),
        "step": read.counters.steps,
        "complete": True,
        "of_training": found.format.discovery.of_training,
        "best": (*seen.best, *(e for p in best_of_callbacks(read.client_state) for e in _entries(run, entries, p))),
    }
    return seen.model_copy(update=facts)


def _is_run(place: Location, name: str, found: Found) -> bool:
    """True if a directory is a run of its own: it holds checkpoints of other steps than that of its name.

    A Trainer's `checkpoint-100` holds `latest` and `global_step100`: one checkpoint, of the step of its name.
    """
    number, last = number_of(name), parent_and_name(name)[1]
    inside = place.store.list_directory(place.path).directories
    tags = [d for d in (*inside, found.tag or "") if STEP_WORD.fullmatch(d)]
    return any(number_of(tag) != number for tag in tags) or (found.tag is not None and not STEP_WORD.fullmatch(last))


def number_of(name: str) -> int | None:
    """The last number in the name of a checkpoint; None without one."""
    numbers = _NUMBER.findall(parent_and_name(name)[1])
    return int(numbers[-1]) if numbers else None


def _with_steps(steps: Sequence[RunStep]) -> list[RunStep]:
    """The checkpoints with the numbers of their names as steps, where the others show that these are steps."""
    both = [(s.step, number_of(s.name)) for s in steps if s.step is not None]
    if any(number is not None and number != step for step, number in both):
        return list(steps)
    return [
        s.model_copy(update={"step": number_of(s.name)}) if s.step is None and STEP_WORD.fullmatch(s.name) else s
        for s in steps
    ]


# The checkpoint that a user names.


class RunDirectoryError(RequestError):
    """`request.run_directory`, with the newest complete checkpoint for callers in this process."""

    newest_url = ""
    """Its URL as it is: the texts and the details of an error hide what looks like a secret."""


def named_checkpoint(
    place: Location, source: SourceSpec, ledger: OpaqueLedger, rules: Mapping[str, Any] | None = None, target: str = ""
) -> Checkpoint:
    """Read the checkpoint that a user names at a place, as `read_checkpoint` does.

    Raises:
        RequestError: `request.run_directory` for the directory of a run; and as `read_checkpoint`.
        SourceError: As `read_checkpoint`, with the newest complete checkpoint of the run in the fix.
    """
    if source.rank_files is not None:
        return read_checkpoint(place, source.tag, ledger, rules, source, target=target)
    with naming_newest(place, source.tag):
        return read_checkpoint(place, source.tag, ledger, rules, source, target=target)


@contextmanager
def naming_newest(place: Location, tag: str | None) -> Generator[None]:
    """Name the newest complete checkpoint of the run if the checkpoint of a place and a tag cannot be read.

    Raises:
        RequestError: `request.run_directory` if the place is the directory of a run.
        SourceError: The error of the block, with another fix.
    """
    try:
        yield
    except SourceError as error:
        if error.code.startswith(_OF_A_CHOICE):
            raise
        # The frames of the failed read hold what it had parsed, and the same files are read again.
        clear_frames(error.__traceback__)
        for run, name, listing in _runs_around(place, tag):
            better = _with_newest(error, run, name, listing, of_place=run is place)
            if better is not None:
                raise better from error
        raise


def run_around(place: Location, tag: str | None) -> RunListing | None:
    """List the run around a checkpoint that cannot be used, if it has another complete checkpoint.

    Only the entries with the highest numbers are judged.

    Args:
        place: The directory of the checkpoint, or of its run.
        tag: The tag that was named.

    Returns:
        The listing of the nearest directory with a complete checkpoint other than this one (`newest` is not None), or
        None.
    """
    for _, name, listing in _runs_around(place, tag):
        if listing.newest is not None and not any(s.complete and s.name == name for s in listing.steps):
            return listing
    return None


def _runs_around(place: Location, tag: str | None) -> Iterator[tuple[Location, str, RunListing]]:
    """The directories that may be the run of a checkpoint, nearest first, with the checkpoint's name and their listing.

    The name is empty where it is unknown. Directories that cannot be listed are omitted: a service may not show what
    lies around its roots.
    """
    with suppress(ReshardError):  # the tag that a pointer or a tracker names
        tag = find_checkpoint(place, tag).tag
    run, name = place, tag or ""
    while True:
        listing = None
        with suppress(ReshardError):
            listing = steps_of(run, most=_NAMED_IN_A_FIX)
        if listing is not None:
            yield run, name, listing
        above, here = parent_and_name(run.path)
        # A Trainer's `checkpoint-100` contains the directory of the tag `global_step100`: the run is above both.
        of_tag = run is place or number_of(here) == number_of(name)
        if not (STEP_WORD.fullmatch(here) and of_tag) or above in ("", run.path):
            return
        run, name = Location(run.store, above, parent_and_name(run.url)[0]), here


def _with_newest(
    error: SourceError, run: Location, name: str, listing: RunListing, *, of_place: bool
) -> ReshardError | None:
    """The error with a fix that names the newest complete checkpoint; None if there is none, or if it cannot help.

    Args:
        error: The error.
        run: The directory of the run.
        name: The name of the checkpoint in the run, or empty.
        listing: The checkpoints of the run.
        of_place: The run is the place that the user named, so that `--tag` names its checkpoints.
    """
    complete = [s.name for s in listing.steps if s.complete]
    if listing.newest is None:
        return None
    if name in complete:
        # A Trainer's `checkpoint-100` is complete, and no tag of its run: its tag lies in it.
        lies_deeper = error.code in ("source.not_found", "checkpoint.bad_latest") and not is_tag(run, name)
        place = shlex.quote(printable(run.child(*name.split("/")).url, max_chars=1_024))
        fix = f"name the checkpoint itself: reshard inspect {place}"
        return SourceError(error.code, error.message, fix=fix, details=error.details) if lies_deeper else None
    entries = {*listing.others, *(s.name for s in listing.steps)}
    mistyped = of_place and error.code == "source.not_found" and name not in entries
    nearest = get_close_matches(name, complete, n=1, cutoff=0.8) if mistyped else []
    best = (nearest or [listing.newest])[0]
    what = "the newest complete checkpoint" if best == listing.newest else "a complete checkpoint"
    url = run.child(*best.split("/")).url
    details = {**error.details, "source": run.url, "newest": url}
    named = shlex.quote(printable(url, max_chars=1_024))
    fix = f"name {what}: reshard inspect {named}"
    # A pointer decides, also if it names nothing: then the user chooses.
    if error.code == "source.unknown_kind" and not name and not holds_pointer(run):
        of_run = RunDirectoryError(
            "request.run_directory",
            f"{printable(run.url)} is the directory of a run, and not one checkpoint; its newest complete checkpoint "
            f"is {printable(best)}{_newer(listing, best)}",
            fix=fix,
            details=details,
        )
        of_run.newest_url = url
        return of_run
    if of_place and is_tag(run, best):
        fix = f"name {what}: --tag {shlex.quote(printable(best))} (complete: {listed(complete)})"
    if error.fix.startswith("copy") and name:
        fix = f"{fix}; or {error.fix}"
    return type(error)(error.code, error.message, fix=fix, details=details)


def _newer(listing: RunListing, name: str) -> str:
    """Why newer entries of a run are not complete, as an end of a message."""
    at = next(_place_in_list(step) for step in listing.steps if step.name == name)
    broken = [
        f"{printable(s.name)}: {s.code}: {printable(s.detail, max_chars=160)}"
        for s in listing.steps
        if not s.complete and _place_in_list(s) > at
    ]
    others = [n for n in listing.others if STEP_WORD.fullmatch(n) and (number_of(n) or 0) > at[0]]
    broken += [f"{printable(n)}: no checkpoint" for n in others]
    return f" (not complete: {'; '.join(broken[:3])})" if broken else ""


# Marks of removals.


def mark_of(run: Location, name: str) -> str:
    """The path of the mark of a checkpoint's removal."""
    return join(run.path, _REMOVING + quote(name, safe="", errors="surrogateescape"))


class Removal(Enum):
    """How far the removal of a checkpoint has come that has a mark."""

    NOT_BEGUN = "not begun"
    """All of its files are as the mark records them."""
    UNDER_WAY = "under way"
    WRITTEN_AGAIN = "written again"
    """All of its files are there, and not all of them as the mark records them."""


def _removal_in(run: Location, mark: str) -> tuple[str, Removal] | None:
    """The checkpoint whose removal a mark records, and how far it has come; None for a mark that no `prune` writes.

    Whoever can write into a run could otherwise have files removed with a mark that no policy lets go.
    """
    name = unquote(mark.removeprefix(_REMOVING), errors="surrogateescape")
    path, place = join(run.path, mark), join(run.path, name)
    known = has_plain_segments(name) and "/" not in name and not name.startswith(".") and mark_of(run, name) == path
    if not known or behind_link(run, place):
        return None
    if run.store.scheme == "file" and os.path.isdir(path) and not os.path.islink(path):
        # A local checkpoint is renamed to its mark as a whole.
        return name, Removal.WRITTEN_AGAIN if os.path.lexists(place) else Removal.UNDER_WAY
    record = recorded_mark(run, path)
    if record is None or any(not file.startswith(f"{name}/") and file != name for file, _, _ in record.files):
        return None
    objects = pins_of(objects_of(run.child(name)))
    marked = {join(run.path, file): (pin, modified_at) for file, pin, modified_at in record.files}
    if not marked.keys() <= objects.keys():
        return name, Removal.UNDER_WAY
    same = all(objects[file] == facts for file, facts in marked.items())
    return name, Removal.NOT_BEGUN if same else Removal.WRITTEN_AGAIN


def objects_of(place: Location) -> list[ObjectInfo]:
    """Every file of a checkpoint, which may be one file itself."""
    own = place.store.stat(place.path)
    return place.store.list_tree(place.path) if own is None else [own]


def pins_of(objects: Iterable[ObjectInfo]) -> dict[str, tuple[str, float | None]]:
    """Pin and time of the last write of each file, by its path."""
    return {i.path: (i.pin, i.modified_at) for i in objects}


def recorded_mark(run: Location, mark: str) -> RemovalMark | None:
    """The record in a mark; None if the mark is gone, or is not a record that `prune` writes."""
    info = run.store.stat(mark)
    if info is None or info.size_bytes > _MOST_MARK_BYTES:
        return None
    try:
        return RemovalMark.model_validate(json.loads(read_bytes(run.store, info)))
    except (ValueError, RecursionError):
        return None
