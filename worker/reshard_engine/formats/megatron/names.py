"""Names of Megatron-core's models: which parameters an entry of `torch_dist` stands for, and what they are called here.

Here each layer and each expert has a parameter of its own. They are counted over the whole model, and have the names of
the local layers: `decoder.layers.3.input_layernorm.weight`, `decoder.layers.3.mlp.experts.local_experts.5` and so on.
Rows of query, key and value lie in Megatron's order (for each group its queries, its key, its value), and `linear_fc1`
of a gated unit is all of the gate, then all of the other half.

Source: megatron-core 0.16.1 and 0.19.2 `transformer/transformer_block.py` (`sharded_state_dict`: equal layers are one
entry with an axis in front), `transformer/transformer_layer.py` (`sharded_state_dict_keys_map`: local norms have the
names of Transformer Engine's), `transformer/mlp.py` (`apply_swiglu_sharded_factory`: `_w` and `_v` with
`singleton_local_shards`), `transformer/moe/experts.py`; verified by running both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from reshard.errors import SourceError, printable
from reshard_engine.formats.model_weights import checked_name

MAX_LAYERS = 1 << 16
"""Layers, and experts of a layer, that one entry may stand for."""
_LAYERS = re.compile(r"(?:(.*)\.)?layers\.(?!\d+\.)(.+)")
"""An entry of equal layers; others have a number there."""
_EXPERTS = re.compile(r"(.*\bmlp\.experts)\.experts\.(?:(\d+)\.)?(.+)")
NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms that Transformer Engine joins with the layer behind them, and their names in local layers."""
_OF_LAYER = re.compile(r"((?:.*\.)?layers)\.(\d{1,6})\.(.+)")
_DECODER = "decoder.layers"
LOCAL_EXPERT = re.compile(r"(.*\bmlp\.experts)\.local_experts\.(\d{1,6})\.(.+)")
"""A parameter of one expert: where the experts are, the expert's number, and its name there."""
_HALVES = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Parameters with a row for each token, behind which Megatron adds rows until tensor parallelism divides them."""
BUFFERS = re.compile(r".*\.router\.(?:expert_bias|local_tokens_per_expert)")
"""Tensors of a router that no optimizer owns: `register_buffer` of `transformer/moe/router.py`."""
EXPERT = re.compile(r".*\.mlp\.experts\..*")
"""Parameters that expert parallelism distributes; shared experts and routers are none of them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter within an entry of the checkpoint."""

    name: str
    index: tuple[int, ...] = ()
    """Numbers of its layer and its expert: where it lies along the first axes of the entry."""
    layer: int | None = None
    """Number of the layer within its block; None outside of layers."""


def entries_of(key: str, shape: Sequence[int]) -> list[Entry]:
    """The parameters that an entry of this shape holds, in the order of its elements.

    Raises:
        SourceError: `checkpoint.malformed` for an entry of layers or experts that has no axis for them, or too many;
            `name.invalid`.
    """
    layers, experts = _LAYERS.fullmatch(key), _EXPERTS.fullmatch(key)
    numbered = None if layers is not None else _OF_LAYER.fullmatch(key)
    axes = [] if layers is None else [_axis(key, shape, 0)]
    if experts is not None and experts[2] is None:
        axes.append(_axis(key, shape, len(axes)))
    own = None if numbered is None else int(numbered[2])
    return [
        Entry(checked_name(_local(name_at(key, index))), index, own if layers is None else index[0])
        for index in product(*axes)
    ]


def _axis(key: str, shape: Sequence[int], dim: int) -> range:
    if len(shape) <= dim or not 0 < shape[dim] <= MAX_LAYERS:
        raise SourceError(
            "checkpoint.malformed",
            f"{printable(key)} is {tuple(shape)}, and its name says that axis {dim} counts layers or experts",
            fix="the metadata is damaged: copy the checkpoint again",
        )
    return range(shape[dim])


def _local(name: str) -> str:
    for engine, local in NORMS.items():
        head, found, tail = name.partition(engine)
        if found and tail in ("weight", "bias"):
            return f"{head}{local}{tail}"
    return name


@dataclass(frozen=True, slots=True)
class KeyRules:
    """The facts that decide the keys of a run's parameters beside their names."""

    norms_apart: frozenset[str] = frozenset()
    """Norms with keys of their own; all others have those of the layer behind them, as engines join both."""
    numbered: frozenset[str] = frozenset()
    """Blocks whose layers differ, so that each has keys of its own: `decoder.layers`."""

    def entry_of(self, name: str) -> Entry:
        """The entry that holds a parameter: its key, and where the parameter lies along the first axes of it."""
        key, index, number = name, tuple[int, ...](), None
        if (layer := _OF_LAYER.fullmatch(name)) is not None:
            number = int(layer[2])
            if layer[1] not in self.numbered:
                key, index = f"{layer[1]}.{layer[3]}", (number,)
        if (expert := LOCAL_EXPERT.fullmatch(key)) is not None:
            key, index = f"{expert[1]}.experts.{expert[3]}", (*index, int(expert[2]))
        if name not in self.norms_apart:
            for engine, local in NORMS.items():
                head, found, tail = key.rpartition(f".{local}")
                if found and tail in ("weight", "bias"):
                    key = f"{head}.{engine}{tail}"
        return Entry(key, index, number)

    def numbers_every_layer(self, names: Iterable[str]) -> bool:
        """True if every layer of these parameters has keys of its own, as the loader must then be told.

        Source: megatron-core 0.14.0 and 0.16.1 `transformer/transformer_block.py` (`sharded_state_dict`: a run whose
        layers are equal asks for such keys where the metadata says `non_homogeneous_layers`); verified by running.
        """
        blocks = {layer[1] for name in names if (layer := _OF_LAYER.fullmatch(name)) is not None}
        return bool(blocks) and blocks <= self.numbered

    @classmethod
    def of(cls, entries: Iterable[tuple[str, str]]) -> KeyRules:
        """The rules by which a checkpoint has these keys, each with the name of a parameter in it."""
        apart, numbered = set[str](), set[str]()
        for key, name in entries:
            if (layer := _OF_LAYER.fullmatch(key)) is not None:
                numbered.add(layer[1])
            if any(f".{local}" in key for local in NORMS.values()):
                apart.add(name)
        return cls(frozenset(apart), frozenset(numbered))

    @classmethod
    def for_model(cls, names: Collection[str], *, local: bool) -> KeyRules:
        """The rules of a model that no file of Megatron-core shows.

        Args:
            names: Its parameters.
            local: True for Megatron-core's own layers, False for those of Transformer Engine.

        Source: megatron-core 0.16.1 `models/gpt/gpt_layer_specs.py` (MLA joins no norm; Transformer Engine joins none
        with experts), `transformer/transformer_block.py` (`sharded_state_dict`: layers that differ have numbers).
        """
        found = {name: m for name in names if (m := _OF_LAYER.fullmatch(name)) is not None and m[1] == _DECODER}
        routed = {m[2] for m in found.values() if m[3].startswith("mlp.router.")}
        dense = {m[2] for m in found.values() if m[3].startswith("mlp.linear_fc1.")}
        compressed = any(".linear_kv_down_proj." in name for name in found)
        apart = set[str]()
        for name, layer in found.items():
            norm = layer[3].partition(".")[0]
            alone = norm == "pre_mlp_layernorm" and (compressed if local else layer[2] in routed)
            if alone or (norm == "input_layernorm" and compressed):
                apart.add(name)
        return cls(frozenset(apart), frozenset({_DECODER} if dense and routed else ()))


def name_at(key: str, index: Sequence[int]) -> str:
    """The name of a module's object, such as its extra state, by its key and its place among equal objects."""
    at = iter(index)
    if (layer := _LAYERS.fullmatch(key)) is not None:
        key = f"{layer[1]}.layers.{next(at, 0)}.{layer[2]}" if layer[1] else f"layers.{next(at, 0)}.{layer[2]}"
    if (expert := _EXPERTS.fullmatch(key)) is not None:
        number = expert[2] if expert[2] is not None else next(at, 0)
        key = f"{expert[1]}.local_experts.{number}.{expert[3]}"
    return checked_name(key)


def half_of(name: str) -> tuple[str, int] | None:
    """The whole parameter of one half of a gated unit, and the half's number; None for every other name."""
    match = _HALVES.fullmatch(name)
    return None if match is None else (match[1], "wv".index(match[2]))
