"""`reshard fingerprint`: one digest of a state in every layout, as a stranger computes it, and every flip is named."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed as hypothesis_seed, settings
from safetensors.numpy import save_file

from house.conversions import convert
from house.fingerprint_checker import component, read_safetensors, tensor, whole
from house.repository import ROOT, real_checkpoint
from house.tiers import rest_full
from laws.dcp_files import Save
from laws.dcp_layout import MESHES
from laws.dcp_source import NESTED
from reshard.choices import OpaquePolicy
from reshard.cli.main import run
from reshard.engine import load_engine
from reshard.errors import JobError, SourceError
from reshard.models.reports import FingerprintOptions, FingerprintReport
from reshard.options import SourceSpec
from reshard_engine import local as engine_module
from reshard_engine.checkpoint import Agreement, Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.proof import fingerprint as subject
from reshard_engine.pickles.nodes import Global, PBytearray, PList, PSet, PTensorRef, PTuple, mapping_of, ordered_dict
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import TensorsAt, canonical, compare_trees
from reshard_engine.storage.locations import open_location

DATA = ROOT / "tests" / "data"
TINY = ("zero2_tiny", "zero3_tiny")
IN_WHOLE = ("masters", "moments", "counters", "groups")
REAL = {
    "gpt_bf16_z1_tp2pp2dp2": {"tp": 4, "pp": 1, "dp": 1},
    "gpt_bf16_z2_nopipe_tp2dp2": {"tp": 1, "pp": 1, "dp": 3, "zero_stage": "2"},
    "gpt_fp16_z1_tp2pp1dp2": {"tp": 1, "pp": 2, "dp": 3},
    "gpt_fp32_z1_tp2pp1dp2": {"tp": 4, "pp": 2, "dp": 1},
    "gptheadqkvsubw_fp32_z1_tp2pp1dp2": {"tp": 4, "pp": 2, "dp": 1},
    "llama_bf16_z3_nopipe_tp2dp2": {"tp": 1, "pp": 1, "dp": 3},
    "llama_fp32_z1_tp2pp2dp2": {"tp": 1, "pp": 4, "dp": 1},
    "moe_bf16_z1_ep2dp4": {"dp": 2},
}
"""Real checkpoints of Megatron-DeepSpeed, each with another layout."""


def fingerprint(place: Path | str, **options: Any) -> FingerprintReport:
    choices = {key: options.pop(key) for key in ("buffers", "param_order") if key in options}
    return load_engine().fingerprint(SourceSpec(url=str(place), **choices), FingerprintOptions(**options))


def converted(source: Path, target: Path, **options: Any) -> Path:
    convert(source, target, **options)
    return target


# -- one digest -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_one_state_has_one_digest_in_every_stage_world_and_format(name: str, tmp_path: Path) -> None:
    expected = fingerprint(DATA / name)
    for number, stage in enumerate(("1", "2", "3", "bf16", "2")):
        native = converted(DATA / name, tmp_path / f"zero{number}", to="zero", zero_stage=stage, dp=number + 1)
        found = fingerprint(native)
        assert (found.digest, found.components["run"]) == (expected.digest, expected.components["run"]), stage
    assert fingerprint(converted(DATA / name, tmp_path / "u", to="universal")).digest == expected.digest
    distributed = fingerprint(converted(DATA / name, tmp_path / "dcp", to="dcp"))
    assert distributed.digest == expected.digest
    # It has no place for the scheduler and the client state.
    assert distributed.components["run"] != expected.components["run"]
    weights = fingerprint(converted(DATA / name, tmp_path / "weights", to="safetensors"))
    assert weights.components["weights"] == expected.components["masters"]
    assert [n for n, digest in weights.components.items() if digest] == ["weights"]
    assert weights.digest == fingerprint(DATA / name, weights_only=True).digest


@pytest.mark.parametrize("name", rest_full(REAL, "gpt_bf16_z1_tp2pp2dp2", "llama_bf16_z3_nopipe_tp2dp2"))
def test_real_checkpoints_have_one_digest_in_every_layout(name: str, tmp_path: Path) -> None:
    source = real_checkpoint(name) / "src"
    expected = fingerprint(source)
    assert expected.components["unrounded"] is None
    assert expected.components["copies"] is None
    keep = {"weight_decay_groups": "keep"}
    universal = converted(source, tmp_path / "universal", to="universal", **keep)
    native = converted(source, tmp_path / "native" / "global_step3", to="zero", **REAL[name], **keep)
    for place in (universal, native):
        found = fingerprint(place)
        assert (found.digest, found.components["run"]) == (expected.digest, expected.components["run"])
    distributed = fingerprint(converted(source, tmp_path / "dcp", to="dcp"))
    assert distributed.digest == expected.digest
    weights = converted(source, tmp_path / "weights", to="safetensors")
    assert fingerprint(weights).components["weights"] == expected.components["masters"]
    halves = converted(source, tmp_path / "halves", to="safetensors", dtype="bf16")
    if "bf16" in name and expected.components["weights"] is not None:
        assert fingerprint(halves).components["weights"] == expected.components["weights"]
    assert fingerprint(halves).digest != fingerprint(weights).digest


def test_a_real_megatron_save_has_one_digest_in_other_layouts_and_as_dcp(tmp_path: Path) -> None:
    source = real_checkpoint("mcore_tp2pp2dp2")
    expected = fingerprint(source)
    for number, (tp, pp) in enumerate(((1, 1), (4, 1))):
        target = converted(source, tmp_path / str(number), to="megatron", tp=tp, pp=pp)
        found = fingerprint(target)
        assert (found.digest, found.components["run"]) == (expected.digest, expected.components["run"])
    assert fingerprint(converted(source, tmp_path / "dcp", to="dcp")).digest == expected.digest
    assert fingerprint(converted(source, tmp_path / "universal", to="universal")).digest == expected.digest


# -- a stranger's checker -------------------------------------------------------------------------------


def strangers(name: str) -> dict[str, Any]:
    """The components of a frozen checkpoint, from what was recorded while its framework ran."""
    held = read_safetensors(DATA / name / "expected.safetensors")
    facts = json.loads((DATA / name / "expected.json").read_text())

    def names(owner: str) -> list[str]:
        return [owner, *(alias for alias, of in facts["aliases"].items() if of == owner)]

    def lines(*kinds: str, with_state: bool = False) -> Iterator[list[Any]]:
        for key, found in held.items():
            kind, _, owner = key.partition("/")
            if kind in kinds:
                yield from ([n, *([kind] if with_state else []), *tensor(*found)] for n in names(owner))

    (group,) = facts["groups"]
    hyper = {key: value for key, value in group.items() if key != "names"}
    steps = [[n, "step", step] for owner, step in facts["scalars"]["step"].items() for n in names(owner)]
    return {
        "weights": component(lines("module", "frozen", "buffer")),
        "masters": component(lines("fp32", "frozen", "buffer")),
        "moments": component([*lines("exp_avg", "exp_avg_sq", with_state=True), *steps]),
        "counters": component([["steps", facts["global_steps"]], ["samples", 36]]),
        "groups": component([n, hyper] for owner in group["names"] for n in names(owner)),
    }


@pytest.mark.parametrize("name", TINY)
def test_a_stranger_computes_the_same_digests(name: str) -> None:
    found, theirs = fingerprint(DATA / name), strangers(name)
    stored = {"weights"} if found.components["weights"] else set()  # stage 3 stores no weights of trained parameters
    for part in {*IN_WHOLE, *stored}:
        assert found.components[part] == theirs[part], part
    assert stored == ({"weights"} if name == "zero2_tiny" else set())
    assert found.digest == whole(*(theirs[part] for part in IN_WHOLE))


@pytest.mark.parametrize("name", [n for n in REAL if n != "moe_bf16_z1_ep2dp4"])
def test_a_stranger_agrees_on_real_tensors(name: str) -> None:
    folder = real_checkpoint(name)
    truth = read_safetensors(folder / "expected.safetensors")
    lines = fingerprint(folder / "src", lines=True).lines
    ours = [json.loads(line) for line in (*lines["masters"], *lines["moments"])]
    theirs = []
    for key, held in truth.items():
        owner, _, state = key.rpartition("/")
        theirs.append([owner, *([] if state == "fp32" else [state]), *tensor(*held)])
    assert sorted(map(str, theirs)) == sorted(str(line) for line in ours if line[1] != "step")


# -- flips ----------------------------------------------------------------------------------------------

FLIPS = 200


def digested(checkpoint: Checkpoint) -> list[int]:
    """The tensors of parameters and buffers, and the copies of them: all tensors that are digested."""
    found = {n for p in checkpoint.parameters for n in (p.weight, *p.states.values()) if n is not None}
    copies = {a.other for a in checkpoint.agreements if not a.rounded}
    return sorted(found | {b.tensor for b in checkpoint.buffers} | copies)


def lines_of(checkpoint: Checkpoint) -> set[str]:
    report = subject.fingerprint_of(checkpoint, FingerprintOptions(lines=True))
    return {line for name in ("weights", "masters", "moments", "copies") for line in report.lines.get(name, ())}


@pytest.mark.parametrize("name", rest_full(["zero2_tiny", "gpt_bf16_z2_nopipe_tp2dp2"], "zero2_tiny"))
def test_a_flipped_bit_anywhere_is_named_by_its_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DATA / name if name in TINY else real_checkpoint(name) / "src"
    checkpoint = read_checkpoint(open_location(str(source), None), None, OpaqueLedger(OpaquePolicy.KEEP))
    before, chance, shard_map = lines_of(checkpoint), random.Random(34), checkpoint.shard_map
    numbers = digested(checkpoint)
    flip: dict[str, Any] = {}
    read_into = SourceFile.read_into

    def flipped(self: SourceFile, offset: int, buffer: memoryview) -> None:
        read_into(self, offset, buffer)
        at = flip["offset"] - offset
        if self is flip["file"] and 0 <= at < len(buffer):
            buffer[at] ^= flip["bit"]

    monkeypatch.setattr(SourceFile, "read_into", flipped)
    sizes = [shard_map.tensors[n].size_bytes for n in numbers]
    for number in chance.choices(numbers, sizes, k=FLIPS):
        tensor_ = shard_map.tensors[number]
        element = chance.randrange(tensor_.numel)
        held = shard_map.pieces(number, element, element + 1)
        offset = int(held.offset[0]) + chance.randrange(tensor_.dtype.itemsize_bytes)
        flip.update(file=checkpoint.files[int(held.file[0])], offset=offset, bit=1 << chance.randrange(8))
        changed = {json.loads(line)[0] for line in before ^ lines_of(checkpoint)}
        names = {tensor_.fqn, *(alias for alias, owner in checkpoint.shared.items() if owner == tensor_.fqn)}
        assert changed == names, (number, offset)


def test_what_contradicts_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is not its rounded master is a part of the whole; a copy that differs is not: the first counts."""
    read = engine_module.named_checkpoint

    def contradictory(*arguments: Any) -> Checkpoint:
        found = read(*arguments)
        one, other = found.parameters[3], found.parameters[4]
        assert one.shape == other.shape
        copies = (Agreement(one.fqn, "fp32", one.states["fp32"], other.states["fp32"], "rank 1"),)
        mixed = tuple(replace(p, weight=other.weight) if p is one else p for p in found.parameters)
        return replace(found, agreements=copies, parameters=mixed)

    sound = fingerprint(DATA / "zero2_tiny")
    monkeypatch.setattr(engine_module, "named_checkpoint", contradictory)
    found = fingerprint(DATA / "zero2_tiny", lines=True)
    assert [json.loads(line)[0] for line in found.lines["unrounded"]] == ["layers.0.norm.weight"]
    assert [json.loads(line)[:3] for line in found.lines["copies"]] == [["layers.0.norm.weight", "fp32", "rank 1"]]
    assert found.components["masters"] == sound.components["masters"]
    assert found.digest != sound.digest
    assert found.notes == (
        "1 weight is not the rounded masters, such as layers.0.norm.weight",
        "1 copy differs from the first one, such as layers.0.norm.weight",
    )
    monkeypatch.setattr(
        engine_module, "named_checkpoint", lambda *a: replace(contradictory(*a), parameters=read(*a).parameters)
    )
    assert fingerprint(DATA / "zero2_tiny").digest == sound.digest


