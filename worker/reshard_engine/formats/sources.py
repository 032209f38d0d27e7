"""Finds the checkpoint that a URL names: its directory, and the reader that recognises the directory.

A user may name the save directory (with `latest` or `latest_universal`), one tag in it, a Hugging Face `checkpoint-N`,
or an Accelerate or Lightning directory. All but the tag hold a tag directory one level down. A user may also name a
directory of weights, or one file that a format reads on its own. Trainers leave a copy of the weights in lower
precision beside a training state, so a directory counts as weights only if no training state is found.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from reshard.choices import INCOMPLETE
from reshard.errors import ReshardError, SourceError, counted, listed, printable
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.foreign import foreign_file
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.format import NO_CHOICES, Format, Reader, ReadOptions, refuse_choices
from reshard_engine.formats.model_weights import with_placeholders_named, without_wrappers
from reshard_engine.formats.registry import formats, known_files, refuse_keys
from reshard_engine.formats.weight_files import optimizers_among, unread_optimizers
from reshard_engine.pickles.nodes import collector_paused
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.local import dead_links
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, Store, join, parent_and_name, read_bytes
from reshard_engine.storage.urls import canonical_url, is_within

# Recognises checkpoints that are not read by the names of their files, and says what reads them today. Those of
# Megatron-core are read; what is left are directories of its names in which no format finds its files.
#
# Source: Megatron-LM `training/checkpointing.py` (`latest_checkpointed_iteration.txt`, `iter_0000010/mp_rank_00`);
# verl 0.9.1 `trainer/ppo/ray_trainer.py` (`global_step_3/actor` beside a tracker with Megatron's name); SkyRL
# `skyrl_train/trainer.py` (the same under another name).

_MEGATRON_RANK = re.compile(r"mp_rank_\d+(_\d+)?(_\d+)?")
_MEGATRON_STEP = re.compile(r"iter_\d+|release")
_TRACKER = "latest_checkpointed_iteration.txt"
_TRACKERS = (_TRACKER, "latest_ckpt_global_step.txt")
"""The files in which verl and SkyRL name the number of the step that a run resumes from."""
_VERL_STEP = re.compile(r"global_step_\d+")
_WHOLE = re.compile(r"(?:pytorch_)?model\.(?:safetensors|bin)|.*\.index\.json")
_MEGATRON_FIX = (
    "convert it with Megatron's own tools (Megatron Bridge, or tools/checkpoint/convert.py) to Hugging Face weights, "
    "and name that directory; of Megatron-DeepSpeed name the directory that holds `latest`"
)


def unsupported_kind(location: Location, listing: Listing) -> SourceError | None:
    """The error for a directory of a known kind that is not supported; None for any other directory."""
    names = listing.by_name.keys()
    # verl's runs have a tracker of the same name beside directories of its own.
    tracked = _TRACKER in names and not any(map(_VERL_STEP.fullmatch, listing.directories))
    by_step = any(map(_MEGATRON_STEP.fullmatch, listing.directories))
    if tracked or by_step or any(map(_MEGATRON_RANK.fullmatch, listing.directories)):
        return _error(location, "a checkpoint of Megatron-LM", _MEGATRON_FIX)
    return None


def _holds_shards(listing: Listing) -> bool:
    """True for files of ranks that no weights in one piece lie beside: each of them looks like weights.

    The formats that read them are asked first; this is for whoever asks for weights alone.
    """
    return any(f.discovery.holds_shards(listing) for f in formats()) and not any(map(_WHOLE.fullmatch, listing.by_name))


def _error(location: Location, kind: str, fix: str) -> SourceError:
    text = f"{printable(location.url)} is {kind}: recognised, not supported yet"
    return SourceError("source.unsupported", text, fix=fix)


_POINTER_LIMIT_BYTES = 1_024
_LOOKED_INTO = 98
"""So many directories at each of two levels below one that is not a checkpoint are looked into: with the place itself
and a tag there are fewer than 200 listings, each of which costs a call to an object store."""
_LISTED_AT_ONCE = 16
"""Listings of an object store that run at once. A local directory is listed within microseconds."""
_WITHOUT_TAGS = (
    "copy the checkpoint again from where it was written: no tag is here",
    "leave --tag out, or name the directory that holds the tags",
)
"""The fixes for a tag that does not exist: one for a tag from a pointer, one for a tag of the user."""


@dataclass(frozen=True, slots=True)
class Found:
    """A directory that a reader recognises."""

    location: Location
    listing: Listing
    tag: str | None
    format: Format
    reader: Reader


def _recognise(
    location: Location, listing: Listing, tag: str | None, *, of_training: tuple[bool, ...] = (True, False)
) -> Found | None:
    """The reader of the first format that recognises a directory. Formats of training states are asked first."""
    for wanted in of_training:
        if not wanted and _holds_shards(listing):
            continue
        for known in (f for f in formats() if f.discovery.of_training is wanted):
            for reader in known.discovery.readers:
                if reader.recognises(listing) and known.discovery.owns(location, listing):
                    return Found(location, listing, tag, known, reader)
    return None


def recognised(location: Location) -> Format | None:
    """The format whose reader recognises a directory by its names; None if no reader does."""
    found = _recognise(location, location.store.list_directory(location.path), None)
    return None if found is None else found.format


class _Below:
    """The directories below a place that is not a checkpoint: each is listed once, several at once, and not all."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._known: dict[str, Listing] = {}
        self._passed: set[str] = set()

    def look(self, paths: Sequence[str]) -> dict[str, tuple[Location, Listing]]:
        """List directories, given by their paths from the place: of many those with the highest numbers."""
        ordered = sorted(paths, key=_by_number, reverse=True)
        places = {path: self._location.child(*path.split("/")) for path in ordered[:_LOOKED_INTO]}
        new = [path for path in places if path not in self._known][: 2 * _LOOKED_INTO - len(self._known)]
        if self._location.store.scheme == "file" or len(new) < 2:
            self._known.update((path, self._list(places[path])) for path in new)
        else:
            with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
                self._known.update(zip(new, pool.map(self._list, map(places.__getitem__, new)), strict=True))
        self._passed.update(path for path in ordered if path not in self._known)
        return {path: (place, self._known[path]) for path, place in places.items() if path in self._known}

    @staticmethod
    def _list(place: Location) -> Listing:
        return place.store.list_directory(place.path)

    @property
    def passed(self) -> str:
        """An end of a message that says how many directories nobody looked into; empty if there are none."""
        return f"; {len(self._passed):,} directories below it were not looked into" if self._passed else ""


