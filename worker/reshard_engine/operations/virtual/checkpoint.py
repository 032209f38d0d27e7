"""A target that is never written: its files are computed from the source, byte range by byte range, as they are read.

A target's layout and the source's shard map decide every byte of every file. So a reader of the target can be served
without a copy: each read is made as a unit of a conversion is made, with the same casts, merges and refusals.
"""

from __future__ import annotations

import io
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, BinaryIO, Self, cast

import numpy as np
from fsspec.spec import AbstractFileSystem  # pyright: ignore[reportMissingTypeStubs]  # it has none

from reshard.choices import OverflowPolicy
from reshard.errors import RequestError, ReshardError, printable
from reshard.functions import open_layout
from reshard.models.jobs import ConvertRequest, FileEntry, NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.placing import ReadCounts, default_kernel
from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.execute.checks.commit import prove_source_unchanged
from reshard_engine.execute.checks.source import check_agreements, record_reads, refuse_damaged
from reshard_engine.execute.executor import StoppedError, losses_by_parameter, refuse_overflow, stop_check
from reshard_engine.execute.gather import CALLS_AT_ONCE, TensorReader, fill
from reshard_engine.formats.registry import check_request, laid_out
from reshard_engine.integrity.checksums import combine
from reshard_engine.operations.requested import requested_checkpoint
from reshard_engine.pickles.nodes import collector_paused
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.plan.model import CACHED_BYTES, Chunk, Plan, Unit, steps_of
from reshard_engine.plan.planner import plan_conversion
from reshard_engine.storage.crc32 import crc32, pieces_of
from reshard_engine.storage.local import kept_open
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import Listing, ObjectInfo, save_directory
from reshard_engine.tensors.layout import FileTemplate, PlannedStore, TargetFile, TargetLayout, outside

# Blocks of files that small reads are served from.

BLOCK_BYTES = 512 << 10
"""Length of a block of a local source. Of what is beside a small tensor, so much is read with it and perhaps again."""
_REMOTE_BLOCK_BYTES = 4 << 20
"""Length of a block of a store. A read that is as long goes past the blocks, straight into the reader's memory."""
_LOCAL_BYTES = 128 << 10
"""Length of a read that goes past the blocks of a local source: making so many bytes costs less than to copy them from
a block, and readers that wait for the same block wait for one another."""
_MOST_BLOCKS = 32
_REMOTE_BLOCKS = 24
_AHEAD, _REMOTE_AHEAD = 1, 8
"""Blocks that are made ahead of a sequential reader. A store with 50 ms a call and 200 MB/s a connection needs 10 MB
on their way for each connection to be busy."""
_PARTS_AT_ONCE = 8
_PART_BYTES = 16 << 20
"""Length of the parts of a long read from a store, which are made at the same time."""
_BUFFER_BYTES = 64 << 10
_NEAR_BYTES = 64 << 10
"""A read is made without its block, unless it begins as close behind the last one of its file."""

_TURN_S = 0.2
"""Seconds after which a thread that waits for the sum of a record checks whether its reader has gone."""

_Stop = Callable[[], None]
"""Raises `StoppedError` if nobody needs the bytes any more."""
_Key = tuple[int, int]
"""The number of a file, and the number of a block in it."""


