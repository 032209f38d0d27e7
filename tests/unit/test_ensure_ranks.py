"""`reshard.ensure` for files of FSDP's ranks and full files: what fits is left alone, another world is written."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

import reshard
from house.expected import raised
from house.promises import command
from house.saves import make_save, same, wanted
from laws.item_files import Items, save_items
from laws.rank_files import FSDP1, World, save_accelerate, save_verl_run, small_model
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.ensuring.call import Outcome, ensured
from reshard.errors import RequestError, SourceError
from reshard.options import RunLayout, SourceSpec

TWO = World((2,), ("fsdp",))


pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of verl with an actor, a critic and the state of its data loader, and an older step."""
    return save_verl_run(tmp_path / "run")


def ranks_in(folder: str | Path) -> int:
    return load_engine().inspect(SourceSpec(url=str(folder))).world["dp"]


def test_the_same_number_of_ranks_is_left_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = run / "global_step_3" / "actor"
    for place in (run, run / "global_step_3", actor):
        assert reshard.ensure(place, dp=2) == str(place)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert reshard.ensure(actor) == str(actor)
    assert not list(run.rglob("*fsdp_ranks*"))


def test_one_model_is_written_once_for_another_number_of_ranks(run: Path) -> None:
    actor = run / "global_step_3" / "actor"
    first = ensured(actor, wanted(dp=3, environ={}))
    assert first.outcome is Outcome.CONVERTED
    assert first.wanted is not None
    assert (first.wanted.to, first.wanted.layout) == (TargetFormat.FSDP_RANKS, RunLayout(dp=3))
    assert Path(first.path).parent == actor / ".reshard"
    assert Path(first.path).name.startswith("actor-fsdp_ranks-dp3-")
    assert ranks_in(first.path) == 3
    assert same(actor, first.path)
    assert ensured(actor, wanted(environ={"WORLD_SIZE": "3"})).outcome is Outcome.EARLIER
    assert reshard.ensure(first.path, dp=3) == first.path
    assert ranks_in(actor) == 2, "the records inside do not count as files of ranks"


