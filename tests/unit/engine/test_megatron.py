"""Saves of `torch_dist`, good and bad: layers, experts, halves, common data, groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.conversions import refused_conversion
from house.megatron_saves import (
    GROUP,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    common_state,
    entries,
    save_torch_dist,
    small_model,
)  # fmt: skip
from laws.dcp_files import edit_metadata
from oracle.whole_tensors import whole
from reshard.errors import ReshardError
from reshard_engine.formats.dcp_files.metadata.model import TensorEntry
from reshard_engine.formats.dcp_files.tensors import restored_boxes
from reshard_engine.formats.megatron.names import entries_of
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import Boxes


def saved(place: Path, tensors: dict[str, torch.Tensor] | None = None, common: Any = ..., ranks: int = 2) -> Path:
    held = entries(small_model()) if tensors is None else tensors
    return save_torch_dist(place / "iter_0000007", held, common_state() if common is ... else common, ranks=ranks)


def masters(source: Path, place: Path, **options: Any) -> dict[str, torch.Tensor]:
    reshard.convert(source, place / "out", to="safetensors", dtype="fp32", progress=False, **options)
    return load_file(place / "out" / "model.safetensors")


refused = partial(refused_conversion, reshard.convert, to="dcp", progress=False)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("common", [..., None])
def test_each_layer_is_a_parameter_of_its_own(common: Any, ranks: int, tmp_path: Path) -> None:
    model = small_model()
    found = masters(saved(tmp_path, common=common, ranks=ranks), tmp_path)
    assert len(found) == 6 * LAYERS + 3
    for layer in range(LAYERS):
        head = f"decoder.layers.{layer}"
        for name, key in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight"),
            ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
        ):
            assert torch.equal(found[f"{head}.{name}"], model[f"decoder.layers.{key}"][layer])
    assert torch.equal(found["output_layer.weight"], model["output_layer.weight"][:VOCABULARY])


def test_each_expert_is_a_parameter_of_its_own(tmp_path: Path) -> None:
    model = small_model(experts=4)
    found = masters(saved(tmp_path, entries(model)), tmp_path)
    for layer in range(LAYERS):
        for expert in range(4):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
            assert torch.equal(
                found[name], model["decoder.layers.mlp.experts.experts.linear_fc1.weight"][layer, expert]
            )


def test_layers_that_differ_have_numbers_and_experts_an_axis_of_their_own(tmp_path: Path) -> None:
    """As a model with `moe_layer_freq` is saved: the first axis counts experts, of which there may be any number."""
    model = small_model(experts=LAYERS + 2)
    numbered = {
        key.replace("decoder.layers.", f"decoder.layers.{at}."): tensor[at] if "layers" in key else tensor
        for key, tensor in model.items()
        for at in range(LAYERS)
    }
    found = masters(saved(tmp_path, entries(numbered)), tmp_path)
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    assert torch.equal(found[name], model["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1, 3])


def test_halves_that_were_saved_apart_are_one_parameter(tmp_path: Path) -> None:
    """`singleton_local_shards`: layers have numbers, and a gated unit is two tensors."""
    whole_fc1 = torch.arange(2 * HIDDEN * HIDDEN, dtype=torch.float32).reshape(2 * HIDDEN, HIDDEN) / 64
    halves = {f"decoder.layers.0.mlp.linear_fc1.weight_{n}": h for n, h in zip("wv", whole_fc1.chunk(2), strict=True)}
    source = saved(tmp_path, entries(halves), common_state(num_layers=1))
    found = masters(source, tmp_path)
    assert list(found) == ["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(*found.values(), whole_fc1)


def test_the_rows_of_the_vocabulary_stay_where_nothing_says_which_are_padding(tmp_path: Path) -> None:
    common = common_state()
    del common["args"].vocab_size
    source = saved(tmp_path, common=common)
    assert masters(source, tmp_path)["output_layer.weight"].shape == (16, HIDDEN)
    assert any("padding" in warning for warning in reshard.inspect(source).warnings)


def test_a_buffer_of_a_router_is_no_parameter(tmp_path: Path) -> None:
    held = entries(small_model()) | {"decoder.layers.mlp.router.expert_bias": torch.ones(LAYERS, 4)}
    source = saved(tmp_path, held)
    reshard.convert(source, tmp_path / "out", to="dcp", framework="state-dict", progress=False)
    found = whole(tmp_path / "out")
    assert "decoder.layers.1.mlp.router.expert_bias" in found["model"]
    assert not any("expert_bias" in p for g in found["optimizer"]["param_groups"] for p in g["params"])


def test_other_files_of_the_same_name_do_not_make_it_megatrons(tmp_path: Path) -> None:
    source = saved(tmp_path)
    (source / "metadata.json").write_text(json.dumps({"made": "by a script"}))
    assert reshard.inspect(source).format.startswith("dcp")


def test_a_tracker_names_the_iteration(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert reshard.inspect(tmp_path).tag == "iter_0000007"


@pytest.mark.parametrize("text", ["8", "../elsewhere", "release", "9" * 40, ""])
def test_a_tracker_that_names_nothing_is_no_way_to_a_checkpoint(text: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ReshardError) as caught:
        reshard.inspect(tmp_path)
    assert caught.value.code in ("source.unsupported", "source.unknown_kind")


def _groups(*changes: dict[str, Any]) -> dict[str, Any]:
    common = common_state()
    common["optimizer"]["optimizer"]["param_groups"] = [{**GROUP, "weight_decay": 0.1, **c} for c in changes]
    return common


@pytest.mark.parametrize(
    ("common", "says"),
    [
        (_groups({"wd_mult": 1.0}, {"wd_mult": 1.0, "lr_mult": 2.0}), "the same weight decay"),
        (_groups({"wd_mult": 1.0}), "no param group without weight decay"),
        (_groups({}, {"wd_mult": 0.0}), "no wd_mult"),
    ],
)
def test_groups_that_the_rule_does_not_explain_are_refused_but_for_weights(
    common: dict[str, Any], says: str, tmp_path: Path
) -> None:
    source = saved(tmp_path, common=common)
    for target in ({"to": "zero", "zero_stage": 1, "dp": 2}, {"to": "dcp"}, {"to": "universal"}):
        error = refused(source, tmp_path / "out", **target)
        assert error.code == "checkpoint.ambiguous"
        assert says in error.message
    assert masters(source, tmp_path)


Damage = Callable[[Path], object]


def _with_bytes(source: Path, key: str) -> Path:
    """The same save with an object of an older kind of optimizer states."""
    weights = {k: v for k, v in entries(small_model()).items() if "optimizer" not in k}
    return save_torch_dist(
        source.parent / "other" / source.name, weights,
        _of_type("dp_zero_gather_scatter"), objects={key: [[{"buckets_coalesced": True}]]},
    )  # fmt: skip


def _of_type(kind: str) -> dict[str, Any]:
    common = common_state()
    common["content_metadata"]["distrib_optim_sharding_type"] = kind
    return common


def test_an_optimizer_in_vectors_without_its_object_is_refused(tmp_path: Path) -> None:
    source = _with_bytes(saved(tmp_path), "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1")
    for target in ({"to": "dcp"}, {"to": "zero", "zero_stage": 1, "dp": 2}):
        error = refused(source, tmp_path / "out", **target)
        assert (error.code, "no object `optimizer`" in error.message) == ("checkpoint.incomplete", True)


@pytest.mark.parametrize("seed", range(40))
def test_runs_of_a_part_become_boxes_of_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    local, parts = (tuple(rng.integers(1, 5, size=1 + seed % 4).tolist()) for _ in range(2))
    original = tuple(a * b for a, b in zip(local, parts, strict=True))
    # Each part holds the numbers of its elements in the whole, and each run lies at the place of its number.
    numbers = np.arange(prod(original)).reshape(original)
    rows: list[list[list[int]]] = []
    offsets: list[int] = []
    data: list[int] = []
    for place in np.ndindex(*parts):
        part = numbers[tuple(slice(p * n, (p + 1) * n) for p, n in zip(place, local, strict=True))].reshape(-1)
        cuts = sorted({0, part.size, *rng.integers(0, part.size + 1, size=3).tolist()})
        for begin, end in pairwise(cuts):
            rows.append([[*place, begin], [*([1] * len(local)), end - begin]])
            offsets.append(4 * len(data))
            data += part[begin:end].tolist()
    boxes = np.array(rows, dtype=np.int64)
    entry = TensorEntry("optimizer.state.exp_avg.x", BY_NAME["float32"], (*parts, prod(local)), 0, len(rows), boxes)
    held = Boxes(boxes, np.zeros(len(rows), np.int64), np.array(offsets, dtype=np.int64))
    found = restored_boxes(held, entry, original)
    seen = np.zeros(original, dtype=np.int64) - 1
    for (corner, size), offset in zip(found.boxes.tolist(), found.offset.tolist(), strict=True):
        where = tuple(slice(c, c + n) for c, n in zip(corner, size, strict=True))
        assert (seen[where] == -1).all()
        seen[where] = np.array(data[offset // 4 : offset // 4 + prod(size)]).reshape(size)
    assert np.array_equal(seen, numbers)
    for wrong in ((*original, 1), original[1:], tuple(n + 1 for n in original)):
        with pytest.raises(ReshardError, match="no parts of it"):
            restored_boxes(held, entry, wrong)


def _without(name: str) -> Damage:
    return lambda source: (source / name).unlink()


def _renamed(old: str, new: str) -> Damage:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata = {k.replace(old, new): v for k, v in metadata.state_dict_metadata.items()}
        for index in list(metadata.storage_data):
            if old in index.fqn:
                place = metadata.storage_data.pop(index)
                metadata.storage_data[type(index)(index.fqn.replace(old, new), index.offset, index.index)] = place

    return lambda source: edit_metadata(source / ".metadata", change)


def _common(**changes: Any) -> Damage:
    return lambda source: torch.save({**common_state(), **changes}, source / "common.pt")


HOSTILE: dict[str, tuple[Damage, str]] = {
    "no common data": (_without("common.pt"), "checkpoint.incomplete"),
    "a rank's file is missing": (_without("__1_0.distcp"), "checkpoint.incomplete"),
    "common data is a list": (lambda s: torch.save([1], s / "common.pt"), "checkpoint.malformed"),
    "groups are numbers": (_common(optimizer={"optimizer": {"param_groups": [1, 2]}}), "checkpoint.malformed"),
    "groups are a text": (_common(optimizer={"optimizer": {"param_groups": "all"}}), "checkpoint.malformed"),
    "other layers than the arguments say": (
        lambda s: torch.save(common_state(num_layers=LAYERS + 1), s / "common.pt"), "checkpoint.mixed",
    ),
    "a moment of another name": (
        _renamed("optimizer.state.exp_avg.output_layer", "optimizer.state.../exp.output_layer"), "name.invalid",
    ),
    "a moment of a parameter that is not there": (
        _renamed("optimizer.state.exp_avg.output_layer.weight", "optimizer.state.exp_avg.other.weight"),
        "checkpoint.incomplete",
    ),
    "two names of one norm": (
        _renamed("decoder.final_layernorm.weight", "decoder.layers.0.input_layernorm.weight"), "checkpoint.ambiguous",
    ),
    "an axis of layers that is not there": (
        _renamed("decoder.final_layernorm.weight", "decoder.layers.mlp.experts.experts.linear_fc1.weight"),
        "checkpoint.malformed",
    ),
    "a name that leaves the directory": (_renamed("output_layer.weight", "../../weight"), "name.invalid"),
    "half of a gated unit": (_renamed("output_layer.weight", "mlp.linear_fc1.weight_w"), "checkpoint.incomplete"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_save_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    damage, code = HOSTILE[kind]
    source = saved(tmp_path)
    damage(source)
    error = refused(source, tmp_path / "out")
    assert error.code == code, error


def test_masters_of_other_weights_are_named(tmp_path: Path) -> None:
    held = entries(small_model())
    key = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
    held[key] = held[key].roll(1, dims=0)
    error = refused(saved(tmp_path, held), tmp_path / "out")
    assert error.code == "checkpoint.damaged"
    assert error.details["parameters"] == [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(LAYERS)]


def test_damaged_is_for_megatrons_checkpoints(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 2)}, tmp_path / "model.pt")
    error = refused(tmp_path / "model.pt", tmp_path / "out", to="safetensors", damaged="drop-optimizer")
    assert error.code == "request.invalid"
    assert "leave it out" in (error.fix or "")


@pytest.mark.parametrize(
    ("key", "shape", "names"),
    [
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_bias", (4,), ["decoder.layers.3.pre_mlp_layernorm.bias"]),
        ("mtp.layers.0.eh_proj.weight", (4, 8), ["mtp.layers.0.eh_proj.weight"]),
        ("layers.input.weight", (2, 4), ["layers.0.input.weight", "layers.1.input.weight"]),
        (
            "decoder.layers.5.mlp.experts.experts.linear_fc2.weight", (2, 4, 4),
            [f"decoder.layers.5.mlp.experts.local_experts.{e}.linear_fc2.weight" for e in (0, 1)],
        ),
        (
            "decoder.layers.5.mlp.experts.experts.7.linear_fc2.weight", (4, 4),
            ["decoder.layers.5.mlp.experts.local_experts.7.linear_fc2.weight"],
        ),
        ("mlp.shared_experts.linear_fc1.weight", (4, 4), ["mlp.shared_experts.linear_fc1.weight"]),
    ],
)  # fmt: skip
def test_names_of_entries(key: str, shape: tuple[int, ...], names: list[str]) -> None:
    assert [entry.name for entry in entries_of(key, shape)] == names
