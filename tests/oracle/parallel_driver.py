"""The parallel oracles as tests call them: wrappers around rank functions.  Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oracle.launcher import Worlds
from oracle.parallel_cases import AutoTpCase, GptCase, Layout, MoeCase
from oracle.parallel_megatron_cases import MegatronCase
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

    def save(self, function: str, folder: Path, *, world: int, steps_after: int = 3, **kwargs: Any) -> Saved:
        """Runs a rank function that trains and saves under ``folder/ckpt``, with the truth in ``folder``."""
        save_dir = folder / "ckpt"
        got: dict[str, Any] = self.worlds.run(
            function, world=world, save_dir=str(save_dir), truth_dir=str(folder), steps_after=steps_after, **kwargs
        )[0]
        return Saved(save_dir, got["tag"], tuple(got["losses_before"]), tuple(got["losses_after"]))

    def load(
        self,
        function: str,
        load_dir: Path,
        out: Path,
        *,
        world: int,
        tag: str | None = None,
        steps: int = 3,
        **kwargs: Any,
    ) -> Reloaded:
        """Runs a rank function that loads, dumps and trains on.

        Raises:
            WorldError: DeepSpeed refused; the traceback is in it.
        """
        results = self.worlds.run(
            function, world=world, load_dir=str(load_dir), tag=tag, out=str(out), steps=steps, **kwargs
        )
        return Reloaded(Truth(out / "resumed.safetensors", out / "resumed.json"), tuple(results[0]["losses"]))

    def train_3d(self, case: GptCase, layout: Layout, folder: Path, *, steps_after: int = 3) -> Saved:
        """Trains ``case`` on ``layout`` and saves it under ``folder/ckpt``."""
        return self.save(
            "oracle.parallel_train:train_and_save_3d",
            folder,
            world=layout.world,
            steps_after=steps_after,
            case=case.to_json(),
            layout=asdict(layout),
        )

    def resume_3d(
        self,
        case: GptCase,
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
            WorldError: DeepSpeed refused; the traceback is in it.
        """
        return self.load(
            "oracle.parallel_train:resume_3d",
            load_dir,
            out,
            world=layout.world,
            tag=tag,
            steps=steps,
            case=case.to_json(),
            layout=asdict(layout),
            load_universal=load_universal,
        )

    def train_moe(self, case: MoeCase, folder: Path, *, world: int, ep: int, steps_after: int = 3) -> Saved:
        """Trains ``case`` on ``world`` ranks with experts over ``ep`` of them and saves it under ``folder/ckpt``."""
        return self.save(
            "oracle.parallel_moe:train_and_save_moe",
            folder,
            world=world,
            steps_after=steps_after,
            case=case.to_json(),
            ep=ep,
        )

    def resume_moe(
        self,
        case: MoeCase,
        load_dir: Path,
        out: Path,
        *,
        world: int,
        ep: int,
        tag: str | None = None,
        steps: int = 3,
    ) -> Reloaded:
        """A new run with other weights that loads by plain ``engine.load_checkpoint``.

        Raises:
            WorldError: DeepSpeed refused; the traceback is in it.
        """
        return self.load(
            "oracle.parallel_moe:resume_moe",
            load_dir,
            out,
            world=world,
            tag=tag,
            steps=steps,
            case=case.to_json(),
            ep=ep,
        )

    def train_megatron(self, case: MegatronCase, layout: Layout, folder: Path, *, steps_after: int = 3) -> Saved:
        """Trains ``case`` on ``layout`` and saves it under ``folder/ckpt``."""
        return self.save(
            "oracle.parallel_megatron:train_and_save_megatron",
            folder,
            world=layout.world,
            steps_after=steps_after,
            case=case.to_json(),
            layout=asdict(layout),
        )

    def resume_megatron(
        self,
        case: MegatronCase,
        layout: Layout,
        load_dir: Path,
        out: Path,
        *,
        steps: int = 3,
        load_universal: bool = False,
    ) -> Reloaded:
        """A new run with other weights that loads as Megatron does; the arguments that it compares are equal.

        Raises:
            WorldError: DeepSpeed or the model refused; the traceback is in it.
            AssertionError: an argument differs.
        """
        results = self.worlds.run(
            "oracle.parallel_megatron:resume_megatron",
            world=layout.world,
            load_dir=str(load_dir),
            tag=None,
            out=str(out),
            steps=steps,
            case=case.to_json(),
            layout=asdict(layout),
            load_universal=load_universal,
        )
        assert results[0]["differing_args"] == []
        return Reloaded(Truth(out / "resumed.safetensors", out / "resumed.json"), tuple(results[0]["losses"]))

    def expert_files(self, tag_dir: Path, out: Path) -> Truth:
        """The weights that stand in a checkpoint's expert files, as ``module/<name>``."""
        self.worlds.run("oracle.parallel_moe:expert_files", world=1, tag_dir=str(tag_dir), out=str(out))
        return Truth(out, out)

    def train_autotp(self, case: AutoTpCase, folder: Path, *, world: int, tp: int, steps_after: int = 3) -> Saved:
        """Trains ``case`` on ``world`` ranks with tensors over ``tp`` of them and saves it under ``folder/ckpt``."""
        return self.save(
            "oracle.parallel_autotp:train_and_save_autotp",
            folder,
            world=world,
            steps_after=steps_after,
            case=case.to_json(),
            tp=tp,
        )

    def resume_autotp(
        self,
        case: AutoTpCase,
        load_dir: Path,
        out: Path,
        *,
        world: int,
        tp: int,
        tag: str | None = None,
        steps: int = 3,
        load_universal: bool = False,
    ) -> Reloaded:
        """A new run with other weights that loads by plain ``engine.load_checkpoint``, or a universal checkpoint.

        Raises:
            WorldError: DeepSpeed refused; the traceback is in it.
        """
        return self.load(
            "oracle.parallel_autotp:resume_autotp",
            load_dir,
            out,
            world=world,
            tag=tag,
            steps=steps,
            case=case.to_json(),
            tp=tp,
            load_universal=load_universal,
        )
