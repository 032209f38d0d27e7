"""The options of a conversion: of its source, of the conversion itself, and of the formats, nested by format.

An option is one field: `reshard.option.Option` says how its flag, its keyword argument and its label are. The formats
that reshard brings are fields of `Options`; `reshard.installed_formats` adds those of other packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo

from reshard.choices import (
    DTYPE_NAMES,
    CkptFormat,
    CommonStatePlace,
    DamagedPolicy,
    EmptyWeights,
    MissingMoments,
    NameScheme,
    OpaquePolicy,
    OptimizerSharding,
    OverflowPolicy,
    ParamOrder,
    Quantization,
    RankFramework,
    ReplicaPolicy,
    RngPolicy,
    ServerCopyPolicy,
    VerifyLevel,
    WeightDecayGroups,
    WeightDtype,
    ZeroStage,
)
from reshard.option import (
    Option,
    Place,
    Section,
    option_of,
    parse_size,
    read_args,
    read_family,
    read_order,
    read_rules,
)
from reshard.wire_model import MOST_BYTES, RequestModel

DEFAULT_MEMORY_LIMIT_BYTES = 1 << 30
DEFAULT_PART_BYTES = 64 << 20
_AS_IN_TARGET_RUN = "As in the ds_config of the target run; default: as in SRC."
_HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
"""A name of the Hugging Face hub. Source: huggingface_hub 2.4.0 `utils/_validators.py` (`validate_repo_id`)."""
_ParameterName = Annotated[str, Field(min_length=1, max_length=1024)]


def is_none(value: object) -> bool:
    """True for None: such a field is left out of the JSON, so that older programs can read it."""
    return value is None


def _is_false(value: object) -> bool:
    return value is False


def _is_zero(value: object) -> bool:
    return value is MissingMoments.ZERO


def _is_kept(value: object) -> bool:
    return value is RngPolicy.KEEP


def _is_refused(value: object) -> bool:
    return value is EmptyWeights.REFUSE


class RunLayout(RequestModel):
    """The parallel layout of the run that will load a target, in the words of every framework.

    Context parallelism and the tensor parallelism of experts are no fields: the one format that knows both,
    Megatron-core, keeps them in the arguments of its run.
    """

    dp: Annotated[
        int | None,
        Option(
            "Data-parallel ranks.",
            Section.LAYOUT,
            1,
            label="Data-parallel ranks (GPUs)",
            ensure="processes of the launcher / (tp x pp)",
            digested="deepspeed.dp",
        ),
    ] = Field(default=None, ge=1, le=1 << 20)
    """Data-parallel ranks; with sequence or context parallelism, the product of both. Targets with files for each rank
    need it."""
    tp: Annotated[
        int,
        Option(
            "Tensor-parallel ranks.",
            Section.LAYOUT,
            2,
            label="Tensor-parallel ranks",
            ensure="as in SRC",
            digested="deepspeed.tp",
        ),
    ] = Field(default=1, ge=1, le=1 << 12)
    pp: Annotated[
        int,
        Option(
            "Pipeline stages.",
            Section.LAYOUT,
            3,
            label="Pipeline stages",
            ensure="as in SRC",
            digested="deepspeed.pp",
        ),
    ] = Field(default=1, ge=1, le=1 << 12)
    ep: Annotated[
        int,
        Option(
            "Expert-parallel ranks.",
            Section.LAYOUT,
            4,
            label="Expert-parallel ranks",
            ensure="as in SRC",
            digested="deepspeed.ep",
        ),
    ] = Field(default=1, ge=1, le=1 << 12)
    vpp: Annotated[
        int | None,
        Option(
            "Model chunks of a pipeline stage (--to megatron).",
            Section.LAYOUT,
            5,
            name="virtual_pipeline",
            label="Chunks of a pipeline stage",
            digested="megatron.virtual_pipeline",
        ),
    ] = Field(default=None, ge=2, le=1 << 10)
    """Virtual pipeline parallelism: model chunks of each stage; None for a pipeline without chunks. Megatron-core's
    `virtual_pipeline_model_parallel_size`."""

    @property
    def world_size(self) -> int:
        """Number of processes of a run with this layout."""
        return (self.dp or 1) * self.tp * self.pp

    def given(self) -> dict[str, Any]:
        """The sizes that are not the defaults, by their names."""
        return self.model_dump(exclude_defaults=True)


class SourceChoices(RequestModel):
    """The user's choices where the files of a checkpoint leave several ways to read it.

    Fields that are None are left out of the JSON, so that older programs can read it.
    """

    model_key: Annotated[
        str | None,
        Option(
            "Model to read, if the state dict holds several, such as unet.",
            Section.SOURCE,
            2,
            metavar="KEY",
            label="Model to read",
        ),
    ] = Field(default=None, max_length=512, exclude_if=is_none)
    """Place of the model to read, such as `unet` or `app.model`, if there are several; `.` is the root."""
    optimizer_key: Annotated[
        str | None,
        Option("Optimizer to read, if there are several.", Section.SOURCE, 3, metavar="KEY", label="Optimizer to read"),
    ] = Field(default=None, max_length=512, exclude_if=is_none)
    """Place of the optimizer to read, such as `opt_g`, if there are several."""
    scheduler_key: Annotated[
        str | None,
        Option(
            "Scheduler of that optimizer, if there are several.",
            Section.SOURCE,
            4,
            metavar="KEY",
            label="Scheduler to read",
        ),
    ] = Field(default=None, max_length=512, exclude_if=is_none)
    """Place of the learning-rate scheduler of that optimizer, such as `sched_g` or `scheduler_1.bin`."""
    param_order: Annotated[
        ParamOrder | Annotated[tuple[_ParameterName, ...], Field(max_length=1 << 20)] | None,
        Option(
            "Order of parameters that files only number: `model`, `groups` (the model's within each group), or a "
            "file with their names.",
            Section.SOURCE,
            5,
            metavar="ORDER",
            parse=read_order,
            label="Order of the optimizer's parameters",
        ),
    ] = Field(default=None, exclude_if=is_none)
    """Order of the parameters of an optimizer whose files keep numbers and no names, or names and no order: `model`,
    `groups`, or the names themselves."""
    buffers: Annotated[
        str | None,
        Option(
            "Buffers that files do not tell from frozen parameters: `none`, or NAME,NAME with `*` for any text.",
            Section.SOURCE,
            6,
            metavar="NAMES",
            label="Tensors that are buffers",
        ),
    ] = Field(default=None, min_length=1, max_length=1 << 20, exclude_if=is_none)
    """Names of the tensors that are buffers, where the files do not tell them from frozen parameters, separated by
    commas; `*` stands for any text. `none`: all are parameters."""

    rank_files: Annotated[
        str | None,
        Option(
            "Names of FSDP's ranks' files that a script chose: 'ckpt_{rank}.pt'. `{rank}`: number of the rank; `*`: "
            "any text; `{item}`: what the file holds.",
            Section.SOURCE,
            7,
            metavar="PATTERN",
            label="Names of the ranks' files",
        ),
    ] = Field(default=None, min_length=1, max_length=255, exclude_if=is_none)
    """Names of the files of FSDP's ranks in the source's directory, where a script chose them. `{rank}` stands for the
    number of the rank; `*` for any text, which all files of the save have alike; `{item}` for the name of what a file
    holds, where model and optimizer are in files of their own: `{item}_{rank}.pt`. All else is meant as it is."""

    def given(self) -> dict[str, Any]:
        """The choices that were made, by their names."""
        names = SourceChoices.model_fields
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class SourceSpec(SourceChoices):
    """The checkpoint to read."""

    url: str = Field(min_length=1, max_length=4096)
    tag: Annotated[
        str | None,
        Option(
            "Checkpoint tag; default: what `latest` (or `latest_universal`) names.",
            Section.SOURCE,
            1,
            metavar="NAME",
            label="Tag",
        ),
    ] = Field(default=None, max_length=512)
    profile: Annotated[
        str | None,
        Option("Storage profile (see RESHARD_PROFILES).", Section.SOURCE, 8, metavar="NAME", label="Storage profile"),
    ] = Field(default=None, max_length=128)
    """Name of a storage profile that the operator configured. Requests never contain credentials."""


class ConversionOptions(RequestModel):
    """The options of a conversion that belong to no format; `ConvertRequest` has them as fields of its own."""

    target_profile: Annotated[
        str | None,
        Option(
            "Storage profile for DST.",
            Section.TARGET,
            9,
            metavar="NAME",
            label="Storage profile of the target",
            of_run=True,
        ),
    ] = Field(default=None, max_length=128)
    dtype: Annotated[
        WeightDtype | None,
        Option(
            "Type of weights; default: masters and all else as stored; --to zero: as in SRC.",
            Section.TARGET,
            1,
            also=DTYPE_NAMES,
            label="Element type",
            ensure="as in SRC",
        ),
    ] = None
    """Consolidated weights: the type of floats. By default nothing is cast: masters where there are any, and everything
    else as it is stored. Native targets: the type of the model, by default the source's."""
    replicas: Annotated[
        ReplicaPolicy,
        Option(
            "If copies that must be equal differ: stop, or take the first.",
            Section.CHECKING,
            3,
            label="Copies that differ",
        ),
    ] = ReplicaPolicy.ERROR
    exclude_frozen: Annotated[
        bool, Option("Leave out frozen parameters.", Section.TARGET, 3, label="Leave frozen parameters out")
    ] = False
    names: Annotated[
        NameScheme | None,
        Option(
            "Names of parameters: Megatron-DeepSpeed's with or without pipeline, or for Megatron-core those of Hugging "
            "Face (hf) and back; default: as in SRC.",
            Section.TARGET,
            4,
            label="Names of parameters",
            digested="deepspeed.names",
        ),
    ] = Field(default=None, exclude_if=is_none)
    """Naming scheme for the parameters of models of Megatron-DeepSpeed (GPT, Llama) and Megatron-core; None keeps the
    source's names."""
    vocab_divisor: Annotated[
        int | None,
        Option(
            "Pad the vocabulary to a multiple of this times --tp.",
            Section.LAYOUT,
            6,
            label="Divisor of the vocabulary",
            digested="deepspeed.vocab_divisor",
        ),
    ] = Field(default=None, ge=1, le=1 << 20, exclude_if=is_none)
    """Megatron's `make_vocab_size_divisible_by`: the vocabulary is padded to a multiple of this value times `tp`."""
    rng: Annotated[
        RngPolicy,
        Option(
            "Random states: `keep` gives rank r those of source rank r mod N.",
            Section.LAYOUT,
            7,
            label="Random states",
            digested="deepspeed.rng",
        ),
    ] = Field(default=RngPolicy.KEEP, exclude_if=_is_kept)
    model_files: Annotated[
        str | None,
        Option(
            "Copy config.json, tokenizer and generation files of DIR beside the weights.",
            Section.TARGET,
            6,
            metavar="DIR",
            label="Model files",
        ),
        Place(),
    ] = Field(default=None, min_length=1, max_length=4096)
    """Consolidated weights: a directory whose configuration, tokenizer and generation files are copied beside the
    weights, so that `from_pretrained` opens the target. PEFT: a directory with `adapter_config.json`, by default the
    one beside the source. It is read with the source's storage profile."""
    opaque: Annotated[
        OpaquePolicy,
        Option(
            "Policy for objects of classes that are not on the allow-list.",
            Section.CHECKING,
            4,
            label="Objects of unknown classes",
            ensure="",
        ),
    ] = OpaquePolicy.REFUSE
    overwrite: Annotated[
        bool,
        Option(
            "Replace DST. Its old contents are lost, even if the run fails.",
            Section.TARGET,
            7,
            label="Replace an existing target",
            of_run=True,
        ),
    ] = False
    pointer: Annotated[
        bool | None,
        Option(
            "Write `latest` beside DST; default: where its parent is a save directory.", Section.TARGET, 8, of_run=True
        ),
    ] = Field(default=None, exclude_if=is_none)
    """`zero` and `universal`: whether `latest` (or `latest_universal`) is written beside the target. By default it is
    where the target's parent is a save directory: it has such a file, holds another tag directory, or holds nothing but
    the target and is not the working directory. None is left out of the JSON, as in `SourceChoices`."""
    empty_weights: Annotated[
        EmptyWeights,
        Option(
            "Many weights of shape [0], as ZeRO-3 leaves them without gathering: refuse, or keep.",
            Section.CHECKING,
            5,
            label="Weights without elements",
        ),
    ] = Field(default=EmptyWeights.REFUSE, exclude_if=_is_refused)
    """Weights that were saved alone, and of which several, and at least a tenth, have the shape [0]."""
    missing_moments: Annotated[
        MissingMoments,
        Option(
            "Trained parameters without optimizer states: refuse; or, for --to dcp and torch_save, zero or omit.",
            Section.CHECKING,
            6,
            label="Parameters without optimizer states",
            digested="dcp.missing_moments",
        ),
    ] = Field(default=MissingMoments.ZERO, exclude_if=_is_zero)
    """Trained parameters that no gradient ever reached. With `zero`, distributed checkpoints and files of `torch.save`
    get the states that an optimizer begins with; with `omit`, they get none. `refuse` holds for every target."""
    on_overflow: Annotated[
        OverflowPolicy,
        Option(
            "Elements too large for --dtype: infinity, largest number, or stop.",
            Section.CHECKING,
            2,
            label="Numbers too large for the element type",
        ),
    ] = OverflowPolicy.INF
    """Policy for finite elements that a narrower type cannot hold. Losses are counted under every policy."""
    verify: Annotated[
        VerifyLevel,
        Option("`full` also reads all of SRC and of the output.", Section.CHECKING, 1, label="Checks", of_run=True),
    ] = VerifyLevel.DEFAULT
    memory_limit_bytes: Annotated[
        int,
        Option(
            "Memory for buffers and metadata, such as 1GiB (the default).",
            Section.RESOURCES,
            1,
            name="memory_limit",
            metavar="SIZE",
            parse=parse_size,
            label="Memory limit",
            of_run=True,
            ensure="",
        ),
    ] = Field(default=DEFAULT_MEMORY_LIMIT_BYTES, ge=1, le=MOST_BYTES)
    part_bytes: Annotated[
        int,
        Option(
            "Size of a unit of work and of a multipart part, such as 64MiB (the default).",
            Section.RESOURCES,
            2,
            name="part_size",
            metavar="SIZE",
            parse=parse_size,
            label="Size of a unit of work",
            of_run=True,
        ),
    ] = Field(default=DEFAULT_PART_BYTES, ge=1 << 10, le=MOST_BYTES)
    """Bytes of one unit of work and of one part of a multipart upload."""
    threads: Annotated[
        int | None,
        Option(
            "Units in parallel; default: one per core, more for object stores.",
            Section.RESOURCES,
            3,
            label="Threads",
            of_run=True,
        ),
    ] = Field(default=None, ge=1, le=1024)
    server_copy: Annotated[
        ServerCopyPolicy,
        Option(
            "`never`: no server-side copies; read and send every byte.",
            Section.RESOURCES,
            4,
            label="Copies made by the store",
            of_run=True,
        ),
    ] = ServerCopyPolicy.AUTO
    """With `auto` the object store itself copies ranges that move unchanged within it (server-side copies)."""


