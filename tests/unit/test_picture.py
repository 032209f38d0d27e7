"""The picture of a layout: its regions tile the tensor, it is well-formed, and names in it stay text."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from house.repository import ROOT
from reshard.choices import OpaquePolicy
from reshard.cli.main import app
from reshard.cli.output import picture_lines
from reshard.draw.layout import render
from reshard.errors import RequestError
from reshard.local import load_engine
from reshard.models.reports import TensorPicture
from reshard.options import SourceSpec
from reshard_engine.checkpoint import Agreement, Checkpoint, OptimizerState, Parameter
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.layout_map import MAX_COPIES, MAX_REGIONS, MAX_STRETCHES, picture_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.cuts import Cut, joined, local_grid, parts
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder
from reshard_engine.testing.stores import MemoryStore

DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "checkpoints"
SVG = "{http://www.w3.org/2000/svg}"
SOURCES = [DATA / "zero2_tiny", DATA / "zero3_tiny"]
REAL = [
    "llama_fp32_z1_tp2pp2dp2",
    "gpt_bf16_z1_tp2pp2dp2",
    "gpt_bf16_z2_nopipe_tp2dp2",
    "gptheadqkvsubw_fp32_z1_tp2pp1dp2",
    "moe_bf16_z1_ep2dp4",
    "llama_bf16_z3_nopipe_tp2dp2",
]


def _read(source: Path) -> Checkpoint:
    return read_checkpoint(open_location(str(source)), None, OpaqueLedger(OpaquePolicy.KEEP))


def _painted(tensor: TensorPicture) -> np.ndarray[Any, Any]:
    """Times that each element is drawn."""
    rows = tensor.shape[0] if tensor.shape else 1
    painted = np.zeros((rows, prod(tensor.shape[1:])), dtype=int)
    for region in tensor.regions:
        painted[slice(*region.rows), slice(*region.columns)] += 1
    return painted


def _check(source: Path) -> int:
    checkpoint = _read(source)
    names = [p.fqn for p in checkpoint.parameters] + [b.fqn for b in checkpoint.buffers]
    count = 0
    for name in names:
        picture = picture_of(checkpoint, name)
        assert picture.tensors
        for tensor in picture.tensors:
            assert bool((_painted(tensor) == 1).all()), (tensor.fqn, tensor.state)
            assert not tensor.left_out
            assert all(region.file in {share.file for share in picture.files} for region in tensor.regions)
            count += 1
        ET.fromstring(render(picture))
    return count


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_element_is_in_exactly_one_region(source: Path) -> None:
    assert _check(source) > 20


@pytest.mark.parametrize("name", REAL)
def test_every_element_of_a_model_parallel_run_is_in_exactly_one_region(name: str) -> None:
    folder = SHARED / name / "src"
    if not folder.is_dir():
        pytest.skip(f"the real checkpoint {name} is not here: it lies outside the project")
    assert _check(folder) > 80


def test_who_holds_what_is_said() -> None:
    folder = SHARED / "llama_fp32_z1_tp2pp2dp2" / "src"
    if not folder.is_dir():
        pytest.skip("the real checkpoint is not here: it lies outside the project")
    picture = load_engine().picture(SourceSpec(url=str(folder)), "2.mlp.dense_4h_to_h.weight/fp32")
    (tensor,) = picture.tensors
    assert {(r.rank, r.columns) for r in tensor.regions} == {("dp 1 tp 0 pp 0", (0, 24)), ("dp 1 tp 1 pp 0", (24, 48))}
    assert tensor.cut.startswith("cut along dimension 1")
    (layer,) = load_engine().picture(SourceSpec(url=str(folder)), "2.mlp.dense_4h_to_h.weight/weight").tensors
    assert {r.rank for r in layer.regions} == {"layer 2 tp 0", "layer 2 tp 1"}


def test_copies_are_named() -> None:
    folder = SHARED / "llama_fp32_z1_tp2pp2dp2" / "src"
    if not folder.is_dir():
        pytest.skip("the real checkpoint is not here: it lies outside the project")
    (tensor,) = picture_of(_read(folder), "2.input_layernorm.weight/fp32").tensors
    assert {r.rank for r in tensor.regions} == {"dp 0 tp 0 pp 0"}
    assert tensor.cut == (
        "whole on every tensor-parallel rank; also in zero_pp_rank_0_mp_rank_01_optim_states.pt (dp 0 tp 1 pp 0)"
    )


def test_other_names_of_a_tensor_are_known() -> None:
    checkpoint = _read(DATA / "zero2_tiny")
    assert picture_of(checkpoint, "head.weight") == picture_of(checkpoint, "embed.weight")
    assert picture_of(checkpoint, "wave/buffer") == picture_of(checkpoint, "wave")
    with pytest.raises(RequestError) as caught:
        picture_of(checkpoint, "embed.weight/momentum")
    assert "embed.weight has fp32, exp_avg, exp_avg_sq, weight" in caught.value.message


def _cut_up(shape: tuple[int, ...], cut: Cut, tp: int, dp: int) -> Checkpoint:
    """One parameter, cut over `tp` ranks, and each part over `dp` more, in flat intervals."""
    builder, store, locals_ = ShardMapBuilder(), MemoryStore(), []
    names = [f"zero_pp_rank_{d}_mp_rank_{t:02d}_optim_states.pt" for t in range(tp) for d in range(dp)]
    files = tuple(SourceFile(store, n, (ObjectInfo(n, 4 * prod(shape), ""),)) for n in names)
    for t in range(tp):
        grid = local_grid(cut, shape, tp, t)
        number = builder.tensor("w", "fp32", BY_NAME["float32"], grid)
        ends = np.linspace(0, prod(grid), dp + 1).astype(np.int64)
        file = t * dp + np.arange(dp)
        builder.pieces(np.full(dp, number), ends[:-1], ends[1:], file=file, offset=4 * ends[:-1])
        locals_.append(number)
    whole = builder.view("w", "fp32", joined(cut, shape, locals_), shape)
    parameter = Parameter("w", shape, 0, None, {"fp32": whole}, cut=cut)
    rest: Mapping[str, Any] = {
        "framework_version": None,
        "buffers": (),
        "shared": {},
        "foreign_globals": (),
        "warnings": (),
    }
    return Checkpoint(
        url="memory://x", tag=None, format="deepspeed-zero1", family="deepspeed", world={"dp": dp, "tp": tp, "pp": 1},
        files=files, shard_map=builder.build(), parameters=(parameter,), optimizer=OptimizerState(()),
        **rest,
    )  # fmt: skip


CUTS: Mapping[str, tuple[tuple[int, ...], Cut]] = {
    "rows": ((12, 7), Cut(dim=0)),
    "columns": ((7, 12), Cut(dim=1)),
    "sections": ((24, 5), Cut(dim=0, sections=(12, 6, 6))),
    "columns in sections": ((5, 24), Cut(dim=1, sections=(12, 6, 6))),
    "one dimension": ((18,), Cut(dim=0)),
    "the last of three": ((3, 4, 6), Cut(dim=2)),
    "the middle of three": ((3, 6, 5), Cut(dim=1)),
    "a finer grid": ((24, 5), Cut(dim=1, grid=(4, 6, 5))),
    "rows of one": ((1, 6), Cut(dim=1)),
    "uneven": ((11, 3), Cut(dim=0, near_even=True)),
    "more ranks than elements": ((2, 6, 1), Cut(dim=1)),
}


@pytest.mark.parametrize("dp", [1, 2, 5])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kind", CUTS)
def test_regions_say_the_file_that_holds_each_element(kind: str, tp: int, dp: int) -> None:
    shape, cut = CUTS[kind]
    checkpoint = _cut_up(shape, cut, tp, dp)
    picture = picture_of(checkpoint, "w")
    (tensor,) = picture.tensors
    number = {f.name: i for i, f in enumerate(checkpoint.files)}
    drawn = np.full((shape[0], prod(shape[1:])), -1)
    for region in tensor.regions:
        drawn[slice(*region.rows), slice(*region.columns)] = number[region.file]
    assert bool((_painted(tensor) == 1).all())
    # What each rank holds by the rule itself, and each of its elements by its place in the flat interval.
    grid = cut.shape_in(shape)
    wanted = np.full(grid, -1)
    for t in range(tp):
        own = np.zeros(local_grid(cut, shape, tp, t), dtype=int)
        ends = np.linspace(0, own.size, dp + 1).astype(int)
        for d in range(dp):
            own.reshape(-1)[ends[d] : ends[d + 1]] = t * dp + d
        dim = cut.dim or 0
        for part in parts(cut, grid[dim], tp, t):
            before = (slice(None),) * dim
            wanted[(*before, slice(part.start, part.start + part.width))] = own[
                (*before, slice(part.local, part.local + part.width))
            ]
    assert bool((drawn == wanted.reshape(drawn.shape)).all())


def _in_copies(count: int) -> tuple[ShardMapBuilder, list[int], tuple[SourceFile, ...]]:
    """One tensor as often as there are files."""
    builder, store = ShardMapBuilder(), MemoryStore()
    names = [f"zero_pp_rank_0_mp_rank_{t:02d}_optim_states.pt" for t in range(count)]
    numbers = [builder.tensor("w", "fp32", BY_NAME["float32"], (3, 2)) for _ in names]
    for file, number in enumerate(numbers):
        builder.whole(number, file=file, offset=0)
    return builder, numbers, tuple(SourceFile(store, n, (ObjectInfo(n, 64, ""),)) for n in names)


def test_copies_are_those_that_must_agree_and_not_roundings() -> None:
    builder, numbers, files = _in_copies(3)
    base = _cut_up((3, 2), Cut(), 1, 1)
    parameter = Parameter("w", (3, 2), 0, None, {"fp32": numbers[0]}, cut=Cut())
    copy = Agreement("w", "fp32", numbers[0], numbers[2], "tensor-parallel rank 2")
    rounding = Agreement("w", "fp32", numbers[0], numbers[1], "its weight", rounded=True)
    checkpoint = replace(
        base,
        files=files,
        shard_map=builder.build(),
        parameters=(parameter,),
        world={"tp": 3},
        agreements=(copy, rounding),
    )
    (tensor,) = picture_of(checkpoint, "w/fp32").tensors
    assert [r.file for r in tensor.regions] == [files[0].name]
    assert tensor.cut.endswith(f"; also in {files[2].name} (dp 0 tp 2 pp 0)")


def test_of_a_mean_the_first_copy_is_drawn_and_all_are_named() -> None:
    builder, numbers, files = _in_copies(12)
    mean = builder.mean("w", "fp32", numbers, BY_NAME["float32"])
    parameter = Parameter("w", (3, 2), 0, None, {"fp32": mean}, cut=Cut(averaged=True))
    checkpoint = replace(
        _cut_up((3, 2), Cut(), 1, 1), files=files, shard_map=builder.build(), parameters=(parameter,), world={"tp": 12}
    )
    (tensor,) = picture_of(checkpoint, "w").tensors
    assert [(r.file, r.rows, r.columns) for r in tensor.regions] == [(files[0].name, (0, 3), (0, 2))]
    assert tensor.cut.startswith("the mean of 12 copies, of which this is the first; also in ")
    assert tensor.cut.count("optim_states.pt") == MAX_COPIES
    assert tensor.cut.endswith(", ...")


def test_a_parameter_that_nothing_explains_is_called_so() -> None:
    checkpoint = replace(_cut_up((4, 2), Cut(dim=0), 2, 1), unexplained=("w",))
    (tensor,) = picture_of(checkpoint, "w").tensors
    assert tensor.cut == "nothing says how 2 tensor-parallel ranks cut it: this is the first rank's part"


def test_huge_tensors_are_drawn_without_looking_at_each_row() -> None:
    rows = 2 * MAX_STRETCHES
    (wide,) = picture_of(_cut_up((rows, 16), Cut(dim=1), 8, 1), "w").tensors
    assert [(r.rows, r.columns) for r in wide.regions] == [((0, rows), (2 * t, 2 * t + 2)) for t in range(8)]
    with pytest.raises(RequestError) as caught:
        picture_of(_cut_up((4, rows, 2), Cut(dim=2), 2, 1), "w")
    assert caught.value.code == "request.unsatisfiable"


def test_what_is_not_listed_is_counted() -> None:
    picture = picture_of(_cut_up((2, MAX_REGIONS, 4), Cut(dim=2), 2, 1), "w")
    (tensor,) = picture.tensors
    assert (len(tensor.regions), tensor.left_out) == (MAX_REGIONS, MAX_REGIONS)
    assert f"{MAX_REGIONS:,} parts are not drawn" in render(picture)
    assert list(picture_lines(picture))[-1] == f"  ... and {2 * MAX_REGIONS - 64} more"


def test_shares_of_files_add_up() -> None:
    picture = load_engine().picture(SourceSpec(url=str(DATA / "zero2_tiny")))
    assert len(picture.files) == 3
    assert all(sum(f.bytes_by_state.values()) <= f.size_bytes for f in picture.files)
    shard_map = _read(DATA / "zero2_tiny").shard_map
    of_pieces = sum(
        shard_map.tensors[t].dtype.itemsize_bytes * (end - begin)
        for t, begin, end in zip(shard_map.tensor, shard_map.begin, shard_map.end, strict=True)
    )
    assert sum(sum(f.bytes_by_state.values()) for f in picture.files) == of_pieces
    lines = list(picture_lines(picture))
    assert [line.partition("  ")[0] for line in lines] == ["dp 0 tp 0 pp 0", "dp 1 tp 0 pp 0", "tp 0 pp 0"]


def test_the_command_draws(tmp_path: Path) -> None:
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    command = ["inspect", str(DATA / "zero3_tiny"), "--tensor", "embed.weight", "--svg", str(svg), "--html", str(html)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert "embed.weight/fp32 float32" in done.stdout
    ET.parse(svg)
    assert html.read_text().startswith("<!doctype html>")
    # The other side may hold the tensor in other states: no ZeRO-3 file holds its weight by itself.
    for state in ("", "/fp32", "/weight"):
        beside = ["inspect", str(DATA / "zero2_tiny"), "--tensor", f"embed.weight{state}"]
        assert (
            CliRunner().invoke(app, [*beside, "--beside", str(DATA / "zero3_tiny"), "--svg", str(svg)]).exit_code == 0
        )
        assert "zero3_tiny" in svg.read_text()
    told = CliRunner().invoke(app, ["inspect", str(DATA / "zero3_tiny"), "--tensor", "embed.weight/fp32", "--json"])
    data = json.loads(told.stdout)
    assert [t["state"] for t in data["tensors"]] == ["fp32"]
    assert data["schema_version"] == 1
    with pytest.raises(RequestError) as caught:
        load_engine().picture(SourceSpec(url=str(DATA / "zero3_tiny")), "nothing")
    assert caught.value.code == "request.invalid"


def test_targets_are_said_with_what_stands_in_the_way() -> None:
    found = {t.name: t for t in load_engine().inspect(SourceSpec(url=str(DATA / "zero2_tiny"))).targets}
    assert found["zero --dp"].possible
    assert not found["zero --tp"].possible
    assert "--rules" in found["zero --tp"].detail
    assert not found["zero --pp"].possible
    folder = SHARED / "llama_fp32_z1_tp2pp2dp2" / "src"
    if folder.is_dir():
        real = {t.name: t for t in load_engine().inspect(SourceSpec(url=str(folder))).targets}
        assert real["zero --tp"].detail.startswith("1, 2 (")  # two key-value heads
        assert real["zero --pp"].possible
        assert real["zero --pp"].detail.startswith("1, 2, 3, 4 (")
        assert real["universal"].detail == "one directory for every stage and world"
    assert "--tp 1 only" in found["universal"].detail
    assert "--family" in found["universal"].detail
