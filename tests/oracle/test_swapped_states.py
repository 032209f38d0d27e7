"""Optimizer states on NVMe: what real runs left in `offloaded_tensors`, what is missing there, and what is not ours.

That the states are the run's bit for bit, and that plain DeepSpeed resumes from what becomes of them, is shown with the
other runs of the zoo (`z3_nvme`, `z3_nvme_two_groups`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from house.conversions import refused_conversion
from oracle.cases import Case
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.launcher import WorldError
from oracle.outputs import convert
from reshard.engine import load_engine
from reshard.errors import SourceError
from reshard.options import SourceSpec

CASE = "z3_nvme"


@pytest.fixture
def run(trained: TrainedFactory, tmp_path: Path) -> Trained:
    """A copy of the run that may be spoilt."""
    original = trained(CASE)
    shutil.copytree(original.dir, tmp_path / "ckpt")
    return Trained(tmp_path / "ckpt", original.tag, (), (), original.case, original.world)


def _swapped(run: Trained) -> Path:
    return run.tag_dir / "offloaded_tensors"


def _refused(run: Trained, to: str = "universal") -> SourceError:
    error = refused_conversion(convert, run.dir, run.dir.parent / "out", to)
    assert isinstance(error, SourceError)
    return error


def _changed(path: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Rewrites a file of the run; what is in it then."""
    states: dict[str, Any] = torch.load(path, weights_only=False)
    change(states)
    torch.save(states, path)
    return states


def _files(run: Trained) -> list[str]:
    return sorted(p.relative_to(_swapped(run)).as_posix() for p in _swapped(run).rglob("*") if p.is_file())


def _atoms(run: Trained, name: str) -> dict[str, bytes]:
    out = run.dir.parent / name
    convert(run.dir, out, "universal")
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*.pt") if "zero" in p.parts}


def test_the_run_kept_some_states_there_and_some_not(run: Trained) -> None:
    """Else the tests of the zoo would show nothing: every state of a large sub-group, none of the smallest."""
    case: Case = run.case
    assert case.nvme
    names = _files(run)
    groups = {n.rpartition("-")[2].removeprefix("rank00/") for n in names if n.startswith("rank00/")}
    assert len(groups) >= 4
    held = _changed(next(run.tag_dir.glob("*_0_mp_rank_00_optim_states.pt")), lambda states: None)
    numels = [t.numel() for t in held["optimizer_state_dict"]["fp32_flat_groups"]]
    assert numels.count(0) == len(groups)
    assert any(numels), "a small sub-group is in the rank file"
    assert len(names) == run.world * 3 * len(groups)
    inspected = load_engine().inspect(SourceSpec(url=str(run.dir)))
    assert any("NVMe" in warning for warning in inspected.warnings)


@pytest.mark.parametrize("gone", ["file", "rank", "folder"])
def test_missing_files_are_named(run: Trained, gone: str) -> None:
    victim = {"file": _swapped(run) / "rank01" / "exp_avg-3_7.tensor.swp", "rank": _swapped(run) / "rank01"}
    path = victim.get(gone, _swapped(run))
    path.unlink() if path.is_file() else shutil.rmtree(path)
    error = _refused(run)
    assert error.code == "checkpoint.incomplete"
    assert ".tensor.swp" in str(error)
    assert "offloaded_tensors/" in (error.fix or "")
    if gone != "folder":
        assert "zero_pp_rank_1" in str(error)


def test_a_truncated_file_is_refused(run: Trained) -> None:
    path = _swapped(run) / "rank00" / "exp_avg_sq-0_2.tensor.swp"
    path.write_bytes(path.read_bytes()[:100])
    error = _refused(run)
    assert error.code == "checkpoint.incomplete"
    assert "100 bytes" in str(error)


