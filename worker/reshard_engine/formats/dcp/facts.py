"""Facts of a distributed checkpoint: names of its files, and places of things in its state dict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.dcp_options import Framework
from reshard.errors import counted
from reshard_engine.checkpoint import Checkpoint, FormatFacts
from reshard_engine.formats.dcp_files.metadata.model import METADATA_FILE, RANK_METADATA, SUFFIX
from reshard_engine.formats.dcp_files.tensors import OpaqueTensor
from reshard_engine.formats.trainer_files import TrainerFacts, trainer_facts
from reshard_engine.pickles.nodes import Node, PList, mapping_of
from reshard_engine.storage.protocol import Listing

KeyPath = tuple[str | int, ...]
ODD_STATE = "optimizer.state.*."
"""The beginning of the name of a state that only torch has a place for."""


@dataclass(frozen=True, slots=True)
class DcpFacts(TrainerFacts):
    """The facts that a reader notes for the writer and for people."""

    framework: Framework | None
    """The framework's keys; None for a source of another format beside which a trainer's files lie."""
    model_path: KeyPath | None = None
    """The place of the model's state dict; None for an optimizer whose model is another checkpoint's."""
    optimizer_path: KeyPath | None = None
    """The place of the optimizer's state dict."""
    flat: bool = False
    """True if the optimizer's state dict is flattened, so that hyper-parameters are kept for each parameter."""
    numbered: bool = False
    """True if the optimizer numbers its parameters, and the numbers are the names here."""
    home: KeyPath = ()
    """The place of the client state."""
    at_root: frozenset[str] = frozenset()
    """Keys of the client state that lie at the root, although the model lies deeper."""
    scheduler_paths: tuple[KeyPath, ...] = ()
    """The places of the schedulers' state dicts, in the order of `Checkpoint.schedulers`; of files there are none."""
    others: tuple[Checkpoint, ...] = ()
    """The further models and optimizers of the state dict. They share the shard map."""
    passed_over: tuple[KeyPath, ...] = ()
    """Places like a model's that no optimizer trains, and that are client state therefore."""
    odd_states: Mapping[str, Mapping[str, Node]] = field(default_factory=dict[str, Mapping[str, Node]])
    """Optimizer states by parameter that are neither a number nor one for each element. Only torch has a place."""
    opaque_states: Mapping[str, Mapping[str, OpaqueTensor]] = field(
        default_factory=dict[str, Mapping[str, OpaqueTensor]]
    )
    """Optimizer states by parameter that are tensors of classes of their own. Only the same optimizer reads them."""
    model_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each plain name the one in the model's state dict, where it is another: wrapping modules make names longer,
    and PEFT leaves the adapter's name out."""
    optimizer_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each plain name the one in the optimizer's state dict, where it is another."""

    def places(self) -> Mapping[str, int]:
        """The places of further models and optimizers, each with the number of its tensors."""
        found: dict[str, int] = {}
        for other in self.others:
            facts = other.facts
            if not isinstance(facts, DcpFacts):
                continue
            if facts.model_path is not None:
                found[".".join(map(str, facts.model_path)) or "."] = len(other.parameters) + len(other.buffers)
            if facts.optimizer_path is not None:
                count = sum(len(p.states.keys() - {"fp32"}) for p in other.parameters)
                found[".".join(map(str, facts.optimizer_path)) or "."] = count
        return found

    def of_others(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Further models and optimizers, and entries of the client state in which other models lie."""
        heads = {
            str(path[: len(self.home) + 1][-1]) for path in self.passed_over if path[: len(self.home)] == self.home
        }
        heads |= {str(path[0]) for path in self.passed_over if str(path[0]) in self.at_root}
        further = (*self.places(), *TrainerFacts.of_others(self, checkpoint))
        return (*further, *(key for key in map(str, checkpoint.client_state) if key in heads))

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """The trees that every format has, those of further models and optimizers, and odd states."""
        yield from FormatFacts.trees(self, checkpoint)
        for other in self.others:
            yield from other.facts.trees(other)
        for name, states in self.odd_states.items():
            yield mapping_of({**states}), f"optimizer.state.{name}"
        for name, tensors in self.opaque_states.items():
            for state, tensor in tensors.items():
                yield tensor.chunks[0].value if tensor.chunks else None, f"optimizer.state.{name}.{state}"

    def own_state(self) -> Mapping[str | int, Node]:
        """Further models and optimizers, odd states, random states of a trainer, and its text files."""
        own: dict[str | int, Node] = {place: f"{counted(count, 'tensor')}" for place, count in self.places().items()}
        states = Counter(state for held in self.odd_states.values() for state in held)
        own |= {f"{ODD_STATE}{state}": f"of {counted(count, 'parameter')}" for state, count in states.items()}
        kinds = Counter((state, one.kind) for held in self.opaque_states.values() for state, one in held.items())
        own |= {f"{ODD_STATE}{s}": f"{kind} of {counted(count, 'parameter')}" for (s, kind), count in kinds.items()}
        return {**own, **TrainerFacts.own_state(self)}


def facts_of(checkpoint: Checkpoint) -> DcpFacts | None:
    """The facts of a distributed checkpoint; None for a checkpoint of another format."""
    return checkpoint.facts if isinstance(checkpoint.facts, DcpFacts) else None


def framework_of_source(checkpoint: Checkpoint) -> Framework | None:
    """The framework that saved the source, whatever the format of the source; None if the files name none."""
    facts = facts_of(checkpoint)
    return (None if facts is None else facts.framework) or trainer_facts(checkpoint).saved_by


# Names of files and directories of distributed checkpoints.
#
# Source: torch 2.13.0 `distributed/checkpoint/_hf_utils.py` (`_gen_file_name`); accelerate 1.15.0
# `utils/constants.py` and `utils/fsdp_utils.py` (`pytorch_model_fsdp_0`, `optimizer_0`); pytorch-lightning 2.6.6
# `strategies/fsdp.py` (`meta.pt`); megatron-core 0.16.1 `dist_checkpointing/core.py` (`metadata.json`, `common.pt`).

SHARD_FILE = re.compile(r"shard-(\d{5,7})-model-(\d{5,7})-of-(\d{5,7})\.safetensors")
"""A rank's file of the Hugging Face storage writer."""
MODEL_DIRECTORY = re.compile(r"pytorch_model_fsdp_(\d{1,4})")
OPTIMIZER_DIRECTORY = re.compile(r"optimizer_(\d{1,4})")


def names_of(listing: Listing) -> dict[str, int]:
    """The names of the files of a directory, each with its number in the listing."""
    return {name: i for i, name in enumerate(listing.by_name)}


def is_shard(name: str) -> bool:
    """True for a file of shards, or their metadata."""
    return name == METADATA_FILE or name.endswith(SUFFIX) or RANK_METADATA.fullmatch(name) is not None


def is_distributed(listing: Listing) -> bool:
    """True if a directory holds files of torch's distributed checkpoints."""
    return any(map(is_shard, names_of(listing)))


# The nested form of a state dict that torch flattened.

_MOST_GAPS = 1 << 12
"""Indices of a list without an entry. A stream of a few bytes must not make a long list."""


def nested(entries: Mapping[KeyPath, Node]) -> dict[str | int, Node]:
    """Entries by path as the nested dicts and lists that torch flattened; the top level as a dict of Python.

    Source: torch 2.13.0 `distributed/checkpoint/_nested_dict.py` (`unflatten_state_dict`), `_traverse.py` (a number
    is the index of a list).
    """
    top: dict[str | int, Node] = {}
    inner: dict[str | int, dict[KeyPath, Node]] = {}
    for path, node in entries.items():
        if len(path) == 1:
            top[path[0]] = node
        else:
            top.setdefault(path[0], None)
            inner.setdefault(path[0], {})[path[1:]] = node
    for key, below in inner.items():
        top[key] = _container(nested(below))
    return top


def _container(items: dict[str | int, Node]) -> Node:
    """A list where keys are indices, else a dict. Empty dicts in a list have no entry: torch puts None there."""
    numbers = [k for k in items if isinstance(k, int)]
    if items and len(numbers) == len(items) and min(numbers) >= 0 and max(numbers) < _MOST_GAPS + len(items):
        return PList([items.get(i) for i in range(max(numbers) + 1)])
    return mapping_of(items)
