"""The small objects beside a target that say who writes it and how far: claim, plan, uploads, unit records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from reshard.errors import RequestError, StorageError, printable
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.plan.model import Plan
from reshard_engine.storage.protocol import ObjectStore, join, parent_and_name, read_bytes

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """Which plan owns the target, and whether it is still removing what was there before."""

    plan: str
    clearing: bool


class ControlObjects:
    """Claim and journal of one target."""

    def __init__(self, store: ObjectStore, target: str) -> None:
        """Beside the target, under names that begin with a dot."""
        self._store = store
        parent, name = parent_and_name(target)
        self._url = f"{store.scheme}://{target}"
        self._claim_path = join(parent, f".{name}.reshard-claim")
        self._stem = join(parent, f".{name}.reshard-")
        self._prefix = ""

    def _directory(self, digest: str) -> str:
        return f"{self._stem}{digest[:16]}"

    def claimed_by(self) -> Claim | None:
        """The claim on the target, if there is one."""
        info = self._store.stat(self._claim_path)
        if info is None:
            return None
        facts = json.loads(read_bytes(self._store, info))
        return Claim(str(facts["plan"]), bool(facts["clearing"]))

    def claim(self, plan: Plan, *, overwrite: bool, clear: bool) -> Claim:
        """Take the target for this plan.

        Raises:
            RequestError: `request.target_busy` if an unfinished conversion of another plan has it.
        """
        self._prefix = self._directory(plan.digest)
        wanted = Claim(plan.digest, clear)
        try:
            self._store.put(self._claim_path, self._encoded(wanted), metadata={}, if_absent=True)
        except StorageError as error:
            if error.code != "storage.conflict" and not error.retryable:
                raise
            there = self.claimed_by()
            if there is None:
                raise
            if there.plan == plan.digest:
                return there
            if not overwrite:
                raise RequestError(
                    "request.target_busy",
                    f"an unfinished conversion ({printable(there.plan[:16])}) owns {printable(self._url)}",
                    fix="run that conversion again to finish it, or add --overwrite to discard it",
                ) from error
            self.remove(there.plan)
            self._store.put(self._claim_path, self._encoded(wanted), metadata={}, if_absent=True)
        self._store.put(
            join(self._prefix, "plan.json"), json.dumps(plan.to_json()).encode(), metadata={}, if_absent=False
        )
        return wanted

    def cleared(self, plan: Plan) -> None:
        """What was there before is gone: from here on objects below the target are ours."""
        self._store.put(
            self._claim_path, self._encoded(Claim(plan.digest, clearing=False)), metadata={}, if_absent=False
        )

    def _encoded(self, claim: Claim) -> bytes:
        return json.dumps({"plan": claim.plan, "clearing": claim.clearing}).encode()

    def stored_plan(self, digest: str) -> dict[str, Any]:
        """The plan that the claim names, as JSON values; empty if it was not stored yet."""
        info = self._store.stat(join(self._directory(digest), "plan.json"))
        return {} if info is None else json.loads(read_bytes(self._store, info))

    def put_upload(self, file: int, upload_id: str) -> None:
        """Remember an upload before its first part."""
        self._store.put(
            join(self._prefix, f"upload-{file}.json"),
            json.dumps({"id": upload_id}).encode(),
            metadata={},
            if_absent=False,
        )

    def put_record(self, record: UnitRecord) -> None:
        """Remember a finished unit. A second attempt writes the same record again."""
        self._store.put(
            join(self._prefix, f"unit-{record.unit}.json"), record.to_json().encode(), metadata={}, if_absent=False
        )

    def _read_all(self, kind: str) -> Mapping[int, bytes]:
        head = join(self._prefix, f"{kind}-")
        found = [i for i in self._store.list_tree(self._prefix) if i.path.startswith(head) and i.path.endswith(".json")]
        with ThreadPoolExecutor(_THREADS) as pool:
            texts = list(pool.map(partial(read_bytes, self._store), found))
        numbers = [i.path[len(head) : -len(".json")] for i in found]
        return {int(n): t for n, t in zip(numbers, texts, strict=True) if n.isdecimal()}

    def uploads(self) -> dict[int, str]:
        """Upload ids by file number."""
        return {file: str(json.loads(text)["id"]) for file, text in self._read_all("upload").items()}

    def records(self) -> Mapping[int, UnitRecord]:
        """Finished units by number."""
        parsed = {n: UnitRecord.from_json(text) for n, text in self._read_all("unit").items()}
        return {n: r for n, r in parsed.items() if r is not None}

    def remove(self, digest: str) -> None:
        """Forget a conversion: its journal, then its claim."""
        self._store.delete([i.path for i in self._store.list_tree(self._directory(digest))])
        claim = self.claimed_by()
        if claim is not None and claim.plan == digest:
            self._store.delete([self._claim_path])