def _recognise_child(location: Location, tag: str) -> Found | None:
    child = location.child(*tag.split("/"))
    listing = child.store.list_directory(child.path)
    refuse_unfinished(child, listing)
    return _recognise(child, listing, tag)


def find_checkpoint(location: Location, tag: str | None) -> Found:
    """Find the checkpoint directory for a location and a tag.

    Raises:
        SourceError: `source.not_found`, `source.unknown_kind`, `checkpoint.bad_latest`.
    """
    listing = location.store.list_directory(location.path)
    if not listing.files and not listing.directories:
        if (info := location.store.stat(location.path)) is not None:
            return _named_file(location, info, tag)
        raise nothing_at(location)
    refuse_unfinished(location, listing)
    if tag is not None:
        return _tagged(location, listing, tag, code="source.not_found", said_by="--tag")
    if (here := _recognise(location, listing, None, of_training=(True,))) is not None:
        return here
    for name in known_files().pointers:
        if (pointed := _named_by(location, listing, name)) is not None:
            return pointed
    if (here := _recognise(location, listing, None, of_training=(False,))) is not None:
        return here
    below = _Below(location)
    if (tracked := _tracked(location, below, listing)) is not None:
        return tracked
    details = _models(location, below, listing)
    known = _tag_fix(below, listing) or _below_fix(location, below, listing)
    if not known and (single := _only_file(location, listing)) is not None:
        return single
    # A script that saves each model into a directory of its own leaves the optimizer at the top (Accelerate's hooks).
    optimizers = (
        unread_optimizers(optimizers_among(listing.by_name), "these directories") if listing.directories else ""
    )
    raise SourceError(
        "source.unknown_kind",
        f"{printable(location.url)} holds no checkpoint of a known kind ({counted(len(listing.files), 'file')}, "
        f"directories: {_some(listing.directories)}){below.passed}{optimizers and f'; {optimizers}'}",
        fix=known or _of_ranks(listing) or "name the directory that holds `latest`, the rank files or the weights",
        details=details,
    )


