"""Megatron-DeepSpeed's param groups where they cannot be told, and the weight decay that its scheduler gives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.expected import raised
from laws.deepspeed_files import Layout
from laws.pipeline_source import Model, ParallelWriter, Part, Ranks, seeded_model
from reshard.choices import OpaquePolicy, WeightDecayGroups
from reshard.errors import RequestError
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.param_groups import group_changes, megatron_grouped, sharded_groups
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.inspection import possible_targets
from reshard_engine.pickles.nodes import node_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

_SHAPES: dict[str, tuple[tuple[int, ...], Part]] = {
    "embed.tokens.weight": ((10, 3), Part("vocabulary", 0)),
    "layers.1.norm.weight": ((3,), Part("whole", 1)),
    "layers.1.dense.weight": ((3, 6), Part("row", 1)),
    "layers.1.dense.bias": ((3,), Part("whole", 1)),
    "head.weight": ((3, 6), Part("row", 1)),
}
_NAMES = {"wd": "wd_no_scale_lr", "no": "no_wd_no_scale_lr", "wd_scaled": "wd_scale_lr", "no_scaled": "no_wd_scale_lr"}
_TWO = {"wd": ["embed.tokens.weight", "layers.1.dense.weight", "head.weight"], "no": ["layers.1.norm.weight"]}


def _group(kind: str, **values: Any) -> dict[str, Any]:
    decays = kind.startswith("wd")
    fixed = {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1 if decays else 0.0}
    return {"name": _NAMES[kind], "wd_mult": float(decays), "lr_mult": 1.0, **fixed, **values}


def _model(members: dict[str, list[str]]) -> Model:
    """A model whose groups hold these parameters; the last group has all others."""
    model = seeded_model(_SHAPES, piped=False, layers=2)
    kinds = list(members)
    place = {name: i for i, kind in enumerate(kinds) for name in members[kind]}
    parameters = [replace(p, group=place.get(p.fqn, len(kinds) - 1)) for p in model.state.parameters]
    groups = tuple(_group(kind) for kind in kinds)
    ordered = tuple(p for i in range(len(kinds)) for p in parameters if p.group == i)
    return replace(model, state=replace(model.state, parameters=ordered, groups=groups, steps=(3,) * len(kinds)))


def _read(folder: Path, members: dict[str, list[str]], **entries: Any) -> Checkpoint:
    ParallelWriter(_model(members), Ranks(1, (0,), Layout(1, 2)), folder).write()
    found = read_checkpoint(open_location(str(folder), None), None, OpaqueLedger(OpaquePolicy.REFUSE))
    schedulers = tuple(node_of(entries.pop(k)) for k in ("lr_scheduler",) if k in entries)
    state = {**found.client_state, **{k: node_of(v) for k, v in entries.items()}}
    return replace(found, schedulers=schedulers or found.schedulers, client_state=state)


def _held(checkpoint: Checkpoint) -> list[tuple[Any, Any, list[str]]]:
    assert checkpoint.optimizer is not None
    nodes = [g.hyper_parameters for g in checkpoint.optimizer.groups]
    return [
        (node["name"], node["weight_decay"], [p.fqn for p in checkpoint.trained if p.group == i])
        for i, node in enumerate(nodes)
    ]


def test_two_groups_become_one_in_the_models_order_and_two_again(tmp_path: Path) -> None:
    source = _read(tmp_path, _TWO, lr_scheduler={"start_wd": 0.1, "end_wd": 0.1})
    one = megatron_grouped(source, sharded=True)
    assert _held(one) == [(_NAMES["no"], 0.0, list(_SHAPES))]
    assert "3 of 5 parameters have weight decay 0.1 in the source, and none has it" in group_changes(source, one)[0]
    two = megatron_grouped(one, sharded=False)
    assert _held(two) == _held(source)
    assert [g.name for g in sharded_groups(two)] == [_NAMES["no"]]
    # What is in the target's groups already stays as it is.
    assert megatron_grouped(source, sharded=False) is source
    assert megatron_grouped(one, sharded=True) is one
    assert group_changes(source, source) == []
    assert megatron_grouped(source, sharded=True, wanted=WeightDecayGroups.KEEP) is source


def test_scaled_learning_rates_keep_groups_of_their_own(tmp_path: Path) -> None:
    members = {"wd": ["embed.tokens.weight"], "wd_scaled": ["head.weight", "layers.1.dense.weight"], "no_scaled": []}
    one = megatron_grouped(_read(tmp_path, members), sharded=True)
    assert [(name, names) for name, _, names in _held(one)] == [
        (_NAMES["no"], ["embed.tokens.weight"]),
        (_NAMES["no_scaled"], [n for n in _SHAPES if n != "embed.tokens.weight"]),
    ]


@pytest.mark.parametrize(
    ("scheduler", "wanted"),
    [
        ({"start_wd": 0.2, "end_wd": 0.2}, 0.2),
        ({"start_wd": 0.0, "end_wd": 0.4, "num_steps": 5, "wd_incr_steps": 20, "wd_incr_style": "linear"}, 0.1),
        (
            {"start_wd": 0.0, "end_wd": 0.4, "num_steps": 5, "wd_incr_steps": 20, "wd_incr_style": "cosine"},
            0.4 * 0.5 * (math.cos(math.pi * 0.75) + 1.0),
        ),
        ({"start_wd": 0.0, "end_wd": 0.4, "num_steps": 21, "wd_incr_steps": 20, "wd_incr_style": "linear"}, 0.4),
    ],
    ids=["constant", "linear", "cosine", "over"],
)
def test_matrices_get_the_weight_decay_of_the_scheduler(
    scheduler: dict[str, Any], wanted: float, tmp_path: Path
) -> None:
    two = megatron_grouped(_read(tmp_path, {"no": []}, lr_scheduler=scheduler), sharded=False)
    assert [decay for _, decay, _ in _held(two)] == [pytest.approx(wanted), 0.0]


def test_a_weight_decay_that_nothing_says_is_refused(tmp_path: Path) -> None:
    source = _read(tmp_path, {"no": []})
    error = raised(RequestError, megatron_grouped, source, sharded=False)
    assert error.code == "request.unsatisfiable"
    assert "--zero-stage 3" in error.fix
    # Inspection says so before anybody tries, and what is possible.
    found = {target.name: target for target in possible_targets(source)}
    assert not found["universal"].possible
    assert "stages 3 (" in found["zero --dp"].detail


def test_groups_by_another_rule_are_refused_where_the_rule_decides(tmp_path: Path) -> None:
    # The embedding without weight decay: a condition of the model's own, of which ZeRO-3's groups are not known.
    source = _read(tmp_path, {"wd": ["layers.1.dense.weight", "head.weight"], "no": []})
    error = raised(RequestError, megatron_grouped, source, sharded=True)
    assert error.code == "request.unsatisfiable"
    assert "embed.tokens.weight" in error.message
    assert megatron_grouped(source, sharded=False) is source


def test_an_order_that_nothing_shows_is_refused(tmp_path: Path) -> None:
    source = replace(_read(tmp_path, _TWO), module_names=())
    error = raised(RequestError, megatron_grouped, source, sharded=True)
    assert error.code == "request.unsatisfiable"
    assert "order" in error.message


def test_groups_of_others_stay(tmp_path: Path) -> None:
    model = seeded_model(_SHAPES, piped=False, layers=2)
    ParallelWriter(model, Ranks(1, (0,), Layout(1, 2)), tmp_path).write()
    source = read_checkpoint(open_location(str(tmp_path), None), None, OpaqueLedger(OpaquePolicy.REFUSE))
    for sharded in (False, True):
        assert megatron_grouped(source, sharded=sharded) is source
    assert sharded_groups(source) == []
