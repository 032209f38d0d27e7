"""Optimizers beside Adam, by their own states: DeepSpeed trains with them, Reshard cuts anew, and the runs go on.

docs/optimizers.md has the table that these tests prove.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from house.shared import made_once
from house.tiers import rest_full
from oracle.cases import Case, Stage
from oracle.dcp_cases import is_here
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.launcher import WorldError
from oracle.outputs import convert, read_universal
from oracle.rank_optimizers import MAKE
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, differences, meta_differences
from reshard.errors import RequestError, SourceError

MUON: dict[str, Case] = {
    case.name: case
    for case in (
        Case("z0_fp32", 0, "fp32", optimizer="muon"),
        Case("z1_fp32", 1, "fp32", optimizer="muon"),
        Case("z1_bf16", 1, "bf16", optimizer="muon", parameter_alignment=True),
        Case("z2_fp32", 2, "fp32", optimizer="muon", scheduler=True),
        Case("z2_bf16", 2, "bf16", optimizer="muon", round_robin=True),
        Case("z2_offload", 2, "fp32", optimizer="muon", offload="optimizer"),
        Case("z3_fp32", 3, "fp32", optimizer="muon", sub_group_size=150),
        Case("z3_bf16", 3, "bf16", optimizer="muon"),
        Case("bf16opt", "bf16opt", "bf16", optimizer="muon"),
    )
}
MATRICES = {f"layers.{n}.{part}.weight" for n in range(3) for part in ("up", "down")}
"""What DeepSpeed gives Muon: weights of two dimensions, but embeddings. The rest is Adam's."""


def muon(name: str, oracle: Oracle, factory: pytest.TempPathFactory) -> Trained:
    """A run with DeepSpeed's Muon, trained once per test run; on four ranks, a matrix lies on two of them."""
    world = 4 if name.startswith("z1") else 3

    def train(folder: Path) -> list[object]:
        run = oracle.train(MUON[name], folder, world=world)
        return [run.tag, run.losses_before, run.losses_after]

    folder, (tag, before, after) = made_once(factory, f"muon-{name}", train)
    return Trained(folder / "ckpt", tag, tuple(before), tuple(after), MUON[name], world)


def native(run: Trained, folder: Path, world: int) -> tuple[str, ...]:
    """Converts to as many ranks of the same stage; the warnings."""
    stage = "bf16" if run.case.stage == "bf16opt" else str(run.case.stage)
    layout = dict[str, Any](dp=world, zero_stage=stage, sub_group_size=run.case.sub_group_size)
    result = convert(run.dir, folder / run.tag, "zero", **layout)
    assert result.not_carried == ()
    return result.warnings


def widened(run: Trained) -> set[str]:
    """The differences of a momentum in the model's 16 bits: torch widens it to the type of the masters as it loads."""
    shapes = {n: f"[{', '.join(map(str, t.shape))}]" for n, t in run.truth.kind("momentum_buffer").items()}
    return {f"momentum_buffer/{name}: BF16{shape} != F32{shape}" for name, shape in shapes.items()}


