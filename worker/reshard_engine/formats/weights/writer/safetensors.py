"""Consolidated weights as safetensors: `model.safetensors`, or shards with an index.

Tied weights are stored once, under their owner's name; the header's metadata says which alias means
which owner, as huggingface_hub 2.4.0 does (`serialization/_torch.py`, `_clean_state_dict_for_safetensors`).
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import SourceError
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.safetensors_layout import safetensors_template
from reshard_engine.formats.model_weights import Weight
from reshard_engine.formats.weights.writer.consolidated import lay_out_weights
from reshard_engine.pickles.nodes import Node
from reshard_engine.tensors.layout import FileTemplate, TargetLayout


class SafetensorsWriter:
    """Lays out safetensors weights."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """One file or several with `model.safetensors.index.json`."""
        return lay_out_weights(checkpoint, request, stem="model", suffix="safetensors", template_of=_template)


def _template(
    weights: Sequence[Weight], aliases: dict[str, str], _extra_states: dict[str, Node]
) -> tuple[FileTemplate, tuple[int, ...]]:
    if "format" in aliases:
        raise SourceError(
            "name.invalid",
            "a tied weight called `format` would overwrite the file's `format` metadata",
            fix="write --to torch instead",
        )
    metadata = {**aliases, "format": "pt"}
    tensors = [(w.fqn, w.dtype, w.shape, w.numel) for w in weights]
    return safetensors_template(tensors, metadata), tuple(w.tensor for w in weights)
