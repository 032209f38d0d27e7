"""`reshard prune`: decides which checkpoints of a run go, and removes them.

Whatever is not certainly an old, complete, unnamed checkpoint stays. A checkpoint stops being listed with the first
operation of its removal, and any later call ends a removal that was interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, SourceError, StorageError, printable
from reshard.models.reports import PruneDecision, PrunePolicy, PruneReport, RunListing, RunStep
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import known_files
from reshard_engine.formats.sources import find_checkpoint, read_checkpoint, read_weights
from reshard_engine.operations.runs.steps import (
    STEP_WORD,
    Removal,
    RemovalMark,
    Surroundings,
    behind_link,
    files_below,
    listed_with_files,
    mark_of,
    number_of,
    objects_of,
    pins_of,
    recorded_mark,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.local_writes import sync_directory, unlink, write_file, writing
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, ObjectStore, join, parent_and_name
from reshard_engine.storage.urls import has_plain_segments

_WRITTEN_AGAIN = "its files were written again meanwhile"
_MOST_NAME_BYTES, _MOST_KEY_BYTES = 255 - len(".new"), 1024
"""Longest name of a mark in a local directory (ext4, XFS and others), and its longest key in an object store (S3,
Google Cloud Storage, Azure)."""
_WEIGHTS = (".safetensors", ".bin", ".index.json")
"""Ends of names of files that a training state may be read from, and that are weights of their own as well."""


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
    if number_of(step.name) != step.step and not STEP_WORD.fullmatch(parent_and_name(step.name)[1]):
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
    if not found.format.discovery.of_training:
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
    if any(behind_link(run, os.path.dirname(info.path)) for info in going):
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
    around = Surroundings.of(run)
    listing, files = listed_with_files(run, around)
    decisions = [_of_markable(run, _of_removal(found, around.removing)) for found in decide(listing, policy)]
    parts: dict[str, list[ObjectInfo]] = {}
    if policy.weights_only:
        decisions = [_of_weights(run, found, parts) for found in decisions]
    finished = list(listing.removing)
    if only is not None:
        finished = [name for name in finished if _ended(run, name, around.removing[name])]
        judged = defaultdict[str, list[ObjectInfo]](list)
        for path, info in files.items():
            judged[path.partition("/")[0]].append(info)
        decisions = [_removed(run, d, parts.get(d.name), judged[d.name]) if d.name in only else d for d in decisions]
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
    mark = os.fsencode(mark_of(run, found.name))
    local = run.store.scheme == "file"
    long = len(mark.rpartition(b"/")[2]) > _MOST_NAME_BYTES if local else len(mark.partition(b"/")[2]) > _MOST_KEY_BYTES
    return found.model_copy(update={"kept_for": "its name is too long"}) if long and not found.kept_for else found


def _of_removal(found: PruneDecision, removing: Mapping[str, Removal]) -> PruneDecision:
    """The decision for a checkpoint, which stays if it was written again since its removal began."""
    again = removing.get(found.name) is Removal.WRITTEN_AGAIN and not found.kept_for
    return found.model_copy(update={"kept_for": "it was written again since its removal began"}) if again else found


def _removed(
    run: Location, found: PruneDecision, parts: Sequence[ObjectInfo] | None, judged: Sequence[ObjectInfo]
) -> PruneDecision:
    """Remove a checkpoint or a part of it, unless something names or writes it by now.

    Args:
        run: The directory of the run.
        found: The decision.
        parts: The files that go; None for all.
        judged: The files of the checkpoint when it was judged.
    """
    why = found.kept_for or Surroundings.of(run).protects(found.name)
    present = [] if why else _files_of(run, found.name)
    if not why and pins_of(present) != pins_of(judged):
        why = _WRITTEN_AGAIN
    if not why and parts is None and run.store.scheme == "file" and os.path.isdir(join(run.path, found.name)):
        _remove_directory(run, found.name)
    elif not why:
        going = present if parts is None else parts
        unclear = [i.path for i in going if not _is_clear(run, i.path)]
        if unclear:
            why = f"a segment of a name in it is empty, `.` or `..`: {printable(unclear[0])}"
        else:
            _mark(run, found.name, going)
            if not _end_removal(run, found.name) and going:
                why = _WRITTEN_AGAIN
    return found.model_copy(update={"kept_for": why})


def _files_of(run: Location, name: str) -> list[ObjectInfo]:
    """The files of an entry now, as `listed_with_files` lists those of the run."""
    if run.store.scheme == "file":
        return [*files_below(run, [name])[0].values()]
    return objects_of(run.child(*name.split("/")))


def _is_clear(run: Location, path: str) -> bool:
    """True if no program resolves the path of an object of a run to another object. A placeholder ends with a slash."""
    return has_plain_segments(path[len(run.path) + 1 :].removesuffix("/"))


def _remove_directory(run: Location, name: str) -> None:
    """Rename a local checkpoint to a hidden name of the run, in one step, then remove that."""
    aside = mark_of(run, name)
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
    record = RemovalMark(
        first=first,
        files=tuple((i.path[len(run.path) + 1 :], i.pin, i.modified_at) for i in ordered),
    )
    # `model_dump_json` rejects names that are not UTF-8; `json` escapes them.
    text = json.dumps(record.model_dump()).encode()
    mark = mark_of(run, name)
    if isinstance(run.store, ObjectStore):
        run.store.put(mark, text, metadata={}, if_absent=False)
        return
    with writing(mark):
        write_file(f"{mark}.new", text)
        os.replace(f"{mark}.new", mark)
        sync_directory(run.path)


def _ended(run: Location, name: str, removal: Removal) -> bool:
    """True if a removal that an earlier call began has ended now. A mark that the store rejects does not stop others.

    A removal that removed nothing yet, or whose files were written again, ends with its mark: the policy decides anew.

    Raises:
        StorageError: The store cannot be reached, or denies the removal.
    """
    mark = mark_of(run, name)
    renamed = run.store.scheme == "file" and os.path.isdir(mark)
    try:
        if removal is Removal.UNDER_WAY or renamed:
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
    mark = mark_of(run, name)
    if run.store.scheme == "file" and os.path.isdir(mark):
        with writing(mark):
            _delete_local(mark)
        return 1
    record = recorded_mark(run, mark)
    if record is None or Surroundings.of(run).protects(name):
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


def _unchanged(run: Location, name: str, record: RemovalMark) -> list[str]:
    """The paths of the files in a mark that are still the marked files, in the order of the mark."""
    objects = pins_of(objects_of(run.child(*name.split("/"))))
    marked = [(join(run.path, path), pin, modified_at) for path, pin, modified_at in record.files]
    return [
        path
        for path, pin, modified_at in marked
        if objects.get(path) == (pin, modified_at)
        and _is_clear(run, path)
        and not behind_link(run, os.path.dirname(path))
    ]
