"""The laws of resharding, for any source format and any target format.

Each law takes a `Trial` and fails with an assertion. A new format inherits all of them: it writes logical states
(`logical.SourceFormat`), or reads what the engine wrote by other means (`logical.TargetOracle`).
"""

from __future__ import annotations

import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from reshard.choices import EmptyWeights, TargetFormat
from reshard.declared import declared_options
from reshard.errors import RequestError, SourceError, StorageError, counted, printable
from reshard.installed_formats import known_targets, nested
from reshard.models.jobs import ConvertRequest, ConvertResult
from reshard.options import SourceSpec
from reshard_engine.execute.executor import StoppedError
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.local import LocalEngine
from reshard_engine.operations.conversion import Conversion
from reshard_engine.operations.verification import verify_target
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint
from reshard_engine.storage.locations import open_location, serving
from reshard_engine.storage.protocol import Listing, ObjectInfo, ObjectStore, PartInfo
from reshard_engine.testing.logical import Bits, Case, Content, Saved, SourceFormat, TargetOracle, tree_difference
from reshard_engine.testing.stores import Fault, FaultyStore, Killed, MemoryStore, Steps

# One example of the laws: a checkpoint in a memory store, a request, and a reference conversion.

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
        """The request with a target of this run, and with changes. Another target has no option of this one."""
        targets = known_targets().values() if "to" in changes else ()
        of_some = {declared_options()[name].field for known in targets for name in known.options}
        fields: dict[str, Any] = {
            "source": SourceSpec(url=f"{SCHEME}://{SOURCE}", **self.saved.choices),
            "target": f"{SCHEME}://lab/{run}/{TARGET_NAME}",
            "empty_weights": EmptyWeights.KEEP,  # the models that are drawn have parameters of shape [0] of their own
            **{name: value for name, value in self.options.items() if name not in of_some},
            **self.execution,
        }
        return ConvertRequest.model_validate(nested(fields | changes))

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


# Compares two targets, file by file or tensor by tensor.


def content_difference(expected: Content, found: Content) -> str | None:
    """The first difference of a target from its expected contents (tensor, bit or value); None if they are equal."""
    if expected.tensors.keys() != found.tensors.keys():
        missing = sorted(expected.tensors.keys() - found.tensors.keys())
        more = sorted(found.tensors.keys() - expected.tensors.keys())
        return f"tensors missing: {missing[:5]}, not expected: {more[:5]}"
    wrong = tensors_that_differ(expected, found)
    if wrong:
        pair = expected.tensors[wrong[0]], found.tensors[wrong[0]]
        if wrong[0] in expected.cast:
            pair = pair[0].with_plain_nans(), pair[1].with_plain_nans()
        return f"{wrong[0]}: {_first_difference(*pair)}"
    lost = sorted(expected.values.keys() - found.values.keys())
    if lost:
        return f"lost: {lost[:5]}"
    differences = (tree_difference(value, found.values[key], key) for key, value in expected.values.items())
    return next((d for d in differences if d is not None), None)


def tensors_that_differ(expected: Content, found: Content) -> list[str]:
    """Names of the tensors that differ in type, shape or any bit but the payload of a NaN that was cast."""
    wrong = [name for name, wanted in expected.tensors.items() if found.tensors[name] != wanted]
    return [
        name
        for name in wrong
        if name not in expected.cast
        or expected.tensors[name].with_plain_nans() != found.tensors[name].with_plain_nans()
    ]


