"""The steps of a run: which are complete, which is the newest, and the removal of old ones (`reshard prune`).

`steps_of` is the only judge of what is complete and what is the newest: `reshard ls`, `inspect`, `prune`, `ensure` and
the fixes of errors ask it.

Whatever is not certainly an old, complete, unnamed checkpoint stays. A checkpoint stops being listed with the first
operation of its removal, and any later call ends a removal that was interrupted.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import partial
from traceback import clear_frames
from typing import Any
from urllib.parse import quote, unquote

from reshard.choices import SEALED, EmptyWeights, OpaquePolicy
from reshard.errors import RequestError, ReshardError, SourceError, StorageError, listed, printable
from reshard.models.reports import PruneDecision, PrunePolicy, PruneReport, RunListing, RunStep
from reshard.options import SourceSpec
from reshard.wire_model import WireModel
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.model_weights import refuse_placeholders
from reshard_engine.formats.registry import known_files
from reshard_engine.formats.sources import (
    Found,
    find_checkpoint,
    holds_pointer,
    is_file_of_format,
    is_tag,
    nothing_at,
    pointers_in,
    read_checkpoint,
    read_weights,
    refuse_unfinished,
    state_here,
)
from reshard_engine.formats.trainer_files import STATE_LIMIT_BYTES, TRAINER_STATE, best_checkpoint_in, best_of_callbacks
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.local_writes import sync_directory, unlink, write_file, writing
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, ObjectStore, join, parent_and_name, read_bytes
from reshard_engine.storage.urls import has_plain_segments

_MOST_ENTRIES = 10_000
_READ_AT_ONCE = 8
"""Checkpoints of an object store whose metadata are read together."""
_REMOVING = ".reshard-removing-"
"""Begins the name of a local directory that is being removed, and of the object that says so of a prefix."""
_CONVERTING = re.compile(r"\.(.+)\.reshard-(?:claim|old|[0-9a-f]{16}(?:\.\w+)?)")
"""Claims, journals and staging directories of conversions, beside their target."""
_STEP_WORD = re.compile(r"\D*(?:step|iter|epoch|ckpt|checkpoint)\D*\d+", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}")
_MOST_MARK_BYTES = 256 << 20
_WRITTEN_AGAIN = "its files were written again meanwhile"
_MOST_NAME_BYTES, _MOST_KEY_BYTES = 255 - len(".new"), 1024
"""Longest name of a mark in a local directory (ext4, XFS and others), and its longest key in an object store (S3,
Google Cloud Storage, Azure)."""
_WEIGHTS = (".safetensors", ".bin", ".index.json")
"""Ends of names of files that a training state may be read from, and that are weights of their own as well."""
_NOT_ONE_CHECKPOINT = frozenset({"source.unknown_kind", "source.not_found"})
_NAMED_IN_A_FIX = 32
"""For the fix of an error, so many entries of a run are judged: those with the highest numbers."""
_MOST_LINKS = 3
"""So many links into a checkpoint are listed with it."""
_OF_A_CHOICE = ("checkpoint.ambiguous", "checkpoint.unexplained", "rules.", "source.unsupported", "source.too_slow")
"""Errors that another checkpoint of the same run would raise as well."""


class _Mark(WireModel):
    """The record beside a checkpoint of the files that are removed of it."""

    first: int
    """So many of the files go before the others, in this order."""
    files: tuple[tuple[str, str, float | None], ...]
    """Paths relative to the run, each with its pin and the time of its last write: on S3 a pin is an ETag, which is the
    same for the same bytes."""


@dataclass(frozen=True)
class _Surroundings:
    """The facts of a run's directory about its entries; they are read anew before each removal."""

    run: Location
    listing: Listing
    named: Mapping[str, Sequence[str]]
    """The pointers, trackers and links by the entry that they name."""
    converting: frozenset[str]
    removing: Mapping[str, _Removal]
    """The removals that have marks, by checkpoint."""
    foreign_marks: frozenset[str]
    """Names that begin as marks of removals do, and that `prune` does not write."""
    links: frozenset[str]

    @classmethod
    def of(cls, run: Location) -> _Surroundings:
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
        marks = {n: _removal_in(run, n) for n in names if n.startswith(_REMOVING)}
        return cls(
            run,
            listing,
            named,
            frozenset(m[1] for n in names if (m := _CONVERTING.fullmatch(n)) is not None),
            dict(removal for removal in marks.values() if removal is not None),
            frozenset(mark for mark, removal in marks.items() if removal is None),
            links,
        )

    def pointers_to(self, name: str) -> tuple[str, ...]:
        """The pointers, trackers and links that name an entry, or something in it."""
        return tuple(
            p for path, found in self.named.items() if path == name or path.startswith(f"{name}/") for p in found
        )

    @property
    def hidden(self) -> frozenset[str]:
        """The checkpoints that lack files because their removal was interrupted."""
        return frozenset(name for name, removal in self.removing.items() if removal is _Removal.UNDER_WAY)

    def protects(self, name: str) -> str:
        """Why an entry may not be removed, whatever the policy says; empty if it may."""
        if found := self.pointers_to(name):
            return f"named by {', '.join(found)}"
        if name.partition("/")[0] in self.converting:
            return "a conversion into it has not ended, or has left files: reshard clean"
        if _behind_link(self.run, join(self.run.path, name)):
            return "a part of its path is a link: its files may belong to another run"
        return ""


