"""The format that `reshard slim` reads and writes: plain torch files."""

from __future__ import annotations

from dataclasses import replace

from reshard.choices import TargetFormat
from reshard.errors import RequestError
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.format import Format
from reshard_engine.formats.writer import Writer
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location


class TorchFiles(Format):
    """Any tree with its tensors. No directory is recognised as this format: only a conversion to `slim` reads it."""

    name = "torch_files"
    targets = (TargetFormat.SLIM,)

    def read_for(self, request: ConvertRequest, location: Location, ledger: OpaqueLedger) -> Checkpoint | None:
        """Read all files of the source for a conversion to `slim`."""
        if request.to not in self.targets:
            return None
        if request.source.tag is not None:
            raise RequestError(
                "request.invalid", "--to slim takes files as they are: no tag", fix="name the tag's directory"
            )
        from reshard_engine.formats.torch_files.reader import read_torch_files

        return replace(read_torch_files(location, ledger), family=self.name)

    def writer(self, target: str) -> Writer:
        """The writer of torch files whose storages are as long as their tensors."""
        from reshard_engine.formats.torch_files.writer import SlimWriter

        return SlimWriter()
