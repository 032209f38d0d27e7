"""Optimizer states in Megatron-core's buckets, of runs of many shapes; and files that lie, each refused by name."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.conversions import refused_conversion
from house.megatron_runs import EMBEDDING, OUTPUT, PAIR, MegatronRun
from house.megatron_saves import as_bridge_saves
from oracle.whole_tensors import named, whole

RUNS = {
    "one rank": MegatronRun(data=1),
    "data 2": MegatronRun(),
    "data 3, odd lengths": MegatronRun(data=3, hidden=9),
    "tensor 2": MegatronRun(tensor=2),
    "pipeline 2": MegatronRun(pipeline=2),
    "virtual pipeline": MegatronRun(pipeline=2, chunks=2),
    "tensor 2, pipeline 2, virtual": MegatronRun(tensor=2, pipeline=2, chunks=2),
    "tied": MegatronRun(tied=True),
    "tied, pipeline 2": MegatronRun(tied=True, pipeline=2, tensor=2),
    "tied, pipeline 2, virtual": MegatronRun(tied=True, pipeline=2, chunks=2),
    "buckets": MegatronRun(bucket=700),
    "small buckets, tied, pipeline 2": MegatronRun(bucket=200, tied=True, pipeline=2),
    "buckets, tensor 2, virtual": MegatronRun(bucket=300, tensor=2, pipeline=2, chunks=2, data=3),
    "padded vocabulary": MegatronRun(vocabulary=11, tensor=2),
    "experts of one rank": MegatronRun(experts=4, layers=2, tensor=2),
    "expert parallel": MegatronRun(experts=4, expert_ranks=2, layers=2),
    "expert parallel, pipeline 2": MegatronRun(experts=4, expert_ranks=2, pipeline=2, tensor=2),
    "expert parallel, buckets": MegatronRun(experts=4, expert_ranks=2, layers=2, bucket=600, data=4),
}
SAVES: dict[str, Callable[[MegatronRun, Path], Path]] = {
    "legacy": MegatronRun.save_legacy,
    "torch_dist": MegatronRun.save_torch_dist,
    "gathered": MegatronRun.save_gathered,
    "flattened": MegatronRun.save_flattened,
}


def found_in(source: Path, place: Path) -> dict[str, torch.Tensor]:
    """All tensors that are read: masters and moments by one conversion, weights by another."""
    reshard.convert(source, place / "dcp", to="dcp", grammar="state-dict", progress=False)
    tensors = {k.replace("/model", "/fp32"): v for k, v in named(whole(place / "dcp")).items() if "/step" not in k}
    reshard.convert(source, place / "weights", to="safetensors", dtype="bf16", progress=False)
    return tensors | {f"{k}/weight": v for k, v in load_file(place / "weights" / "model.safetensors").items()}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [k for k, v in wanted.items() if v.dtype != found[k].dtype or not torch.equal(found[k], v)]


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("name", RUNS)
def test_states_are_those_of_the_run(name: str, kind: str, tmp_path: Path) -> None:
    run = RUNS[name]
    source = SAVES[kind](run, tmp_path / "run")
    assert differing(found_in(source, tmp_path), run.expected()) == []


def test_a_parallel_save_keeps_no_order_and_needs_none(tmp_path: Path) -> None:
    run = MegatronRun(tensor=2, pipeline=2)
    source = run.save_torch_dist(tmp_path / "run", shuffled=True)
    assert differing(found_in(source, tmp_path), run.expected()) == []


@pytest.mark.parametrize("run", [MegatronRun(data=3), MegatronRun(bucket=700), MegatronRun(vocabulary=11, tied=True)])
def test_files_of_megatron_bridge_stand_for_arguments(run: MegatronRun, tmp_path: Path) -> None:
    """Without `args`: the configuration beside it says the layout, and the run's state the counters."""
    source = as_bridge_saves(run.save_torch_dist(tmp_path / "run"))
    assert differing(found_in(source, tmp_path), run.expected()) == []
    found = reshard.inspect(str(source))
    assert (found.tag, found.step, found.world) == ("iter_0000007", 7, {"tp": 1, "pp": 1, "dp": run.data})
    result = reshard.convert(source, tmp_path / "to" / "iter_0000007", to="megatron", progress=False)
    assert {"run_config.yaml", "train_state.pt"} <= {n.path for n in result.not_carried}
    args = torch.load(tmp_path / "to" / "iter_0000007" / "common.pt", weights_only=False)["args"]
    assert (args.num_layers, args.swiglu, args.consumed_train_samples) == (4, True, 56)
    assert args.untie_embeddings_and_output_weights is not run.tied