def _first_difference(wanted: Bits, there: Bits) -> str:
    if (wanted.dtype, wanted.shape) != (there.dtype, there.shape):
        return f"{there.dtype}{list(there.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    at = next(i for i, (a, b) in enumerate(zip(wanted.data, there.data, strict=True)) if a != b)
    size = len(wanted.data) // prod(wanted.shape)
    element = slice(at // size * size, at // size * size + size)
    return f"element {at // size} is {there.data[element].hex()}, not {wanted.data[element].hex()}"


def elements_that_differ(wanted: Bits, there: Bits) -> int:
    """The number of elements that differ between two tensors of one type and shape."""
    if not wanted.numel:
        return 0
    pair = (np.frombuffer(b.data, dtype=np.uint8).reshape(wanted.numel, -1) for b in (wanted, there))
    first, second = pair
    return int((first != second).any(axis=1).sum())


def assert_same_files(left: Mapping[str, bytes], right: Mapping[str, bytes]) -> None:
    """Fail unless both have the same paths with the same bytes."""
    assert sorted(left) == sorted(right), f"files {sorted(left.keys() ^ right.keys())[:5]} are on one side only"
    wrong = [path for path in left if left[path] != right[path]]
    assert not wrong, f"{wrong[:5]} differ"


# Laws of limits and faults: memory, interruption at any point, damage of the source.

_BUDGETS = (1 << 10, 300_000, 1 << 19, 1_000_003, 1 << 21, 1 << 23, 1 << 30)
_PYTHON_BYTES = 1 << 20
"""Bytes that Python itself allocates while units run, beside their buffers: records, journal lines, threads."""
_PER_FILE_BYTES = 2 << 10
"""Bytes that Python allocates for the reads of one unit from one file: 0.9 to 1.4 KB were measured with 4,100 files."""


def model_fits_the_budget(trial: Trial) -> None:
    """For every memory limit there is a plan whose modelled peak fits it, or a refusal that says what is needed."""
    limit = trial.random.choice(_BUDGETS)
    request = trial.request("budget", memory_limit_bytes=limit, part_bytes=trial.random.choice([1 << 10, 64 << 20]))
    try:
        conversion = prepared(trial.store, request)
    except RequestError as error:
        if error.code != "request.budget_too_small" or error.details["need_bytes"] <= limit:
            raise
        return
    assert conversion.peak_bytes <= limit


def peak_is_within_the_model(trial: Trial) -> None:
    """The memory of running units stays within the modelled peak (checked in some runs only: measuring is slow)."""
    if trial.random.randrange(3):
        return
    request = trial.request("measured", threads=1, part_bytes=trial.random.choice([1 << 10, 1 << 14]))
    store = MemoryStore()
    trial.fill(store)
    conversion = prepared(store, request)
    model = conversion.peak_bytes
    objects = _PYTHON_BYTES + _PER_FILE_BYTES * len(store.snapshot())
    tracemalloc.start()
    try:
        conversion.run(on_progress=None, should_stop=None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = conversion.plan.write_bytes  # the store of memory keeps what is written
    assert peak <= model + held + objects, f"{peak} bytes at the peak, modelled {model}"


def stop_anywhere_and_resume(trial: Trial) -> None:
    """Stopped between any two units, a conversion shows nothing, resumes and ends with the same bytes."""
    units = len(trial.reference.conversion.plan.units)
    left = trial.random.randint(0, units)

    def should_stop() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    try:
        convert(trial.store, trial.request("stopped"), should_stop=should_stop)
    except StoppedError:
        files, _ = left_by(trial.store, "stopped")
        assert f"lab/stopped/{TARGET_NAME}/{MANIFEST_NAME}" not in trial.store.snapshot("lab/stopped")
        commit = {f.path for f in trial.reference.conversion.plan.files if f.commit}
        assert not commit <= files.keys(), "a stopped conversion looks whole"
    _resumes(trial, trial.store, "stopped")


def fail_anywhere_and_resume(trial: Trial) -> None:
    """A fault or a kill at any operation gives a typed error, and the same bytes after a resume."""
    store = MemoryStore()
    trial.fill(store)
    mode = trial.random.choice([Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.KILL_BEFORE, Fault.KILL_AFTER])
    steps = Steps({trial.random.randint(1, trial.reference_operations): mode})
    try:
        convert(FaultyStore(store, steps), trial.request("broken"))
    except StorageError as error:
        if error.code != "storage.unavailable":
            raise
    except Killed:
        if mode not in {Fault.KILL_BEFORE, Fault.KILL_AFTER}:
            raise
    _resumes(trial, store, "broken")


def _resumes(trial: Trial, store: MemoryStore, run: str) -> None:
    conversion, result = convert(store, trial.request(run))
    assert_same_files(trial.reference.files, finished(store, run, conversion, result).files)
    nothing_left_over(store, run, pointer=conversion.plan.pointer)


def a_flipped_bit_is_found_or_harmless(trial: Trial) -> None:
    """One flipped bit of the source: a typed error, or a result that differs in one element at most.

    Elements have no checksum to be compared with by default; everything that says where they are and what they are
    called has one, or is checked against a second copy of the same fact.
    """
    store = MemoryStore()
    name = trial.random.choice(sorted(n for n, data in trial.source_files.items() if data))
    data = bytearray(trial.source_files[name])
    bit = trial.random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    trial.fill(store, {**trial.source_files, name: bytes(data)})
    try:
        run = trial.convert(store, "flipped")
    except (SourceError, RequestError):
        return
    expected, found = (trial.oracle.read(files) for files in (trial.reference.files, run.files))
    if not trial.source.checks_metadata(trial.case):
        return
    assert expected.tensors.keys() == found.tensors.keys(), f"{name}, bit {bit}: other tensors"
    for key in tensors_that_differ(replace(expected, cast=frozenset()), found):
        wanted, there = expected.tensors[key], found.tensors[key]
        assert (wanted.dtype, wanted.shape) == (there.dtype, there.shape), f"{name}, bit {bit}: {key}"
        assert elements_that_differ(wanted, there) <= 1, f"{name}, bit {bit}: several elements of {key}"


_WEIGHTS = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)


def gather_then_slice(trial: Trial) -> None:
    """Every tensor has the bits of the logical state (the oracle), and the non-tensor state survives."""
    run = trial.reference
    expected = trial.oracle.expected(trial.saved, run.conversion.request)
    difference = content_difference(expected, trial.oracle.read(run.files))
    assert difference is None, difference
    for fqn, count in expected.overflows.items():
        wanted = f"{counted(count, 'element')} of {printable(fqn)} became infinite in the narrower type"
        assert wanted in run.result.warnings, f"not reported: {wanted}"
    # A tied name may have a copy of its own in the target, which is cast, too.
    copies = [alias for alias, owner in trial.saved.state.aliases.items() if owner in expected.overflows]
    named = [f" of {printable(fqn)} became infinite" for fqn in (*expected.overflows, *copies)]
    others = [w for w in run.result.warnings if "became infinite" in w and not any(text in w for text in named)]
    assert others == [], f"tensors reported as overflowed that are not: {others}"


def every_byte_once(trial: Trial) -> None:
    """Each byte of the target is planned once and written once; nothing else is left there."""
    run = trial.reference
    plan = run.conversion.plan
    painted = [np.zeros(file.size_bytes, dtype=np.uint8) for file in plan.files]
    for unit in plan.units:
        for chunk in unit.chunks:
            painted[chunk.file][chunk.offset : chunk.offset + chunk.length_bytes] += 1
    for file, bytemap in zip(plan.files, painted, strict=True):
        assert (bytemap == 1).all(), f"{file.path}: bytes planned {np.unique(bytemap).tolist()} times"
        assert len(run.files[file.path]) == file.size_bytes
    assert sorted(run.files) == sorted(f.path for f in plan.files)
    prefix = f"lab/reference/{TARGET_NAME}/"
    writes = {key: n for key, n in trial.store.writes.items() if key[0].startswith(prefix)}
    assert set(writes.values()) == {1}, "an object or a part was written twice"
    kinds = Counter(path for path, number in writes if number == 0)
    parts = {path for path, number in writes if number}
    assert not parts & kinds.keys(), "an object was put whole and in parts"
    assert {p.removeprefix(prefix) for p in parts | kinds.keys()} == {*run.files, MANIFEST_NAME}
    nothing_left_over(trial.store, "reference", pointer=plan.pointer)


def order_and_execution_do_not_matter(trial: Trial) -> None:
    """The order of listings and files does not change the plan; part size, threads and memory do not change a byte.

    Plans that differ in nothing else have one content digest.
    """
    store = ShuffledStore(trial.random)
    files = list(trial.source_files.items())
    trial.random.shuffle(files)
    trial.fill(store, dict(files))
    plan = trial.reference.conversion.plan
    again = prepared(store, trial.request("reference")).plan
    assert again.digest == plan.digest
    assert again.to_json() == plan.to_json()
    part = trial.random.choice([1 << 10, 1031, 3000, 1 << 16, 64 << 20])
    run = trial.convert(store, "otherwise", part_bytes=part, threads=trial.random.choice([1, 3]))
    assert run.conversion.plan.content_digest == plan.content_digest
    assert_same_files(trial.reference.files, run.files)


def again_is_a_no_op(trial: Trial) -> None:
    """A finished conversion is recognised with any part size, and writes nothing."""
    before = trial.reference and trial.store.snapshot()
    _, result = convert(trial.store, trial.request("reference", part_bytes=trial.random.choice([1 << 10, 1 << 20])))
    assert result.already_done
    assert result.write_bytes == 0
    assert trial.store.snapshot() == before


def verification_agrees(trial: Trial) -> None:
    """The target verifies."""
    assert trial.reference
    with serving(SCHEME, trial.store):
        report = verify_target(open_location(f"{SCHEME}://lab/reference/{TARGET_NAME}"))
    assert report.ok, report.problems


def stores_agree(trial: Trial) -> None:
    """The local file system and the object store get the same bytes from either."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "out", TARGET_NAME)
        for name, data in trial.source_files.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        request = trial.request("local", target=str(target), source={"url": str(source), **trial.saved.choices})
        engine = LocalEngine()
        result = engine.convert(request)
        files = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
        assert files.pop(MANIFEST_NAME)
        assert_same_files(trial.reference.files, files)
        assert result.write_bytes == trial.reference.result.write_bytes
        beside = {p.name: p.read_bytes() for p in target.parent.iterdir() if p != target}
        assert beside == trial.reference.beside
        assert engine.verify(str(target)).ok


def what_was_written_reads_back(trial: Trial) -> None:
    """A target, read as a source, gives the same target again: every tensor and every value of it."""
    run = trial.convert(trial.store, "back", **_from("reference"), exclude_frozen=False)
    first, second = (trial.oracle.read(files) for files in (trial.reference.files, run.files))
    difference = content_difference(first, second) or content_difference(second, first)
    assert difference is None, difference


def the_path_does_not_matter(trial: Trial) -> None:
    """A conversion by way of another format or of a wider type gives the same result."""
    ways = _ways(trial)
    if not ways:
        return
    way = trial.random.choice(ways)
    frozen = trial.options.get("exclude_frozen", False)
    # Weights do not say which of them were frozen: what is to be left out must be left out on the way.
    early = frozen and way["to"] is not TargetFormat.UNIVERSAL
    way |= {"options": {}}  # the target's own are not of the format on the way
    trial.convert(trial.store, "way", **way, exclude_frozen=early)
    run = trial.convert(trial.store, "arrived", **_from("way"), exclude_frozen=frozen and not early)
    direct, arrived = (trial.oracle.read(files) for files in (trial.reference.files, run.files))
    # A NaN that was cast on the way may have another payload than one that was cast at the end, or never.
    direct, arrived = (_without_stored_weights(trial, content) for content in (direct, arrived))
    direct = replace(direct, cast=frozenset(direct.tensors))
    # DeepSpeed's files say of torch's Adam what it always does.
    added = {
        k for k, v in arrived.values.items() if k.endswith("/bias_correction") and v is True
    } - direct.values.keys()
    arrived = replace(arrived, values={k: v for k, v in arrived.values.items() if k not in added})
    difference = content_difference(direct, arrived) or content_difference(replace(arrived, cast=direct.cast), direct)
    assert difference is None, f"by way of {way['to']}: {difference}"


def _ways(trial: Trial) -> list[dict[str, Any]]:
    """The formats by way of which the target must become the same."""
    state, full = trial.saved.state, trial.source.full
    if trial.options["to"] == "dcp" and "framework" not in trial.options["options"]["dcp"]:
        return []  # its keys are those of the source's framework, which no format on the way knows
    # Without a wanted type, types stay what they are.
    wide = "fp32" if trial.options.get("dtype") else None
    typed, resumable = "dtype" in trial.options, trial.oracle.wants_full_state
    weights = typed and not resumable
    ways: list[dict[str, Any]] = []
    if weights or not (full or resumable):
        ways += [{"to": to, "dtype": wide} for to in _WEIGHTS]
    if weights and _torch_says_all(trial):
        ways.append({"to": "dcp", "dtype": None, "max_shard_bytes": None})
    # DeepSpeed's files hold the names of the run, and equal tensors as one.
    deepspeed = trial.options["to"] in (TargetFormat.UNIVERSAL, TargetFormat.ZERO)
    if full and not trial.saved.copies and (deepspeed or not trial.saved.run_names):
        stage, ranks = trial.random.choice(["1", "2", "3"]), trial.random.randint(1, 4)
        native = {"to": TargetFormat.ZERO, "dtype": wide, "dp": ranks, "zero_stage": stage}
        universal = {"to": TargetFormat.UNIVERSAL, "dtype": None}
        # Weights of another type are cast when a native checkpoint is written: only its own kind comes after it. Before
        # the first step the universal form holds the zeros that Adam starts from, and says so. For parameters without
        # gradients it holds zeros and the counter of others.
        # Without a loss scale there is no way to fp16 at ZeRO-3, and fp32 has none.
        scaled = trial.options.get("dtype") == "fp16" and resumable and trial.options.get("zero_stage") == "3"
        native_too = resumable and typed and not scaled
        as_they_are = native_too or not (typed or resumable)
        made = as_they_are and (not state.state_names or trial.saved.never_updated)
        chosen = ([] if made else [universal]) + ([native] if native_too else [])
        ways += [way | {"max_shard_bytes": None} for way in chosen]
    return ways


def _torch_says_all(trial: Trial) -> bool:
    """True if a distributed checkpoint loses nothing that weights hold: it does not say which tensors are tied.

    Equal matrices are written as tensors of their own; names are taken for those of a wrapping module if all have its
    prefix.
    """
    state = trial.saved.state
    wrapped = all(name.startswith("module.") for name in state.order)
    return state.groups is not None and not state.aliases and not wrapped


def _without_stored_weights(trial: Trial, content: Content) -> Content:
    """Native checkpoints keep weights beside masters as they are stored; a form on the way may keep masters alone.

    Both are one where weights are the masters, rounded, as in every real run: here they are drawn apart.
    """
    if not trial.oracle.wants_full_state:
        return content
    stored = {f"weight/{p.fqn}" for p in trial.saved.state.trained if p.weight is not None}
    return replace(content, tensors={k: v for k, v in content.tensors.items() if k not in stored})


def _from(run: str) -> dict[str, Any]:
    return {"source": {"url": f"{SCHEME}://lab/{run}/{TARGET_NAME}"}}


# Laws of targets that are never written.


@contextmanager
def _opened(store: ObjectStore, request: ConvertRequest) -> Generator[VirtualCheckpoint]:
    with serving(SCHEME, store), VirtualCheckpoint.prepare(request, exact_crcs=True) as layout:
        yield layout


def _copied(layout: VirtualCheckpoint) -> dict[str, bytes]:
    """Every file, as fsspec copies it to a local directory."""
    with tempfile.TemporaryDirectory() as scratch:
        layout.filesystem().get("", scratch, recursive=True)
        return {p.relative_to(scratch).as_posix(): p.read_bytes() for p in Path(scratch).rglob("*") if p.is_file()}


def never_written_is_the_same(trial: Trial) -> None:
    """A target that is never written has the files of the written one, in any ranges, and writes nothing.

    So all that is said of the written files holds of these. The source lies in the object store, or in local files.
    """
    plan, before = trial.reference.conversion.plan, trial.store.snapshot()
    with tempfile.TemporaryDirectory() as scratch:
        local = bool(trial.random.randrange(2))
        for name, data in trial.source_files.items() if local else ():
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
            Path(scratch, name).write_bytes(data)
        place = {"source": {"url": scratch, **trial.saved.choices}} if local else {}
        with _opened(trial.store, trial.request("reference", **place)) as layout:
            files = _copied(layout)
            assert_same_files(trial.reference.files, files)
            for path in trial.random.sample(sorted(files), min(3, len(files))):
                begin, end = sorted(trial.random.randint(0, len(files[path])) for _ in range(2))
                assert layout.read(path, begin, end - begin) == files[path][begin:end], f"{path}, {begin}:{end}"
            assert (layout.plan.warnings, layout.not_carried) == (plan.warnings, plan.not_carried)
            assert local or layout.content_digest == plan.content_digest
            layout.prove_unchanged()
    assert trial.store.snapshot() == before


def never_written_of_a_damaged_source(trial: Trial) -> None:
    """With one flipped bit in the source, a target that is never written ends as the written one: bytes, or code."""
    store = MemoryStore()
    name = trial.random.choice(sorted(n for n, data in trial.source_files.items() if data))
    data = bytearray(trial.source_files[name])
    bit = trial.random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    trial.fill(store, {**trial.source_files, name: bytes(data)})
    ends: list[Mapping[str, bytes] | str] = []
    for written in (True, False):
        try:
            if written:
                # A record that a store copied keeps the CRC-32 that the source has for it, whatever its bytes are.
                ends.append(trial.convert(store, "flipped", server_copy="never").files)
            else:
                with _opened(store, trial.request("flipped")) as layout:
                    ends.append(_copied(layout))
        except (SourceError, RequestError) as error:
            ends.append(error.code)
    assert ends[0] == ends[1], f"{name}, bit {bit}: {[e if isinstance(e, str) else 'files' for e in ends]}"


def never_written_of_a_changed_source(trial: Trial) -> None:
    """A file of the source that changes after the target was opened is found, and none of its new bytes is given."""
    store = MemoryStore()
    trial.fill(store)
    with _opened(store, trial.request("changed")) as layout:
        paths = sorted({info.path for file in layout.checkpoint.files for info in file.objects})
        path = trial.random.choice(paths)
        old = store.snapshot()[path]
        store.put(path, bytes(b ^ 0xFF for b in old), metadata={}, if_absent=False)
        for name, data in trial.reference.files.items():
            try:
                assert layout.read(name) == data, f"{name} holds new bytes of {path}"
            except SourceError as error:
                if error.code != "source.changed":
                    raise
        try:
            layout.prove_unchanged()
        except SourceError as error:
            if error.code != "source.changed":
                raise
        else:
            raise AssertionError(f"nobody found that {path} had changed")


Law = Callable[[Trial], None]
LAWS: tuple[Law, ...] = (
    gather_then_slice,
    every_byte_once,
    order_and_execution_do_not_matter,
    again_is_a_no_op,
    verification_agrees,
    model_fits_the_budget,
    peak_is_within_the_model,
    stores_agree,
    what_was_written_reads_back,
    the_path_does_not_matter,
    stop_anywhere_and_resume,
    fail_anywhere_and_resume,
    a_flipped_bit_is_found_or_harmless,
    never_written_is_the_same,
    never_written_of_a_damaged_source,
    never_written_of_a_changed_source,
)
"""Every law, in the order in which they are checked."""


def check(trial: Trial, laws: tuple[Law, ...] = LAWS) -> None:
    """Check laws over one example; a failure says which law was broken."""
    for law in laws:
        try:
            law(trial)
        except BaseException as error:
            error.add_note(f"law: {law.__name__} ({trial.source.name} to {trial.oracle.name})")
            raise
