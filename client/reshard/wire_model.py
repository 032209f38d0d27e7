"""The base of all wire models: closed lists of names, names on disk, and what is wrong with a request in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pkgutil import resolve_name
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from reshard.errors import RequestError

SCHEMA_VERSION = 1
"""The version of the models that a program may keep: results, plans, jobs."""
MOST_BYTES = 1 << 62
"""The largest size in a request. A sum of it and a few others still fits into 64 bits."""


class WireModel(BaseModel):
    """Base of all wire models. They are frozen and refuse unknown fields."""

    # A command uses few of the models. Building each at its first use makes every start 50 ms faster.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class RequestModel(WireModel):
    """Base of models that callers send. Numbers are numbers, as the API's document says: neither `true` nor `"5"`."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_other_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool | str) and _is_number(cls, info.field_name or ""):
            # These are the types of pydantic's own errors, which callers of either kind already read.
            whole = int in _types_of(cls.model_fields[info.field_name or ""].annotation)
            raise PydanticCustomError("int_type" if whole else "float_type", "this is not a number")
        return value


@cache
def _is_number(model: type[BaseModel], name: str) -> bool:
    """True for a field that holds a number or null, and nothing else."""
    found = _types_of(model.model_fields[name].annotation)
    return bool(found) and found <= {int, float, type(None)} and found != {type(None)}


def _types_of(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    # What follows the type within `Annotated` is not a type.
    within = arguments[:1] if hasattr(annotation, "__metadata__") else arguments
    return set[Any]().union(*map(_types_of, within)) if within else {annotation}


_RENDERER = "reshard.draw.notebook:rendered"
"""The function that makes HTML of a model. It knows every model, so no model imports it: its name leads to it."""


@cache
def _renderer() -> Callable[[RenderedModel], str]:
    return resolve_name(_RENDERER)


class RenderedModel(WireModel):
    """Base of the models that a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        """The model in a notebook; all texts are escaped."""
        return _renderer()(self)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The checkpoint, or the conversion, whose layout a notebook shows beside a result.

    It is not part of the result: equal results stay equal, however they were made.
    """

    subject: WireModel | None = None
    """A `SourceSpec` or a `ConvertRequest`. None if this process cannot read it: a service may."""

    def __eq__(self, other: object) -> bool:
        """Equal to any other, so that it never tells apart two results."""
        return isinstance(other, Drawn)

    def __hash__(self) -> int:
        """The hash of all of them."""
        return hash(Drawn)


class ShownModel(RenderedModel):
    """Base of the models that a notebook shows as a table and, if it can be drawn, with the picture of the layout."""

    _drawn: Drawn = PrivateAttr(default_factory=Drawn)

    @property
    def drawn(self) -> WireModel | None:
        """What a notebook is to draw beside the model."""
        return self._drawn.subject

    def drawn_from(self, subject: WireModel) -> Self:
        """Remember what a notebook is to draw beside the model; returns the model itself."""
        self._drawn = Drawn(subject)
        return self


# The closed lists of names that requests, jobs and the flags of commands share.
#
# They are in a module of their own because the flags of commands need nothing else, and importing pydantic takes a
# third of the time of `--help`.


class TargetFormat(StrEnum):
    """The formats that a conversion can write."""

    UNIVERSAL = "universal"
    """DeepSpeed universal checkpoint: one file per parameter and optimizer state."""
    SAFETENSORS = "safetensors"
    """Consolidated weights, safetensors with a Hugging Face index."""
    TORCH = "torch"
    """Consolidated weights, `pytorch_model.bin` with a Hugging Face index."""
    ZERO = "zero"
    """DeepSpeed's own files for a given layout: plain `engine.load_checkpoint` resumes."""
    PEFT = "peft"
    """One LoRA adapter as PEFT saves it: `adapter_model.safetensors` and `adapter_config.json`."""
    SLIM = "slim"
    """The source's files, with torch files cut to the parts of storages that their tensors use (`reshard slim`)."""


class WeightDtype(StrEnum):
    """Element type of consolidated weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


DTYPE_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("float32", "torch.float32", "float", "f32"), "fp32"),
    **dict.fromkeys(("float16", "torch.float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bf16"),
}
"""Other names of element types, and ours."""


class EnsureWorkers(StrEnum):
    """The processes of a launch that convert for `ensure`."""

    AUTO = "auto"
    """One of each node if there are several nodes and the checkpoint is large; else one."""
    ONE = "1"
    NODES = "nodes"
    """One of each node, whatever the size."""


class OpaquePolicy(StrEnum):
    """Policies for objects of the source whose classes are not on the allow-list and that the target would contain."""

    REFUSE = "refuse"
    KEEP = "keep"
    DROP = "drop"


class JobState(StrEnum):
    """The states of a job. A job whose worker lost its lease is QUEUED again for the next attempt."""

    QUEUED = "QUEUED"
    PLANNING = "PLANNING"
    RUNNING = "RUNNING"
    VERIFYING = "VERIFYING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True if the job will never change state again."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class VerifyLevel(StrEnum):
    """Checks of a conversion before its commit."""

    DEFAULT = "default"
    """Checksums are computed while bytes pass; the store checks them if it can. Structure and sizes are read again."""
    FULL = "full"
    """As `default`; the whole source is also compared with its own checksums, and the output is read back."""


class OverflowPolicy(StrEnum):
    """Policies for finite elements that are too large for the target's element type."""

    INF = "inf"
    """They become infinite, as in torch's own cast; they are counted and reported."""
    SATURATE = "saturate"
    """They become the largest finite number of their sign; they are counted and reported."""
    ERROR = "error"
    """The conversion stops and writes nothing."""


class ZeroStage(StrEnum):
    """The ways in which DeepSpeed partitions training state over data-parallel ranks."""

    STAGE_0 = "0"
    STAGE_1 = "1"
    STAGE_2 = "2"
    STAGE_3 = "3"
    BF16 = "bf16"
    """BF16_Optimizer: stage 1 with fp32 gradient accumulation."""


class RngPolicy(StrEnum):
    """Policies for per-rank random states when the number of ranks changes."""

    KEEP = "keep"
    """Target rank r gets the states of source rank r mod N."""
    DROP = "drop"
    """No random states are written: the run seeds itself anew."""


class NameScheme(StrEnum):
    """Naming schemes for the parameters of Megatron-DeepSpeed models."""

    MEGATRON_PIPELINE = "megatron-pipeline"
    """The names of a pipeline module, which are numbered by its layers."""
    MEGATRON_PLAIN = "megatron-no-pipeline"
    """The names of a model that was trained with `--no-pipeline-parallel`."""


class ParamOrder(StrEnum):
    """Orders in which an optimizer may have numbered its parameters, if its files keep numbers and no names."""

    MODEL = "model"
    """Over all groups, the numbers count the parameters in the model's order."""
    GROUPS = "groups"
    """The numbers of each group count its parameters in the model's order."""


NO_BUFFERS = NO_SCHEDULER = "none"
"""The word for no buffers in `SourceChoices.buffers`, and for no scheduler in `scheduler_key`."""


class WeightDecayGroups(StrEnum):
    """Policies for the param groups of Megatron-DeepSpeed, whose code makes other groups at ZeRO-3 than below it."""

    STAGE = "stage"
    """The groups that Megatron-DeepSpeed makes at the target's stage: at ZeRO-3 no parameter has weight decay."""
    KEEP = "keep"
    """The source's groups, for a run whose own code groups parameters in one way at every stage."""


class ReplicaPolicy(StrEnum):
    """Policies for copies of a tensor that must be equal and are not."""

    ERROR = "error"
    FIRST = "first"
    """The copy of the lowest rank wins; the others are reported."""


class JobKind(StrEnum):
    """The kinds of jobs."""

    CONVERT = "convert"
    PLAN = "plan"
    """The job only plans: `POST /v1/plans` took longer than a request may."""


class ServerCopyPolicy(StrEnum):
    """Policies for server-side copies of ranges that move unchanged within one object store."""

    AUTO = "auto"
    NEVER = "never"


class TokenScope(StrEnum):
    """The rights that a token of a service may have, within its tenant. None of them includes another."""

    SUBMIT = "submit"
    """Submit and retry jobs, plan conversions, inspect checkpoints."""
    READ = "read"
    """Read jobs, their events and results."""
    CANCEL = "cancel"
    """Cancel jobs, and give up the files of failed ones."""
    ADMIN = "admin"
    """Manage tokens and read the audit log; of the tenant `default`: of all tenants, and manage tenants."""


# What pydantic finds wrong with a request, worded for users.

_LIMITS = {
    "string_too_short": ("is shorter than {} characters", "min_length"),
    "string_too_long": ("is longer than {} characters", "max_length"),
    "greater_than": ("is not above {}", "gt"),
    "greater_than_equal": ("is below {}", "ge"),
    "less_than": ("is not below {}", "lt"),
    "less_than_equal": ("is above {}", "le"),
}
_KINDS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "enum": "is not one of the choices",
    "literal_error": "is not one of the choices",
    "finite_number": "is not a finite number",
    "json_invalid": "is not JSON",
}


