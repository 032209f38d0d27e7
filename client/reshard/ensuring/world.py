"""Works out the layout of a training run from the caller's arguments, the launcher's variables and the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from math import prod
from typing import Any

from pydantic import AliasChoices, Field, ValidationError

from reshard.choices import OpaquePolicy, TargetFormat, WeightDtype, ZeroStage
from reshard.dcp_options import Framework
from reshard.errors import RequestError, printable
from reshard.models.jobs import Inspection
from reshard.options import DEFAULT_MEMORY_LIMIT_BYTES, FormatOptions, RunLayout

DISTRIBUTED = "dcp"
"""The target of distributed checkpoints, and the first word of the names of formats that are read as such."""
_OF_RANKS = {"fsdp-ranks-": TargetFormat.FSDP_RANKS, "torch-checkpointing": TargetFormat.TORCH_CHECKPOINTING}
"""The formats of files of FSDP's ranks, by the first words of the names that `inspect` gives them."""
_OF_MEGATRON = "megatron-"
"""The first word of the names of Megatron-core's files."""
_MEGATRON_FOR_ALL = "megatron-torch-dist"
"""The name of those that load at any tensor, pipeline and data parallelism; other names go on from this one."""
_BF16_OPTIMIZER = "deepspeed-bf16-optimizer"
_DTYPES = {WeightDtype.FP32: "float32", WeightDtype.BF16: "bfloat16", WeightDtype.FP16: "float16"}
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables in which launchers tell the number of processes, in order of precedence. torchrun, Accelerate and DeepSpeed
set the first one, also inside an allocation of Slurm."""

_SLURM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_SLURM_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK")
_SAY_DP = "say how many data-parallel ranks the run will have: --dp N, or reshard.ensure(src, dp=N)"


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
        fix=_SAY_DP,
    )


def _told(environ: Mapping[str, str]) -> tuple[int, str] | None:
    for name in _LAUNCHERS:
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


class ZeroLayout(FormatOptions):
    """DeepSpeed's files for one layout."""

    zero_stage: ZeroStage | None = None
    """None for the source's own, so that one layout has one name."""
    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    partition_method: None = None
    pipeline_layers: None = None
    vocab_divisor: None = None
    round_robin_gradients: None = None
    parameter_alignment: None = None
    sub_group_size: None = None
    rng: str = "keep"

    @property
    def run(self) -> RunLayout:
        """The layout of the run."""
        return RunLayout(dp=self.dp, tp=self.tp, pp=self.pp, ep=self.ep)


class DistributedLayout(FormatOptions):
    """A distributed checkpoint (PyTorch DCP), which is loaded on any number of ranks."""

    framework: str | None = Field(
        default=None, validation_alias=AliasChoices("framework", "grammar"), serialization_alias="grammar"
    )
    """Keys and files as this framework loads them; None for any. Keys of results have its former name."""


class RanksLayout(FormatOptions):
    """One file for each rank of FSDP, as the source's framework saves them."""

    to: TargetFormat
    dp: int
    """Number of ranks."""


class MegatronLayout(FormatOptions):
    """A distributed checkpoint of Megatron-core, for any tensor, pipeline and data parallelism."""

    to: TargetFormat
    ep: int
    """Expert-parallel ranks: with several, experts have an optimizer of their own."""
    tp: int | None = Field(default=None, exclude=True)
    """Tensor-parallel ranks of the run. A result is the same for all, and so is its key; files of one layout are not.
    None where neither the caller nor the source says it."""
    pp: int | None = Field(default=None, exclude=True)
    """Pipeline stages of the run, in the same way."""


Layout = ZeroLayout | DistributedLayout | RanksLayout | MegatronLayout
"""The layout of a result."""


