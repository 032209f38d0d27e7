"""The oracles as tests call them: typed wrappers around the rank functions.  Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oracle.cases import Case
from oracle.launcher import Worlds
from oracle.parallel_cases import Layout, ParallelCase
from oracle.truth import Resumed, Truth


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a real run and everything known about it.

    Attributes:
        dir: the save folder: ``latest`` and ``<tag>/``; the truth lies beside it, so that no reader trips over it.
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
        """The logical state of a parallel run before the first step."""
        return Truth(self.dir.parent / "initial.safetensors", self.dir.parent / "initial.json")


@dataclass(frozen=True)
class Trained(Saved):
    """A checkpoint of a case on so many data-parallel ranks."""

    case: Case
    world: int


class Oracle:
    """Trains, resumes and converts with DeepSpeed itself."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds

    def train(self, case: Case, folder: Path, *, world: int = 2, steps_after: int = 3) -> Trained:
        """Trains ``case`` and saves it under ``folder/ckpt``, with the truth in ``folder``."""
        save_dir = folder / "ckpt"
        results = self.worlds.run(
            "oracle.train:train_and_save",
            world=world,
            case=case.to_json(),
            save_dir=str(save_dir),
            truth_dir=str(folder),
            steps_after=steps_after,
        )
        got: dict[str, Any] = results[0]
        return Trained(save_dir, got["tag"], tuple(got["losses_before"]), tuple(got["losses_after"]), case, world)

    def resume_universal(
        self,
        case: Case,
        load_dir: Path,
        out: Path,
        *,
        world: int,
        tag: str | None = None,
        steps: int = 3,
        restore_from: Truth | None = None,
    ) -> Resumed:
        """A new run on ``world`` ranks that loads a universal checkpoint; see ``oracle.train.resume_universal``.

        Args:
            case: the target run.
            load_dir: the folder above the tag.
            out: folder for the dump.
            world: data-parallel ranks.
            tag: folder name; ``latest_universal`` decides if None.
            steps: steps to train after loading.
            restore_from: takes buffers and frozen weights from this truth before training (the loader does not).

        Raises:
            WorldError: DeepSpeed refused; the traceback is in it.
        """
        return self._resume("resume_universal", case, load_dir, out, world, tag, steps, restore_from)

    def resume_native(
        self,
        case: Case,
        load_dir: Path,
        out: Path,
        *,
        world: int,
        tag: str | None = None,
        steps: int = 3,
        direct: dict[str, Any] | None = None,
        load: dict[str, Any] | None = None,
    ) -> Resumed:
        """A new run on ``world`` ranks that loads by plain ``engine.load_checkpoint``; arguments as above.

        With ``direct``, by `reshard.deepspeed.load_checkpoint` with these options, from a checkpoint of any layout.
        ``load`` has further arguments of either.
        """
        more = {name: value for name, value in (("direct", direct), ("load", load)) if value is not None}
        return self._resume("resume_native", case, load_dir, out, world, tag, steps, None, **more)

    def _resume(
        self,
        function: str,
        case: Case,
        load_dir: Path,
        out: Path,
        world: int,
        tag: str | None,
        steps: int,
        restore_from: Truth | None,
        **more: Any,
    ) -> Resumed:
        results = self.worlds.run(
            f"oracle.train:{function}",
            world=world,
            case=case.to_json(),
            load_dir=str(load_dir),
            tag=tag,
            out=str(out),
            steps=steps,
            restore_from=str(restore_from.tensors_path) if restore_from else None,
            **more,
        )
        return Resumed.of(out, results[0]["losses"])

    def peer_fp32(self, checkpoint_dir: Path, out: Path, *, tag: str | None = None) -> str | None:
        """Consolidates with zero_to_fp32 into the safetensors file ``out``; its error's text, or None."""
        run = self.worlds.run
        got = run("oracle.peers:peer_fp32", world=1, checkpoint_dir=str(checkpoint_dir), out=str(out), tag=tag)
        error: str | None = got[0]["error"]
        return error

    def peer_safetensors(self, checkpoint_dir: Path, out_dir: Path) -> str | None:
        """Consolidates with zero_to_fp32 into safetensors files; its error's text, or None."""
        run = self.worlds.run
        got = run("oracle.peers:peer_safetensors", world=1, checkpoint_dir=str(checkpoint_dir), out_dir=str(out_dir))
        error: str | None = got[0]["error"]
        return error

    def peer_universal(
        self, tag_dir: Path, out_dir: Path, *, megatron: bool = False, nested: bool = False
    ) -> str | None:
        """Converts with ds_to_universal (missing state injected); its error's text, or None.

        Args:
            tag_dir: the checkpoint's folder.
            out_dir: the universal folder to write.
            megatron: a stub stands for the one class of Megatron that its files name.
            nested: the converter is mended where it falls over a nested ``module``.
        """
        options = {"megatron": megatron, "nested": nested}
        got = self.worlds.run(
            "oracle.peers:peer_universal", world=1, tag_dir=str(tag_dir), out_dir=str(out_dir), **options
        )
        error: str | None = got[0]["error"]
        return error

    def reshape(self, tag_dir: Path, *names: str) -> None:
        """Rewrites a checkpoint in place into an older shape; see ``oracle.old_shapes``."""
        self.worlds.run("oracle.old_shapes:rewrite", world=1, tag_dir=str(tag_dir), names=list(names))

    def plant(self, tag_dir: Path, patterns: list[int], half_patterns: list[int]) -> int:
        """Plants bit patterns into a checkpoint; see ``oracle.planted``.  Elements of rank 0's first flat group."""
        run = self.worlds.run
        got = run("oracle.planted:plant", world=1, tag_dir=str(tag_dir), patterns=patterns, half_patterns=half_patterns)
        elems: int = got[0]["partition"]
        return elems


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
        direct: dict[str, Any] | None = None,
    ) -> Resumed:
        """A new run with other weights on ``layout`` that loads by plain ``engine.load_checkpoint``.

        Args:
            case: the target run; its stage may differ from the source's.
            layout: its ranks.
            load_dir: the folder above the tag.
            out: folder for the dump.
            tag: folder name; ``latest`` decides if None.
            steps: steps to train after loading.
            load_universal: the checkpoint is a universal one.
            direct: load by `reshard.deepspeed.load_checkpoint` with these options, from any layout.

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
            direct=direct,
        )
        assert results[0]["differing_args"] == []
        return Resumed.of(out, results[0]["losses"])

    def expert_files(self, tag_dir: Path, out: Path) -> Truth:
        """The weights that stand in a checkpoint's expert files, as ``module/<name>``."""
        self.worlds.run("oracle.parallel_moe:expert_files", world=1, tag_dir=str(tag_dir), out=str(out))
        return Truth(out, out)