def _behind_link(run: Location, path: str) -> bool:
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
    return _listed(run, _Surroundings.of(run), most)[0]


def _listed(
    run: Location, around: _Surroundings, most: int | None = None
) -> tuple[RunListing, Mapping[str, ObjectInfo]]:
    """The checkpoints of a run, and the files of the run by their relative paths."""
    listing = around.listing
    if not listing.files and not listing.directories:
        raise nothing_at(run)
    candidates = _candidates(run, around)
    if most is not None:
        candidates = sorted(candidates, key=lambda name: (-1 if (n := number_of(name)) is None else n, name))[-most:]
    local = run.store.scheme == "file"
    below = _files_below(run, candidates) if local else run.files()
    # A directory that is no checkpoint may hold links to checkpoints as well.
    links = _links_between(run, {*candidates, *listing.directories}) if local else {}
    sizes = _sizes(below, candidates)
    # SeaweedFS 4 lists a prefix for a while after its last object is gone.
    names = [name for name, (files, _) in sizes.items() if files or local]
    at_once = 1 if local else _READ_AT_ONCE
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(partial(_step, run, around, _Contents(below, sizes, links)), names))
    steps = _with_steps([step for step in found if step is not None])
    others = [name for name, step in zip(names, found, strict=True) if step is None] + sorted(around.foreign_marks)
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


def _candidates(run: Location, around: _Surroundings) -> list[str]:
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
    names = [n for n in names if n not in around.links and n not in around.hidden]
    if len(names) > _MOST_ENTRIES:
        raise RequestError(
            "request.invalid",
            f"{printable(run.url)} has {len(names):,} entries, and at most {_MOST_ENTRIES:,} are looked into",
            fix="name the directory of one run",
        )
    return sorted(dict.fromkeys([*names, *deep]))


def _files_below(run: Location, names: Iterable[str]) -> dict[str, ObjectInfo]:
    """The files of the entries of a local run, by their paths relative to it.

    Links to directories are not followed: one may lead to a data set, or to the root of a file system.
    """
    files: dict[str, ObjectInfo] = {}
    for path in (path for name in names for path in _paths_below(run, name)):
        with suppress(ReshardError):  # a link may lead to a place that may not be read
            if (info := run.store.stat(path)) is not None:
                files[path[len(run.path) + 1 :]] = info
    return files


def _paths_below(run: Location, name: str) -> list[str]:
    place = join(run.path, name)
    return [join(top, file) for top, _, files in os.walk(place) for file in files] or [place]


def _links_between(run: Location, names: Iterable[str]) -> dict[str, list[str]]:
    """The links in entries of a local run that lead into other entries, by the entry that they lead into."""
    links = defaultdict[str, list[str]](list)
    home = os.path.realpath(run.path)
    for name in names:
        for top, directories, files in os.walk(join(run.path, name)):
            for path in (join(top, entry) for entry in (*directories, *files)):
                if os.path.islink(path):
                    entry = os.path.relpath(os.path.realpath(path), home).partition("/")[0]
                    if entry not in (os.curdir, os.pardir, name):
                        links[entry].append(f"link {path[len(run.path) + 1 :]}")
    return links


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
    around: _Surroundings,
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
        "of_training": found.format.of_training,
        "best": (*seen.best, *(e for p in best_of_callbacks(read.client_state) for e in _entries(run, entries, p))),
    }
    return seen.model_copy(update=facts)