class FormatOptions(RequestModel):
    """Base of the options of one format. Every option has a default, so that a request may leave a format out."""

    joined_later: ClassVar[bool] = False
    """True for a format that came after targets and jobs had digests: these name it only where an option is given."""

    def places(self) -> dict[str, str]:
        """The values of options that are URLs to read from, by name."""
        marked = (n for n, f in type(self).model_fields.items() if any(isinstance(m, Place) for m in f.metadata))
        return {name: value for name in marked if (value := getattr(self, name)) is not None}

    def given(self) -> dict[str, Any]:
        """The options whose values are not the defaults, as JSON."""
        return self.model_dump(mode="json", exclude_defaults=True)


class DeepSpeedOptions(FormatOptions):
    """Options of DeepSpeed's checkpoints: ZeRO, the pipeline's stages, and cut rules of the source.

    An option that is None is as in the source, or DeepSpeed's default.
    """

    zero_stage: Annotated[
        ZeroStage | None, Option("ZeRO stage; default: as in SRC.", Section.DEEPSPEED, 1, label="ZeRO stage", ensure="")
    ] = None
    partition_method: Annotated[
        str | None,
        Option(
            "Pipeline stages: uniform, parameters, type:REGEX, or each stage's first layer: 0,3,6.",
            Section.DEEPSPEED,
            2,
            metavar="METHOD",
            label="Division into pipeline stages",
        ),
    ] = Field(default=None, max_length=4096)
    """Division into pipeline stages: `uniform`, `parameters`, `type:REGEX`, or each stage's first layer: `0,3,6`."""
    pipeline_layers: Annotated[
        int | None,
        Option(
            "Number of layers, for --partition-method uniform.", Section.DEEPSPEED, 3, label="Layers of the pipeline"
        ),
    ] = Field(default=None, ge=1, le=4096)
    """Number of layers of the whole pipeline, including those without parameters; `uniform` needs it."""
    round_robin_gradients: Annotated[
        bool | None, Option(_AS_IN_TARGET_RUN, Section.DEEPSPEED, 4, label="Round-robin gradients")
    ] = None
    parameter_alignment: Annotated[
        bool | None, Option(_AS_IN_TARGET_RUN, Section.DEEPSPEED, 5, label="Alignment of parameters")
    ] = None
    sub_group_size: Annotated[
        int | None, Option(_AS_IN_TARGET_RUN, Section.DEEPSPEED, 6, label="Elements of a sub-group")
    ] = Field(default=None, ge=1, le=MOST_BYTES)
    """Stage 3: elements of one rank's partition after which a sub-group is closed."""
    rules: Annotated[
        str | None,
        Option(
            "Rules (YAML) for a tensor-parallel SRC that does not say how it is cut.",
            Section.SOURCE,
            9,
            metavar="FILE",
            parse=read_rules,
            takes=Path,
            label="Cut rules",
            ensure="",
        ),
    ] = Field(default=None, max_length=1 << 16)
    """Rules as YAML (docs/rules.md): how tensor parallelism cuts parameters, if the source does not say."""
    family: Annotated[
        str | None,
        Option(
            "Built-in set of rules: gpt-megatron, llama-megatron, bloom.",
            Section.SOURCE,
            10,
            metavar="NAME",
            label="Family of cut rules",
            ensure="",
        ),
    ] = Field(default=None, max_length=64)
    """A built-in set of cut rules, such as `gpt-megatron`."""
    weight_decay_groups: Annotated[
        WeightDecayGroups,
        Option(
            "Megatron-DeepSpeed's param groups: as it makes them at DST's stage, or as in SRC.",
            Section.TARGET,
            5,
            label="Groups of weight decay",
        ),
    ] = WeightDecayGroups.STAGE


