"""The small objects beside a target in an object store: the claim, the plan, upload ids and unit records.

The claim says which plan writes the target. The other objects are the journal.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from reshard.errors import IntegrityError, RequestError, printable
from reshard_engine.execute.journal import NamedUpload, UnitRecord
from reshard_engine.plan.model import Plan
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore, join, parent_and_name
from reshard_engine.storage.texts import JsonText, ObjectTexts, agreed_text, read_text

_THREADS = 8
MAX_CONTROL_BYTES = 256 << 20
"""Largest size of one control object. The plan of a million files has 100 MB."""
_TRIES = 8
"""Number of attempts to empty a journal that other processes keep writing to."""

WORKERS = "workers"
"""The directory of a journal in which the workers of a shared conversion meet."""
_EPOCH = re.compile(f"/{WORKERS}/epoch-[0-9]+$")
_UPLOAD = re.compile(rf"upload-[0-9]+\.json|{WORKERS}/[0-9]+/upload-[0-9]+")


def _in_order(paths: Sequence[str]) -> list[list[str]]:
    """The objects of a journal in three groups, each of which is removed when the one before is gone.

    Without the text that begins a session its workers stop, so they do not take half of a journal for one whose runs
    are free. Heartbeats go last: while they are there, the others leave the rest to the worker that removes it.
    """
    first = [p for p in paths if p.endswith("/plan.json") or _EPOCH.search(p)]
    last = [p for p in paths if f"/{WORKERS}/beats/" in p]
    return [first, sorted(set(paths).difference(first, last)), last]


@dataclass(frozen=True, slots=True)
class Claim(JsonText):
    """A claim on the target: the digest of the plan that owns it, and its permission to remove old contents."""

    plan: str
    clearing: bool


_TextT = TypeVar("_TextT", bound=JsonText)


def _parsed(kind: type[_TextT], path: str, text: bytes) -> _TextT:
    found = kind.from_text(text)
    if found is None:
        raise _not_ours(path)
    return found


def _is_planned_file(entry: Any) -> bool:
    """True if an entry begins like a file of a plan: path, size, and the flag of commit files."""
    return isinstance(entry, list) and list(map(type, entry[:3])) == [str, int, bool]  # pyright: ignore[reportUnknownArgumentType]


def _not_ours(path: str) -> IntegrityError:
    return IntegrityError(
        "integrity.journal",
        f"{printable(path)} was not written by reshard",
        fix="remove it if no conversion into this target is running",
    )


class ControlObjects:
    """The claim and the journal of one target."""

    def __init__(self, store: ObjectStore, target: str) -> None:
        """The control objects lie beside `target`, under names that begin with a dot."""
        self._store = store
        self._parent, name = parent_and_name(target)
        self._url = f"{store.scheme}://{target}"
        self._head = f".{name}.reshard-"
        self._beside = ObjectTexts(store, self._parent)
        self._claim_name = f"{self._head}claim"
        self._claim_path = join(self._parent, self._claim_name)
        self._journal = ""

    def journal_of(self, digest: str) -> str:
        """The path below which the journal of a plan lies."""
        return join(self._parent, f"{self._head}{digest[:16]}")

    def use_journal(self, digest: str) -> None:
        """Let the journal of this plan be the one that is read and written by default."""
        self._journal = self.journal_of(digest)

    def _read(self, path: str) -> bytes | None:
        return read_text(self._store, path, most_bytes=MAX_CONTROL_BYTES)

    def claimed_by(self) -> Claim | None:
        """The claim on the target, if there is one.

        Raises:
            IntegrityError: `integrity.journal` if the object of that name is not a claim.
        """
        text = self._read(self._claim_path)
        return None if text is None else _parsed(Claim, self._claim_path, text)

    def is_claimed_by(self, digest: str) -> bool:
        """True if the plan with this digest holds the claim on the target."""
        claim = self.claimed_by()
        return claim is not None and claim.plan == digest

    def claim(self, plan: Plan) -> Claim:
        """Take the target for this plan; attempts at the same plan share one claim.

        Raises:
            RequestError: `request.target_busy` if an unfinished conversion of another plan holds the claim.
        """
        self.use_journal(plan.digest)
        text = agreed_text(self._beside, self._claim_name, Claim(plan.digest, clearing=False).to_text())
        claim = None if text is None else _parsed(Claim, self._claim_path, text)
        if claim is None or claim.plan != plan.digest:
            raise self.busy("" if claim is None else claim.plan)
        return claim

    def require_claim(self, plan: Plan) -> None:
        """Stop a conversion that no longer holds the claim: another process took, finished or discarded the target.

        Raises:
            RequestError: `request.target_busy`.
        """
        claim = self.claimed_by()
        if claim is None or claim.plan != plan.digest:
            raise self._taken_over()

    def require_unfinished(self, plan: Plan) -> None:
        """Stop a conversion that lost the claim, or that another process finishes: that one removes the journal first.

        Raises:
            RequestError: `request.target_busy`.
        """
        self.require_claim(plan)
        if not self.is_settled():
            raise self._taken_over()

    def require_clearing(self, plan: Plan) -> None:
        """Stop a conversion that may not, or may no longer, remove the old contents of the target.

        Raises:
            RequestError: `request.target_busy`.
        """
        self.require_claim(plan)
        if self.is_settled():
            raise self._taken_over()

    def _taken_over(self) -> RequestError:
        return RequestError(
            "request.target_busy",
            f"another conversion took over {printable(self._url)}",
            fix="let it finish: with the same options it writes the same files",
        )

    def busy(self, rival: str) -> RequestError:
        """The error for a target that the conversion of another plan (`rival`, its digest) owns."""
        return RequestError(
            "request.target_busy",
            f"an unfinished conversion ({printable(rival[:16]) or 'or several'}) owns {printable(self._url)}",
            fix="run that conversion again to finish it, or add --overwrite to discard it; to list its leftovers: "
            f"reshard clean {shlex.quote(self._url)} --dry-run",
        )

    def allow_clearing(self, plan: Plan) -> None:
        """Record in the claim that the old contents may be removed, so that a later attempt need not check again."""
        self._beside.put(self._claim_name, Claim(plan.digest, clearing=True).to_text())

    def settle(self, plan: Plan) -> None:
        """Store the plan. From now on, all objects below the target belong to this conversion."""
        self._put("plan.json", json.dumps(plan.to_json()).encode())

    def is_settled(self) -> bool:
        """True if an attempt at this plan has begun to write."""
        return self._store.stat(join(self._journal, "plan.json")) is not None

    def _put(self, name: str, data: bytes) -> None:
        self._store.put(join(self._journal, name), data, metadata={}, if_absent=False)

    def stored_plan(self, digest: str) -> dict[str, Any]:
        """The plan with this digest as JSON values; empty if no attempt has stored it yet.

        Raises:
            IntegrityError: `integrity.journal` if it is not a plan.
        """
        path = join(self.journal_of(digest), "plan.json")
        text = self._read(path)
        if text is None:
            return {}
        try:
            facts: dict[str, Any] = json.loads(text)
            names = (facts.get("pointer"), facts["source"].get("tag"))
            planned = isinstance(facts["units"], list) and all(map(_is_planned_file, facts["files"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            planned, facts, names = False, {}, ()
        if not planned or not all(isinstance(n, str | None) for n in names):
            raise _not_ours(path)
        return facts

    def offer_upload(self, file: int, upload_id: str) -> str:
        """Name the upload of a file, before its first part is sent; returns the id of the one that has the name."""
        name = f"upload-{file}.json"
        agreed = agreed_text(ObjectTexts(self._store, self._journal), name, NamedUpload(upload_id).to_text())
        if agreed is None:
            raise self.busy("")
        return _parsed(NamedUpload, join(self._journal, name), agreed).id

    def replace_upload(self, file: int, upload_id: str) -> None:
        """Name the upload of a file in place of one that no longer exists."""
        self._put(f"upload-{file}.json", NamedUpload(upload_id).to_text())

    def put_record(self, record: UnitRecord) -> None:
        """Store the record of a finished unit. A second attempt writes the same record again."""
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
        """Upload ids by file number, from the given journal or, by default, from this plan's journal.

        Raises:
            IntegrityError: `integrity.journal` if one is not a record of an upload.
        """
        texts = self._read_all(journal or self._journal, "upload")
        return {file: _parsed(NamedUpload, f"upload-{file}.json", text).id for file, text in texts.items()}

    def upload_ids(self, journal: str) -> set[str]:
        """All upload ids that a journal names: those of one process, and those of workers that shared the conversion.

        Raises:
            IntegrityError: `integrity.journal` if one is not a record of an upload.
        """
        paths = [i.path for i in self._store.list_tree(journal) if _UPLOAD.fullmatch(i.path[len(journal) + 1 :])]
        with ThreadPoolExecutor(_THREADS) as pool:
            texts = list(pool.map(self._read, paths))
        return {_parsed(NamedUpload, p, text).id for p, text in zip(paths, texts, strict=True) if text is not None}

    def records(self) -> Mapping[int, UnitRecord]:
        """The records of finished units, by unit number."""
        parsed = {n: UnitRecord.from_line(text) for n, text in self._read_all(self._journal, "unit").items()}
        return {n: r for n, r in parsed.items() if r is not None}

    def release(self, digest: str) -> None:
        """Remove the claim of a conversion whose journal was removed."""
        claim = self.claimed_by()
        if claim is not None and claim.plan == digest:
            self._store.delete([self._claim_path])

    def forget(self, journal: str = "") -> None:
        """Remove a journal, by default this plan's. The plan is deleted first: the rest means nothing without it.

        A worker that still saw the journal may have written to it after it was listed, so it is listed again.
        """
        for _ in range(_TRIES):
            listed = [i.path for i in self._store.list_tree(journal or self._journal)]
            if not listed:
                return
            for paths in _in_order(listed):
                self._store.delete(paths, in_order=False)

    def objects(self) -> list[ObjectInfo]:
        """The claim, and all objects of all journals beside the target."""
        found = [i for journal in self.journals() for i in self._store.list_tree(journal)]
        claim = self._store.stat(self._claim_path)
        return found if claim is None else [claim, *found]

    def journals(self) -> list[str]:
        """All journals beside the target. If there is no claim, processes that lost their claim have written them."""
        pattern = re.compile(re.escape(self._head) + "[0-9a-f]{16}")
        names = self._store.list_directory(self._parent).directories
        return [join(self._parent, name) for name in names if pattern.fullmatch(name)]
