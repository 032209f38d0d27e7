"""Rehearses conversions: has the writer lay out the target, without moving a byte, to see if it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models import ConvertRequest, OpaquePolicy, PossibleTarget, SourceSpec
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import check_request, formats, left_out, writer_of
from reshard_engine.formats.torch_archive import dry_run
from reshard_engine.operations.requested import as_requested

_NAME = "rehearsed"
"""Name of the rehearsed target; any name would do."""


@dataclass(frozen=True)
class WriterDryRun:
    """Rehearsals of conversions of one checkpoint that was read."""

    checkpoint: Checkpoint
    source: SourceSpec

    @property
    def opaque(self) -> OpaquePolicy:
        """The policy that this source needs: `drop` if it holds foreign objects, which are refused by default."""
        return OpaquePolicy.DROP if self.checkpoint.foreign_globals else OpaquePolicy.REFUSE

    def refusal(self, to: str, **options: Any) -> RequestError | SourceError | None:
        """The reason why a conversion with these fields of `ConvertRequest` would be refused; None if there is none."""
        target = f"{self.source.url.rstrip('/')}_rehearsed"
        request = ConvertRequest(source=self.source, target=target, to=to, opaque=self.opaque, **options)
        try:
            check_request(request)
            with dry_run():
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
    """All targets by name, each with a note, or with the reason why it is not possible.

    Args:
        checkpoint: A checkpoint that was read.
        source: The source as the user named it; the checkpoint's URL if that is not known.
    """
    tried = WriterDryRun(checkpoint, source or SourceSpec(url=checkpoint.url))
    return tuple(target for known in formats() for target in known.possible_targets(tried))
