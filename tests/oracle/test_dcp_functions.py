"""The stand-ins of `reshard.dcp` and `reshard merge-weights` give what the originals give."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import reshard.dcp
from reshard.errors import ReshardError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state() -> dict[str, Any]:
    """A nested state dict as a script saves it."""
    return {
        "model": {
            "up.weight": torch.arange(60_000.0).reshape(300, 200),
            "up.bias": torch.ones(7, dtype=torch.bfloat16),
        },
        "optimizer": {
            "state": {"up.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(300, 200)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": ["up.weight"]}],
        },
        "epochs": [1, 2, 3],
        "note": "hello",
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and values of a nested state dict by path."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, Any]", value).items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(i, dict) for i in cast("list[Any]", value)):
        for number, inner in enumerate(cast("list[Any]", value)):
            yield from leaves(inner, f"{path}.{number}")
    else:
        yield path, value


def same(a: Any, b: Any) -> bool:
    """True if two nested state dicts hold the same, bit for bit."""
    one, other = dict(leaves(a)), dict(leaves(b))
    return one.keys() == other.keys() and all(
        torch.equal(v, other[k]) and v.dtype == other[k].dtype if isinstance(v, torch.Tensor) else v == other[k]
        for k, v in one.items()
    )


def test_both_write_the_same_torch_file(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "theirs.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "neighbour.txt").write_text("stays")
    reshard.dcp.dcp_to_torch_save(tmp_path / "saved", tmp_path / "out" / "ours.pt")
    theirs, ours = (torch.load(p, weights_only=True) for p in (tmp_path / "theirs.pt", tmp_path / "out" / "ours.pt"))
    assert same(theirs, ours)
    assert ours["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"ours.pt", "neighbour.txt"}


def test_torch_reads_the_same_of_both_checkpoints(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "theirs")
    reshard.dcp.torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "ours")
    found: list[Any] = []
    for name in ("theirs", "ours"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        found.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert same(*found)
    assert same(found[0], torch.load(tmp_path / "state.pt", weights_only=True))


def test_merged_weights_are_those_of_the_original(tmp_path: Path) -> None:
    whole = tmp_path / "run"
    dcp.save({"model": state()["model"]}, checkpoint_id=str(whole / "pytorch_model_fsdp_0"), no_dist=True)
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(whole / "pytorch_model_fsdp_0"), str(tmp_path / "theirs"))
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "reshard.cli.main", "merge-weights", str(whole), str(tmp_path / "ours")],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert same(expected, load_file(tmp_path / "ours" / "model.safetensors"))
    reshard.dcp.merge_fsdp_weights(whole, tmp_path / "torch", safe_serialization=False, remove_checkpoint_dir=True)
    assert same(expected, torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True))
    assert not whole.exists()


def test_exit_codes_are_true(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reshard.cli.main", "merge-weights", str(tmp_path / "none"), str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "source.not_found" in done.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReshardError, match="object store"):
        reshard.dcp.merge_fsdp_weights("s3://bucket/run", tmp_path / "out", remove_checkpoint_dir=True)


def _absent(_name: str) -> None:
    """No package has this name."""


def test_compressed_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FileSystemWriter(tmp_path / "saved", _extensions=[ZStandard()])
    dcp.save(state(), storage_writer=writer, no_dist=True)
    reshard.convert(tmp_path / "saved", tmp_path / "out", to="torch_save", verify="full")
    assert same(state()["model"], torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"])
    assert reshard.verify(tmp_path / "out").ok
    monkeypatch.setattr("reshard_engine.formats.dcp_files.records.find_spec", _absent)
    with pytest.raises(ReshardError) as refused:
        reshard.inspect(tmp_path / "saved")
    assert refused.value.code == "source.unsupported"
    assert "stream.zstd/1" in refused.value.message
