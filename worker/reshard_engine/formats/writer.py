"""The seam that a target format implements."""

from __future__ import annotations

from typing import Protocol

from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.tensors.layout import TargetLayout


class Writer(Protocol):
    """Lays out one target format. Pure: no I/O, no tensor bytes, deterministic."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Every file of the target; `name` is the last part of its URL.

        Raises:
            RequestError: `request.unsatisfiable` if the target cannot hold this source.
        """
        ...
