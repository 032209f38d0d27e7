"""The FSDP oracle as tests call it: sources trained once per test run, and resumes by the real consumers.

Imports neither torch nor a framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oracle.cases import Case
from oracle.dcp_cases import FsdpRun, Mesh
from oracle.launcher import Worlds
from oracle.truth import Resumed, Truth, differences, meta_differences

Framework = Literal["torch", "accelerate", "items", "lightning", "titan", "trainer", "zero"]
TIMEOUT_S = 120.0
"""For a world: the longest takes 6 s on an idle machine."""


@dataclass(frozen=True)
class Saved:
    """Checkpoints of one real run, and everything known about it.

    Attributes:
        framework: who trained it.
        run: what was trained; of a Trainer's run only name and mesh.
        folder: where checkpoints and truth are.
        losses_after: the uninterrupted run's losses after the save.
    """

    framework: Framework
    run: FsdpRun
    folder: Path
    losses_after: tuple[float, ...]

    @property
    def truth(self) -> Truth:
        """The logical state at the save."""
        return Truth(self.folder / "truth.safetensors", self.folder / "truth.json")

    def path(self, kind: str = "app") -> Path:
        """The directory of a checkpoint; of frameworks there is one, whatever the kind."""
        match self.framework:
            case "torch" | "items":
                return self.folder / kind
            case "accelerate":
                return self.folder / "state"
            case "lightning":
                return self.folder / "saved.ckpt"
            case "titan":
                return self.folder / "checkpoint" / "step-3"
            case "trainer":
                return self.folder / "output" / "checkpoint-3"
            case "zero":
                return self.folder / "ckpt"


@dataclass(frozen=True)
class Job:
    """One checkpoint that torch alone is to resume.

    Attributes:
        run: the target run, with its mesh.
        kind: the grammar of the keys.
        path: the checkpoint.
        out: where to dump.
        partial: accepts that states are missing.
        scheduler: the state for a scheduler of which the checkpoint says nothing.
        direct: the options of `reshard.dcp.Reader`, if that reads it; the checkpoint may be of any format then.
        line: the call of a script that reads it, in place of the oracle's own.
    """

    run: FsdpRun
    kind: str
    path: Path
    out: Path
    partial: bool = False
    scheduler: Any = None
    direct: dict[str, Any] | None = None
    line: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for the way into a rank."""
        rest = {"kind": self.kind, "path": str(self.path), "out": str(self.out), "partial": self.partial}
        rest |= {"direct": self.direct, "line": self.line}
        return rest | {"run": self.run.to_json(), "scheduler": self.scheduler if self.run.scheduler else None}


