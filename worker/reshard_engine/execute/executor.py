"""The loop that moves bytes: units in order over threads, under the memory budget, resumable.

Units start in order, so that a unit which waits for a CRC of an earlier one never waits for one that
has not started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from reshard.errors import JobError, SourceError, printable
from reshard.models import OverflowPolicy, Progress
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.kernels import default_kernel
from reshard_engine.execute.casts.losses import Losses
from reshard_engine.execute.casts.rows import Buffer
from reshard_engine.execute.checks.tensor_digests import PassingDigests
from reshard_engine.execute.chunk_writers import Outlet, StreamedChunks, WholeChunks
from reshard_engine.execute.gather.chunks import ChunkFiller, Part
from reshard_engine.execute.gather.concurrent_reads import CALLS_AT_ONCE
from reshard_engine.execute.gather.windows import CACHED_BYTES, steps_of
from reshard_engine.execute.journal import RecordSpan, UnitRecord
from reshard_engine.execute.server_copy.copier import ServerCopier
from reshard_engine.execute.sinks.protocol import StreamSink, WholeSink
from reshard_engine.integrity.crc import CrcBoard
from reshard_engine.integrity.digests import DIGEST_BYTES, BlockRun
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.plan.model import Chunk, Plan, Unit
from reshard_engine.storage.checksums import crc32
from reshard_engine.storage.local import kept_open
from reshard_engine.tensors.layout import TargetLayout

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


class _Memory(threading.local):
    """The memory that a thread's units are made in, kept from one to the next: new pages cost as much as a copy."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.uint8)

    def at_least(self, length_bytes: int) -> Buffer:
        """The memory, whatever it holds."""
        if len(self._buffer) < length_bytes:
            self._buffer = np.empty(length_bytes, dtype=np.uint8)
        return self._buffer[:length_bytes]


class _RecordSums:
    """CRC-32s of the parts of records that pass in a unit, put up for other units as they grow."""

    def __init__(self, board: CrcBoard) -> None:
        self._board = board
        self._known: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._whole: list[RecordSpan] = []

    def take(self, file: int, part: Part, buffer: Buffer) -> None:
        """Sum the records of a window; windows of a file come in order."""
        end, template = part.begin + part.length_bytes, part.file.template
        for number in template.records_in(part.begin, end):
            offset, length = template.records[number]
            low, high = max(offset, part.begin), min(offset + length, end)
            first, held, crc = self._known.get((file, number), (low - offset, 0, 0))
            crc = crc32(buffer.data[low - part.begin : high - part.begin], crc)
            self._known[file, number] = span = (first, held + high - low, crc)
            self._board.put(file, number, [span])

    def take_whole(self, file: int, part: Part, buffer: Buffer) -> None:
        """Sum the records of a whole file and put the sums into it: no other unit gives or waits for one of them."""
        template, data = part.file.template, buffer.data
        sums = [crc32(data[offset : offset + length]) for offset, length in template.records]
        for offset, record in template.crc_slots:
            data[offset : offset + 4] = sums[record].to_bytes(4, "little")
        self._whole += [(file, n, 0, r[1], crc) for n, (r, crc) in enumerate(zip(template.records, sums, strict=True))]

    def spans(self) -> list[RecordSpan]:
        """(file, record, offset in the record, bytes, CRC-32) of everything that has passed."""
        return self._whole + [(file, number, *span) for (file, number), span in self._known.items()]


def _merged(runs: Iterable[BlockRun]) -> list[BlockRun]:
    """Runs of digests with those put together that follow one another."""
    found: list[BlockRun] = []
    for run in runs:
        last = found[-1] if found else None
        follows = last is not None and last.first + len(last.digests) // DIGEST_BYTES == run.first
        if last is not None and follows and (last.tensor, last.dtype) == (run.tensor, run.dtype):
            found[-1] = BlockRun(last.tensor, last.dtype, last.first, last.digests + run.digests)
            continue
        found.append(run)
    return found


def _refuse_overflow(losses: Mapping[str, Losses]) -> None:
    """Stop at the first unit in which elements are too large for their new type: others may take hours.

    Raises:
        SourceError: `tensor.overflow`.
    """
    lost = {fqn: found.overflowed for fqn, found in losses.items() if found.overflowed}
    if lost:
        fqn, count = next(iter(lost.items()))
        raise SourceError(
            "tensor.overflow",
            f"{count} finite elements of {printable(fqn)} are too large for the type that was asked for"
            + (f", and some of {len(lost) - 1} more parameters in the same unit of work" if len(lost) > 1 else ""),
            fix="--on-overflow saturate (the largest number) or inf, or a wider --dtype: bf16 has fp32's range",
            details={"parameters": [printable(n) for n in list(lost)[:64]]},
        )


