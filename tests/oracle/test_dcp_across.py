"""A run goes from DeepSpeed's ZeRO to FSDP, or back, with its optimizer: the real engines say that it is the same run.

Both train one model on the same batches, with the same optimizer, groups and scheduler.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.tiers import rest_full
from oracle.conversions import BF16_SPREAD, agree
from oracle.dcp_cases import RUNS, FsdpRun, Mesh
from oracle.dcp_driver import Framework, FsdpOracle, Job, Saved, problems, zero_run
from oracle.dcp_reading import dcp_convert
from oracle.driver import Oracle
from oracle.fixtures import SavedFactory, TrainedFactory
from oracle.outputs import contents
from oracle.truth import Resumed, differences
from reshard.errors import RequestError, SourceError
from reshard.models.jobs import ConvertResult

TWO_BY_TWO = Mesh(2, tensor=2)
TAG = "global_step3"


def assert_goes_on(source: Saved, resumed: Resumed | str) -> None:
    """The state is the source's, bit for bit, and the next losses are the uninterrupted run's."""
    assert isinstance(resumed, Resumed), resumed
    assert problems(source.truth, resumed.state, across=True) == []
    assert agree(resumed.losses, source.losses_after, significant=6)
    assert len(set(source.losses_after)) == 3


def left_out(result: ConvertResult) -> dict[str, str]:
    return {entry.path: entry.reason for entry in result.not_carried}


def tokens_of(kind: str) -> set[str]:
    """Trainers like torchtitan's count tokens, and DeepSpeed has no such counter."""
    return {"tokens"} if kind == "titan" else set()


@pytest.mark.parametrize(("kind", "after"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)], ids=str)
def test_false_is_right_for_adam_and_adamw(kind: type[torch.optim.Adam], after: bool) -> None:
    """What the writer relies on: AdamW of the installed torch decouples weight decay whatever it loads."""
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))])
    held = optimizer.state_dict()
    assert held["param_groups"][0]["decoupled_weight_decay"] is after
    held["param_groups"][0]["decoupled_weight_decay"] = False
    optimizer.load_state_dict(held)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is after


