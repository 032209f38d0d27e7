"""Real runs of Megatron-DeepSpeed go on in Megatron-core: torch reads the truth from our files, and megatron-core, too.

Names are mapped by hand here; rows of query, key and value are taken one by one.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.conversions import refused_conversion
from house.repository import real_checkpoint
from oracle.launcher import Worlds
from oracle.real_folders import load_any
from oracle.test_megatron_out import STEP, megatron_is_needed, run
from oracle.whole_tensors import whole
from reshard.choices import NameScheme, OpaquePolicy, TargetFormat
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest
from reshard.options import MegatronOptions, Options, SourceSpec
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.megatron.across import renamed_from_deepspeed
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

GROUPED, SPLIT = "megatron-deepspeed-grouped", "megatron-deepspeed-split"
CASES = {
    "gpt_fp32_z1_tp2pp1dp2": GROUPED,
    "gpt_bf16_z1_tp2pp2dp2": GROUPED,
    "gpt_bf16_z2_nopipe_tp2dp2": GROUPED,
    "gpt_fp16_z1_tp2pp1dp2": GROUPED,
    "gptheadqkvsubw_fp32_z1_tp2pp1dp2": None,
    "llama_fp32_z1_tp2pp2dp2": GROUPED,
}
"""The checkpoints whose optimizer is one of Megatron-core's, and what the user says of rows; None: the files say it."""
LAYERS, HEADS, SIZE = 4, 4, 8
BLOCK = {
    "input_layernorm": "input_layernorm", "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj", "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1", "mlp.dense_4h_to_h": "mlp.linear_fc2",
}  # fmt: skip
OTHERS = {
    "tied_modules.embed.word_embeddings": "embedding.word_embeddings",
    "1.word_embeddings": "embedding.word_embeddings",
    "tied_modules.embed.position_embeddings": "embedding.position_embeddings",
    "6": "decoder.final_layernorm", "7.lm_head": "output_layer",
    "language_model.embedding.word_embeddings": "embedding.word_embeddings",
    "language_model.embedding.position_embeddings": "embedding.position_embeddings",
    "language_model.encoder.final_layernorm": "decoder.final_layernorm",
    "language_model.output_layer": "output_layer",
}  # fmt: skip
JOINED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms that Megatron-core saves under the key of the layer behind them."""


def converted(name: str, target: Path, to: str = "megatron", **options: Any) -> Path:
    if CASES.get(name) is not None:
        options.setdefault("hf_rules", CASES[name])
    source = real_checkpoint(name) / "src"
    reshard.convert(source, target, to=to, names="megatron-core", progress=False, verify="full", **options)
    return target


def truth(name: str) -> dict[str, torch.Tensor]:
    """The true tensors by `NAME/KIND`, with Megatron-core's names."""
    found: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(real_checkpoint(name) / "expected.safetensors").items():
        old, _, kind = key.rpartition("/")
        module, _, last = old.rpartition(".")
        if (block := re.fullmatch(r"(?:language_model\.encoder\.layers\.)?(\d+)\.(.+)", module)) is not None and block[
            2
        ] in BLOCK:
            number = int(block[1]) - (0 if old.startswith("language") else 2)
            new, value = f"decoder.layers.{number}.{BLOCK[block[2]]}.{last}", tensor
            if "subw" in name and "query_key_value" in old:
                rows = [
                    part * HEADS * SIZE + head * SIZE + at
                    for head in range(HEADS)
                    for part in range(3)
                    for at in range(SIZE)
                ]
                value = tensor[rows]
        else:
            new, value = f"{OTHERS[module]}.{last}", tensor
        found[f"{new}/{kind}"] = value
    return found


