"""Consolidated weights as `torch.save` writes them: `pytorch_model.bin`, or shards with an index.

Tied names refer to one storage, and each storage is exactly as long as its tensor. Entries of the state dict that are
no tensors, such as extra states of modules, are there as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.model_weights import Weight
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.formats.weights.writer.consolidated import lay_out_weights
from reshard_engine.pickles.nodes import Node, PRuns, ordered_dict
from reshard_engine.tensors.layout import FileTemplate, TargetLayout

_ROOT = "pytorch_model"


class TorchWeightsWriter:
    """Lays out `pytorch_model.bin` weights."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """One file or several with `pytorch_model.bin.index.json`."""

        def template(
            weights: Sequence[Weight], aliases: dict[str, str], extra_states: dict[str, Node]
        ) -> tuple[FileTemplate, tuple[int, ...]]:
            nodes: dict[str, Node] = {w.fqn: PRuns(w.dtype.name, w.shape, ((w.tensor, 0, w.numel),)) for w in weights}
            nodes |= {alias: nodes[owner] for alias, owner in aliases.items()} | extra_states
            return tree_template(_ROOT, ordered_dict(nodes), checkpoint.shard_map, opaque=request.opaque)

        return lay_out_weights(
            checkpoint,
            request,
            stem="pytorch_model",
            suffix="bin",
            template_of=template,
            extra_states=checkpoint.extra_states,
        )
