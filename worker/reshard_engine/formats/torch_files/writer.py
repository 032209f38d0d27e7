"""Lays out torch files whose storages are exactly as long as their tensors, as `torch.save` of clones writes them."""

from __future__ import annotations

from reshard.errors import RequestError
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import FILE_STATE, Checkpoint
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.formats.torch_files.facts import files_of
from reshard_engine.pickles.nodes import PTensorRef
from reshard_engine.tensors.dtypes import UINT8
from reshard_engine.tensors.layout import Body, FileTemplate, TargetFile, TargetLayout


class SlimWriter:
    """Lays out files under their own names."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Torch files with compact storages, everything else byte for byte.

        Raises:
            RequestError: `request.invalid` for options that would change what tensors hold.
        """
        if request.dtype is not None or request.exclude_frozen:
            raise RequestError(
                "request.invalid",
                "files keep their tensors: no --dtype, and nothing is left out",
                fix="leave --dtype and --exclude-frozen out",
            )
        files: list[TargetFile] = []
        for path, tree in files_of(checkpoint).items():
            if isinstance(tree, PTensorRef) and checkpoint.shard_map.tensors[tree.index].state == FILE_STATE:
                size = checkpoint.shard_map.tensors[tree.index].numel
                template = FileTemplate(size, (), (Body(0, 0, 0, size, UINT8, None),))
                files.append(TargetFile(str(path), template, (tree.index,)))
                continue
            root = str(path).rpartition("/")[2].rpartition(".")[0] or "archive"
            template, slots = tree_template(root, tree, checkpoint.shard_map, opaque=request.opaque)
            files.append(TargetFile(str(path), template, slots))
        return TargetLayout(tuple(files), None)
