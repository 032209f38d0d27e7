"""The parts that ranks of Megatron-core hold: names of Transformer Engine, padding, and all that nothing says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.megatron_runs import EMBEDDING, OUTPUT, MegatronRun
from reshard.choices import OpaquePolicy
from reshard_engine.checkpoint import Buffer, Checkpoint
from reshard_engine.formats.megatron.buffers import LayoutError
from reshard_engine.formats.megatron.common import CommonState
from reshard_engine.formats.megatron.model import MegatronFacts
from reshard_engine.formats.megatron.placement import Rank, Run
from reshard_engine.formats.megatron.ranks import LocalModels, padded_rows, with_extra_states
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location
from reshard_engine.tensors.layout import ZEROS

FIRST = Rank(0, 0, 0)
SAID = {"accumulate_allreduce_grads_in_fp32": True}
GROUPED: dict[str, Any] = {"moe_grouped_gemm": True}
ENGINE: dict[str, Any] = {"transformer_impl": "transformer_engine"}


def checkpoint_of(run: MegatronRun, place: Path) -> Checkpoint:
    saved = run.save_legacy(place)
    return read_checkpoint(open_location(str(saved)), None, OpaqueLedger(OpaquePolicy.DROP))


def models_of(
    checkpoint: Checkpoint, run: MegatronRun, divisor: int | None = None, *, saved_order: bool = False, **changed: Any
) -> LocalModels:
    assert isinstance(checkpoint.facts, MegatronFacts)
    args = {**checkpoint.facts.common.args, **vars(run.args()), **SAID, **changed}
    common = CommonState(checkpoint.facts.common.items, args)
    divisor = divisor or run.rows // run.tensor
    return LocalModels(checkpoint, Run.of(common), divisor=divisor, saved_order=saved_order)


def keys_of(models: LocalModels, rank: Rank = FIRST) -> list[str]:
    return [held.key for chunk in models.chunks(rank) for held in chunk]


# Names.


def test_engine_joins_norms_with_the_layer_behind_them(tmp_path: Path) -> None:
    run = MegatronRun(layers=1)
    found = keys_of(models_of(checkpoint_of(run, tmp_path), run, **ENGINE))
    assert found == [
        EMBEDDING,
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        OUTPUT,
    ]


def test_grouped_experts_have_a_weight_each_in_one_module(tmp_path: Path) -> None:
    run = MegatronRun(layers=1, experts=4, expert_ranks=2)
    models = models_of(checkpoint_of(run, tmp_path), run, **ENGINE, **GROUPED)
    head = "decoder.layers.0.mlp.experts."
    found = [k for k in keys_of(models, Rank(0, 1, 0)) if k.startswith(head)]
    assert found == [f"{head}linear_fc{part}.weight{expert}" for part in (1, 2) for expert in (0, 1)]
    # The norm before experts is a module of its own, and that of attention is not.
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in keys_of(models)
    slots = models.buffers(Rank(0, 1, 0), of_experts=True)[0].slots
    assert [s.name for s in slots] == found[::-1]


def test_extra_states_stand_behind_their_modules() -> None:
    keys = ["mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.linear_fc2.weight", "norm.weight"]
    found = with_extra_states(keys, last=True)
    assert [key for key, extra in found if extra] == [
        "mlp.linear_fc1._extra_state", "mlp.linear_fc2._extra_state", "output_layer._extra_state",
    ]  # fmt: skip
    assert [key for key, extra in found if not extra] == keys
    assert found[2] == ("mlp.linear_fc1._extra_state", True)


def test_buffers_of_routers_lie_behind_the_router_and_in_no_vector(tmp_path: Path) -> None:
    run = MegatronRun(layers=1, experts=4)
    checkpoint = checkpoint_of(run, tmp_path)
    number = next(p.weight for p in checkpoint.parameters if "final_layernorm" in p.fqn)
    assert number is not None
    name = "decoder.layers.0.mlp.router.expert_bias"
    models = models_of(replace(checkpoint, buffers=(Buffer(name, number),)), run)
    keys = keys_of(models)
    assert keys[keys.index("decoder.layers.0.mlp.router.weight") + 1] == name
    assert name not in models.buffers(FIRST)[0].held
    with pytest.raises(LayoutError, match="which module registers strange"):
        models_of(replace(checkpoint, buffers=(Buffer("strange", number),)), run).chunks(FIRST)


# The vocabulary.


@pytest.mark.parametrize(("tensor", "divisor", "rows"), [(1, 4, 12), (1, 1, 11), (2, 8, 16), (3, 5, 15)])
def test_padding_of_a_vocabulary_is_that_of_the_run(tensor: int, divisor: int, rows: int, tmp_path: Path) -> None:
    source = MegatronRun(vocabulary=11, rows=12, hidden=12)
    checkpoint = checkpoint_of(source, tmp_path)
    models = models_of(checkpoint, replace(source, tensor=tensor), divisor)
    weights = [models.chunks(Rank(0, 0, rank))[0][0] for rank in range(tensor)]
    assert all(w.shape == (rows // tensor, 12) for w in weights)
    lengths: dict[int, int] = {}
    for number, begin, end in (run for w in weights for run in w.weight):
        lengths[number] = lengths.get(number, 0) + end - begin
    embedding = next(p for p in checkpoint.parameters if p.fqn == EMBEDDING)
    assert embedding.weight is not None
    assert lengths.pop(embedding.weight) == 11 * 12
    # The source has one row of padding, which stays; rows behind it begin as zeros.
    assert lengths.pop(ZEROS, 0) == max(rows - 12, 0) * 12
    assert sum(lengths.values()) == min(rows - 11, 1) * 12


def test_padding_that_does_not_fit_is_cut(tmp_path: Path) -> None:
    source = MegatronRun(vocabulary=9, rows=12)
    models = models_of(checkpoint_of(source, tmp_path), source, 10)
    weight = models.chunks(FIRST)[0][0]
    assert weight.shape == (10, 10)
    number = weight.weight[-1][0]
    part, view = models.parts[number - models.first_part]
    assert part.shape == view.grid == (1, 10)


def test_a_vocabulary_of_an_unknown_multiple_is_refused() -> None:
    common = CommonState({}, {})
    assert padded_rows(common, 12, 3, None) == 12
    assert padded_rows(CommonState({}, {"make_vocab_size_divisible_by": 8}), 12, 2, None) == 16
    with pytest.raises(LayoutError, match="11 rows is padded for 2 ranks"):
        padded_rows(common, 11, 2, None)
    with pytest.raises(LayoutError, match="11 rows would be padded to 2000000"):
        padded_rows(CommonState({}, {"make_vocab_size_divisible_by": 1_000_000}), 11, 2, None)


def test_shapes_prove_a_gated_unit_of_which_no_argument_speaks(tmp_path: Path) -> None:
    run = MegatronRun(tensor=2)
    checkpoint = checkpoint_of(run, tmp_path)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    runs = [
        next(h.weight for h in models_of(checkpoint, run, swiglu=said).chunks(FIRST)[0] if h.name == name)
        for said in (True, None)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 2
    with pytest.raises(LayoutError, match=r"40 rows for 20 columns .* is not gated"):
        models_of(checkpoint, run, swiglu=False).chunks(FIRST)


# What nothing says.


@pytest.mark.parametrize(
    ("run", "changed", "text"),
    [
        (MegatronRun(pipeline=3), {}, "4 layers do not divide by 3 stages of 1 chunks"),
        (MegatronRun(pipeline=2, chunks=4), {}, "4 layers do not divide by 2 stages of 4 chunks"),
        (MegatronRun(layers=3), {}, "decoder.layers.3.input_layernorm.weight is in 0 of the 1 stages"),
        (MegatronRun(tensor=4), {}, "linear_proj.weight .* over 4 ranks: 10 does not divide by 4"),
        (MegatronRun(tensor=2), {"num_attention_heads": 5}, "5 attention heads do not divide by 2"),
        (
            MegatronRun(tensor=2),
            {"num_attention_heads": 6, "num_query_groups": 3, "group_query_attention": True},
            "3 query groups do not divide by 2",
        ),
        (MegatronRun(), {"transformer_impl": None}, "transformer_impl is None"),
        (MegatronRun(), {"num_distributed_optimizer_instances": 2}, "2 instances of its distributed optimizer"),
        (MegatronRun(), {"fp8_param_gather": True}, "--fp8-param-gather"),
        (MegatronRun(expert_ranks=2), {}, "no experts for 2 expert-parallel ranks"),
    ],
)
def test_layouts_that_nothing_proves(run: MegatronRun, changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(MegatronRun(), tmp_path)
    with pytest.raises(LayoutError, match=text):
        models_of(checkpoint, run, **changed).chunks(FIRST)


@pytest.mark.parametrize(
    ("run", "changed", "text"),
    [
        (MegatronRun(experts=4, expert_ranks=3, data=3), {}, "4 experts do not divide by 3 expert-parallel ranks"),
        (MegatronRun(experts=4, expert_ranks=4, data=2), {}, "2 data-parallel ranks do not divide by 4"),
        (
            MegatronRun(experts=4, tensor=2),
            {"expert_tensor_parallel_size": 1},
            "experts are cut over 1 tensor-parallel ranks, and all else over 2",
        ),
        (MegatronRun(experts=8), {}, "0.mlp.experts has 4 experts, and the arguments say 8"),
        (MegatronRun(experts=4), {"num_experts": None}, "has 4 experts, and the arguments say None"),
        (MegatronRun(experts=4), {"moe_grouped_gemm": None}, "do not say how experts lie"),
        (MegatronRun(experts=4), GROUPED, "in one matrix with all experts"),
        (
            MegatronRun(experts=4),
            {**ENGINE, "moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True},
            "one matrix",
        ),
    ],
)
def test_experts_that_nothing_proves(run: MegatronRun, changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(MegatronRun(experts=4), tmp_path)
    with pytest.raises(LayoutError, match=text):
        models_of(checkpoint, run, **changed).chunks(FIRST)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"accumulate_allreduce_grads_in_fp32": None}, "of which type gradients are"),
        ({"overlap_grad_reduce": None, "ddp_bucket_size": 300}, r"buckets close \(300 elements, one bucket\)"),
        ({"data_parallel_size": None}, "how many data-parallel ranks"),
    ],
)
def test_buffers_that_nothing_proves(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    run = MegatronRun()
    models = models_of(checkpoint_of(run, tmp_path), run, **changed)
    with pytest.raises(LayoutError, match=text):
        models.buffers(FIRST)


def test_an_unknown_parameter_has_the_order_of_a_legacy_file_alone(tmp_path: Path) -> None:
    run = MegatronRun(layers=1)
    checkpoint = checkpoint_of(run, tmp_path)
    old, new = "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.mlp.strange_layernorm.weight"
    parameters = tuple(replace(p, fqn=new) if p.fqn == old else p for p in checkpoint.parameters)
    names = tuple(new if name == old else name for name in checkpoint.module_names)
    changed = replace(checkpoint, parameters=parameters, module_names=names)
    with pytest.raises(LayoutError, match=r"order in which a model registers .*strange_layernorm"):
        models_of(changed, run)
    assert keys_of(models_of(changed, run, saved_order=True)) == [*names]


def test_stages_with_other_counts_of_layers(tmp_path: Path) -> None:
    run = MegatronRun(layers=4)
    said = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
    models = models_of(checkpoint_of(run, tmp_path), replace(run, pipeline=2), **said)
    layers = [
        [{key.split(".")[2] for key in keys_of(models, Rank(stage, 0, 0)) if key.startswith("decoder.layers.")}]
        for stage in range(2)
    ]
    assert layers == [[{"0"}], [{"0", "1", "2"}]]
    head = "decoder.layers.0.input_layernorm.weight"
    assert [next(h.name for c in models.chunks(Rank(s, 0, 0)) for h in c if h.key == head) for s in range(2)] == [
        head, "decoder.layers.1.input_layernorm.weight",
    ]  # fmt: skip


def test_a_parameter_that_no_gradient_reached_has_the_first_states(tmp_path: Path) -> None:
    run = MegatronRun(layers=1)
    checkpoint = checkpoint_of(run, tmp_path)
    first = checkpoint.parameters[0]
    bare = replace(first, states={"fp32": first.states["fp32"]}, never_updated=True)
    models = models_of(replace(checkpoint, parameters=(bare, *checkpoint.parameters[1:])), run)
    held = models.chunks(FIRST)[0][0]
    assert held.states["exp_avg"] == held.states["exp_avg_sq"] == ((ZEROS, 0, held.numel),)
    assert models.buffers(FIRST)[0].states() == ["fp32", "exp_avg", "exp_avg_sq"]


def test_states_that_differ_are_refused(tmp_path: Path) -> None:
    run = MegatronRun(layers=1)
    checkpoint = checkpoint_of(run, tmp_path)
    first = checkpoint.parameters[0]
    less = replace(first, states={k: v for k, v in first.states.items() if k != "exp_avg_sq"})
    models = models_of(replace(checkpoint, parameters=(less, *checkpoint.parameters[1:])), run)
    with pytest.raises(LayoutError, match=r"has the states .* holds the same states"):
        models.buffers(FIRST)[0].states()
    bare = replace(first, states={k: v for k, v in first.states.items() if k != "fp32"})
    models = models_of(replace(checkpoint, parameters=(bare, *checkpoint.parameters[1:])), run)
    with pytest.raises(LayoutError, match=r"word_embeddings.weight has no master"):
        models.chunks(FIRST)
