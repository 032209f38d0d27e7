"""Rules behind rules: which layer cuts a parameter, and what one rank's metadata prove."""

from __future__ import annotations

import pytest

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
from reshard_engine.tensors.cuts import Cut

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