def _is_run(place: Location, name: str, found: Found) -> bool:
    """True if a directory is a run of its own: it holds checkpoints of other steps than that of its name.

    A Trainer's `checkpoint-100` holds `latest` and `global_step100`: one checkpoint, of the step of its name.
    """
    number, last = number_of(name), parent_and_name(name)[1]
    inside = place.store.list_directory(place.path).directories
    tags = [d for d in (*inside, found.tag or "") if _STEP_WORD.fullmatch(d)]
    return any(number_of(tag) != number for tag in tags) or (found.tag is not None and not _STEP_WORD.fullmatch(last))


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
        s.model_copy(update={"step": number_of(s.name)}) if s.step is None and _STEP_WORD.fullmatch(s.name) else s
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
        if not (_STEP_WORD.fullmatch(here) and of_tag) or above in ("", run.path):
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
    others = [n for n in listing.others if _STEP_WORD.fullmatch(n) and (number_of(n) or 0) > at[0]]
    broken += [f"{printable(n)}: no checkpoint" for n in others]
    return f" (not complete: {'; '.join(broken[:3])})" if broken else ""


# Deciding.


def decide(listing: RunListing, policy: PrunePolicy) -> list[PruneDecision]:
    """Decide which checkpoints of a run a policy keeps, and why; it is pure.

    Kept whatever the policy says: what is named by a pointer, is in use, is not complete, has no step, or has a name
    that is not of a step, such as `best`; and the best checkpoint that the Trainer or Lightning recorded in a step that
    is kept, which training from that step loads at its end (`load_best_model_at_end`, `ckpt_path="best"`).
    """
    # Newer weights alone do not cost a run the last states that it can resume from.
    last = {step for states in (False, True) for step in _complete_steps(listing, states=states)[: policy.keep_last]}
    reasons = {s.name: _kept_for(s, policy, last) for s in listing.steps}
    bests = {s.name: s.best for s in listing.steps}
    kept = [name for name, reason in reasons.items() if reason]
    while kept:
        name = kept.pop()
        for best in bests[name]:
            if reasons.get(best) == "":
                reasons[best] = f"the best checkpoint of {name}, by its record"
                kept.append(best)
    return [
        PruneDecision(name=s.name, step=s.step, files=s.files, size_bytes=s.size_bytes, kept_for=reasons[s.name])
        for s in listing.steps
    ]


def _complete_steps(listing: RunListing, *, states: bool) -> list[int]:
    """The steps of complete checkpoints, the newest first: of all, or of those with the state of a training."""
    known = {s.step for s in listing.steps if s.complete and s.step is not None and (s.of_training or not states)}
    return sorted(known, reverse=True)


def _kept_for(step: RunStep, policy: PrunePolicy, last: Collection[int]) -> str:
    if step.named_by:
        return f"named by {', '.join(step.named_by)}"
    if step.in_use:
        return "a conversion into it has not ended, or has left files: reshard clean"
    if not step.complete:
        return f"not complete: {step.code}"
    if step.step is None:
        return "its step is not known"
    if number_of(step.name) != step.step and not _STEP_WORD.fullmatch(parent_and_name(step.name)[1]):
        return "its name says no step: somebody named it"
    if step.step in last:
        return f"one of the last {policy.keep_last}"
    if policy.keep_sealed and step.sealed:
        return "sealed"
    if policy.keep_every is not None and step.step % policy.keep_every == 0:
        return f"a multiple of {policy.keep_every}"
    return ""


# What a checkpoint leaves if only its weights are kept.


