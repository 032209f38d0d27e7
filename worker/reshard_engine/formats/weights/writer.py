"""Lays out consolidated weights, split into files as Hugging Face splits them.

Source: huggingface_hub 2.4.0 `serialization/_base.py` (`split_state_dict_into_shards_factory`: greedy, in
order, a file per `max_shard_size`), transformers 5.23.0 (names of files and index).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from reshard.errors import RequestError, SourceError
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.safetensors import safetensors_template
from reshard_engine.formats import carried
from reshard_engine.formats.model_card import with_card
from reshard_engine.formats.model_weights import Weight, weights_of
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PRuns, ordered_dict
from reshard_engine.tensors.layout import FileTemplate, TargetFile, TargetLayout, literal_template

DEFAULT_SHARD_BYTES = 5_000_000_000


FileTemplateOf = Callable[[Sequence[Weight], dict[str, str], dict[str, Node]], tuple[FileTemplate, tuple[int, ...]]]
"""Weights of a file, the aliases of them, and its entries that are not tensors, to its template and slots."""


def lay_out_weights(
    checkpoint: Checkpoint,
    request: ConvertRequest,
    *,
    stem: str,
    suffix: str,
    template_of: FileTemplateOf,
    extra_states: Mapping[str, Node] | None = None,
) -> TargetLayout:
    """Files `stem.suffix`, or `stem-00001-of-0000N.suffix` with an index.

    Args:
        checkpoint: The source.
        request: Options of the request.
        stem: Stem of the file names.
        suffix: Suffix of the file names.
        template_of: Makes the template of one file.
        extra_states: Entries of the state dict that are not tensors, which go into the first file; None for a format
            that holds tensors only.

    Raises:
        RequestError: `request.unsatisfiable` for a checkpoint without weights.
    """
    weights = weights_of(checkpoint, request)
    if not weights:
        raise RequestError(
            "request.unsatisfiable",
            "the checkpoint holds no weights",
            fix="name the checkpoint that has the model: what this one holds is listed by `reshard inspect SRC`",
        )
    written = {w.fqn for w in weights}
    aliases = {a: o for a, o in sorted(checkpoint.shared.items()) if o in written and a not in written}
    shards = _shards(weights, request.options.weights.max_shard_bytes or DEFAULT_SHARD_BYTES)
    count = len(shards)
    files = [TargetFile(name, literal_template(data), ()) for name, data in checkpoint.model_files.items()]
    weight_map: dict[str, str] = {}
    extras = dict(extra_states or {})
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}.{suffix}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.{suffix}"
        names = {w.fqn for w in shard}
        held = extras if number == 1 else {}
        template, slots = template_of(shard, {a: o for a, o in aliases.items() if o in names}, held)
        files.append(TargetFile(name, template, slots, commit=count == 1))
        weight_map |= dict.fromkeys([*(w.fqn for w in shard), *held], name)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(w.size_bytes for w in weights)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        text = json.dumps(index, indent=2).encode() + b"\n"
        files.append(TargetFile(f"{stem}.{suffix}.index.json", literal_template(text), (), commit=True))
    warnings = [carried.padding_left_out(checkpoint)] if checkpoint.padding_rows else []
    not_carried = _not_carried(checkpoint, request, extra_states)
    layout = TargetLayout(tuple(files), None, tuple(warnings), not_carried=not_carried)
    return with_card(layout, checkpoint, request, weights=weights)


def _not_carried(
    checkpoint: Checkpoint, request: ConvertRequest, extra_states: Mapping[str, Node] | None
) -> tuple[NotCarried, ...]:
    return (
        *carried.training_state(checkpoint),
        *(carried.extra_states(checkpoint) if extra_states is None else ()),
        *(carried.frozen_parameters(checkpoint) if request.exclude_frozen else ()),
    )


def _shards(weights: Sequence[Weight], limit_bytes: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.size_bytes > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.size_bytes
    return shards


# Consolidated weights as safetensors: `model.safetensors`, or shards with an index.
#
# Tied weights are stored once, under their owner's name; the header's metadata says which alias means
# which owner, as huggingface_hub 2.4.0 does (`serialization/_torch.py`, `_clean_state_dict_for_safetensors`).


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


# Consolidated weights as `torch.save` writes them: `pytorch_model.bin`, or shards with an index.
#
# Tied names refer to one storage, and each storage is exactly as long as its tensor. Entries of the state dict that are
# not tensors, such as extra states of modules, are there as they were.

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