class Executor:
    """Runs the units of one plan into one sink."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: TargetLayout,
        plan: Plan,
        sink: WholeSink | StreamSink,
        *,
        done: Mapping[int, UnitRecord],
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
        copier: ServerCopier | None = None,
    ) -> None:
        """`done` holds the records of an earlier attempt; their units are not run again."""
        self._checkpoint = checkpoint
        self._layout = layout
        self._plan = plan
        self._sink = sink
        self._copier = copier
        self._on_overflow = plan.on_overflow
        self._kernel: CastKernel = default_kernel()
        self._on_progress = on_progress
        self._should_stop = should_stop or (lambda: False)
        self._board = CrcBoard()
        self._lock = threading.Lock()
        self._memory = _Memory()
        # Reads over a network want to be long; local ones want to stay in the cache.
        local = checkpoint.is_local
        self._window_bytes = CACHED_BYTES if local else READ_BATCH_BYTES
        self._local = local
        self._calls: ThreadPoolExecutor | None = None
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
        with self._calling(threads), ThreadPoolExecutor(threads, thread_name_prefix="unit") as pool:
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

    @contextmanager
    def _calling(self, threads: int) -> Generator[None]:
        """Let the calls of a unit be on their way together, where they wait for a network."""
        if threads == 1 or (self._local and isinstance(self._sink, StreamSink)):
            yield
            return
        with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="call") as self._calls:
            yield
        self._calls = None

    def _run_unit(self, unit: Unit, phase: str) -> None:
        if self._copier is not None and (copied := self._copier.copy(unit)) is not None:
            self._put_up(copied.spans)
            self._finish(unit, copied, phase)
            return
        saturate, calls = self._on_overflow is OverflowPolicy.SATURATE, None if self._local else self._calls
        filler = ChunkFiller(self._checkpoint, self._kernel, saturate=saturate, pool=calls)
        passing = PassingDigests(self._checkpoint, self._kernel, saturate=saturate)
        sums = _RecordSums(self._board)
        proven: list[RecordSpan] = []
        blocks: list[BlockRun] = []
        moved, files = 0, self._layout.files
        with kept_open(), self._open(unit) as outlet:
            for step in steps_of(unit, files, outlet.window_bytes):
                memory = self._memory.at_least(step[-1].part.at + step[-1].part.length_bytes)
                filler.fill_parts([w.part for w in step], memory)
                for window in step:
                    chunk, part = unit.chunks[window.chunk], window.part
                    buffer = memory[part.at : part.at + part.length_bytes]
                    if not self._sum(chunk, part, buffer, sums, proven):
                        return  # another unit failed, and with it what this one waits for
                    blocks += passing.of_chunk(part.file, Chunk(chunk.file, part.begin, part.length_bytes), buffer)
                    outlet.take(chunk, part.begin, buffer.data)
                    moved += self._moved(part.length_bytes, phase)
            written = outlet.records()
        if self._on_overflow is OverflowPolicy.ERROR:
            _refuse_overflow(filler.losses)
        record = UnitRecord(
            unit.index,
            tuple(written),
            (*proven, *sums.spans()),
            tuple(_merged(blocks)),
            read_bytes=filler.read_bytes + passing.read_bytes,
            losses=filler.losses,
        )
        self._finish(unit, record, phase, moved_bytes=moved)

    def _moved(self, length_bytes: int, phase: str) -> int:
        """Count bytes that passed before their unit ends: a large unit takes seconds."""
        with self._lock:
            self._done_bytes += length_bytes
        self.report(phase)
        return length_bytes

    def _sum(self, chunk: Chunk, part: Part, buffer: Buffer, sums: _RecordSums, proven: list[RecordSpan]) -> bool:
        """Sum the records in a window and put sums where they belong; False after a failure elsewhere."""
        if self._copier is not None and self._copier.proves(chunk):
            proven += self._put_up(self._copier.spans_of(chunk)[0])  # the store refused to copy it
        elif part.length_bytes == part.file.size_bytes:
            sums.take_whole(chunk.file, part, buffer)
            return True
        else:
            sums.take(chunk.file, part, buffer)
        return self._fill_slots(chunk.file, part, buffer)

    def _finish(self, unit: Unit, record: UnitRecord, phase: str, *, moved_bytes: int = 0) -> None:
        self._sink.record(record)
        with self._lock:
            self.records[unit.index] = record
            self._done_bytes += unit.length_bytes - moved_bytes
        self.report(phase)

    def _put_up(self, spans: Sequence[RecordSpan]) -> Sequence[RecordSpan]:
        for file, number, offset, length, crc in spans:
            self._board.put(file, number, [(offset, length, crc)])
        return spans

    def _open(self, unit: Unit) -> Outlet:
        if isinstance(self._sink, StreamSink):
            return StreamedChunks(self._sink, self._window_bytes)
        return WholeChunks(self._sink, unit, self._copier, self._calls)

    def _fill_slots(self, file: int, part: Part, buffer: Buffer) -> bool:
        template, end = part.file.template, part.begin + part.length_bytes
        for offset, record in template.slots_in(part.begin, end):
            crc = self._board.wait_for(file, record, template.records[record][1])
            if crc is None:
                return False
            data = np.frombuffer(crc.to_bytes(4, "little"), dtype=np.uint8)
            low, high = max(offset, part.begin), min(offset + 4, end)
            buffer[low - part.begin : high - part.begin] = data[low - offset : high - offset]
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
