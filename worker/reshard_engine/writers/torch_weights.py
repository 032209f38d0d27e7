"""Consolidated weights as `torch.save` writes them: `pytorch_model.bin`, or shards with an index.

Tied names refer to one storage, and each storage is exactly as long as its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.zip_layout import StorageRecord, zip_template
from reshard_engine.layout import FileTemplate, TargetLayout
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import PTensor, ordered_dict
from reshard_engine.writers.consolidated import Weight, lay_out_weights
from reshard_engine.writers.trees import output_tensor

_ROOT = "pytorch_model"


class TorchWeightsWriter:
    """Lays out `pytorch_model.bin` weights."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """One file or several with `pytorch_model.bin.index.json`."""
        return lay_out_weights(checkpoint, request, stem="pytorch_model", suffix="bin", template_of=_template)


def _template(weights: Sequence[Weight], aliases: dict[str, str]) -> tuple[FileTemplate, tuple[int, ...]]:
    storages: list[StorageRecord] = []
    tensors: dict[str, PTensor] = {}
    for slot, weight in enumerate(weights):
        storages.append(StorageRecord(str(slot), ((slot, 0, weight.numel, weight.dtype),)))
        tensors[weight.fqn] = output_tensor(str(slot), weight.dtype, weight.shape)
    named = {name: tensors[aliases.get(name, name)] for name in [w.fqn for w in weights] + list(aliases)}
    return zip_template(_ROOT, emit_pickle(ordered_dict(named)), storages), tuple(w.tensor for w in weights)
