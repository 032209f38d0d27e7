"""The parallel oracles as tests call them: wrappers around rank functions.  Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oracle.launcher import Worlds
from oracle.parallel_cases import Layout, ParallelCase
from oracle.truth import Truth


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a real parallel run and everything known about it.

    Attributes:
        dir: the save folder: ``latest`` and ``<tag>/``; the truth lies beside it.
        tag: the tag saved.
        losses_before: global losses up to the save.
        losses_after: the uninterrupted run's losses after the save.
    """

    dir: Path
    tag: str
    losses_before: tuple[float, ...]
    losses_after: tuple[float, ...]

    @property
    def tag_dir(self) -> Path:
        """The folder that holds the checkpoint's files."""
        return self.dir / self.tag

    @property
    def truth(self) -> Truth:
        """The logical state at the save: tensors whole over all kinds of ranks, vocabularies without padding."""
        return Truth(self.dir.parent / "truth.safetensors", self.dir.parent / "truth.json")

    @property
    def initial(self) -> Truth:
        """The logical state before the first step."""
        return Truth(self.dir.parent / "initial.safetensors", self.dir.parent / "initial.json")


@dataclass(frozen=True)
class Reloaded:
    """What DeepSpeed made of a checkpoint: its state right after loading, and the losses of its next steps."""

    state: Truth
    losses: tuple[float, ...]


class ParallelOracle:
    """Trains and resumes with DeepSpeed itself, on layouts of several kinds of ranks."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds

    def train(self, case: ParallelCase, layout: Layout, folder: Path, *, steps_after: int = 3) -> Saved:
        """Trains ``case`` on ``layout`` and saves it under ``folder/ckpt``, with the truth in ``folder``."""
        save_dir = folder / "ckpt"
        got: dict[str, Any] = self.worlds.run(
            "oracle.parallel_train:train_and_save",
            world=layout.world,
            case=case.to_json(),
            layout=asdict(layout),
            save_dir=str(save_dir),
            truth_dir=str(folder),
            steps_after=steps_after,
        )[0]
        return Saved(save_dir, got["tag"], tuple(got["losses_before"]), tuple(got["losses_after"]))

    def resume(
        self,
        case: ParallelCase,
        layout: Layout,
        load_dir: Path,
        out: Path,
        *,
        tag: str | None = None,
        steps: int = 3,
        load_universal: bool = False,
    ) -> Reloaded:
        """A new run with other weights on ``layout`` that loads by plain ``engine.load_checkpoint``.

        Args:
            case: the target run; its stage may differ from the source's.
            layout: its ranks.
            load_dir: the folder above the tag.
            out: folder for the dump.
            tag: folder name; ``latest`` decides if None.
            steps: steps to train after loading.
            load_universal: the checkpoint is a universal one.

        Raises:
            WorldError: DeepSpeed or the model refused; the traceback is in it.
            AssertionError: an argument that Megatron compares differs.
        """
        results = self.worlds.run(
            "oracle.parallel_train:resume",
            world=layout.world,
            case=case.to_json(),
            layout=asdict(layout),
            load_dir=str(load_dir),
            tag=tag,
            out=str(out),
            steps=steps,
            load_universal=load_universal,
        )
        assert results[0]["differing_args"] == []
        return Reloaded(Truth(out / "resumed.safetensors", out / "resumed.json"), tuple(results[0]["losses"]))

    def expert_files(self, tag_dir: Path, out: Path) -> Truth:
        """The weights that stand in a checkpoint's expert files, as ``module/<name>``."""
        self.worlds.run("oracle.parallel_moe:expert_files", world=1, tag_dir=str(tag_dir), out=str(out))
        return Truth(out, out)