def _state_files(run: Location, name: str) -> tuple[list[ObjectInfo], str]:
    """The files of a checkpoint that its weights do not need, or why none can go.

    They can go if the step holds weights in files of their own, as a Trainer saves them, and if what is left is read as
    weights with every parameter of the training state.
    """
    place, ledger = run.child(*name.split("/")), OpaqueLedger(OpaquePolicy.KEEP)
    found = find_checkpoint(place, None)
    if not found.format.of_training:
        return [], "it holds weights alone"
    state = read_checkpoint(place, None, ledger)
    below = {i.path: i for f in state.files for i in f.objects if i.path.startswith(f"{place.path}/")}
    listing = place.store.list_directory(place.path)
    inner = (found.tag or "").partition("/")[0]
    if inner:
        below |= {i.path: i for i in place.store.list_tree(join(place.path, inner))}
        below |= {i.path: i for name, i in listing.by_name.items() if name in known_files().pointers}
    weights = _weights_without(place, listing, below, inner)
    needed = set[str]() if weights is None else {i.path for f in weights.files for i in f.objects}
    lost = {p.fqn for p in state.parameters} - ({p.fqn for p in weights.parameters} if weights is not None else set())
    lost -= set() if weights is None else weights.shared.keys()
    if weights is None or lost:
        return [], (
            f"its weights are in no files of their own ({len(lost):,} of {len(state.parameters):,} parameters would be "
            f"lost): reshard convert {printable(place.url)} DST --to safetensors writes some"
        )
    going = [info for path, info in below.items() if path not in needed]
    if any(_behind_link(run, os.path.dirname(info.path)) for info in going):
        return [], "files of its training state are in a linked directory, which may belong to another run"
    return going, "" if going else "it holds weights alone"


def _weights_without(place: Location, listing: Listing, going: Collection[str], inner: str) -> Checkpoint | None:
    """The weights in a directory, read as if the files of the training state were gone already."""
    left = Listing(
        tuple(i for i in listing.files if i.path not in going or i.path.endswith(_WEIGHTS)),
        tuple(d for d in listing.directories if d != inner),
    )
    try:
        return read_weights(place, left, OpaqueLedger(OpaquePolicy.KEEP))
    except SourceError:
        return None


# Removing.


def prune(run: Location, policy: PrunePolicy, *, only: Collection[str] | None) -> PruneReport:
    """Decide what goes, and remove it if `only` says so.

    Args:
        run: The directory of the run.
        policy: What is kept.
        only: The names that may be removed, as a caller has seen and confirmed them; None removes nothing.

    Raises:
        RequestError: `request.unknown_scheme` for storage that is only read.
        StorageError: A removal failed; it is ended by the next call.
    """
    if run.store.scheme != "file" and not isinstance(run.store, ObjectStore):
        raise RequestError(
            "request.unknown_scheme",
            f"nothing can be removed from {printable(run.url)}: reshard only reads there",
            fix="remove the steps with the tools of the store; `reshard ls` lists them",
        )
    around = _Surroundings.of(run)
    listing, files = _listed(run, around)
    decisions = [_of_markable(run, _of_removal(found, around.removing)) for found in decide(listing, policy)]
    parts: dict[str, list[ObjectInfo]] = {}
    if policy.weights_only:
        decisions = [_of_weights(run, found, parts) for found in decisions]
    finished = list(listing.removing)
    if only is not None:
        finished = [name for name in finished if _ended(run, name, around.removing[name])]
        decisions = [_removed(run, d, parts.get(d.name), files) if d.name in only else d for d in decisions]
    return PruneReport(
        url=run.url,
        removed=only is not None,
        weights_only=policy.weights_only,
        decisions=tuple(decisions),
        finished=tuple(finished),
        others=listing.others,
    )


def _of_weights(run: Location, found: PruneDecision, parts: dict[str, list[ObjectInfo]]) -> PruneDecision:
    """The decision for a checkpoint of which only the training state goes; its files are noted in `parts`."""
    if found.kept_for:
        return found
    going, why = _state_files(run, found.name)
    parts[found.name] = going
    facts = {"files": len(going), "size_bytes": sum(i.size_bytes for i in going)} if going else {}
    return found.model_copy(update={**facts, "kept_for": why})


def _of_markable(run: Location, found: PruneDecision) -> PruneDecision:
    """The decision for a checkpoint, which stays if a store takes no mark of that length.

    Decided before the first removal, it does not end the command between two removals.
    """
    mark = os.fsencode(_mark_of(run, found.name))
    local = run.store.scheme == "file"
    long = len(mark.rpartition(b"/")[2]) > _MOST_NAME_BYTES if local else len(mark.partition(b"/")[2]) > _MOST_KEY_BYTES
    return found.model_copy(update={"kept_for": "its name is too long"}) if long and not found.kept_for else found


