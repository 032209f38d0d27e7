"""The picture of a layout: its regions tile the tensor, it is well-formed, and names in it stay text."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from house.expected import raised, some
from house.repository import ROOT
from reshard.api.wire import convert_request
from reshard.choices import OpaquePolicy
from reshard.cli.main import app
from reshard.cli.output import html_of, picture_lines
from reshard.draw.layout import MAX_ROWS, STYLE, Part, Side, flows, range_label, render, rows_of, shown_axes, side_of
from reshard.draw.marks import COLOURS
from reshard.engine import load_engine
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest
from reshard.models.keywords import ConvertOptions
from reshard.models.reports import FileShare, LayoutPicture, Region, TensorPicture
from reshard.options import SourceSpec
from reshard_engine.checkpoint import Agreement, Checkpoint, OptimizerState, Parameter
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.conversion import Conversion
from reshard_engine.operations.layout_map import MAX_COPIES, MAX_REGIONS, MAX_STRETCHES, picture_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import ObjectInfo, read_bytes
from reshard_engine.tensors.cuts import Cut, joined, local_grid, parts
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.layout import PlannedStore
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
    error = raised(RequestError, picture_of, checkpoint, "embed.weight/momentum")
    assert "embed.weight has fp32, exp_avg, exp_avg_sq, weight" in error.message


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
    error = raised(RequestError, picture_of, _cut_up((4, rows, 2), Cut(dim=2), 2, 1), "w")
    assert error.code == "request.unsatisfiable"


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
    error = raised(RequestError, load_engine().picture, SourceSpec(url=str(DATA / "zero3_tiny")), "nothing")
    assert error.code == "request.invalid"


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


# The drawing of layouts: well-formed, everything inside of it, names stay text, few rows for thousands of ranks.


TAGS = {f"{SVG}{tag}" for tag in ("svg", "g", "path", "text", "rect", "title", "desc", "style")}
EVIL = {
    "markup": "</title></style><script>alert('x')</script>\"&]]>",
    "control": "a\x00b\x1b[31mc\x07\x9b",
    "lines": "a\nb\rc\u2028d",
    "surrogate": "a\udcffb",
    "noncharacter": "a\ufffeb\uffff",
    "direction": "a\u202eb",
}


def flat_run(dp: int, *, rows: int = 11_008, columns: int = 4_096, url: str = "s3://runs/a") -> LayoutPicture:
    """A ZeRO-3 run of `dp` ranks: one tensor in flat, nearly equal intervals, three rectangles at most for each."""
    names = [(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt", f"dp {r} tp 0 pp 0") for r in range(dp)]
    held = {"fp32": 4_000_000, "exp_avg": 4_000_000, "exp_avg_sq": 4_000_000}
    files = [FileShare(file=f, rank=r, size_bytes=12_009_000, bytes_by_state=held) for f, r in names]
    ends = [rows * columns * r // dp for r in range(dp + 1)]
    regions = [
        Region(file=names[r][0], rank=names[r][1], rows=band[:2], columns=band[2:])
        for r, (begin, end) in enumerate(pairwise(ends))
        for band in _bands(begin, end, columns)
    ]
    tensor = TensorPicture(
        fqn="layers.17.down_proj.weight",
        state="fp32",
        dtype="float32",
        shape=(rows, columns),
        cut="",
        regions=tuple(regions),
    )
    files.sort(key=lambda f: f.file)
    world = {"dp": dp, "tp": 1, "pp": 1}
    return LayoutPicture(url=url, format="deepspeed-zero3", world=world, files=tuple(files), tensors=(tensor,))


def _bands(begin: int, end: int, columns: int) -> list[tuple[int, int, int, int]]:
    found = []
    while begin < end:
        row, column = divmod(begin, columns)
        whole = (end - begin) // columns if column == 0 else 0
        stop = begin + whole * columns if whole else min(end, (row + 1) * columns)
        found.append((row, row + whole, 0, columns) if whole else (row, row + 1, column, column + stop - begin))
        begin = stop
    return found


def _texts(svg: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text") if "rl-tip" not in t.attrib["class"]]


def _inside(svg: str) -> None:
    root = ET.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width + 0.01
        assert float(box.attrib.get("y", 0)) + float(box.attrib["height"]) <= height + 0.01
    for words in root.iter(f"{SVG}text"):
        assert 0 <= float(words.attrib["x"]) <= width
        assert 0 < float(words.attrib["y"]) <= height


@pytest.mark.parametrize("width", [1_080, 390])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (4_096, 96), (96, 4_096), (1, 4_096)])
def test_any_number_of_ranks_is_a_few_rows(before: int, after: int, width: int) -> None:
    source, target = flat_run(before), flat_run(after, url="s3://runs/b")
    started = time.process_time()
    svg = render(source, target, width=width)
    took = time.process_time() - started
    _inside(svg)
    assert len(svg) < 250_000
    assert took < 10
    texts = _texts(svg)
    for count in (before, after):
        shown = [t for t in texts if t.startswith(f"{count:,} ranks in ")]
        assert shown == ([f"{count:,} ranks in {-(-count // -(-count // MAX_ROWS))} rows"] if count > MAX_ROWS else [])
    assert sum(t.endswith(("iB", " B")) for t in texts) <= 2 * MAX_ROWS + 6
    # The whole tensor moves, and nothing twice.
    sides = [side_of(p.tensors[0], shown_axes(p)) for p in (source, target)]
    moved = some(flows(*sides))
    assert sum(flow.elements for flow in moved) == 11_008 * 4_096
    assert len(sides[0].parts) <= 3 * MAX_ROWS


def test_flows_are_the_shared_intervals() -> None:
    """4 ranks to 3 ranks, by the arithmetic of flat partitions."""
    source, target = flat_run(4, rows=12, columns=5), flat_run(3, rows=12, columns=5)
    moved = some(flows(*(side_of(p.tensors[0], shown_axes(p)) for p in (source, target))))
    told = {(f.source, f.target): f.elements for f in moved}
    wanted = {}
    for s in range(4):
        for t in range(3):
            both = min(15 * (s + 1), 20 * (t + 1)) - max(15 * s, 20 * t)
            if both > 0:
                wanted[s, t] = both
    assert told == wanted


def test_parts_of_one_group_are_joined() -> None:
    side = side_of(flat_run(4_096).tensors[0], frozenset({"dp"}))
    assert side.labels[:2] == ("dp 0-255", "dp 256-511")
    assert side.counted == "4,096 ranks in 16 groups"
    assert sum(part.elements for part in side.parts) == 11_008 * 4_096
    assert {part.group for part in side.parts} == set(range(16))


def test_too_many_parts_are_said_and_not_compared() -> None:
    stripes = Side(("a",), "1 rank", tuple(Part(0, (0, 9), (2 * c, 2 * c + 1)) for c in range(500)))
    assert flows(stripes, stripes) is None
    regions = [Region(file=f"f{c % 2}", rank="", rows=(0, 9), columns=(c, c + 1)) for c in range(1_000)]
    tensor = TensorPicture(fqn="w", state="fp32", dtype="float32", shape=(9, 1_000), cut="", regions=tuple(regions))
    files = tuple(FileShare(file=f, rank="", size_bytes=9, bytes_by_state={}) for f in ("f0", "f1"))
    picture = LayoutPicture(url="u", format="f", world={}, files=files, tensors=(tensor,))
    assert "It has too many parts to draw its movement." in _texts(render(picture, picture))


def test_real_checkpoints_side_by_side() -> None:
    source, target = (
        load_engine().picture(SourceSpec(url=str(DATA / name)), "embed.weight") for name in ("zero2_tiny", "zero3_tiny")
    )
    svg = render(source, target, "embed.weight/fp32")
    _inside(svg)
    texts = _texts(svg)
    assert texts.count("Source") == texts.count("Target") == 1
    assert {"given by 2 ranks", "float32 [29, 6], 696 B", "embed.weight/fp32"} <= set(texts)
    names = [g.attrib["aria-label"] for g in ET.fromstring(svg).iter(f"{SVG}g") if "tabindex" in g.attrib]
    # 23 of 29 rows lie on the first rank before, and 87 of 174 elements after.
    assert "87 elements: dp 0 to dp 0" in names
    assert "51 elements: dp 0 to dp 1" in names
    assert "36 elements: dp 1 to dp 1" in names
    assert "dp 0: 1 file, exp_avg 584 B, exp_avg_sq 584 B, fp32 584 B, other bytes 4.23 KiB" in names
    described = some(ET.fromstring(svg).find(f"{SVG}desc"))
    assert "embed.weight/fp32 moves from 2 ranks to 2 ranks." in (described.text or "")


def test_states_that_lie_alike_are_drawn_once() -> None:
    texts = _texts(render(load_engine().picture(SourceSpec(url=str(DATA / "zero2_tiny")), "embed.weight")))
    assert [t for t in texts if t.startswith("embed.weight/")] == [
        "embed.weight/fp32, exp_avg, exp_avg_sq",
        "embed.weight/weight",
    ]


def test_rows_are_ranks_in_their_order_then_files() -> None:
    files = [
        FileShare(file=f"r{r}.pt", rank=f"dp {r} tp 0", size_bytes=10 + r, bytes_by_state={"fp32": 8})
        for r in range(12)
    ]
    files += [FileShare(file="config.json", rank="", size_bytes=5, bytes_by_state={})]
    picture = LayoutPicture(url="u", format="f", world={"dp": 12}, files=tuple(reversed(files)))
    rows = rows_of(picture)
    assert [row.label for row in rows] == [*(f"dp {r}" for r in range(12)), "config.json"]
    assert sum(row.size_bytes for row in rows) == sum(f.size_bytes for f in files)
    # Many files without a rank share a row by directory, or by number.
    atoms = [
        FileShare(file=f"zero/{p}.w/{s}.pt", rank="", size_bytes=4, bytes_by_state={s: 4})
        for p in range(99)
        for s in "ab"
    ]
    grouped = rows_of(LayoutPicture(url="u", format="f", world={}, files=tuple(atoms)))
    assert len(grouped) <= MAX_ROWS
    assert grouped[0].label == "zero/0-6.w/"
    assert grouped[0].bytes_by_state == {"a": 28, "b": 28}
    assert range_label(["model-00001-of-00004", "model-00002-of-00004"]) == "model-00001-00002-of-00004"


def test_bytes_that_tensors_share_stay_inside() -> None:
    files = tuple(
        FileShare(file=f"{i:05d}/" + "n" * 99, rank="", size_bytes=4, bytes_by_state={"a": 9}) for i in range(5000)
    )
    svg = render(LayoutPicture(url="u", format="f", world={}, files=files))
    _inside(svg)
    assert "5,000 files in 16 rows" in _texts(svg)


def _same_everywhere(text: str) -> LayoutPicture:
    region = Region(file=text, rank=text, rows=(0, 1), columns=(0, 1))
    tensor = TensorPicture(fqn=text, state=text, dtype="float32", shape=(1, 1), cut=text, regions=(region,))
    share = FileShare(file=text, rank=text, size_bytes=3, bytes_by_state={text: 3})
    return LayoutPicture(url=text, format=text, world={text: 1}, files=(share,), tensors=(tensor,))


@pytest.mark.parametrize("kind", EVIL)
def test_names_stay_text(kind: str) -> None:
    whole = _same_everywhere(EVIL[kind])
    for picture, beside in ((whole, None), (whole, whole), (whole.model_copy(update={"tensors": ()}), None)):
        svg = render(picture, beside)
        root = ET.fromstring(svg.encode())
        assert {e.tag for e in root.iter()} <= TAGS
        names = {name for e in root.iter() for name in e.attrib}
        assert not any(name.startswith("on") or "href" in name or name == "style" for name in names)
        assert [e.text for e in root.iter(f"{SVG}style")] == [STYLE]
        page = html_of(picture, beside)
        assert "<script" not in page
        assert page.count("</style>") == 2  # the page's and the picture's
        assert page.encode().count(b"<rect") == svg.count("<rect")
        assert all(line.isprintable() for line in picture_lines(picture))
        assert svg == render(picture.model_copy(deep=True), beside)


def test_the_picture_loads_nothing_and_may_do_without_styles() -> None:
    picture = flat_run(4)
    svg = render(picture, styled=False)
    assert "<style" not in svg
    assert "url(" not in render(picture)
    assert "http" not in render(picture).replace("http://www.w3.org/2000/svg", "")
    # Every colour of the light theme is an attribute, so that nothing is black on black without styles.
    for mark in ET.fromstring(svg).iter():
        if mark.tag in (f"{SVG}text", f"{SVG}rect", f"{SVG}path"):
            assert re.fullmatch(r"#[0-9A-Fa-f]{6}|none", mark.attrib["fill"])


def _luminance(colour: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_texts_and_outlines_can_be_told_from_the_paper() -> None:
    """WCAG 2.2: 4.5 for text, 3 for the outlines of what has a colour; in both themes."""
    from reshard.draw import marks

    for theme in (marks._LIGHT, marks._DARK):
        assert min(_contrast(theme["paper"], theme[ink]) for ink in ("ink", "muted")) >= 4.5
        assert _contrast(theme["paper"], theme["edge"]) >= 3
    assert min(_contrast(marks._DARK["paper"], colour) for colour in COLOURS) >= 3


# A target that is planned looks as it does when it is there.


CASES: list[tuple[Path, str, ConvertOptions]] = [
    (DATA / "zero2_tiny", "zero", {"dp": 1}),
    (DATA / "zero2_tiny", "zero", {"dp": 4}),
    (DATA / "zero2_tiny", "zero", {"dp": 3, "zero_stage": "3"}),
    (DATA / "zero2_tiny", "universal", {}),
    (DATA / "zero3_tiny", "zero", {"dp": 5}),
    (DATA / "zero3_tiny", "safetensors", {"dtype": "bf16", "max_shard_bytes": 300}),
    (DATA / "zero3_tiny", "torch", {}),
    (SHARED / "llama_fp32_z1_tp2pp2dp2" / "src", "zero", {"dp": 2, "tp": 2, "pp": 1}),
    (SHARED / "moe_bf16_z1_ep2dp4" / "src", "zero", {"dp": 2, "ep": 2}),
]


def _request(source: Path, target: Path, to: str, options: ConvertOptions) -> ConvertRequest:
    if not source.is_dir():
        pytest.skip("the real checkpoint is not here: it lies outside the project")
    return convert_request(str(source), str(target), to, options)


def _comparable(picture: LayoutPicture) -> Any:
    """The picture without the file that only a finished target has."""
    files = [f for f in picture.files if f.file != "reshard.json"]
    return picture.model_copy(update={"files": tuple(files)})


@pytest.mark.parametrize(
    ("source", "to", "options"), CASES, ids=lambda value: value.name if isinstance(value, Path) else str(value)
)
def test_the_picture_of_a_plan_is_that_of_the_result(
    source: Path, to: str, options: ConvertOptions, tmp_path: Path
) -> None:
    target = tmp_path / "run" / "global_step7"
    request = _request(source, target, to, options)
    engine = load_engine()
    pair = engine.planned_pictures(request)
    before, planned = pair.source, pair.target
    assert not (tmp_path / "run").exists(), "a picture writes nothing"
    (shown,) = before.tensors
    assert before == engine.picture(request.source, f"{shown.fqn}/{shown.state}")
    states = [t.state for t in planned.tensors]
    assert shown.state in states or states == ["weight"]
    engine.convert(request)
    name = f"{shown.fqn}/{states[0]}"
    assert _comparable(planned) == _comparable(engine.picture(SourceSpec(url=str(target)), name))


def test_a_named_tensor_is_shown_on_both_sides_under_the_states_that_each_has(tmp_path: Path) -> None:
    request = _request(DATA / "zero2_tiny", tmp_path / "out", "safetensors", {})
    pair = load_engine().planned_pictures(request, "embed.weight/exp_avg")
    assert [t.state for t in pair.source.tensors] == ["exp_avg"]
    assert [t.state for t in pair.target.tensors] == ["weight"]
    with pytest.raises(RequestError) as caught:
        load_engine().planned_pictures(request, "nothing")
    assert caught.value.code == "request.invalid"


def test_a_planned_file_is_its_literals_and_zeros(tmp_path: Path) -> None:
    conversion = Conversion.prepare(_request(DATA / "zero2_tiny", tmp_path / "out", "universal", {}))
    store = PlannedStore("/t", conversion.layout)
    load_engine().convert(conversion.request)
    for file in conversion.layout.files:
        info = store.stat(f"/t/{file.path}")
        assert info == ObjectInfo(f"/t/{file.path}", file.size_bytes, "planned")
        planned = read_bytes(store, info)
        real = (tmp_path / "out" / file.path).read_bytes()
        unknown = [(b.offset, b.length_bytes) for b in file.template.bodies]
        unknown += [(offset, 4) for offset, _ in file.template.crc_slots]
        known = bytearray(real)
        for offset, length in unknown:
            known[offset : offset + length] = bytes(length)
        assert planned == bytes(known), file.path
        # Any part of it is that part.
        for begin in range(0, file.size_bytes, 997):
            length = min(1_500, file.size_bytes - begin)
            assert read_bytes(store, info, begin, length) == planned[begin : begin + length]
