"""Torch files written anew: the same values, storages as long as their tensors, other files byte for byte."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as st

from house.expected import raised
from reshard.cli.main import run
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import SlimResult
from reshard.options import SourceSpec


def _slim(source: Path, target: Path, **options: Any) -> SlimResult:
    return load_engine().slim(SourceSpec(url=str(source)), str(target), **options)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def _stored(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(i.file_size for i in archive.infolist() if "/data/" in i.filename)


def _bloated() -> dict[str, Any]:
    flat = torch.arange(100_000, dtype=torch.float32)
    half = flat[:5000].to(torch.bfloat16)
    weight = flat[10:40].view(5, 6)
    return {
        "module": OrderedDict(a=weight, tied=weight, b=half[7:11], t=weight.t(), row=weight[2], scalar=flat[99]),
        "again": flat[10:40].view(5, 6),
        "step": 7,
        "names": ["x", ("y", None)],
        "empty": torch.empty(0, 3),
    }


def _same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            _same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _same(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_loses_what_no_tensor_uses(legacy: bool, tmp_path: Path) -> None:
    torch.save(_bloated(), tmp_path / "big.pt", _use_new_zipfile_serialization=not legacy)
    done = _slim(tmp_path / "big.pt", tmp_path / "small.pt")
    found = _load(tmp_path / "small.pt")
    _same(found, _bloated())
    assert found["module"]["a"].data_ptr() == found["module"]["tied"].data_ptr() == found["again"].data_ptr()
    assert found["module"]["t"].data_ptr() != found["module"]["a"].data_ptr()
    # weight, bf16 part, transposed, row, scalar
    assert _stored(tmp_path / "small.pt") == 120 + 8 + 120 + 24 + 4
    assert done.source_bytes == (tmp_path / "big.pt").stat().st_size > 400_000
    assert done.target_bytes == (tmp_path / "small.pt").stat().st_size < 10_000
    assert (done.files, done.target) == (1, str(tmp_path / "small.pt"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.pt", "small.pt"]


_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_views_of_one_buffer_come_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("slim")
    values: dict[str, torch.Tensor] = {}
    for number in range(data.draw(st.integers(1, 3))):
        flat = torch.arange(200).to(data.draw(_DTYPES))
        for which in range(data.draw(st.integers(1, 4))):
            shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
            stride = [data.draw(st.integers(0, 9)) for _ in shape]
            view = flat.as_strided(shape, stride, data.draw(st.integers(0, 90)))
            values[f"{number}.{which}"] = view
    torch.save(values, folder / "a.pt")
    _slim(folder / "a.pt", folder / "b.pt")
    found = _load(folder / "b.pt")
    _same(found, {k: v.clone(memory_format=torch.contiguous_format) for k, v in values.items()})
    assert all(t.is_contiguous() for t in found.values())


def test_a_directory_keeps_its_other_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "global_step3").mkdir(parents=True)
    torch.save(_bloated(), source / "global_step3" / "mp_rank_00_model_states.pt")
    torch.save({"lr": 0.1}, source / "scheduler.bin")
    np.savez(source / "rng.npz", a=np.arange(3))
    (source / "latest").write_text("global_step3")
    (source / "empty.json").write_bytes(b"")
    done = _slim(source, tmp_path / "target")
    assert done.files == 5
    for name in ("latest", "empty.json", "rng.npz"):
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()
    _same(_load(tmp_path / "target" / "global_step3" / "mp_rank_00_model_states.pt"), _bloated())
    assert _load(tmp_path / "target" / "scheduler.bin") == {"lr": 0.1}
    assert load_engine().verify(str(tmp_path / "target")).ok
    assert _slim(source, tmp_path / "target").already_done


class Foreign:
    """A class of the user's."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1000)[:2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_is_copied(tmp_path: Path) -> None:
    """Its files are sequences of archives without anything to spare; they were called damaged."""
    flat = torch.arange(100_000, dtype=torch.float32)
    dcp.save({"model": {"a": flat[10:40], "b": flat}}, checkpoint_id=tmp_path / "run", no_dist=True)
    _slim(tmp_path / "run", tmp_path / "slim")
    files = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert len(files) == 2
    assert all((tmp_path / "slim" / name).read_bytes() == (tmp_path / "run" / name).read_bytes() for name in files)


def test_objects_of_foreign_classes_stay_what_they_are(tmp_path: Path) -> None:
    torch.save({"args": Foreign(), "w": torch.zeros(1000)[:3]}, tmp_path / "a.pt")
    _slim(tmp_path / "a.pt", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=False)
    assert torch.equal(found["args"].tensor, torch.ones(2))
    assert _stored(tmp_path / "b.pt") == 8 + 12
    # A conversion, which others may have asked for, writes them only if it is told to.
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.pt").rename(tmp_path / "folder" / "a.pt")
    words = ["convert", str(tmp_path / "folder"), str(tmp_path / "out"), "--to", "slim"]
    assert run(words) == 3
    assert not (tmp_path / "out").exists()
    assert run([*words, "--opaque", "keep"]) == 0


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    torch.save(_bloated(), tmp_path / "a.pt")
    (tmp_path / "b.pt").write_text("mine")
    assert raised(ReshardError, _slim, tmp_path / "a.pt", tmp_path / "b.pt").code == "request.target_exists"
    assert (tmp_path / "b.pt").read_text() == "mine"
    _slim(tmp_path / "a.pt", tmp_path / "b.pt", overwrite=True)
    _same(_load(tmp_path / "b.pt"), _bloated())
    (tmp_path / "into").mkdir()
    assert _slim(tmp_path / "a.pt", tmp_path / "into").target == str(tmp_path / "into" / "a.pt")
    for place in (tmp_path / "a.pt", tmp_path):
        assert raised(ReshardError, _slim, tmp_path / "a.pt", place, overwrite=True).code == "request.overlap"


def test_a_damaged_file_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    torch.save(_bloated(), tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: len(data) // 2])
    assert raised(ReshardError, _slim, tmp_path / "a.pt", tmp_path / "b.pt").code.startswith(("zip.", "checkpoint."))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt"]
    assert raised(ReshardError, _slim, tmp_path / "none.pt", tmp_path / "b.pt").code == "source.not_found"


def test_options_that_change_tensors_are_refused(tmp_path: Path) -> None:
    torch.save(_bloated(), tmp_path / "a.pt")
    for options in (["--dtype", "bf16"], ["--tag", "x"], ["--exclude-frozen"]):
        assert run(["convert", str(tmp_path), str(tmp_path.parent / "o"), "--to", "slim", *options]) == 2


def test_the_command_says_what_it_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.zeros(1 << 18)[:4]}, tmp_path / "a.pt")
    assert run(["slim", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'b.pt'}\n"
    assert "1 MiB -> " in err
    assert "saved (99" in err
    assert run(["slim", str(tmp_path / "a.pt"), str(tmp_path / "c.pt"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["source_bytes"] - said["target_bytes"] > 1 << 20
