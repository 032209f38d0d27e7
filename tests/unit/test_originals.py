"""DeepSpeed's scripts as commands: names of files, directories that hold other things, flags that are not needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from house.conversions import convert
from house.repository import ROOT
from reshard import deepspeed
from reshard.cli.main import run
from reshard.engine import load_engine
from reshard.errors import ReshardError

SOURCE = ROOT / "tests" / "data" / "zero2_tiny"


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_directory_of_its_own_has_a_manifest(tmp_path: Path) -> None:
    assert run(["zero-to-fp32", str(SOURCE), str(tmp_path / "out")]) == 0
    assert _names(tmp_path / "out") == ["pytorch_model.bin", "reshard.json"]
    assert run(["zero-to-fp32", str(SOURCE), str(tmp_path / "out")]) == 0
    assert load_engine().verify(str(tmp_path / "out")).ok


def test_sharded_names_are_hugging_faces(tmp_path: Path) -> None:
    words = ["zero-to-fp32", str(SOURCE), str(tmp_path / "o"), "--safe_serialization", "--max_shard_size", "600"]
    assert run(words) == 0
    index = json.loads((tmp_path / "o" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)}
    assert len(files) > 1


def test_other_files_stay_and_the_same_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model-00001-of-00002.bin", "model_card.md"):
        (out / name).write_text("old")
    (out / "reshard.json").write_text("of something else")
    assert run(["zero-to-torch", str(SOURCE), str(out), "--dtype", "bfloat16", "--safe_serialization", "-d"]) == 0
    assert _names(out) == ["config.json", "model.safetensors", "model_card.md", "pytorch_model-00001-of-00002.bin"]
    assert (out / "config.json").read_text() == "old"
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16, torch.int64}
    assert "left as they were" not in capsys.readouterr().err
    assert run(["zero-to-fp32", str(SOURCE), str(out), "-t", "global_step3"]) == 0
    assert "left as they were: pytorch_model-00001-of-00002.bin" in capsys.readouterr().err


def test_the_checkpoint_s_own_directory_takes_weights_too(tmp_path: Path) -> None:
    """`python zero_to_fp32.py . .` is how many call it."""
    shutil.copytree(SOURCE, tmp_path / "run")
    before = _names(tmp_path / "run")
    assert run(["zero-to-fp32", str(tmp_path / "run"), str(tmp_path / "run")]) == 0
    assert _names(tmp_path / "run") == sorted([*before, "pytorch_model.bin"])
    tag = tmp_path / "run" / "global_step3"
    files = _names(tag)
    assert run(["zero-to-fp32", str(tmp_path / "run"), str(tag)]) == 2
    assert _names(tag) == files


def test_a_failure_leaves_a_directory_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "model.safetensors").mkdir(parents=True)
    (out / "keep").write_text("x")
    assert run(["zero-to-fp32", str(SOURCE), str(out), "--safe_serialization"]) == 5
    assert (out / "keep").read_text() == "x"
    assert (out / "model.safetensors").is_dir()
    assert run(["zero-to-fp32", str(tmp_path / "nothing"), str(out)]) == 3
    assert [n for n in _names(out) if not n.startswith(".")] == ["keep", "model.safetensors"]


def test_universal_says_what_it_does_not_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input_folder", str(SOURCE / "global_step3"), "--output_folder", str(tmp_path / "u")]
    unneeded = ["--num_extract_workers", "4", "--num_merge_workers", "2", "--keep_temp_folder", "--no_strict"]
    assert run(["ds-to-universal", *words, *unneeded, "--inject_missing_state"]) == 0
    said = capsys.readouterr().err
    assert all(f"note: {flag} is not needed: " in said for flag in (*unneeded[::2][:2], "--keep_temp_folder"))
    assert said.count("note: ") == 5
    target = str(tmp_path / "v")
    convert(SOURCE, target)
    for path in (p for p in (tmp_path / "v").rglob("*") if p.is_file() and p.name != "reshard.json"):
        assert (tmp_path / "u" / path.relative_to(target)).read_bytes() == path.read_bytes()
    assert (tmp_path / "latest_universal").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["zero-to-torch", "S", "O"], 2),
        (["zero-to-torch", "S", "O", "--dtype", "int8"], 2),
        (["zero-to-fp32", "S", "O", "--max_shard_size", "much"], 2),
        (["zero-to-fp32", "S", "O", "--tag", "global_step99"], 3),
        (["ds-to-universal", "--input_folder", "S"], 2),
    ],
)
def test_bad_arguments(words: list[str], code: int, tmp_path: Path) -> None:
    places = {"S": str(SOURCE), "O": str(tmp_path / "out")}
    assert run([places.get(w, w) for w in words]) == code
    assert _names(tmp_path) == []


@pytest.mark.parametrize("dtype", ["fp64", "int8", torch.int64, None])
def test_types_that_weights_cannot_have(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        deepspeed.convert_zero_checkpoint_to_state_dict(SOURCE, tmp_path / "out", dtype)
    assert caught.value.code == "request.invalid"
    assert "bfloat16" in caught.value.fix


@pytest.mark.parametrize("size", [None, 700, "1KB"])
def test_sizes_of_shards(size: Any, tmp_path: Path) -> None:
    deepspeed.convert_zero_checkpoint_to_fp32_state_dict(
        str(SOURCE), str(tmp_path / "out"), max_shard_size=size, safe_serialization=True
    )
    assert ("model.safetensors" in _names(tmp_path / "out")) == (size is None)
