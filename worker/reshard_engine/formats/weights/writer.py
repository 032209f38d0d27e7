"""Lays out consolidated weights, split into files as Hugging Face splits them.

Source: huggingface_hub 2.4.0 `serialization/_base.py` (`split_state_dict_into_shards_factory`: greedy, in
order, a file per `max_shard_size`), transformers 5.23.0 (names of files and index).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from reshard.choices import Quantization
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.safetensors import safetensors_template
from reshard_engine.formats import carried
from reshard_engine.formats.model_card import with_card
from reshard_engine.formats.model_weights import Weight, weights_of
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PRuns, ordered_dict
from reshard_engine.pickles.trees import is_extra_state
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.layout import FileTemplate, TargetFile, TargetLayout, literal_template
from reshard_engine.tensors.shard_map import LogicalTensor
from reshard_engine.tensors.views import BLOCK_ROWS, Quantized

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
    made = _quantized(checkpoint, request, weights_of(checkpoint, request))
    weights = made.weights
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
    files = [TargetFile(name, literal_template(data), ()) for name, data in made.model_files.items()]
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
    warnings = [*([carried.padding_left_out(checkpoint)] if checkpoint.padding_rows else []), *made.warnings]
    not_carried = _not_carried(checkpoint, request, extra_states)
    layout = TargetLayout(tuple(files), None, tuple(warnings), made.parts, not_carried=not_carried)
    return with_card(layout, checkpoint, request, weights=weights)


def _not_carried(
    checkpoint: Checkpoint, request: ConvertRequest, extra_states: Mapping[str, Node] | None
) -> tuple[NotCarried, ...]:
    return (
        *carried.training_state(checkpoint),
        *carried.extra_states(checkpoint, extra_states or ()),
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


# Linear layers in eight bits: in blockwise FP8 as DeepSeek-V3 is published (e4m3 weights, `weight_scale_inv` in fp32,
# one scale for each block of 128 by 128), or in int8 as compressed-tensors has W8A8 (`weight_scale`, one for each row,
# in the type that the weight would have).
#
# Which weights are of linear layers follows from `model_type`, or from the user. Loaders make a quantized layer of
# every `nn.Linear` that the list in `config.json` does not name; so all other matrices are named there.
#
# Source: transformers 5.23.0 `integrations/finegrained_fp8.py` (`FP8Linear`, `replace_with_fp8_linear`),
# `quantizers/base.py` (`get_modules_to_not_convert`: with a list of its own a model has no default one),
# `utils/quantization_config.py` (`FineGrainedFP8Config`); compressed-tensors 0.20.0 `config/base.py`
# (`int-quantized`), `quantization/quant_config.py`; verified by running. vLLM reads the same keys; not run.

_CODES = {Quantization.FP8_BLOCK: BY_NAME["float8_e4m3fn"], Quantization.INT8: BY_NAME["int8"]}
"""Type of the quantized weights."""
_LAYER = r"(.+\.)?layers\.\d+\."
_LLAMA = _LAYER + r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"
_LINEAR: Mapping[str, str] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "opt": _LAYER + r"(self_attn\.([qkv]|out)_proj|fc[12])\.weight",
}
"""The weights of linear layers, by `model_type`. A test compares them with the layers of transformers' models."""
_JOINED = re.compile(r"(?P<layer>.+\.)(?:(?P<attention>[qkv])|(?P<gated>gate|up))_proj\.weight")
"""Layers that vLLM makes one of (`packed_modules_mapping`): it refuses those of which only some are quantized."""
_HEAD = "lm_head"
"""A tied head has no weight of its own, and is a linear layer nevertheless."""


@dataclass(frozen=True)
class _Model:
    """The tensors and model files of a target, quantized if the request asks for it."""

    weights: list[Weight]
    model_files: Mapping[str, bytes]
    parts: tuple[tuple[LogicalTensor, Quantized], ...] = ()
    warnings: tuple[str, ...] = ()