def refuse_unfinished(location: Location, listing: Listing) -> None:
    """Refuse what lies in a directory that the Trainer has not finished.

    Raises:
        SourceError: `checkpoint.incomplete`.
    """
    if INCOMPLETE in listing.by_name:
        raise SourceError(
            "checkpoint.incomplete",
            f"{printable(location.url)} holds {INCOMPLETE}: the process that saved it did not finish",
            fix="resume from an older checkpoint",
        )


def is_tag(location: Location, name: str) -> bool:
    """True if `--tag NAME` names a checkpoint of a directory."""
    with suppress(ReshardError):
        return _recognise_child(location, name) is not None
    return False


def _tracked(location: Location, below: _Below, listing: Listing) -> Found | None:
    """The newest checkpoint of a run, as the tracker of a format names it.

    Raises:
        SourceError: `source.unsupported` for a directory of a known kind that is not supported.
    """
    for tag in (tag for known in formats() if (tag := known.discovery.tracked_tag(location, listing)) is not None):
        if (found := _recognise_child(location, tag)) is not None:
            return found
    other = unsupported_kind(location, listing)
    if other is not None and not _tag_fix(below, listing):
        raise other
    return None


def _names_to_say(listing: Listing) -> str:
    return ", or ".join(flags for f in formats() if (flags := f.discovery.names_to_say(listing)))


def _of_ranks(listing: Listing) -> str:
    ranks = _names_to_say(listing)
    return f"if the files are of FSDP's ranks: {ranks}" if ranks else ""


def _reader_of_file(info: ObjectInfo) -> tuple[Format, Reader] | None:
    """The first format that reads a file of this name on its own."""
    listing = Listing((info,), ())
    return next(((f, r) for f in formats() for r in f.discovery.file_readers if r.recognises(listing)), None)


def _named_file(location: Location, info: ObjectInfo, tag: str | None) -> Found:
    """The checkpoint in one file that the user names.

    Raises:
        SourceError: `source.unknown_kind` for a file that no format reads on its own.
    """
    known = _reader_of_file(info)
    if known is None or tag is not None:
        if (other := _foreign(location, info)) is not None:
            raise other
        raise SourceError(
            "source.unknown_kind",
            f"{printable(location.url)} is a file; a checkpoint is a directory",
            fix="name the directory that holds it",
        )
    return Found(location, Listing((info,), ()), None, *known)


def _foreign(location: Location, info: ObjectInfo) -> SourceError | None:
    """The error for a file that is no checkpoint, by its first bytes; None if they do not tell."""
    file = SourceFile(location.store, parent_and_name(info.path)[1], (info,))
    return foreign_file(file, file.read)


