"""Files that torch 2.1, 2.4 and 2.6 saved, against the tensors of the runs that saved them, bit for bit."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from oracle.whole_tensors import whole
from reshard.errors import SourceError

DATA = Path(__file__).parent.parent / "data" / "old_torch"
VERSIONS = ["2.1.2", "2.4.1", "2.6.0"]
WITHOUT_OPTIMIZER = ("2.1.2", "ranks")
"""torch 2.1 cannot pickle the optimizer's DTensors."""
KINDS = ("exp_avg", "exp_avg_sq", "step")


def _said(version: str) -> dict[str, Any]:
    return dict(json.loads((DATA / version / "expected.json").read_text()))


def _assert_same(found: dict[str, torch.Tensor], truth: dict[str, Any]) -> None:
    assert set(found) == set(truth)
    for name, values in truth.items():
        assert torch.equal(found[name], torch.tensor(values, dtype=torch.float32)), name


@pytest.mark.parametrize("kind", ["ranks", "dcp"])
@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_older_torches_hold_the_tensors_of_their_run(version: str, kind: str, tmp_path: Path) -> None:
    said = _said(version)
    assert said["torch"].startswith(version)
    reshard.convert(DATA / version / kind, tmp_path / "out", to="dcp", grammar="state-dict", progress=False)
    found = whole(tmp_path / "out")
    _assert_same(found["model"], said["tensors"]["fp32"])
    optimizer = (version, kind) != WITHOUT_OPTIMIZER
    assert optimizer == ("optimizer" in found)
    for state in KINDS if optimizer else ():
        _assert_same({n: s[state] for n, s in found["optimizer"]["state"].items()}, said["tensors"][state])


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_and_dcp_become_universal_with_the_masters_of_the_run(version: str, tmp_path: Path) -> None:
    for kind in [k for k in ("ranks", "dcp") if (version, k) != WITHOUT_OPTIMIZER]:
        reshard.convert(DATA / version / kind, tmp_path / kind, to="universal", progress=False)
        for name, values in _said(version)["tensors"]["fp32"].items():
            atom = torch.load(tmp_path / kind / "zero" / name / "fp32.pt", weights_only=True)
            assert torch.equal(atom["param"], torch.tensor(values)), name


def test_the_specification_of_an_old_tensor_is_held_against_it(tmp_path: Path) -> None:
    """torch 2.1 says shape and type in another tuple: a file that contradicts itself there is refused, too."""
    place = tmp_path / "ranks"
    place.mkdir()
    for file in (DATA / "2.1.2" / "ranks").iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    file = place / "model_world_size_2_rank_0.pt"
    with zipfile.ZipFile(file) as archive:
        records = {entry: archive.read(entry) for entry in archive.infolist()}
    # The `torch.Size` of the last specification is (2, 5), and (2, 4) from here on.
    before, after = b"K\x02K\x05\x86", b"K\x02K\x04\x86"
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in records.items():
            kept, found, rest = data.rpartition(before) if entry.filename.endswith("data.pkl") else (data, b"", b"")
            archive.writestr(entry.filename, kept + (after if found else b"") + rest)
    with pytest.raises(
        SourceError, match=r"head\.weight: the DTensor is float32 \(2, 5\), and its spec.* \(2, 4\)"
    ) as caught:
        reshard.convert(place, tmp_path / "out", to="safetensors", progress=False)
    assert caught.value.code == "checkpoint.malformed"