@dataclass(frozen=True)
class Loader:
    """The program that will load the result."""

    to: str | None = None
    """`zero` or `dcp`; None for the source's own kind."""
    framework: str | None = None
    """Framework that will load a distributed checkpoint; None for the source's, or any."""
    source_is_distributed: bool = False
    source_is_megatron: bool = False
    source_is_away: bool = False
    """True for a source in an object store: an inspection tells if its kind needs a number of ranks."""

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
        if not known and (loader.kind is not None or not loader.source_is_away):
            raise _no_ranks()
        return cls(**said, processes=None if told is None else told[0], loader=loader, choices=choices or {})

    def key(self) -> str:
        """A text that is the same for equal arguments. It says them by the names that earlier results have."""
        said = asdict(self)
        loader = said.pop("loader")
        if (default := self.default_framework) is not None:
            said["default_framework"] = default
        if self.megatron_args is None:
            del said["megatron_args"]
        del loader["source_is_megatron"], loader["source_is_away"]  # of the source, whose files are in the key, too
        said["framework"] = {("grammar" if name == "framework" else name): value for name, value in loader.items()}
        return repr(sorted((name, value) for name, value in said.items() if name != "memory_limit_bytes"))

    @property
    def default_framework(self) -> str | None:
        """The framework of a distributed result where neither the caller nor the source names one; None for others.

        Keys contain it, so that results of version 0.1.0, whose default was Accelerate, are not reused.
        """
        loader = self.loader
        return Framework.STATE_DICT.value if loader.kind == DISTRIBUTED and loader.framework is None else None

    def _of_ranks(self, own: TargetFormat) -> RanksLayout:
        said = [f"--{axis}" for axis in ("tp", "pp", "ep") if (getattr(self, axis) or 1) > 1]
        said += [] if self.zero_stage is None else ["--zero-stage"]
        if said:
            raise RequestError(
                "request.invalid",
                f"{', '.join(said)}: the source has one file for each rank of FSDP, and its run loads nothing else",
                fix="for a run of DeepSpeed: --to zero; else leave it out",
            )
        return RanksLayout(to=own, dp=self.dp or self.processes or 1)

    def _of_megatron(self, found: Inspection) -> MegatronLayout:
        if self.zero_stage is not None:
            raise RequestError(
                "request.invalid",
                "--zero-stage: the source is of Megatron-core, and its run loads nothing else",
                fix="for a run of DeepSpeed: --to zero; else leave it out",
            )
        sizes = {axis: getattr(self, axis) or found.world.get(axis) for axis in ("tp", "pp")}
        return MegatronLayout(to=TargetFormat.MEGATRON, ep=self.ep or found.world.get("ep", 1), **sizes)

    def layout(self, found: Inspection) -> Layout:
        """The wanted layout, completed from a source.

        Raises:
            RequestError: `request.invalid` if tp x pp does not divide the number of processes, or nothing says it.
        """
        kind = self.loader.kind
        if kind is None and found.format.startswith(_OF_MEGATRON):
            return self._of_megatron(found)
        if self.megatron_args is not None:
            raise RequestError("request.invalid", "--megatron-args is for runs of Megatron-core", fix="leave it out")
        if kind == DISTRIBUTED or (kind is None and is_distributed(found)):
            return DistributedLayout(framework=self.loader.framework)
        if self.loader.source_is_away and self.dp is None and self.processes is None:
            raise _no_ranks()
        if kind is None and (own := ranks_of(found)) is not None:
            return self._of_ranks(own)
        sizes = {axis: getattr(self, axis) or found.world.get(axis, 1) for axis in ("tp", "pp", "ep")}
        dp = self.dp
        if dp is None:
            per_replica, processes = sizes["tp"] * sizes["pp"], self.processes or 1
            dp, rest = divmod(processes, per_replica)
            if rest or not dp:
                raise RequestError(
                    "request.invalid",
                    f"{processes} processes cannot be shared out over tp={sizes['tp']} x pp={sizes['pp']}",
                    fix=f"start a multiple of {per_replica} processes, or name other sizes: --tp N --pp N",
                )
        # The source's own stage is left out, so that one layout has one name.
        stage = None if self.zero_stage is stage_of(found) else self.zero_stage
        try:
            return ZeroLayout.model_validate({"dp": dp, "zero_stage": stage, **sizes})
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestError(
                "request.invalid",
                f"{first['loc'][0]}: {first['msg']}",
                fix="give whole numbers from 1 on; reshard ensure --help names the options of a layout",
            ) from None


