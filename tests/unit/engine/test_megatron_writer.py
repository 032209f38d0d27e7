"""Distributed checkpoints that `--to megatron` writes, by torch's own reader and by ours.

The runs are random states in layouts that are drawn; real Megatron-core loads such files in `oracle.test_megatron_out`.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,  # pyright: ignore[reportPrivateUsage]
)

import reshard
from house.megatron_runs import EMBEDDING, OUTPUT, MegatronRun, entry_of
from oracle.whole_tensors import named, whole
from reshard.errors import RequestError, ReshardError
from reshard_engine.formats.megatron.model import COMMON_ENTRY

STEP = "iter_0000007"


def written(source: Path, target: Path, **options: Any) -> Any:
    return reshard.convert(source, target, to="megatron", progress=False, **options)


def entries(run: MegatronRun, kind: str) -> dict[str, torch.Tensor]:
    """The tensors under Megatron-core's keys: layers, and experts, lie along axes of their own."""
    found: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for name, states in run.truth.items():
        key, index = entry_of(name)
        found.setdefault(key, {})[index] = states[kind]
    joined: dict[str, torch.Tensor] = {}
    for key, parts in found.items():
        shape = [1 + max(at) for at in zip(*parts, strict=True)]
        joined[key] = torch.stack([parts[at] for at in sorted(parts)]).reshape(
            *shape, *next(iter(parts.values())).shape
        )
    return joined


def loaded(folder: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These keys by torch's own reader."""
    state: Any = {key: torch.empty_like(value) for key, value in wanted.items()}
    _load_state_dict(state, FileSystemReader(str(folder)), no_dist=True)
    return state  # type: ignore[no-any-return]


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "reshard.json"}


@st.composite
def runs(draw: st.DrawFn) -> MegatronRun:
    """Runs whose layouts fit."""
    experts = draw(st.sampled_from([0, 4]))
    expert_ranks = draw(st.sampled_from([1, 2])) if experts else 1
    pipeline = draw(st.sampled_from([1, 2]))
    chunks = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    return MegatronRun(
        tensor=draw(st.sampled_from([1, 2])),
        pipeline=pipeline,
        chunks=chunks,
        expert_ranks=expert_ranks,
        data=2,
        layers=4,
        experts=experts,
        tied=draw(st.booleans()),
        vocabulary=draw(st.sampled_from([11, 12])),
        seed=draw(st.integers(0, 99)),
    )


