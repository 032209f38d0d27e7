"""The executor: it runs the units of a plan on several threads, within the memory budget, and can be resumed.

Units start in order. So a unit that waits for a CRC of an earlier unit never waits for a unit that has not started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from reshard.choices import OverflowPolicy
from reshard.errors import JobError, SourceError, printable
from reshard.models.jobs import Progress
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.cast import CastKernel, Losses
from reshard_engine.execute.casts.placing import ReadCounts, default_kernel
from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.execute.checks.source import record_reads, refuse_damaged
from reshard_engine.execute.checks.unit_sums import AbandonedError, BlockDigests, RecordCrcs
from reshard_engine.execute.gather import CALLS_AT_ONCE, TensorReader, fill
from reshard_engine.execute.journal import RecordSpan, UnitRecord
from reshard_engine.execute.server_copy import ServerCopier
from reshard_engine.execute.sinks.protocol import Made, Sink
from reshard_engine.integrity.checksums import CrcBoard
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.plan.model import CACHED_BYTES, Chunk, Plan, RecordPart, Unit, steps_of
from reshard_engine.storage.crc32 import crc32
from reshard_engine.storage.local import kept_open
from reshard_engine.tensors.layout import TargetLayout

# The progress of a run, which the caller gets a few times a second.

_PERIOD_S = 0.2


class ProgressReport:
    """Counts the bytes and units of a run. Any thread may call it."""

    def __init__(self, plan: Plan, on_progress: Callable[[Progress], None] | None, done: tuple[int, int]) -> None:
        """`done` is the number of bytes and of units that an earlier attempt finished."""
        self._plan = plan
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done_bytes, self._done_units = done
        self.resumed_bytes = done[0]
        self._started_at = time.monotonic()
        self._reported_at = 0.0

    def add(self, phase: str, length_bytes: int, *, units: int = 0) -> None:
        """Count finished bytes and units. Bytes count before their unit ends, because a large unit takes seconds."""
        with self._lock:
            self._done_bytes += length_bytes
            self._done_units += units
        self.report(phase)

    def report(self, phase: str, *, force: bool = False) -> None:
        """Report the progress to the caller, unless the last report is less than `_PERIOD_S` old."""
        if self._on_progress is None:
            return
        with self._lock:
            now = time.monotonic()
            if not force and now - self._reported_at < _PERIOD_S:
                return
            self._reported_at = now
            total = self._plan.write_bytes
            rate = (self._done_bytes - self.resumed_bytes) / max(now - self._started_at, 1e-6)
            self._on_progress(
                Progress(
                    phase=phase,  # pyright: ignore[reportArgumentType]
                    bytes_done=self._done_bytes,
                    bytes_total=total,
                    bytes_kept=self.resumed_bytes,
                    units_done=self._done_units,
                    units_total=len(self._plan.units),
                    rate_bytes_per_s=rate,
                    eta_s=(total - self._done_bytes) / rate if rate > 0 else None,
                )
            )


# The run of the units.


class StoppedError(JobError):
    """The error that ends a run when the caller asks it to stop."""

    def __init__(self) -> None:
        """Stopping is not a failure: finished units stay finished."""
        super().__init__("job.cancelled", "stopped on request", fix="run the same command again: it resumes")


def stop_check(should_stop: Callable[[], bool] | None) -> Callable[[], None]:
    """A function that long work calls between two pieces; it raises `StoppedError` if the caller wants to stop."""

    def check() -> None:
        if should_stop is not None and should_stop():
            raise StoppedError

    return check


class _Memory(threading.local):
    """The memory in which a thread makes its units. It is kept between units: new pages cost as much as a copy."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    def at_least(self, length_bytes: int) -> ByteArray:
        """Memory of this length, with undefined content."""
        if len(self._bytes) < length_bytes:
            self._bytes = np.empty(length_bytes, dtype=np.uint8)
        return self._bytes[:length_bytes]


