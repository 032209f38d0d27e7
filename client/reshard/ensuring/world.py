"""Works out the layout of a training run from the caller's arguments, the launcher's variables and the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from reshard.choices import OpaquePolicy, WeightDtype, ZeroStage
from reshard.dcp_options import Framework
from reshard.errors import RequestError, printable
from reshard.models.resume import LAUNCHERS, SAY_DP, RunLaunch, ranks_unknown
from reshard.options import DEFAULT_MEMORY_LIMIT_BYTES

DISTRIBUTED = "dcp"
"""The target of distributed checkpoints (`reshard.dcp_options`)."""
_SLURM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_SLURM_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK")


def visible_processes(environ: Mapping[str, str]) -> int | None:
    """The number of processes that the launcher started; None if no launcher tells.

    One task of Slurm does not count: `srun -n1 reshard ensure ...` before the run sets the same variables.

    Raises:
        RequestError: `request.invalid` for a variable that is not a positive number.
    """
    told = _told(environ)
    return None if told is None else told[0]


def world_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """The number of ranks of the run, and the variable that says so; None if no launcher tells.

    One task of Slurm a node does not count, unless the node has one GPU: torchrun or deepspeed runs under it.

    Raises:
        RequestError: `request.invalid` for a variable that is not a positive number, and for one task a node.
    """
    told = _told(environ)
    if told is None or told[1] != "SLURM_NTASKS":
        return told
    tasks = told[0]
    nodes, gpus = _first(environ, _SLURM_NODES), _first(environ, _SLURM_GPUS)
    if nodes is None or nodes[1] != tasks or (gpus is not None and gpus[1] == 1):
        return told
    many = "" if gpus is None else f", {gpus[0]} is {gpus[1]}: {tasks * gpus[1]} ranks, if each GPU gets one"
    raise RequestError(
        "request.invalid",
        f"SLURM_NTASKS is {tasks} and {nodes[0]} is {tasks}: one task a node, under which torchrun or deepspeed may "
        f"start more processes{many}",
        fix=SAY_DP,
    )


def _told(environ: Mapping[str, str]) -> tuple[int, str] | None:
    for name in LAUNCHERS:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise RequestError(
                "request.invalid",
                f"{name} is {printable(text)!r}, not a number of processes",
                fix=f"export {name}=N with the number of processes, or: unset {name}",
            )
        if name != "SLURM_NTASKS" or int(text) > 1:
            return int(text), name
    return None


def _first(environ: Mapping[str, str], names: Sequence[str]) -> tuple[str, int] | None:
    """The first of Slurm's variables that is set, and its number: `4`, and also `gpu:4` or `gpu:a100:4`."""
    for name in names:
        text = environ.get(name, "").strip().rpartition(":")[2]
        if text.isdecimal():
            return name, int(text)
    return None


@dataclass(frozen=True)
class Loader:
    """The program that will load the result."""

    to: str | None = None
    """`zero` or `dcp`; None for the source's own kind."""
    framework: str | None = None
    """Framework that will load a distributed checkpoint; None for the source's, or any."""
    source_is_distributed: bool = False
    source_is_megatron: bool = False
    source_is_unread: bool = False
    """True where only an inspection tells if the source's kind needs a number of ranks: in an object store, and for a
    format of another package."""

    def __post_init__(self) -> None:
        """Refuse arguments that do not go together.

        Raises:
            RequestError: `request.invalid`.
        """
        if self.to not in (None, "zero", DISTRIBUTED):
            raise RequestError("request.invalid", f"to is {printable(str(self.to))!r}", fix="--to zero, or --to dcp")
        if self.to == "zero" and self.framework is not None:
            raise RequestError("request.invalid", "a framework is for distributed checkpoints", fix="--to dcp")

    @property
    def kind(self) -> str | None:
        """`zero` or `dcp` as far as arguments say: a framework asks for `dcp`."""
        return DISTRIBUTED if self.to is None and self.framework is not None else self.to

    @property
    def distributed(self) -> bool:
        """True if the result is a distributed checkpoint, which needs no number of ranks."""
        return self.kind == DISTRIBUTED or (self.kind is None and self.source_is_distributed)

    @property
    def any_ranks(self) -> bool:
        """True if the result needs no number of data-parallel ranks: also that of a run of Megatron-core."""
        return self.distributed or (self.kind is None and self.source_is_megatron)


