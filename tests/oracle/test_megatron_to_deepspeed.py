"""Runs of real Megatron-core go on in real DeepSpeed under Megatron-DeepSpeed's names, and runs of such models here.

What DeepSpeed loaded is compared with what Megatron-core saved, bit for bit; the losses of the next steps with those of
the run that saved. Names are mapped by hand here, and rows of query, key and value are taken one by one.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.repository import real_checkpoint
from oracle.driver import ParallelOracle
from oracle.launcher import Worlds
from oracle.parallel_cases import AcrossCase, Layout
from oracle.real_folders import expected, load_any, wrong_atoms
from oracle.test_megatron_across import CASES as ACROSS
from oracle.test_megatron_out import STEP, Stage, megatron_is_needed, run
from reshard.choices import NameScheme, OpaquePolicy, TargetFormat
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest, ConvertResult
from reshard.options import MegatronOptions, Options, SourceSpec
from reshard_engine.checkpoint import Checkpoint, ParamGroup, Scalar
from reshard_engine.formats.megatron.across import renamed_to_deepspeed, with_loss_scale
from reshard_engine.formats.megatron.model import MegatronFacts
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.nodes import Node, PTensorRef, mapping_items, mapping_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

THIRD_STAGE = "llama_bf16_z3_nopipe_tp2dp2"
GROUPED, SPLIT = "megatron-deepspeed-grouped", "megatron-deepspeed-split"
UNUSED_COPY = "tied_modules.embed.position_embeddings.weight"
SIZE, HEADS = 8, 4
KV_HEADS = {"gpt": 4, "llama": 2}
BLOCK = {
    "input_layernorm": "input_layernorm", "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense", "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h",
}  # fmt: skip
PLAIN = {
    "embedding.word_embeddings": "language_model.embedding.word_embeddings",
    "embedding.position_embeddings": "language_model.embedding.position_embeddings",
    "decoder.final_layernorm": "language_model.encoder.final_layernorm",
    "output_layer": "language_model.output_layer",
}
PIPELINE = {
    "gpt": {
        "embedding.word_embeddings": "tied_modules.embed.word_embeddings",
        "embedding.position_embeddings": "tied_modules.embed.position_embeddings",
        "decoder.final_layernorm": "6",
    },
    "llama": {
        "embedding.word_embeddings": "1.word_embeddings",
        "decoder.final_layernorm": "6",
        "output_layer": "7.lm_head",
    },
}


def renamed(state: dict[str, torch.Tensor], case: AcrossCase) -> dict[str, torch.Tensor]:
    """The live state of Megatron-core, `NAME/KIND`, as `KIND/NAME` with the names of a Megatron-DeepSpeed model."""
    found: dict[str, torch.Tensor] = {}
    others = PIPELINE[case.model] if case.pipeline else PLAIN
    for key, tensor in state.items():
        name, _, kind = key.rpartition("/")
        module, _, last = name.rpartition(".")
        if (block := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", module)) is not None:
            number = int(block[1]) + 2 if case.pipeline else f"language_model.encoder.layers.{block[1]}"
            new, value = f"{number}.{BLOCK[block[2]]}.{last}", tensor
            if "linear_qkv" in module and case.split:
                value = tensor[rows_of_parts(KV_HEADS[case.model])]
        else:
            new, value = f"{others[module]}.{last}", tensor
        found[f"{'module' if kind == 'weight' else kind}/{new}"] = value
    return found


def rows_of_parts(groups: int) -> list[int]:
    """The rows of all queries, then of all keys, then of all values, in a matrix that has them by group."""
    each = HEADS // groups
    wide = (each + 2) * SIZE
    queries = [g * wide + at for g in range(groups) for at in range(each * SIZE)]
    keys = [g * wide + each * SIZE + at for g in range(groups) for at in range(SIZE)]
    return queries + keys + [row + SIZE for row in keys]


def entries_of(folder: Path) -> dict[str, Any]:
    """The model states of the first rank."""
    found: dict[str, Any] = load_any(next(iter(sorted(folder.glob("*mp_rank_00_model_states.pt")))))
    return found


def options_of(case: AcrossCase) -> dict[str, Any]:
    return {
        "names": "megatron-pipeline" if case.pipeline else "megatron-no-pipeline",
        "hf_rules": SPLIT if case.split else GROUPED,
        "progress": False,
        "verify": "full",
    }


def resumed(
    parallel: ParallelOracle,
    begun: Stage,
    case: AcrossCase,
    layout: Layout,
    source: Path,
    out: Path,
    *,
    universal: bool = False,
) -> tuple[tuple[float, ...], ConvertResult]:
    """Convert, load with DeepSpeed, compare everything by name; returns the losses of the next steps."""
    target, options = out / "to" / "global_step3", options_of(case)
    if universal:
        result = reshard.convert(source, target, to="universal", **options)
    else:
        stage = "bf16" if case.stage == "bf16opt" else str(case.stage)
        sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
        result = reshard.convert(source, target, to="zero", zero_stage=stage, **sizes, **options)
    now = parallel.resume(case, layout, target.parent, out / "now", load_universal=universal)
    wanted = renamed(begun.state("saved"), case)
    if case.dtype == "fp32":
        wanted |= {k.replace("module/", "fp32/"): v for k, v in wanted.items() if k.startswith("module/")}
    found = load_file(now.state.tensors_path)
    assert found.keys() == wanted.keys()
    assert [k for k, v in wanted.items() if found[k].dtype != v.dtype or not torch.equal(found[k], v)] == []
    # DeepSpeed does not load the copy of positions on the last stage, which nothing there uses.
    assert [n for n in now.wrong_weights if layout.pp == 1 or n != UNUSED_COPY] == []
    assert {*now.state.step.values()} == {3.0}
    assert {name for key in wanted if key.startswith("fp32/") for name in [key[5:]]} == now.state.step.keys()
    before = begun.meta("saved")
    decays = {g["wd_mult"]: g for g in before["groups"]}
    for name, values in now.state.hyper_parameters.items():
        decaying = not name.endswith(".bias") and wanted[f"fp32/{name}"].dim() > 1 and case.stage != 3
        theirs = decays[float(decaying)]
        assert values["wd_mult"] == float(decaying)
        assert {k: values[k] for k in ("lr", "eps", "weight_decay")} == {
            k: theirs[k] for k in ("lr", "eps", "weight_decay")
        }
        assert (*values["betas"],) == (*theirs["betas"],)
    scheduler = now.state.meta["lr_scheduler"]
    assert {k: scheduler[k] for k in before["scheduler"]} == before["scheduler"]
    assert now.state.meta["global_steps"] == before["iteration"] == 3
    assert now.state.meta["global_samples"] == 12
    return now.losses, result


GPT, LLAMA = {"model": "gpt"}, {"model": "llama"}
CASES: dict[str, tuple[dict[str, Any], str, list[tuple[dict[str, Any], Layout, bool]]]] = {
    "gpt": (
        GPT | {"tp": 2, "dp": 2},
        "fully_reshardable",
        [
            (GPT | {"stage": 1}, Layout(tp=2, pp=2), False),
            (GPT | {"stage": 2, "pipeline": False, "split": True}, Layout(tp=2, dp=2), False),
            (GPT | {"stage": 1, "split": True}, Layout(pp=2, dp=2), True),
        ],
    ),
    "buckets": (
        LLAMA | {"tp": 2, "pp": 2, "dtype": "bf16", "vocab": 84},
        "dp_reshardable",
        [
            (LLAMA | {"stage": "bf16opt", "dtype": "bf16", "split": True, "vocab": 84}, Layout(tp=2, pp=2), False),
            (LLAMA | {"stage": 2, "dtype": "bf16", "pipeline": False, "vocab": 84}, Layout(tp=2, dp=2), True),
        ],
    ),
    "legacy": (
        LLAMA | {"pp": 2, "vpp": 2},
        "torch",
        [
            (LLAMA | {"stage": 1}, Layout(tp=2, dp=2), False),
            (LLAMA | {"stage": 3, "pipeline": False, "split": True}, Layout(dp=2), False),
            (LLAMA | {"stage": 3, "pipeline": False}, Layout(dp=2), True),
        ],
    ),
    "fp16": (
        GPT | {"tp": 2, "dtype": "fp16"},
        "dp_reshardable",
        [
            (GPT | {"stage": 1, "dtype": "fp16"}, Layout(pp=2), False),
            (GPT | {"stage": 2, "dtype": "fp16", "pipeline": False}, Layout(tp=2), True),
        ],
    ),
    "plain": (GPT | {"plain": True}, "fully_reshardable", [(GPT | {"stage": 1}, Layout(pp=2, dp=2), False)]),
}
"""Names of cases: the run, the form of its save, and the runs of DeepSpeed that go on: case, layout, universal."""


@megatron_is_needed
@pytest.mark.parametrize("name", CASES)
def test_deepspeed_goes_on_with_a_run_of_megatron_core(
    name: str, tmp_path: Path, worlds: Worlds, parallel: ParallelOracle
) -> None:
    case, form, targets = CASES[name]
    begun = run(worlds, case, tmp_path / "begun", save=[[form, str(tmp_path / "saved")]])
    for number, (fields, layout, universal) in enumerate(targets):
        now = AcrossCase(**fields)
        source, out = tmp_path / "saved", tmp_path / str(number)
        losses, result = resumed(parallel, begun, now, layout, source, out, universal=universal)
        left = {n.path for n in result.not_carried if "_extra_state" not in n.path}
        assert left <= {"num_floating_point_operations_so_far", "content_metadata", "rng_state"}
        # At ZeRO-3 Megatron-DeepSpeed gives no parameter weight decay: only the first loss is that of the run.
        same = losses[:1] if now.stage == 3 else losses
        close = 1e-6 if now.dtype == "fp32" else 2e-3
        assert same == pytest.approx(begun.losses[: len(same)], rel=close, abs=0)


BACK: dict[str, tuple[dict[str, Any], Layout, dict[str, int]]] = {
    "gpt": (GPT, Layout(tp=2, pp=2), {"tp": 4}),
    "llama": (LLAMA | {"stage": 2, "pipeline": False, "vocab": 84}, Layout(tp=2, dp=2), {"tp": 2, "pp": 2}),
    "fp16": (GPT | {"dtype": "fp16", "pipeline": False}, Layout(tp=2), {"pp": 2}),
    "split": (LLAMA | {"stage": "bf16opt", "dtype": "bf16", "split": True}, Layout(pp=2, dp=2), {"tp": 2}),
}
"""Names of cases: the run of DeepSpeed, its layout, and that of the run of Megatron-core which goes on."""


@megatron_is_needed
@pytest.mark.parametrize("name", BACK)
def test_megatron_core_goes_on_with_a_run_of_deepspeed(
    name: str, tmp_path: Path, worlds: Worlds, parallel: ParallelOracle
) -> None:
    fields, layout, sizes = BACK[name]
    case = AcrossCase(**fields)
    begun = parallel.train(case, layout, tmp_path / "begun")
    target = tmp_path / "to" / STEP
    options: dict[str, Any] = {**options_of(case), "names": "megatron-core"}
    reshard.convert(begun.dir, target, to="megatron", **options)
    core: dict[str, Any] = {"model": case.model, "dtype": case.dtype, "vocab": case.vocab}
    now = run(worlds, core | sizes, tmp_path / "now", load=["torch_dist", str(target.parent)])
    found, wanted = renamed(now.state("loaded"), case), load_file(begun.truth.tensors_path)
    if case.dtype == "fp32":
        wanted = {k: v for k, v in wanted.items() if k in found or not k.startswith("module/")}
    assert found.keys() == wanted.keys()
    assert [k for k, v in wanted.items() if found[k].dtype != v.dtype or not torch.equal(found[k], v)] == []
    meta, saved = now.meta("loaded"), begun.truth.meta
    assert {g["step"] for g in meta["groups"]} == {3}
    # DeepSpeed's scale doubles at the second step at which its count is full: two good steps of three count.
    scaler = {"scale": 16.0, "growth_tracker": 2.0, "hysteresis_tracker": 2.0}
    assert meta["scaler"] == (scaler if case.dtype == "fp16" else {})
    assert meta["scheduler"] == {k: v for k, v in saved["lr_scheduler"].items() if "tokens" not in k}
    assert now.losses == pytest.approx(begun.losses_after, rel=1e-6 if case.dtype == "fp32" else 2e-3, abs=0)


@pytest.mark.parametrize("name", [*ACROSS, THIRD_STAGE])
def test_real_checkpoints_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Megatron-DeepSpeed to Megatron-core, and back: every master and moment by name is what Megatron trained."""
    real, pipeline = real_checkpoint(name), "nopipe" not in name
    options: dict[str, Any] = {"progress": False, "verify": "full"}
    source, order = real / "src", GROUPED if name == THIRD_STAGE else ACROSS[name]
    if name == THIRD_STAGE:
        # Universal, it has the param groups of the stages below.
        source = Path(reshard.convert(source, tmp_path / "stages", to="universal", **options).target)
    core = tmp_path / "core" / STEP
    there = {} if order is None else {"hf_rules": order}
    reshard.convert(source, core, to="megatron", names="megatron-core", **there, **options)
    back: dict[str, Any] = {"names": "megatron-pipeline" if pipeline else "megatron-no-pipeline"}
    reshard.convert(core, tmp_path / "back", to="universal", hf_rules=order or SPLIT, **back, **options)
    wanted = {k: v for k, v in expected(real).items() if k.rpartition("/")[2] in ("fp32", "exp_avg", "exp_avg_sq")}
    assert wrong_atoms(tmp_path / "back", wanted) == []
    sizes = {"tp": 2, "pp": 2 if pipeline else 1, "dp": 2, "zero_stage": "1"}
    reshard.convert(core, tmp_path / "native", to="zero", hf_rules=order or SPLIT, **sizes, **back, **options)
    found = {k: v for k, v in entries_of(tmp_path / "native").items() if k != "module"}
    assert {k: found[k] for k in ("iteration", "checkpoint_version", "global_steps", "global_samples")} == {
        "iteration": 3, "checkpoint_version": 3.0, "global_steps": 3, "global_samples": 24,
    }  # fmt: skip
    before = entries_of(real / "src" / "global_step3")
    theirs: dict[str, Any] = vars(before["args"])
    ours: dict[str, Any] = vars(found["args"])
    of_layout = {"world_size", "zero_stage", *(k for k in ours if k.endswith("_parallel_size"))}
    assert {k: v for k, v in ours.items() if k not in of_layout and theirs[k] != v} == {}
    assert {k: v for k, v in before["lr_scheduler"].items() if k != "num_tokens"} == found["lr_scheduler"]