def refuse_overflow(losses: Mapping[str, Losses]) -> None:
    """Stop at the first unit with elements that are too large for their new type: the other units may take hours.

    Raises:
        SourceError: `tensor.overflow`.
    """
    lost = {fqn: found.overflowed for fqn, found in losses.items() if found.overflowed}
    if lost:
        fqn, count = next(iter(lost.items()))
        raise SourceError(
            "tensor.overflow",
            f"{count} finite elements of {printable(fqn)} are too large for the requested type"
            + (f", and so are elements of {len(lost) - 1} more parameters in the same unit" if len(lost) > 1 else ""),
            fix="--on-overflow saturate (the largest number) or inf, or a wider --dtype: bf16 has fp32's range",
            details={"parameters": [printable(n) for n in list(lost)[:64]]},
        )


def losses_by_parameter(checkpoint: Checkpoint, losses: Mapping[int, Losses]) -> dict[str, Losses]:
    """The losses of casts by name of the parameter."""
    found: dict[str, Losses] = {}
    for tensor, lost in losses.items():
        fqn = checkpoint.shard_map.tensors[tensor].fqn
        found[fqn] = found.get(fqn, Losses()) + lost
    return found


class Executor:
    """Runs the units of one plan and writes them to one sink."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: TargetLayout,
        plan: Plan,
        sink: Sink,
        *,
        done: Mapping[int, UnitRecord],
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
        copier: ServerCopier | None = None,
    ) -> None:
        """`done` holds the records of an earlier attempt, whose units are not run again."""
        self._checkpoint = checkpoint
        self._files = layout.files
        self._sink = sink
        self._copier = copier
        self._on_overflow = plan.on_overflow
        self._kernel: CastKernel = default_kernel()
        self._should_stop = should_stop or (lambda: False)
        self._board = CrcBoard()
        self.source_reads = record_reads(checkpoint, to=plan.target.get("to"))
        """Compares the records of the source that are read whole with their CRC-32s."""
        self._memory = _Memory()
        self._local = checkpoint.is_local
        self._calls: ThreadPoolExecutor | None = None
        if sink.streams:
            # Reads over a network should be long; local reads should stay in the cache.
            self._most_bytes = CACHED_BYTES if self._local else READ_BATCH_BYTES
        else:
            self._most_bytes = max(u.length_bytes for u in plan.units)  # a chunk is one item
        self.records: dict[int, UnitRecord] = {}
        resumed = sum(plan.units[k].length_bytes for k in done), len(done)
        self.progress = ProgressReport(plan, on_progress, resumed)
        self._failed = threading.Event()
        self.absorb(done.values())

    @property
    def failed(self) -> bool:
        """True if a unit failed. Whoever makes the units that `run` takes stops then."""
        return self._failed.is_set()

    @property
    def copied_bytes(self) -> int:
        """Bytes that the store copied."""
        return 0 if self._copier is None else self._copier.copied_bytes

    def absorb(self, records: Iterable[UnitRecord]) -> None:
        """Take the records of units that are done: other units need their CRC-32s, and `run` leaves them out."""
        for record in records:
            self.records[record.unit] = record
            self._put_up(record.spans)

    def run(
        self,
        units: Iterable[Unit],
        threads: int,
        *,
        phase: str,
        parts_before: Callable[[Unit], Sequence[RecordPart]] = lambda _: (),
    ) -> None:
        """Run those of the units that are not done. A unit is taken from `units` when a thread is free for it.

        Args:
            units: The units, in the order of the plan.
            threads: Number of units that run at a time.
            phase: The phase that progress reports name.
            parts_before: The parts of records that a unit has CRC slots for, and whose own units are neither done nor
                among `units`. Their sums are computed here.

        Raises:
            ReshardError: The first failure. Running units are finished or abandoned; none is recorded in part.
            StoppedError: If the caller asked for it.
        """
        slots = threading.Semaphore(threads)
        futures: list[Future[None]] = []

        def one(unit: Unit) -> None:
            try:
                self._sum_parts(parts_before(unit))
                self._run_unit(unit, phase)
            except BaseException:
                self._failed.set()
                self._board.fail()
                raise
            finally:
                slots.release()

        stopped = False
        with self._calling(threads), ThreadPoolExecutor(threads, thread_name_prefix="unit") as pool:
            todo = iter(units)
            while True:
                slots.acquire()
                try:
                    unit = next((u for u in todo if u.index not in self.records), None)
                except BaseException:
                    # The units that run now would otherwise wait for CRCs of units that never start.
                    self._board.fail()
                    raise
                stopped = self._should_stop()
                if unit is None or self.failed or stopped:
                    break
                futures.append(pool.submit(one, unit))
        for future in futures:
            future.result()
        if stopped:
            raise StoppedError
        self.progress.report(phase, force=True)

    @contextmanager
    def _calling(self, threads: int) -> Generator[None]:
        """Provide a pool for concurrent calls of a unit, if calls wait for a network."""
        if threads == 1 or (self._local and self._sink.streams):
            yield
            return
        with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="call") as self._calls:
            yield
        self._calls = None

    def _sum_parts(self, parts: Sequence[RecordPart]) -> None:
        """Put up the CRC-32s of parts that another process writes, unless they are known."""
        for part in parts:
            offset = part.begin - self._files[part.file].template.records[part.record][0]
            if self._board.knows(part.file, part.record, offset, part.length_bytes):
                continue
            reader = self._reader(ReadCounts())  # the unit that writes the part counts what it reads and loses
            crc, unit = 0, Unit(-1, (Chunk(part.file, part.begin, part.length_bytes),), commit=False)
            for step in steps_of(unit, self._files, self._most_bytes):
                memory = self._memory.at_least(step[-1].at + step[-1].length_bytes)
                fill(reader, step, memory)
                for item in step:
                    crc = crc32(memory[item.at : item.at + item.length_bytes].data, crc)
            self._board.put(part.file, part.record, [(offset, part.length_bytes, crc)])

    def _reader(self, counts: ReadCounts) -> TensorReader:
        saturate = self._on_overflow is OverflowPolicy.SATURATE
        pool = None if self._local else self._calls
        reads = self.source_reads
        return TensorReader(self._checkpoint, self._kernel, saturate=saturate, pool=pool, counts=counts, reads=reads)

    def _run_unit(self, unit: Unit, phase: str) -> None:
        copied = self._copier.resolve(unit) if self._copier is not None else None
        if isinstance(copied, UnitRecord):
            self._put_up(copied.spans)
            self.progress.add(phase, unit.length_bytes)
            self._finish(copied, phase)
            return
        proven = () if copied is None else self._put_up(copied)  # the store refused to copy it
        counts = ReadCounts()
        reader = self._reader(counts)
        crcs = RecordCrcs(self._board, proven=copied is not None)
        digests = BlockDigests(self._checkpoint.shard_map, reader)
        try:
            with kept_open():
                made = self._made(unit, reader, crcs, digests, phase)
                copy_read = self._copier.copy_read if self._copier is not None else None
                chunks = self._sink.write_made(made, copy_read, self._calls if unit.chunks[1:] else None)
        except AbandonedError:
            return
        if self.source_reads.damaged:
            refuse_damaged(self._checkpoint, self.source_reads)
        losses = losses_by_parameter(self._checkpoint, counts.losses)
        if self._on_overflow is OverflowPolicy.ERROR:
            refuse_overflow(losses)
        spans, runs = (*proven, *crcs.spans.values()), tuple(digests.runs)
        self._finish(UnitRecord(unit.index, tuple(chunks), spans, runs, counts.read_bytes, losses), phase)

    def _made(self, unit: Unit, reader: TensorReader, crcs: RecordCrcs, digests: BlockDigests, phase: str) -> Made:
        """The items of a unit in order, each with its bytes, which are read, summed and digested."""
        for step in steps_of(unit, self._files, self._most_bytes):
            memory = self._memory.at_least(step[-1].at + step[-1].length_bytes)
            fill(reader, step, memory)
            for item in step:
                data = memory[item.at : item.at + item.length_bytes]
                crcs.add(item, data)
                digests.add(item, data)
                yield item, data.data
                self.progress.add(phase, item.length_bytes)

    def _finish(self, record: UnitRecord, phase: str) -> None:
        self._sink.record(record)
        self.records[record.unit] = record
        self.progress.add(phase, 0, units=1)

    def _put_up(self, spans: Sequence[RecordSpan]) -> Sequence[RecordSpan]:
        for file, number, offset, length, crc in spans:
            self._board.put(file, number, [(offset, length, crc)])
        return spans
