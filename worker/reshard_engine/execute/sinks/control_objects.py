"""The small objects beside a target that say who writes it and how far: claim, plan, uploads, unit records."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from reshard.errors import IntegrityError, RequestError, SourceError, StorageError, printable
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.plan.model import Plan
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore, join, parent_and_name, read_bytes

_THREADS = 8
MAX_CONTROL_BYTES = 256 << 20
"""Of one object: the plan of a million files has 100 MB."""
_TRIES = 8
"""Looks at an object that others keep replacing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Which plan owns the target, and whether it was allowed to remove what was there before."""

    plan: str
    clearing: bool


def _facts(path: str, text: bytes, kinds: Mapping[str, type]) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(text)
        if all(isinstance(facts[key], kind) for key, kind in kinds.items()):
            return facts
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _not_ours(path)


def _is_planned_file(entry: Any) -> bool:
    """Whether it begins as a file of a plan does: path, size, and whether it is published last."""
    return isinstance(entry, list) and list(map(type, entry[:3])) == [str, int, bool]  # pyright: ignore[reportUnknownArgumentType]


def _not_ours(path: str) -> IntegrityError:
    return IntegrityError(
        "integrity.journal",
        f"{printable(path)} is nothing that reshard wrote",
        fix="remove it if no conversion into this target is under way",
    )


class ControlObjects:
    """Claim and journal of one target."""

    def __init__(self, store: ObjectStore, target: str) -> None:
        """Beside the target, under names that begin with a dot."""
        self._store = store
        self._parent, name = parent_and_name(target)
        self._url = f"{store.scheme}://{target}"
        self._head = f".{name}.reshard-"
        self._claim_path = join(self._parent, f"{self._head}claim")
        self._journal = ""

    def _journal_of(self, digest: str) -> str:
        return join(self._parent, f"{self._head}{digest[:16]}")

    def _read(self, path: str) -> bytes | None:
        """A small object that others may replace or remove at any moment."""
        for _ in range(_TRIES):
            info = self._store.stat(path)
            if info is None:
                return None
            if info.size_bytes > MAX_CONTROL_BYTES:
                raise _not_ours(path)
            try:
                return read_bytes(self._store, info)
            except SourceError as error:
                if error.code != "source.changed":
                    raise
        raise self.busy("")

    def claimed_by(self) -> Claim | None:
        """The claim on the target, if there is one.

        Raises:
            IntegrityError: `integrity.journal` if something else is under its name.
        """
        text = self._read(self._claim_path)
        if text is None:
            return None
        facts = _facts(self._claim_path, text, {"plan": str, "clearing": bool})
        return Claim(facts["plan"], facts["clearing"])

    def is_claimed_by(self, digest: str) -> bool:
        """Whether the claim on the target is that of this plan."""
        claim = self.claimed_by()
        return claim is not None and claim.plan == digest

    def claim(self, plan: Plan) -> Claim:
        """Take the target for this plan; attempts at the same plan share one claim.

        Raises:
            RequestError: `request.target_busy` if an unfinished conversion of another plan has it.
        """
        self._journal = self._journal_of(plan.digest)
        wanted = Claim(plan.digest, clearing=False)
        for _ in range(_TRIES):
            try:
                self._put_claim(wanted, if_absent=True)
            except StorageError as error:
                if error.code != "storage.conflict" and not error.retryable:
                    raise
                there = self.claimed_by()
                if there is None and error.retryable:
                    raise
                if there is not None and there.plan != plan.digest:
                    raise self.busy(there.plan) from error
                if there is not None:
                    return there
            else:
                return wanted
        raise self.busy("")

    def require_claim(self, plan: Plan) -> None:
        """Stop a conversion whose target someone else has taken, finished or given up.

        Raises:
            RequestError: `request.target_busy`.
        """
        claim = self.claimed_by()
        if claim is None or claim.plan != plan.digest:
            raise self._taken_over()

    def require_clearing(self, plan: Plan) -> None:
        """Stop a conversion that is not, or no longer, the one to remove what was in the target.

        Raises:
            RequestError: `request.target_busy`.
        """
        self.require_claim(plan)
        if self.is_settled():
            raise self._taken_over()

    def _taken_over(self) -> RequestError:
        return RequestError(
            "request.target_busy",
            f"another conversion took {printable(self._url)} over",
            fix="let it finish; with the same options it writes the same files",
        )

    def busy(self, rival: str) -> RequestError:
        """The error for a target that the conversion of another plan has."""
        return RequestError(
            "request.target_busy",
            f"an unfinished conversion ({printable(rival[:16]) or 'or several'}) owns {printable(self._url)}",
            fix="run that conversion again to finish it, or add --overwrite to discard it; what it left: "
            f"reshard clean {shlex.quote(self._url)} --dry-run",
        )

    def allow_clearing(self, plan: Plan) -> None:
        """Remember that what is in the target may go, so that a crash on the way does not ask again."""
        self._put_claim(Claim(plan.digest, clearing=True), if_absent=False)

    def settle(self, plan: Plan) -> None:
        """From here on what is below the target is ours."""
        self._put("plan.json", json.dumps(plan.to_json()).encode())

    def is_settled(self) -> bool:
        """Whether an attempt at this plan came as far as to write."""
        return self._store.stat(join(self._journal, "plan.json")) is not None

    def _put_claim(self, claim: Claim, *, if_absent: bool) -> None:
        text = json.dumps({"plan": claim.plan, "clearing": claim.clearing})
        self._store.put(self._claim_path, text.encode(), metadata={}, if_absent=if_absent)

    def _put(self, name: str, data: bytes) -> None:
        self._store.put(join(self._journal, name), data, metadata={}, if_absent=False)

    def stored_plan(self, digest: str) -> dict[str, Any]:
        """The plan that the claim names, as JSON values; empty if it was not stored yet.

        Raises:
            IntegrityError: `integrity.journal` if it is no plan.
        """
        path = join(self._journal_of(digest), "plan.json")
        text = self._read(path)
        if text is None:
            return {}
        facts = _facts(path, text, {"files": list, "units": list})
        pointer = facts.get("pointer")
        if not all(map(_is_planned_file, facts["files"])) or not (pointer is None or isinstance(pointer, str)):
            raise _not_ours(path)
        return facts

    def put_upload(self, file: int, upload_id: str) -> None:
        """Remember an upload before its first part."""
        self._put(f"upload-{file}.json", json.dumps({"id": upload_id}).encode())

    def put_record(self, record: UnitRecord) -> None:
        """Remember a finished unit. A second attempt writes the same record again."""
        self._put(f"unit-{record.unit}.json", record.to_line())

    def _read_all(self, journal: str, kind: str) -> Mapping[int, bytes]:
        head = join(journal, f"{kind}-")
        found = [i.path for i in self._store.list_tree(journal) if i.path.startswith(head)]
        numbers = {path: path[len(head) :].removesuffix(".json") for path in found}
        paths = [path for path in found if numbers[path].isdecimal()]
        with ThreadPoolExecutor(_THREADS) as pool:
            texts = list(pool.map(self._read, paths))
        return {int(numbers[path]): text for path, text in zip(paths, texts, strict=True) if text is not None}

    def uploads(self, journal: str = "") -> dict[int, str]:
        """Upload ids by file number, of a journal or of the own one.

        Raises:
            IntegrityError: `integrity.journal` if one is no record of an upload.
        """
        texts = self._read_all(journal or self._journal, "upload")
        return {file: _facts(f"upload-{file}.json", text, {"id": str})["id"] for file, text in texts.items()}

    def records(self) -> Mapping[int, UnitRecord]:
        """Finished units by number."""
        parsed = {n: UnitRecord.from_line(text) for n, text in self._read_all(self._journal, "unit").items()}
        return {n: r for n, r in parsed.items() if r is not None}

    def remove(self, digest: str) -> None:
        """Forget a conversion: its journal, then its claim."""
        self.forget(self._journal_of(digest))
        claim = self.claimed_by()
        if claim is not None and claim.plan == digest:
            self._store.delete([self._claim_path])

    def forget(self, journal: str = "") -> None:
        """Remove a journal, or the own one; the plan goes first, without which the rest means nothing."""
        self._store.delete([i.path for i in self._store.list_tree(journal or self._journal)])

    def objects(self) -> list[ObjectInfo]:
        """The claim and everything in every journal."""
        found = [i for journal in self.journals() for i in self._store.list_tree(journal)]
        claim = self._store.stat(self._claim_path)
        return found if claim is None else [claim, *found]

    def journals(self) -> list[str]:
        """Every journal beside the target. Without a claim nobody is at work, and zombies have written them."""
        pattern = re.compile(re.escape(self._head) + "[0-9a-f]{16}")
        names = self._store.list_directory(self._parent).directories
        return [join(self._parent, name) for name in names if pattern.fullmatch(name)]