class FsdpRanksOptions(FormatOptions):
    """Options of files of FSDP's ranks. None is as in the source."""

    joined_later = True

    rank_framework: Annotated[
        RankFramework | None,
        Option(
            "--to fsdp_ranks: framework that loads it; default: SRC's.",
            Section.FSDP_RANKS,
            1,
            label="Framework of files",
        ),
    ] = None
    device_type: Annotated[
        str | None,
        Option(
            "Devices of the run, such as cuda; default: SRC's.",
            Section.FSDP_RANKS,
            2,
            metavar="TYPE",
            label="Devices of the run",
        ),
    ] = Field(default=None, pattern=r"[a-z]{1,16}", max_length=16)
    """Type of the devices of the run's mesh: torch copies no tensor of a mesh of another type."""
    fsdp_size: Annotated[
        int | None,
        Option(
            "Ranks that share one copy (HSDP); default: SRC's, else all.",
            Section.FSDP_RANKS,
            3,
            label="Ranks of one copy",
        ),
    ] = Field(default=None, ge=1, le=1 << 20)
    """Ranks that share one copy of the parameters, as verl's `fsdp_size`; with more ranks there are replicas (HSDP)."""
    fsdp_version: Annotated[
        int | None,
        Option(
            "--to fsdp_ranks: FSDP of the run; 2 for a run of FSDP1 that goes on with FSDP2.",
            Section.FSDP_RANKS,
            4,
            label="Version of FSDP",
        ),
    ] = Field(default=None, ge=1, le=2)
    """The version of FSDP that the run uses. Files of FSDP1 are written for verl, from verl's files of FSDP1."""