def _only_file(location: Location, listing: Listing) -> Found | None:
    """The only file of a directory that a format reads on its own; None if there is none.

    Raises:
        SourceError: `checkpoint.ambiguous` if there are several.
    """
    found = {n: (i, known) for n, i in listing.by_name.items() if (known := _reader_of_file(i)) is not None}
    if len(found) > 1:
        names = sorted(found)
        here = shlex.quote(printable(location.child(names[-1]).url, max_chars=1_024))
        ranks = _names_to_say(listing)
        raise SourceError(
            "checkpoint.ambiguous",
            f"{printable(location.url)} holds {len(names)} files that could each be the checkpoint: {_some(names)}",
            fix=f"name one of them: reshard inspect {here}{ranks and f'; if they are of ranks: {ranks}'}",
        )
    return next((Found(location, listing, None, *known) for _, known in found.values()), None)


def pointed_tag(location: Location, name: str) -> str | None:
    """The tag that a pointer in a directory names; None if there is no pointer, or no checkpoint that it names."""
    pointer = location.store.stat(join(location.path, name))
    if pointer is None:
        return None
    try:
        return _pointed(location, Listing((), ()), pointer, name).tag
    except SourceError:
        return None


def pointers_in(location: Location, listing: Listing) -> list[tuple[str, str]]:
    """(pointer, path of what it names) of all pointers and trackers in the directory of a run, dangling ones too.

    Raises:
        SourceError, StorageError: One of them cannot be read.
    """
    known, found = known_files(), list[tuple[str, str]]()
    for name in dict.fromkeys(known.all_pointers):
        info = listing.by_name.get(name)
        if info is not None:
            _refuse_link_elsewhere(location, info, name)
            # Loaders ignore blanks after the name, however many these are.
            text = known.tag_in(name, _beginning(location.store, info))
            path = next((p for f in formats() if (p := f.discovery.pointed_directory(name, text)) is not None), text)
            found.append((name, path))
    for known_format in formats():
        if (tag := known_format.discovery.tracked_tag(location, listing)) is not None:
            found.append((f"tracker of {known_format.name}", tag))
    name, step = _tracker(location.store, location.path, listing.by_name)
    return [*found, (name, step)] if name else found


def _beginning(store: Store, pointer: ObjectInfo) -> bytes:
    """The first bytes of a pointer, more than a name can have."""
    file = SourceFile(store, parent_and_name(pointer.path)[1], (pointer,))
    return file.read(0, min(pointer.size_bytes, _POINTER_LIMIT_BYTES))


def holds_pointer(location: Location) -> bool:
    """True if a pointer or a tracker is in a directory, whatever its text names."""
    names = location.store.list_directory(location.path).by_name
    return any(name in names for name in (*known_files().all_pointers, *_TRACKERS))


def state_here(location: Location, listing: Listing) -> bool | None:
    """True if the directory itself holds a training state, False for weights, None if neither lies directly in it."""
    here = _recognise(location, listing, None)
    return None if here is None else here.format.discovery.of_training


def is_file_of_format(info: ObjectInfo) -> bool:
    """True if a format reads a file of this name on its own."""
    return _reader_of_file(info) is not None


def _refuse_link_elsewhere(location: Location, pointer: ObjectInfo, name: str) -> None:
    """Refuse a pointer outside its directory: its content becomes part of texts, and may be that of another file."""
    if location.store.scheme == "file" and not is_within(canonical_url(pointer.path), location.url):
        raise SourceError("checkpoint.bad_latest", f"`{name}` is a link to a file elsewhere")


def _pointed(location: Location, listing: Listing, pointer: ObjectInfo, name: str) -> Found:
    if pointer.size_bytes > _POINTER_LIMIT_BYTES:
        raise SourceError(
            "checkpoint.bad_latest", f"`{name}` has {counted(pointer.size_bytes, 'byte')}; it holds one name"
        )
    _refuse_link_elsewhere(location, pointer, name)
    text = read_bytes(location.store, pointer).decode("utf-8", "replace").strip()
    text = next((found for f in formats() if (found := f.discovery.pointed_directory(name, text)) is not None), text)
    return _tagged(location, listing, text, code="checkpoint.bad_latest", said_by=f"`{name}`")