def test_a_configuration_that_is_none_leaves_the_places_open(tmp_path: Path) -> None:
    place = MegatronRun().save_torch_dist(tmp_path / "run")
    as_bridge_saves(place)
    for text in ("model: [1]", "model: &a {num_layers: 4}\nddp: *a", "model: {num_layers: 4", "7"):
        (place / "run_config.yaml").write_text(text)
        error = refused(place, tmp_path / "out")
        assert error.code == "checkpoint.ambiguous"
        result = reshard.convert(place, tmp_path / f"weights_{len(text)}", to="safetensors", progress=False)
        assert any("its arguments are not read" in n.reason for n in result.not_carried)
    (place / "run_config.yaml").unlink()
    (place.parent / "latest_train_state.pt").write_bytes((place / "common.pt").read_bytes())
    assert reshard.inspect(str(place.parent)).newest == str(place)


@pytest.mark.parametrize("kind", SAVES)
def test_counters_and_groups(kind: str, tmp_path: Path) -> None:
    SAVES[kind](MegatronRun(pipeline=2), tmp_path / "run")
    source = tmp_path / "run" if kind == "legacy" else tmp_path / "run" / "iter_0000007"
    reshard.convert(source, tmp_path / "dcp", to="dcp", grammar="state-dict", progress=False)
    optimizer = whole(tmp_path / "dcp")["optimizer"]
    assert {s["step"] for s in optimizer["state"].values()} == {7}
    assert [g["weight_decay"] for g in optimizer["param_groups"]] == [0.1, 0.0]
    assert all("layernorm" in name for name in optimizer["param_groups"][1]["params"])


# A plain optimizer.