def said_of(problem: Mapping[str, Any]) -> str:
    """One problem of a pydantic error, worded for users."""
    kind = str(problem["type"])
    context: Mapping[str, Any] = problem.get("ctx") or {}
    if kind == "string_too_short" and context.get("min_length") == 1:
        return "is empty"
    if kind in _LIMITS:
        text, key = _LIMITS[kind]
        return text.format(context.get(key))
    if kind in ("enum", "literal_error"):
        return f"is none of {context.get('expected')}"
    wanted = kind.removesuffix("_parsing").removesuffix("_type").removesuffix("_from_float")
    nouns = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text"}
    nouns |= dict.fromkeys(("dict", "model", "model_attributes"), "an object")
    nouns |= dict.fromkeys(("list", "tuple"), "a list")
    return _KINDS.get(kind) or f"is not {nouns.get(wanted, 'a value that is taken')}"


def invalid(error: ValidationError, flags: Mapping[str, str] | None = None, *, keywords: bool = False) -> RequestError:
    """The `RequestError` for a pydantic validation error, worded for users.

    Args:
        error: What pydantic found.
        flags: Flags whose names differ from their fields'; None if the caller names fields, not flags.
        keywords: True if the flags are keyword arguments of a function.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if flags is not None:
        last = str(first["loc"][-1]) if first["loc"] else ""
        where = flags.get(where) or flags.get(last) or (last if keywords else f"--{last.replace('_', '-')}")
    return RequestError("request.invalid", f"{where} {said_of(first)}")


# Names of files and folders that the client and the engine both write or look for.

MANIFEST = "reshard.json"
"""The manifest of a target."""
RECORDS = ".reshard"
"""Folder of results and records of `ensure` inside a save directory. It is hidden, because Trainer and Accelerate
delete checkpoints by the names in the directory above. It lies inside, so that it is deleted with its checkpoint."""
POINTERS = ("latest", "latest_universal")
"""The files in which DeepSpeed names the tag that a run resumes from."""