def test_a_link_to_a_file_elsewhere_is_refused(run: Trained, tmp_path: Path) -> None:
    """Nothing in a swap file says what it is: any file would come out as a parameter."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)
    path = _swapped(run) / "rank00" / "0_2.tensor.swp"
    path.unlink()
    path.symlink_to(secret)
    assert _refused(run).code == "name.invalid"


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_masters_of_16_bits_are_refused(run: Trained, section: str) -> None:
    """Their rank files have empty tensors that say fp32, in place of what the swap files hold."""
    options = {"enabled": True, f"{section}_master_weights_and_grads": True}
    for path in run.tag_dir.glob("*_model_states.pt"):
        _changed(path, lambda states: states["ds_config"].update({section: options}))
    error = _refused(run)
    assert error.code == "source.unsupported"
    assert "16 bits" in str(error)


def test_an_empty_tensor_of_another_type_is_refused(run: Trained) -> None:
    """A script's default dtype is the type of what DeepSpeed leaves in a tensor's place."""

    def narrow(states: dict[str, Any]) -> None:
        for tensor in states["optimizer_state_dict"]["fp32_flat_groups"]:
            name = tensor.ds_id
            if not tensor.numel():
                tensor.data = torch.empty(0, dtype=torch.bfloat16)
                tensor.ds_id = name

    for path in run.tag_dir.glob("*_optim_states.pt"):
        _changed(path, narrow)
    error = _refused(run)
    assert error.code == "source.unsupported"
    assert "bfloat16" in str(error)


def test_frozen_weights_that_deepspeed_left_out_are_named(run: Trained) -> None:
    """What it saves of a frozen parameter on NVMe is the number 1 that stands for a buffer that is not there."""
    left = {"adapter.weight": torch.tensor(1).half()}
    for path in run.tag_dir.glob("*_model_states.pt"):
        _changed(path, lambda states: states["frozen_param_fragments"].update(left))
    error = _refused(run)
    assert error.code == "source.unsupported"
    assert "offload_param" in str(error)


def test_deepspeed_says_so_when_a_run_on_nvme_loads_the_result(run: Trained, oracle: Oracle, tmp_path: Path) -> None:
    """It looks for swap files, which are nothing of an ordinary checkpoint: nobody goes on without moments unawares."""
    convert(run.dir, tmp_path / "out" / run.tag, "zero", dp=2, sub_group_size=150)
    with pytest.raises(WorldError, match=r"FileNotFoundError.*offloaded_tensors"):
        oracle.resume_native(run.case, tmp_path / "out", tmp_path / "state", world=2)


def test_leftovers_and_padding_change_nothing(run: Trained) -> None:
    """An earlier run's longer file keeps its end, gradients stay where they are, and other folders are not ranks."""
    before = _atoms(run, "before")
    for path in _swapped(run).rglob("*.swp"):
        path.write_bytes(path.read_bytes() + b"\xff" * 4096)
    (_swapped(run) / "rank00" / "0_2_gradient_0_100.tensor.swp").write_bytes(b"\xff" * 64)
    (_swapped(run) / "rank00" / "40_41.tensor.swp").write_bytes(b"\xff" * 64)
    (_swapped(run) / "rank02").mkdir()
    (_swapped(run) / "rank02" / "0_2.tensor.swp").write_bytes(b"\xff" * 64)
    (_swapped(run) / "notes.txt").write_text("mine")
    assert _atoms(run, "after") == before


def test_under_model_parallelism_they_are_refused(run: Trained) -> None:
    """Folders are of global ranks; which model-parallel rank one is, nothing says."""
    for name in ("zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"):
        for rank in range(run.world):
            file = run.tag_dir / name.format(rank)
            shutil.copy(file, file.with_name(file.name.replace("mp_rank_00", "mp_rank_01")))
    error = _refused(run)
    assert error.code == "source.unsupported"
    assert "global ranks" in str(error)


def test_a_swap_folder_beside_a_run_that_did_not_swap_is_nothing(trained: TrainedFactory, tmp_path: Path) -> None:
    plain = trained("z3_plain")
    shutil.copytree(plain.dir, tmp_path / "ckpt")
    (tmp_path / "ckpt" / plain.tag / "offloaded_tensors").mkdir()
    convert(tmp_path / "ckpt", tmp_path / "out", "universal")
    assert (tmp_path / "out" / "zero").is_dir()
