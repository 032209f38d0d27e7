"""Entries of a run's state that name its layout, rewritten for the target: Megatron's arguments, and rules.

Source: `reshard_engine.formats.deepspeed.megatron` for the arguments; deepspeed 0.19.8 `checkpoint/constants.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard_engine.formats.deepspeed.megatron import ARGS, PADDED_VOCAB_ARG, VOCAB_DIVISOR_ARG, with_args
from reshard_engine.formats.deepspeed.names import INFO
from reshard_engine.formats.deepspeed.rules.cut_rules import AFFINE, PADDED_VOCAB, SECTION_WIDTHS, SECTIONS
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    sequence_items,
)


def relaid(state: Mapping[str | int, Node], target: Target, vocab_rows: int | None) -> dict[str | int, Node]:
    """The entries of `state`, with the target's sizes in place of the source's."""
    found = dict(state)
    layout = target.layout
    sizes: dict[str, Node] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "data_parallel_size": target.dp,
        "world_size": layout.world_size,
        "moe_expert_parallel_size": layout.ep,
    }
    if vocab_rows is not None:
        sizes[PADDED_VOCAB_ARG] = vocab_rows
    if layout.vocab_divisor is not None:
        sizes[VOCAB_DIVISOR_ARG] = layout.vocab_divisor
    if ARGS in found:
        found[ARGS] = with_args(found[ARGS], sizes)
    if is_mapping(state.get(INFO)):
        facts = dict(mapping_items(state[INFO], what=INFO))
        if vocab_rows is not None and PADDED_VOCAB in facts:
            facts[PADDED_VOCAB] = vocab_rows
        if target.tp_changes:
            facts.pop(AFFINE, None)  # holds for the source's ranks only; the patterns hold for any number
        # Rules of a request give widths for one rank, whatever the number of ranks is.
        if SECTION_WIDTHS in facts and (target.tp_changes or not _are_of(facts[SECTION_WIDTHS], layout.tp)):
            facts[SECTION_WIDTHS] = _section_widths(facts.get(SECTIONS), layout.tp)
        found[INFO] = mapping_of(facts)
    return found


def _are_of(widths: Node, tp: int) -> bool:
    """True if the widths are for `tp` ranks."""
    tables = mapping_items(widths, what=SECTION_WIDTHS).values() if is_mapping(widths) else ()
    return all(
        len(sequence_items(row, what=SECTION_WIDTHS)) == tp
        for table in tables
        for row in sequence_items(table, what=SECTION_WIDTHS)
    )


def _section_widths(sections: Node, tp: int) -> Node:
    """The widths of evenly cut sections by pattern, section and rank; the first ranks take one more of a rest."""
    found: dict[str | int, Node] = {}
    for entry in sequence_items(sections, what=SECTIONS) if sections is not None else ():
        facts = mapping_items(entry, what=SECTIONS)
        shape, dim = sequence_items(facts.get("shape"), what=SECTIONS), facts.get("partition_dim")
        sizes = shape[dim] if type(dim) is int and 0 <= dim < len(shape) else None
        if not isinstance(sizes, PList | PTuple):
            continue
        widths = [PList([n // tp + (rank < n % tp) for rank in range(tp)]) for n in sizes.items if type(n) is int]
        for pattern in sequence_items(facts.get("patterns"), what=SECTIONS):
            if isinstance(pattern, str):
                found[pattern] = PList([*widths])
    return mapping_of(found)
