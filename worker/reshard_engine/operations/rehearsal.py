"""A conversion tried without moving a byte: laid out by its writer as for a run, to learn whether it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models import ConvertRequest, OpaquePolicy, PossibleTarget, SourceSpec, TargetFormat
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import FORMATS, left_out, writer_of
from reshard_engine.formats.torch_archive import rehearsal
from reshard_engine.operations.requested import as_requested

_NAME = "rehearsed"
"""Of the target: which name it has changes nothing."""


@dataclass(frozen=True)
class Rehearsal:
    """Conversions of one checkpoint that was read, tried one after another."""

    checkpoint: Checkpoint
    source: SourceSpec

    @property
    def opaque(self) -> OpaquePolicy:
        """The policy that lets this source be converted: objects that nobody knows are refused unless asked for."""
        return OpaquePolicy.DROP if self.checkpoint.foreign_globals else OpaquePolicy.REFUSE

    def refusal(self, to: TargetFormat, **options: Any) -> RequestError | SourceError | None:
        """Why a conversion with these fields of `ConvertRequest` would be refused; None if it would not be."""
        target = f"{self.source.url.rstrip('/')}_rehearsed"
        request = ConvertRequest(source=self.source, target=target, to=to, opaque=self.opaque, **options)
        try:
            with rehearsal():
                checkpoint = as_requested(self.checkpoint, request)
                layout = writer_of(to).lay_out(checkpoint, request, name=_NAME)
                layout.map_over(checkpoint.shard_map)
        except (RequestError, SourceError) as error:
            return error
        return None

    @property
    def lacks_parameters(self) -> bool:
        """True if the checkpoint was saved without some of its parameters."""
        return left_out(self.checkpoint) is not None

    def possible(self, name: str, detail: str, flags: str) -> PossibleTarget:
        """A target that is possible with these flags of `reshard convert`."""
        if not self.checkpoint.foreign_globals:
            return PossibleTarget(name=name, possible=True, detail=detail, example=flags)
        detail += "; with --opaque drop, or keep: it holds objects of classes that are not on the allow-list"
        return PossibleTarget(name=name, possible=True, detail=detail, example=f"{flags} --opaque {self.opaque.value}")

    def impossible(self, name: str, refusal: ReshardError) -> PossibleTarget:
        """A target that is refused for this reason."""
        detail = f"{refusal.message}; {refusal.fix}" if refusal.fix else refusal.message
        return PossibleTarget(name=name, possible=False, detail=detail)


def possible_targets(checkpoint: Checkpoint, source: SourceSpec | None = None) -> tuple[PossibleTarget, ...]:
    """Targets by name, each with what is possible or what stands in the way.

    Args:
        checkpoint: A checkpoint that was read.
        source: How the user named it; its own URL if that is not known.
    """
    tried = Rehearsal(checkpoint, source or SourceSpec(url=checkpoint.url))
    return tuple(target for known in FORMATS for target in known.possible_targets(tried))
