"""What our universal directories note about the layout that they came from: no name and no shape says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard_engine.deepspeed_names import LAYOUT_NOTES, NUMBERED, TIED
from reshard_engine.pickles.plain import plain_value
from reshard_engine.readers.deepspeed.model_states import ModelStates
from reshard_engine.rules.facts import as_count, as_mapping


@dataclass(frozen=True)
class LayoutNotes:
    """The notes of one checkpoint."""

    ours: bool = False
    """Whether there are any: `ds_to_universal` writes none."""
    tied_layers: Mapping[str, Any] | None = None
    """Of a pipeline: the first layer of each tied parameter."""
    vocab_divisor: int | None = None
    vocab_rows: int | None = None

    @classmethod
    def of(cls, model: ModelStates) -> LayoutNotes:
        """The notes in model states.

        Raises:
            SourceError: `rules.invalid`, `checkpoint.malformed`.
        """
        node = model.entries.get(LAYOUT_NOTES)
        if node is None:
            return cls()
        facts = as_mapping(plain_value(node, what=LAYOUT_NOTES), LAYOUT_NOTES)
        tied, divisor, rows = (facts.get(k) for k in ("tied_layers", "vocab_divisor", "vocab_rows"))
        return cls(
            ours=True,
            tied_layers=None if tied is None else as_mapping(tied, f"{LAYOUT_NOTES}: tied_layers"),
            vocab_divisor=None if divisor is None else as_count(divisor, f"{LAYOUT_NOTES}: vocab_divisor"),
            vocab_rows=None if rows is None else as_count(rows, f"{LAYOUT_NOTES}: vocab_rows"),
        )

    def layer_of(self, name: str) -> int | None:
        """The pipeline layer of a parameter; None where the run was no pipeline."""
        if self.tied_layers is None:
            return None
        if name.startswith(TIED):
            layer = self.tied_layers.get(name)
            return layer if type(layer) is int and 0 <= layer < 1 << 20 else None
        match = NUMBERED.fullmatch(name)
        return int(match["layer"]) if match else None