class MegatronOptions(FormatOptions):
    """Options of checkpoints of Megatron-core."""

    joined_later = True

    damaged: Annotated[
        DamagedPolicy | None,
        Option(
            "Megatron-core: optimizer states that are not those of the weights; default: refuse. `repair` and "
            "`repair-with-zeros` put shifted ones back.",
            Section.SOURCE,
            12,
            label="Damaged optimizer states",
        ),
    ] = None
    """What becomes of optimizer states that Megatron-core saved at wrong places (several padded buckets)."""
    ckpt_format: Annotated[
        CkptFormat,
        Option(
            "Megatron-LM's --ckpt-format; torch is for one layout.",
            Section.MEGATRON,
            1,
            label="Kind of directory",
        ),
    ] = CkptFormat.TORCH_DIST
    optimizer_sharding: Annotated[
        OptimizerSharding | None,
        Option(
            "How the optimizer is saved; default: fully_reshardable, or none as in SRC.",
            Section.MEGATRON,
            2,
            label="Sharding of the optimizer",
        ),
    ] = None
    """The `distrib_optim_sharding_type` of the target, or `none` for an optimizer that is not distributed."""
    common_state: Annotated[
        CommonStatePlace,
        Option(
            "Arguments and groups in common.pt, or in an entry as 0.19 writes it.",
            Section.MEGATRON,
            3,
            label="Place of the common state",
        ),
    ] = CommonStatePlace.FILE
    megatron_args: Annotated[
        str | None,
        Option(
            "--to megatron: arguments of the run (JSON), beside those that SRC holds.",
            Section.TARGET,
            11,
            metavar="FILE",
            parse=read_args,
            takes=Path,
            label="Arguments of Megatron-LM",
            ensure="",
        ),
    ] = Field(default=None, max_length=1 << 16)
    """Arguments of Megatron-LM as a JSON object; they are set in what the source says, or stand for it."""
    hf_rules: Annotated[
        str | None,
        Option(
            "--names hf, megatron-core: architecture, such as llama, or a file of rules; for Megatron-DeepSpeed "
            "megatron-deepspeed-grouped or -split; default: what SRC says.",
            Section.TARGET,
            10,
            metavar="RULES",
            parse=read_family,
            label="Architecture of the names",
        ),
    ] = Field(default=None, min_length=1, max_length=1 << 16)
    """A built-in family of names of Hugging Face, such as `llama`, or rules as YAML (docs/formats/megatron-hf.md)."""


