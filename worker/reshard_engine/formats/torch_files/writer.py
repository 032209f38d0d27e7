"""Files written anew, each storage exactly as long as its tensors: what `torch.save` of clones would have written."""

from __future__ import annotations

from reshard.errors import RequestError
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import FILE_STATE, Checkpoint
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import PTensorRef, mapping_items
from reshard_engine.tensors.dtypes import UINT8
from reshard_engine.tensors.layout import Body, FileTemplate, TargetFile, TargetLayout


class SlimWriter:
    """Lays out files under their own names."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Torch files with compact storages, everything else byte for byte.

        Raises:
            RequestError: `request.invalid` for options that would change what tensors hold.
        """
        if request.dtype is not None or request.max_shard_bytes is not None or request.exclude_frozen:
            raise RequestError(
                "request.invalid", "files keep their tensors: no type, no size of shards, nothing left out"
            )
        files: list[TargetFile] = []
        for path, tree in mapping_items(checkpoint.model_state, what="files").items():
            if isinstance(tree, PTensorRef) and checkpoint.shard_map.tensors[tree.index].state == FILE_STATE:
                size = checkpoint.shard_map.tensors[tree.index].numel
                template = FileTemplate(size, (), (Body(0, 0, 0, size, UINT8, None),))
                files.append(TargetFile(str(path), template, (tree.index,)))
                continue
            root = str(path).rpartition("/")[2].rpartition(".")[0] or "archive"
            template, slots = tree_template(root, tree, checkpoint.shard_map, opaque=request.opaque)
            files.append(TargetFile(str(path), template, slots))
        return TargetLayout(tuple(files), None)
