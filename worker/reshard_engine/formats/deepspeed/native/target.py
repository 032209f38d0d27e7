"""The target run that a request and a source describe together, and the content of its model-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.choices import RngPolicy, ZeroStage
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest
from reshard.options import DeepSpeedOptions, RunLayout
from reshard_engine.checkpoint import Checkpoint, Scalar
from reshard_engine.formats.deepspeed.config import (
    DEFAULT_SUB_GROUP_SIZE,
    RunConfig,
    config_for,
    offloads_optimizer,
    section_of,
)
from reshard_engine.formats.deepspeed.facts import OLDEST_VERSION, DeepSpeedFacts, facts_of, refuse_complex
from reshard_engine.formats.deepspeed.files import CONFIG, VERSION
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.pickles.nodes import Node, is_mapping
from reshard_engine.pickles.trees import KeyPath
from reshard_engine.tensors.dtypes import BY_NAME, SHORT_NAMES, Dtype

_STAGES = {ZeroStage.STAGE_0: 0, ZeroStage.STAGE_1: 1, ZeroStage.STAGE_2: 2, ZeroStage.STAGE_3: 3, ZeroStage.BF16: 1}


@dataclass(frozen=True)
class Target:
    """A resolved native target."""

    stage: int
    bf16_optimizer: bool
    dtype: Dtype
    """The model's element type."""
    layout: RunLayout
    options: DeepSpeedOptions
    vocab_divisor: int | None
    """As the request says it; None for the source's."""
    drops_rng: bool
    """True if the target gets no random states."""
    dp: int
    """Data-parallel ranks."""
    round_robin: bool
    aligned: bool
    sub_group_size: int
    source: RunConfig
    source_config: Node
    """The source's `ds_config`."""
    source_world: Mapping[str, int]
    extras: Mapping[str, Node]
    """Entries of the source's optimizer files beside its states: loss scaler, clipping, flags."""
    version: str
    version_said: bool
    """True if `version` is the source's."""
    scale_said: bool
    """True if the source's run scaled its loss, as fp16 runs of DeepSpeed do. The scaler of any other run says 1."""

    def expert_place(self, rank: int) -> tuple[int, int]:
        """(expert-parallel rank, place among the ranks that hold the same experts) of a data-parallel rank."""
        if self.source.data_before_experts:
            return divmod(rank, self.dp // self.layout.ep)
        return rank % self.layout.ep, rank // self.layout.ep

    @property
    def tp_changes(self) -> bool:
        """True if the target has another number of tensor-parallel ranks than the source."""
        return self.layout.tp != self.source_world.get("tp", 1)

    @property
    def config_said(self) -> bool:
        """True if the source has the run's config and the version that read it: what the config lacks is a default."""
        return is_mapping(self.source_config) and self.version_said

    @property
    def offloads(self) -> bool | None:
        """True if the run keeps optimizer states off the device; None where its config is a path or absent."""
        config = self.source_config
        return offloads_optimizer(section_of(config, "zero_optimization") if is_mapping(config) else None)

    @property
    def prefix(self) -> str:
        """The prefix of optimizer files' names: `bf16_` if the config enables bf16, else empty."""
        return "bf16_" if self.dtype.name == "bfloat16" else ""

    @property
    def config(self) -> Node:
        """The source's `ds_config`, for this target."""
        # An option is False if only the source has it on, and absent if neither run has it on: older versions do not
        # know all options.
        return config_for(
            self.source_config,
            stage=self.stage,
            dtype=self.dtype.name,
            bf16_optimizer=self.bf16_optimizer,
            ep=self.layout.ep,
            options={
                "round_robin_gradients": self.round_robin or (False if self.source.round_robin else None),
                "parameter_alignment": self.aligned or (False if self.source.aligned else None),
                "sub_group_size": self.options.sub_group_size or self.source.sub_group_size,
                "elastic_checkpoint": None,
            },
        )

    @property
    def master_is_weight(self) -> bool:
        """True if the optimizer works on the model's own tensors (stage 0 in fp32)."""
        return self.stage == 0 and self.dtype.name == "float32"


def resolve(checkpoint: Checkpoint, request: ConvertRequest) -> Target:
    """The target of a request for this source.

    Raises:
        RequestError: `request.invalid` without a layout or with options that contradict one another;
            `request.unsatisfiable` for complex parameters.
    """
    layout, options = request.layout, request.options.of(DeepSpeedOptions)
    if layout.dp is None:
        raise RequestError("request.invalid", "a native target needs its number of data-parallel ranks", fix="--dp N")
    if request.exclude_frozen:
        raise RequestError(
            "request.invalid", "a native checkpoint holds all parameters", fix="leave out --exclude-frozen"
        )
    refuse_complex(checkpoint)
    entries = facts_of(checkpoint).entries
    source = RunConfig.of(entries.get(CONFIG))
    own = _model_dtype(checkpoint, source)
    dtype = BY_NAME[SHORT_NAMES[request.dtype.value]] if request.dtype else own
    if dtype is None:
        raise RequestError(
            "request.invalid",
            "the source does not say in which element type its run kept the model: its files hold masters alone, and "
            "its ds_config is a path or absent",
            fix="--dtype bf16|fp16|fp32",
        )
    stage = options.zero_stage or _stage_like(checkpoint, source, dtype)
    bf16_optimizer = stage is ZeroStage.BF16
    if bf16_optimizer and dtype.name != "bfloat16":
        if request.dtype is not None:
            raise RequestError(
                "request.invalid", f"BF16_Optimizer trains in bf16, not {dtype.name}", fix="--dtype bf16"
            )
        dtype = BY_NAME["bfloat16"]
    flat = _STAGES[stage] in (1, 2) and not bf16_optimizer
    version = entries.get(VERSION)
    return Target(
        stage=_STAGES[stage],
        bf16_optimizer=bf16_optimizer,
        dtype=dtype,
        layout=layout,
        options=options,
        vocab_divisor=request.vocab_divisor,
        drops_rng=request.rng is RngPolicy.DROP,
        dp=layout.dp,
        round_robin=flat and _first(options.round_robin_gradients, source.round_robin or facts_of(checkpoint).dealt),
        aligned=flat and _first(options.parameter_alignment, source.aligned),
        sub_group_size=options.sub_group_size or source.sub_group_size or DEFAULT_SUB_GROUP_SIZE,
        source=source,
        source_config=entries.get(CONFIG),
        source_world=checkpoint.world,
        extras=facts_of(checkpoint).optimizer_entries,
        version=version if isinstance(version, str) and version else OLDEST_VERSION,
        version_said=isinstance(version, str) and bool(version),
        scale_said=_says_scale(facts_of(checkpoint), own),
    )


def _says_scale(facts: DeepSpeedFacts, own: Dtype | None) -> bool:
    """True for an fp16 run of DeepSpeed, and for a run of another format whose loss scale is known."""
    return (own is not None and own.name == "float16") if facts.order else "loss_scaler" in facts.optimizer_entries


def _first(*choices: bool | None) -> bool:
    return next(c for c in choices if c is not None)


def _model_dtype(checkpoint: Checkpoint, source: RunConfig) -> Dtype | None:
    """The type of the weights; where there are none, that of the config; None if neither says it.

    Raises:
        RequestError: `request.invalid` if the weights have several types, and the config says none.
    """
    tensors = checkpoint.shard_map.tensors
    held = {tensors[p.weight].dtype for p in checkpoint.trained if p.weight is not None}
    if len(held) > 1 and source.dtype is None:
        raise RequestError(
            "request.invalid",
            f"the trained weights have the types {', '.join(sorted(d.name for d in held))}, and a run of DeepSpeed one",
            fix="--dtype bf16|fp16|fp32",
        )
    if len(held) == 1:
        return held.pop()
    return None if source.dtype is None else BY_NAME[source.dtype]


def _stage_like(checkpoint: Checkpoint, source: RunConfig, dtype: Dtype) -> ZeroStage:
    """The source's own stage; for a source without a stage, the stage in its config."""
    own = facts_of(checkpoint).zero_stage
    stage = own if own is not None else source.stage
    if stage is None:
        raise RequestError(
            "request.invalid", "the source does not say which ZeRO stage its run used", fix="--zero-stage 0|1|2|3|bf16"
        )
    extras = facts_of(checkpoint).optimizer_entries
    if stage == 1 and dtype.name == "bfloat16" and "zero_stage" not in extras and "loss_scaler" not in extras:
        return ZeroStage.BF16
    return ZeroStage(str(stage))


# The content of one model-parallel rank of the target: parameters in the rank's shapes, buffers, names.


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter, or one rank's part of it."""

    fqn: str
    shape: tuple[int, ...]
    group: int | None
    """Its optimizer param group; None for frozen ones."""
    states: Mapping[str, tuple[Run, ...]]
    """`fp32` and the optimizer's per-element states."""
    weight: tuple[Run, ...]
    """The elements that its weight in the model's dtype is made of: those of the stored weight, or of the master."""
    dtypes: Mapping[str, Dtype]
    """Element types of the states. The runs of a part that is all padding do not show them."""
    weight_dtype: Dtype
    """Element type of the tensor that the weight is made of."""
    scalars: Mapping[str, Scalar]
    frozen_late: bool = False
    """True if the run froze it after the optimizer was made."""

    @property
    def numel(self) -> int:
        """Elements of this part."""
        return sum(end - begin for _, begin, end in self.weight)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model-parallel rank."""

    pp: int
    tp: int
    parameters: tuple[LocalParameter, ...]
    """Trained ones in the optimizer's order, then frozen ones."""
    layers: Mapping[str, int]
    """The layer whose file holds each parameter's weight; empty in a run without a pipeline."""
    buffers: Mapping[str, int]
    """Tensor numbers of persistent buffers, and of other tensors that are not parameters."""
    shared: Mapping[str, str]
    """Owner's name of each tied name."""
    extra_states: Mapping[str, Node]
    """Entries of `module` that are not tensors, by name."""
    paths: tuple[KeyPath, ...]
    """The key path of every entry of `module`, in the model's order."""
    fused: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Whole shapes of the parameters in which AutoEP fused experts; they are whole here."""

    def group(self, index: int) -> list[LocalParameter]:
        """The parameters of one optimizer param group."""
        return [p for p in self.parameters if p.group == index]

    @property
    def frozen(self) -> list[LocalParameter]:
        """The parameters that DeepSpeed loads as frozen, those that were frozen late included."""
        return [p for p in self.parameters if p.group is None or p.frozen_late]