def _quantized(checkpoint: Checkpoint, request: ConvertRequest, weights: list[Weight]) -> _Model:
    """The weights with linear layers in eight bits and their scales, and `config.json` that says so.

    Raises:
        RequestError: `request.unsatisfiable` if nothing says which layers are linear, or none of them can be quantized.
    """
    kind = request.options.weights.quantize
    if kind is None:
        return _Model(weights, checkpoint.model_files)
    config = _config_to_quantize(checkpoint)
    matrices = [w for w in weights if len(w.shape) == 2 and w.fqn.endswith(".weight") and w.dtype.floating]
    linear = _linear_layers(matrices, request.options.weights.quantize_layers, config)
    step, why = 1, "of eight bits already"
    if kind is Quantization.FP8_BLOCK:
        step, why = BLOCK_ROWS, f"lengths are no multiples of {BLOCK_ROWS}, or {why}"
    odd = {_joined(w.fqn) for w in linear if any(n % step for n in w.shape) or w.dtype.itemsize_bytes == 1}
    chosen = {w.fqn for w in linear if _joined(w.fqn) not in odd}
    kept = [w.fqn for w in linear if w.fqn not in chosen]
    if not chosen:
        raise RequestError(
            "request.unsatisfiable",
            f"none of {counted(len(linear), 'linear layer')} can be quantized: {why}",
            fix="leave --quantize out",
        )
    parts: list[tuple[LogicalTensor, Quantized]] = []
    found: list[Weight] = []
    for weight in weights:
        for one in _with_scales(weight, kind) if weight.fqn in chosen else ():
            found.append(
                Weight(
                    one[0].fqn, len(checkpoint.shard_map.tensors) + len(parts), one[0].dtype, one[0].shape, one[0].numel
                )
            )
            parts.append(one)
        if weight.fqn not in chosen:
            found.append(weight)
    aliases = [a for a, owner in checkpoint.shared.items() if any(owner == m.fqn for m in matrices)]
    others = {name.removesuffix(".weight") for name in (*aliases, *(m.fqn for m in matrices if m.fqn not in chosen))}
    said = config | {"quantization_config": _quantization_config(kind, sorted({*others, _HEAD}))}
    data = json.dumps(said, indent=2, ensure_ascii=False).encode() + b"\n"
    note = f"{counted(len(kept), 'linear layer')} not quantized: {why}: {listed(kept)}"
    files = {**checkpoint.model_files, "config.json": data}
    return _Model(found, files, tuple(parts), (note,) if kept else ())


def _quantization_config(kind: Quantization, others: Sequence[str]) -> dict[str, Any]:
    if kind is Quantization.INT8:
        whole = {"num_bits": 8, "type": "int", "symmetric": True}
        weights = {**whole, "strategy": "channel", "dynamic": False}
        activations = {**whole, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(others),
        }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK_ROWS, BLOCK_ROWS],
        "modules_to_not_convert": list(others),
    }


def _config_to_quantize(checkpoint: Checkpoint) -> dict[str, Any]:
    data = checkpoint.model_files.get("config.json")
    config: Any = None if data is None else json.loads(data)
    if not isinstance(config, dict):
        raise RequestError(
            "request.unsatisfiable",
            "a quantized model needs its config.json, which says how it is quantized",
            fix="--model-files DIR names the directory with the config.json of the model",
        )
    if "quantization_config" in config:
        raise RequestError(
            "request.unsatisfiable", "config.json says that the model is quantized already", fix="leave --quantize out"
        )
    return cast("dict[str, Any]", config)


def _linear_layers(matrices: Sequence[Weight], said: str | None, config: Mapping[str, Any]) -> list[Weight]:
    """The weights of linear layers but the head: those that the user names, or those of a known architecture."""
    if said is not None:
        patterns = [p.strip() for p in said.split(",") if p.strip()]
        if unused := [p for p in patterns if not any(fnmatchcase(m.fqn, p) for m in matrices)]:
            raise RequestError(
                "request.invalid",
                f"--quantize-layers names {listed(list(map(printable, unused)))}, and no matrix is called so",
                fix="name weights as `reshard inspect SRC --tensors` lists them",
            )
        return [m for m in matrices if any(fnmatchcase(m.fqn, p) for p in patterns)]
    kind = config.get("model_type")
    pattern = _LINEAR.get(kind) if isinstance(kind, str) else None
    found = [m for m in matrices if pattern is not None and re.fullmatch(pattern, m.fqn)]
    if not found:
        raise RequestError(
            "request.unsatisfiable",
            f"nothing tells which weights of a model of type {printable(kind)} are of linear layers",
            fix="--quantize-layers '*.q_proj.weight,*.down_proj.weight' with the names of the weights to quantize",
        )
    return found


def _joined(fqn: str) -> tuple[str, str]:
    """The layer that a weight becomes a part of when vLLM loads it."""
    found = _JOINED.fullmatch(fqn)
    return (fqn, "") if found is None else (found["layer"], "gated" if found["gated"] else "attention")


def _with_scales(weight: Weight, kind: Quantization) -> Iterator[tuple[LogicalTensor, Quantized]]:
    """A quantized weight and its scales."""
    rows, columns = weight.shape
    if kind is Quantization.FP8_BLOCK:
        name, shape, scale = "scale_inv", (rows // BLOCK_ROWS, columns // BLOCK_ROWS), FLOAT32
    else:
        name, shape, scale = "scale", (rows, 1), weight.dtype
    codes = LogicalTensor(weight.fqn, "value", _CODES[kind], weight.shape)
    yield codes, Quantized(weight.tensor, kind, scale, scales=False)
    yield (
        LogicalTensor(f"{weight.fqn}_{name}", "value", scale, shape),
        Quantized(weight.tensor, kind, scale, scales=True),
    )


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
            # Readers of these files take an entry that is no tensor for a module's extra state, or refuse it.
            extra_states={name: node for name, node in checkpoint.extra_states.items() if is_extra_state(name)},
        )
