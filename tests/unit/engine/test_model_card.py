"""Model cards of exported weights: huggingface_hub reads them, and their command makes the files again."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

import reshard
from house.expected import raised
from house.repository import ROOT
from reshard.cli.main import run
from reshard.errors import ReshardError

SOURCE = ROOT / "tests" / "data" / "zero2_tiny"
OPTIONS: dict[str, Any] = {"to": "safetensors", "dtype": "bf16", "max_shard_size": 300, "card": True}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model's directory: its configuration, which names a path, and the card of that other model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "_name_or_path": "runs/start"}))
    (folder / "README.md").write_text("of another model")
    return folder


def _convert(source: Path, target: Path, **options: Any) -> reshard.ConvertResult:
    return reshard.convert(source, target, progress=False, **{**OPTIONS, **options})


def test_the_hub_reads_it(files: Path, tmp_path: Path) -> None:
    """Its front matter survives a round trip; `ModelCard.validate` asks the hub, so the name alone is checked here."""
    result = _convert(SOURCE, tmp_path / "out", model_files=files, base_model="meta-llama/Llama-3.2-1B")
    path = tmp_path / "out" / "README.md"
    card = ModelCard.load(path)
    assert card.data.to_dict() == {
        "library_name": "transformers", "base_model": "meta-llama/Llama-3.2-1B", "tags": ["reshard"],
    }  # fmt: skip
    validate_repo_id(card.data.base_model)
    card.save(tmp_path / "again.md")
    assert (tmp_path / "again.md").read_bytes() == path.read_bytes()
    assert "Checkpoint: `global_step3` (`deepspeed-zero2`, saved by version `0.19.8`)" in card.text
    assert "Cast from float32 to bfloat16: 10 tensors" in card.text
    assert all(f"`{entry.path}`" in card.text for entry in result.not_carried)
    assert not any("base model" in w for w in result.warnings)
    assert reshard.verify(tmp_path / "out").ok


def test_its_command_makes_the_same_files(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere, and in other units: the card names no place of the machine."""
    _convert(SOURCE, tmp_path / "out", model_files=files, base_model="org/name", tag="global_step3", part_size=4096)
    text = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in text
    command = shlex.split(text.partition("```sh\n")[2].partition("\n```")[0])
    places = {"SRC": str(SOURCE), "DST": str(tmp_path / "elsewhere" / "again"), "DIR": str(files)}
    run([places.get(word, word) for word in command[1:]])
    capsys.readouterr()
    first, second = (
        {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "reshard.json"}
        for folder in (tmp_path / "out", tmp_path / "elsewhere" / "again")
    )
    assert first == second
    assert len(first) > 3
    layout = reshard.open_layout(SOURCE, model_files=files, base_model="org/name", tag="global_step3", **OPTIONS)
    with layout:
        assert layout.read("README.md") == text.encode()


def test_the_digest_is_that_of_the_source(tmp_path: Path) -> None:
    """A plan has the same one; a file of another content gets another."""
    shutil.copytree(SOURCE, tmp_path / "source")
    digest = reshard.open_layout(tmp_path / "source", **OPTIONS).source_digest
    _convert(tmp_path / "source", tmp_path / "one")
    assert f"`{digest}`" in (tmp_path / "one" / "README.md").read_text()
    for file in (tmp_path / "source").rglob("*model_states.pt"):
        file.touch()
    _convert(tmp_path / "source", tmp_path / "two")
    assert digest not in (tmp_path / "two" / "README.md").read_text()


def test_a_path_in_a_configuration_is_no_base_model(files: Path, tmp_path: Path) -> None:
    """`runs/start` may be a directory or a model of the hub: the card repeats it, and the user hears of it."""
    result = _convert(SOURCE, tmp_path / "out", model_files=files)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model is None
    assert "loaded from: `runs/start`" in card.text
    assert any("runs/start, which may be a path; --base-model ID" in w for w in result.warnings)


def test_texts_of_others_stay_texts(files: Path, tmp_path: Path) -> None:
    """A configuration cannot end its line, and so begins no front matter, heading or link."""
    wrong = {"model_type": "x`\n# [heading](http://a)", "_name_or_path": "a\n---\nlicense: mit\n---\n"}
    (files / "config.json").write_text(json.dumps(wrong))
    _convert(SOURCE, tmp_path / "out", model_files=files)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["reshard"]}
    assert "`a\\n---\\nlicense: mit\\n---\\n`" in card.text
    assert r"x\`\\n# \[heading\](http://a)" in card.text
    assert card.text.count("\n# ") == 1


def test_it_is_written_only_where_it_is_asked_for(files: Path, tmp_path: Path) -> None:
    _convert(SOURCE, tmp_path / "without", card=False, model_files=files)
    assert not (tmp_path / "without" / "README.md").exists()
    _convert(SOURCE, tmp_path / "alone", to="torch")
    assert ModelCard.load(tmp_path / "alone" / "README.md").data.to_dict() == {"tags": ["reshard"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "dcp", "card": True}, "--to dcp does not take --card; it is for --to safetensors, torch, peft"),
        ({"to": "torch", "base_model": "org/name"}, "--base-model is for a model card"),
        ({"to": "torch", "card": True, "base_model": "/data/model"}, "base_model"),
    ],
    ids=["no weights", "no card", "a path"],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    error = raised(ReshardError, reshard.convert, SOURCE, tmp_path / "out", progress=False, **options)
    assert (error.code, said in error.message) == ("request.invalid", True)
    assert not (tmp_path / "out").exists()
