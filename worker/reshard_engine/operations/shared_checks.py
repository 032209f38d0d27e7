"""The checks of a conversion that several workers run: how each is made, and how its result is written down."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from reshard.models import ReplicaPolicy, VerifyProblem
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.distributed.check_waves import (
    AGREEMENTS,
    COMMIT_FILES,
    FILES,
    GATHERING,
    SOURCE,
    CheckItem,
    CheckWaves,
    cut_checks,
)
from reshard_engine.distributed.check_work import Checks, CheckWork
from reshard_engine.distributed.epoch import AGREEING, PUBLISHED
from reshard_engine.distributed.runs import CALL_BYTES
from reshard_engine.distributed.worker import DistributedWorker
from reshard_engine.execute.checks.agreements import (
    agreement_threads,
    compared_bytes,
    difference,
    judge_agreements,
)
from reshard_engine.execute.checks.full import FullVerification
from reshard_engine.execute.checks.source import SourceOutcome, SourceSums, check_file
from reshard_engine.integrity.digests import DIGEST_BYTES, BlockRun, block_count
from reshard_engine.integrity.file_check import Damage, FileReading, TargetCheck
from reshard_engine.integrity.manifest import Manifest
from reshard_engine.plan.model import Plan
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.dtypes import BY_NAME


class AgreementChecks(Checks):
    """Comparisons of tensors that must agree in the source."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, should_stop: Callable[[], None]) -> None:
        """`should_stop` raises when the worker is to stop."""
        self._checkpoint = checkpoint
        self._digest = plan.digest
        self._should_stop = should_stop
        costs = [(n, 2 * (compared_bytes(checkpoint, a) + CALL_BYTES)) for n, a in enumerate(checkpoint.agreements)]
        self.waves = cut_checks({AGREEMENTS: costs})

    def tie_of(self, wave: int) -> str:
        """The plan's digest, which covers the pins of the source."""
        return self._digest

    def perform(self, item: CheckItem) -> Any:
        """Compare one pair of tensors."""
        self._should_stop()
        return {"differs": difference(self._checkpoint, self._checkpoint.agreements[item.index])}

    def understood(self, wave: int, index: int, result: Any) -> str | None:
        """The text that says what differs."""
        text = result["differs"]
        if not isinstance(text, str | None):
            raise TypeError
        return text

    def take_part(self, worker: DistributedWorker) -> CheckWork:
        """Compare until all are compared."""
        work = CheckWork(worker, self)
        work.take_part([((AGREEMENTS,), agreement_threads(self._checkpoint))])
        return work

    def spread(self, worker: DistributedWorker, policy: ReplicaPolicy) -> list[str]:
        """Compare all with the help of other workers; returns the warnings.

        Raises:
            SourceError: As `judge_agreements`.
        """
        worker.open_checks(AGREEING, b"{}")
        found = self.take_part(worker).results()[AGREEMENTS]
        return judge_agreements(self._checkpoint, [found[n] for n in range(len(found))], policy)


class FullChecks(Checks):
    """The checks of `--verify full` that are open after all units were written, or after the commit files were."""

    def __init__(self, full: FullVerification, manifest: Manifest, name: str, should_stop: Callable[[], None]) -> None:
        """`name` is `SEALED` or `PUBLISHED`; the files are compared with the manifest."""
        self._full = full
        self._manifest = manifest
        self._should_stop = should_stop
        self._check = TargetCheck(manifest, should_stop)
        self.waves = _full_waves(full, commit=name == PUBLISHED)

    def take_part(self, worker: DistributedWorker, threads: int) -> CheckWork:
        """Check until all is checked; `threads` is the number of units that are gathered at a time."""
        work = CheckWork(worker, self)
        groups = [((SOURCE, FILES), 4), ((GATHERING,), threads)] if self.waves.runs[GATHERING] else []
        with self._full.again.calling(threads):
            work.take_part(groups or [((COMMIT_FILES,), 4)])
        return work

    def tie_of(self, wave: int) -> str:
        """The digest of the plan, and for files that of the manifest."""
        return self._tie if wave in {FILES, COMMIT_FILES} else self._full.plan.digest

    @cached_property
    def _tie(self) -> str:
        return hashlib.sha256(self._manifest.model_dump_json(exclude={"created_at", "read_bytes"}).encode()).hexdigest()

    @cached_property
    def _there(self) -> Mapping[str, ObjectInfo]:
        return self._full.written_files()

    def perform(self, item: CheckItem) -> Any:
        """Read a file of the source or of the target, or gather a unit again."""
        self._should_stop()
        if item.wave == SOURCE:
            return _source_json(check_file(self._full.checkpoint.files[item.index], self._should_stop))
        if item.wave == GATHERING:
            return {"blocks": _blocks_json(self._full.again.digest(self._full.plan.units[item.index]))}
        return _reading_json(self._check.read_alone(self._full.written.store, self._there, item.index))

    def understood(self, wave: int, index: int, result: Any) -> SourceOutcome | FileReading | list[BlockRun]:
        """The result of a check, by its wave."""
        if wave == SOURCE:
            return _source_outcome(result)
        if wave == GATHERING:
            stored = self._full.checkpoint.shard_map.tensors
            return _blocks(result["blocks"], lambda r: stored[r.tensor].numel * BY_NAME[r.dtype].itemsize_bytes)
        return _reading(result, index, lambda r: self._check.size_bytes(r.tensor, r.dtype))


