"""Less usual runs: optimizers that keep nothing, or a number of each rank's own, and sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from transformers.optimization import Adafactor

import reshard
from house.tiers import rest_full
from oracle.cases import Case, Stage
from oracle.driver import Oracle, Trained
from oracle.launcher import WorldError
from oracle.models import batch, build_model
from oracle.outputs import convert, raw, read_safetensors
from oracle.truth import Truth, differences
from reshard.engine import load_engine
from reshard.errors import RequestError, SourceError
from reshard.options import SourceSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


def _inspected(run: Trained) -> tuple[str, ...]:
    return load_engine().inspect(SourceSpec(url=str(run.dir))).warnings


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sgd_without_momentum_is_not_taken_for_a_run_before_its_first_step(
    stage: Stage, oracle: Oracle, tmp_path: Path
) -> None:
    run = oracle.train(Case("plain_sgd", stage, "fp32", optimizer="plain_sgd"), tmp_path, steps_after=2)
    assert not [text for text in _inspected(run) if "first step" in text]
    if stage == 0:
        return  # without states, parameters of the optimizer have no names
    convert(run.dir, tmp_path / "out" / run.tag, "zero", dp=3, zero_stage=str(stage))
    resumed = oracle.resume_native(run.case, tmp_path / "out", tmp_path / "state", world=3, steps=2)
    assert resumed.state.kind("fp32") == run.truth.kind("fp32")
    assert resumed.losses == pytest.approx(run.losses_after, rel=1e-6)


RMS = "optimizer.RMS: one number for each rank's partition, which Adafactor computes anew before it reads it"


@pytest.mark.parametrize("stage", rest_full([1, 2, 3], 2, 3))
def test_adafactor_goes_on_without_the_mean_of_each_ranks_partition(
    stage: Stage, oracle: Oracle, tmp_path: Path
) -> None:
    """RMS is of a rank's flat partition: another on each rank, and no other partition has one. No step reads it."""
    case = Case("adafactor", stage, "fp32", optimizer="adafactor", unused=False)
    run = oracle.train(case, tmp_path, steps_after=3)
    for ranks in (3, 2):
        layout = dict[str, Any](dp=ranks, zero_stage=str(stage))
        result = convert(run.dir, tmp_path / f"{ranks}" / run.tag, "zero", **layout)
        assert [f"{entry.path}: {entry.reason}" for entry in result.not_carried] == [RMS]
        assert ("depend on the number of ranks" in " ".join(result.warnings)) == (ranks == 3)
        resumed = oracle.resume_native(case, tmp_path / f"{ranks}", tmp_path / f"state{ranks}", world=ranks)
        wrong = differences(run.truth, resumed.state)
        assert [text.partition(":")[0] for text in wrong] == ["scalar RMS"]
        if stage != 3:  # there the means are over padding too, which nothing initialises: the source's losses vary
            assert resumed.losses == (run.losses_after if ranks == 2 else pytest.approx(run.losses_after, rel=1e-3))


def test_adafactor_goes_on_from_a_universal_directory(oracle: Oracle, tmp_path: Path) -> None:
    case = Case("adafactor", 2, "fp32", optimizer="adafactor", unused=False)
    run = oracle.train(case, tmp_path, steps_after=3)
    result = convert(run.dir, tmp_path / "any" / run.tag, "universal")
    assert [f"{entry.path}: {entry.reason}" for entry in result.not_carried] == [RMS]
    resumed = oracle.resume_universal(case, tmp_path / "any", tmp_path / "state", world=2, restore_from=run.truth)
    assert resumed.losses == run.losses_after