@pytest.mark.parametrize("name", rest_full(MUON, "z1_fp32", "z2_bf16", "z3_fp32"))
def test_muon_goes_on_on_fewer_ranks(
    name: str, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Momentum of matrices, Adam's moments of the rest, and hyper-parameters: as they were, bit for bit."""
    run = muon(name, oracle, tmp_path_factory)
    assert run.truth.kind("momentum_buffer").keys() == MATRICES
    assert run.truth.kind("exp_avg").keys() == run.truth.kind("fp32").keys() - MATRICES
    native(run, tmp_path / "out", 2)
    resumed = oracle.resume_native(run.case, tmp_path / "out", tmp_path / "state", world=2)
    assert [text for text in differences(run.truth, resumed.state) if text not in widened(run)] == []
    assert meta_differences(run.truth, resumed.state) == []
    assert resumed.losses == pytest.approx(run.losses_after, rel=2e-3 if run.case.dtype == "bf16" else 1e-5)
    assert len(set(run.losses_after)) == 3
    # When DeepSpeed's own converter takes this directory, docs/optimizers.md and docs/comparison.md are to say so.
    if run.case.stage != 0:
        assert "exp_avg" in str(oracle.peer_universal(run.tag_dir, tmp_path / "peer"))


@pytest.mark.parametrize("name", rest_full(MUON, "z2_fp32", "z3_bf16"))
def test_muon_on_as_many_ranks_is_the_run_that_was_saved(
    name: str, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """On as many ranks nothing is summed in another order: the losses are those of DeepSpeed's own load."""
    run = muon(name, oracle, tmp_path_factory)
    native(run, tmp_path / "out", run.world)
    ours = oracle.resume_native(run.case, tmp_path / "out", tmp_path / "ours", world=run.world)
    theirs = oracle.resume_native(run.case, run.dir, tmp_path / "theirs", world=run.world)
    assert differences(theirs.state, ours.state) == []
    assert ours.losses == theirs.losses


def test_where_deepspeeds_universal_loader_takes_muon(
    oracle: Oracle, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """It cuts every state as the masters are cut, which is how Muon keeps its momentum in these runs alone."""
    run = muon("z3_fp32", oracle, tmp_path_factory)
    result = convert(run.dir, tmp_path / run.tag, "universal")
    assert any("takes Muon's momentum in BF16_Optimizer, and at ZeRO-1 and 2 with" in text for text in result.warnings)
    atoms = read_universal(tmp_path / run.tag)
    assert atoms.kind("momentum_buffer") == run.truth.kind("momentum_buffer")
    assert atoms.kind("exp_avg") == run.truth.kind("exp_avg")
    assert atoms.steps == run.truth.step
    for name, world in (("z2_offload", 2), ("z1_fp32", 1)):
        again = {"world": world, "tag": run.tag, "restore_from": run.truth}
        resumed = oracle.resume_universal(MUON[name], tmp_path, tmp_path / name, **again)
        assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
        assert resumed.losses == pytest.approx(run.losses_after, rel=1e-5)
    bf16 = muon("bf16opt", oracle, tmp_path_factory)
    convert(bf16.dir, tmp_path / "bf16" / bf16.tag, "universal")
    again = {"world": 2, "tag": bf16.tag, "restore_from": bf16.truth}
    resumed = oracle.resume_universal(bf16.case, tmp_path / "bf16", tmp_path / "again", **again)
    assert differences(bf16.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    assert resumed.losses == pytest.approx(bf16.losses_after, rel=2e-3)
    for name, error in (("z1_fp32", "RuntimeError: start"), ("z3_fp32", "FileNotFoundError")):
        with pytest.raises(WorldError, match=error):
            oracle.resume_universal(MUON[name], tmp_path, tmp_path / name / "no", world=2, tag=run.tag)


@pytest.mark.parametrize("name", rest_full(["z2_bf16", "z3_fp32"], "z3_fp32"))
def test_muon_by_way_of_other_formats(
    name: str, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    run = muon(name, oracle, tmp_path_factory)
    layout = dict[str, Any](dp=2, zero_stage=str(run.case.stage), sub_group_size=run.case.sub_group_size)
    convert(run.dir, tmp_path / "any" / run.tag, "universal")
    found = reshard.diff(run.tag_dir, tmp_path / "any" / run.tag)
    assert [d for d in found.differences if d.name != "counters and client state"] == []
    if name == "z2_bf16":
        for source, out in ((run.dir, "direct"), (tmp_path / "any" / run.tag, "through")):
            convert(source, tmp_path / out / run.tag, "zero", **layout)
        assert reshard.diff(tmp_path / "direct" / run.tag, tmp_path / "through" / run.tag).differences == ()
    else:
        # Under `zero.Init` a run at ZeRO-3 keeps matrices in another order, and loads them by their places.
        with pytest.raises(RequestError, match=r"at ZeRO-3 under zero\.Init in the model's order"):
            convert(tmp_path / "any" / run.tag, tmp_path / "no" / run.tag, "zero", **layout)
    reshard.convert(run.tag_dir, tmp_path / "dcp", to="dcp", framework="state-dict")
    ranks: dict[str, Any] = {"dp": 2, "rank_framework": "accelerate", "device_type": "cpu", "fsdp_version": 2}
    reshard.convert(run.tag_dir, tmp_path / "ranks", to="fsdp_ranks", **ranks)
    for target in ("dcp", "ranks"):
        kept = reshard.diff(run.tag_dir, tmp_path / target).differences
        assert [d for d in kept if d.kind != "state" and d.name != "counters and client state"] == []
    # FSDP has no optimizer of DeepSpeed's, and DeepSpeed's has no groups of another's making.
    with pytest.raises(RequestError, match=r"different optimizer states|in the order of their shapes") as caught:
        convert(tmp_path / "dcp", tmp_path / "back" / run.tag, "zero", **layout, dtype="fp32")
    assert caught.value.code == "request.unsatisfiable"


def _tampered(run: Trained, folder: Path, rank: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the run's checkpoint with another momentum on one rank."""
    shutil.copytree(run.dir, folder)
    path = next((folder / run.tag).glob(f"*zero_pp_rank_{rank}_*_optim_states.pt"))
    states = torch.load(path, weights_only=False)
    held = states["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    held["momentum_buffer"] = change(held["momentum_buffer"])
    torch.save(states, path)
    return folder


def test_momenta_that_do_not_fit_are_refused(
    oracle: Oracle, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    run = muon("z1_fp32", oracle, tmp_path_factory)
    layout = dict[str, Any](dp=2, zero_stage="1")
    cut = _tampered(run, tmp_path / "cut", 1, lambda t: t[:-1].clone())
    with pytest.raises(SourceError, match="DeepSpeed's Muon keeps whole matrices at ZeRO-1 and 2") as caught:
        convert(cut, tmp_path / "out", "zero", **layout)
    assert caught.value.code == "checkpoint.coverage"
    # A partition has 282 elements: the second matrix of 187 is on the first rank and on the second.
    unlike = _tampered(run, tmp_path / "unlike", 1, lambda t: t + 1.0)
    with pytest.raises(SourceError, match="momentum_buffer") as caught:
        convert(unlike, tmp_path / "out", "zero", **layout)
    assert caught.value.code == "checkpoint.disagreement"
    assert not (tmp_path / "out").exists()


def test_a_config_that_is_a_path_does_not_say_how_muon_is_laid_out(
    oracle: Oracle, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The lengths of the source's tensors say it for the source; nothing says it for the target."""
    run = muon("z1_fp32", oracle, tmp_path_factory)
    source = tmp_path / "source"
    shutil.copytree(run.dir, source)
    for path in (source / run.tag).glob("*.pt"):
        states = torch.load(path, weights_only=False)
        torch.save({**states, "ds_config": "ds_config.json"}, path)
    options: dict[str, Any] = {"dp": 2, "zero_stage": "1", "dtype": "fp32"}
    with pytest.raises(RequestError, match="keeps whole matrices on each rank, or parts of them with") as caught:
        convert(source, tmp_path / "out", "zero", **options)
    assert caught.value.code == "request.unsatisfiable"
    convert(source, tmp_path / "any" / run.tag, "universal")
    found = read_universal(tmp_path / "any" / run.tag)
    assert found.kind("momentum_buffer") == run.truth.kind("momentum_buffer")


OTHERS = {
    "lion": {"exp_avg"},
    "ademamix": {"exp_avg_fast", "exp_avg_slow", "exp_avg_sq", "step"},
    "radam": {"exp_avg", "exp_avg_sq", "step"},
    "nadam": {"exp_avg", "exp_avg_sq", "mu_product", "step"},
    "adamax": {"exp_avg", "exp_inf", "step"},
    "rmsprop": {"square_avg", "momentum_buffer", "grad_avg", "step"},
}
"""The states of each optimizer in DeepSpeed's files; a run at ZeRO-1, 2 or 3 keeps the same ones."""
_NO_UNIVERSAL = {"nadam": "'mu_product' is one number per group: the universal form cannot hold it"}
_AT_STAGE_3 = ("radam",)  # DeepSpeed's loader of ZeRO-3 knows `exp_avg` and `exp_avg_sq` alone


@pytest.mark.parametrize(
    ("name", "stage"), rest_full([(n, s) for n in OTHERS for s in (1, 2, 3)], ("ademamix", 3), ("nadam", 2))
)
def test_other_optimizers_keep_their_states(name: str, stage: Stage, oracle: Oracle, tmp_path: Path) -> None:
    case = Case(name, stage, "fp32", optimizer=name, two_groups=stage == 1)
    run = oracle.train(case, tmp_path / "run", world=2)
    kinds = run.truth.kinds | run.truth.meta["scalars"].keys()
    assert kinds - {"fp32", "module", "frozen", "buffer"} == OTHERS[name]
    layout = dict[str, Any](dp=3, zero_stage=str(stage))
    assert convert(run.dir, tmp_path / "out" / run.tag, "zero", **layout).not_carried == ()
    resumed = oracle.resume_native(case, tmp_path / "out", tmp_path / "state", world=3)
    assert differences(run.truth, resumed.state) == []
    assert meta_differences(run.truth, resumed.state) == []
    assert resumed.losses == pytest.approx(run.losses_after, rel=1e-5)
    reshard.convert(run.tag_dir, tmp_path / "dcp", to="dcp", framework="state-dict")
    kept = reshard.diff(run.tag_dir, tmp_path / "dcp").differences
    assert [d for d in kept if d.kind != "state"] == []
    if name in _NO_UNIVERSAL:
        with pytest.raises(RequestError, match=_NO_UNIVERSAL[name]):
            convert(run.dir, tmp_path / "any" / run.tag, "universal")
        return
    warnings = convert(run.dir, tmp_path / "any" / run.tag, "universal").warnings
    loaded = {"world": 3, "tag": run.tag, "restore_from": run.truth}
    if stage == 3 and name not in _AT_STAGE_3:
        assert [text for text in warnings if "its universal loader ends with a FileNotFoundError" in text]
        with pytest.raises(WorldError, match="FileNotFoundError"):
            oracle.resume_universal(case, tmp_path / "any", tmp_path / "no", **loaded)
        return
    again = oracle.resume_universal(case, tmp_path / "any", tmp_path / "again", **loaded)
    assert differences(run.truth, again.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    assert again.losses == resumed.losses


def _refused_by_name(source: Path, tmp_path: Path, named: str) -> None:
    """No target of a training state takes it, each says the state's name, and the weights come out."""
    layout = dict[str, Any](dp=3, zero_stage="2")
    for to, options in (("zero", layout), ("universal", {}), ("dcp", {"framework": "state-dict"})):
        with pytest.raises(RequestError, match=named) as caught:
            reshard.convert(source, tmp_path / to / "step3", to=to, progress=False, **options)
        assert caught.value.code == "request.unsatisfiable"
        assert str(caught.value.fix).startswith("write the weights alone: --to safetensors; or go on with the source")
        assert not (tmp_path / to).exists()
    result = reshard.convert(source, tmp_path / "weights", to="safetensors", progress=False)
    assert "optimizer" in {entry.path for entry in result.not_carried}


@pytest.mark.skipif(not is_here("torchao"), reason="torchao is not installed")
@pytest.mark.parametrize(
    ("name", "stage"), rest_full([(n, s) for n in ("AdamW8bit", "AdamW4bit") for s in (2, 3)], ("AdamW8bit", 2))
)
def test_torchaos_states_in_deepspeeds_files_are_refused_by_name(
    name: str, stage: Stage, oracle: Oracle, tmp_path: Path
) -> None:
    """Each block is of a rank's partition: another number of ranks has no such block."""
    oracle.worlds.run("oracle.quantized:save", world=2, name=name, stage=stage, folder=str(tmp_path / "ckpt"))
    kind = {"AdamW8bit": "subclass_8bit.OptimState8bit", "AdamW4bit": "subclass_4bit.OptimState4bit"}[name]
    _refused_by_name(tmp_path / "ckpt" / "step3", tmp_path, rf"exp_avg \(torchao\.optim\.{kind}\)")


@pytest.mark.parametrize("form", ["0.50", "plain"])
def test_states_of_bitsandbytes_are_refused_by_name(
    form: str, trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """In the form that 0.50.2 has in files of DeepSpeed, and with the same tensors beside one another."""
    run = trained("z2_fp32")
    source = tmp_path / "source"
    shutil.copytree(run.tag_dir, source)
    for path in source.glob("*_optim_states.pt"):
        states = torch.load(path, weights_only=False)
        for held in states["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            numel = held.pop("exp_avg").numel()
            held.pop("exp_avg_sq")
            own = {f"state{n}": torch.zeros(numel, dtype=torch.uint8) for n in (1, 2)}
            own |= {f"absmax{n}": torch.zeros(-(-numel // 256)) for n in (1, 2)}
            own |= {f"qmap{n}": torch.zeros(256) for n in (1, 2)}
            held.update(own if form == "plain" else {"__bnb_optimizer_quant_state__": own})
        torch.save(states, path)
    named = r"state1 \(uint8 of 1 dimensions\)" if form == "plain" else r"__bnb_optimizer_quant_state__ \(a dict\)"
    _refused_by_name(source, tmp_path, named)


@pytest.fixture(scope="module")
def torchs(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of FSDP2 with each of torch's optimizers, saved by torch as distributed checkpoints and as ranks' files."""

    def save(folder: Path) -> list[str]:
        made: list[str] = oracle.worlds.run("oracle.rank_optimizers:save", world=2, folder=str(folder))[0]
        return made

    return made_once(tmp_path_factory, "rank-optimizers", save)[0]


_VERL: dict[str, Any] = {"rank_framework": "verl", "device_type": "cpu", "buffers": "none", "fsdp_version": 2}


@pytest.mark.parametrize("name", MAKE)
def test_torchs_optimizers_go_from_fsdp_to_every_format(name: str, torchs: Path, tmp_path: Path) -> None:
    """Every state, number and hyper-parameter is that of torch's own distributed checkpoint, bit for bit."""
    for source in ("dcp", "ranks"):
        for stage, to, options in (
            ("", "dcp", {"framework": "state-dict"}),
            ("2", "zero", {"dp": 3, "zero_stage": 2, "dtype": "fp32"}),
            ("3", "zero", {"dp": 3, "zero_stage": 3, "dtype": "fp32"}),
            ("", "universal", {}),
            ("", "fsdp_ranks", {"dp": 3, **(_VERL if source == "dcp" else {})}),
        ):
            out = tmp_path / source / f"{to}{stage}" / "step3"
            refusal = {"nadam": _NO_UNIVERSAL["nadam"]}.get(name) if to == "universal" else None
            if name == "muon" and to in ("zero", "universal"):
                refusal = "takes matrices alone, and ZeRO gives optimizers flat partitions"
            if refusal is not None:
                with pytest.raises(RequestError, match=refusal) as caught:
                    reshard.convert(torchs / name / source, out, to=to, progress=False, **options)
                assert caught.value.code == "request.unsatisfiable"
                continue
            reshard.convert(torchs / name / source, out, to=to, progress=False, **options)
            found = reshard.diff(torchs / name / "dcp", out, progress=False).differences
            assert [d for d in found if d.name != "counters and client state"] == [], (source, to)


def test_preconditioners_in_deepspeeds_files_are_refused_by_name(trained: TrainedFactory, tmp_path: Path) -> None:
    """Nothing says how a matrix of Shampoo's, or a list of SOAP's, is to be cut for another partition."""
    for number, (name, value) in enumerate({"preconditioner": torch.eye(4), "GG": [torch.eye(3)]}.items()):
        source = tmp_path / name
        shutil.copytree(trained("z2_fp32").tag_dir, source)
        for path in source.glob("*_optim_states.pt"):
            states = torch.load(path, weights_only=False)
            states["optimizer_state_dict"]["base_optimizer_state"]["state"][0][name] = value
            torch.save(states, path)
        _refused_by_name(source, tmp_path / f"{number}", rf"{name} \((float32 of 2 dimensions|a list)\)")


_ODD: dict[str, Any] = {
    "states of several shapes": torch.zeros(3),
    r"exp_inf \(a list\)": [torch.eye(2)],
    r"exp_inf \(a dict\)": {"state1": torch.zeros(4, dtype=torch.uint8)},
}


@pytest.mark.parametrize("named", _ODD)
def test_odd_states_in_files_of_ranks_are_refused_by_name(named: str, torchs: Path, tmp_path: Path) -> None:
    """A factored state, a list of matrices, and a dictionary of codes; the weights come out."""
    source = tmp_path / "source"
    shutil.copytree(torchs / "adamax" / "ranks", source)
    for path in source.glob("optim_*"):
        states = torch.load(path, weights_only=False)
        for held in states["state"].values():
            held["exp_inf"] = _ODD[named]
        torch.save(states, path)
    zero: dict[str, Any] = {"dp": 3, "zero_stage": 2, "dtype": "fp32"}
    for to, options in (("zero", zero), ("dcp", {"framework": "state-dict"}), ("fsdp_ranks", {"dp": 3})):
        with pytest.raises(SourceError, match=named) as caught:
            reshard.convert(source, tmp_path / to / "step3", to=to, progress=False, **options)
        assert caught.value.code == "checkpoint.ambiguous"
        assert "the weights alone can be had: --to safetensors" in str(caught.value.fix)
    reshard.convert(source, tmp_path / "weights", to="safetensors", progress=False)