def _named_by(location: Location, listing: Listing, name: str) -> Found | None:
    """The checkpoint that a pointer names; None without that pointer.

    Raises:
        SourceError: `checkpoint.bad_latest`.
    """
    if (pointer := listing.by_name.get(name)) is not None:
        return _pointed(location, listing, pointer, name)
    return _linked(location, name) if name in listing.directories else None


def _linked(location: Location, name: str) -> Found | None:
    """The checkpoint that a pointer names as a link to the directory of a tag (`ln -sfn global_step3 latest`).

    None for a plain directory, and for a link that leads elsewhere: programs give links such names for other uses.
    """
    path = join(location.path, name)
    if location.store.scheme != "file" or not os.path.islink(path):
        return None
    tag = os.path.relpath(os.path.realpath(path), os.path.realpath(location.path))
    return None if tag == os.curdir or tag.startswith(os.pardir) else _recognise_child(location, tag)


def training_state_near(location: Location) -> str:
    """The URL of a training state below a directory or beside it, of those with the highest numbers.

    It is empty if there is none, or if the directories may not be listed.
    """
    above = Location(location.store, parent_and_name(location.path)[0], parent_and_name(location.url)[0])
    for place in (location, above):
        with suppress(ReshardError):  # a service may not show the directory around its roots
            names = [d for d in place.store.list_directory(place.path).directories if not d.startswith(".")]
            for child, inside in _Below(place).look(names).values():
                known = _recognise(child, inside, None)
                pointed = not inside.by_name.keys().isdisjoint(known_files().pointers)
                if pointed or (known is not None and known.format.discovery.of_training):
                    return child.url
    return ""


def _tagged(location: Location, listing: Listing, tag: str, *, code: str, said_by: str) -> Found:
    parts, below = tag.split("/"), _Below(location)
    if not tag or len(tag) > 512 or not tag.isprintable() or any(p in ("", ".", "..") for p in parts) or "\\" in tag:
        raise SourceError(
            "source.not_found" if said_by == "--tag" else code,
            f"{said_by} says {printable(tag)!r}, which is not a directory name",
            fix=_tag_fix(below, listing, tag) or _WITHOUT_TAGS[said_by == "--tag"],
        )
    found = _recognise_child(location, tag)
    if found is None:
        models = _models(location, below, listing, tag) if _VERL_STEP.fullmatch(tag) else {}
        fix = _tag_fix(below, listing, tag) or _WITHOUT_TAGS[said_by == "--tag"]
        raise SourceError(
            code,
            f"{said_by} names {printable(tag)!r}, where no checkpoint of a known kind is{below.passed}",
            fix=fix,
            details={"tag": printable(tag), **models},
        )
    return found


def nothing_at(location: Location) -> SourceError:
    """The error for a place without files: on this machine it says if there is a directory, or a similar name."""
    where = printable(location.url)
    if location.store.scheme != "file":
        fix = "check the path and the profile"
        return SourceError("source.not_found", f"nothing exists at {where}", fix=fix)
    parent, name = parent_and_name(location.path)
    siblings: tuple[str, ...] = ()
    with suppress(ReshardError):  # a service may not show the directory around its roots
        siblings = location.store.list_directory(parent).directories
    if name in siblings and (links := dead_links(location.path)):
        return SourceError(
            "checkpoint.incomplete",
            f"{where} holds only dead links: {links}",
            fix=f"restore the files, or copy the checkpoint again: ls -l {shlex.quote(where)}",
        )
    if name in siblings:
        fix = "name the directory that training saved into"
        return SourceError("source.not_found", f"{where} is an empty directory", fix=fix)
    if near := get_close_matches(name, siblings, n=1):
        fix = f"check the path: {printable(near[0])} is beside it"
        return SourceError("source.not_found", f"nothing exists at {where}", fix=fix)
    fix = "check the path"
    return SourceError("source.not_found", f"nothing exists at {where}", fix=fix)