def save_plain(run: MegatronRun, root: Path, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """The run with masters by param groups and states by numbers, as `Float16OptimizerWithFloat16Params` saves them."""
    place = run.save_legacy(root)
    for number, folder in enumerate(sorted(place.iterdir())):
        (folder / "distrib_optim.pt").unlink()
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        stage, rank = (number % run.pipeline, number // run.pipeline) if run.pipeline > 1 else (0, number)
        held = [name for name, _ in run.held(stage, 0, 0)]
        groups = [[n for n in held if "layernorm" not in n], [n for n in held if "layernorm" in n]]
        numbers = {n: at for at, n in enumerate(n for group in groups for n in group)}
        inner = {
            "state": {
                at: {k: run.part(n, k, rank).clone() for k in ("exp_avg", "exp_avg_sq")} for n, at in numbers.items()
            },
            "param_groups": [
                {**of, "params": [numbers[n] for n in group]} for of, group in zip(run.groups()[0], groups, strict=True)
            ],
        }
        masters = [[run.part(n, "param", rank).clone() for n in group] for group in groups]
        state["optimizer"] = {"optimizer": inner, "fp32_from_fp16_params": masters}
        if change is not None:
            change(state)
        torch.save(state, folder / "model_optim_rng.pt")
    return place


@pytest.mark.parametrize("run", [MegatronRun(), MegatronRun(tensor=2), MegatronRun(pipeline=2, tied=True)])
def test_states_of_a_plain_optimizer(run: MegatronRun, tmp_path: Path) -> None:
    assert differing(found_in(save_plain(run, tmp_path / "run"), tmp_path), run.expected()) == []


def test_groups_of_another_rule_are_refused(tmp_path: Path) -> None:
    def move(state: dict[str, Any]) -> None:
        inner = state["optimizer"]["optimizer"]
        inner["param_groups"][1]["params"].append(inner["param_groups"][0]["params"].pop())

    error = refused(save_plain(MegatronRun(), tmp_path / "run", move), tmp_path / "out")
    assert error.code == "checkpoint.ambiguous"
    assert "param groups of" in str(error)


# Files that lie. Each is refused by name; weights stay readable where only the optimizer is in doubt.


refused = partial(refused_conversion, reshard.convert, to="dcp", progress=False)


def weights_are_right(run: MegatronRun, source: Path, place: Path) -> None:
    reshard.convert(source, place / "weights", to="safetensors", dtype="bf16", progress=False)
    found = {f"{k}/weight": v for k, v in load_file(place / "weights" / "model.safetensors").items()}
    assert differing(found, {k: v for k, v in run.expected().items() if k.endswith("/weight")}) == []


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    """A torch file with a changed value."""
    value = torch.load(path, weights_only=False)
    replaced = change(value)
    torch.save(value if replaced is None else replaced, path)


def metadata_of(source: Path, change: Callable[[Any], None]) -> None:
    path = source / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def _shorter(optimizer: Any) -> None:
    buffer = optimizer[0][PAIR]
    for state in ("param", "exp_avg", "exp_avg_sq"):
        buffer[state] = buffer[state][:-1].clone()


def _shorter_and_said(optimizer: Any) -> None:
    _shorter(optimizer)
    optimizer[0][PAIR]["numel_unpadded"] -= 1


def _said_alone(optimizer: Any) -> None:
    optimizer[0][PAIR]["numel_unpadded"] += 64


def _swapped_buffers(optimizer: Any) -> None:
    optimizer[0], optimizer[1] = optimizer[1], optimizer[0]


def _old_lists(optimizer: Any) -> None:
    del optimizer["buckets_coalesced"]


def _other_type(optimizer: Any) -> None:
    optimizer[0] = {(torch.uint8, torch.float32): optimizer[0][PAIR]}


def _no_masters(optimizer: Any) -> None:
    del optimizer[0][PAIR]["param"]


def _lost_buffer(optimizer: Any) -> None:
    del optimizer[0]


OPTIMIZERS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "vectors are shorter than said": (_shorter, "checkpoint.malformed", "numel_unpadded is"),
    "vectors are shorter": (_shorter_and_said, "checkpoint.ambiguous", "are stored"),
    "a length that lies": (_said_alone, "checkpoint.malformed", "numel_unpadded is"),
    "buffers of other chunks": (_swapped_buffers, "checkpoint.ambiguous", "buffer"),
    "lists of buckets": (_old_lists, "checkpoint.ambiguous", "before February 2024"),
    "a buffer of FP8": (_other_type, "checkpoint.ambiguous", "uint8"),
    "no masters": (_no_masters, "checkpoint.malformed", "without masters"),
    "a buffer is lost": (_lost_buffer, "checkpoint.ambiguous", "holds 1 buffers, and the model makes 2"),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_changed_optimizer_file_is_refused(case: str, tmp_path: Path) -> None:
    run = MegatronRun(pipeline=2, chunks=2)
    source = run.save_legacy(tmp_path / "run")
    change, code, said = OPTIMIZERS[case]
    edited(source / "mp_rank_00_000" / "distrib_optim.pt", change)
    error = refused(source, tmp_path / "out")
    assert (error.code, said in str(error)) == (code, True), error
    if code == "checkpoint.ambiguous":
        weights_are_right(run, source, tmp_path)


def _keys_in_another_order(state: Any) -> None:
    names = list(state["model"])
    a, b = (names.index(f"decoder.layers.0.{n}.weight") for n in ("input_layernorm", "pre_mlp_layernorm"))
    names[a], names[b] = names[b], names[a]
    state["model"] = {n: state["model"][n] for n in names}


def _another_iteration(state: Any) -> None:
    state["iteration"] = 8


def _another_step(state: Any) -> None:
    state["optimizer"]["optimizer"]["param_groups"][0]["step"] = 8


def _a_lost_layer(state: Any) -> None:
    state["model"] = {k: v for k, v in state["model"].items() if "layers.1." not in k}


def _a_lost_parameter(state: Any) -> None:
    del state["model"]["decoder.layers.0.mlp.linear_fc2.weight"]


def _an_unknown_parameter(state: Any) -> None:
    state["model"]["decoder.layers.0.self_attention.linear_new.weight"] = torch.ones(4, 4)


def _a_gate_that_is_none(state: Any) -> None:
    state["args"].swiglu = False


def _another_replica(state: Any) -> None:
    state["model"]["decoder.layers.0.input_layernorm.weight"] += 1


def _an_old_version(state: Any) -> None:
    state["checkpoint_version"] = 1.0


def _an_older_model(state: Any) -> None:
    state["model"] = {"language_model": {}}


def _a_layout_of_its_own(state: Any) -> None:
    state["args"].pipeline_model_parallel_layout = "Et|tL"


def _other_layers(state: Any) -> None:
    state["args"].num_layers = 6


def _endless_layers(state: Any) -> None:
    state["args"].num_layers = 10**15


def _endless_experts(state: Any) -> None:
    state["args"].num_experts = 10**15
    state["model"]["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"] = torch.ones(4, 4)


def _endless_ranks(state: Any) -> None:
    state["args"].expert_model_parallel_size = 10**12
    state["args"].expert_tensor_parallel_size = 2


def _grouped_matrices(state: Any) -> None:
    state["model"]["decoder.layers.0.mlp.experts.weight1"] = torch.ones(4, 4)


MODELS: dict[str, tuple[Callable[[Any], None], bool, str, str]] = {
    # change, of all ranks or of the second one, code, words
    "keys in another order": (_keys_in_another_order, True, "checkpoint.damaged", "layernorm"),
    "another iteration": (_another_iteration, False, "checkpoint.mixed", "iteration is 7"),
    "another step": (_another_step, False, "checkpoint.mixed", "step"),
    "a lost layer": (_a_lost_layer, False, "checkpoint.mixed", "layer"),
    "a lost parameter": (_a_lost_parameter, False, "checkpoint.mixed", "linear_fc2"),
    "an unknown parameter": (_an_unknown_parameter, True, "source.unsupported", "linear_new"),
    "a gate that is none": (_a_gate_that_is_none, True, "source.unsupported", "gated"),
    "another replica": (_another_replica, False, "checkpoint.disagreement", "input_layernorm"),
    "an old version": (_an_old_version, True, "source.unsupported", "version 1.0"),
    "an older model": (_an_older_model, True, "source.unsupported", "language_model"),
    "a layout of its own": (_a_layout_of_its_own, True, "source.unsupported", "pipeline_model_parallel_layout"),
    "other layers": (_other_layers, True, "checkpoint.mixed", "layer"),
    "endless layers": (_endless_layers, True, "checkpoint.mixed", "layer"),
    "endless experts": (_endless_experts, True, "checkpoint.mixed", "expert"),
    "endless ranks": (_endless_ranks, True, "source.unsupported", "model-parallel ranks and chunks"),
    "experts in one matrix": (_grouped_matrices, True, "source.unsupported", "weight1"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_changed_model_file_is_refused(case: str, tmp_path: Path) -> None:
    change, everywhere, code, said = MODELS[case]
    source = MegatronRun(tensor=2).save_legacy(tmp_path / "run")
    for folder in sorted(source.iterdir())[0 if everywhere else 1 :]:
        edited(folder / "model_optim_rng.pt", change)
    error = refused(source, tmp_path / "out")
    assert (error.code, said in str(error)) == (code, True), error


def test_a_copy_of_the_embedding_that_differs_is_refused(tmp_path: Path) -> None:
    source = MegatronRun(tied=True, pipeline=2).save_legacy(tmp_path / "run")

    def change(state: Any) -> None:
        state["model"][OUTPUT][0] += 1

    edited(source / "mp_rank_00_001" / "model_optim_rng.pt", change)
    error = refused(source, tmp_path / "out")
    assert error.code == "checkpoint.disagreement"
    assert EMBEDDING in str(error)


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        ("mp_rank_01_000", "checkpoint.incomplete"),
        ("mp_rank_00_001", "checkpoint.incomplete"),
        ("mp_rank_01_001/distrib_optim.pt", "checkpoint.incomplete"),
        ("mp_rank_00_001/model_optim_rng.pt", "checkpoint.incomplete"),
    ],
)
def test_a_lost_rank_is_named(lost: str, code: str, tmp_path: Path) -> None:
    source = MegatronRun(tensor=2, pipeline=2).save_legacy(tmp_path / "run")
    path = source / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    error = refused(source, tmp_path / "out")
    assert (error.code, lost.partition("/")[0] in str(error)) == (code, True), error


def test_directories_of_two_runs_are_refused(tmp_path: Path) -> None:
    source = MegatronRun(tensor=2).save_legacy(tmp_path / "run")
    shutil.copytree(source / "mp_rank_01", source / "mp_rank_02")
    error = refused(source, tmp_path / "out")
    assert (error.code, "mp_rank_02" in str(error)) == ("checkpoint.mixed", True)


def test_the_digits_of_an_expert_rank_are_no_stage(tmp_path: Path) -> None:
    run = MegatronRun(experts=4, expert_ranks=2, layers=2)
    source = run.save_legacy(tmp_path / "run")
    assert sorted(p.name for p in source.iterdir()) == ["mp_rank_00_000", "mp_rank_00_001"]

    def change(state: Any) -> None:
        state["args"].num_experts = 6

    for folder in source.iterdir():
        edited(folder / "model_optim_rng.pt", change)
    error = refused(source, tmp_path / "out")
    assert (error.code, "2 experts" in str(error)) == ("checkpoint.mixed", True)


def test_a_tracker_that_names_no_iteration_offers_those_that_are_there(tmp_path: Path) -> None:
    MegatronRun().save_legacy(tmp_path / "run")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("8")
    error = refused(tmp_path / "run", tmp_path / "out")
    assert "--tag iter_0000007" in error.fix


# torch_dist.


def _key(metadata: Any, end: str) -> str:
    return next(k for k in metadata.state_dict_metadata if k.endswith(end))


def _longer_bucket(metadata: Any) -> None:
    for state in ("param", "exp_avg", "exp_avg_sq"):
        entry = metadata.state_dict_metadata[_key(metadata, f"bucket_idx_0.{state}")]
        entry.size = torch.Size((entry.size[0] + 64,))


def _a_lost_object(metadata: Any) -> None:
    key = _key(metadata, "per_bucket_numel/shard_0_1")
    del metadata.state_dict_metadata[key]
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != key}


def _a_lost_rank(metadata: Any) -> None:
    lost = [k for k in metadata.state_dict_metadata if "dp_group_idx_1." in k]
    for key in lost:
        del metadata.state_dict_metadata[key]
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn not in lost}


