"""Configuration and tokenizer beside weights: which files go along, and what must not come in through them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from house.conversions import convert
from house.expected import raised
from house.repository import ROOT
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertResult

SOURCE = ROOT / "tests" / "data" / "zero2_tiny"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """What `save_pretrained` leaves, and things that are none of it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "torch_dtype": "float16", "n": "é"}))
    for name in ("tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja", "merges.txt"):
        (folder / name).write_bytes(name.encode() + b"\0\xff")
    for name in ("modeling_x.py", "model.safetensors", "training_args.bin", "README.md", "tokenizer.json.bak"):
        (folder / name).write_text("not carried")
    return folder


def _convert(files: Path | str, target: Path, to: str = "safetensors", **more: Any) -> ConvertResult:
    return convert(SOURCE, target, to, model_files=str(files), **more)


@pytest.mark.parametrize("to", [TargetFormat.SAFETENSORS, TargetFormat.TORCH])
@pytest.mark.parametrize(("dtype", "said"), [(None, "float32"), ("bf16", "bfloat16")])
def test_they_lie_beside_the_weights(
    to: TargetFormat, dtype: str | None, said: str, files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    _convert(files, out, to, dtype=dtype)
    carried = {"tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja", "merges.txt"}
    weights = "model.safetensors" if to is TargetFormat.SAFETENSORS else "pytorch_model.bin"
    assert {p.name for p in out.iterdir()} == carried | {"config.json", weights, "reshard.json"}
    assert all((out / name).read_bytes() == (files / name).read_bytes() for name in carried)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x", "torch_dtype": said, "n": "é"}
    assert load_engine().verify(str(out)).ok
    assert _convert(files, out, to, dtype=dtype).already_done


def test_the_type_is_that_of_the_weights_as_stored(files: Path, tmp_path: Path) -> None:
    """Without a wanted type a source without masters keeps its own, which the configuration may not know."""
    convert(SOURCE, tmp_path / "bf16", "torch", dtype="bf16")
    out = tmp_path / "out"
    convert(tmp_path / "bf16", out, "safetensors", model_files=str(files))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_other_files_are_another_conversion(files: Path, tmp_path: Path) -> None:
    _convert(files, tmp_path / "out")
    (files / "tokenizer.json").write_text("{}")
    assert raised(ReshardError, _convert, files, tmp_path / "out").code == "request.target_exists"


def test_a_configuration_without_a_type_stays_as_it_is(files: Path, tmp_path: Path) -> None:
    (files / "config.json").write_text(' {"a" :1}')
    _convert(files, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == ' {"a" :1}'


@pytest.mark.parametrize(
    ("text", "code"),
    [("[1]", "checkpoint.malformed"), ("{", "checkpoint.malformed"), ("[" * 100_000, "checkpoint.malformed")],
    ids=["a list", "torn", "deep"],
)
def test_a_configuration_that_is_none_is_refused(text: str, code: str, files: Path, tmp_path: Path) -> None:
    (files / "config.json").write_text(text)
    assert raised(ReshardError, _convert, files, tmp_path / "out").code == code
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    error = raised(ReshardError, _convert, SOURCE, tmp_path / "out")
    assert error.code == "source.not_found"
    assert "config.json" in error.message


def test_targets_that_are_no_weights_have_none(files: Path, tmp_path: Path) -> None:
    assert raised(ReshardError, _convert, files, tmp_path / "out", TargetFormat.UNIVERSAL).code == "request.invalid"


def test_what_is_too_large_is_refused_unread(files: Path, tmp_path: Path) -> None:
    with (files / "vocab.json").open("wb") as file:
        file.truncate(200 << 20)
    assert raised(ReshardError, _convert, files, tmp_path / "out").code == "checkpoint.too_large"


def test_a_link_carries_nothing_in_from_elsewhere(files: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (files / "vocab.txt").symlink_to(tmp_path / "secret")
    error = raised(ReshardError, _convert, files, tmp_path / "out")
    assert error.code == "name.invalid"
    assert "key" not in error.message


def test_the_cache_of_hugging_face_is_made_of_links(files: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (files / name).rename(blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    _convert(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (blobs / "tokenizer.json").read_bytes()
