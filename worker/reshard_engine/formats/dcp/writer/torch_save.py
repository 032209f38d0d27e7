"""A whole state dict as one file of `torch.save`.

Source: torch 2.13.0 `distributed/checkpoint/format_utils.py` (`dcp_to_torch_save`).
"""

from __future__ import annotations

from reshard.dcp_options import DcpOptions
from reshard.errors import RequestError
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.dcp.state_tree import StateTree
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.tensors.layout import TargetFile, TargetLayout


class TorchSaveWriter:
    """Lays out the file."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """One file with the nested state dict.

        Raises:
            RequestError: `request.invalid` for options that would change what tensors hold.
        """
        if request.dtype is not None or request.exclude_frozen:
            raise RequestError("request.invalid", "the file holds all as it is: no --dtype", fix="--to torch")
        if not isinstance(checkpoint.facts, StateTree):
            raise RequestError(
                "request.unsatisfiable", "only a distributed checkpoint is one state dict", fix="--to torch"
            )
        path = request.options.of(DcpOptions).torch_file
        root = path.rpartition(".")[0] or "archive"
        template, slots = tree_template(root, checkpoint.facts.tree, checkpoint.shard_map, opaque=request.opaque)
        return TargetLayout((TargetFile(path, template, slots, commit=True),), None)
