"""What conversions leave in an object store, and how it goes: nobody's uploads, objects, journals.

Everything that a conversion writes carries the digest of its plan, so that nothing else is ever removed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from reshard.models import Leftover
from reshard_engine.execute.sinks.control_objects import ControlObjects
from reshard_engine.execute.sinks.overwrite import target_exists
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.storage.protocol import ObjectStore, join, parent_and_name, read_bytes
from reshard_engine.tensors.layout import KnownFiles

PLAN_KEY = "reshard-plan"
"""Metadata of our objects: the digest of the plan that wrote them."""
_THREADS = 8
_CLAIM = "claim"


class Leftovers:
    """What is left in and beside one target."""

    def __init__(self, store: ObjectStore, target: str, control: ControlObjects, known: KnownFiles) -> None:
        """`target` is `bucket/key...` without a trailing slash."""
        self._store = store
        self._target = target
        self._parent, self._name = parent_and_name(target)
        self._control = control
        self._known = known

    def is_written_by(self, path: str, digest: str) -> bool:
        """Whether an object is there and of this plan."""
        return (self._store.metadata(path) or {}).get(PLAN_KEY) == digest

    def pointers(self) -> list[str]:
        """The pointers beside the target that name it."""
        found: list[str] = []
        for path in (join(self._parent, name) for name in self._known.pointers):
            info = self._store.stat(path)
            content = b"" if info is None or info.size_bytes >= 1024 else read_bytes(self._store, info)
            if content.decode("utf-8", "replace").strip() == self._name:
                found.append(path)
        return found

    def delete_written(self, paths: Sequence[str], digest: str) -> None:
        """Remove those of the objects that a plan wrote, in the given order."""
        with ThreadPoolExecutor(_THREADS) as pool:
            mine = list(pool.map(partial(self.is_written_by, digest=digest), paths))
        self._store.delete([path for path, yes in zip(paths, mine, strict=True) if yes])

    def abort_uploads(self, paths: Set[str], *, keep: Set[str] = frozenset()) -> None:
        """Abort every unfinished upload of these objects, but those whose ids are to be kept."""
        for path, upload_id in self._store.list_uploads(self._target + "/"):
            if path in paths and upload_id not in keep:
                self._store.abort_multipart(path, upload_id)

    def refuse_others(self, digest: str) -> None:
        """Refuse a target that holds something else, or that another plan has claimed.

        Raises:
            RequestError: `request.target_exists`, `request.target_busy`.
        """
        # Listed first: what another attempt at this plan writes after its claim must not look like someone else's.
        there = self._store.list_tree(self._target)
        rival = self._control.claimed_by()
        if rival is not None and rival.plan != digest:
            raise self._control.busy(rival.plan)
        if rival is None and there:
            heads = {i.path.removeprefix(self._target + "/").partition("/")[0] for i in there}
            raise target_exists(f"{self._store.scheme}://{self._target}", self._known, heads)

    def found(self, *, idle_s: float) -> list[Leftover]:
        """What is left, in use if something was written to a journal in the last `idle_s` seconds.

        Nothing in an object store says whether a process lives: one at work writes a record after every unit.
        """
        control = self._control.objects()
        signs = [i.modified_at for i in control if i.modified_at is not None]
        in_use = bool(signs) and time.time() - max(signs) < idle_s
        claim = self._control.claimed_by()
        plan = {} if claim is None else self._control.stored_plan(claim.plan)
        mine = {join(self._target, f[0]) for f in plan.get("files", [])} | {join(self._target, MANIFEST_NAME)}
        known = {upload for journal in self._control.journals() for upload in self._control.uploads(journal).values()}
        uploads = [u for u in self._store.list_uploads(self._target + "/") if u[1] in known or u[0] in mine]
        unfinished = claim is not None and not self._is_finished(plan, claim.plan)
        there = [i for i in self._store.list_tree(self._target) if i.path in mine] if unfinished else []
        sizes = {i.path: (_CLAIM if i.path.endswith(".reshard-claim") else "journal", i.size_bytes) for i in control}
        sizes |= {path: ("upload", self._uploaded_bytes(path, upload)) for path, upload in uploads}
        sizes |= {i.path: ("object", i.size_bytes) for i in there}
        scheme = self._store.scheme
        return [
            Leftover.model_validate({"path": f"{scheme}://{p}", "kind": k, "size_bytes": n, "in_use": in_use})
            for p, (k, n) in sizes.items()
        ]

    def _uploaded_bytes(self, path: str, upload_id: str) -> int:
        return sum(p.size_bytes for p in self._store.list_parts(path, upload_id) or ())

    def collect(self) -> None:
        """Remove what the conversion that claims this target wrote, commit files first, unless it is finished.

        It is finished when its pointer is written, or its manifest where there is no pointer.
        """
        claim = self._control.claimed_by()
        if claim is None:
            self._collect_journals()
            return
        plan = self._control.stored_plan(claim.plan)
        last = join(self._target, MANIFEST_NAME)
        paths = {join(self._target, f[0]) for f in plan.get("files", [])}
        self.abort_uploads(paths)
        if not self._is_finished(plan, claim.plan):
            commit = {join(self._target, f[0]) for f in plan.get("files", []) if f[2]} | {last}
            there = [i.path for i in self._store.list_tree(self._target) if i.path in paths | {last}]
            self.delete_written(sorted(there, key=lambda p: p not in commit), claim.plan)
        self._control.remove(claim.plan)

    def _is_finished(self, plan: Mapping[str, Any], digest: str) -> bool:
        last = join(self._parent, plan["pointer"]) if plan.get("pointer") else join(self._target, MANIFEST_NAME)
        return self.is_written_by(last, digest)

    def _collect_journals(self) -> None:
        # Without a claim nobody is at work: a journal is what a process wrote that slept through the end.
        uploads = self._store.list_uploads(self._target + "/")
        for journal in self._control.journals():
            known = set(self._control.uploads(journal).values())
            for path, upload_id in uploads:
                if upload_id in known:
                    self._store.abort_multipart(path, upload_id)
            self._control.forget(journal)
