"""One example of the laws: a checkpoint in a memory store, a request, and a reference conversion."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from reshard.models import ConvertRequest, ConvertResult, SourceSpec
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.locations import serving
from reshard_engine.storage.protocol import Listing, ObjectInfo, ObjectStore, PartInfo
from reshard_engine.testing.faults import FaultyStore, Steps
from reshard_engine.testing.formats import Case, Saved, SourceFormat, TargetOracle
from reshard_engine.testing.memory_store import MemoryStore

SCHEME = "mem"
SOURCE = "lab/source"
TARGET_NAME = "target"
"""Last name of every target: the pointer beside it holds it."""


class ObservedStore(MemoryStore):
    """Counts the writes of each object and each part."""

    def __init__(self) -> None:
        """Nothing was written yet."""
        super().__init__()
        self.writes: Counter[tuple[str, int]] = Counter()
        """By path and part number; 0 for a whole object."""

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        metadata: Mapping[str, str],
        if_absent: bool,
        crc32: int | None = None,
    ) -> ObjectInfo:
        """As `MemoryStore.put`, counted."""
        self.writes[path, 0] += 1
        return super().put(path, data, metadata=metadata, if_absent=if_absent, crc32=crc32)

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """As `MemoryStore.put_part`, counted."""
        self.writes[path, number] += 1
        return super().put_part(path, upload_id, number, data, crc32=crc32)


class ShuffledStore(MemoryStore):
    """Lists directories in another order each time, as stores without order do."""

    def __init__(self, random: Random) -> None:
        """`random` decides the orders."""
        super().__init__()
        self._random = random

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a prefix, in any order."""
        found = super().list_directory(path, most=most)
        files, directories = list(found.files), list(found.directories)
        self._random.shuffle(files)
        self._random.shuffle(directories)
        return Listing(tuple(files), tuple(directories))


@dataclass
class Run:
    """A finished conversion in memory."""

    conversion: Conversion
    result: ConvertResult
    files: Mapping[str, bytes]
    """By path below the target, without the manifest, which holds a time."""
    beside: Mapping[str, bytes]
    """The files beside the target: a pointer, and nothing else."""


@dataclass
class Trial:
    """One example.

    Attributes:
        source: the format of the source.
        case: what it holds.
        oracle: the format of the target.
        options: fields of the request that choose target and options.
        execution: fields of the request that may not change a byte.
        random: decides where laws disturb, stop or flip.
    """

    source: SourceFormat
    case: Case
    oracle: TargetOracle
    options: Mapping[str, Any]
    execution: Mapping[str, Any]
    random: Random

    @cached_property
    def _written(self) -> tuple[Saved, Mapping[str, bytes]]:
        with tempfile.TemporaryDirectory() as scratch:
            saved = self.source.write(self.case, Path(scratch))
            files = [p for p in sorted(Path(scratch).rglob("*")) if p.is_file()]
            return saved, {p.relative_to(scratch).as_posix(): p.read_bytes() for p in files}

    @property
    def saved(self) -> Saved:
        """The state that the source's files hold."""
        return self._written[0]

    @property
    def source_files(self) -> Mapping[str, bytes]:
        """The source's files by path."""
        return self._written[1]

    def fill(self, store: MemoryStore, files: Mapping[str, bytes] | None = None, path: str = SOURCE) -> None:
        """Put the source, or other files, into a store."""
        for name, data in (self.source_files if files is None else files).items():
            store.put(f"{path}/{name}", data, metadata={}, if_absent=False)

    def request(self, run: str, **changes: Any) -> ConvertRequest:
        """The request with a target of this run, and with changes."""
        fields: dict[str, Any] = {
            "source": SourceSpec(url=f"{SCHEME}://{SOURCE}", **self.saved.choices),
            "target": f"{SCHEME}://lab/{run}/{TARGET_NAME}",
            **self.options,
            **self.execution,
        }
        return ConvertRequest.model_validate(fields | changes)

    @cached_property
    def store(self) -> ObservedStore:
        """A store with the source in it."""
        store = ObservedStore()
        self.fill(store)
        return store

    @cached_property
    def _reference(self) -> tuple[Run, int]:
        steps = Steps()
        conversion, result = convert(FaultyStore(self.store, steps), self.request("reference"))
        return finished(self.store, "reference", conversion, result), len(steps.done)

    @property
    def reference(self) -> Run:
        """The conversion that all others must repeat byte for byte."""
        return self._reference[0]

    @property
    def reference_operations(self) -> int:
        """The number of store operations of the reference conversion."""
        return self._reference[1]

    def convert(self, store: MemoryStore, run: str, **changes: Any) -> Run:
        """Convert within a store, to the end."""
        conversion, result = convert(store, self.request(run, **changes))
        return finished(store, run, conversion, result)


def convert(
    store: ObjectStore, request: ConvertRequest, *, should_stop: Callable[[], bool] | None = None
) -> tuple[Conversion, ConvertResult]:
    """Convert with a store behind the scheme of memory."""
    with serving(SCHEME, store):
        conversion = Conversion.prepare(request)
        return conversion, conversion.run(on_progress=None, should_stop=should_stop)


def prepared(store: ObjectStore, request: ConvertRequest) -> Conversion:
    """Plan with a store behind the scheme of memory."""
    with serving(SCHEME, store):
        return Conversion.prepare(request)


def finished(store: MemoryStore, run: str, conversion: Conversion, result: ConvertResult) -> Run:
    """The files that a finished conversion left."""
    files, beside = left_by(store, run)
    return Run(conversion, result, files, beside)


def left_by(store: MemoryStore, run: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files below and beside a target; manifests are left out."""
    files: dict[str, bytes] = {}
    beside: dict[str, bytes] = {}
    for path, data in store.snapshot(f"lab/{run}").items():
        name = path.removeprefix(f"lab/{run}/")
        if not name.startswith(f"{TARGET_NAME}/"):
            beside[name] = data
        elif name != f"{TARGET_NAME}/{MANIFEST_NAME}":
            files[name.removeprefix(f"{TARGET_NAME}/")] = data
    return files, beside


def nothing_left_over(store: MemoryStore, run: str, *, pointer: str | None) -> None:
    """Fail if a finished run left more beside its target than its pointer, or an upload."""
    _, beside = left_by(store, run)
    assert beside == ({pointer: TARGET_NAME.encode()} if pointer else {}), f"left beside the target: {sorted(beside)}"
    assert store.list_uploads(f"lab/{run}/") == [], "an unfinished upload is left"