# What is refused, and why.


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of Megatron-DeepSpeed as one of Megatron-core."""
    target = tmp_path_factory.mktemp("core") / STEP
    name = "llama_fp32_z1_tp2pp2dp2"
    reshard.convert(
        real_checkpoint(name) / "src", target, to="megatron", names="megatron-core", hf_rules=GROUPED, progress=False
    )
    return target


@pytest.mark.parametrize(
    ("options", "text", "fix"),
    [
        ({"to": "universal", "names": "megatron-pipeline"}, "no file says in which order", SPLIT),
        ({"to": "universal", "names": "megatron-pipeline", "hf_rules": "llama"}, "--hf-rules for --names", "leave"),
        (
            {"to": "megatron", "names": "megatron-pipeline", "hf_rules": SPLIT},
            "holds the names of Megatron-core",
            "leave",
        ),
        ({"to": "zero", "dp": 1, "pp": 2, "names": "megatron-no-pipeline", "zero_stage": "1"}, "no pipeline", ""),
        (
            {"to": "zero", "dp": 1, "tp": 4, "names": "megatron-pipeline", "zero_stage": "1"},
            "2 heads do not divide",
            "",
        ),
        ({"to": "zero", "dp": 1, "names": "megatron-pipeline"}, "which ZeRO stage", "--zero-stage"),
    ],
)
def test_what_a_request_does_not_say_is_refused(
    options: dict[str, Any], text: str, fix: str, core: Path, tmp_path: Path
) -> None:
    if options.get("to") == "zero":
        options = {"hf_rules": GROUPED, **options}
    with pytest.raises(RequestError, match=re.escape(text)) as caught:
        reshard.convert(core, tmp_path / "to", progress=False, **options)
    assert fix in (caught.value.fix or "")
    assert not (tmp_path / "to").exists()


def _request(args: dict[str, Any] | None = None, *, split: bool = False) -> ConvertRequest:
    megatron = MegatronOptions(
        hf_rules=SPLIT if split else GROUPED, megatron_args=None if args is None else json.dumps(args)
    )
    return ConvertRequest(
        source=SourceSpec(url="/source"),
        target="/target",
        to=TargetFormat.UNIVERSAL,
        names=NameScheme.MEGATRON_PLAIN,
        options=Options(megatron=megatron),
    )


def _read(place: Path) -> Checkpoint:
    return read_checkpoint(open_location(str(place)), None, OpaqueLedger(OpaquePolicy.KEEP), target="universal")


def _without_args(found: Checkpoint, *names: str, **items: Node) -> Checkpoint:
    facts = found.facts
    assert isinstance(facts, MegatronFacts)
    kept = {k: v for k, v in facts.common.args.items() if k not in names}
    return replace(
        found, facts=replace(facts, common=replace(facts.common, args=kept, items={**facts.common.items, **items}))
    )


def test_models_that_megatron_deepspeed_does_not_have_are_refused(core: Path) -> None:
    found = _read(core)
    with pytest.raises(RequestError, match="how many heads"):
        renamed_to_deepspeed(_without_args(found, "num_attention_heads"), _request())
    assert renamed_to_deepspeed(_without_args(found, "num_attention_heads"), _request({"num_attention_heads": 4}))
    for said in ({"softmax_type": "off-by-one"}, {"rotary_interleaved": True}, {"window_size": [4, 0]}):
        with pytest.raises(RequestError, match="does not compute what this run does"):
            renamed_to_deepspeed(found, _request(said))
    with pytest.raises(RequestError, match="swiglu is False"):
        renamed_to_deepspeed(found, _request({"swiglu": False}))
    with pytest.raises(RequestError, match=r"checkpoint_version is 2\.0"):
        renamed_to_deepspeed(_without_args(found, checkpoint_version=2.0), _request())
    for name, text in (
        ("decoder.layers.0.mlp.router.weight", "names are not those"),
        ("decoder.layers.0.self_attention.linear_qkv.bias", "some matrices of its layers have biases"),
        ("decoder.final_layernorm.bias", "some norms of its layers have biases"),
    ):
        first = next(p for p in found.parameters if p.fqn == "decoder.layers.0.self_attention.linear_qkv.weight")
        more = replace(first, fqn=name, shape=first.shape)
        with pytest.raises(RequestError, match=text):
            renamed_to_deepspeed(replace(found, parameters=(*found.parameters, more)), _request())


def test_optimizers_that_megatron_deepspeed_does_not_have_are_refused(core: Path) -> None:
    found = _read(core)
    assert found.optimizer is not None

    def grouped(**changes: Node) -> Checkpoint:
        assert found.optimizer is not None
        groups = tuple(ParamGroup({**g.hyper_parameters, **changes}) for g in found.optimizer.groups)
        return replace(found, optimizer=replace(found.optimizer, groups=groups))

    for changes, text in (
        ({"wd_mult": 1.0}, "by its rule wd_mult is 0.0"),
        ({"is_decoupled_lr": True}, "learning rate of its own"),
        ({"max_lr": 1.0}, "max_lr 1.0, and its schedule 0.004"),
        ({"lr": None}, "says no number for lr"),
        ({"betas": 0.9}, "says no number for betas"),
    ):
        with pytest.raises(RequestError, match=text):
            renamed_to_deepspeed(grouped(**changes), _request())
    first, *others = found.parameters
    odd = replace(first, states={k: v for k, v in first.states.items() if k != "exp_avg_sq"})
    with pytest.raises(RequestError, match="Adam has exp_avg and exp_avg_sq"):
        renamed_to_deepspeed(replace(found, parameters=(odd, *others)), _request())
    ahead = replace(first, scalars={"step": Scalar(4)})
    with pytest.raises(RequestError, match="other values or steps"):
        renamed_to_deepspeed(replace(found, parameters=(ahead, *others)), _request())
    # Groups with a multiplier of the rate have names of their own.
    scaled = renamed_to_deepspeed(grouped(lr_mult=0.5), _request())
    assert scaled.optimizer is not None
    assert [g.name for g in scaled.optimizer.groups] == ["wd_scale_lr", "no_wd_scale_lr"]


def test_schedules_and_scales_that_are_not_known_are_named(core: Path) -> None:
    found = _read(core)
    schedule = mapping_items(found.schedulers[0], what="")
    other = mapping_of({**schedule, "lr_decay_style": "WSD"})
    done = renamed_to_deepspeed(replace(found, schedulers=(other,)), _request())
    assert done.schedulers == ()
    assert "opt_param_scheduler" in [n.path for n in done.not_carried]
    facts = found.facts
    assert isinstance(facts, MegatronFacts)
    # A scale whose window nothing says.
    scaler = mapping_of({"scale": PTensorRef(0), "growth_tracker": 3, "hysteresis_tracker": 2})
    named = with_loss_scale(replace(found, facts=replace(facts, scaler=scaler)), _request())
    assert named.facts.loss_scale() is None
    assert "optimizer.grad_scaler" in [n.path for n in named.not_carried]


def test_parameters_are_in_the_order_of_the_model(core: Path) -> None:
    """Whatever the order of the files: DeepSpeed finds flat states by their places."""
    found = _read(core)
    turned = replace(found, parameters=tuple(reversed(found.parameters)), module_names=found.module_names[::-1])
    for split in (False, True):
        one, other = (renamed_to_deepspeed(c, _request(split=split)) for c in (found, turned))
        names = [p.fqn for p in one.parameters]
        assert names == [p.fqn for p in other.parameters]
        assert [*other.module_names] == names
        assert names[:4] == [
            "language_model.embedding.word_embeddings.weight",
            *(f"language_model.encoder.layers.0.{n}.weight" for n in (
                "input_layernorm", "self_attention.query_key_value", "self_attention.dense",
            )),
        ]  # fmt: skip
        assert names[-2:] == ["language_model.encoder.final_layernorm.weight", "language_model.output_layer.weight"]