def test_adafactor_in_a_distributed_checkpoint_says_what_loads_it(oracle: Oracle, tmp_path: Path) -> None:
    """On whole matrices Adafactor keeps means of rows and of columns: torch finds none of them."""
    run = oracle.train(Case("adafactor", 2, "fp32", optimizer="adafactor", unused=False), tmp_path, steps_after=0)
    result = reshard.convert(run.dir, tmp_path / "dcp", to="dcp", framework="state-dict")
    (warning,) = (text for text in result.warnings if "exp_avg_sq_row" in text)
    assert "go back to DeepSpeed with them" in warning
    lost = {entry.path: entry.reason for entry in result.not_carried}
    assert lost["optimizer.RMS"].startswith("one number for each rank's partition")
    name, shape = next((n, t.shape) for n, t in run.truth.kind("fp32").items() if len(t.shape) == 2)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Adafactor(module.parameters(), lr=1e-2, scale_parameter=True, relative_step=False)
    module.weight.grad = torch.ones(shape)
    optimizer.step()
    (held,) = optimizer.state_dict()["state"].values()
    state = {f"optimizer.state.{name}.{key}": value for key, value in held.items() if key != "RMS"}
    warned = pytest.warns(UserWarning, match="single process")
    with (
        warned,
        pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: .*exp_avg_sq_(row|col)"),
    ):
        dcp.load(state, checkpoint_id=tmp_path / "dcp")


def test_other_numbers_of_each_rank_are_refused_by_name(oracle: Oracle, tmp_path: Path) -> None:
    """Nothing shows that an optimizer computes them anew."""
    run = oracle.train(Case("adafactor", 2, "fp32", optimizer="adafactor"), tmp_path, steps_after=0)
    for path in run.tag_dir.glob("*_optim_states.pt"):
        states = torch.load(path, weights_only=False)
        (state,) = states["optimizer_state_dict"]["base_optimizer_state"]["state"].values()
        state["scale"] = state.pop("RMS")
        torch.save(states, path)
    layout = dict[str, Any](dp=3, zero_stage="2")
    for to, options in (("zero", layout), ("universal", {})):
        with pytest.raises(RequestError, match="'scale' is one number for each rank's partition") as caught:
            convert(run.dir, tmp_path / to, to, **options)
        assert caught.value.code == "request.unsatisfiable"
        assert not (tmp_path / to).exists()
    convert(run.dir, tmp_path / "weights", "safetensors")
    found = read_safetensors(tmp_path / "weights").tensors
    assert {name: found[name] for name in run.truth.kind("fp32")} == run.truth.kind("fp32")


EMPTY = {"empty", "no_rows"}
"""Parameters without elements: DeepSpeed owns them as it owns frozen ones (0.19.8, `is_optimized_parameter`)."""