def _of_removal(found: PruneDecision, removing: Mapping[str, _Removal]) -> PruneDecision:
    """The decision for a checkpoint, which stays if it was written again since its removal began."""
    again = removing.get(found.name) is _Removal.WRITTEN_AGAIN and not found.kept_for
    return found.model_copy(update={"kept_for": "it was written again since its removal began"}) if again else found


def _removed(
    run: Location, found: PruneDecision, parts: Sequence[ObjectInfo] | None, files: Mapping[str, ObjectInfo]
) -> PruneDecision:
    """Remove a checkpoint or a part of it, unless something names or writes it by now.

    Args:
        run: The directory of the run.
        found: The decision.
        parts: The files that go; None for all.
        files: The files of the run, by relative path, when the checkpoint was judged.
    """
    why = found.kept_for or _Surroundings.of(run).protects(found.name)
    if not why and _facts(_files_of(run, found.name), found.name) != _facts(files, found.name):
        why = _WRITTEN_AGAIN
    if not why and parts is None and run.store.scheme == "file" and os.path.isdir(join(run.path, found.name)):
        _remove_directory(run, found.name)
    elif not why:
        going = parts if parts is not None else _objects(run.child(*found.name.split("/")))
        unclear = [i.path for i in going if not _is_clear(run, i.path)]
        if unclear:
            why = f"a segment of a name in it is empty, `.` or `..`: {printable(unclear[0])}"
        else:
            _mark(run, found.name, going)
            if not _end_removal(run, found.name) and going:
                why = _WRITTEN_AGAIN
    return found.model_copy(update={"kept_for": why})


def _facts(files: Mapping[str, ObjectInfo], name: str) -> dict[str, tuple[str, float | None]]:
    """Pin and time of each file of an entry."""
    return {path: (i.pin, i.modified_at) for path, i in files.items() if f"{path}/".startswith(f"{name}/")}


def _files_of(run: Location, name: str) -> dict[str, ObjectInfo]:
    """The files of an entry now, as `_listed` lists those of the run."""
    if run.store.scheme == "file":
        return _files_below(run, [name])
    return {i.path[len(run.path) + 1 :]: i for i in _objects(run.child(*name.split("/")))}


def _is_clear(run: Location, path: str) -> bool:
    """True if no program resolves the path of an object of a run to another object. A placeholder ends with a slash."""
    return has_plain_segments(path[len(run.path) + 1 :].removesuffix("/"))


def _mark_of(run: Location, name: str) -> str:
    return join(run.path, _REMOVING + quote(name, safe="", errors="surrogateescape"))


class _Removal(Enum):
    """How far the removal of a checkpoint has come that has a mark."""

    NOT_BEGUN = "not begun"
    """All of its files are as the mark records them."""
    UNDER_WAY = "under way"
    WRITTEN_AGAIN = "written again"
    """All of its files are there, and not all of them as the mark records them."""


def _removal_in(run: Location, mark: str) -> tuple[str, _Removal] | None:
    """The checkpoint whose removal a mark records, and how far it has come; None for a mark that no `prune` writes.

    Whoever can write into a run could otherwise have files removed with a mark that no policy lets go.
    """
    name = unquote(mark.removeprefix(_REMOVING), errors="surrogateescape")
    path, place = join(run.path, mark), join(run.path, name)
    known = has_plain_segments(name) and "/" not in name and not name.startswith(".") and _mark_of(run, name) == path
    if not known or _behind_link(run, place):
        return None
    if run.store.scheme == "file" and os.path.isdir(path) and not os.path.islink(path):
        # A local checkpoint is renamed to its mark as a whole.
        return name, _Removal.WRITTEN_AGAIN if os.path.lexists(place) else _Removal.UNDER_WAY
    record = _recorded(run, path)
    if record is None or any(not file.startswith(f"{name}/") and file != name for file, _, _ in record.files):
        return None
    objects = {i.path: (i.pin, i.modified_at) for i in _objects(run.child(name))}
    marked = {join(run.path, file): (pin, modified_at) for file, pin, modified_at in record.files}
    if not marked.keys() <= objects.keys():
        return name, _Removal.UNDER_WAY
    same = all(objects[file] == facts for file, facts in marked.items())
    return name, _Removal.NOT_BEGUN if same else _Removal.WRITTEN_AGAIN


def _objects(place: Location) -> list[ObjectInfo]:
    """Every file of a checkpoint, which may be one file itself."""
    own = place.store.stat(place.path)
    return place.store.list_tree(place.path) if own is None else [own]