def by_entry(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the optimizer as a distributed checkpoint holds them: layers are one tensor."""
    layers: dict[str, dict[int, torch.Tensor]] = {}
    found: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        prefix = f"optimizer.state.{'param' if kind == 'fp32' else kind}."
        if (layer := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)) is None:
            found[prefix + name] = value
            continue
        inner = layer[2]
        for norm, joined in JOINED.items():
            inner = inner.replace(norm, joined)
        layers.setdefault(f"{prefix}decoder.layers.{inner}", {})[int(layer[1])] = value
    return found | {key: torch.stack([held[n] for n in range(LAYERS)]) for key, held in layers.items()}


@pytest.mark.parametrize("name", CASES)
def test_torch_reads_the_truth_under_names_of_megatron_core(name: str, tmp_path: Path) -> None:
    target = converted(name, tmp_path / STEP)
    found = {k: v for k, v in whole(target).items() if k.startswith("optimizer.state.")}
    wanted = by_entry(truth(name))
    assert found.keys() == wanted.keys()
    rows = {
        k: found[k][: len(v)] if "word_embeddings" in k or "output_layer" in k else found[k] for k, v in wanted.items()
    }
    assert [k for k, v in wanted.items() if not torch.equal(rows[k], v)] == []
    common = load_any(target / "common.pt")
    groups = common["optimizer"]["optimizer"]["param_groups"]
    rate = 0.003972653955421975
    assert [(g["wd_mult"], g["weight_decay"], g["step"], g["lr"]) for g in groups] == [
        (1.0, 0.1, 3, rate), (0.0, 0.0, 3, rate),
    ]  # fmt: skip
    assert {(g["max_lr"], g["min_lr"], g["lr_mult"], tuple(g["betas"]), g["eps"]) for g in groups} == {
        (0.004, 0.0004, 1.0, (0.9, 0.95), 1e-08)
    }
    assert common["opt_param_scheduler"] == {
        "max_lr": 0.004, "lr_warmup_steps": 16, "num_steps": 24, "lr_decay_style": "cosine", "lr_decay_steps": 160,
        "min_lr": 0.0004, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 48,
    }  # fmt: skip
    assert common["iteration"] == 3
    assert common["args"].decoupled_weight_decay is False


@megatron_is_needed
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Layouts that are not the source's: at that one, Megatron-LM needs --no-load-rng.
        ("gpt_fp32_z1_tp2pp1dp2", {"pp": 2}),
        ("gpt_bf16_z1_tp2pp2dp2", {"pp": 2}),
        ("gptheadqkvsubw_fp32_z1_tp2pp1dp2", {"tp": 4}),
        ("llama_fp32_z1_tp2pp2dp2", {"tp": 2}),
    ],
)
def test_megatron_core_loads_the_truth(name: str, layout: dict[str, int], tmp_path: Path, worlds: Worlds) -> None:
    converted(name, tmp_path / "to" / STEP)
    model, dtype, *_ = name.split("_")
    case: dict[str, Any] = {
        "model": "llama" if model == "llama" else "gpt",
        "dtype": dtype,
        "vocab": 208,
        "positions": 32,
        "lr": 0.004,
        "min_lr": 0.0004,
    }
    now = run(worlds, case | layout, tmp_path / "now", load=["torch_dist", str(tmp_path / "to")])
    loaded, wanted = now.state("loaded"), truth(name)
    assert {k for k in loaded if not k.endswith("/weight")} == wanted.keys()
    assert [k for k, v in wanted.items() if not torch.equal(loaded[k], v)] == []
    weights = {k.removesuffix("/fp32"): v for k, v in wanted.items() if k.endswith("/fp32")}
    assert [
        k for k, v in weights.items() if not torch.equal(loaded[f"{k}/weight"], v.to(loaded[f"{k}/weight"].dtype))
    ] == []
    meta = now.meta("loaded")
    assert meta["iteration"] == 3
    assert meta["scheduler"]["num_steps"] == 24
    assert {(g["wd_mult"], g["step"], g["lr"], g["max_lr"]) for g in meta["groups"]} == {
        (1.0, 3, meta["groups"][0]["lr"], 0.004), (0.0, 3, meta["groups"][0]["lr"], 0.004),
    }  # fmt: skip
    assert all(math.isfinite(loss) and loss < 6 for loss in now.losses)


def test_the_optimizer_goes_by_way_of_dcp(tmp_path: Path) -> None:
    """DCP keeps the fields by which Megatron-core finds a param group; arguments and schedule it does not keep."""
    name = "llama_fp32_z1_tp2pp2dp2"
    first, quiet = converted(name, tmp_path / "core" / STEP), {"progress": False, "verify": "full"}
    reshard.convert(first, tmp_path / "dcp", to="dcp", **quiet)
    said = tmp_path / "args.json"
    args = {k: v for k, v in vars(load_any(first / "common.pt")["args"]).items() if isinstance(v, str | int | float)}
    said.write_text(json.dumps(args))
    again: dict[str, Any] = {"to": "megatron", **quiet}
    result = reshard.convert(tmp_path / "dcp", tmp_path / "back" / STEP, megatron_args=said, **again)
    assert [w for w in result.warnings if "opt_param_scheduler" in w]
    before, after = (
        {k: v for k, v in whole(place).items() if isinstance(v, torch.Tensor)}
        for place in (first, tmp_path / "back" / STEP)
    )
    assert before.keys() == after.keys()
    # The rows of padding behind the vocabulary are Megatron's: DCP does not keep them.
    assert [k for k, v in before.items() if not torch.equal(v[: len(after[k])], after[k])] == []
    held = [
        load_any(place / "common.pt")["optimizer"]["optimizer"]["param_groups"]
        for place in (first, tmp_path / "back" / STEP)
    ]
    assert held[0] == held[1]


refused = partial(refused_conversion, converted)


def test_the_order_of_rows_is_never_guessed(tmp_path: Path) -> None:
    plain, sections = "gpt_fp32_z1_tp2pp1dp2", "gptheadqkvsubw_fp32_z1_tp2pp1dp2"
    error = refused(plain, tmp_path / STEP, hf_rules=None)
    assert "nothing says the order of the rows" in str(error)
    assert GROUPED in (error.fix or "")
    assert SPLIT in (error.fix or "")
    assert "parameter_with_sub_params" in (refused(plain, tmp_path / STEP, hf_rules=SPLIT).fix or "")
    assert "consists of sections" in str(refused(sections, tmp_path / STEP, hf_rules=GROUPED))


def test_sections_that_the_user_says_are_taken(tmp_path: Path) -> None:
    """Rules of the request, for a version that declares plain slices and stores [Q | K | V] in each."""
    name, part = "gpt_fp32_z1_tp2pp1dp2", HEADS * SIZE
    rules = tmp_path / "rules.yaml"

    def say(sections: list[int]) -> Path:
        one = {
            "shape": [sections, 32],
            "partition_dim": 0,
            "patterns": [r"\d+\.self_attention\.query_key_value\.weight"],
        }
        other = {**one, "shape": [sections], "patterns": [r"\d+\.self_attention\.query_key_value\.bias"]}
        rules.write_text(json.dumps({"parameter_with_sub_params": [one, other]}))
        return rules

    found = whole(converted(name, tmp_path / STEP, hf_rules=SPLIT, rules=say([part, part, part])))
    wanted = truth(name)
    # The truth is both slices behind each other, of two heads each; by group, a head's query, key and value follow.
    rows = [
        head // 2 * 3 * 2 * SIZE + kind * 2 * SIZE + head % 2 * SIZE + at
        for head in range(HEADS) for kind in range(3) for at in range(SIZE)
    ]  # fmt: skip
    for layer in range(LAYERS):
        for last in ("weight", "bias"):
            for state, kind in (("param", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                inner = f"self_attention.linear_qkv.{last}"
                ours = found[f"optimizer.state.{state}.decoder.layers.{inner}"][layer]
                assert torch.equal(ours, wanted[f"decoder.layers.{layer}.{inner}/{kind}"][rows])
    error = refused(name, tmp_path / "not" / STEP, hf_rules=SPLIT, rules=say([part, 2 * part]))
    assert "queries, keys and values are (32, 32, 32)" in str(error)


def test_a_universal_checkpoint_goes_on_alike(tmp_path: Path) -> None:
    name = "gpt_bf16_z1_tp2pp2dp2"
    reshard.convert(real_checkpoint(name) / "src", tmp_path / "u", to="universal", progress=False)
    options: dict[str, Any] = {"to": "megatron", "names": "megatron-core", "progress": False}
    reshard.convert(tmp_path / "u", tmp_path / "to" / STEP, hf_rules=GROUPED, **options)
    converted(name, tmp_path / STEP)
    assert reshard.diff(tmp_path / "to" / STEP, tmp_path / STEP).equal
    # It does not say of how many slices it was joined.
    with pytest.raises(RequestError, match="joined of plain slices"):
        reshard.convert(tmp_path / "u", tmp_path / "not" / STEP, hf_rules=SPLIT, **options)


def test_an_optimizer_of_other_groups_is_refused_and_its_weights_are_not(tmp_path: Path) -> None:
    """At ZeRO-3, Megatron-DeepSpeed sees parameters without shape, and gives none of them weight decay."""
    name = "llama_bf16_z3_nopipe_tp2dp2"
    error = refused(name, tmp_path / STEP, hf_rules=GROUPED)
    assert "embedding.word_embeddings.weight has wd_mult 0.0" in str(error)
    assert "--to universal first" in (error.fix or "")
    converted(name, tmp_path / "weights", "safetensors", hf_rules=GROUPED)
    found = load_file(tmp_path / "weights" / "model.safetensors")
    wanted = {k.removesuffix("/fp32"): v for k, v in truth(name).items() if k.endswith("/fp32")}
    assert found.keys() == wanted.keys()
    assert [k for k, v in wanted.items() if not torch.equal(found[k], v.to(found[k].dtype))] == []


def test_experts_and_targets_of_deepspeed_are_refused(tmp_path: Path) -> None:
    assert "names are not those" in str(refused("moe_bf16_z1_ep2dp4", tmp_path / STEP, hf_rules=GROUPED))
    error = refused("gpt_fp32_z1_tp2pp1dp2", tmp_path / STEP, to="universal")
    assert error.code == "request.invalid"


def _read(name: str) -> Checkpoint:
    location = open_location(str(real_checkpoint(name) / "src" / "global_step3"))
    return read_checkpoint(location, None, OpaqueLedger(OpaquePolicy.KEEP))


def _request(args: dict[str, Any] | None = None) -> ConvertRequest:
    megatron = MegatronOptions(hf_rules=GROUPED, megatron_args=None if args is None else json.dumps(args))
    return ConvertRequest(
        source=SourceSpec(url="/source"),
        target="/target",
        to=TargetFormat.MEGATRON,
        names=NameScheme.MEGATRON_CORE,
        options=Options(megatron=megatron),
    )


def test_every_lacking_fact_is_named() -> None:
    found = _read("gpt_fp32_z1_tp2pp1dp2")
    silent = replace(found, client_state={})
    with pytest.raises(RequestError, match="how many heads"):
        renamed_from_deepspeed(silent, _request())
    said: dict[str, Any] = {"num_attention_heads": 4, "num_query_groups": 4}
    with pytest.raises(RequestError, match="nothing says the lr"):
        renamed_from_deepspeed(silent, _request(said))
    with pytest.raises(RequestError, match="is not that of 5 heads"):
        renamed_from_deepspeed(found, _request({"num_attention_heads": 5}))
    done = renamed_from_deepspeed(silent, _request(said | {"lr": 0.004, "min_lr": 0.0004}))
    assert done.optimizer is not None
    assert [g.hyper_parameters["wd_mult"] for g in done.optimizer.groups] == [1.0, 0.0]


def test_steps_states_and_schedules_of_other_kinds_are_refused_or_named() -> None:
    found = _read("gpt_fp32_z1_tp2pp1dp2")
    first, *others = found.parameters
    odd = replace(first, states={k: v for k, v in first.states.items() if k != "exp_avg_sq"})
    with pytest.raises(RequestError, match="Adam has exp_avg and exp_avg_sq"):
        renamed_from_deepspeed(replace(found, parameters=(odd, *others)), _request())
    stepless = replace(first, scalars={})
    with pytest.raises(RequestError, match="nothing says the steps"):
        renamed_from_deepspeed(replace(found, parameters=(stepless, *others)), _request())
    step = first.scalars["step"]
    ahead = replace(first, scalars={"step": replace(step, value=4)})
    with pytest.raises(RequestError, match="other values or steps"):
        renamed_from_deepspeed(replace(found, parameters=(ahead, *others)), _request())
    done = renamed_from_deepspeed(replace(found, schedulers=("other",)), _request())
    assert "lr_scheduler" in [n.path for n in done.not_carried]
