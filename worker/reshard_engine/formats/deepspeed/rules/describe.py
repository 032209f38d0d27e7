"""Cuts written as a `universal_checkpoint_info`, with one exact pattern for each parameter.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`), `module_inject/layers.py`
(`collect_autotp_universal_checkpoint_info`: exact patterns for each parameter).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from reshard_engine.checkpoint import Parameter
from reshard_engine.formats.deepspeed.names import TIED
from reshard_engine.formats.deepspeed.rules.cut_rules import (
    AVERAGED,
    COLUMN,
    HEADS,
    MAX_VERSION,
    ORIGINAL_VOCAB,
    PADDED_VOCAB,
    PIPELINE_REPLICATED,
    REPLICATED,
    ROW,
    SECTION_WIDTHS,
    SECTIONS,
    TWO_SECTIONS,
    VERSION,
    VOCABULARY,
)
from reshard_engine.tensors.cuts import Cut


def info_of(parameters: Iterable[Parameter], *, vocab_rows: int | None) -> dict[str, Any]:
    """The metadata of these parameters; a parameter whose cut is unknown is in no list."""
    lists: dict[str, list[str]] = {
        key: [] for key in (REPLICATED, AVERAGED, ROW, COLUMN, TWO_SECTIONS, VOCABULARY, PIPELINE_REPLICATED)
    }
    sections: list[dict[str, Any]] = []
    widths: dict[str, Any] = {}
    heads: dict[int, list[str]] = {}
    vocabulary: int | None = None
    for parameter in parameters:
        cut, pattern = parameter.cut, f"^{re.escape(parameter.fqn)}$"
        if parameter.fqn.startswith(TIED):
            lists[PIPELINE_REPLICATED].append(pattern)
        if cut is None:
            continue
        if cut.grid is not None and cut.dim is not None:
            sections.append({"patterns": [pattern], "shape": _sectioned(cut, cut.grid), "partition_dim": cut.dim})
            widths[pattern] = [list(w) for w in cut.widths] or [[size] for size in cut.sections]
        else:
            lists[_list_of(cut)].append(pattern)
        if cut.units is not None:
            heads.setdefault(cut.units, []).append(pattern)
        if cut.vocabulary is not None:
            lists[VOCABULARY].append(pattern)
            vocabulary = cut.vocabulary
    found: dict[str, Any] = {VERSION: MAX_VERSION, **lists, SECTIONS: sections}
    if sections:
        found[SECTION_WIDTHS] = widths
    if heads:
        found[HEADS] = [{"patterns": patterns, "heads": units} for units, patterns in heads.items()]
    if vocabulary is not None:
        found |= {ORIGINAL_VOCAB: vocabulary, PADDED_VOCAB: vocab_rows or vocabulary}
    return found


def _sectioned(cut: Cut, grid: tuple[int, ...]) -> list[Any]:
    """The grid in the form of the metadata, where the cut dimension is a list of its sections."""
    return [list(cut.sections) if dim == cut.dim else size for dim, size in enumerate(grid)]


def _list_of(cut: Cut) -> str:
    """The key of the list of patterns for a cut without a grid."""
    if cut.dim is None:
        return AVERAGED if cut.averaged else REPLICATED
    if len(cut.sections) == 2:
        return TWO_SECTIONS
    return ROW if cut.dim == 1 else COLUMN