# -- the specification's corners ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ((3, 3.0), True),
        ((0.0, -0.0), True),
        ((True, 1), False),
        ((float("nan"), float("nan")), True),
        ((0.1, 0.1000000001), False),
        ((PList([1, 2]), PTuple((1, 2))), True),
        ((mapping_of({"a": 1, "b": 2}), mapping_of({"b": 2, "a": 1})), True),
        ((mapping_of({"1": 1}), mapping_of({1: 1})), False),
        ((mapping_of({"$set": PList([1])}), PSet([1])), False),
        ((PSet([1, 2]), PSet([2, 1])), True),
        ((b"ab", "ab"), False),
        ((b"ab", PBytearray(b"ab")), False),
        ((ordered_dict({"a": 1}), mapping_of({"a": 1})), True),
        ((Global("numpy._core.multiarray", "scalar"), Global("numpy.core.multiarray", "scalar")), True),
        ((PTensorRef(1), PTensorRef(1)), True),
        ((PTensorRef(1), PTensorRef(2)), False),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_trees_have_one_text_exactly_if_they_are_compared_as_equal(values: tuple[Any, Any], same: bool) -> None:
    one, other = (canonical(value, lambda node: ["uint8", [1], str(node.index)]) for value in values)
    assert (one == other) == same
    differences = [d for d in compare_trees(*values, "value") if not (isinstance(d, TensorsAt) and d.a == d.b)]
    assert (differences == []) == same


