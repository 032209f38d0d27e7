"""Distributed checkpoints with two of something: what is read, what the user chooses, and what is carried.

Sources are trained and saved by torch, targets are loaded by torch or DeepSpeed; the next losses are those of the
uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

import reshard
from house.shared import made_once
from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_cases import EMA_LAYOUTS, RUNS, FsdpRun, Mesh
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle, Saved, problems, zero_run
from oracle.dcp_reading import universal_problems
from oracle.outputs import read_safetensors
from oracle.truth import Resumed, Truth
from reshard.errors import SourceError

TAG = "global_step3"
PLAIN = replace(RUNS["fsdp2_plain"], mesh=Mesh(2))
WITH_SCHEDULER = replace(PLAIN, name="fsdp2_plain_rates", scheduler=True)
SeveralFactory = Callable[..., Saved]


@pytest.fixture(scope="session")
def several(fsdp: FsdpOracle, tmp_path_factory: pytest.TempPathFactory) -> SeveralFactory:
    """``several(kind, run)``: one of the runs of ``oracle.dcp_several``, trained once per test run."""

    def train(kind: str, run: FsdpRun = PLAIN) -> Saved:
        def save(folder: Path) -> list[float]:
            got = rank(fsdp, kind, run, folder=str(folder))
            return list(got["losses_after"])

        folder, losses = made_once(tmp_path_factory, f"several-{kind}-{run.name}", save)
        return Saved("torch", run, folder, tuple(losses))

    return train


def rank(fsdp: FsdpOracle, function: str, run: FsdpRun, **kwargs: Any) -> Any:
    """What a function of ``oracle.dcp_several`` returns on the first rank."""
    name = f"oracle.dcp_several:{function}"
    return fsdp.worlds.run(name, world=run.mesh.world, timeout_s=TIMEOUT_S, run=run.to_json(), **kwargs)[0]


def refusal(source: Path, target: Path, to: str, **options: Any) -> SourceError:
    """Why a conversion is refused; nothing is written."""
    with pytest.raises(SourceError) as caught:
        reshard.convert(source, target, to=to, **options)
    assert not target.exists()
    return caught.value


def left_out(result: Any) -> dict[str, str]:
    return {entry.path: entry.reason for entry in result.not_carried}


def resumed_in(folder: Path, losses: Any) -> Resumed:
    return Resumed(Truth(folder / "resumed.safetensors", folder / "resumed.json"), tuple(losses))


def assert_goes_on(source: Saved, resumed: Resumed, *, across: bool = False) -> None:
    assert problems(source.truth, resumed.state, across=across) == []
    assert agree(resumed.losses, source.losses_after, significant=6)
    assert len(set(source.losses_after)) == len(source.losses_after)


# Moving averages.


@pytest.mark.parametrize("name", EMA_LAYOUTS)
def test_a_moving_average_is_not_taken_for_the_model(name: str, several: SeveralFactory, tmp_path: Path) -> None:
    source, layout = several("ema", WITH_SCHEDULER), EMA_LAYOUTS[name]
    place = source.path(name)
    order = {"param_order": "model"} if layout.numbered else {}
    for to, options in (("safetensors", {}), ("zero", {"dp": 2, "zero_stage": 2})):
        error = refusal(place, tmp_path / "no", to, **options, **order)
        assert error.code == "checkpoint.ambiguous"
        assert f"--model-key {layout.model}" in error.fix
        assert f"--model-key {layout.average}" in error.fix
    average = load_file(source.folder / "ema.safetensors")
    masters = {
        n.removeprefix("fp32/"): t for n, t in load_file(source.folder / "truth.safetensors").items() if "fp32/" in n
    }
    for key, wanted, other in ((layout.model, masters, layout.average), (layout.average, average, layout.model)):
        target = tmp_path / f"weights {key}"
        result = reshard.convert(place, target, to="safetensors", model_key=key)
        found = load_file(target / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(found[n].equal(wanted[n]) for n in wanted)
        assert other in left_out(result)
        assert reshard.inspect(place, model_key=key).parameters == len(wanted)
    assert not reshard.diff(place, place, model_key_a=layout.model, model_key_b=layout.average, weights_only=True).equal


@pytest.mark.parametrize("name", EMA_LAYOUTS)
def test_the_chosen_model_goes_to_deepspeed(name: str, several: SeveralFactory, tmp_path: Path) -> None:
    source, layout = several("ema", WITH_SCHEDULER), EMA_LAYOUTS[name]
    order = {"param_order": "model"} if layout.numbered else {}
    target = tmp_path / "universal"
    result = reshard.convert(source.path(name), target, to="universal", model_key=layout.model, **order)
    assert universal_problems(target, source.truth, scheduler=True) == []
    assert left_out(result).keys() == {layout.average}


@pytest.mark.parametrize("name", rest_full(tuple(EMA_LAYOUTS), "app", "raw"))
def test_deepspeed_goes_on_with_the_chosen_model(
    name: str, several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source, layout = several("ema", WITH_SCHEDULER), EMA_LAYOUTS[name]
    options: dict[str, Any] = {"param_order": "model"} if layout.numbered else {}
    target = tmp_path / "zero" / TAG
    reshard.convert(source.path(name), target, to="zero", dp=3, zero_stage=2, model_key=layout.model, **options)
    resumed = fsdp.resume("zero", zero_run(2, source.run, 3), target.parent, tmp_path / "out")
    assert_goes_on(source, resumed, across=True)


def test_every_layout_comes_out_whole(several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """Without a choice: what a target can hold is carried, whichever model the user means."""
    source = several("ema", WITH_SCHEDULER)
    names = [n for n, layout in EMA_LAYOUTS.items() if not layout.numbered]
    for name in names:
        assert reshard.convert(source.path(name), tmp_path / name, to="dcp").not_carried == ()
    run = source.run.on(Mesh(3))
    results = rank(fsdp, "resume_ema", run, layouts=names, folder=str(tmp_path), out=str(tmp_path / "out"))
    average = load_file(source.folder / "ema.safetensors")
    for name, result in zip(names, results, strict=True):
        assert_goes_on(source, resumed_in(tmp_path / "out" / name, result["losses"]))
        found = load_file(tmp_path / "out" / name / "ema.safetensors")
        assert all(found[n].equal(average[n]) for n in average)


# Two models with their optimizers.


def test_two_models_come_out_with_their_optimizers(several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    source = several("pair", WITH_SCHEDULER)
    result = reshard.convert(source.path("pair"), tmp_path / "pair", to="dcp")
    assert result.not_carried == ()
    got = rank(fsdp, "resume_pair", source.run.on(Mesh(3)), path=str(tmp_path / "pair"), out=str(tmp_path / "out"))
    assert_goes_on(source, resumed_in(tmp_path / "out", got["losses"]))
    second = [Truth(f / "second.safetensors", f / "second.json") for f in (source.folder, tmp_path / "out")]
    assert problems(second[0], second[1]) == []


def test_deepspeed_takes_one_of_two_models_by_choice(several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    source = several("pair", WITH_SCHEDULER)
    error = refusal(source.path("pair"), tmp_path / "no", "zero", dp=2, zero_stage=2)
    assert (error.code, "--model-key gen" in error.fix, "--model-key disc" in error.fix) == (
        "checkpoint.ambiguous", True, True,
    )  # fmt: skip
    target = tmp_path / "zero" / TAG
    result = reshard.convert(source.path("pair"), target, to="zero", dp=3, zero_stage=2, model_key="gen")
    # Its optimizer is known by names and shapes, its scheduler by the learning rates.
    assert left_out(result).keys() == {"disc", "opt_d", "sched_d"}
    resumed = fsdp.resume("zero", zero_run(2, source.run, 3), target.parent, tmp_path / "out")
    assert problems(source.truth, resumed.state, across=True) == []
    assert agree(resumed.losses, source.losses_after[:3], significant=6)


def test_two_models_of_accelerate(several: SeveralFactory, tmp_path: Path) -> None:
    """Each of them goes to any target with its own optimizer and scheduler, and both go to Accelerate."""
    source = several("accelerate", replace(WITH_SCHEDULER, parallel="fsdp1"))
    place = source.path("accelerate")
    assert refusal(place, tmp_path / "no", "universal").code == "checkpoint.ambiguous"
    second = Truth(source.folder / "second.safetensors", source.folder / "second.json")
    for number, truth in enumerate((source.truth, second)):
        key, target = f"pytorch_model_fsdp_{number}", tmp_path / f"universal {number}"
        result = reshard.convert(place, target, to="universal", model_key=key)
        assert universal_problems(target, truth) == []
        other = f"{1 - number}"
        assert {f"pytorch_model_fsdp_{other}.model", f"optimizer_{other}.optimizer"} < left_out(result).keys()
    reshard.convert(place, tmp_path / "again", to="dcp")
    for number, truth in enumerate((source.truth, second)):
        target = tmp_path / f"again {number}"
        reshard.convert(tmp_path / "again", target, to="universal", model_key=f"pytorch_model_fsdp_{number}")
        assert universal_problems(target, truth) == []
    # One state dict becomes numbered directories, and directories become one state dict.
    pair = several("pair", WITH_SCHEDULER)
    result = reshard.convert(
        pair.path("pair"), tmp_path / "numbered", to="dcp", framework="accelerate", model_key="disc"
    )
    assert any("models are numbered in the order disc, gen" in text for text in result.warnings)
    for key, truth in (("pytorch_model_fsdp_1", pair.truth), ("pytorch_model_fsdp_0", None)):
        target = tmp_path / f"numbered {key}"
        reshard.convert(tmp_path / "numbered", target, to="universal", model_key=key)
        assert truth is None or universal_problems(target, truth) == []


# Two optimizers of one model.


@pytest.mark.parametrize("kind", ["muon", "muon_flat", "muon_apart"])
def test_two_optimizers_keep_their_own_states(
    kind: str, several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = several("muon")
    result = reshard.convert(source.path(kind), tmp_path / kind, to="dcp")
    assert (result.not_carried, result.warnings) == ((), ())
    # Muon's steps depend on the mesh: torch's own checkpoint says what they are on another one.
    found = [
        rank(fsdp, "resume_muon", source.run.on(mesh), kinds=[kind], folder=str(folder), out=str(tmp_path / f"{mesh}"))
        for mesh, folder in ((Mesh(2), tmp_path), (Mesh(3), tmp_path), (Mesh(3), source.folder))
    ]
    assert_goes_on(source, resumed_in(tmp_path / "2" / kind, found[0][0]["losses"]))
    assert found[1] == found[2]


def test_deepspeed_has_one_optimizer(several: SeveralFactory, tmp_path: Path) -> None:
    source = several("muon")
    with pytest.raises(reshard.errors.RequestError) as caught:
        reshard.convert(source.path("muon"), tmp_path / "no", to="zero", dp=2, zero_stage=2)
    assert "offloaded" not in str(caught.value)
    assert "momentum_buffer" in str(caught.value)
    assert "exp_avg" in str(caught.value)
    error = refusal(source.path("muon_apart"), tmp_path / "no", "zero", dp=2, zero_stage=2)
    assert "--optimizer-key muon" in error.fix
    reshard.convert(source.path("muon_apart"), tmp_path / "weights", to="safetensors")
    assert len(read_safetensors(tmp_path / "weights").tensors) == len(source.truth.kind("fp32"))


# Numbers without names.


def test_numbers_in_another_order_than_the_model_need_a_word(
    several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    """The blocks have equal shapes: in the model's order, each would get the moments of another one."""
    source = several("turned")
    error = refusal(source.path("raw"), tmp_path / "no", "universal")
    assert error.code == "checkpoint.ambiguous"
    assert "--param-order FILE" in error.fix
    said = {"param_order": source.folder / "order.txt"}
    reshard.convert(source.path("raw"), tmp_path / "said", to="universal", **said)
    assert universal_problems(tmp_path / "said", source.truth, scheduler=False) == []
    target = tmp_path / "zero" / TAG
    reshard.convert(source.path("raw"), target, to="zero", dp=3, zero_stage=2, **said)
    # DeepSpeed finds parameters by their places: its run, too, has to make the optimizer in this order.
    shared = {"world": 3, "case": zero_run(2, source.run, 3).model.to_json(), "out": str(tmp_path / "out")}
    path = str(target.parent)
    got = fsdp.worlds.run("oracle.dcp_zero:load", path=path, turned=True, timeout_s=TIMEOUT_S, **shared)[0]
    assert_goes_on(source, resumed_in(tmp_path / "out", got["losses"]), across=True)
    assert refusal(source.path("raw"), tmp_path / "no", "universal", param_order="model").code == "checkpoint.ambiguous"