def _no_ranks() -> RequestError:
    return RequestError(
        "request.invalid",
        f"no launcher says how many processes there are (none of {', '.join(_LAUNCHERS)}), and no dp was given",
        fix=_SAY_DP,
    )


def ranks_of(found: Inspection) -> TargetFormat | None:
    """The format of files of FSDP's ranks that a checkpoint has; None for others."""
    return next((to for label, to in _OF_RANKS.items() if found.format.startswith(label)), None)


def is_distributed(found: Inspection) -> bool:
    """True for a distributed checkpoint."""
    return found.format.startswith(f"{DISTRIBUTED}-")


def fits(found: Inspection, layout: Layout, dtype: WeightDtype | None) -> bool:
    """True if a run with this layout can load the checkpoint as it is."""
    if isinstance(layout, DistributedLayout):
        same = layout.framework is None or found.format == f"{DISTRIBUTED}-{layout.framework}"
        return dtype is None and same and is_distributed(found)
    if isinstance(layout, RanksLayout):
        return dtype is None and ranks_of(found) is layout.to and prod(found.world.values()) == layout.dp
    if isinstance(layout, MegatronLayout):
        return dtype is None and _loads_in_megatron(found, layout)
    stage = stage_of(found)
    if stage is None or (layout.zero_stage is not None and layout.zero_stage is not stage):
        return False
    if any(found.world.get(axis, 1) != getattr(layout, axis) for axis in ("tp", "pp", "ep")):
        return False
    if stage is not ZeroStage.STAGE_0 and found.world.get("dp") != layout.dp:
        # Without ZeRO every rank loads the same file, for any number of ranks.
        return False
    return dtype is None or _model_dtypes(found) == {_DTYPES[dtype]}


def _loads_in_megatron(found: Inspection, layout: MegatronLayout) -> bool:
    """True if Megatron-core loads these files itself at a layout.

    Buckets and directories of ranks are for the tensor, pipeline and expert parallelism that saved them. Otherwise only
    the number of optimizers counts: with several expert-parallel ranks, experts have one of their own.
    """
    ep = found.world.get("ep", 1)
    if found.format == _MEGATRON_FOR_ALL:
        return (ep > 1) is (layout.ep > 1)
    return (layout.tp, layout.pp, layout.ep) == (found.world.get("tp"), found.world.get("pp"), ep)


def stage_of(found: Inspection) -> ZeroStage | None:
    """The stage as users name it; None if DeepSpeed needs options to load the checkpoint, such as a universal one."""
    if found.format == _BF16_OPTIMIZER:
        return ZeroStage.BF16
    return None if found.zero_stage is None else ZeroStage(str(found.zero_stage))


def _model_dtypes(found: Inspection) -> set[str]:
    """Element types of the trained weights; empty at stage 3, where only masters are stored."""
    if found.zero_stage == 3:
        return set()
    return {t.dtype for t in found.tensors if not t.frozen and not t.shared_with and "buffer" not in t.states}


def name_of(tag: str, layout: Layout, dtype: WeightDtype | None, key: str) -> str:
    """The name of a result: its layout, and a key of all facts that it depends on."""
    if isinstance(layout, DistributedLayout):
        return "-".join(
            (tag.replace("/", "_"), DISTRIBUTED, *([layout.framework] if layout.framework else []), key[:8])
        )
    if isinstance(layout, RanksLayout):
        return "-".join((tag.replace("/", "_"), layout.to.value, f"dp{layout.dp}", key[:8]))
    if isinstance(layout, MegatronLayout):
        experts = [f"ep{layout.ep}"] if layout.ep > 1 else []
        return "-".join((tag.replace("/", "_"), layout.to.value, *experts, key[:8]))
    parts = [tag.replace("/", "_"), f"dp{layout.dp}"]
    parts += [f"{axis}{size}" for axis in ("tp", "pp", "ep") if (size := getattr(layout, axis)) > 1]
    parts += [] if layout.zero_stage is None else [f"zero{layout.zero_stage.value}"]
    parts += [] if dtype is None else [dtype.value]
    return "-".join((*parts, key[:8]))