def _a_lost_vector(metadata: Any) -> None:
    key = _key(metadata, "bucket_idx_0.param")
    del metadata.state_dict_metadata[key]
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != key}


def _a_lost_chunk(metadata: Any) -> None:
    key = _key(metadata, "bucket_idx_0.exp_avg")
    chunk = metadata.state_dict_metadata[key].chunks.pop()
    metadata.storage_data = {
        k: v for k, v in metadata.storage_data.items() if k.fqn != key or k.offset != chunk.offsets
    }


def _another_form(metadata: Any) -> None:
    key = _key(metadata, "per_bucket_numel/shard_0_1")
    other = key.replace("per_bucket_numel", "param_state")
    metadata.state_dict_metadata[other] = metadata.state_dict_metadata.pop(key)
    for index in [i for i in metadata.storage_data if i.fqn == key]:
        metadata.storage_data[type(index)(other)] = metadata.storage_data.pop(index)


METADATA: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "a longer bucket": (_longer_bucket, "checkpoint.malformed", "is said to have"),
    "a lost object": (_a_lost_object, "checkpoint.incomplete", "per_bucket_numel"),
    "a lost rank": (_a_lost_rank, "checkpoint.ambiguous", "2 model-parallel ranks"),
    "lost masters": (_a_lost_vector, "checkpoint.malformed", "is said to have"),
    "another form": (_another_form, "checkpoint.ambiguous", "dp_zero_gather_scatter"),
    "a lost chunk": (_a_lost_chunk, "checkpoint.ambiguous", "no chunk begins or ends there"),
}


