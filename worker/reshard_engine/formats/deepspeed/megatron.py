"""Names in Megatron-DeepSpeed's checkpoints, for the modules that read, write and compare them.

Source: Megatron-DeepSpeed (main, July 2025) `megatron/checkpointing.py` (`save_checkpoint`: what is beside the tag;
`check_checkpoint_args` compares parallel sizes), `megatron/arguments.py` (names of `args`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.pickles.nodes import Global, Node, PObject, is_mapping, mapping_items, mapping_of

ARGS = "args"
"""The entry of model states that holds the run's arguments."""
VERSION_KEY = "checkpoint_version"
ITERATION = "iteration"
TRACKER = "latest_checkpointed_iteration.txt"
"""The file beside `latest` in which Megatron's tools look for the number of the last iteration."""
TOKENS_ARG = "consumed_train_tokens"
PADDED_VOCAB_ARG = "padded_vocab_size"
NO_PIPELINE_ARG = "no_pipeline_parallel"
VOCAB_DIVISOR_ARG = "make_vocab_size_divisible_by"
LAYOUT_ARGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "world_size",
    "moe_expert_parallel_size",
    PADDED_VOCAB_ARG,
    NO_PIPELINE_ARG,
    VOCAB_DIVISOR_ARG,
)
"""Arguments that name the layout. Writers set them for the target's layout; `diff` does not compare them."""


def namespace_items(node: Node) -> Mapping[str | int, Node]:
    """The attributes of an `argparse.Namespace`; an empty mapping for any other node."""
    if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "argparse.Namespace":
        return mapping_items(node.state, what=ARGS) if is_mapping(node.state) else {}
    return {}


def with_args(node: Node, values: Mapping[str, Node]) -> Node:
    """The namespace with new values for those arguments that it has; any other node is returned unchanged."""
    known = namespace_items(node)
    if not known or not isinstance(node, PObject):
        return node
    return replace(node, state=mapping_of({**known, **{k: v for k, v in values.items() if k in known}}))


def without_layout(node: Node) -> Node:
    """The namespace without the arguments that name a layout; any other node is returned unchanged."""
    known = namespace_items(node)
    if not known or not isinstance(node, PObject):
        return node
    return replace(node, state=mapping_of({k: v for k, v in known.items() if k not in LAYOUT_ARGS}))


def is_megatron(checkpoint: Checkpoint) -> bool:
    """True if the client state is that of a Megatron-DeepSpeed run."""
    return ARGS in checkpoint.client_state and VERSION_KEY in checkpoint.client_state