class WeightsOptions(FormatOptions):
    """Options of consolidated weights."""

    max_shard_bytes: Annotated[
        int | None,
        Option(
            "Largest weights file, such as 5GB.",
            Section.TARGET,
            2,
            name="max_shard_size",
            metavar="SIZE",
            parse=parse_size,
            label="Largest file",
        ),
    ] = Field(default=None, ge=1, le=MOST_BYTES)
    """Largest size of one weights file; the default is 5 GB."""
    quantize: Annotated[
        Quantization | None,
        Option(
            "Quantize linear layers: fp8-block has a scale for each 128x128 block, int8 one for each row.",
            Section.TARGET,
            14,
            label="Quantization",
        ),
    ] = Field(default=None, exclude_if=is_none)
    """Safetensors: the number format of linear layers. All else has the type of `dtype`."""
    quantize_layers: Annotated[
        str | None,
        Option(
            "Weights to quantize, where config.json names an architecture that is not known: NAME,NAME with `*`.",
            Section.TARGET,
            15,
            metavar="NAMES",
            label="Weights to quantize",
        ),
    ] = Field(default=None, min_length=1, max_length=1 << 16, exclude_if=is_none)
    """Names of the weights that `quantize` takes, separated by commas; `*` stands for any text."""
    card: Annotated[
        bool,
        Option(
            "Write README.md, a model card: source, digest, command, casts, what was left out.",
            Section.TARGET,
            12,
            label="Model card",
        ),
    ] = Field(default=False, exclude_if=_is_false)
    """Consolidated weights and adapters: write `README.md`, a model card that `huggingface_hub` reads."""
    base_model: Annotated[
        str | None,
        Option(
            "Model of the hub that the run began from, for the card: ORG/NAME.",
            Section.TARGET,
            13,
            metavar="ID",
            label="Base model of the card",
        ),
    ] = Field(default=None, pattern=rf"^(?:{_HUB_NAME}/)?{_HUB_NAME}$", max_length=193, exclude_if=is_none)
    """The `base_model` of the card. A path in `config.json` looks like such a name, so that it is not taken for one."""


