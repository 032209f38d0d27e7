"""Groups of experts put together and cut by size, for native experts, whose names are of one rank each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reshard_engine.checkpoint import FormatFacts, Parameter, ParamGroup
from reshard_engine.formats.deepspeed import param_groups
from reshard_engine.formats.deepspeed.parallel.rules import (
    COLUMN,
    HEADS,
    REPLICATED,
    ROW,
    TWO_SECTIONS,
    VOCABULARY,
    CutRules,
)
from reshard_engine.formats.deepspeed.parallel.tensor import RuleLayers
from reshard_engine.formats.deepspeed.param_groups import MAX_GROUP_ELEMS, regrouped
from reshard_engine.pickles.nodes import Node, PList, mapping_items, mapping_of
from reshard_engine.tensors.cuts import Cut

HEAD = "moe.experts.deepspeed_experts."
SIZES = {"w": 10, "b": 3}


def _group(ep: int | None, **more: Any) -> ParamGroup:
    name: dict[str | int, Node] = {"name": "dense"} if ep is None else {"name": f"ep_size_{ep}", "moe": True}
    return ParamGroup({"lr": 0.1, **name, **more})


def _source(groups: list[ParamGroup], members: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A checkpoint as far as regrouping looks at it; ``dataclasses.replace`` of it is a copy with other fields."""
    parameters = [
        Parameter(name, (SIZES[name[-1]],), index, None) for index, names in enumerate(members) for name in names
    ]
    schedule = mapping_of({"base_lrs": PList([0.1 + i for i in range(len(groups))]), "last_epoch": 3})

    def replaced(value: Any, **changes: Any) -> Any:
        return (
            SimpleNamespace(**(vars(value) | changes)) if isinstance(value, SimpleNamespace) else real(value, **changes)
        )

    real = param_groups.replace
    monkeypatch.setattr(param_groups, "replace", replaced)
    return SimpleNamespace(
        parameters=tuple(parameters),
        trained=tuple(parameters),
        frozen=(),
        members=lambda group: [p for p in parameters if p.group == group],
        optimizer=SimpleNamespace(groups=tuple(groups)),
        schedulers=(schedule,),
        facts=FormatFacts(),
    )


def _names(checkpoint: Any) -> list[list[str]]:
    count = len(checkpoint.optimizer.groups)
    return [[p.fqn.removeprefix(HEAD) for p in checkpoint.parameters if p.group == g] for g in range(count)]


def _experts(*parts: str) -> list[str]:
    return [f"{HEAD}{part}" for part in parts]


def test_fewer_ranks_make_more_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_groups, "MAX_GROUP_ELEMS", 30)
    # Over two ranks each holds two experts: 26 elements.
    everything = _experts("0.w", "0.b", "1.w", "1.b", "2.w", "2.b", "3.w", "3.b")
    source = _source([_group(None), _group(2)], [["dense.w"], everything], monkeypatch)
    assert regrouped(source, 2) is source
    assert regrouped(source, 4) is source
    found = regrouped(source, 1)
    assert _names(found) == [["dense.w"], ["0.w", "0.b", "1.w", "1.b"], ["2.w", "2.b", "3.w", "3.b"]]
    schedule = mapping_items(found.schedulers[0], what="")
    assert schedule["base_lrs"].items == [0.1, 1.1, 1.1]
    assert schedule["last_epoch"] == 3


def test_more_ranks_put_together_what_the_limit_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_groups, "MAX_GROUP_ELEMS", 20)
    # Over two ranks: an expert and a weight are 23 elements, so each rank's two experts are in two groups.
    first, second = _experts("0.w", "0.b", "2.w", "2.b"), _experts("1.w", "1.b", "3.w", "3.b")
    source = _source([_group(None), _group(2), _group(2)], [["dense.w"], first, second], monkeypatch)
    assert regrouped(source, 2) is source
    assert _names(regrouped(source, 4)) == [
        ["dense.w"],
        ["0.w", "0.b", "1.w", "1.b", "2.w", "2.b", "3.w", "3.b"],
    ]
    assert [len(names) for names in _names(regrouped(source, 1))] == [1, 2, 2, 2, 2]


def test_groups_that_the_limit_did_not_part_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _experts("0.w", "1.w"), _experts("0.b", "1.b")
    source = _source([_group(2), _group(2)], [first, second], monkeypatch)
    assert MAX_GROUP_ELEMS > 1_000
    assert regrouped(source, 1) is source
    monkeypatch.setattr(param_groups, "MAX_GROUP_ELEMS", 12)
    other = _source([_group(2), _group(2, weight_decay=0.5)], [first, second], monkeypatch)
    assert regrouped(other, 2) is other


def test_another_limit_than_deepspeeds_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_groups, "MAX_GROUP_ELEMS", 12)
    source = _source([_group(2)], [_experts("0.w", "0.b", "1.w", "1.b")], monkeypatch)
    assert regrouped(source, 1) is source


# Rules behind rules: which layer cuts a parameter, and what one rank's metadata prove.


OWN = {
    REPLICATED: [r"norm\."],
    ROW: [r"down\."],
    VOCABULARY: [r"words\."],
    "original_vocab_size": 37,
    HEADS: [{"patterns": [r"qkv\."], "heads": 4}],
}
PARTS = [(8, 4), (8, 4)]


def _layers(given: dict[str, object]) -> RuleLayers:
    first = CutRules(given, complete=False, what="given")
    return RuleLayers([first, CutRules(OWN, complete=True, what="own")])


def test_the_first_layer_that_names_a_parameter_cuts_it() -> None:
    rules = _layers({ROW: [r"norm\.", r"qkv\."]})
    assert rules.cut_of("norm.weight", PARTS) == Cut(1)
    # What the first layer does not name is cut as the second has it, its own default last.
    assert rules.cut_of("down.weight", PARTS) == Cut(1)
    assert rules.cut_of("up.weight", PARTS) == Cut(0)
    # Heads are known of a parameter whoever says how it is cut.
    assert rules.cut_of("qkv.weight", PARTS) == Cut(1, units=4)


def test_a_vocabulary_stays_one_whoever_says_how_it_is_cut() -> None:
    rules = _layers({COLUMN: [r"words\."]})
    assert rules.cut_of("words.weight", PARTS) == Cut(0, vocabulary=37)
    assert not rules.first_stage_counts("words.weight")


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        # Megatron-DeepSpeed names gated halves and vocabularies of one rank too, and nothing that would be whole.
        ({TWO_SECTIONS: [r"gate\."], VOCABULARY: [r"words\."], "original_vocab_size": 37}, None),
        (OWN, Cut(0)),
    ],
    ids=["one rank's", "of a cut run"],
)
def test_gated_halves_do_not_prove_that_all_others_are_cut_along_rows(
    facts: dict[str, object], wanted: Cut | None
) -> None:
    rules = CutRules(facts, complete=True, what="own")
    assert rules.cut_of("dense.weight", [(8, 4)]) == wanted
    # Of two ranks' parts it is what DeepSpeed says.
    assert rules.cut_of("dense.weight", PARTS) == Cut(0)
    assert CutRules(facts, complete=True, stated=True, what="told").cut_of("dense.weight", [(8, 4)]) == Cut(0)