class FsdpOracle:
    """Trains and resumes with FSDP and its frameworks, and with DeepSpeed on the same model and data."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds

    def _run(self, function: str, world: int, **kwargs: Any) -> Any:
        return self.worlds.run(f"oracle.{function}", world=world, timeout_s=TIMEOUT_S, **kwargs)[0]

    def train(self, framework: Framework, run: FsdpRun, folder: Path) -> tuple[float, ...]:
        """Trains and saves in ``folder``; the losses after the save."""
        shared: dict[str, Any] = {"world": run.mesh.world, "folder": str(folder)}
        match framework:
            case "torch":
                kinds = [*run.kinds, *run.other_kinds]
                got = self._run("dcp_train:torch_only", run=run.to_json(), kinds=kinds, **shared)
            case "accelerate":
                got = self._run("dcp_train:accelerate", run=run.to_json(), **shared)
            case "items" | "titan":
                got = self._run(f"dcp_{framework}:save", run=run.to_json(), **shared)
            case "lightning":
                losses = self._run("dcp_lightning:fit", run=run.to_json(), **shared)["losses"]
                return tuple(losses[3:])
            case "trainer":
                got = self._run("dcp_trainer:trainer", kind=run.name, version=_version(run), **shared)["losses"]
                return tuple(got[step] for step in ("4", "5", "6"))
            case "zero":
                got = self._run("dcp_zero:save", case=run.model.to_json(), **shared)
        return tuple(got["losses_after"])

    def resume(
        self, framework: Framework, run: FsdpRun, path: Path, out: Path, *, direct: dict[str, Any] | None = None
    ) -> Resumed:
        """Resumes one checkpoint by the framework's own way, on ``run.mesh``.

        With ``direct``, DeepSpeed loads by `reshard.deepspeed.load_checkpoint` with these options, and Accelerate by
        `reshard.direct`.

        Raises:
            WorldError: it refused; the traceback is in it.
        """
        shared: dict[str, Any] = {"world": run.mesh.world}
        match framework:
            case "accelerate":
                shared |= {} if direct is None else {"direct": direct}
                got = self._run("dcp_load:accelerate", run=run.to_json(), path=str(path), out=str(out), **shared)
            case "titan":
                base = str(path.parent.parent)
                got = self._run("dcp_titan:load", run=run.to_json(), folder=base, out=str(out), **shared)
            case "lightning":
                got = self._run("dcp_lightning:fit", run=run.to_json(), folder=str(out), resume=str(path), **shared)
            case "trainer":
                kind: dict[str, Any] = {"kind": run.name, "version": _version(run)}
                got = self._run("dcp_trainer:trainer", folder=str(out), resume=str(path), **kind, **shared)
                got = {"losses": [got["losses"][step] for step in ("4", "5", "6")]}
            case "zero":
                more = {} if direct is None else {"direct": direct}
                got = self._run(
                    "dcp_zero:load", case=run.model.to_json(), path=str(path), out=str(out), **shared, **more
                )
            case "torch" | "items":
                raise ValueError("several at once: resume_all; in one form: resume_items")
        return Resumed.of(out, got["losses"])

    def resume_by_line(self, framework: Framework, run: FsdpRun, line: str, out: Path) -> Resumed:
        """Resumes by the call of a user's script, run with the names that the script of this framework has.

        Raises:
            WorldError: it failed; the traceback is in it.
        """
        shared: dict[str, Any] = {"world": run.mesh.world, "line": line}
        match framework:
            case "accelerate":
                got = self._run("dcp_load:accelerate", run=run.to_json(), out=str(out), **shared)
            case "lightning":
                got = self._run("dcp_lightning:fit", run=run.to_json(), folder=str(out), **shared)
            case "trainer":
                kind: dict[str, Any] = {"kind": run.name, "version": _version(run)}
                got = self._run("dcp_trainer:trainer", folder=str(out), **kind, **shared)
                got = {"losses": [got["losses"][step] for step in ("4", "5", "6")]}
            case _:
                raise ValueError("dcp.load: Job.line")
        return Resumed.of(out, got["losses"])

    def resume_items(
        self, run: FsdpRun, path: Path, form: str, out: Path, *, resharded: bool
    ) -> tuple[Resumed, list[float]]:
        """Resumes one directory by torch_checkpointing's manager; also the learning rates as it left them."""
        jobs: dict[str, Any] = {"run": run.to_json(), "path": str(path), "form": form, "out": str(out)}
        got = self._run("dcp_items:load", run.mesh.world, **jobs, resharded=resharded)
        return Resumed.of(out, got["losses"]), got["rates"]

    def resume_all(self, jobs: Sequence[Job]) -> list[Resumed | str]:
        """Resumes checkpoints on meshes of one size by ``dcp.load`` and torch's functions; errors as text."""
        (world,) = {job.run.mesh.world for job in jobs}
        results = self._run("dcp_load:torch_only", world, jobs=[job.to_json() for job in jobs])
        return [
            result["error"] if "error" in result else Resumed.of(job.out, result["losses"])
            for job, result in zip(jobs, results, strict=True)
        ]


def _version(run: FsdpRun) -> int:
    return 2 if run.parallel == "fsdp2" else 1


_ONLY_DEEPSPEED = ("global_steps", "global_samples", "skipped_steps", "loss_scale", "client_state")


def problems(wanted: Truth, found: Truth, *, across: bool = False) -> list[str]:
    """Everything in which a state is not the wanted one, and ranks that have other hyper-parameters than the first.

    Args:
        wanted: the truth.
        found: what was loaded.
        across: one of them is DeepSpeed's, which has weights in model dtype apart from its masters, and counters.
    """
    ranks = found.meta.get("ranks_that_disagree", [])
    told = meta_differences(wanted, found)
    return [
        *differences(wanted, found, without=("module",) if across else ()),
        *(text for text in told if not (across and text.startswith(_ONLY_DEEPSPEED))),
        *(f"rank {rank} has other hyper-parameters than rank 0" for rank in ranks),
    ]


def zero_run(stage: Literal[1, 2, 3], run: FsdpRun, world: int) -> FsdpRun:
    """The run under DeepSpeed with the model and groups of ``run``."""
    name = run.optimizer if run.optimizer in ("sgd", "adam") else "adamw"
    changed: dict[str, Any] = {"name": f"zero{stage}_{run.name}", "stage": stage, "optimizer": name}
    case = Case(**run.model.to_json() | changed)
    return FsdpRun(case.name, model=case, mesh=Mesh(world))