@pytest.mark.parametrize(
    ("stage", "mesh"),
    rest_full(
        [(stage, mesh) for stage in (1, 2, 3) for mesh in (Mesh(3), Mesh(2), TWO_BY_TWO)],
        (1, Mesh(2)),
        (2, TWO_BY_TWO),
        (3, Mesh(3)),
    ),
    ids=str,
)
def test_zero_to_fsdp2(stage: Any, mesh: Mesh, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    run = RUNS["fsdp2" if mesh.tensor == 1 else "fsdp2_tp"]
    source = saved(zero_run(stage, run, 4), "zero")
    jobs = []
    for framework, kind in (("state-dict", "nested"), ("torchtitan", "flat")):
        path = tmp_path / framework
        made = ("train_state.ntokens_seen is 0, as the source counts no tokens",) if framework == "torchtitan" else ()
        assert dcp_convert(source.path(), path, "dcp", framework=framework).warnings == made
        jobs.append(Job(run.on(mesh), kind, path, tmp_path / f"{framework}-out"))
    for resumed in fsdp.resume_all(jobs):
        assert_goes_on(source, resumed)


def test_zero_to_accelerate(saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    run = RUNS["fsdp2"]
    source = saved(zero_run(2, run, 4), "zero")
    dcp_convert(source.path(), tmp_path / "state", "dcp", framework="accelerate")
    assert_goes_on(source, fsdp.resume("accelerate", run.on(Mesh(3)), tmp_path / "state", tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "kind", "stage"),
    rest_full(
        [
            ("fsdp2_tp", "nested", 2),
            ("fsdp2_tp", "titan", 2),
            ("fsdp2_tp", "nested", 1),
            ("fsdp2_tp", "nested", 3),
            ("fsdp2", "nested", 2),
            ("fsdp1", "nested", 2),
            ("fsdp2_sgd", "nested", 2),
        ],
        ("fsdp2_tp", "nested", 2),
        ("fsdp2_tp", "titan", 2),
    ),
)
def test_fsdp_to_zero(name: str, kind: str, stage: Any, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    source = saved(name)
    result = dcp_convert(source.path(kind), tmp_path / "zero" / TAG, "zero", dp=3, zero_stage=stage)
    assert left_out(result).keys() == tokens_of(kind)
    resumed = fsdp.resume("zero", zero_run(stage, source.run, 3), tmp_path / "zero", tmp_path / "out")
    assert_goes_on(source, resumed)
    assert resumed.state.meta["global_steps"] == 3


def test_the_user_names_the_buffers_of_one_rank(saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """One rank cuts nothing, so its files do not tell frozen parameters from buffers. Stage 3 keeps buffers whole."""
    source = saved(RUNS["fsdp2"].on(Mesh(1)))
    place, target = source.path("nested"), tmp_path / "zero" / TAG
    for to, options in (("zero", {"dp": 2, "zero_stage": 3}), ("safetensors", {"exclude_frozen": True})):
        with pytest.raises(SourceError, match=r"adapter\.weight.*wave|wave.*adapter\.weight") as refused:
            reshard.convert(place, target, to=to, **options)
        assert refused.value.code == "checkpoint.ambiguous"
        assert "--buffers none" in str(refused.value.fix)
    dcp_convert(place, tmp_path / "two" / TAG, "zero", dp=2, zero_stage=2)
    dcp_convert(place, target, "zero", dp=2, zero_stage=3, buffers="wav*,seen")
    for stage, folder in ((2, "two"), (3, "zero")):
        run = zero_run(stage, source.run, 2)  # pyright: ignore[reportArgumentType]
        assert_goes_on(source, fsdp.resume("zero", run, tmp_path / folder, tmp_path / f"out {folder}"))
    weights = {"to": "safetensors", "exclude_frozen": True}
    reshard.convert(place, tmp_path / "trained", **weights, buffers="wave,seen")
    names = load_file(tmp_path / "trained" / "model.safetensors").keys()
    assert [name in names for name in ("wave", "adapter.weight")] == [True, False]
    with pytest.raises(RequestError, match="waves fits no tensor"):
        reshard.convert(place, tmp_path / "no", **weights, buffers="waves")


def test_a_parameter_without_gradient_goes_to_zero(saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """ZeRO keeps moments of every parameter: zeros. It decays such a parameter, which FSDP2 leaves alone."""
    source = saved("fsdp2_unused")
    result = dcp_convert(source.path("nested"), tmp_path / "zero" / TAG, "zero", dp=3, zero_stage=2)
    assert any("never updated (unused)" in text for text in result.warnings)
    resumed = fsdp.resume("zero", zero_run(2, source.run, 3), tmp_path / "zero", tmp_path / "out")
    wrong = problems(source.truth, resumed.state, across=True)
    assert {text.partition(":")[0] for text in wrong} == {"exp_avg/unused", "exp_avg_sq/unused", "scalar step"}
    assert agree(resumed.losses, source.losses_after, significant=6)


@pytest.mark.parametrize("name", rest_full(("z1_bf16", "z2_bf16", "z3_bf16", "bf16opt"), "z3_bf16"))
def test_masters_of_zero_in_bf16_go_to_fsdp2(
    name: str, trained: TrainedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    """FSDP2 keeps fp32 parameters where DeepSpeed keeps masters; the 16-bit weights follow from both."""
    source = trained(name)
    result = dcp_convert(source.tag_dir, tmp_path / "dcp", "dcp", framework="state-dict")
    assert "samples" not in left_out(result)
    target = FsdpRun(name, model=source.case, mesh=Mesh(3), scheduler=False)
    (resumed,) = fsdp.resume_all([Job(target, "nested", tmp_path / "dcp", tmp_path / "out")])
    assert isinstance(resumed, Resumed), resumed
    wrong = differences(source.truth, resumed.state, without=("module", "frozen", "buffer"))
    assert wrong == []
    assert resumed.state.meta["ranks_that_disagree"] == []
    ours = resumed.state.hyper_parameters
    for fqn, theirs in source.truth.hyper_parameters.items():
        assert {key: ours[fqn][key] for key in theirs} == theirs


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 2))
def test_groups_of_an_older_torch_go_to_zero(stage: Any, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """DeepSpeed takes groups as they are; torch's optimizers from 2.7 on ask them for a key that older ones lack."""
    source = saved("fsdp2")
    dcp_convert(source.path("v2_3"), tmp_path / "zero" / TAG, "zero", dp=3, zero_stage=stage)
    resumed = fsdp.resume("zero", zero_run(stage, source.run, 3), tmp_path / "zero", tmp_path / "out")
    assert resumed.state.hyper_parameters == source.truth.hyper_parameters


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 2))
def test_adam_stays_adam(stage: Any, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """Groups of torch before 2.7, and of DeepSpeed's FusedAdam, do not say if weight decay is decoupled.

    The decay of 0.3 is large enough that AdamW's losses leave Adam's at the second step.
    """
    run, adams = RUNS["fsdp2_adam"], "decoupled_weight_decay (False)"
    # From torch's file of 2.3 to FSDP2 and to DeepSpeed.
    source = saved(run)
    assert any(adams in text for text in dcp_convert(source.path("v2_3"), tmp_path / "dcp", "dcp").warnings)
    rates = source.truth.meta["lr_scheduler"]
    (resumed,) = fsdp.resume_all([Job(run.on(Mesh(3)), "app", tmp_path / "dcp", tmp_path / "1", scheduler=rates)])
    assert_goes_on(source, resumed)
    dcp_convert(source.path("nested"), tmp_path / "zero" / TAG, "zero", dp=3, zero_stage=stage)
    assert_goes_on(source, fsdp.resume("zero", zero_run(stage, run, 3), tmp_path / "zero", tmp_path / "2"))
    # From DeepSpeed to FSDP2, and back to DeepSpeed.
    source = saved(zero_run(stage, run, 4), "zero")
    result = dcp_convert(source.path(), tmp_path / "there", "dcp", framework="state-dict")
    assert any(adams in text for text in result.warnings)
    (resumed,) = fsdp.resume_all([Job(run.on(Mesh(3)), "nested", tmp_path / "there", tmp_path / "3")])
    assert_goes_on(source, resumed)
    dcp_convert(tmp_path / "there", tmp_path / "back" / TAG, "zero", dp=3, zero_stage=stage)
    assert_goes_on(source, fsdp.resume("zero", zero_run(stage, run, 3), tmp_path / "back", tmp_path / "4"))


@pytest.mark.parametrize(
    ("name", "framework"),
    rest_full(
        [(n, g) for n in ("z2_lion", "z2_sgd", "z2_fp16_skipped") for g in ("state-dict", "accelerate", "torchtitan")],
        ("z2_lion", "accelerate"),
        ("z2_sgd", "state-dict"),
        ("z2_fp16_skipped", "accelerate"),
    ),
)
def test_counters_come_back_from_fsdp(
    name: str, framework: str, trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """FSDP's frameworks keep no counters: steps of Lion and SGD, and those that fp16 skipped, would be lost."""
    source = trained(name)
    dcp_convert(source.tag_dir, tmp_path / "dcp", "dcp", framework=framework)
    options: dict[str, Any] = {"dp": 3, "zero_stage": 2, "dtype": source.case.dtype}
    dcp_convert(tmp_path / "dcp", tmp_path / "back" / source.tag, "zero", **options)
    # The loss scale starts anew: one that does not overflow, for the uninterrupted run had found its own.
    run = replace(source.case, loss_scale_power=4)
    resumed = oracle.resume_native(run, tmp_path / "back", tmp_path / "out", world=3)
    counted = {key: resumed.state.meta[key] for key in ("global_steps", "global_samples", "skipped_steps")}
    assert counted == {key: source.truth.meta[key] for key in counted}
    assert differences(source.truth, resumed.state, without=("module", "frozen", "buffer")) == []
    assert max(abs(a - b) for a, b in zip(resumed.losses, source.losses_after, strict=True)) < BF16_SPREAD
    assert len(set(source.losses_after)) == 3


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 2))
@pytest.mark.parametrize("framework", rest_full(("state-dict", "torchtitan", "accelerate"), "accelerate"))
def test_zero_to_dcp_and_back_is_the_same(stage: Any, framework: str, saved: SavedFactory, tmp_path: Path) -> None:
    source = saved(zero_run(stage, RUNS["fsdp2"], 4), "zero")
    there, back, direct = tmp_path / "dcp", tmp_path / "back" / TAG, tmp_path / "direct" / TAG
    dcp_convert(source.path(), there, "dcp", framework=framework)
    lost = left_out(dcp_convert(there, back, "zero", dp=3, zero_stage=stage))
    reshard.convert(source.path(), direct, to="zero", dp=3, zero_stage=stage)
    assert lost.keys() <= tokens_of("titan" if framework == "torchtitan" else framework)
    assert reshard.diff(direct, back).equal


@pytest.mark.parametrize(
    ("name", "kind"),
    rest_full(
        [(name, kind) for name in ("fsdp2", "fsdp2_tp", "fsdp1", "fsdp2_sgd") for kind in ("nested", "titan")],
        ("fsdp2", "nested"),
        ("fsdp2_tp", "titan"),
    ),
)
def test_dcp_to_zero_and_back_is_the_same(name: str, kind: str, saved: SavedFactory, tmp_path: Path) -> None:
    source = saved(name)
    framework = "torchtitan" if kind == "titan" else "state-dict"
    there, back, direct = tmp_path / "zero" / TAG, tmp_path / "back", tmp_path / "direct"
    lost = left_out(dcp_convert(source.path(kind), there, "zero", dp=3, zero_stage=2))
    assert lost.keys() == tokens_of(kind)
    dcp_convert(tmp_path / "zero", back, "dcp", framework=framework, files=2)
    dcp_convert(source.path(kind), direct, "dcp", framework=framework, files=2)
    counted = {"skipped_steps"} if kind == "titan" else {"skipped_steps", "steps"}  # DeepSpeed counts them
    # The tokens come back, too, in `train_state`, which DeepSpeed keeps as client state.
    assert {difference.name for difference in reshard.diff(direct, back).differences} == counted
    both = [{n: data for n, data in contents(path).items() if n.endswith(".distcp")} for path in (direct, back)]
    assert kind == "titan" or both[0] == both[1]


def test_a_save_without_collectives_is_refused_when_a_file_is_missing(saved: SavedFactory, tmp_path: Path) -> None:
    """With all of its files it is right at any world size (`test_dcp_out`), where torch is silently wrong."""
    source = saved("fsdp2")
    for file in ("__2.metadata", "__2_0.distcp"):
        cut = tmp_path / file
        shutil.copytree(source.path("no_collectives"), cut)
        (cut / file).unlink()
        with pytest.raises(SourceError) as refused:
            dcp_convert(cut, tmp_path / "out", "dcp")
        assert refused.value.code == "checkpoint.incomplete", file


LIGHTNINGS_OWN = ("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks")
OF_DEEPSPEED = {
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    *(
        f"optimizer_state_dict.{name}"
        for name in ("clip_grad", "ds_version", "dynamic_loss_scale", "loss_scaler", "overflow", "zero_stage")
    ),
}  # fmt: skip
LEFT_OUT: list[tuple[Framework, str, str, tuple[str, ...]]] = [
    *(
        ("zero", "", framework, tuple(OF_DEEPSPEED))
        for framework in ("state-dict", "torchtitan", "accelerate", "lightning")
    ),
    ("torch", "app", "zero", ()),
    ("torch", "nested", "zero", ()),
    ("torch", "titan", "zero", ("tokens",)),
    ("accelerate", "", "zero", ("random_states",)),
    ("lightning", "", "zero", ()),
    ("trainer", "", "zero", ("random_states", "trainer_state.json")),
    ("accelerate", "", "state-dict", ("random_states",)),
    ("torch", "titan", "accelerate", ("dataloader", "train_state")),
    ("torch", "titan", "state-dict", ()),
    ("lightning", "", "accelerate", LIGHTNINGS_OWN),
    ("lightning", "", "state-dict", ()),
]
"""Whatever each direction leaves out."""


@pytest.mark.parametrize(("framework", "kind", "to", "names"), LEFT_OUT, ids=["-".join(row[:3]) for row in LEFT_OUT])
def test_each_direction_says_what_it_leaves_out(
    framework: Framework, kind: str, to: str, names: tuple[str, ...], saved: SavedFactory, tmp_path: Path
) -> None:
    runs = {"zero": zero_run(2, RUNS["fsdp2"], 4), "lightning": RUNS["fsdp1"], "trainer": FsdpRun("gpt2")}
    source = saved(runs.get(framework, RUNS["fsdp2"]), framework)
    options: dict[str, Any] = {"dp": 2, "zero_stage": 2} if to == "zero" else {"framework": to}
    result = dcp_convert(source.path(kind), tmp_path / "out" / TAG, "zero" if to == "zero" else "dcp", **options)
    assert set(left_out(result)) == set(names)
