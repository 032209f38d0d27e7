"""Metadata that a hostile or broken writer could have written: refused with a code, in bounded time."""

from __future__ import annotations

import shutil
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from house.conversions import convert
from house.sources import copied_source
from reshard.choices import OpaquePolicy, ParamOrder, TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import PDict, PickleLimits, PList, PTuple, mapping_items, text_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.pickles.vm import parse_pickle

LIMITS = PickleLimits(opcodes=200_000)


source = copied_source("zero2_tiny", "in/source")
"""A copy of the real ZeRO-2 checkpoint."""


def _code(work: Callable[[], object]) -> str:
    with pytest.raises(ReshardError) as caught:
        work()
    return caught.value.code


def _edit_ranks(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for path in source.glob("global_step3/*optim_states.pt"):
        value = torch.load(path, weights_only=False)
        change(value["optimizer_state_dict"])
        torch.save(value, path)


@pytest.mark.parametrize(
    "name", ["../../../../escaped/exp_avg", "/tmp/escaped", "a/b", "..", "nul\0", "\ud800", "fp32", "x" * 100, ""]
)
def test_optimizer_state_names_never_become_paths(source: Path, tmp_path: Path, name: str) -> None:
    def rename(state: dict[str, Any]) -> None:
        entry = state["base_optimizer_state"]["state"][0]
        entry[name] = entry.pop("exp_avg")

    _edit_ranks(source, rename)
    before = sorted(tmp_path.rglob("*"))
    assert _code(lambda: convert(source, tmp_path / "out" / "deep" / "u")) == "name.invalid"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["layer/fp32.pt", "x" * 300, "a//b", "zero\u202eevil"])
def test_parameter_names_that_cannot_be_files(source: Path, tmp_path: Path, name: str) -> None:
    path = source / "global_step3" / "mp_rank_00_model_states.pt"
    value = torch.load(path, weights_only=False)
    names = {"unused": name, "gain": "layer"}
    value["param_shapes"] = [OrderedDict((names.get(k, k), v) for k, v in value["param_shapes"][0].items())]
    value["module"] = OrderedDict((names.get(k, k), v) for k, v in value["module"].items())
    torch.save(value, path)
    assert _code(lambda: convert(source, tmp_path / "out")) == "name.invalid"


@pytest.mark.parametrize("count", [2_000_000_000, 1 << 70, 0, -1])
def test_world_sizes_that_nobody_has(source: Path, tmp_path: Path, count: int) -> None:
    _edit_ranks(source, lambda state: state.update(partition_count=[count]))
    expected = "checkpoint.too_large" if count > 0 else "checkpoint.malformed"
    assert _code(lambda: convert(source, tmp_path / "out")) == expected


def test_a_rank_beyond_all_ranks(source: Path, tmp_path: Path) -> None:
    files = source / "global_step3"
    shutil.copy(
        files / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        files / "bf16_zero_pp_rank_99999999_mp_rank_00_optim_states.pt",
    )
    assert _code(lambda: convert(source, tmp_path / "out")) == "checkpoint.too_large"


def _stage0(directory: Path, module: dict[str, torch.Tensor], optimizer: object) -> Path:
    (directory / "global_step1").mkdir(parents=True)
    states = {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": optimizer,
        "param_shapes": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": 1,
        "skipped_steps": 0,
        "ds_version": "0.19.8",
    }
    torch.save(states, directory / "global_step1" / "mp_rank_00_model_states.pt")
    (directory / "latest").write_text("global_step1")
    return directory


def test_masters_that_do_not_fit_the_groups(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(4)}
    inner = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    short = {"fp32_groups": [[torch.ones(3)]], "optimizer_state_dict": inner}
    source = _stage0(tmp_path / "short", weights, short)
    assert _code(lambda: convert(source, tmp_path / "out")) == "checkpoint.malformed"
    twice = {"state": {}, "param_groups": [{"params": [0]}, {"params": [0]}]}
    source = _stage0(tmp_path / "twice", weights, twice)
    assert _code(lambda: convert(source, tmp_path / "out")) == "checkpoint.malformed"


def test_states_of_another_shape_than_the_parameter(tmp_path: Path) -> None:
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(2)}}
    source = _stage0(tmp_path / "in", {"a": torch.ones(3)}, {"state": state, "param_groups": [{"params": [0]}]})
    assert _code(lambda: convert(source, tmp_path / "out")) == "checkpoint.malformed"


@pytest.mark.parametrize(
    "keys",
    [(1, 1.0), (1, True), (None, None), (PTuple((1,)), PTuple((True,)))],
    ids=["1 and 1.0", "1 and True", "None twice", "tuples"],
)
def test_keys_that_python_merges_are_refused(keys: tuple[Any, Any]) -> None:
    """Only a hostile stream has both: a program that loads it gets the last value, under the first key."""
    assert _code(lambda: text_items(PDict([keys[0], 1, keys[1], 2]), what="x")) == "pickle.ambiguous_key"


