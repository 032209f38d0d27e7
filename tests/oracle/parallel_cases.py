"""The zoo of parallel runs: what each is, its DeepSpeed configuration, its rules.  Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import yaml

ROWS_PER_STEP = 24  # with two micro-batches 1, 2, 3, 4 and 6 data-parallel ranks divide it: all see the same batch
MICRO_BATCHES = 2

VOCAB = 37  # prime: every layout needs padding
SEQUENCE = 8
WIDTH = 16
HEADS = 4
HEAD_WIDTH = 4
INNER = 24
DEPTH = 4


@dataclass(frozen=True)
class Layout:
    """Ranks of a run: tensor, pipeline and data parallel.  Rank order is DeepSpeed's: pipe, data, model.

    Experts are cut over ``ep`` of the data-parallel ranks.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}dp{self.dp}" + (f"ep{self.ep}" if self.ep > 1 else "")


@dataclass(frozen=True)
class ParallelCase:
    """One kind of run; ``kind`` names the module whose ``start`` begins it inside a rank."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the way into a rank; ``case_of`` takes it."""
        return {"kind": self.kind, **asdict(self)}


def case_of(data: dict[str, Any]) -> Any:
    """The case that ``to_json`` described."""
    kinds = {cls.kind: cls for cls in ParallelCase.__subclasses__()}
    return kinds[data["kind"]](**{key: value for key, value in data.items() if key != "kind"})


