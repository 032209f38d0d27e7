"""Raw rows as a format of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest, PossibleTarget
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.format import DryRun, Format, Reader, Writer
from reshard_engine.tensors.layout import KnownFiles
from reshard_raw_rows import RawRowsOptions
from reshard_raw_rows.reader import INDEX, RawRowsReader


class RawRows(Format):
    """Weights as raw files, cut by rows."""

    name = "raw_rows"
    readers: ClassVar[tuple[Reader, ...]] = (RawRowsReader(),)
    files = KnownFiles(entries=(INDEX,), needed=(INDEX,))
    targets = ("raw_rows",)
    whole_models = True

    def writer(self, target: str) -> Writer:
        """The one writer."""
        from reshard_raw_rows.writer import RawRowsWriter

        return RawRowsWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse this format's options where another one is written."""
        if request.to not in self.targets and request.options.of(RawRowsOptions).given():
            raise RequestError("request.invalid", "options of raw rows are for --to raw_rows", fix="--to raw_rows")

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The number of the shard in the file's name."""
        return f"shard {int(file.removesuffix('.raw').rpartition('-')[2])}" if file.endswith(".raw") else ""

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """Weights of any checkpoint."""
        refusal = tried.refusal("raw_rows")
        if refusal is None:
            return [tried.possible("raw_rows", "any type", "--to raw_rows")]
        return [tried.impossible("raw_rows", refusal)]

    def cautions(self, checkpoint: Checkpoint) -> list[str]:
        """A caution that shows whose checkpoint it is."""
        return ["raw rows have no checksums"] if checkpoint.family == self.name else []