@given(run=runs(), legacy=st.booleans(), place=st.sampled_from(["file", "entry"]))
@settings(max_examples=12, deadline=None)
def test_every_element_is_where_megatron_looks_for_it(
    run: MegatronRun, legacy: bool, place: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    source = run.save_legacy(folder / "saved") if legacy else run.save_torch_dist(folder / "saved")
    target = folder / "out" / STEP
    result = written(source, target, common_state=place, ep=run.expert_ranks)
    assert [n.path for n in result.not_carried] == []
    for kind, prefix in (("weight", ""), ("param", "optimizer.state.param."), ("exp_avg", "optimizer.state.exp_avg."),
                         ("exp_avg_sq", "optimizer.state.exp_avg_sq.")):  # fmt: skip
        wanted = {prefix + key: value for key, value in entries(run, kind).items()}
        found = loaded(target, wanted)
        assert [k for k, v in wanted.items() if found[k].dtype != v.dtype or not torch.equal(found[k], v)] == []
    # Our reader, and what it reads written once more.
    reshard.convert(target, folder / "dcp", to="dcp", framework="state-dict", progress=False)
    back = {k.replace("/model", "/fp32"): v for k, v in named(whole(folder / "dcp")).items() if not k.endswith("/step")}
    expected = {k: v for k, v in run.expected().items() if not k.endswith("/weight")}
    assert back.keys() == expected.keys()
    assert [k for k, v in expected.items() if not torch.equal(back[k], v)] == []
    written(target, folder / "again" / STEP, common_state=place, ep=run.expert_ranks)
    assert content(folder / "again" / STEP) == content(target)


def test_the_common_state_is_in_a_file_or_an_entry(tmp_path: Path) -> None:
    source = MegatronRun().save_torch_dist(tmp_path / "saved")
    written(source, tmp_path / "file" / STEP)
    written(source, tmp_path / "entry" / STEP, common_state="entry")
    common: Any = torch.load(tmp_path / "file" / STEP / "common.pt", weights_only=False)
    assert (common["iteration"], common["checkpoint_version"]) == (7, 3.0)
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert [g["step"] for g in common["optimizer"]["optimizer"]["param_groups"]] == [7, 7]
    assert common["args"].num_layers == 4
    assert not (tmp_path / "entry" / STEP / "common.pt").exists()
    said = json.loads((tmp_path / "entry" / STEP / "metadata.json").read_text())
    assert said == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    assert reshard.diff(tmp_path / "file" / STEP, tmp_path / "entry" / STEP).equal


@pytest.mark.parametrize(
    ("said", "numbered"),
    [
        ({}, False),
        ({"moe_layer_freq": 1, "heterogeneous_layers_config_path": ""}, False),
        ({"moe_layer_freq": [1, 0, 1, 1]}, True),
        ({"linear_attention_freq": 2}, True),
        ({"hetereogenous_dist_checkpoint": True}, True),
        ({"heterogeneous_layers_config_encoded_json": "{}"}, True),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"common_state": "entry"}, {"optimizer_sharding": "dp_reshardable", "dp": 2}], ids=str
)
def test_the_content_metadata_describes_the_keys(
    said: dict[str, Any], numbered: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """From it the loader derives the keys that it asks for (`TransformerBlock.sharded_state_dict`)."""
    run = MegatronRun(said={"accumulate_allreduce_grads_in_fp32": True, **said})
    target = tmp_path / "out" / STEP
    written(run.save_legacy(tmp_path / "saved"), target, **options)
    keys = FileSystemReader(str(target)).read_metadata().state_dict_metadata
    assert ("decoder.layers.3.mlp.linear_fc1.weight" in keys) is numbered
    assert ("decoder.layers.mlp.linear_fc1.weight" in keys) is not numbered
    if "common_state" in options:
        state: Any = {f"{COMMON_ENTRY}/shard_0_1": io.BytesIO()}
        _load_state_dict(state, FileSystemReader(str(target)), no_dist=True)
        (common,) = state[f"{COMMON_ENTRY}/shard_0_1"]
    else:
        common = torch.load(target / "common.pt", weights_only=False)
    content_metadata = common["content_metadata"]
    assert content_metadata.get("non_homogeneous_layers", False) is numbered
    assert content_metadata["singleton_local_shards"] is False


def test_experts_get_groups_of_their_own_and_lose_them(tmp_path: Path) -> None:
    run = MegatronRun(experts=4, expert_ranks=2)
    source = run.save_torch_dist(tmp_path / "saved")
    result = written(source, tmp_path / "joined" / STEP)
    assert any("--ep" in w for w in result.warnings)
    joined: Any = torch.load(tmp_path / "joined" / STEP / "common.pt", weights_only=False)
    assert [g["is_expert_parallel"] for g in joined["optimizer"]["optimizer"]["param_groups"]] == [False, False]
    assert joined["args"].expert_model_parallel_size == 1
    written(tmp_path / "joined" / STEP, tmp_path / "apart" / STEP, ep=4)
    apart: Any = torch.load(tmp_path / "apart" / STEP / "common.pt", weights_only=False)
    kinds = [[g["is_expert_parallel"] for g in one["optimizer"]["param_groups"]] for one in apart["optimizer"].values()]
    assert (list(apart["optimizer"]), kinds) == ([0, 1], [[False, False], [True]])


def test_a_tracker_names_the_step_and_never_goes_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    source = MegatronRun().save_torch_dist(tmp_path / "saved")
    written(source, run / STEP)
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert reshard.inspect(str(run)).tag == STEP
    assert reshard.verify(run / STEP).ok
    other = written(source, tmp_path / "elsewhere")
    assert any(f"Megatron-LM looks for {STEP}" in w for w in other.warnings)
    (run / "iter_0000009").mkdir()
    for file in (run / STEP).iterdir():
        (run / "iter_0000009" / file.name).write_bytes(file.read_bytes())
    (run / "latest_checkpointed_iteration.txt").write_text("9")
    shutil.rmtree(run / STEP)
    with pytest.raises(RequestError, match="earlier step") as caught:
        written(source, run / STEP)
    assert caught.value.code == "request.target_exists"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "9"


def _args(folder: Path) -> Path:
    said = {"num_layers": 4, "hidden_size": 10, "num_attention_heads": 2, "transformer_impl": "local"}
    (folder / "args.json").write_text(json.dumps(said))
    return folder / "args.json"


def test_without_an_optimizer_there_are_weights_and_words_about_it(tmp_path: Path) -> None:
    run = MegatronRun()
    source = run.save_torch_dist(tmp_path / "saved")
    reshard.convert(source, tmp_path / "weights", to="safetensors", progress=False)
    result = written(tmp_path / "weights", tmp_path / "out" / STEP, megatron_args=_args(tmp_path))
    assert any("--no-load-optim" in w for w in result.warnings)
    wanted = {k: v[: run.vocabulary] if k in (EMBEDDING, OUTPUT) else v for k, v in entries(run, "weight").items()}
    found = loaded(tmp_path / "out" / STEP, wanted)
    assert [k for k, v in wanted.items() if not torch.equal(found[k], v)] == []


def _frozen_layer(tensors: dict[str, Any]) -> None:
    del tensors["decoder.layers.2.mlp.linear_fc1.weight"]


def _other_shape(tensors: dict[str, Any]) -> None:
    tensors["decoder.layers.2.mlp.linear_fc1.weight"] = torch.zeros(8, 10, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "says"), [(_frozen_layer, "leave some out"), (_other_shape, "differ in shape or type")]
)
def test_layers_that_differ_are_no_entry(change: Callable[[dict[str, Any]], None], says: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = MegatronRun().save_torch_dist(tmp_path / "saved")
    reshard.convert(source, tmp_path / "weights", to="safetensors", progress=False)
    tensors = load_file(tmp_path / "weights" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "weights" / "model.safetensors")
    args = _args(tmp_path)
    with pytest.raises(RequestError, match=says) as caught:
        written(tmp_path / "weights", tmp_path / "out", megatron_args=args)
    assert caught.value.code == "request.unsatisfiable"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ep": 2}, "the model has no experts"),
        ({"megatron_args": "[]"}, "is no JSON object"),
        ({"megatron_args": "{"}, "--megatron-args"),
        ({"zero_stage": 1}, "--to megatron does not take --zero-stage; it is for --to zero"),
        ({"names": "hf"}, "names of Megatron-core"),
    ],
)
def test_requests_that_fit_no_run_are_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    source = MegatronRun().save_torch_dist(tmp_path / "saved")
    if (text := options.get("megatron_args")) is not None:
        (tmp_path / "args.json").write_text(text)
        options = {"megatron_args": tmp_path / "args.json"}
    with pytest.raises(ReshardError, match=says):
        written(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = MegatronRun(experts=4).save_torch_dist(tmp_path / "saved")
    with pytest.raises(RequestError, match="4 experts do not divide by 3"):
        written(source, tmp_path / "out", ep=3)


def test_groups_of_experts_that_differ_stay_apart(tmp_path: Path) -> None:
    """Without expert parallelism a run has one group for both."""
    run = replace(MegatronRun(experts=4, expert_ranks=2), seed=5)
    source = run.save_torch_dist(tmp_path / "saved")
    written(source, tmp_path / "apart" / STEP, ep=2)
    place = tmp_path / "apart" / STEP / "common.pt"
    common: Any = torch.load(place, weights_only=False)
    common["optimizer"][1]["optimizer"]["param_groups"][0]["step"] = 5
    torch.save(common, place)
    (tmp_path / "apart" / STEP / "reshard.json").unlink()
    with pytest.raises(RequestError, match="param groups of their own") as caught:
        written(tmp_path / "apart" / STEP, tmp_path / "joined")
    assert "--ep" in (caught.value.fix or "")


def test_directories_that_do_not_say_their_layers_need_the_user(tmp_path: Path) -> None:
    """A norm of its own is saved as joined by local layers, and apart by Transformer Engine before experts."""
    source = MegatronRun(experts=2, said={"transformer_impl": None}).save_legacy(tmp_path / "saved")
    with pytest.raises(RequestError, match="do not say transformer_impl"):
        written(source, tmp_path / "out")
    keys: dict[str, set[str]] = {}
    for layers in ("local", "transformer_engine"):
        (tmp_path / "args.json").write_text(json.dumps({"transformer_impl": layers}))
        written(source, tmp_path / layers, megatron_args=tmp_path / "args.json")
        keys[layers] = set(FileSystemReader(str(tmp_path / layers)).read_metadata().state_dict_metadata)
    apart = {"decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.input_layernorm.weight"}
    assert apart & keys["local"] == set()
    assert apart <= keys["transformer_engine"]


def test_models_of_no_run_get_the_keys_of_their_layers(tmp_path: Path) -> None:
    source = MegatronRun(experts=2).save_torch_dist(tmp_path / "saved")
    reshard.convert(source, tmp_path / "weights", to="safetensors", progress=False)
    said = {"num_layers": 4, "hidden_size": 10, "num_attention_heads": 2}
    keys: dict[str, set[str]] = {}
    for layers in ("local", "transformer_engine"):
        (tmp_path / "args.json").write_text(json.dumps({**said, "transformer_impl": layers}))
        written(tmp_path / "weights", tmp_path / layers, megatron_args=tmp_path / "args.json")
        keys[layers] = set(FileSystemReader(str(tmp_path / layers)).read_metadata().state_dict_metadata)
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in keys["local"]
    assert "decoder.layers.pre_mlp_layernorm.weight" in keys["transformer_engine"]
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in keys["transformer_engine"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_equal_to_itself_with_its_experts_on_other_ranks(ranks: int, tmp_path: Path) -> None:
    """Groups of experts are marked in runs with several expert-parallel ranks alone."""
    source = MegatronRun(experts=4, data=4, expert_ranks=ranks).save_legacy(tmp_path / "run")
    target = tmp_path / "other" / source.name
    reshard.convert(source, target, to="megatron", ep=3 - ranks, progress=False)
    held = torch.load(target / "common.pt", weights_only=False)["optimizer"]
    groups = [g for one in ([held] if ranks == 2 else held.values()) for g in one["optimizer"]["param_groups"]]
    assert {g["is_expert_parallel"] for g in groups} == ({False} if ranks == 2 else {False, True})
    report = reshard.diff(source, target)
    assert report.equal, report.differences