def test_a_tree_that_contains_itself_or_grows_without_end_is_refused() -> None:
    endless = PList()
    endless.items.append(endless)
    with pytest.raises(SourceError, match="nested") as raised:
        canonical(endless, lambda _: None)
    assert raised.value.code == "pickle.too_deep"
    wide: Any = PList(["x" * 100])
    for _ in range(60):
        wide = PList([wide, wide])
    with pytest.raises(SourceError) as found:
        canonical(wide, lambda _: None)
    assert found.value.code == "pickle.too_much_memory"


@pytest.mark.parametrize("batch_bytes", [1, 3 << 20])
def test_the_digest_does_not_depend_on_how_tensors_are_read(
    batch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(4)
    arrays = {name: chance.standard_normal(count).astype(np.float32) for name, count in _SIZES.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    monkeypatch.setattr(subject, "_BATCH_BYTES", batch_bytes)
    held = read_safetensors(tmp_path / "model.safetensors")
    assert fingerprint(tmp_path).components["weights"] == component([n, *tensor(*a)] for n, a in held.items())


_SIZES = {"empty": 0, "one": 1, "block": 65_536, "cut": 65_537, "large": 3_000_001, "last": 7}


def test_special_values_are_digested_as_bits(tmp_path: Path) -> None:
    bits = {
        "zero": 0x00000000,
        "negative zero": 0x80000000,
        "nan": 0x7FC00000,
        "another nan": 0x7FC00001,
        "a signalling nan": 0x7F800001,
    }
    found = set()
    for name, value in bits.items():
        save_file({"w": np.array([value], dtype=np.uint32).view(np.float32)}, tmp_path / "model.safetensors")
        found.add(fingerprint(tmp_path).digest)
        assert fingerprint(tmp_path).components["weights"] == component(
            [["w", *tensor("float32", [1], value.to_bytes(4, "little"))]]
        ), name
    assert len(found) == len(bits)


@pytest.mark.parametrize("seed", rest_full([41, 42, 43], 42))
def test_dcp_of_any_mesh_has_the_digest_of_its_state(seed: int, tmp_path: Path) -> None:
    """One drawn run, saved by torch's own planner on three meshes, and by one rank."""
    case = drawn(seed)
    found = []
    for number, axes in enumerate(((("shard", 1),), *MESHES[:3])):
        layout = replace(case.layout, roles=tuple(r for r, _ in axes), how=Save(tuple(n for _, n in axes)))
        place = tmp_path / str(number)
        place.mkdir()
        said = NESTED.write(replace(case, layout=layout), place)
        found.append(fingerprint(place, **said.choices))
    assert len({report.digest for report in found}) == 1
    assert found[0].components["moments"] is not None
    assert found[0].components["groups"] is not None


def drawn(seed: int) -> Any:
    """A run of FSDP with nested keys, the same for the same seed."""
    cases: list[Any] = []

    @settings(max_examples=30, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(NESTED.cases())
    @hypothesis_seed(seed)
    def draw(case: Any) -> None:
        cases.append(case)

    draw()
    fits = (c for c in cases if c.layout.grammar == "nested" and c.state.groups and not c.layout.turned)
    return next(c for c in fits if any(p.states for p in c.state.parameters))


# -- command line ---------------------------------------------------------------------------------------


def test_the_command_prints_the_digest_first(capsys: pytest.CaptureFixture[str]) -> None:
    report = fingerprint(DATA / "zero2_tiny")
    assert run(["fingerprint", str(DATA / "zero2_tiny"), "--quiet"]) == 0
    first, *parts = capsys.readouterr().out.splitlines()
    assert first == report.digest
    assert [tuple(line.split()) for line in parts[:8]] == [(n, d or "absent") for n, d in report.components.items()]
    assert run(["fingerprint", str(DATA / "zero2_tiny"), "--json", "--tensors", "--states", "weights"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["components"]["moments"] is None
    assert told["components"]["masters"] == report.components["masters"] == component_of(told["lines"]["masters"])
    assert run(["fingerprint", str(DATA / "zero2_tiny"), "--tensors", "--quiet"]) == 0
    assert '    ["embed.weight","exp_avg","float32",[29,6],"' in capsys.readouterr().out


def component_of(lines: list[str]) -> str | None:
    return component(map(json.loads, lines))


def test_a_fingerprint_can_be_stopped() -> None:
    spec = SourceSpec(url=str(DATA / "zero2_tiny"))
    with pytest.raises(JobError, match="the fingerprint was stopped"):
        load_engine().fingerprint(spec, FingerprintOptions(), should_stop=lambda: True)
