"""Attributes of named classes, which pickles write as calls of `getattr`: members of enums, and nested classes.

`getattr` is read as data: nothing is imported, and no attribute is looked up. Every other writer spells a member
of an enum by its value, `ZeroStageEnum(3)`; so does the node of a member that the table below knows, because every
Python reads that form. A class within a class gets the dotted name that protocol 4 gives it.

Source: CPython 3.11.2 `Lib/enum.py` (`Enum.__reduce_ex__`, so in 3.11.0 to 3.11.3; by value before and after),
CPython 3.8 to 3.13 `Lib/pickle.py` (`save_global` of nested names before protocol 4).
"""

from __future__ import annotations

from reshard.errors import SourceError, printable
from reshard_engine.pickles.nodes import Global, Node, PDict, PList, PObject, PSet, PTuple

GETATTR = frozenset({"__builtin__.getattr", "builtins.getattr"})

_Members = dict[str, int | str]
_LAYERS: _Members = {"encoder": 1, "decoder": 2}
_RETRO_LAYERS: _Members = {"retro_encoder": 3, "retro_decoder": 4, "retro_decoder_with_retriever": 5}
_ATTENTION: _Members = {"self_attn": 1, "cross_attn": 2}
_MASKS: _Members = {"padding": 1, "causal": 2}
_MODELS: _Members = {"encoder_or_decoder": 1, "encoder_and_decoder": 2}
_GRAPHS: _Members = {"attn": 2, "mlp": 3, "moe": 4, "moe_router": 5, "moe_preprocess": 6, "mamba": 7}
_MODULES: _Members = {"attn": 1, "mlp": 2, "moe": 3, "moe_router": 4, "moe_preprocess": 5, "mamba": 6}

MEMBERS: dict[str, _Members] = {
    # DeepSpeed 0.19.8 `runtime/zero/config.py`; the same since 0.6.
    "deepspeed.runtime.zero.config.ZeroStageEnum": {
        "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3,
    },
    # Megatron-LM and Megatron-DeepSpeed of 2021 and 2022 (BigScience's too), `megatron/enums.py`.
    "megatron.enums.LayerType": _LAYERS,
    "megatron.enums.AttnType": _ATTENTION,
    "megatron.enums.AttnMaskType": {**_MASKS, "prefix": 3, "custom": 4},
    "megatron.enums.PositionEmbeddingType": {"rotary": 1, "absolute": 2, "alibi": 3, "xpos": 4},
    "megatron.enums.UL2ModelType": {"ENCODER_DECODER": "ED", "NON_CAUSAL_DECODER": "ND", "CAUSAL_DECODER": "CD"},
    # Megatron-DeepSpeed of July 2025 and Megatron-LM to 2023, `megatron/model/enums.py`.
    # Its forks number `PositionEmbeddingType` in two ways: a name alone does not say its value.
    "megatron.model.enums.ModelType": _MODELS,
    "megatron.model.enums.LayerType": {**_LAYERS, **_RETRO_LAYERS},
    "megatron.model.enums.AttnType": _ATTENTION,
    "megatron.model.enums.AttnMaskType": _MASKS,
    # Megatron-LM core 0.2 to 0.15, `megatron/core/enums.py` and `megatron/core/transformer/enums.py`.
    "megatron.core.enums.ModelType": {**_MODELS, "retro_encoder": 3, "retro_decoder": 4},
    "megatron.core.enums.Fp8Recipe": {
        name: name for name in ("delayed", "tensorwise", "mxfp8", "blockwise", "custom")
    },
    "megatron.core.enums.Fp4Recipe": {name: name for name in ("nvfp4", "custom")},
    "megatron.core.transformer.enums.ModelType": _MODELS,
    "megatron.core.transformer.enums.LayerType": {"embedding": 1, "loss": 2, "encoder": 3, "decoder": 4, "mtp": 5},
    "megatron.core.transformer.enums.AttnType": _ATTENTION,
    "megatron.core.transformer.enums.AttnMaskType": {
        **_MASKS, "no_mask": 3, "padding_causal": 4, "arbitrary": 5,
        "causal_bottom_right": 6, "padding_causal_bottom_right": 7,
    },
    "megatron.core.transformer.enums.AttnBackend": {
        "flash": 1, "fused": 2, "unfused": 3, "local": 4, "auto": 5, "flashmask": 6,
    },
    "megatron.core.transformer.enums.CudaGraphScope": {
        "full_iteration": 1, **_GRAPHS, "full_iteration_inference": 8,
    },
    "megatron.core.transformer.enums.CudaGraphModule": _MODULES,
    "megatron.core.transformer.enums.InferenceCudaGraphScope": {"none": 1, "layer": 2, "block": 3},
}  # fmt: skip
"""Values of the members of enums on the allow-list, by the names that `getattr` gives."""


def checked_arguments(args: PTuple) -> tuple[Node, str]:
    """Check the arguments of `getattr` and return the owner and the attribute's name.

    Raises:
        SourceError: `pickle.forbidden_call` for arguments that no pickler gives: a default, a name that is no
            identifier, or one with two leading underscores.
    """
    owner, name = args.items if len(args.items) == 2 else (None, None)
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
        raise SourceError("pickle.forbidden_call", f"getattr with arguments that no writer gives: {printable(name)}")
    return owner, name


def member(owner: Global, name: str) -> PObject | None:
    """The member of a known enum, as a call with its value; None for any other attribute."""
    value = MEMBERS.get(owner.dotted, {}).get(name)
    return None if value is None else PObject("reduce", owner, PTuple((value,)), depth=2)


def is_mentioned(value: Node) -> bool:
    """True if `getattr` is itself a value somewhere in the tree, not only called."""
    left: list[Node] = [value]
    met: set[int] = set()
    while left:
        node = left.pop()
        if isinstance(node, Global) and node.dotted in GETATTR:
            return True
        if not isinstance(node, PList | PTuple | PSet | PDict | PObject) or id(node) in met:
            continue
        met.add(id(node))
        if isinstance(node, PDict):
            left += node.pairs
            continue
        left += node.items
        if isinstance(node, PObject):
            # Its class was refused or recorded when it was called.
            left += (node.args, node.kwargs, node.state, *node.appends)
    return False