def test_a_step_of_verl_has_all_its_models_and_its_tracker(run: Path) -> None:
    """verl loads a step by `trainer.resume_from_path`, or the one that the tracker of a run names."""
    step = Path(reshard.ensure(run / "global_step_3", dp=3))
    assert step.name == "global_step_3"
    assert step.parent.parent == run / ".reshard"
    for model in ("actor", "critic"):
        assert ranks_in(step / model) == 3
        assert same(run / "global_step_3" / model, step / model)
    assert (step / "data.pt").read_bytes() == b"data loader"
    assert (step.parent / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert {p.name for p in step.parent.iterdir()} == {"global_step_3", "latest_checkpointed_iteration.txt"}
    assert reshard.ensure(run, dp=3) == str(step.parent)
    assert reshard.ensure(step.parent, dp=3) == str(step.parent)
    older = Path(reshard.ensure(run, dp=3, tag="global_step_2"))
    assert (older / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_a_result_without_its_tracker_is_not_returned(run: Path) -> None:
    result = Path(reshard.ensure(run, dp=3))
    (result / "latest_checkpointed_iteration.txt").unlink()
    assert ensured(run, wanted(dp=3, environ={})).outcome is Outcome.CONVERTED
    assert (result / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_the_tracker_of_skyrl_keeps_its_name(run: Path) -> None:
    (run / "latest_checkpointed_iteration.txt").rename(run / "latest_ckpt_global_step.txt")
    result = Path(reshard.ensure(run, dp=1))
    assert (result / "latest_ckpt_global_step.txt").read_text() == "3"
    assert not (result / "latest_checkpointed_iteration.txt").exists()


def test_files_of_accelerate_and_items_too(tmp_path: Path) -> None:
    save_accelerate(small_model(), tmp_path / "state", World((2,), None))
    save_items(small_model((Shard(0),)), tmp_path / "step-3", TWO, Items())
    for name in ("state", "step-3"):
        assert reshard.ensure(tmp_path / name, dp=2) == str(tmp_path / name)
        result = reshard.ensure(tmp_path / name, dp=3)
        assert ranks_in(result) == 3
        assert same(tmp_path / name, result)


def test_a_save_directory_of_deepspeed_stays_one(tmp_path: Path) -> None:
    """Other files may lie beside `latest`."""
    save = make_save(tmp_path / "save")
    for name in ("metadata.pkl", "optimizer_0.pt", "latest_checkpointed_iteration.txt"):
        (save / name).write_text("3")
    result = Path(reshard.ensure(save, dp=3))
    assert (result / "latest").read_text() == "global_step3"
    assert same(save / "global_step3", result / "global_step3")


def test_another_kind_of_run_gets_its_own_files(run: Path) -> None:
    actor = run / "global_step_3" / "actor"
    zero = Path(reshard.ensure(actor, to="zero", dp=3, zero_stage=2))
    assert (zero / "latest").read_text() == "actor"
    assert same(actor, zero)
    assert same(actor, reshard.ensure(actor, to="dcp"))
    error = raised(SourceError, reshard.ensure, run, to="dcp")
    assert (error.code, error.fix) == ("checkpoint.ambiguous", f"name one of them: {actor}")


def test_what_files_of_ranks_cannot_be_is_refused(run: Path, tmp_path: Path) -> None:
    actor = run / "global_step_3" / "actor"
    error = raised(RequestError, reshard.ensure, actor, dp=3, zero_stage=2)
    assert error.message.startswith("--zero-stage: the source has one file for each rank of FSDP")
    assert raised(RequestError, reshard.ensure, actor).code == "request.invalid", "nothing says how many ranks"
    save_accelerate(small_model(FSDP1), tmp_path / "fsdp1", World((2,), None))
    assert reshard.ensure(tmp_path / "fsdp1", dp=2) == str(tmp_path / "fsdp1")
    refused = raised(RequestError, reshard.ensure, tmp_path / "fsdp1", dp=3)
    assert "reshard convert" in refused.fix
    assert "--fsdp-version 2" in refused.fix
    (actor / "optim_world_size_2_rank_1.pt").unlink()
    assert raised(SourceError, reshard.ensure, actor, dp=3).code == "checkpoint.incomplete"


def _full(place: Path) -> Path:
    """A `checkpoint-3` of the Trainer under FULL_STATE_DICT."""
    place.mkdir()
    tensors = small_model()
    model = {n: whole for n, (whole, _) in tensors.parameters.items()}
    hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(model)}
    torch.save(model, place / "pytorch_model_fsdp.bin")
    torch.save({"state": {n: tensors.states_of(n) for n in model}, "param_groups": [hyper]}, place / "optimizer.bin")
    torch.save({"last_epoch": 3, "_last_lr": [0.1], "base_lrs": [0.1]}, place / "scheduler.pt")
    for rank in range(2):
        torch.save(
            {"python": (3, (1, 2), None), "cpu": torch.zeros(8, dtype=torch.uint8)}, place / f"rng_state_{rank}.pth"
        )
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log_history": []}))
    return place


def test_full_files_become_what_the_run_loads(tmp_path: Path) -> None:
    checkpoint = _full(tmp_path / "checkpoint-3")
    zero = Path(reshard.ensure(checkpoint, to="zero", dp=3, zero_stage=2))
    assert {p.name for p in zero.iterdir()} == {
        *("latest", "global_step3", "trainer_state.json", "scheduler.pt"),
        *(f"rng_state_{rank}.pth" for rank in range(3)),
    }
    assert (zero / "latest").read_text() == "global_step3"
    assert same(checkpoint, zero)
    shards = Path(reshard.ensure(checkpoint, to="dcp"))
    assert {"pytorch_model_fsdp_0", "optimizer_0", "trainer_state.json"} <= {p.name for p in shards.iterdir()}
    assert same(checkpoint, shards)
    error = raised(SourceError, reshard.ensure, checkpoint, dp=2)
    assert "for a run of DeepSpeed: --to zero" in error.fix


def test_one_file_is_no_missing_checkpoint(tmp_path: Path) -> None:
    """Where nothing is found, job scripts train from scratch; the command that the error names converts the file."""
    model = {n: whole for n, (whole, _) in small_model().parameters.items()}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(t) for t in model.values()])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    file = tmp_path / "run" / "last.ckpt"
    file.parent.mkdir()
    torch.save({"state_dict": model, "optimizer": optimizer.state_dict(), "epoch": 1}, file)
    asked: list[tuple[Path, dict[str, Any]]] = [(file, {"dp": 2}), (file, {"to": "dcp"}), (file.parent, {"dp": 2})]
    for place, options in asked:
        error = raised(SourceError, reshard.ensure, place, **options)
        assert (error.code, error.message) == (
            "source.unknown_kind",
            f"{file} is a file, and `ensure` takes directories",
        )
        line = error.fix.partition("FSDP2: ")[2].partition(";")[0]
        assert line == f"reshard convert {file} DST --to dcp --framework state-dict"
    assert command(*shlex.split(line.replace("DST", str(tmp_path / "dcp")))[1:])[0] == 0
    assert same(file, tmp_path / "dcp")
    zero = f"convert {file} {tmp_path / 'zero'} --to zero --dp 2 --zero-stage 2"
    assert command(*shlex.split(zero))[0] == 0


def test_the_command_prints_the_path(run: Path) -> None:
    code, said, told = command("ensure", str(run / "global_step_3"), "--dp", "3")
    assert (code, Path(said.strip()).name) == (0, "global_step_3"), told
    again = command(*shlex.split(f"ensure {run / 'global_step_3'} --dp 3 --json"))[1]
    assert json.loads(again)["outcome"] == "earlier"
