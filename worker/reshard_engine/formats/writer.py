"""The protocol of writers."""

from __future__ import annotations

from typing import Protocol

from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.tensors.layout import TargetLayout


class Writer(Protocol):
    """Lays out targets of one format. It is pure and deterministic: no I/O, no tensor data."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out every file of the target; `name` is its tag, as `storage.protocol.save_directory` finds it.

        Raises:
            RequestError: `request.unsatisfiable` if the target cannot hold this source.
        """
        ...
