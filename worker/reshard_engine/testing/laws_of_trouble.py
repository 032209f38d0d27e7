"""Laws of limits and faults: memory, interruption at any point, damage of the source."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from reshard.errors import RequestError, SourceError, StorageError
from reshard_engine.execute.executor import StoppedError
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.testing.comparison import assert_same_files, elements_that_differ, tensors_that_differ
from reshard_engine.testing.faults import Fault, FaultyStore, Killed, Steps
from reshard_engine.testing.memory_store import MemoryStore
from reshard_engine.testing.trial import TARGET_NAME, Trial, convert, finished, left_by, nothing_left_over, prepared

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
