"""Facts of a distributed checkpoint that no other format knows: the places of things in its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.dcp_options import Grammar
from reshard_engine.checkpoint import Checkpoint, FormatFacts
from reshard_engine.pickles.nodes import Node, PList, mapping_of

RANK_STATES = "random_states"
"""The name of the ranks' random states among the run's state."""
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class DcpFacts(FormatFacts):
    """The facts that a reader notes for the writer and for people."""

    grammar: Grammar | None
    """The framework's keys; None for a source of another format beside which a trainer's files lie."""
    model_path: KeyPath = ()
    """The place of the model's state dict."""
    optimizer_path: KeyPath | None = None
    """The place of the optimizer's state dict."""
    flat: bool = False
    """True if the optimizer's state dict is flattened, so that hyper-parameters are kept for each parameter."""
    scheduler_paths: tuple[KeyPath, ...] = ()
    """The places of the schedulers' state dicts, in the order of `Checkpoint.schedulers`."""
    at_root: frozenset[str] = frozenset()
    """Keys of schedulers and client state that lie at the root, although the model lies deeper."""
    wrapped_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each plain name the name in the files, where wrapping modules made it longer."""
    texts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Text files of a trainer beside the shards, by name."""
    rank_states: tuple[Mapping[str, Node], ...] = ()
    """Random states by rank, by the keys of Accelerate or of the Trainer. Other frameworks have no use for them."""

    def run_state(self, checkpoint: Checkpoint) -> Mapping[str | int, Node]:
        """The state that every format has, and a trainer's."""
        return {**FormatFacts.run_state(self, checkpoint), **self.own_state()}

    def own_state(self) -> Mapping[str | int, Node]:
        """Random states of a trainer, and its text files."""
        own: dict[str | int, Node] = {name: text.decode("utf-8", "replace") for name, text in self.texts.items()}
        if self.rank_states:
            own[RANK_STATES] = PList([mapping_of({**states}) for states in self.rank_states])
        return own


def facts_of(checkpoint: Checkpoint) -> DcpFacts | None:
    """The facts of a distributed checkpoint; None for a checkpoint of another format."""
    return checkpoint.facts if isinstance(checkpoint.facts, DcpFacts) else None
