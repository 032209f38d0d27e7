"""Raw rows as a format of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from reshard.models.jobs import PossibleTarget
from reshard.models.resume import ResumeLayout, RunLaunch, identity_of
from reshard.options import RunLayout
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.format import Discovery, DryRun, Format, Presentation, Reader, Writer
from reshard_engine.tensors.layout import KnownFiles
from reshard_raw_rows.reader import INDEX, RawRowsReader


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (RawRowsReader(),)
    files = KnownFiles(entries=(INDEX,), needed=(INDEX,))


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

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
        return ["raw rows have no checksums"] if checkpoint.family == RawRows.name else []


class RawRows(Format):
    """Weights as raw files, cut by rows."""

    name = "raw_rows"
    discovery = _Discovery()
    presentation = _Presentation()
    targets = ("raw_rows",)
    whole_models = True

    def writer(self, target: str) -> Writer:
        """The one writer."""
        from reshard_raw_rows.writer import RawRowsWriter

        return RawRowsWriter()

    def layout_for(self, checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
        """A file of each tensor for each rank of the launch, as far as its rows go."""
        ranks = launch.data_ranks()
        rows = max((p.shape[0] for p in checkpoint.parameters if p.shape), default=1)
        rows_per_file = -(-rows // ranks)
        return ResumeLayout(
            to=self.targets[0],
            layout=RunLayout(dp=ranks),
            free=("dp",),
            options={self.name: {"rows_per_file": rows_per_file}},
            dtype=launch.dtype,
            identity=identity_of({"raw_rows": rows_per_file}),
            label=f"raw_rows-dp{ranks}",
        )

    def fits(self, checkpoint: Checkpoint, wanted: ResumeLayout) -> bool:
        """True for files of as many ranks."""
        return wanted.dtype is None and checkpoint.world.get("dp") == wanted.layout.dp