def _script(case: Case, place: Path) -> tuple[Path, dict[str, torch.Tensor], list[float]]:
    """A file of a script without DeepSpeed, its state as `KIND/NAME`, and the losses of the next steps."""
    model = build_model(case, 7)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(named, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def step(number: int) -> float:
        loss = model(*batch(number, 0, 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return float(loss.detach())

    for number in (0, 1, 2):
        step(number)
    place.mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place / "run.pt")
    state = {f"fp32/{name}": p.detach().clone() for name, p in named}
    state |= {
        f"{kind}/{n}": optimizer.state[p][kind].clone() for n, p in named for kind in MOMENTS if p.grad is not None
    }
    state |= {f"frozen/{n}": p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    return place / "run.pt", state, [step(number) for number in (3, 4, 5)]


@pytest.mark.parametrize("target", rest_full(["0", "1", "2", "3", "bf16", "universal 2", "universal 3"], "0", "2", "3"))
@pytest.mark.parametrize("frozen", [True, False], ids=["some_frozen", "all_trained"])
def test_parameters_without_elements_are_filed_with_the_frozen_ones(
    target: str, frozen: bool, oracle: Oracle, tmp_path: Path
) -> None:
    """torch gives the one that a gradient reaches its states. DeepSpeed's optimizers have neither of them.

    At ZeRO-3 DeepSpeed loads such a model and cannot train it: it gathers parts of which there are none.
    """
    to, _, number = target.rpartition(" ")
    stage: Any = "bf16opt" if number == "bf16" else int(number)
    dtype = "bf16" if number == "bf16" else "fp32"
    case = Case("script", stage, dtype, empty_param=True, buffers=False, tied=False, frozen=frozen, unused=False)
    source, state, losses = _script(replace(case, dtype="fp32"), tmp_path / "source")
    assert state["exp_avg/empty"].shape == (0,)
    options: dict[str, Any] = {} if to else {"dp": 2, "zero_stage": number, "dtype": dtype}
    out = tmp_path / "out" / "global_step3"
    result = reshard.convert(source, out, to=to or "zero", buffers="none", progress=False, **options)
    assert not [text for text in result.warnings if "never updated" in text and stage != 0]
    assert [d.name for d in reshard.diff(source, out).differences] == ["counters and client state"]
    resume = oracle.resume_universal if to else oracle.resume_native
    steps = 0 if stage == 3 else len(losses)
    resumed = resume(case, out.parent, tmp_path / "state", world=2, tag=out.name, steps=steps)
    found = resumed.state.tensors
    assert {name: found[f"module/{name}"].shape for name in EMPTY} == {"empty": (0,), "no_rows": (0, 4)}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        if name not in EMPTY and not (to and kind == "frozen"):  # the universal loader leaves frozen weights alone
            kept = value.to(torch.bfloat16).view(torch.int16) if (kind, dtype) == ("frozen", "bf16") else value
            assert found[key].data == kept.numpy().tobytes(), key
    if dtype == "fp32" and not (to and frozen):
        assert resumed.losses == pytest.approx(losses[:steps], rel=1e-5)


def test_files_of_different_steps_are_still_found(oracle: Oracle, tmp_path: Path) -> None:
    run = oracle.train(Case("adafactor", 2, "fp32", optimizer="adafactor"), tmp_path, steps_after=0)
    path = run.tag_dir / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=False)
    (state,) = states["optimizer_state_dict"]["base_optimizer_state"]["state"].values()
    assert state["step"] == run.case.steps
    assert raw(state["RMS"]).dtype == "F32"
    state["step"] += 1
    torch.save(states, path)
    with pytest.raises(SourceError, match=r"rank 1 has .*step=4") as caught:
        _inspected(run)
    assert caught.value.code == "checkpoint.mixed"


@pytest.mark.parametrize("stage", [2, 3])
def test_sequence_parallel_runs_are_read_and_resumed(stage: Stage, oracle: Oracle, tmp_path: Path) -> None:
    """Ranks of one sequence share ZeRO's partitions; DeepSpeed writes them down as tensor-parallel ones."""
    case, tag = Case("sequence", stage, "fp32"), "step1"
    where = {"save_dir": str(tmp_path / "ckpt"), "truth_dir": str(tmp_path), "tag": tag}
    shared = oracle.worlds.run("oracle.sequence:train", world=4, case=case.to_json(), **where)
    assert shared == [4] * 4
    assert load_engine().inspect(SourceSpec(url=where["save_dir"])).world == {"dp": 4, "tp": 1, "pp": 1}
    layout = dict[str, Any](dp=2, zero_stage=str(stage))
    convert(tmp_path / "ckpt", tmp_path / "out" / tag, "zero", **layout)
    resumed = oracle.resume_native(case, tmp_path / "out", tmp_path / "state", world=2, steps=1)
    assert differences(Truth(tmp_path / "truth.safetensors", tmp_path / "truth.json"), resumed.state) == []


def test_a_group_that_is_empty_on_a_rank_is_warned_of(oracle: Oracle, tmp_path: Path) -> None:
    """DeepSpeed's universal loader fails on that rank, in the smallest world that the warning names."""
    case = Case("empty_rank", 2, "fp32", two_groups=True, tiny=True, unused=False)
    run = oracle.train(case, tmp_path / "run", steps_after=0)
    result = convert(run.dir, tmp_path / "out" / "universal", "universal")
    (warning,) = (text for text in result.warnings if "holds nothing" in text)
    assert "group 1 (26 elements) on 6:" in warning
    assert oracle.resume_universal(case, tmp_path / "out", tmp_path / "four", world=4, steps=0)
    with pytest.raises(WorldError, match="list index out of range"):
        oracle.resume_universal(case, tmp_path / "out", tmp_path / "six", world=6, steps=0)
