"""Torch files as they are, as a format: what `reshard slim` reads and writes."""

from __future__ import annotations

from dataclasses import replace

from reshard.errors import RequestError
from reshard.models import ConvertRequest, TargetFormat
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.format import Format
from reshard_engine.formats.writer import Writer
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location


class TorchFiles(Format):
    """Any tree with its tensors. No directory is recognised as one: who wants this says so."""

    name = "torch_files"
    targets = (TargetFormat.SLIM,)

    def read_for(self, request: ConvertRequest, location: Location, ledger: OpaqueLedger) -> Checkpoint | None:
        """The files of the source, whatever they are, for a conversion to `slim`."""
        if request.to not in self.targets:
            return None
        if request.source.tag is not None:
            raise RequestError(
                "request.invalid", "--to slim takes files as they are: no tag", fix="name the tag's directory"
            )
        from reshard_engine.formats.torch_files.reader import read_torch_files

        return replace(read_torch_files(location, ledger), family=self.name)

    def writer(self, target: TargetFormat) -> Writer:
        """The writer of torch files whose storages are as long as their tensors."""
        from reshard_engine.formats.torch_files.writer import SlimWriter

        return SlimWriter()