class _Blocks:
    """Blocks of the files of a layout, the latest ones; each is made once, by whoever asks first."""

    def __init__(self, make: _Maker, length_bytes: int, *, most: int, ahead: int) -> None:
        self._make = make
        self.length_bytes = length_bytes
        self._most = most
        self._ahead = ahead
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, Future[ByteArray]] = OrderedDict()
        self._ends: dict[int, int] = {}
        """The end of the last read of each file."""
        self._pool: ThreadPoolExecutor | None = None

    def read(self, file: int, size_bytes: int, offset: int, buffer: ByteArray, *, stop: _Stop) -> None:
        """Fill `buffer` from the blocks of a file. A read that no others are near is made alone."""
        if self._is_alone(file, offset, offset + len(buffer)):
            self._make.make(file, offset, buffer, stop=stop)
            return
        done = 0
        while done < len(buffer):
            number, begin = divmod(offset + done, self.length_bytes)
            block = self._block((file, number), size_bytes, stop)
            part = block[begin : begin + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        """Wait for what is being made ahead."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _is_alone(self, file: int, offset: int, end: int) -> bool:
        with self._lock:
            before, self._ends[file] = self._ends.get(file), end
            near = before is not None and 0 <= offset - before <= _NEAR_BYTES
            blocks = range(offset // self.length_bytes, -(-end // self.length_bytes))
            return not near and not any((file, number) in self._known for number in blocks)

    def _block(self, key: _Key, size_bytes: int, stop: _Stop) -> ByteArray:
        while True:
            future, own = self._begun(key, size_bytes, stop)
            if own:
                self._fulfil(key, size_bytes, future, stop=stop)
            try:
                return future.result()
            except StoppedError:
                if own:
                    raise
                # The reader that made the block does not need it any more; this one does.
                stop()

    def _begun(self, key: _Key, size_bytes: int, stop: _Stop) -> tuple[Future[ByteArray], bool]:
        """A block that is known or being made, and whether the caller makes it."""
        with self._lock:
            sequential = (key[0], key[1] - 1) in self._known
            found, own = self._known.get(key), key not in self._known
            if found is None:
                found = self._known[key] = Future()
            self._known.move_to_end(key)
            ahead = self._begin_ahead(key, size_bytes) if sequential else []
            self._drop()
        for other, future in ahead:
            self._threads().submit(self._fulfil, other, size_bytes, future, stop=stop)
        return found, own

    def _begin_ahead(self, key: _Key, size_bytes: int) -> list[tuple[_Key, Future[ByteArray]]]:
        last = (size_bytes - 1) // self.length_bytes
        wanted = [(key[0], n) for n in range(key[1] + 1, min(key[1] + self._ahead, last) + 1)]
        begun: list[tuple[_Key, Future[ByteArray]]] = []
        for other in wanted:
            if other not in self._known:
                self._known[other] = Future()
                begun.append((other, self._known[other]))
        return begun

    def _drop(self) -> None:
        for key in list(self._known):
            if len(self._known) <= self._most:
                return
            if self._known[key].done():
                del self._known[key]

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._ahead, thread_name_prefix="ahead")
            return self._pool

    def _fulfil(self, key: _Key, size_bytes: int, future: Future[ByteArray], *, stop: _Stop) -> None:
        begin = key[1] * self.length_bytes
        data = np.empty(min(self.length_bytes, size_bytes - begin), dtype=np.uint8)
        try:
            self._make.make(key[0], begin, data, stop=stop)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the block raises it
            with self._lock:  # the next reader tries again
                if self._known.get(key) is future:
                    del self._known[key]
            future.set_exception(error)
        else:
            future.set_result(data)


# Making the bytes of files.


class _RecordSums:
    """CRC-32s of the records of a layout's files, put together from the parts that reads have made."""

    def __init__(self, make: _Maker) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spans: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        """Length and CRC-32 of known parts of a record, by their offsets in it."""
        self._whole: dict[tuple[int, int], int] = {}
        self._turns: dict[tuple[int, int], threading.Lock] = {}
        """One thread at a time reads a record for its sum; others wait for the sum."""

    def note(self, number: int, file: TargetFile, begin: int, data: ByteArray) -> None:
        """Sum the parts of records in the bytes of a file from `begin` on."""
        end, view = begin + len(data), data.data
        for record in file.template.records_in(begin, end):
            offset, length = file.template.records[record]
            low, high = max(offset, begin), min(offset + length, end)
            if low >= high or (number, record) in self._whole:
                continue
            span = high - low, crc32(view[low - begin : high - begin])
            with self._lock:
                self._spans.setdefault((number, record), {})[low - offset] = span

    def put_slots(self, number: int, file: TargetFile, begin: int, data: ByteArray, *, stop: _Stop) -> None:
        """Fill the CRC slots in the bytes of a file from `begin` on.

        A slot of a record that nobody has read costs a read of the whole record, which may have gigabytes: `stop` is
        called between its pieces, and the next call continues behind the last piece.
        """
        end, view = begin + len(data), data.data
        for offset, record in file.template.slots_in(begin, end):
            with self._turn((number, record), stop):
                value = self._of_record(number, file, record, stop).to_bytes(4, "little")
            low, high = max(offset, begin), min(offset + 4, end)
            view[low - begin : high - begin] = value[low - offset : high - offset]

    @contextmanager
    def _turn(self, key: tuple[int, int], stop: _Stop) -> Generator[None]:
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        while not turn.acquire(timeout=_TURN_S):
            stop()
        try:
            yield
        finally:
            turn.release()

    def _of_record(self, number: int, file: TargetFile, record: int, stop: _Stop) -> int:
        key = (number, record)
        with self._lock:
            if (known := self._whole.get(key)) is not None:
                return known
            spans = dict(self._spans.get(key, {}))
        first, length = file.template.records[record]
        begins, at, total = sorted(spans), 0, 0
        while at < length:
            if at in spans:
                held, crc = spans[at]
            else:
                after = bisect_right(begins, at)
                held = (begins[after] if after < len(begins) else length) - at
                crc = self._read_part(number, record, (first, at, held), stop)
            total = combine(total, crc, held)
            at += held
        with self._lock:
            self._whole[key] = total
            self._spans.pop(key, None)
        return total

    def _read_part(self, number: int, record: int, part: tuple[int, int, int], stop: _Stop) -> int:
        """Read a part of a record, `(offset of the record, offset in it, length)`, and return its CRC-32."""
        first, at, length = part
        done = crc = 0
        try:
            for _, piece in pieces_of(partial(self._make.unsummed, number), first + at, first + at + length):
                crc, done = crc32(piece, crc), done + len(piece)
                stop()
        finally:
            if done:
                with self._lock:
                    self._spans.setdefault((number, record), {})[at] = (done, crc)
        return crc


class _Maker:
    """Makes bytes of the files of a layout from the source's extents, for several threads at once."""

    def __init__(
        self, checkpoint: Checkpoint, files: Sequence[TargetFile], request: ConvertRequest, *, exact: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._files = files
        self._policy = request.on_overflow
        self._sums = _RecordSums(self) if exact else None
        self._lock = threading.Lock()
        self._idle: list[TensorReader] = []
        self._records = record_reads(checkpoint, to=request.to)
        self._local = checkpoint.is_local
        self._calls = None if self._local else ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="call")
        self._parts = None if self._local else ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="part")
        self.read_bytes = 0

    def close(self) -> None:
        """End the threads of this object."""
        for pool in (self._parts, self._calls):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def make(self, number: int, begin: int, data: ByteArray, *, stop: _Stop) -> None:
        """Fill `data` with the bytes of a file from `begin` on."""
        parts = range(0, len(data), _PART_BYTES)
        if self._parts is None or len(parts) < 2:
            self._part(number, begin, data, stop=stop)
            return
        futures = [
            self._parts.submit(self._part, number, begin + at, data[at : at + _PART_BYTES], stop=stop) for at in parts
        ]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            # The memory is the caller's: nothing may write to it after this call.
            for future in futures:
                if not future.cancelled():
                    future.exception()

    def unsummed(self, number: int, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` as `make` does, but CRC slots with zeros."""
        self._fill(number, begin, np.frombuffer(buffer, dtype=np.uint8))

    def _part(self, number: int, begin: int, data: ByteArray, *, stop: _Stop) -> None:
        stop()
        self._fill(number, begin, data)
        if self._sums is not None:
            file = self._files[number]
            self._sums.note(number, file, begin, data)
            self._sums.put_slots(number, file, begin, data, stop=stop)

    def _fill(self, number: int, begin: int, data: ByteArray) -> None:
        unit = Unit(-1, (Chunk(number, begin, len(data)),), commit=False)
        most = CACHED_BYTES if self._local else READ_BATCH_BYTES
        at = 0
        with self.reader() as reader:
            for step in steps_of(unit, self._files, most):
                length = step[-1].at + step[-1].length_bytes
                fill(reader, step, data[at : at + length])
                at += length

    @contextmanager
    def reader(self) -> Generator[TensorReader]:
        """A reader that no other thread has.

        Raises:
            SourceError: After the block, `tensor.overflow` where the request says so; `zip.crc` if a record that was
                read to its end does not match its CRC-32.
        """
        with self._lock:
            reader = self._idle.pop() if self._idle else None
        reader = self._new_reader(self._checkpoint) if reader is None else reader
        with self._reading(reader, self._checkpoint):
            yield reader
        with self._lock:
            self._idle.append(reader)

    @contextmanager
    def reader_of(self, checkpoint: Checkpoint) -> Generator[TensorReader]:
        """A reader of the same files with other tensors."""
        reader = self._new_reader(checkpoint)
        with self._reading(reader, checkpoint):
            yield reader

    def _new_reader(self, checkpoint: Checkpoint) -> TensorReader:
        saturate = self._policy is OverflowPolicy.SATURATE
        return TensorReader(
            checkpoint,
            default_kernel(),
            saturate=saturate,
            pool=self._calls,
            counts=ReadCounts(),
            reads=self._records,
        )

    @contextmanager
    def _reading(self, reader: TensorReader, checkpoint: Checkpoint) -> Generator[None]:
        try:
            with kept_open():
                yield
            if self._policy is OverflowPolicy.ERROR:
                refuse_overflow(losses_by_parameter(checkpoint, reader.counts.losses))
            refuse_damaged(checkpoint, self._records)
        finally:
            with self._lock:
                self.read_bytes += reader.counts.read_bytes
            reader.counts.read_bytes = 0
            reader.counts.losses.clear()


# The whole target.


class VirtualCheckpoint:
    """The files of a target of a conversion, computed when they are read. Any thread may read; memory is bounded.

    Bytes are those that `convert` writes with the same request, but for two things. The CRC-32 fields of torch's
    archives are zero unless the request was for exact ones: torch does not read them. There is no manifest.
    """

    def __init__(
        self, request: ConvertRequest, checkpoint: Checkpoint, layout: TargetLayout, plan: Plan, *, exact_crcs: bool
    ) -> None:
        """See `prepare`."""
        self.checkpoint = checkpoint
        self.layout = layout
        self.plan = plan
        self.exact_crcs = exact_crcs
        self.compared: int | None = None
        """Number of pairs of tensors that were compared before, as `convert` compares them; None if none was."""
        self.disagreements: tuple[str, ...] = ()
        self._numbers: Mapping[str, int] = {f.path: n for n, f in enumerate(layout.files)}
        self._make = _Maker(checkpoint, layout.files, request, exact=exact_crcs)
        if checkpoint.is_local:
            self._blocks = _Blocks(self._make, BLOCK_BYTES, most=_MOST_BLOCKS, ahead=_AHEAD)
            self._long_bytes = min(BLOCK_BYTES, _LOCAL_BYTES)
        else:
            self._blocks = _Blocks(self._make, _REMOTE_BLOCK_BYTES, most=_REMOTE_BLOCKS, ahead=_REMOTE_AHEAD)
            self._long_bytes = _REMOTE_BLOCK_BYTES
        self._request = request

    @classmethod
    @collector_paused()
    def prepare(cls, request: ConvertRequest, *, exact_crcs: bool = False, compare: bool = True) -> VirtualCheckpoint:
        """Read the source's metadata and lay the target out.

        Args:
            request: The conversion. Of its target only the name counts, which some formats write into the pointer
                beside it; `-` stands for the source's own tag.
            exact_crcs: Compute the CRC-32 fields of torch's archives. A field is known only when its whole record has
                been read.
            compare: Compare copies and rounded masters of the source now, as `convert` does before it writes.

        Raises:
            ReshardError: Any problem of the request or of the source.
        """
        check_request(request)
        checkpoint = requested_checkpoint(request, open_location(request.source.url, request.source.profile))
        own = checkpoint.tag or "checkpoint"
        name = own if request.target == "-" else save_directory(request.target, checkpoint.tag)[1]
        layout = laid_out(checkpoint, request, name=name)
        checkpoint = replace(checkpoint, shard_map=layout.map_over(checkpoint.shard_map))
        plan = plan_conversion(checkpoint, layout, request, min_part_bytes=None, copied_from=set())
        found = cls(request, checkpoint, layout, plan, exact_crcs=exact_crcs)
        if compare:
            found.compare()
        return found

    def compare(self) -> None:
        """Compare the copies and rounded masters of the source, as `convert` does before it writes.

        Raises:
            SourceError: `checkpoint.disagreement`.
        """
        self.disagreements = tuple(check_agreements(self.checkpoint, self._request.replicas, stop_check(None)))
        self.compared = len(self.checkpoint.agreements)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files of the target, by paths relative to it."""
        return tuple(FileEntry(path=f.path, size_bytes=f.size_bytes) for f in self.layout.files)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file, by path."""
        return {f.path: f.size_bytes for f in self.layout.files}

    @cached_property
    def store(self) -> PlannedStore:
        """The files as a store at `/`, whose tensors are zeros."""
        return PlannedStore("/", self.layout)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings that a conversion would give."""
        return (*self.plan.warnings, *self.disagreements)

    @property
    def not_carried(self) -> tuple[NotCarried, ...]:
        """Everything that the source holds and these files do not."""
        return self.plan.not_carried

    @property
    def content_digest(self) -> str:
        """Digest of everything that decides the bytes: the source as it was pinned, and the layout."""
        return self.plan.content_digest

    @property
    def source_digest(self) -> str:
        """Digest of the source's files, each with its pin."""
        return self.plan.source_digest

    @property
    def source_format(self) -> str:
        """The format of the source, as `inspect` names it."""
        return self.checkpoint.format

    @property
    def tag(self) -> str | None:
        """The tag of the source."""
        return self.checkpoint.tag

    @property
    def read_bytes(self) -> int:
        """Bytes of tensors that were read from the source so far."""
        return self._make.read_bytes

    def file(self, path: str) -> TargetFile:
        """The file at this path.

        Raises:
            RequestError: `request.invalid` if the target has none.
        """
        return self.layout.files[self._number(path)]

    def read_into(
        self, path: str, offset: int, buffer: memoryview, *, should_stop: Callable[[], bool] | None = None
    ) -> None:
        """Fill `buffer` with the bytes of a file from `offset` on.

        Args:
            path: The path.
            offset: Offset of the first byte.
            buffer: Where the bytes go.
            should_stop: True if nobody needs the bytes any more. Any thread may call it.

        Raises:
            StoppedError: `should_stop` was true.
            SourceError: `source.changed`, `tensor.overflow`, or an error of the storage.
            StorageError: `storage.protocol` for bytes outside of the file.
            RequestError: `request.invalid` if the target has no such file.
        """
        number = self._number(path)
        template, end = self.layout.files[number].template, offset + len(buffer)
        size_bytes = template.size_bytes
        if offset < 0 or end > size_bytes:
            raise outside(path, offset, len(buffer))
        data = np.frombuffer(buffer, dtype=np.uint8)
        if not template.bodies_in(offset, end) and not (self.exact_crcs and template.slots_in(offset, end)):
            self.read_known(path, offset, buffer)
        elif len(data) >= self._long_bytes:
            self._make.make(number, offset, data, stop=stop_check(should_stop))
        else:
            self._blocks.read(number, size_bytes, offset, data, stop=stop_check(should_stop))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes `[offset, offset + length)` of a file; to its end by default. Errors are those of `read_into`."""
        count = self.file(path).size_bytes - offset if length is None else length
        data = bytearray(max(0, count))
        self.read_into(path, offset, memoryview(data))
        return bytes(data)

    def read_known(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a file that the source's tensors do not decide, and zeros for the others."""
        info = ObjectInfo(f"/{path}", self.file(path).size_bytes, self.store.scheme)
        self.store.read_into(info, offset, buffer)

    def open(self, path: str) -> BinaryIO:
        """The file at this path as an open file."""
        raw = _VirtualFile(partial(self.read_into, path), self.file(path).template, stops=True)
        return cast("BinaryIO", _BufferedFile(raw, _BUFFER_BYTES))

    def open_raw(self, path: str, read: Callable[[int, memoryview], None]) -> io.RawIOBase:
        """The file at this path without a buffer, for `torch.load`, which reads each record by one call.

        Args:
            path: The path.
            read: Fills memory with bytes of the file from an offset on.
        """
        return _VirtualFile(read, self.file(path).template, stops=False)

    def filesystem(self) -> Any:
        """The files as a read-only file system of fsspec."""
        return ReshardFileSystem(layout=self)

    def reader_of(self, checkpoint: Checkpoint) -> AbstractContextManager[TensorReader]:
        """A reader of elements, for loaders that want no files: of `checkpoint` with more tensors made of its own."""
        return self._make.reader_of(checkpoint)

    def prove_unchanged(self) -> None:
        """Compare every file of the source with its pin.

        Raises:
            SourceError: `source.changed`.
        """
        prove_source_unchanged(self.checkpoint)

    def close(self) -> None:
        """End the threads of this object. Files that it opened cannot be read any more."""
        self._blocks.close()
        self._make.close()

    def __enter__(self) -> Self:
        """The object itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _number(self, path: str) -> int:
        number = self._numbers.get(path)
        if number is None:
            raise RequestError(
                "request.invalid",
                f"the target has no file {printable(path)!r}",
                fix="take a path of `files`, relative to the target",
            )
        return number


class _VirtualFile(io.RawIOBase):
    """One file of a virtual checkpoint as a seekable stream.

    With `stops`, a read ends before the next tensor, unless it begins in one. So a buffer that holds what stands before
    a tensor needs nothing of the source.
    """

    def __init__(self, read: Callable[[int, memoryview], None], template: FileTemplate, *, stops: bool) -> None:
        super().__init__()
        self._read, self._template, self._size_bytes = read, template, template.size_bytes
        self._stops = stops
        self._at = 0
        self.failed: ReshardError | None = None
        """The error of the last read; None if it succeeded."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size_bytes - self._at))
        bodies = self._template.bodies_in(self._at, self._at + count) if self._stops else ()
        if bodies and bodies[0].offset > self._at:
            count = bodies[0].offset - self._at
        self.failed = None
        if count:
            try:
                self._read(self._at, view[:count])
            except ReshardError as error:
                self.failed = error
                raise
        self._at += count
        return count

    def read(self, size: int = -1, /) -> bytes | None:
        """Read as `io.RawIOBase` does. After a `readinto` that failed, raise its error.

        torch calls this while the error of `readinto` is set, and then any method of the interpreter's own fails
        with another error. Source: torch 2.13.0 `torch/csrc/jit/python/init.cpp` (`BufferAdapter`).
        """
        error, self.failed = self.failed, None
        if error is not None:
            raise error
        try:
            return super().read(size)
        finally:
            self.failed = None


class _BufferedFile(io.BufferedReader):
    """A buffered virtual file, whose `read` is as that of `_VirtualFile`."""

    def __init__(self, raw: _VirtualFile, buffer_bytes: int) -> None:
        super().__init__(cast("io.RawIOBase", raw), buffer_bytes)
        self._source = raw

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as `io.BufferedReader` does. After a `readinto` that failed, raise its error."""
        error, self._source.failed = self._source.failed, None
        if error is not None:
            raise error
        try:
            return super().read(size)
        finally:
            self._source.failed = None


# A virtual checkpoint as a read-only file system of fsspec, `reshard://`, for everything that takes one.
#
# Source: fsspec 2026.9.0 `fsspec/spec.py` (`AbstractFileSystem`: `ls`, `info`, `_open` and `cat_file` are enough for
# the others).

_FileSystem: Any = AbstractFileSystem
"""Untyped: fsspec's own annotations say nothing of what these methods take."""


class ReshardFileSystem(_FileSystem):
    """The files of a target that is never written, by their paths relative to the target.

    `fsspec.filesystem("reshard", source="run1", to="zero", dp=6)` takes the arguments of `reshard.open_layout`, and so
    does `fsspec.open("reshard://model.safetensors", source="run1", to="safetensors")`. All calls that write raise
    `NotImplementedError` or `OSError`. Errors of the source are `reshard.ReshardError`s.
    """

    protocol = "reshard"
    root_marker = ""
    cachable = False
    """A new object each time: the same source may hold another checkpoint by then."""

    def __init__(self, source: str = "", *, layout: VirtualCheckpoint | None = None, **given: Any) -> None:
        """See the class. `layout` is a virtual checkpoint that is open already."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        opened = open_layout(source, **given) if layout is None else layout
        self.layout = cast("VirtualCheckpoint", opened)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002 - fsspec's signature
        """The entries of a directory; of a file, itself.

        Raises:
            FileNotFoundError: The target has no such file or directory.
        """
        name = str(self._strip_protocol(path))
        if (size := self.layout.sizes.get(name)) is not None:
            entries = [_file(name, size)]
        else:
            found: Listing = self.layout.store.list_directory(f"/{name}" if name else "/")
            entries = [_file(i.path[1:], i.size_bytes) for i in found.files]
            entries += [_directory(f"{name}/{d}" if name else d) for d in found.directories]
            if not entries:
                raise FileNotFoundError(path)
        return entries if detail else [e["name"] for e in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of a file or directory.

        Raises:
            FileNotFoundError: The target has no such file or directory.
        """
        name = str(self._strip_protocol(path))
        if (size := self.layout.sizes.get(name)) is not None:
            return _file(name, size)
        self.ls(name)
        return _directory(name)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes of a file; negative positions count from its end, as in fsspec."""
        name = str(self._strip_protocol(path))
        low, high, _step = slice(start, end).indices(self._size_of(name, path))
        return self.layout.read(name, low, max(0, high - low))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise OSError(f"{path} can only be read: mode {mode!r}")
        name = str(self._strip_protocol(path))
        self._size_of(name, path)
        return self.layout.open(name)

    def _size_of(self, name: str, path: str) -> int:
        size = self.layout.sizes.get(name)
        if size is None:
            raise FileNotFoundError(path)
        return size


def _file(name: str, size_bytes: int) -> dict[str, Any]:
    return {"name": name, "size": size_bytes, "type": "file"}


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}
