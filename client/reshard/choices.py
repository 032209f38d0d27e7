"""The closed lists of names that requests, jobs and the flags of commands share, and names on disk.

They are in a module of their own because the flags of commands need nothing else, and importing pydantic takes a third
of the time of `--help`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

INCOMPLETE = "checkpoint-is-incomplete.txt"
"""The file that transformers' Trainer removes from a checkpoint when it is whole.

Source: transformers 5.23.0 `trainer_jit_checkpoint.py`.
"""


class TargetFormat(StrEnum):
    """The names of the formats that reshard itself writes. `reshard.targets` says what each contains."""

    UNIVERSAL = "universal"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    ZERO = "zero"
    PEFT = "peft"
    FSDP_RANKS = "fsdp_ranks"
    MEGATRON = "megatron"
    TORCH_CHECKPOINTING = "torch_checkpointing"
    SLIM = "slim"


class RankFramework(StrEnum):
    """The frameworks that save one file for each rank of FSDP."""

    VERL = "verl"
    SKYRL = "skyrl"
    ACCELERATE = "accelerate"
    """`save_fsdp_model` and `save_fsdp_optimizer` with `use_dcp=False`."""


class WeightDtype(StrEnum):
    """Element type of consolidated weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Quantization(StrEnum):
    """Number format of the linear layers of consolidated weights."""

    FP8_BLOCK = "fp8-block"
    """e4m3, with one fp32 scale for each block of 128 by 128 numbers, as DeepSeek-V3 is published."""
    INT8 = "int8"
    """int8 with one scale for each row, and int8 activations, as compressed-tensors names W8A8."""


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

    @property
    def number(self) -> int:
        """The stage that DeepSpeed's files state."""
        return 1 if self is ZeroStage.BF16 else int(self.value)


class MissingMoments(StrEnum):
    """Policies for trained parameters without optimizer states: no gradient ever reached them."""

    ZERO = "zero"
    """They get the states that the optimizer begins with: zeros."""
    OMIT = "omit"
    """They get none, as in the source; loaders then need `allow_partial_load`."""
    REFUSE = "refuse"


class RngPolicy(StrEnum):
    """Policies for per-rank random states when the number of ranks changes."""

    KEEP = "keep"
    """Target rank r gets the states of source rank r mod N."""
    DROP = "drop"
    """No random states are written: the run seeds itself anew."""


class NameScheme(StrEnum):
    """Naming schemes for the parameters of models of Megatron-DeepSpeed and Megatron-core."""

    MEGATRON_PIPELINE = "megatron-pipeline"
    """Megatron-DeepSpeed: the names of a pipeline module, which are numbered by its layers."""
    MEGATRON_PLAIN = "megatron-no-pipeline"
    """Megatron-DeepSpeed: the names of a model that was trained with `--no-pipeline-parallel`."""
    HUGGING_FACE = "hf"
    """Megatron-core: the names that the model's class in transformers has."""
    MEGATRON_CORE = "megatron-core"
    """The way back: the names of Megatron-core for a model with those of transformers."""


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


class EmptyWeights(StrEnum):
    """Policies for weights of which many have the shape [0], as a model under ZeRO-3 has them between its steps."""

    REFUSE = "refuse"
    KEEP = "keep"
    """They are the model's own: they stay as they are."""


class DamagedPolicy(StrEnum):
    """Policies for optimizer states that a framework saved at wrong places."""

    REFUSE = "refuse"
    DROP_OPTIMIZER = "drop-optimizer"
    """The weights are read alone."""
    REPAIR = "repair"
    """Every state is taken from where the files hold it, which must be proven; moments that they lost are an error."""
    REPAIR_WITH_ZEROS = "repair-with-zeros"
    """As `repair`; elements of moments that the files lost become zeros, and are named."""


class CkptFormat(StrEnum):
    """Megatron-LM's `--ckpt-format`: the kinds of directories that it saves."""

    TORCH_DIST = "torch_dist"
    """A distributed checkpoint, which every layout loads."""
    TORCH = "torch"
    """Directories of ranks, `mp_rank_TT_PPP`, which one layout loads."""


class OptimizerSharding(StrEnum):
    """The ways in which Megatron-core saves an optimizer: `distrib_optim_sharding_type`, or none."""

    FULLY_RESHARDABLE = "fully_reshardable"
    """The states of a distributed optimizer by parameters: every layout loads them."""
    DP_RESHARDABLE = "dp_reshardable"
    """The states of a distributed optimizer by buckets of one tensor- and pipeline-parallel layout."""
    NONE = "none"
    """The states of an optimizer that is not distributed."""


class CommonStatePlace(StrEnum):
    """Where a distributed checkpoint of Megatron-core holds arguments, param groups and counters."""

    FILE = "file"
    """In `common.pt`: 0.15 and later read it."""
    ENTRY = "entry"
    """In an entry of the checkpoint, as 0.19 and later write it; 0.18 and earlier do not read it."""


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


# Names of files and folders that the client and the engine both write or look for.

MANIFEST = "reshard.json"
"""The manifest of a target."""
RECORDS = ".reshard"
"""Folder of results and records of `ensure` inside a save directory. It is hidden, because Trainer and Accelerate
delete checkpoints by the names in the directory above. It lies inside, so that it is deleted with its checkpoint."""
SEALED = ".sealed.json"
"""The end of the name of a certificate, which stands beside what it is about."""
POINTERS = ("latest", "latest_universal")
"""The files in which DeepSpeed names the tag that a run resumes from."""
