"""Leftovers of conversions beside a target: finding and removing them."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shlex
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from reshard.errors import RequestError, printable
from reshard.models.jobs import Leftover
from reshard_engine.execute.sinks.control_objects import WORKERS as DELETING_WORKERS, Claim, ControlObjects
from reshard_engine.execute.sinks.free_space import allocated_bytes
from reshard_engine.execute.sinks.protocol import target_exists
from reshard_engine.execute.sinks.uploads import PLAN_KEY
from reshard_engine.integrity.manifest import MANIFEST_NAME, parse_manifest
from reshard_engine.storage.protocol import ObjectStore, join, read_bytes, save_directory
from reshard_engine.tensors.layout import KnownFiles

WORKERS = ".workers"
"""The end of the name of the directory in which the workers that share a conversion meet."""
_TRIES = 5
_LOOK_S = 0.01
"""Longest time, in seconds, for which a mere test of a lock (`is_held`) keeps a journal locked."""


def busy(target: str) -> RequestError:
    """The error for a target that another process is writing."""
    return RequestError(
        "request.target_busy",
        f"another process is converting into {printable(target)}",
        fix=f"wait for it to finish, or choose another target; to list leftovers of ended processes: "
        f"reshard clean {shlex.quote(target)} --dry-run",
    )


def held_by_others(target: str, *, but: str) -> str | None:
    """The digest (cut short) of another plan that a process is writing into this target; None if there is none.

    `but` is the digest of the caller's own plan.
    """
    for digest in sorted(plans_beside(target)):
        if digest != but and is_held(journal_of(target, digest)):
            return digest
    return None


def plans_beside(target: str) -> set[str]:
    """Digests (cut short) of all plans with a journal or a staging directory beside a target."""
    parent, name = os.path.split(target)
    pattern = re.compile(re.escape(f".{name}.reshard-") + "([0-9a-f]{16})([.](journal|workers))?")
    names = os.listdir(parent) if os.path.isdir(parent) else []
    return {match[1] for name in names if (match := pattern.fullmatch(name))}


_OF_A_TARGET = re.compile(r"[.](.+)[.]reshard-([0-9a-f]{16}([.](journal|workers))?|old)")


def targets_below(directory: str) -> list[str]:
    """The paths of targets directly below a directory of which conversions left files."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = {match[1] for name in names if (match := _OF_A_TARGET.fullmatch(name))}
    return [os.path.join(directory, name) for name in sorted(found)]


def journal_of(target: str, digest: str) -> str:
    """The path of a plan's journal beside a target."""
    return f"{_stem(target)}{digest}.journal"