def _tag_fix(below: _Below, listing: Listing, asked: str = "") -> str:
    """A sentence that names the tag that is most like the one that was asked for; empty if there are no tags."""
    looked = below.look(listing.directories)
    found = {d: _recognise(*looked[d], d) for d in listing.directories if d in looked}
    tags = [name for name, child in found.items() if child is not None and child.format.discovery.of_training]
    if not tags:
        return ""
    nearest = (get_close_matches(asked, tags, n=1, cutoff=0.0) or tags[-1:])[0]
    return f"name an existing tag: --tag {shlex.quote(nearest)} (there are: {_some(tags)})"


_ROLES_UNDER = re.compile(r"[A-Za-z_-]*\d+")
"""The name of a step's directory."""


def _models(location: Location, below: _Below, listing: Listing, tag: str = "") -> dict[str, Any]:
    """The model of a step whose run saves each model in a directory of its own, as details of an error.

    A directory of a run is taken at the step of the tag, at that which its tracker names, or at its last one. The
    details are `models`, the paths from the location, and `tracker`, the name of the run's tracker if it has one.

    Raises:
        SourceError: `checkpoint.ambiguous` for several models, such as actor and critic.
    """
    steps = [tag] if tag else [d for d in listing.directories if _ROLES_UNDER.fullmatch(d)]
    step, names, name = "", listing.directories, parent_and_name(location.path)[1]
    tracker, tracked = _tracker(location.store, location.path, listing.by_name) if steps else ("", "")
    if steps:
        name = tracked if not tag and tracked in steps else max(steps, key=_by_number)
        looked, step = below.look([tag] if tag else names), f"{name}/"
        names = looked[name][1].directories if name in looked else ()
    roles = [f"{step}{d}" for d in names if not d.startswith(".") and not re.search(r"\d", d)]
    looked = below.look(roles) if len(roles) > 1 or _VERL_STEP.fullmatch(name) else {}
    found = [
        p
        for p in roles
        if p in looked and (k := _recognise(*looked[p], p)) is not None and k.format.discovery.of_training
    ]
    if found and not steps:
        tracker, _ = _tracker(location.store, parent_and_name(location.path)[0])
    details: dict[str, Any] = {"models": found, "tracker": tracker} if found else {}
    if len(found) > 1:
        text = f"{printable(location.url)} holds {len(found)} models, each with a training state of its own"
        flags = ", or ".join(f"--tag {shlex.quote(printable(path))}" for path in found)
        raise SourceError("checkpoint.ambiguous", f"{text}: {_some(found)}", fix=flags, details=details)
    return details


def _tracker(store: Store, path: str, listed: Collection[str] = _TRACKERS) -> tuple[str, str]:
    """The name of a run's tracker, and the step that it names; empty without one among the names that are listed."""
    with suppress(ReshardError):  # a service may not show the directory around its roots
        for name in _TRACKERS:
            info = store.stat(join(path, name)) if path and name in listed else None
            if info is not None:
                return name, f"global_step_{_beginning(store, info).decode('utf-8', 'replace').strip()}"
    return "", ""


def _below_fix(location: Location, below: _Below, listing: Listing) -> str:
    """A sentence with the command for a checkpoint one or two levels down; empty if there is none.

    Raises:
        SourceError: `source.unsupported` if the checkpoints there are all of a kind that is not supported.
    """
    level = [name for name in listing.directories if not name.startswith(".")]
    for _ in range(2):
        found: dict[str, bool] = {}
        deeper: list[str] = []
        looked = below.look(level)
        for path, (child, inside) in looked.items():
            known = _recognise(child, inside, None)
            pointed = not inside.by_name.keys().isdisjoint(known_files().pointers)
            if known is not None or pointed:
                found[path] = pointed or (known is not None and known.format.discovery.of_training)
            deeper += [f"{path}/{name}" for name in inside.directories if not name.startswith(".")]
        if found:
            return _named_below(location, sorted(found, key=lambda path: (not found[path], _newest_first(path))))
        for child, inside in looked.values():
            if (other := unsupported_kind(child, inside)) is not None:
                raise other
        level = deeper
    return ""


