"""Weights and their indexes that are damaged, mixed or hostile: refused with a code, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from house.conversions import convert, refused_conversion
from house.repository import DATA
from reshard.engine import load_engine
from reshard.options import SourceSpec

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def _code(source: Path, target: Path, to: str = "safetensors", **options: Any) -> str:
    return refused_conversion(convert, source, target, to, **options).code


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights of a real run, sharded in both containers."""
    folder = tmp_path_factory.mktemp("made")
    for to in ("safetensors", "torch"):
        convert(DATA / "zero2_tiny", folder / to, to, max_shard_bytes=600)
    return {"safetensors": folder / "safetensors", "torch": folder / "torch"}


@pytest.fixture
def source(made: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the safetensors shards."""
    return Path(shutil.copytree(made["safetensors"], tmp_path / "in"))


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _point_at(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["weight_map"].update(dict.fromkeys(list(index["weight_map"])[:1], name))


def _drop_first(index: dict[str, Any]) -> None:
    index["weight_map"].pop(next(iter(index["weight_map"])))


def _drop_last_file(index: dict[str, Any]) -> None:
    last = max(index["weight_map"].values())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != last}


def _swap_files(index: dict[str, Any]) -> None:
    files = sorted(set(index["weight_map"].values()))
    turned = dict(zip(files, [*files[1:], files[0]], strict=True))
    index["weight_map"] = {k: turned[v] for k, v in index["weight_map"].items()}


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path above": _point_at("../model-00001-of-00002.safetensors"),
    "an absolute path": _point_at("/etc/model.safetensors"),
    "a path below": _point_at("a/model.safetensors"),
    "a Windows path": _point_at("a\\model.safetensors"),
    "a URL": _point_at("https://host/model.safetensors"),
    "a hidden file": _point_at(".safetensors"),
    "another suffix": _point_at("pytorch_model.bin"),
    "a missing file": _point_at("model-00009-of-00009.safetensors"),
    "a name of 300 characters": _point_at("x" * 300 + ".safetensors"),
    "a control character": _point_at("a\n.safetensors"),
    "a number": lambda index: index["weight_map"].update(x=1),
    "a name that no shard holds": lambda index: index["weight_map"].update(x=next(iter(index["weight_map"].values()))),
    "a name left out": _drop_first,
    "a shard left out": _drop_last_file,
    "shards exchanged": _swap_files,
    "an empty map": lambda index: index.update(weight_map={}),
    "a list": lambda index: index.update(weight_map=[]),
    "no map": lambda index: index.pop("weight_map"),
}


@pytest.mark.parametrize("name", EDITS)
def test_indexes_that_are_not_what_the_shards_hold(name: str, source: Path, tmp_path: Path) -> None:
    _edit(source / INDEX, EDITS[name])
    assert _code(source, tmp_path / "out") == "checkpoint.bad_index"


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff", b"null", b'{"weight_map":{"a":"x","a":"x"}}', b"[" * 100_000]
)
def test_indexes_that_are_no_json(text: bytes, source: Path, tmp_path: Path) -> None:
    (source / INDEX).write_bytes(text)
    assert _code(source, tmp_path / "out") == "checkpoint.bad_index"


def test_an_index_of_a_gigabyte(source: Path, tmp_path: Path) -> None:
    with (source / INDEX).open("wb") as file:
        file.truncate(1 << 30)
    assert _code(source, tmp_path / "out") == "checkpoint.bad_index"


def test_a_wrong_total_is_said(source: Path, tmp_path: Path) -> None:
    # Nothing follows from it, and published weights have wrong ones: transformers reads them too.
    _edit(source / INDEX, lambda index: index["metadata"].update(total_size=1))
    assert any(
        "says 1 byte" in w and "1 bytes" not in w for w in convert(source, tmp_path / "out", "safetensors").warnings
    )


def test_shards_without_their_index(source: Path, tmp_path: Path) -> None:
    (source / INDEX).unlink()
    assert _code(source, tmp_path / "out") == "checkpoint.incomplete"
    for path in sorted(source.glob("*.safetensors"))[1:]:
        path.unlink()
    assert _code(source, tmp_path / "out") == "checkpoint.incomplete"


def test_two_sets_of_weights_in_one_directory(source: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, source / "model.safetensors")
    assert _code(source, tmp_path / "out") == "checkpoint.ambiguous"
    (source / "model.safetensors").rename(source / "other.safetensors")
    convert(source, tmp_path / "out", "safetensors")  # the usual name decides
    assert "w" not in load_file(tmp_path / "out" / "model.safetensors")
    (source / INDEX).rename(source / "third.safetensors.index.json")
    assert _code(source, tmp_path / "again") == "checkpoint.ambiguous"


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a//b", "nul\0", "zero\u202eevil", "x" * 600, ""])
@pytest.mark.parametrize("container", ["safetensors", "torch"])
def test_names_that_could_become_paths(name: str, container: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    if container == "torch":
        torch.save({name: torch.ones(1)}, tmp_path / "in" / "pytorch_model.bin")
    else:
        save_file({name: torch.ones(1)}, tmp_path / "in" / "model.safetensors")
    assert _code(tmp_path / "in", tmp_path / "out") == "name.invalid"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({"model": {"w": torch.ones(1)}}, "source.unsupported"),
        ({"w": torch.ones(1), "epoch": 3}, "source.unsupported"),
        ([torch.ones(1)], "checkpoint.malformed"),
        (torch.ones(1), "checkpoint.malformed"),
        ({}, "request.unsatisfiable"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "source.unsupported"),
    ],
)
def test_torch_files_that_hold_something_else(value: object, code: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    torch.save(value, tmp_path / "in" / "pytorch_model.bin")
    assert _code(tmp_path / "in", tmp_path / "out") == code


def test_parts_of_tensors_are_not_taken_for_tensors(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    metadata = {"format": "pt", "DCP_SHARDING_INFO": '{"w": {"saved_offsets": [1]}}'}
    save_file({"w": torch.ones(1)}, tmp_path / "in" / "shard-00000-model-00001-of-00001.safetensors", metadata=metadata)
    (tmp_path / "in" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "shard-00000-model-00001-of-00001.safetensors"}})
    )
    assert _code(tmp_path / "in", tmp_path / "out") == "checkpoint.coverage"


@pytest.mark.parametrize("container", ["safetensors", "torch"])
def test_a_truncated_shard(container: str, made: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(made[container], tmp_path / "in"))
    path = sorted(p for p in source.iterdir() if p.suffix in {".safetensors", ".bin"})[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert _code(source, tmp_path / "out") in {"safetensors.coverage", "zip.bad_directory"}


def test_what_weights_alone_cannot_become(source: Path, tmp_path: Path) -> None:
    assert _code(source, tmp_path / "out", "universal") == "request.unsatisfiable"
    assert _code(source, tmp_path / "out", exclude_frozen=True) == "request.unsatisfiable"


def test_a_training_state_beside_weights_comes_first(tmp_path: Path) -> None:
    # A trainer's checkpoint-N: weights at the top, the training state one level down.
    source = Path(shutil.copytree(DATA / "zero3_tiny", tmp_path / "in"))
    save_file({"w": torch.ones(1)}, source / "model.safetensors")
    assert load_engine().inspect(SourceSpec(url=str(source))).format == "deepspeed-zero3"
    (source / "latest").unlink()
    assert load_engine().inspect(SourceSpec(url=str(source))).format == "safetensors"


def test_metadata_that_are_not_carried_over_are_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    metadata = {"format": "pt", "license": "mit", "tied": "w"}
    save_file({"w": torch.ones(1)}, tmp_path / "in" / "model.safetensors", metadata=metadata)
    warnings = convert(tmp_path / "in", tmp_path / "out", "torch").warnings
    assert [w for w in warnings if "license" in w and "tied" not in w]
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert found["tied"].data_ptr() == found["w"].data_ptr()