def training_config(
    stage: Literal[0, 1, 2, 3, "bf16opt"],
    dtype: str,
    rows: int,
    ranks: int,
    *,
    rates: float | list[float] | None,
    weight_decay: float = 0.1,
    **more: Any,
) -> dict[str, Any]:
    """DeepSpeed's configuration of what all kinds of runs have.

    Args:
        stage: ZeRO stage, or ``"bf16opt"`` for BF16_Optimizer.
        dtype: model dtype.
        rows: rows of a micro-batch of all ranks together.
        ranks: those among which they are divided.
        rates: where WarmupLR ends, of all parameter groups or of each; without it there is no scheduler.
        weight_decay: AdamW's.
        more: further sections.
    """
    if rows % ranks:
        raise ValueError(f"{ranks} ranks do not divide a batch of {rows}")
    adam = {"torch_adam": True, "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": weight_decay}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows // ranks,
        "zero_optimization": {"stage": 1 if stage == "bf16opt" else stage},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": adam},
        **more,
    }
    if rates is not None:
        warmup = {"warmup_min_lr": 0, "warmup_max_lr": rates, "warmup_num_steps": 4, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else tiny models are never gathered
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if stage == "bf16opt":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


@dataclass(frozen=True)
class GptCase(ParallelCase):
    """One kind of 3D run of the small GPT.

    Attributes:
        name: unique; also the test id.
        stage: ZeRO stage 0 or 1, or ``"bf16opt"`` for BF16_Optimizer; a pipeline allows no other (0.19.8).
        dtype: model dtype.
        glu: ``[gate | up]`` in one matrix, each half cut on its own, instead of one GELU matrix.
        qkv: ``heads`` orders the fused matrix by key-value head (Megatron version 2: slices joined along dimension 0
            are the full matrix); ``blocks`` has ``[Q | K | V]`` in each slice, so that a plain join is wrong.
        kv_heads: key-value heads; at most that many tensor-parallel ranks are possible.
        pad_to: see ``Cut.pad_to``: at 8, layouts with 1, 2 and 4 tensor-parallel ranks pad 37 rows to 40, 48 and 64.
        positions: ``layer`` is a pipeline layer of its own; ``tied`` stands in the tied module, as Megatron's does: its
            copy on the last stage never gets a gradient, and copies drift apart.
        clipping: ``gradient_clipping``, active at 0.5; 0 switches it off.
        partition_method: of ``PipelineModule``.
        info: saves ``universal_checkpoint_info`` as Megatron-DeepSpeed does; else the checkpoint does not say how its
            parameters are cut.
        steps: steps trained before the save.
    """

    kind = "gpt"
    name: str
    stage: Literal[0, 1, "bf16opt"] = 1
    dtype: Literal["fp32", "bf16"] = "fp32"
    glu: bool = False
    qkv: Literal["heads", "blocks"] = "heads"
    kv_heads: int = HEADS
    pad_to: int = 8
    positions: Literal["layer", "tied"] = "layer"
    clipping: float = 0.5
    partition_method: str = "uniform"
    info: bool = True
    steps: int = 3

    @property
    def qkv_blocks(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the full fused matrix."""
        return HEADS * HEAD_WIDTH, self.kv_heads * HEAD_WIDTH, self.kv_heads * HEAD_WIDTH


def gpt_config(case: GptCase, dp: int) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``dp`` data-parallel ranks."""
    rows, clipping = ROWS_PER_STEP // MICRO_BATCHES, case.clipping
    more = {"gradient_accumulation_steps": MICRO_BATCHES, "gradient_clipping": clipping}
    return training_config(case.stage, case.dtype, rows, dp, rates=[1e-2, 5e-3], **more)


def gpt_rules(case: GptCase) -> dict[str, Any]:
    """How the model's parameters are cut, in the words of ``universal_checkpoint_info`` (0.19.8, constants.py).

    Sub-parameters are dictionaries with the fields of DeepSpeed's ``SubparamShape``, as ``ds_to_universal`` reads them.
    """
    places = r"tied_modules\.embed\.places" if case.positions == "tied" else r"\d+"
    rules: dict[str, Any] = {
        "original_vocab_size": VOCAB,
        "vocabulary_parameter_patterns": [r"tied_modules\.embed\.tokens\.weight"],
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\..*"],
        "tp_replicated_parameter_patterns": [
            r"\d+\.norm_[12]\.(weight|bias)",
            r"\d+\.attention\.dense\.bias",
            r"\d+\.mlp\.down\.bias",
            r"\d+\.final\.(weight|bias)",
            rf"{places}\.(positions|norm\.weight|norm\.bias)",
        ],
        "parameter_with_row_parallelism_patterns": [r"\d+\.attention\.dense\.weight", r"\d+\.mlp\.down\.weight"],
    }
    if case.glu:
        rules["parameter_with_2_sub_params_cat_dim_0"] = [r"\d+\.mlp\.up\.(weight|bias)"]
    if case.qkv == "blocks":
        rules["parameter_with_sub_params"] = [
            {"patterns": [r"\d+\.attention\.qkv\.weight"], "shape": [list(case.qkv_blocks), WIDTH], "partition_dim": 0}
        ]
    return rules


def gpt_rules_yaml(case: GptCase) -> str:
    """The rules as a text that a user could write."""
    return yaml.safe_dump(gpt_rules(case), sort_keys=True)


GPT_CASES: dict[str, GptCase] = {
    case.name: case
    for case in (
        GptCase("gpt_fp32"),
        GptCase("gpt_fp32_bare", info=False),
        # Not clipped: without ZeRO the norm counts tied gradients once per stage that has them (0.19.8), so that losses
        # would depend on the number of stages in DeepSpeed itself.
        GptCase("gpt_fp32_z0", stage=0, clipping=0.0),
        GptCase("gpt_fp32_glu", glu=True),
        GptCase("gpt_fp32_qkv_blocks", qkv="blocks", kv_heads=2),
        GptCase("gpt_fp32_gqa", kv_heads=2),
        GptCase("gpt_fp32_tied_positions", positions="tied"),
        GptCase("gpt_fp32_by_parameters", partition_method="parameters"),
        GptCase("gpt_bf16", dtype="bf16"),
        GptCase("gpt_bf16opt", stage="bf16opt", dtype="bf16"),
        GptCase("gpt_bf16opt_glu", stage="bf16opt", dtype="bf16", glu=True),
    )
}


@dataclass(frozen=True)
class MoeCase(ParallelCase):
    """One kind of run of the small mixture-of-experts model: data-parallel ranks, experts cut over some of them.

    Attributes:
        name: unique; also the test id.
        stage: ZeRO stage 1 or 2, or ``"bf16opt"``; experts are partitioned at no other (0.19.8).
        dtype: model dtype.
        data_before_expert: ``use_data_before_expert_parallelism``: expert-parallel rank ``d // (N / ep)`` instead of
            ``d % ep``.
        steps: steps trained before the save.
    """

    kind = "moe"
    name: str
    stage: Literal[1, 2, "bf16opt"]
    dtype: Literal["fp32", "bf16"]
    data_before_expert: bool = False
    steps: int = 3


EXPERTS = 4
EXPERT_ROWS = 12
MOE_CASES: dict[str, MoeCase] = {
    case.name: case
    for case in (
        MoeCase("moe_fp32_z1", 1, "fp32"),
        MoeCase("moe_fp32_z2", 2, "fp32"),
        MoeCase("moe_fp32_z1_data_first", 1, "fp32", data_before_expert=True),
        MoeCase("moe_bf16_z1", 1, "bf16"),
        MoeCase("moe_bf16_z2", 2, "bf16"),
        MoeCase("moe_bf16opt", "bf16opt", "bf16"),
    )
}


def moe_config(case: MoeCase, world: int) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``world`` ranks.

    Gradients are not clipped: their norm counts experts by how they lie (0.19.8, ``_average_expert_grad_norms``).
    """
    rates = [1e-2, 5e-3, 1e-2, 5e-3]  # dense matrices and vectors, then the experts' own
    more = {"use_data_before_expert_parallelism": case.data_before_expert}
    return training_config(case.stage, case.dtype, EXPERT_ROWS, world, rates=rates, **more)


@dataclass(frozen=True)
class AutoEpCase(ParallelCase):
    """One kind of run of a small model whose mixtures AutoEP replaces: experts fused, and cut over some of the ranks.

    Attributes:
        name: unique; also the test id.
        stage: ZeRO stage, or ``"bf16opt"``.
        dtype: model dtype.
        round_robin: ``round_robin_gradients``.
        data_before_expert: ``use_data_before_expert_parallelism``: expert-parallel rank ``d // (N / ep)`` instead of
            ``d % ep``.
        frozen: the first mixture's down projections are not trained.
        largest_group: most elements that DeepSpeed puts into one group of experts; None leaves its own limit.
        sub_group_size: of stage 3, in elements of a rank.
        steps: steps trained before the save.
    """

    kind = "autoep"
    name: str
    stage: Literal[1, 2, 3, "bf16opt"]
    dtype: Literal["fp32", "bf16"] = "fp32"
    round_robin: bool = False
    data_before_expert: bool = False
    frozen: bool = False
    largest_group: int | None = None
    sub_group_size: int | None = None
    steps: int = 3


AUTOEP_CASES: dict[str, AutoEpCase] = {
    case.name: case
    for case in (
        AutoEpCase("autoep_z1", 1),
        AutoEpCase("autoep_z2", 2),
        AutoEpCase("autoep_z2_round_robin", 2, round_robin=True),
        AutoEpCase("autoep_z1_data_first", 1, data_before_expert=True),
        AutoEpCase("autoep_z2_frozen", 2, frozen=True),
        AutoEpCase("autoep_z2_bf16", 2, dtype="bf16"),
        AutoEpCase("autoep_bf16opt", "bf16opt", dtype="bf16"),
        AutoEpCase("autoep_z1_frozen", 1, frozen=True),
        AutoEpCase("autoep_z1_split", 1, largest_group=500),
        AutoEpCase("autoep_z3", 3),
        AutoEpCase("autoep_z3_split", 3, largest_group=500),
        AutoEpCase("autoep_z3_sub_groups", 3, sub_group_size=150),
        AutoEpCase("autoep_z3_bf16", 3, dtype="bf16"),
    )
}


def autoep_config(case: AutoEpCase, world: int, ep: int) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``world`` ranks with experts over ``ep`` of them.

    Gradients are not clipped, as those of ``moe_config``.
    """
    experts = {
        "enabled": True,
        "autoep_size": ep,
        "use_grouped_mm": False,  # grouped products of matrices are Triton's: a CPU loops over experts
        "moe_layer_pattern": r"layers\.\d+\.moe",
        "num_experts_attr": "experts",
        "top_k_attr": "top_k",
    }
    more = {"expert_parallel": experts, "use_data_before_expert_parallelism": case.data_before_expert}
    config = training_config(case.stage, case.dtype, EXPERT_ROWS, world, rates=1e-2, **more)
    if case.round_robin:
        config["zero_optimization"]["round_robin_gradients"] = True
    if case.stage == 3 and case.sub_group_size is not None:
        config["zero_optimization"]["sub_group_size"] = case.sub_group_size
    return config


@dataclass(frozen=True)
class AutoTpCase(ParallelCase):
    """One kind of AutoTP run of a tiny Llama.

    Attributes:
        name: unique; also the test id.
        stage: ZeRO stage.
        dtype: model dtype.
        heads: attention heads.
        kv_heads: key-value heads; where ranks do not divide them, AutoTP cuts unevenly, and ranks may get none.
        tied: the output layer shares the embedding's weight.
        vocab_parallel: AutoTP's ``vocab_parallel_lm_head``; None leaves it to DeepSpeed.
        steps: steps trained before the save.
    """

    kind = "autotp"
    name: str
    stage: Literal[1, 2, 3]
    dtype: Literal["fp32", "bf16"] = "fp32"
    heads: int = 4
    kv_heads: int = 4
    tied: bool = False
    vocab_parallel: bool | None = None
    steps: int = 3


AUTOTP_ROWS = 12
AUTOTP_CASES: dict[str, AutoTpCase] = {
    case.name: case
    for case in (
        AutoTpCase("autotp_z1", 1),
        AutoTpCase("autotp_z1_gqa", 1, kv_heads=2),
        AutoTpCase("autotp_z1_uneven", 1, heads=6, kv_heads=3),
        AutoTpCase("autotp_z1_tied", 1, tied=True),
        AutoTpCase("autotp_z1_vocab", 1, vocab_parallel=True),
        AutoTpCase("autotp_z2_bf16", 2, dtype="bf16", kv_heads=2),
        AutoTpCase("autotp_z3", 3),
        AutoTpCase("autotp_z3_bf16", 3, dtype="bf16", kv_heads=2),
    )
}


def autotp_config(case: AutoTpCase, tp: int, dp: int) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``tp`` times ``dp`` ranks; size 1 is a run without AutoTP."""
    more: dict[str, Any] = {"gradient_clipping": 0.5}
    if tp > 1:
        more["tensor_parallel"] = {"autotp_size": tp, "vocab_parallel_lm_head": case.vocab_parallel}
    return training_config(case.stage, case.dtype, AUTOTP_ROWS, dp, rates=[1e-2, 5e-3], **more)


PARALLEL_CASES: dict[str, ParallelCase] = {**GPT_CASES, **MOE_CASES, **AUTOEP_CASES, **AUTOTP_CASES}
"""The runs that tests train once, by name."""


MEGATRON_BLOCKS = 2
MEGATRON_ROWS = 12


@dataclass(frozen=True)
class MegatronCase(ParallelCase):
    """One kind of run of the Megatron-shaped GPT.

    Attributes:
        stage: ZeRO stage. At 3 there is one param group, elsewhere there are two.
        pad_to: `make_vocab_size_divisible_by`: at 24 the 37 words have 48 rows on one and on two tensor-parallel ranks.
        weight_decay: of matrices, where Megatron gives them any.
        whole_shapes: the run's code groups by the whole shapes of parameters, so that there are two groups at 3 too.
        steps: steps trained before the save.
    """

    kind = "megatron"
    stage: Literal[1, 2, 3]
    pad_to: int = 24
    weight_decay: float = 0.1
    steps: int = 3
    whole_shapes: bool = False


def megatron_config(case: MegatronCase, dp: int) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``dp`` data-parallel ranks."""
    return training_config(case.stage, "fp32", MEGATRON_ROWS, dp, rates=None, weight_decay=0.0, gradient_clipping=0.0)


@dataclass(frozen=True)
class AcrossCase(ParallelCase):
    """One kind of run of the models that real Megatron-core trains in `megatron_train`, as Megatron-DeepSpeed has them.

    Attributes:
        model: ``gpt`` (tied, learned positions, biases) or ``llama`` (grouped queries, SwiGLU, rotary, untied).
        stage: ZeRO stage, or ``"bf16opt"`` for BF16_Optimizer.
        dtype: model dtype.
        pipeline: a pipeline module with numbered layers; else the names of a language model.
        split: ``query_key_value`` is ``[Q | K | V]`` in each slice, as since December 2024; else it is by group.
        vocab: tokens.
        steps: steps trained before the save.
    """

    kind = "across"
    model: Literal["gpt", "llama"]
    stage: Literal[1, 2, 3, "bf16opt"] = 1
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    pipeline: bool = True
    split: bool = False
    vocab: int = 96
    steps: int = 3


ACROSS_SAMPLES = 4


def across_config(case: AcrossCase, dp: int) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``dp`` data-parallel ranks: one sample a micro-batch."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACROSS_SAMPLES // dp,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1 if case.stage == "bf16opt" else case.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if case.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.dtype == "fp16":
        config["fp16"] = {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 50, "hysteresis": 2,
            "min_loss_scale": 1,
        }  # fmt: skip
    if case.stage == "bf16opt":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