class PeftOptions(FormatOptions):
    """Options of LoRA adapters."""

    merge_adapter: Annotated[
        bool,
        Option(
            "Merge a LoRA adapter into the weights, with the names of the base model.",
            Section.ADAPTERS,
            1,
            label="Merge the adapter",
        ),
    ] = False
    """Consolidated weights only: merge an adapter into the weights, and name them as the model without PEFT does."""
    adapter: Annotated[
        str | None,
        Option(
            "Adapter to write or to merge, if SRC has several.",
            Section.ADAPTERS,
            2,
            metavar="NAME",
            label="Name of the adapter",
        ),
    ] = Field(default=None, min_length=1, max_length=256)
    """Name of the LoRA adapter to write or to merge, if there are several."""
    lora_alpha: Annotated[
        float | None,
        Option(
            "Scale of an adapter that has no adapter_config.json.",
            Section.ADAPTERS,
            3,
            label="Scale of the adapter (lora_alpha)",
        ),
    ] = Field(default=None, gt=0, lt=1e9)
    """`lora_alpha` of an adapter without `adapter_config.json`: its scale is `lora_alpha` / rank."""
    rslora: Annotated[
        bool,
        Option(
            "The run of --lora-alpha had use_rslora: its scale is lora_alpha / sqrt(rank).",
            Section.ADAPTERS,
            4,
            label="Rank-stabilized scale (use_rslora)",
        ),
    ] = Field(default=False, exclude_if=_is_false)
    """`use_rslora` of an adapter without `adapter_config.json`: its scale is `lora_alpha` / sqrt(rank)."""
    base: Annotated[
        str | None,
        Option(
            "Weights of the base model, if SRC was saved without frozen parameters.",
            Section.SOURCE,
            11,
            metavar="DIR",
            label="Base model",
        ),
        Place(),
    ] = Field(default=None, min_length=1, max_length=4096)
    """A directory with the base model's weights, or its directory in the cache of the Hugging Face hub. `merge_adapter`
    needs it if the checkpoint has no frozen parameters. It is read with the source's storage profile."""