_OWN = Loader()
_LISTS: Mapping[str, type[StrEnum]] = {"zero_stage": ZeroStage, "dtype": WeightDtype, "opaque": OpaquePolicy}
"""The fields of a wanted layout whose values are of closed lists."""


@dataclass(frozen=True)
class Wanted:
    """The wanted layout. None means as in the source; for `dp`, the number of processes / (tp x pp)."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    zero_stage: ZeroStage | None = None
    dtype: WeightDtype | None = None
    rules: str | None = None
    """Rules as YAML: how tensor parallelism cuts parameters, if the source does not say."""
    family: str | None = None
    opaque: OpaquePolicy = OpaquePolicy.REFUSE
    """Policy for objects of classes that are not on the allow-list."""
    megatron_args: str | None = None
    """Arguments of Megatron-LM as JSON, for what a run of Megatron-core does not say and its conversion needs."""
    processes: int | None = None
    """Number of processes of the launcher; needed if `dp` is None."""
    loader: Loader = Loader()
    choices: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The user's choices where the source's files leave several ways to read them (`SourceChoices`)."""
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES
    """For each process that converts. The result is the same, so that it is not part of the key."""

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        *,
        choices: Mapping[str, Any] | None = None,
        environ: Mapping[str, str],
        loader: Loader = _OWN,
    ) -> Wanted:
        """Check the arguments of a call.

        Args:
            given: Fields of this class by their names; None is as if left out, and other names are of no interest.
            choices: The user's choices where the source's files leave several ways to read them.
            environ: Environment variables, in which launchers tell the number of processes.
            loader: The program that will load the result.

        Raises:
            RequestError: `request.invalid`, also if `dp` is not given and no launcher tells the number of processes.
        """
        said = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
        for axis in ("dp", "tp", "pp", "ep"):
            if said.get(axis, 1) < 1:
                raise RequestError("request.invalid", f"{axis} is {said[axis]}", fix=f"--{axis} is 1 or more")
        try:
            said |= {name: kind(str(said[name])) for name, kind in _LISTS.items() if name in said}
        except ValueError as error:
            raise RequestError("request.invalid", str(error), fix="reshard ensure --help") from None
        told = None if "dp" in said or loader.any_ranks else world_size(environ)
        known = told is not None or "dp" in said or loader.any_ranks
        if not known and (loader.kind is not None or not loader.source_is_unread):
            raise ranks_unknown()
        return cls(**said, processes=None if told is None else told[0], loader=loader, choices=choices or {})

    def key(self) -> str:
        """A text that is the same for equal arguments. It says them by the names that earlier results have."""
        said = asdict(self)
        loader = said.pop("loader")
        if (default := self.default_framework) is not None:
            said["default_framework"] = default
        if self.megatron_args is None:
            del said["megatron_args"]
        del loader["source_is_megatron"], loader["source_is_unread"]  # of the source, whose files are in the key, too
        said["framework"] = {("grammar" if name == "framework" else name): value for name, value in loader.items()}
        return repr(sorted((name, value) for name, value in said.items() if name != "memory_limit_bytes"))

    @property
    def default_framework(self) -> str | None:
        """The framework of a distributed result where neither the caller nor the source names one; None for others.

        Keys contain it, so that results of version 0.1.0, whose default was Accelerate, are not reused.
        """
        loader = self.loader
        return Framework.STATE_DICT.value if loader.kind == DISTRIBUTED and loader.framework is None else None

    def launch(self, *, beside: str | None = None) -> RunLaunch:
        """The run that will load the result.

        Args:
            beside: The framework whose files lie beside a source that is no distributed checkpoint. It stands for the
                framework of a distributed result where the caller names none.

        Raises:
            RequestError: `request.invalid` for sizes that no run has.
        """
        try:
            return RunLaunch(
                to=self.loader.kind,
                framework=self.loader.framework or beside,
                dp=self.dp,
                tp=self.tp,
                pp=self.pp,
                ep=self.ep,
                processes=self.processes,
                zero_stage=self.zero_stage,
                dtype=self.dtype,
                megatron_args=self.megatron_args,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestError(
                "request.invalid",
                f"{first['loc'][0]}: {first['msg']}",
                fix="give whole numbers from 1 on; reshard ensure --help names the options of a layout",
            ) from None
