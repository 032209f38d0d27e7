"""The seam that a format implements: one object answers for everything that the engine asks about a format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from reshard.diffs import DiffOptions
from reshard.errors import ReshardError
from reshard.models import ConvertRequest, PossibleTarget, SourceSpec, TargetFormat
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.reader import Reader
from reshard_engine.formats.writer import Writer
from reshard_engine.pickles.nodes import Node
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.layout import KnownFiles


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The part of a run's state that is no tensor of a parameter, by names that are the same in every layout."""

    state: Mapping[str, Node] | None = None
    """Counters, schedulers, client state; None for a checkpoint that holds no run."""
    optimizer: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Values of the optimizer beside its param groups, such as the loss scale."""
    optional: frozenset[str] = frozenset()
    """Names of `optimizer` that some layouts keep and others do not: compared where both sides have them."""


class Trial(Protocol):
    """Conversions of one checkpoint that are laid out by their writers, and not run."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint."""
        ...

    @property
    def source(self) -> SourceSpec:
        """The name that the user gave it."""
        ...

    def refusal(self, to: TargetFormat, **options: Any) -> ReshardError | None:
        """The reason for which a conversion with these fields of `ConvertRequest` is refused; None if it is not."""
        ...

    @property
    def lacks_parameters(self) -> bool:
        """True if the checkpoint was saved without some of its parameters."""
        ...

    def possible(self, name: str, detail: str, flags: str) -> PossibleTarget:
        """A target that is possible with these flags of `reshard convert`."""
        ...

    def impossible(self, name: str, refusal: ReshardError) -> PossibleTarget:
        """A target that is refused for this reason."""
        ...


class Format:
    """A family of checkpoints. What a format does not override is as in one that nothing is known about."""

    name: ClassVar[str]
    readers: ClassVar[tuple[Reader, ...]] = ()
    """The readers of this format, in the order in which they are asked whether they recognise a directory."""
    of_training: ClassVar[bool] = False
    """True if a directory of this format holds a training state: what lies beside that is a copy of less."""
    files: ClassVar[KnownFiles] = KnownFiles()
    """The names by which a target that exists already is known for a checkpoint of this format."""
    targets: ClassVar[tuple[TargetFormat, ...]] = ()
    """The targets that this format's writers write."""

    takes_model_files: ClassVar[bool] = False
    """True if a model's configuration and the like may lie beside what the writers write."""
    whole_models: ClassVar[bool] = False
    """True if the writers write models that are expected to be whole."""

    def writer(self, target: TargetFormat) -> Writer:
        """The writer of one of `targets`, imported when it is asked for: a command waits for one, not for all.

        Raises:
            LookupError: The format has no such target.
        """
        raise LookupError(target)

    def read_rules(self, request: ConvertRequest | DiffOptions) -> Mapping[str, Any] | None:
        """The rules of a request that say how the parameters of this format's checkpoints are cut; None for none.

        Raises:
            RequestError: `request.invalid`.
        """
        return None

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse options of this format that contradict one another or the target.

        Raises:
            RequestError: `request.invalid`.
        """

    def read_for(self, request: ConvertRequest, location: Location, ledger: OpaqueLedger) -> Checkpoint | None:
        """The source as this format's writers want it; None if they take what any reader recognises.

        Raises:
            SourceError: Everything that can be wrong with the source.
        """
        return None

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint under the names, and with the rules, that the request gives in the terms of this format.

        Raises:
            RequestError: `request.unsatisfiable`.
        """
        return checkpoint

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with what the request takes from elsewhere: a base model, an adapter, a model's files.

        Args:
            checkpoint: What was read.
            request: The request.
            base: The base model that the request names, where it names one.

        Raises:
            SourceError: Everything that can be wrong with those places.
            RequestError: `request.unsatisfiable`.
        """
        return checkpoint

    def left_out(self, checkpoint: Checkpoint) -> str | None:
        """A note about parameters that the checkpoint was saved without; None if there is nothing to say."""
        return None

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The rank whose file this is, for people; empty for a file that is no rank's own."""
        return ""

    def zero_stage(self, checkpoint: Checkpoint) -> int | None:
        """The ZeRO stage that `inspect` and `diff` show; None for formats that know no stages."""
        return None

    def cautions(self, checkpoint: Checkpoint) -> list[str]:
        """Warnings that `inspect` adds to those of the reader."""
        return []

    def joined_cautions(self, checkpoint: Checkpoint, request: ConvertRequest) -> list[str]:
        """Warnings about tensors that were put together from slices, for a target that holds them whole."""
        return []

    def possible_targets(self, tried: Trial) -> Iterable[PossibleTarget]:
        """What any checkpoint can become in this format, and where it cannot, the reason."""
        return ()

    def run_facts(self, checkpoint: Checkpoint) -> RunFacts:
        """What `diff` compares of a checkpoint of this format beside its tensors and param groups."""
        return RunFacts()