def _remove_directory(run: Location, name: str) -> None:
    """Rename a local checkpoint to a hidden name of the run, in one step, then remove that."""
    aside = _mark_of(run, name)
    with writing(aside):
        _delete_local(aside)
        os.rename(join(run.path, name), aside)
        sync_directory(run.path)
        _delete_local(aside)


def _delete_local(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        unlink(path)


def _mark(run: Location, name: str, going: Sequence[ObjectInfo]) -> None:
    """Say beside the checkpoint which of its files go: those first without which no loader begins."""
    known = known_files()
    turns = {i.path: 0 if i.path.endswith(known.pointers) else 1 if known.needs(i.path) else 2 for i in going}
    ordered = sorted(going, key=lambda info: turns[info.path])
    first = sum(turn < 2 for turn in turns.values())
    record = _Mark(
        first=first,
        files=tuple((i.path[len(run.path) + 1 :], i.pin, i.modified_at) for i in ordered),
    )
    # `model_dump_json` rejects names that are not UTF-8; `json` escapes them.
    text = json.dumps(record.model_dump()).encode()
    mark = _mark_of(run, name)
    if isinstance(run.store, ObjectStore):
        run.store.put(mark, text, metadata={}, if_absent=False)
        return
    with writing(mark):
        write_file(f"{mark}.new", text)
        os.replace(f"{mark}.new", mark)
        sync_directory(run.path)


def _ended(run: Location, name: str, removal: _Removal) -> bool:
    """True if a removal that an earlier call began has ended now. A mark that the store rejects does not stop others.

    A removal that removed nothing yet, or whose files were written again, ends with its mark: the policy decides anew.

    Raises:
        StorageError: The store cannot be reached, or denies the removal.
    """
    mark = _mark_of(run, name)
    renamed = run.store.scheme == "file" and os.path.isdir(mark)
    try:
        if removal is _Removal.UNDER_WAY or renamed:
            return _end_removal(run, name) is not None
        if isinstance(run.store, ObjectStore):
            run.store.delete([mark])
        else:
            with writing(mark):
                unlink(mark)
        return True
    except (SourceError, StorageError) as error:
        if isinstance(error, StorageError) and error.code != "storage.protocol":
            raise
        return False


def _end_removal(run: Location, name: str) -> int | None:
    """End a removal that was begun; returns how many files or directories it removed, None if it may not end.

    A file that was written again since then is another file, and stays, also if it has the same bytes.
    """
    mark = _mark_of(run, name)
    if run.store.scheme == "file" and os.path.isdir(mark):
        with writing(mark):
            _delete_local(mark)
        return 1
    record = _recorded(run, mark)
    if record is None or _Surroundings.of(run).protects(name):
        return None
    first = {join(run.path, path) for path, _, _ in record.files[: record.first]}
    doomed = _unchanged(run, name, record)
    if isinstance(run.store, ObjectStore):
        run.store.delete([path for path in doomed if path in first])
        run.store.delete([path for path in doomed if path not in first], in_order=False)
        run.store.delete([mark])
        return len(doomed)
    with writing(mark):
        for path in doomed:
            unlink(path)
        for directory in sorted({os.path.dirname(path) for path in doomed}, key=len, reverse=True):
            with suppress(OSError):  # another file lies there
                os.rmdir(directory)
        unlink(mark)
    return len(doomed)


def _recorded(run: Location, mark: str) -> _Mark | None:
    """The record in a mark; None if the mark is gone, or is not a record that `prune` writes."""
    info = run.store.stat(mark)
    if info is None or info.size_bytes > _MOST_MARK_BYTES:
        return None
    try:
        return _Mark.model_validate(json.loads(read_bytes(run.store, info)))
    except (ValueError, RecursionError):
        return None


def _unchanged(run: Location, name: str, record: _Mark) -> list[str]:
    """The paths of the files in a mark that are still the marked files, in the order of the mark."""
    objects = {i.path: (i.pin, i.modified_at) for i in _objects(run.child(*name.split("/")))}
    marked = [(join(run.path, path), pin, modified_at) for path, pin, modified_at in record.files]
    return [
        path
        for path, pin, modified_at in marked
        if objects.get(path) == (pin, modified_at)
        and _is_clear(run, path)
        and not _behind_link(run, os.path.dirname(path))
    ]
