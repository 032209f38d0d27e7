"""One comparison of two checkpoints: match by name, read both sides block by block, report what differs.

Memory is flat: a few blocks of each side at a time, whatever the checkpoints hold. Neither side is loaded, nothing in
them is executed, and bits are compared, so that a payload of a NaN or the sign of a zero counts.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from reshard.diffs import Difference, DifferenceKind, DiffOptions, DiffReport, DiffSide
from reshard.errors import JobError, counted
from reshard.models import Progress
from reshard_engine.checkpoint import OF_TRAINING, Checkpoint, Question
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.kernels import default_kernel
from reshard_engine.execute.gather.tensor_reader import TensorReader
from reshard_engine.formats.registry import format_of
from reshard_engine.operations.diff.facts import FactComparison, Facts
from reshard_engine.operations.diff.pairs import Matching, Side, TensorPair
from reshard_engine.operations.diff.values import ValueDifference, compare_elements

BLOCK_BYTES = 4 << 20
"""Bytes of one side that are compared at once."""
_THREADS = 4
_REMOTE_THREADS = 16
_REPORT_EVERY_S = 0.5
_ORDER = {kind: place for place, kind in enumerate(DifferenceKind)}


@dataclass(frozen=True, slots=True)
class _Block:
    pair: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    block: _Block
    difference: ValueDifference | None
    read_bytes: int


def diff_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    options: DiffOptions,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> DiffReport:
    """Compare two checkpoints by logical tensor.

    Raises:
        SourceError: `checkpoint.ambiguous`, `source.changed`, and the other errors of reading.
        JobError: `job.cancelled` if `should_stop` returns True.
    """
    started = time.monotonic()
    for side in (a, b):
        side.refuse_undecided(Question.BUFFERS, *(OF_TRAINING if options.weights_only else ()))
    sides = Side(a), Side(b)
    matching = Matching(*sides, weights_only=options.weights_only)
    facts = Facts((), (), (), 0) if options.weights_only else FactComparison(a, b, matching).compare()
    pairs = [p for p in (*matching.pairs, *facts.pairs) if not _ignored(p.name, p.state, options)]
    reading = _Reading(a, b, pairs, sample=options.sample, on_progress=on_progress, should_stop=should_stop)
    reading.run()
    found = [d for d in (*matching.differences, *facts.differences) if _counts(d, options)]
    found += [_of_elements(pairs[i], d, reading.compared[i]) for i, d in reading.differences.items()]
    return DiffReport(
        a=_side(a),
        b=_side(b),
        equal=not found,
        tensors=len(pairs),
        identical=len(pairs) - len(reading.differences),
        elements=sum(reading.compared),
        values=matching.values + facts.values,
        read_bytes=reading.read_bytes,
        sampled=options.sample,
        differences=tuple(sorted(found, key=_severity)),
        notes=(*_rounding_notes(matching), *_padding_notes(matching), *facts.notes),
        seconds=time.monotonic() - started,
    )


def _padding_notes(matching: Matching) -> list[str]:
    return [
        f"rows of padding behind {counted(count, 'vocabulary', 'vocabularies')} are not compared: A has {a}, B has {b}"
        for (a, b), count in matching.padded.items()
    ]


def _side(checkpoint: Checkpoint) -> DiffSide:
    return DiffSide(
        url=checkpoint.url,
        tag=checkpoint.tag,
        format=checkpoint.format,
        step=checkpoint.counters.steps,
        zero_stage=format_of(checkpoint).zero_stage(checkpoint),
        world=dict(checkpoint.world),
    )


def _ignored(name: str, state: str, options: DiffOptions) -> bool:
    # A name may have characters that are special in patterns (`client.list[1]`): names are compared as text too.
    texts = (name, f"{name}/{state}")
    return any(p in texts or any(fnmatchcase(t, p) for t in texts) for p in options.ignore)


def _counts(difference: Difference, options: DiffOptions) -> bool:
    if options.common and (difference.a is None or difference.b is None):
        return False
    return not _ignored(difference.name, difference.state, options)


def _severity(difference: Difference) -> tuple[int, float, float, str, str]:
    # Worst first: by kind, then by the largest distance of elements.
    absolute = float("inf") if difference.nonfinite else difference.max_abs or 0.0
    count = difference.differing or 0
    return _ORDER[difference.kind], -absolute, -count, difference.name, difference.state


def _rounding_notes(matching: Matching) -> Iterator[str]:
    for (side, dtype), count in sorted(matching.rounded.items()):
        other = "B" if side == "A" else "A"
        were = "was" if count == 1 else "were"
        yield f"{counted(count, 'tensor')} of {side} {were} rounded to {dtype} before comparing: {other} stores {dtype}"


def _of_elements(pair: TensorPair, found: ValueDifference, compared_elems: int) -> Difference:
    return Difference(
        kind=DifferenceKind.ELEMENTS,
        name=pair.name,
        state=pair.state,
        a=found.first_a,
        b=found.first_b,
        compared_as=pair.dtype.name if pair.rounded else None,
        elements=compared_elems,
        differing=found.count,
        nonfinite=found.nonfinite,
        max_abs=found.max_abs,
        max_rel=found.max_rel,
        first_index=_index(found.first, pair.shape),
    )


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for length in reversed(shape):
        place, inner = divmod(place, length)
        found.append(inner)
    return tuple(reversed(found))


class _Reading:
    """Reads the pairs block by block, a few at a time."""

    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        pairs: Sequence[TensorPair],
        *,
        sample: float | None,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.differences: dict[int, ValueDifference] = {}
        self.read_bytes = 0
        self.compared = [0] * len(pairs)
        """Elements that were compared, by the number of the pair."""
        self._a, self._b, self._pairs = a, b, pairs
        self._sample = sample
        self._on_progress, self._should_stop = on_progress, should_stop
        self._kernel: CastKernel = default_kernel()
        self._bytes_total = int(sum(prod(p.shape) * p.dtype.itemsize_bytes for p in pairs) * (sample or 1.0))
        self._bytes_done = 0
        self._started = self._reported = time.monotonic()

    def run(self) -> None:
        """Compare every block, or the chosen ones, in the order of the pairs."""
        local = all(f.store.scheme == "file" for f in (*self._a.files, *self._b.files))
        threads = min(_THREADS, os.cpu_count() or 1) if local else _REMOTE_THREADS
        under_way: deque[Future[_Outcome]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for block in self._blocks():
                    if len(under_way) > 2 * threads:
                        self._take(under_way.popleft().result())
                    under_way.append(pool.submit(self._compare, block))
                while under_way:
                    self._take(under_way.popleft().result())
            finally:
                for future in under_way:
                    future.cancel()

    def _blocks(self) -> Iterator[_Block]:
        chance = random.SystemRandom()
        for number, pair in enumerate(self._pairs):
            numel, step = prod(pair.shape), BLOCK_BYTES // pair.dtype.itemsize_bytes
            for begin in range(0, numel, step):
                if self._sample is None or chance.random() < self._sample:
                    yield _Block(number, begin, min(begin + step, numel))

    def _compare(self, block: _Block) -> _Outcome:
        pair = self._pairs[block.pair]
        left, right = TensorReader(self._a, self._kernel), TensorReader(self._b, self._kernel)
        a = left.elements(pair.a, pair.dtype, block.begin, block.end)
        b = right.elements(pair.b, pair.dtype, block.begin, block.end)
        found = compare_elements(a, b, pair.dtype, first=block.begin)
        return _Outcome(block, found, left.counts.read_bytes + right.counts.read_bytes)

    def _take(self, outcome: _Outcome) -> None:
        pair, count = self._pairs[outcome.block.pair], outcome.block.end - outcome.block.begin
        self.read_bytes += outcome.read_bytes
        self.compared[outcome.block.pair] += count
        self._bytes_done += count * pair.dtype.itemsize_bytes
        if outcome.difference is not None:
            known = self.differences.get(outcome.block.pair)
            # Blocks come in order: the first one of a tensor that differs holds its first difference.
            self.differences[outcome.block.pair] = (
                outcome.difference if known is None else known.joined(outcome.difference)
            )
        if self._should_stop is not None and self._should_stop():
            raise JobError(
                "job.cancelled",
                "the comparison was stopped; nothing was written",
                fix="run the same command again; it starts anew",
            )
        self._report()

    def _report(self) -> None:
        now = time.monotonic()
        if self._on_progress is None or now - self._reported < _REPORT_EVERY_S:
            return
        self._reported = now
        rate = self._bytes_done / max(now - self._started, 1e-9)
        total = max(self._bytes_total, self._bytes_done)
        self._on_progress(
            Progress(
                phase="running",
                bytes_done=self._bytes_done,
                bytes_total=total,
                rate_bytes_per_s=rate,
                eta_s=(total - self._bytes_done) / rate if rate else None,
            )
        )