def _full_waves(full: FullVerification, *, commit: bool) -> CheckWaves:
    plan = full.plan
    sizes = {n: plan.files[n].size_bytes + CALL_BYTES for n in full.files_of(commit=commit)}
    if commit:
        return cut_checks({COMMIT_FILES: list(sizes.items())})
    return cut_checks(
        {
            SOURCE: [(n, f.size_bytes + CALL_BYTES) for n, f in enumerate(full.checkpoint.files)],
            FILES: list(sizes.items()),
            GATHERING: [(u.index, u.length_bytes + CALL_BYTES) for u in plan.units if not u.commit],
        }
    )


# -- results as JSON values --------------------------------------------------------------------------------


def _source_json(outcome: SourceOutcome) -> Any:
    sums, damaged = outcome
    return {
        "sha256": list(sums.sha256),
        "uncovered_bytes": sums.uncovered_bytes,
        "uncovered": [list(gap) for gap in sums.uncovered],
        "damaged": damaged,
    }


def _source_outcome(result: Any) -> SourceOutcome:
    uncovered = tuple((int(offset), int(length)) for offset, length in result["uncovered"])
    sums = SourceSums(tuple(map(_sha256, result["sha256"])), int(result["uncovered_bytes"]), uncovered)
    return sums, [str(name) for name in result["damaged"]]


def _sha256(text: str) -> str:
    if len(bytes.fromhex(text)) != hashlib.sha256().digest_size:
        raise ValueError
    return text


def _blocks_json(runs: Iterable[BlockRun]) -> Any:
    return [[r.tensor, r.dtype, r.first, b64encode(r.digests).decode()] for r in runs]


def _blocks(rows: Any, size_bytes: Callable[[BlockRun], int]) -> list[BlockRun]:
    """The digests in a result; `size_bytes` gives the size of the tensor of a run."""
    runs = [BlockRun(int(t), str(d), int(first), b64decode(digests, validate=True)) for t, d, first, digests in rows]
    for run in runs:
        if min(run.tensor, run.first) < 0 or len(run.digests) % DIGEST_BYTES or run.end > block_count(size_bytes(run)):
            raise ValueError
    return runs


def _reading_json(reading: FileReading) -> Any:
    return {
        "sha256": reading.sha256,
        "read_bytes": reading.read_bytes,
        "problems": [p.model_dump(mode="json") for p in reading.problems],
        "damaged": [[d.begin, d.end, d.crc32, d.expected] for d in reading.damaged],
        "blocks": _blocks_json(reading.blocks),
    }


def _reading(result: Any, file: int, size_bytes: Callable[[BlockRun], int]) -> FileReading:
    sha256 = result["sha256"]
    return FileReading(
        file,
        None if sha256 is None else _sha256(sha256),
        int(result["read_bytes"]),
        [VerifyProblem.model_validate(p) for p in result["problems"]],
        [Damage(file, *map(int, row)) for row in result["damaged"]],
        _blocks(result["blocks"], size_bytes),
    )