# Element types.


def test_a_run_in_bf16_alone_stays_in_bf16(several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    source = several("bf16")
    reshard.convert(source.path("bf16"), tmp_path / "weights", to="safetensors")
    wanted, found = load_file(source.folder / "model.safetensors"), load_file(tmp_path / "weights/model.safetensors")
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in wanted.items()}
    assert all(found[n].equal(t) for n, t in wanted.items())
    assert len({t.dtype for t in found.values()}) == 2
    reshard.convert(source.path("bf16"), tmp_path / "dcp", to="dcp")
    run = source.run.on(Mesh(3))
    got = rank(fsdp, "resume_bf16", run, path=str(tmp_path / "dcp"), out=str(tmp_path / "out"))
    resumed = resumed_in(tmp_path / "out", got["losses"])
    assert problems(source.truth, resumed.state) == []
    assert agree(resumed.losses, source.losses_after, significant=3)


# Names.


def test_a_compiled_run_finds_its_names(several: SeveralFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """`_orig_mod.` is part of the names that the run loads, in DeepSpeed as in FSDP; weights are without it."""
    source = several("compiled", WITH_SCHEDULER)
    reshard.convert(source.path("compiled"), tmp_path / "between", to="dcp", framework="accelerate")
    reshard.convert(source.path("compiled"), tmp_path / "zero" / TAG, to="zero", dp=3, zero_stage=2)
    case = zero_run(2, source.run, 3).model.to_json()
    shared: dict[str, Any] = {"world": 3, "timeout_s": TIMEOUT_S, "case": case, "out": str(tmp_path / "out")}
    path = str(tmp_path / "zero")
    got = fsdp.worlds.run("oracle.dcp_zero:load", path=path, compiled=True, **shared)[0]
    assert agree(tuple(got["losses"]), source.losses_after, significant=6)
    reshard.convert(source.path("compiled"), tmp_path / "again", to="dcp")
    keys = [FileSystemReader(str(path)).read_metadata() for path in (source.path("compiled"), tmp_path / "again")]
    # torch leaves the wrapper out of the optimizer's keys.
    assert keys[1].state_dict_metadata.keys() == keys[0].state_dict_metadata.keys()
    assert keys[1].planner_data == keys[0].planner_data
    reshard.convert(source.path("compiled"), tmp_path / "weights", to="safetensors")
    assert not any("_orig_mod" in name for name in read_safetensors(tmp_path / "weights").tensors)
