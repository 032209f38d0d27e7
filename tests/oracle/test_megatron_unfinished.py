"""Saves of Megatron that look like those of a script: refused, and not exported with their moments as weights."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from house.promises import command
from house.rank_cases import rank_case
from reshard.errors import SourceError


def _absent(path: Path) -> None:
    path.unlink()


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:7])


def _of_another(path: Path) -> None:
    path.write_text('{"note": "of another program"}')


@pytest.mark.parametrize("damage", [_absent, _cut_short, _of_another])
def test_a_save_that_did_not_end_is_incomplete(damage: Callable[[Path], None], place: Path, tmp_path: Path) -> None:
    """From 0.19 on there is no `common.pt`: 20 of 41 tensors of such a directory became weights, moments with them."""
    case = rank_case("v19_td_full_gpt_fp32_tp2dp2", place, folder="mcore")
    source = Path(shutil.copytree(case.folder / "ckpt", tmp_path / "run"))
    (description,) = source.rglob("metadata.json")
    damage(description)
    for ask in (lambda: reshard.inspect(source), lambda: reshard.convert(source, tmp_path / "out", to="safetensors")):
        with pytest.raises(SourceError, match=r"of a save of Megatron-core, and no valid metadata\.json") as refused:
            ask()
        assert refused.value.code == "checkpoint.incomplete"
        _, _, listing = (refused.value.fix or "").rpartition(": reshard ")
        status, out, _ = command(*shlex.split(listing))
        assert (status, "checkpoint.incomplete" in out) == (0, True)
    assert not (tmp_path / "out").exists()


def test_a_save_of_megatron_fsdp_is_refused_by_its_name(place: Path, tmp_path: Path) -> None:
    case = rank_case("llama_bf16_dp2", place, folder="mfsdp")
    (metadata,) = (case.folder / "ckpt").rglob(".metadata")
    with pytest.raises(SourceError, match="is a save of Megatron-FSDP") as refused:
        reshard.convert(metadata.parent, tmp_path / "out", to="safetensors")
    assert refused.value.code == "source.unsupported"
    assert not (tmp_path / "out").exists()
