"""The laws of resharding, for any source format and any target format.

Each law takes a `Trial` and fails with an assertion. A new format inherits all of them: it writes logical states
(`formats.SourceFormat`), or reads what the engine wrote by other means (`formats.TargetOracle`).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reshard.errors import counted, printable
from reshard.models import TargetFormat
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.local import LocalEngine
from reshard_engine.operations.verification import verify_target
from reshard_engine.storage.locations import open_location, serving
from reshard_engine.testing.comparison import assert_same_files, content_difference
from reshard_engine.testing.formats import Content
from reshard_engine.testing.laws_of_trouble import (
    a_flipped_bit_is_found_or_harmless,
    fail_anywhere_and_resume,
    model_fits_the_budget,
    peak_is_within_the_model,
    stop_anywhere_and_resume,
)
from reshard_engine.testing.trial import (
    SCHEME,
    TARGET_NAME,
    ShuffledStore,
    Trial,
    convert,
    nothing_left_over,
    prepared,
)

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
    said = sum("became infinite" in w for w in run.result.warnings)
    assert said == len(expected.overflows), f"{said} tensors reported as overflowed, not {len(expected.overflows)}"


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
    difference = content_difference(direct, arrived) or content_difference(replace(arrived, cast=direct.cast), direct)
    assert difference is None, f"by way of {way['to']}: {difference}"


def _ways(trial: Trial) -> list[dict[str, Any]]:
    """The formats by way of which the target must become the same."""
    state, full = trial.saved.state, trial.source.full
    if trial.options["to"] == "dcp" and "grammar" not in trial.options["options"]["dcp"]:
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
        native = {"to": TargetFormat.ZERO, "dtype": wide, "layout": {"dp": ranks, "zero_stage": stage}}
        universal = {"to": TargetFormat.UNIVERSAL, "dtype": None, "layout": None}
        # Weights of another type are cast when a native checkpoint is written: only its own kind comes after it. Before
        # the first step the universal form holds the zeros that Adam starts from, and says so. For parameters without
        # gradients it holds zeros and the counter of others.
        # Without a loss scale there is no way to fp16 at ZeRO-3, and fp32 has none.
        scaled = trial.options.get("dtype") == "fp16" and resumable and trial.options["layout"]["zero_stage"] == "3"
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
