"""Notes in our universal checkpoints about the source's layout, which names and shapes do not show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import SourceError
from reshard_engine.formats.deepspeed.names import LAYOUT_NOTES, NUMBERED, TIED
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.formats.deepspeed.rules.facts import as_count, as_items, as_mapping
from reshard_engine.formats.names import checked_name
from reshard_engine.pickles.plain import plain_value
from reshard_engine.pickles.state_dict import KeyPath, name_of


@dataclass(frozen=True)
class LayoutNotes:
    """The notes of one checkpoint."""

    ours: bool = False
    """True if the checkpoint has notes; `ds_to_universal` writes none."""
    tied_layers: Mapping[str, Any] | None = None
    """The first layer of each tied parameter of a pipeline; None if the run was no pipeline."""
    vocab_divisor: int | None = None
    vocab_rows: int | None = None
    groups_kept: bool = False
    """True if the param groups of the stages below ZeRO-3 are those of ZeRO-3 too."""
    module_paths: tuple[KeyPath, ...] | None = None
    """Key paths of the model's state dict, where it is nested and `module` does not hold every entry."""

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
        tied, divisor, rows, paths = (
            facts.get(k) for k in ("tied_layers", "vocab_divisor", "vocab_rows", "module_paths")
        )
        return cls(
            ours=True,
            tied_layers=None if tied is None else as_mapping(tied, f"{LAYOUT_NOTES}: tied_layers"),
            vocab_divisor=None if divisor is None else as_count(divisor, f"{LAYOUT_NOTES}: vocab_divisor"),
            vocab_rows=None if rows is None else as_count(rows, f"{LAYOUT_NOTES}: vocab_rows"),
            groups_kept=facts.get("groups_kept") is True,
            module_paths=None if paths is None else tuple(map(_path, as_items(paths, _PATHS))),
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


_PATHS = f"{LAYOUT_NOTES}: module_paths"


def _path(value: Any) -> KeyPath:
    keys = as_items(value, _PATHS)
    if not keys or not all(isinstance(k, str) or type(k) is int for k in keys):
        raise SourceError("checkpoint.malformed", f"{_PATHS}: {len(keys)} keys, which are no names or numbers")
    checked_name(name_of(tuple(keys)))
    return tuple(keys)