def _stem(target: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.reshard-")


def leftovers_of(target: str) -> list[Leftover]:
    """All leftovers that conversions into a local target left beside it."""
    found: list[Leftover] = []
    held = False
    for digest in sorted(plans_beside(target)):
        staging, journal = f"{_stem(target)}{digest}", journal_of(target, digest)
        used = is_held(journal)
        held = held or used
        if os.path.isdir(staging):
            size = allocated_bytes(staging)
            found.append(Leftover(path=staging, kind="staging", size_bytes=size, in_use=used))
        if os.path.exists(journal):
            size = os.path.getsize(journal)
            found.append(Leftover(path=journal, kind="journal", size_bytes=size, in_use=used))
        if os.path.isdir(workers := staging + WORKERS):
            found.append(Leftover(path=workers, kind="journal", size_bytes=allocated_bytes(workers), in_use=used))
    aside = f"{_stem(target)}old"
    if os.path.lexists(aside):
        size = allocated_bytes(aside)
        found.append(Leftover(path=aside, kind="old target", size_bytes=size, in_use=held))
    return found


def abandoned_bytes(target: str, *, but: str) -> int:
    """Bytes on the disk of the staging directories of other plans beside a target that no process uses."""
    others = [f for f in leftovers_of(target) if f.kind == "staging" and not f.in_use]
    return sum(f.size_bytes for f in others if not f.path.endswith(but))


def is_held(journal: str) -> bool:
    """True if a process has the lock on a journal, alone or with others. The journal is not created."""
    try:
        descriptor = os.open(journal, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Workers that share a conversion all hold the lock, so only an exclusive one tells that there are none.
        return not _flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def locked(path: str, *, shared: bool = False) -> int:
    """Open a journal, which is created if necessary, and lock it; -1 if another process has the lock.

    Processes that lock it `shared` have the lock together.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        ours = False
        try:
            if not _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                return -1
            # The process that had the lock may have removed the file, and a lock on a removed file protects nothing.
            ours = os.fstat(descriptor).st_nlink > 0
        finally:
            if not ours:
                os.close(descriptor)
        if ours:
            return descriptor


def _flock(descriptor: int, kind: int) -> bool:
    """Lock a journal; False if another process has the lock. A process that only tests it (`is_held`) releases it."""
    for number in range(_TRIES):
        if number:
            # Two processes that test at the same time must not do so in step.
            time.sleep(random.uniform(0.5, 1.5) * _LOOK_S)  # noqa: S311 - no secret depends on it
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
    return False


def remove_unless_held(staging: str) -> bool:
    """Remove a staging directory and its journal; False, and nothing is removed, if a process holds the journal."""
    journal = staging + ".journal"
    descriptor = locked(journal)
    if descriptor < 0:
        return False
    try:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(staging + WORKERS, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(journal)
    finally:
        os.close(descriptor)
    return True


# Leftovers of conversions in an object store (uploads, objects, journals): finding and removing them.
#
# Every object that a conversion writes carries the digest of its plan. Objects without it are never removed.

_THREADS = 8
_CLAIM = "claim"


class Leftovers:
    """The leftovers in and beside one target."""

    def __init__(self, store: ObjectStore, target: str, control: ControlObjects, known: KnownFiles) -> None:
        """`target` is `bucket/key...` without a trailing slash."""
        self._store = store
        self._target = target
        self._control = control
        self._known = known
        self._manifest = join(target, MANIFEST_NAME)

    def is_written_by(self, path: str, digest: str) -> bool:
        """True if the object exists and the plan with this digest wrote it."""
        return (self._store.metadata(path) or {}).get(PLAN_KEY) == digest

    def pointers(self, tag: str | None) -> list[str]:
        """The paths of the pointers that name the target; `tag` is that of the source."""
        found: list[str] = []
        directory, own = save_directory(self._target, tag)
        for name in self._known.all_pointers:
            info = self._store.stat(path := join(directory, name))
            content = b"" if info is None or info.size_bytes >= 1024 else read_bytes(self._store, info)
            if self._known.tag_in(name, content) == own:
                found.append(path)
        return found

    def delete_written(self, paths: Sequence[str], digest: str, *, first: Set[str] = frozenset()) -> None:
        """Remove those of the objects that the plan with this digest wrote, and of these some before the others."""
        with ThreadPoolExecutor(_THREADS) as pool:
            mine = list(pool.map(partial(self.is_written_by, digest=digest), paths))
        doomed = [path for path, yes in zip(paths, mine, strict=True) if yes]
        self._store.delete([path for path in doomed if path in first])
        self._store.delete([path for path in doomed if path not in first], in_order=False)

    def uploads_of(self, paths: Set[str]) -> list[tuple[str, str]]:
        """(path, upload id) of all unfinished uploads of these objects."""
        return [found for found in self._store.list_uploads(self._target + "/") if found[0] in paths]

    def abort(self, uploads: Iterable[tuple[str, str]]) -> None:
        """Abort uploads, each given as (path, upload id)."""
        for path, upload_id in uploads:
            self._store.abort_multipart(path, upload_id)

    def refuse_others(self, digest: str) -> None:
        """Refuse a target that holds other objects, or that another plan has claimed.

        Raises:
            RequestError: `request.target_exists`, `request.target_busy`.
        """
        # The target is listed before the claim is read: objects that another attempt at this plan writes after it takes
        # the claim must not look like foreign ones.
        objects = self._store.list_tree(self._target)
        rival = self._control.claimed_by()
        if rival is not None and rival.plan != digest:
            raise self._control.busy(rival.plan)
        if rival is None and objects:
            heads = {i.path.removeprefix(self._target + "/").partition("/")[0] for i in objects}
            raise target_exists(f"{self._store.scheme}://{self._target}", self._known, heads)

    def found(self, *, idle_s: float) -> list[Leftover]:
        """The leftovers. They count as in use if a journal was written to in the last `idle_s` seconds.

        An object store cannot tell if a process is alive. But a running conversion writes a record after each unit.
        """
        control = self._control.objects()
        signs = [i.modified_at for i in control if i.modified_at is not None]
        in_use = bool(signs) and time.time() - max(signs) < idle_s
        claim = self._control.claimed_by()
        plan = {} if claim is None else self._control.stored_plan(claim.plan)
        mine = {join(self._target, f[0]) for f in plan.get("files", [])} | {self._manifest}
        known = {upload for journal in self._control.journals() for upload in self._control.upload_ids(journal)}
        uploads = [u for u in self._store.list_uploads(self._target + "/") if u[1] in known or u[0] in mine]
        unfinished = claim is not None and not self._is_finished(plan, claim.plan)
        written = [i for i in self._store.list_tree(self._target) if i.path in mine] if unfinished else []
        sizes = {i.path: (_CLAIM if i.path.endswith(".reshard-claim") else "journal", i.size_bytes) for i in control}
        sizes |= {path: ("upload", self._uploaded_bytes(path, upload)) for path, upload in uploads}
        sizes |= {i.path: ("object", i.size_bytes) for i in written}
        scheme = self._store.scheme
        return [
            Leftover.model_validate({"path": f"{scheme}://{p}", "kind": k, "size_bytes": n, "in_use": in_use})
            for p, (k, n) in sizes.items()
        ]

    def _uploaded_bytes(self, path: str, upload_id: str) -> int:
        return sum(p.size_bytes for p in self._store.list_parts(path, upload_id) or ())

    def collect(self) -> None:
        """Remove all objects that the conversion with the claim wrote, commit files first, unless it is finished.

        A conversion is finished when its manifest is written, and its pointer, if it has one.
        """
        claim = self._control.claimed_by()
        if claim is None:
            self._collect_journals(self._control.journals())
            return
        self._collect_claimed(claim, self._control.stored_plan(claim.plan))

    def collect_plans(self, digests: Collection[str], *, idle_s: float = 0.0, keep_unfinished: bool = False) -> None:
        """Remove what conversions with these plans left. Conversions of other plans keep everything.

        Args:
            digests: The digests of the plans.
            idle_s: Seconds without a write after which a conversion counts as ended.
            keep_unfinished: True to keep a conversion with one of these plans that has the claim and is unfinished.

        Raises:
            RequestError: `request.target_busy` if one of these conversions has written in the last `idle_s` seconds.
        """
        journals = [self._control.journal_of(digest) for digest in digests]
        self._refuse_active(journals, idle_s)
        claim = self._control.claimed_by()
        if claim is not None and claim.plan in digests:
            plan = self._control.stored_plan(claim.plan)
            if keep_unfinished and not self._is_finished(plan, claim.plan):
                journals.remove(self._control.journal_of(claim.plan))
            else:
                self._collect_claimed(claim, plan)
        existing = set(self._control.journals())
        self._collect_journals([j for j in journals if j in existing])
        if claim is None:
            self._abort_strays(digests)

    def _abort_strays(self, digests: Collection[str]) -> None:
        """Abort uploads to the files of a finished target: who began them died before it named them in a journal."""
        ours = any(self.is_written_by(self._manifest, digest) for digest in digests)
        info = self._store.stat(self._manifest) if ours else None
        if info is None:
            return
        manifest = parse_manifest(read_bytes(self._store, info))
        self.abort(self.uploads_of({join(self._target, f.path) for f in manifest.files}))

    def _refuse_active(self, journals: Iterable[str], idle_s: float) -> None:
        if idle_s <= 0:
            return
        written = [i.modified_at for j in journals for i in self._store.list_tree(j) if i.modified_at is not None]
        silent_s = time.time() - max(written, default=0.0)
        if silent_s < idle_s:
            raise RequestError(
                "request.target_busy",
                f"a conversion into {self._store.scheme}://{printable(self._target)} has written {silent_s:.0f} s ago",
                fix="let it end; its files are looked at again later",
            )

    def _collect_claimed(self, claim: Claim, plan: Mapping[str, Any]) -> None:
        last = self._manifest
        paths = {join(self._target, f[0]) for f in plan.get("files", [])}
        self.abort(self.uploads_of(paths))
        if not self._is_finished(plan, claim.plan):
            commit = {join(self._target, f[0]) for f in plan.get("files", []) if f[2]} | {last}
            written = [i.path for i in self._store.list_tree(self._target) if i.path in paths | {last}]
            self.delete_written(written, claim.plan, first=commit)
        self.release(claim.plan, paths)

    def release(self, digest: str, paths: Iterable[str]) -> None:
        """Remove a conversion's journal, the uploads of these paths, and its claim.

        A worker that does not know of the end may begin an upload until the place where the workers meet is gone. From
        then on it removes what it began itself. Another conversion may begin uploads as soon as the claim is gone.
        """
        journal = self._control.journal_of(digest)
        self._control.forget(join(journal, DELETING_WORKERS))
        self.abort(self.uploads_of(set(paths)))
        self._control.forget(journal)
        self._control.release(digest)

    def _is_finished(self, plan: Mapping[str, Any], digest: str) -> bool:
        # A pointer alone proves nothing: the same plan may have written it for another target in the same directory.
        if not self.is_written_by(self._manifest, digest):
            return False
        # The plan names the pointer of the format; the manifest tells whether this conversion writes it.
        info = self._store.stat(self._manifest)
        pointer = None if info is None else parse_manifest(read_bytes(self._store, info)).pointer
        # Attempts at one plan may name the source by its tag directory, which tells no tag, or by its save directory.
        tag = plan.get("source", {}).get("tag")
        places = sorted({save_directory(self._target, t)[0] for t in (None, tag)})
        return pointer is None or any(self.is_written_by(join(place, pointer), digest) for place in places)

    def _collect_journals(self, journals: Sequence[str]) -> None:
        # Without a claim, no conversion is running. A process that was paused and went on too late wrote the journals.
        uploads = self._store.list_uploads(self._target + "/") if journals else []
        for journal in journals:
            known = self._control.upload_ids(journal)
            for path, upload_id in uploads:
                if upload_id in known:
                    self._store.abort_multipart(path, upload_id)
            self._control.forget(journal)
