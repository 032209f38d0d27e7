"""The picture of a layout: its regions tile the tensor, it is well-formed, and names in it stay text."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from house.repository import ROOT
from reshard.cli.main import app
from reshard.cli.picture import html_of, picture_lines, svg_of
from reshard.errors import RequestError
from reshard.local import load_engine
from reshard.models import SourceSpec
from reshard.pictures import FileShare, LayoutPicture, Region, TensorPicture

DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "checkpoints"
SVG = "{http://www.w3.org/2000/svg}"
SOURCES = [DATA / "zero2_tiny", DATA / "zero3_tiny"]
REAL = ["llama_fp32_z1_tp2pp2dp2", "gpt_bf16_z2_nopipe_tp2dp2", "moe_bf16_z1_ep2dp4", "llama_bf16_z3_nopipe_tp2dp2"]


def _tiles(tensor: TensorPicture) -> bool:
    rows = tensor.shape[0] if tensor.shape else 1
    columns = max((r.columns[1] for r in tensor.regions), default=1)
    painted = np.zeros((rows, columns), dtype=int)
    for region in tensor.regions:
        painted[slice(*region.rows), slice(*region.columns)] += 1
    return bool((painted == 1).all()) and not tensor.left_out


def _check(source: Path) -> int:
    engine, spec = load_engine(), SourceSpec(url=str(source))
    count = 0
    for info in engine.inspect(spec).tensors:
        if info.shared_with is not None or 0 in info.shape:
            continue
        picture = engine.picture(spec, info.fqn)
        assert picture.tensors
        for tensor in picture.tensors:
            assert _tiles(tensor), (tensor.fqn, tensor.state)
            assert all(region.file in {share.file for share in picture.files} for region in tensor.regions)
            count += 1
        ET.fromstring(svg_of(picture))
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


def test_shares_of_files_add_up() -> None:
    picture = load_engine().picture(SourceSpec(url=str(DATA / "zero2_tiny")))
    assert len(picture.files) == 3
    assert all(sum(f.bytes_by_state.values()) <= f.size_bytes for f in picture.files)
    lines = list(picture_lines(picture))
    assert [line.partition("  ")[0] for line in lines] == ["dp 0 tp 0 pp 0", "dp 1 tp 0 pp 0", "tp 0 pp 0"]


def test_names_stay_text() -> None:
    evil = "</title><script>alert('x')</script>\"&"
    region = Region(file=evil, rank=evil, rows=(0, 1), columns=(0, 1))
    tensor = TensorPicture(fqn=evil, state=evil, dtype="float32", shape=(1, 1), cut=evil, regions=(region,))
    share = FileShare(file=evil, rank=evil, size_bytes=3, bytes_by_state={evil: 3})
    for tensors in ((tensor,), ()):
        picture = LayoutPicture(url=evil, format=evil, world={evil: 1}, files=(share,), tensors=tensors)
        root = ET.fromstring(svg_of(picture))
        assert {e.tag for e in root.iter()} <= {f"{SVG}{tag}" for tag in ("svg", "text", "rect", "title")}
        assert "<script" not in html_of(picture)
        assert svg_of(picture) == svg_of(picture)


def test_the_command_draws(tmp_path: Path) -> None:
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    command = ["inspect", str(DATA / "zero3_tiny"), "--tensor", "embed.weight", "--svg", str(svg), "--html", str(html)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert "embed.weight/fp32 float32" in done.stdout
    ET.parse(svg)
    assert html.read_text().startswith("<!doctype html>")
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
        assert real["zero --tp"].detail.startswith("2 (")  # two key-value heads
        assert real["zero --pp"].possible
