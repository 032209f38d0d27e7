"""A conversion tried without moving a byte: laid out by its writer as for a run, to learn whether it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reshard.errors import RequestError, SourceError
from reshard.models import ConvertRequest, NativeLayout, OpaquePolicy, SourceSpec, TargetFormat, ZeroStage
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.targets import writer_of
from reshard_engine.formats.torch_archive import rehearsal
from reshard_engine.operations.requested import as_requested

_NAME = "global_step0"
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

    def native(self, stage: ZeroStage, **world: int) -> RequestError | SourceError | None:
        """The same of a DeepSpeed run of this stage on `dp` ranks, with `tp`, `pp` and `ep` where they are given."""
        return self.refusal(TargetFormat.ZERO, layout=NativeLayout.model_validate({"zero_stage": stage, **world}))