@pytest.mark.parametrize("case", METADATA)
def test_changed_metadata_are_refused(case: str, tmp_path: Path) -> None:
    change, code, said = METADATA[case]
    source = MegatronRun(tensor=2).save_torch_dist(tmp_path / "run")
    metadata_of(source, change)
    error = refused(source, tmp_path / "out")
    assert (error.code, said in str(error)) == (code, True), error


ARGS: dict[str, tuple[dict[str, Any], str]] = {
    "no arguments": ({"tensor_model_parallel_size": None}, "do not say its tensor"),
    "another tensor parallelism": ({"tensor_model_parallel_size": 4}, "model-parallel ranks"),
    "more layers at first": ({"decoder_first_pipeline_num_layers": 3}, "elements"),
    "a pipeline layout": ({"pipeline_model_parallel_layout": "Et|tL"}, "pipeline_model_parallel_layout"),
    "another data parallelism": ({"data_parallel_size": 5}, "a chunk begins at element"),
    "a virtual pipeline": ({"virtual_pipeline_model_parallel_size": 2}, "buffers"),
    "too many ranks": ({"virtual_pipeline_model_parallel_size": 10**12}, "model-parallel ranks and chunks"),
    "layers that do not divide": ({"virtual_pipeline_model_parallel_size": 3}, "do not divide"),
}


@pytest.mark.parametrize("case", ARGS)
def test_arguments_of_another_run_are_refused(case: str, tmp_path: Path) -> None:
    run = MegatronRun(tensor=2, pipeline=2)
    source = run.save_torch_dist(tmp_path / "run")
    said, words = ARGS[case]

    def change(common: Any) -> None:
        for name, value in said.items():
            setattr(common["args"], name, value)

    edited(source / "common.pt", change)
    error = refused(source, tmp_path / "out")
    assert (error.code, words in str(error)) == ("checkpoint.ambiguous", True), error
    weights_are_right(run, source, tmp_path)


def test_masters_of_another_run_are_refused(tmp_path: Path) -> None:
    one, other = MegatronRun(tensor=2), MegatronRun(tensor=2, seed=4)
    source, second = one.save_torch_dist(tmp_path / "one"), other.save_torch_dist(tmp_path / "other")
    shutil.copy(second / "__1_0.distcp", source / "__1_0.distcp")
    error = refused(source, tmp_path / "out")
    assert error.code == "checkpoint.damaged"
