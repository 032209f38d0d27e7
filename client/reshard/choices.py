"""The closed lists of names that requests, jobs and the flags of commands share.

Apart from the models: the flags of commands need no more than these, and pydantic is a third of the time in which
`--help` would answer.
"""

from __future__ import annotations

from enum import StrEnum


class TargetFormat(StrEnum):
    """What a conversion writes."""

    UNIVERSAL = "universal"
    """DeepSpeed universal checkpoint: one atom per parameter and state."""
    SAFETENSORS = "safetensors"
    """Consolidated weights, safetensors with a Hugging Face index."""
    TORCH = "torch"
    """Consolidated weights, `pytorch_model.bin` with a Hugging Face index."""
    ZERO = "zero"
    """DeepSpeed's own files for a given layout: plain `engine.load_checkpoint` resumes."""
    PEFT = "peft"
    """One LoRA adapter as PEFT saves it: `adapter_model.safetensors` and `adapter_config.json`."""
    SLIM = "slim"
    """The same files, torch's without the parts of storages that no tensor of theirs uses."""


class WeightDtype(StrEnum):
    """Element type of consolidated weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class OpaquePolicy(StrEnum):
    """What happens to objects whose classes are not on the allow-list when they would be re-emitted."""

    REFUSE = "refuse"
    KEEP = "keep"
    DROP = "drop"


class JobState(StrEnum):
    """States of a job; a lost lease means QUEUED again with the next attempt."""

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
        """Whether the job will never change state again."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class VerifyLevel(StrEnum):
    """How a conversion is checked before its commit."""

    DEFAULT = "default"
    """Checksums taken as the bytes pass, checked by the store where it can; structure and sizes read again."""
    FULL = "full"
    """And the whole source compared with its own checksums, and every byte of the output read back."""


class OverflowPolicy(StrEnum):
    """What becomes of finite elements that are too large for the type that was asked for."""

    INF = "inf"
    """Infinity, as torch's own cast does; counted and reported."""
    SATURATE = "saturate"
    """The largest finite number of their sign; counted and reported."""
    ERROR = "error"
    """The conversion stops and writes nothing."""


class ZeroStage(StrEnum):
    """How DeepSpeed partitions training state over data-parallel ranks."""

    STAGE_0 = "0"
    STAGE_1 = "1"
    STAGE_2 = "2"
    STAGE_3 = "3"
    BF16 = "bf16"
    """BF16_Optimizer: stage 1 with fp32 gradient accumulation."""


class RngPolicy(StrEnum):
    """What becomes of per-rank random states when the number of ranks changes: there is no unique answer."""

    KEEP = "keep"
    """Target rank r gets the states of source rank r mod N."""
    DROP = "drop"
    """None are written: the run seeds itself anew."""


class NameScheme(StrEnum):
    """How the parameters of a model of Megatron-DeepSpeed are called."""

    MEGATRON_PIPELINE = "megatron-pipeline"
    """By the layers of a pipeline."""
    MEGATRON_PLAIN = "megatron-no-pipeline"
    """As `--no-pipeline-parallel` has it."""


class ReplicaPolicy(StrEnum):
    """What happens when copies of a tensor that must agree do not."""

    ERROR = "error"
    FIRST = "first"
    """The copy of the lowest rank wins; the others are reported."""


class JobKind(StrEnum):
    """What a job is for."""

    CONVERT = "convert"
    PLAN = "plan"
    """Planning only: `POST /v1/plans` took longer than a request may."""


class ServerCopyPolicy(StrEnum):
    """Whether an object store copies what moves unchanged itself, where source and target are in one."""

    AUTO = "auto"
    NEVER = "never"