def _named_below(location: Location, paths: list[str]) -> str:
    first = shlex.quote(printable(location.child(*paths[0].split("/")).url, max_chars=1_024))
    more = f"; there are: {_some(paths)}" if len(paths) > 1 else ""
    return f"name the checkpoint below it: reshard inspect {first}{more}"


def _by_number(path: str) -> list[tuple[int, str]]:
    """A key that orders names as people do: `checkpoint-9` comes before `checkpoint-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,18})", path)]


def _newest_first(path: str) -> list[tuple[bool, int, str]]:
    """A key that orders names as `_by_number` does, but the highest number first: `unet` comes before `unet_ema`."""
    return [(number < 0, -number, text) for number, text in _by_number(path)]


def _some(names: tuple[str, ...] | list[str]) -> str:
    return listed(names) or "none"


def read_checkpoint(
    location: Location,
    tag: str | None,
    ledger: OpaqueLedger,
    rules: Mapping[str, Any] | None = None,
    choices: SourceChoices = NO_CHOICES,
    *,
    target: str = "",
) -> Checkpoint:
    """Read the checkpoint of a location and an optional tag.

    Args:
        location: The place that the user named.
        tag: The tag, if the user named one.
        ledger: The policy for objects of classes that are not on the allow-list.
        rules: How tensor parallelism cut parameters, in place of what the checkpoint says (`requested_rules`).
        choices: The user's choices where the files leave several ways to read them.
        target: The target that it is read for, if there is one.

    Raises:
        SourceError: As `find_checkpoint`, and all errors of the reader.
        RequestError: `request.invalid` for choices that this kind of checkpoint does not leave.
    """
    found = find_checkpoint(location, tag) if choices.rank_files is None else _of_names(location, tag)
    if not found.format.discovery.takes_choices:
        refuse_choices(choices, f"{printable(found.location.url)} is of a kind that holds one model")
    with collector_paused():
        options = ReadOptions(ledger, found.tag, rules, choices, target, refuse_keys)
        try:
            checkpoint = found.reader.read(found.location, found.listing, options)
        except SourceError as error:
            raise _with_dead_links(error, found.location) from error
        return _as_read(checkpoint, found)


def _with_dead_links(error: SourceError, location: Location) -> SourceError:
    """The error of a missing file, with the dead links that lie in its place."""
    if location.store.scheme != "file" or error.code not in ("checkpoint.incomplete", "source.not_found"):
        return error
    links = dead_links(location.path)
    message = f"{error.message}; {links}"
    return SourceError("checkpoint.incomplete", message, fix=error.fix, details=error.details) if links else error


def _as_read(checkpoint: Checkpoint, found: Found) -> Checkpoint:
    return with_placeholders_named(without_wrappers(replace(checkpoint, family=found.format.name)))


def _of_names(location: Location, tag: str | None) -> Found:
    """The directory whose files the user names by a pattern, with the reader of such files.

    Raises:
        SourceError: `source.not_found`.
    """
    known, reader = next((f, f.discovery.named_reader) for f in formats() if f.discovery.named_reader is not None)
    place = location if tag is None else location.child(*tag.split("/"))
    listing = place.store.list_directory(place.path)
    if not listing.files and not listing.directories:
        raise nothing_at(place)
    return Found(place, listing, tag, known, reader)


def read_weights(location: Location, listing: Listing, ledger: OpaqueLedger) -> Checkpoint | None:
    """Read the weights of a directory without a training state; None if no format recognises any.

    Raises:
        SourceError: Any error of the reader.
    """
    found = _recognise(location, listing, None, of_training=(False,))
    if found is None:
        return None
    return _as_read(found.reader.read(location, listing, ReadOptions(ledger)), found)
