"""The loop that moves bytes: units in order over threads, under the memory budget, resumable.

Units start in order, so that a unit which waits for a CRC of an earlier one never waits for one that
has not started.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from reshard.errors import JobError
from reshard.models import Progress
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.digests import BlockRun
from reshard_engine.execute.cast import CastKernel, default_kernel
from reshard_engine.execute.crc import CrcBoard
from reshard_engine.execute.gather import Buffer, ChunkFiller
from reshard_engine.execute.journal import ChunkRecord, RecordSpan, UnitRecord
from reshard_engine.execute.offload import Offloader
from reshard_engine.execute.passing import PassingDigests
from reshard_engine.execute.sink import Sink
from reshard_engine.layout import TargetLayout
from reshard_engine.plan.model import Chunk, Plan, Unit

_PROGRESS_PERIOD_S = 0.2


class StoppedError(JobError):
    """The caller asked the run to stop."""

    def __init__(self) -> None:
        """Stopping is no failure: what is finished stays finished."""
        super().__init__("job.cancelled", "stopped on request", fix="run the same command again: it resumes")


def stop_check(should_stop: Callable[[], bool] | None) -> Callable[[], None]:
    """What long work calls between two pieces: it raises `StoppedError` when the caller wants the run to end."""

    def check() -> None:
        if should_stop is not None and should_stop():
            raise StoppedError

    return check


class Executor:
    """Runs the units of one plan into one sink."""

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
        offloader: Offloader | None = None,
    ) -> None:
        """`done` holds the records of an earlier attempt; their units are not run again."""
        self._checkpoint = checkpoint
        self._layout = layout
        self._plan = plan
        self._sink = sink
        self._offloader = offloader
        self._kernel: CastKernel = default_kernel()
        self._on_progress = on_progress
        self._should_stop = should_stop or (lambda: False)
        self._board = CrcBoard()
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self._started_at = time.monotonic()
        self.records: dict[int, UnitRecord] = dict(done)
        self._resumed_bytes = sum(plan.units[k].length_bytes for k in done)
        self._done_bytes = self._resumed_bytes
        for record in done.values():
            self._put_up(record.spans)

    @property
    def resumed_bytes(self) -> int:
        """Bytes that an earlier attempt had written."""
        return self._resumed_bytes

    def run(self, units: Sequence[Unit], threads: int, *, phase: str) -> None:
        """Run the units that are not done.

        Raises:
            ReshardError: The first failure; units in flight are finished or abandoned, none half recorded.
            StoppedError: If the caller asked for it.
        """
        todo = [u for u in units if u.index not in self.records]
        slots = threading.Semaphore(threads)
        failed = threading.Event()
        futures: list[Future[None]] = []

        def one(unit: Unit) -> None:
            try:
                self._run_unit(unit, phase)
            except BaseException:
                failed.set()
                self._board.fail()
                raise
            finally:
                slots.release()

        stopped = False
        with ThreadPoolExecutor(threads, thread_name_prefix="unit") as pool:
            for unit in todo:
                slots.acquire()
                stopped = self._should_stop()
                if failed.is_set() or stopped:
                    slots.release()
                    break
                futures.append(pool.submit(one, unit))
        for future in futures:
            future.result()
        if stopped:
            raise StoppedError
        self.report(phase, force=True)

    def _run_unit(self, unit: Unit, phase: str) -> None:
        if self._offloader is not None and (copied := self._offloader.copy(unit)) is not None:
            self._put_up(copied.spans)
            self._finish(unit, copied, phase)
            return
        filler = ChunkFiller(self._checkpoint, self._kernel)
        buffers: list[tuple[Chunk, Buffer]] = []
        spans: list[RecordSpan] = []
        passing = PassingDigests(self._checkpoint, self._kernel)
        blocks: list[BlockRun] = []
        for chunk in unit.chunks:
            buffer = np.empty(chunk.length_bytes, dtype=np.uint8)
            file = self._layout.files[chunk.file]
            filler.fill(file, begin=chunk.offset, buffer=buffer)
            spans += self._sum_records(chunk, buffer)
            blocks += passing.of_chunk(file, chunk, buffer)
            buffers.append((chunk, buffer))
        written: list[ChunkRecord] = []
        for chunk, buffer in buffers:
            if not self._fill_slots(chunk, buffer):
                return  # another unit failed, and with it what this one waits for
            view = buffer.data
            crc = zlib.crc32(view)
            etag = self._offloader.copy_read(chunk, crc) if self._offloader is not None else None
            written.append(ChunkRecord(chunk, crc, self._sink.write(chunk, view, crc) if etag is None else etag))
        record = UnitRecord(
            unit.index,
            tuple(written),
            tuple(spans),
            tuple(blocks),
            read_bytes=filler.read_bytes + passing.read_bytes,
            overflows=filler.overflows,
        )
        self._finish(unit, record, phase)

    def _finish(self, unit: Unit, record: UnitRecord, phase: str) -> None:
        self._sink.record(record)
        with self._lock:
            self.records[unit.index] = record
            self._done_bytes += unit.length_bytes
        self.report(phase)

    def _sum_records(self, chunk: Chunk, buffer: Buffer) -> Sequence[RecordSpan]:
        """CRC-32s of the parts of records that lie in the chunk, put up for other units."""
        if self._offloader is not None and self._offloader.proves(chunk):
            return self._put_up(self._offloader.spans_of(chunk)[0])  # the store refused to copy it
        spans: list[RecordSpan] = []
        end = chunk.offset + chunk.length_bytes
        template = self._layout.files[chunk.file].template
        for number in template.records_in(chunk.offset, end):
            offset, length = template.records[number]
            low, high = max(offset, chunk.offset), min(offset + length, end)
            crc = zlib.crc32(buffer.data[low - chunk.offset : high - chunk.offset])
            spans.append((chunk.file, number, low - offset, high - low, crc))
        return self._put_up(spans)

    def _put_up(self, spans: Sequence[RecordSpan]) -> Sequence[RecordSpan]:
        for file, number, offset, length, crc in spans:
            self._board.put(file, number, [(offset, length, crc)])
        return spans

    def _fill_slots(self, chunk: Chunk, buffer: Buffer) -> bool:
        template = self._layout.files[chunk.file].template
        for offset, record in template.slots_in(chunk.offset, chunk.offset + chunk.length_bytes):
            crc = self._board.wait_for(chunk.file, record, template.records[record][1])
            if crc is None:
                return False
            data = np.frombuffer(crc.to_bytes(4, "little"), dtype=np.uint8)
            low, high = max(offset, chunk.offset), min(offset + 4, chunk.offset + chunk.length_bytes)
            buffer[low - chunk.offset : high - chunk.offset] = data[low - offset : high - offset]
        return True

    def report(self, phase: str, *, force: bool = False) -> None:
        """Tell the caller how far the run is, at most a few times a second."""
        if self._on_progress is None:
            return
        with self._lock:
            now = time.monotonic()
            if not force and now - self._reported_at < _PROGRESS_PERIOD_S:
                return
            self._reported_at = now
            total = self._plan.write_bytes
            rate = (self._done_bytes - self._resumed_bytes) / max(now - self._started_at, 1e-6)
            self._on_progress(
                Progress(
                    phase=phase,  # pyright: ignore[reportArgumentType]
                    bytes_done=self._done_bytes,
                    bytes_total=total,
                    units_done=len(self.records),
                    units_total=len(self._plan.units),
                    rate_bytes_per_s=rate,
                    eta_s=(total - self._done_bytes) / rate if rate > 0 else None,
                )
            )
