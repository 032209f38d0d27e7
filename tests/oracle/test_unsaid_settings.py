"""Settings that a source does not say: the run that goes on keeps its own, as DeepSpeed's own loaders show."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.ops.adam import DeepSpeedCPUAdam

import reshard
from house.promises import command
from oracle.cases import CASES, Case
from oracle.conversions import BF16_SPREAD
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert
from oracle.truth import Truth, differences
from oracle.unsaid import swapped_places
from reshard.choices import WeightDtype
from reshard.errors import RequestError, SourceError
from reshard.options import RunLayout


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bf16_run_says_no_loss_scale(stage: Any, trained: TrainedFactory, oracle: Oracle, tmp_path: Path) -> None:
    """Its scaler says 1 for good, which an fp16 run would take over: no step would ever be scaled again."""
    run = trained("z2_bf16")
    case = replace(run.case, stage=stage, dtype="fp16")
    layout = dict[str, Any](dp=3, zero_stage=str(stage))  # pyright: ignore[reportArgumentType]
    result = convert(run.dir, tmp_path / "out" / run.tag, "zero", **layout, dtype=WeightDtype.FP16)
    assert [w for w in result.warnings if "says no loss scale: the run's config gives it" in w]
    resumed = oracle.resume_native(case, tmp_path / "out", tmp_path / "state", world=3)
    assert resumed.state.meta["loss_scale"] == 2.0**case.loss_scale_power
    kinds = ("fp32/", "exp_avg/", "exp_avg_sq/")
    assert [d for d in differences(run.truth, resumed.state) if d.startswith(kinds)] == []
    assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=0.02)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_loaders_that_require_a_scale_get_none_of_our_making(
    stage: Any, trained: TrainedFactory, tmp_path: Path
) -> None:
    run = trained("z2_bf16")
    layout = dict[str, Any](dp=3, zero_stage=stage)
    with pytest.raises(RequestError, match="says no loss scale") as refused:
        convert(run.dir, tmp_path / "out" / run.tag, "zero", **layout, dtype=WeightDtype.FP16)
    assert refused.value.fix.startswith("--zero-stage 1")  # type: ignore[union-attr]


def _saved(
    oracle: Oracle, case: Case, folder: Path, function: str = "train_and_save"
) -> tuple[Truth, tuple[float, ...]]:
    """A save at stage 0 of a run whose optimizer's order is not the model's."""
    (got,) = oracle.worlds.run(
        f"oracle.unsaid:{function}",
        world=1,
        case=case.to_json(),
        save_dir=str(folder / "ckpt"),
        truth_dir=str(folder),
        steps_after=3,
    )
    truth = Truth(folder / "truth.safetensors", folder / "truth.json")
    return truth, tuple(got["losses_after"])


@pytest.mark.parametrize(("name", "compiled"), [("z0_fp32", False), ("z0_bf16", False), ("z0_fp32", "model")])
def test_stage_0_numbers_parameters_in_the_order_of_its_optimizer(
    name: str, compiled: Any, oracle: Oracle, tmp_path: Path
) -> None:
    """In 16 bits the masters prove the order, and in fp32 nothing does: a warning says what is assumed.

    The order is given in the names that `inspect` lists, without the wrapper of `torch.compile`.
    """
    case = replace(CASES[name], compiled=compiled)
    truth, losses = _saved(oracle, case, tmp_path / "source")
    (group,) = truth.meta["groups"]
    order: list[str] = group["names"]
    places = swapped_places([tuple(truth.tensors[f"fp32/{n}"].shape) for n in order])
    assert len({order[place] for place in places}) == 2
    assert all(n.startswith("_orig_mod.") for n in order) == bool(compiled)
    order = [n.removeprefix("_orig_mod.") for n in order]
    source, options = tmp_path / "source/ckpt", {"to": "zero", "dp": 1, "zero_stage": "1"}
    if name == "z0_bf16":
        with pytest.raises(SourceError) as refused:
            reshard.convert(source, tmp_path / "guessed/global_step3", **options)
        assert refused.value.code == "checkpoint.disagreement"
        assert "--param-order FILE" in str(refused.value.fix)
    else:
        result = reshard.convert(source, tmp_path / "guessed/global_step3", **options)
        assert [w for w in result.warnings if "which nothing proves in fp32: --param-order FILE" in w]
    said = reshard.convert(source, tmp_path / "said/global_step3", **options, param_order=order)
    assert not [w for w in said.warnings if "param-order" in w]
    out = tmp_path / "state"
    (got,) = oracle.worlds.run(
        "oracle.unsaid:resume_native",
        world=1,
        case=replace(case, stage=1).to_json(),
        load_dir=str(tmp_path / "said"),
        tag=None,
        out=str(out),
        steps=3,
    )
    assert differences(truth, Truth(out / "resumed.safetensors", out / "resumed.json")) == []
    if name == "z0_fp32":
        assert got["losses"] == pytest.approx(losses, rel=1e-6)


def _pasted(text: str, order: Path) -> list[str]:
    """The flag that a text recommends, with the file that the user has written."""
    found = re.search(r"--param-order FILE", text)
    assert found, text
    return [word.replace("FILE", str(order)) for word in found[0].split()]


@pytest.mark.parametrize("name", ["z0_fp32", "z0_bf16", "z0_before_first_step"])
def test_groups_of_stage_0_that_nothing_tells_apart_are_asked_for(name: str, oracle: Oracle, tmp_path: Path) -> None:
    """The error and `inspect` name `--param-order FILE`, and a run resumes from the conversion with that file."""
    case = CASES[name]
    truth, losses = _saved(oracle, case, tmp_path / "source", "train_dealt_out")
    order = tmp_path / "order.txt"
    order.write_text("".join(f"{n}\n" for group in truth.meta["groups"] for n in group["names"]))
    source, words = tmp_path / "source/ckpt", ["--to", "zero", "--dp", "1", "--zero-stage", "1", "--quiet"]
    for to in (words, ["--to", "universal"], ["--to", "dcp"]):
        code, _, err = command("convert", str(source), str(tmp_path / "guessed" / "s"), *to)
        assert (code, "checkpoint.ambiguous" in err) == (3, True), (to, err)
        fix = next(line for line in err.splitlines() if line.startswith("fix: "))
        assert _pasted(fix, order), to
    code, _, told = command("inspect", str(source))
    assert (code, told.count("--param-order FILE")) == (0, 1)
    assert command("convert", str(source), str(tmp_path / "weights"), "--to", "safetensors", "--quiet")[0] == 0
    for text in (fix, told):
        shutil.rmtree(tmp_path / "said", ignore_errors=True)
        found = command("convert", str(source), str(tmp_path / "said/global_step3"), *words, *_pasted(text, order))
        assert found[0] == 0, found
    out = tmp_path / "state"
    (got,) = oracle.worlds.run(
        "oracle.unsaid:resume_dealt_out",
        world=1,
        case=replace(case, stage=1).to_json(),
        load_dir=str(tmp_path / "said"),
        tag=None,
        out=str(out),
        steps=3,
    )
    assert differences(truth, Truth(out / "resumed.safetensors", out / "resumed.json")) == []
    if name == "z0_fp32":
        assert got["losses"] == pytest.approx(losses, rel=1e-6)


class _Kernel:
    """Stands for DeepSpeed's kernel, which takes minutes to compile: AdamW as its reference computes it."""

    def create_adam(self, *arguments: Any) -> None:
        """Nothing to keep."""

    def destroy_adam(self, number: int) -> None:
        """Nothing was kept."""

    def adam_update(self, _: int, step: Any, lr: float, b1: float, b2: float, *rest: Any) -> None:
        """One step in place. Source: deepspeed 0.19.8 `csrc/adam/cpu_adam_impl.cpp`."""
        eps, decay, corrected, weight, gradient, mean, square = rest
        assert corrected is True
        mean.mul_(b1).add_(gradient, alpha=1 - b1)
        square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        denominator = (square / (1 - b2 ** float(step))).sqrt_() + eps
        weight.mul_(1 - lr * decay).addcdiv_(mean, denominator, value=-lr / (1 - b1 ** float(step)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_deepspeeds_own_adam_goes_on_from_torchs(
    kind: type[torch.optim.Adam], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that names Adam gets FusedAdam or DeepSpeedCPUAdam, whose groups have a key that torch's lack."""
    builder = SimpleNamespace(load=_Kernel)
    monkeypatch.setattr("deepspeed.ops.adam.cpu_adam.CPUAdamBuilder", lambda: builder)
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = kind([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    gradients = torch.randn(3, 6, 4)
    for gradient in gradients[:2]:
        weight.grad = gradient.clone()
        optimizer.step()
    state = {"model": {"w": weight.detach()}, "optim": {"state": {"w": optimizer.state[weight]}}}
    state["optim"]["param_groups"] = [{**optimizer.state_dict()["param_groups"][0], "params": ["w"]}]
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    reshard.convert(tmp_path / "source", tmp_path / "out/step2", to="zero", dp=1, zero_stage="1")
    (file,) = (tmp_path / "out/step2").glob("*_optim_states.pt")
    held = torch.load(file, weights_only=False)["optimizer_state_dict"]
    master = torch.nn.Parameter(held["single_partition_of_fp32_groups"][0].clone())
    theirs = DeepSpeedCPUAdam([master], lr=1.0)
    theirs.load_state_dict(held["base_optimizer_state"])
    weight.grad, master.grad = gradients[2].clone(), gradients[2].flatten()
    optimizer.step()
    theirs.step()
    torch.testing.assert_close(master.detach(), weight.detach().flatten(), rtol=1e-6, atol=1e-7)
    # And torch's own goes on as before: it never reads the key.
    again = kind([master], lr=1.0)
    again.load_state_dict(held["base_optimizer_state"])
    again.step()


def _by_path(oracle: Oracle, case: Case, folder: Path, world: int) -> Trained:
    results = oracle.worlds.run(
        "oracle.unsaid:train_by_path",
        world=world,
        case=case.to_json(),
        save_dir=str(folder / "ckpt"),
        truth_dir=str(folder),
        steps_after=3,
    )
    got: dict[str, Any] = results[0]
    return Trained(folder / "ckpt", got["tag"], tuple(got["losses_before"]), tuple(got["losses_after"]), case, world)


@pytest.mark.parametrize("name", ["z2_round_robin", "z1_round_robin_two_groups", "z2_fp32"])
def test_files_show_round_robin_where_the_config_is_a_path(name: str, oracle: Oracle, tmp_path: Path) -> None:
    run = _by_path(oracle, CASES[name], tmp_path / "source", 2)
    result = convert(run.dir, tmp_path / "out" / run.tag, "zero", layout=RunLayout(dp=3))
    assert result.warnings == ()
    resumed = oracle.resume_native(run.case, tmp_path / "out", tmp_path / "state", world=3)
    assert differences(run.truth, resumed.state) == []
    assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=BF16_SPREAD)


def test_a_universal_form_with_exchanged_values_is_refused(
    trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """`ds_to_universal` exchanges values under round_robin_gradients; a config that is a path does not say so."""
    run = trained("z1_round_robin_two_groups")
    assert oracle.peer_universal(run.tag_dir, tmp_path / "peer/step") is None
    file = tmp_path / "peer/step/mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | {"ds_config": "ds_config.json"}, file)
    layout = dict[str, Any](dp=1, zero_stage="1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SourceError, match=r"differ, in .* parameters") as refused:
        convert(tmp_path / "peer/step", tmp_path / "out/step", "zero", **layout)
    assert refused.value.code == "checkpoint.disagreement"
    assert refused.value.fix == "convert the original checkpoint, which is read correctly"


def test_a_type_that_nothing_says_is_asked_for(oracle: Oracle, tmp_path: Path) -> None:
    """ZeRO-3 stores masters alone. A bf16 run looks for other file names than those of an fp32 run."""
    run = _by_path(oracle, CASES["z3_bf16"], tmp_path / "source", 2)
    layout = RunLayout(dp=3)
    with pytest.raises(RequestError, match="does not say in which element type") as refused:
        convert(run.dir, tmp_path / "out" / run.tag, "zero", layout=layout)
    assert refused.value.fix == "--dtype bf16|fp16|fp32"
    convert(run.dir, tmp_path / "out" / run.tag, "zero", layout=layout, dtype=WeightDtype.BF16)
    resumed = oracle.resume_native(run.case, tmp_path / "out", tmp_path / "state", world=3)
    assert differences(run.truth, resumed.state) == []