def decides_bytes(info: FieldInfo) -> bool:
    """True if the bytes of a target may depend on an option's value itself. Files that it names are pinned in plans."""
    return not option_of(info).of_run and not any(isinstance(m, Place) for m in info.metadata)


def former_place(info: FieldInfo) -> tuple[str, str] | None:
    """The format below whose name requests of 0.1.0 have an option that is neutral now, and its name there.

    None for all other options. Digests have the option there, too.
    """
    format_name, dot, name = option_of(info).digested.rpartition(".")
    return (format_name, name) if dot else None


OptionsT = TypeVar("OptionsT", bound=FormatOptions)


class Options(RequestModel):
    """The options of all formats, by format. The options of a format that is not installed here stay plain JSON."""

    model_config = ConfigDict(extra="allow")

    deepspeed: DeepSpeedOptions = Field(default_factory=DeepSpeedOptions)
    fsdp_ranks: FsdpRanksOptions = Field(default_factory=FsdpRanksOptions)
    megatron: MegatronOptions = Field(default_factory=MegatronOptions)
    weights: WeightsOptions = Field(default_factory=WeightsOptions)
    peft: PeftOptions = Field(default_factory=PeftOptions)

    def of(self, kind: type[OptionsT]) -> OptionsT:
        """The options of one format, by their model class; the defaults if the request leaves that format out."""
        return next((found for _, found in self.by_format() if isinstance(found, kind)), kind())

    def by_format(self) -> Iterator[tuple[str, FormatOptions]]:
        """The options of every format that is installed here, with its name."""
        for name in (*type(self).model_fields, *(self.model_extra or {})):
            if isinstance(found := getattr(self, name), FormatOptions):
                yield name, found

    def unknown(self) -> list[str]:
        """The names of formats that are not installed here."""
        return [name for name, found in (self.model_extra or {}).items() if not isinstance(found, FormatOptions)]

    def given(self) -> dict[str, dict[str, Any]]:
        """The options whose values are not the defaults, by format, as JSON."""
        return {name: given for name, found in self.by_format() if (given := found.given())}