def test_keys_with_equal_hashes_take_no_time() -> None:
    """Python gives -1 and -2 one hash, and tuples of them too."""
    keys = [PTuple(tuple(-1 - (n >> bit & 1) for bit in range(15))) for n in range(1 << 15)]
    begin = time.monotonic()
    assert len(text_items(PDict([part for key in keys for part in (key, None)]), what="x")) == 1 << 15
    assert time.monotonic() - begin < 5


SQUARES = {name: torch.full((3, 3), float(i)) for i, name in enumerate("abcd", 1)}
FUSED = {"cur_scale": 1.0, "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0}


def _two_groups(*numbers: list[int], shape: tuple[int, ...] = (3, 3)) -> dict[str, Any]:
    """An optimizer of torch with these groups, each number of it in its moments."""
    every = [n for group in numbers for n in group]
    state = {n: {"step": torch.tensor(1.0), **dict.fromkeys(_MOMENTS, torch.full(shape, 10.0 * n))} for n in every}
    groups = [{"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0, "params": g} for g in numbers]
    return {"state": state, "param_groups": groups}


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _moments(source: Path, out: Path, order: ParamOrder | tuple[str, ...]) -> dict[str, float]:
    spec = SourceSpec(url=str(source), param_order=order)
    load_engine().convert(ConvertRequest(source=spec, target=str(out), to=TargetFormat.UNIVERSAL))
    atoms = {path.parent.name: path for path in out.rglob("exp_avg.pt")}
    return {name: float(torch.load(path, weights_only=True)["param"].flatten()[0]) for name, path in atoms.items()}


def _refused(source: Path, out: Path, **choices: Any) -> ReshardError:
    spec = SourceSpec(url=str(source), **choices)
    with pytest.raises(ReshardError) as caught:
        load_engine().convert(ConvertRequest(source=spec, target=str(out), to=TargetFormat.UNIVERSAL))
    return caught.value


def test_the_orders_that_name_stage_0s_numbers_are_those_that_work(tmp_path: Path) -> None:
    """`model` is recommended where it leaves one way; a list of names works in any order."""
    source = _stage0(tmp_path / "all", SQUARES, _two_groups([0, 1], [2, 3]))
    error = _refused(source, tmp_path / "no")
    assert (error.code, str(error.fix).startswith("--param-order model if")) == ("checkpoint.ambiguous", True)
    assert _moments(source, tmp_path / "model", ParamOrder.MODEL) == {"a": 0.0, "b": 10.0, "c": 20.0, "d": 30.0}
    assert _moments(source, tmp_path / "file", tuple("dcba")) == {"d": 0.0, "c": 10.0, "b": 20.0, "a": 30.0}
    frozen = _stage0(tmp_path / "some", SQUARES, _two_groups([0], [1, 2]))
    error = _refused(frozen, tmp_path / "no")
    assert (error.code, str(error.fix).startswith("--param-order FILE with")) == ("checkpoint.ambiguous", True)
    error = _refused(frozen, tmp_path / "no", param_order="groups")
    assert (error.code, "order of --param-order groups" in error.message) == ("checkpoint.ambiguous", True)
    assert _moments(frozen, tmp_path / "listed", tuple("bda")) == {"b": 0.0, "d": 10.0, "a": 20.0}


def test_no_list_of_names_is_asked_for_where_none_can_fit(tmp_path: Path) -> None:
    source = _stage0(tmp_path / "in", SQUARES, _two_groups([0], [1], shape=(2, 2)))
    error = _refused(source, tmp_path / "no")
    assert (error.code, "no parameters of their shapes" in error.message) == ("request.unsatisfiable", True)
    assert "--param-order" not in str(error.fix)


def test_flat_groups_of_stage_0_are_asked_for(tmp_path: Path) -> None:
    """FusedAdam in 16 bits keeps one flat master for each group, of which only the number of elements is known."""
    weights = {name: tensor.bfloat16() for name, tensor in SQUARES.items()}
    masters = [torch.cat([SQUARES[n].flatten() for n in names]) for names in ("ca", "db")]
    state = {i: {"step": 1, **dict.fromkeys(_MOMENTS, flat * 10)} for i, flat in enumerate(masters)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0, "params": [i]} for i in range(2)]
    inner = {"state": state, "param_groups": groups}
    source = _stage0(tmp_path / "in", weights, {**FUSED, "optimizer_state_dict": inner, "fp32_groups_flat": masters})
    error = _refused(source, tmp_path / "no")
    assert (error.code, str(error.fix).startswith("--param-order FILE with")) == ("checkpoint.ambiguous", True)
    assert _moments(source, tmp_path / "file", tuple("cadb")) == {"c": 30.0, "a": 10.0, "d": 40.0, "b": 20.0}


def test_tensors_over_one_storage_are_tied_only_if_they_are_the_same(tmp_path: Path) -> None:
    base = torch.arange(9.0).view(3, 3)
    line = torch.arange(8.0)
    module = {"a": base, "turned": base.t(), "same": base, "low": line[:4], "even": line[::2]}
    source = _stage0(tmp_path / "in", module, None)
    convert(source, tmp_path / "out", TargetFormat.TORCH)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    for name, expected in module.items():
        assert torch.equal(found[name], expected), name
    assert found["a"].data_ptr() == found["same"].data_ptr()
    assert found["a"].data_ptr() != found["turned"].data_ptr()


@pytest.mark.parametrize("part_bytes", [1 << 10, 5_000, 1 << 20])
def test_strided_tensors_come_out_packed(tmp_path: Path, part_bytes: int) -> None:
    module = {
        "turned": torch.randn(70, 90).t(),
        "image": torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
        "skipped": torch.randn(1000)[::3],
        "wide": torch.randn(1, 50).expand(3, 50),
    }
    source = _stage0(tmp_path / "in", module, None)
    request = ConvertRequest(
        source=SourceSpec(url=str(source)), target=str(tmp_path / "w"), to=TargetFormat.TORCH, part_bytes=part_bytes
    )
    result = load_engine().convert(request)
    assert any("strided" in w for w in result.warnings)
    found = torch.load(tmp_path / "w" / "pytorch_model.bin", weights_only=True)
    for name, expected in module.items():
        assert torch.equal(found[name], expected), name
        assert found[name].is_contiguous()


def _parsed(data: bytes) -> Any:
    return parse_pickle(data, OpaqueLedger(OpaquePolicy.REFUSE), limits=LIMITS)[0]


def _walked(data: bytes) -> bytes:
    return emit_pickle(rewrite(_parsed(data), lambda t: t, lambda f: f))


def _get(index: int) -> bytes:
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def test_values_that_grow_deep_after_they_were_put_together() -> None:
    count = 3_000
    data = b"\x80\x02(" + b"".join(b"]r" + struct.pack("<I", i) for i in range(count)) + b"l"
    data += b"".join(_get(i) + _get(i + 1) + b"a0" for i in range(count - 1)) + b"."
    assert _code(lambda: _walked(data)) == "pickle.too_deep"
    assert _code(lambda: emit_pickle(_parsed(data))) == "pickle.too_deep"


def test_a_set_that_contains_itself() -> None:
    assert _code(lambda: _walked(b"\x80\x04\x8fq\x00(h\x00\x90.")) == "pickle.too_deep"


def test_keys_that_python_cannot_hash_are_not_written() -> None:
    assert _code(lambda: emit_pickle(PDict([PList([1]), 2]))) == "pickle.type_confusion"


def _bounded(work: Callable[[], object]) -> str:
    started = time.process_time()
    code = _code(work)
    # Far from the seconds to minutes that quadratic work takes; not a benchmark.
    assert time.process_time() - started < 20
    return code


def test_work_inside_opcodes_is_counted() -> None:
    pairs = b"".join(b"K\x01K\x01" for _ in range(20_000))
    build = b"\x80\x02cargparse\nNamespace\n)\x81q\x01(" + pairs + b"dq\x00" + b"0h\x01" + b"h\x00b" * 20_000 + b"."
    assert _bounded(lambda: _parsed(build)) == "pickle.too_much_work"
    arguments = b"(" + b"K\x01" * 20_000 + b"tq\x00"
    call = b"\x80\x02ctorch\ndevice\nq\x01" + arguments + b"00" + (b"h\x01h\x00R0") * 20_000 + b"N."
    assert _bounded(lambda: _parsed(call)) == "pickle.too_much_work"
    copies = (
        b"\x80\x02cbuiltins\nset\nq\x01]("
        + b"K\x01" * 20_000
        + b"e\x85q\x000"
        + b"0"
        + (b"h\x01h\x00R0") * 20_000
        + b"N."
    )
    assert _bounded(lambda: _parsed(copies)) in {"pickle.too_much_work", "pickle.too_much_memory"}


def test_integers_made_to_collide_are_not_hashed() -> None:
    prime = (1 << 61) - 1
    keys = PDict([v for k in range(1, 5_000) for v in (k * prime, None)])
    assert _bounded(lambda: mapping_items(keys, what="it")) == "checkpoint.malformed"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


BOMBS = {
    "bytearray": b"c__builtin__\nbytearray\nJ\x00\x94\x35\x77\x85R",
    "bytes": b"cbuiltins\nbytes\nJ\x00\x94\x35\x77\x85R",
    "new ndarray": b"cnumpy\nndarray\nJ\x00\x94\x35\x77\x85\x81",
    "ndarray": b"cnumpy\nndarray\nJ\x00\x94\x35\x77\x85R",
    "reconstruct": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\x00\x94\x35\x77\x85C\x01b\x87R",
    "codec": b"c_codecs\nencode\n" + _text("x") + _text("zip") + b"\x86R",
    "dtype": b"cnumpy\ndtype\nJ\x00\x94\x35\x77\x85R",
}


@pytest.mark.parametrize("name", BOMBS)
def test_listed_calls_with_arguments_that_no_writer_gives(name: str) -> None:
    assert _code(lambda: _parsed(b"\x80\x03" + BOMBS[name] + b".")) in {
        "pickle.forbidden_call",
        "pickle.forbidden_build",
    }
