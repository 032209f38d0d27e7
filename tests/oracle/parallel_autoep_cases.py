"""Kinds of AutoEP runs, as plain data.  Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class AutoEpCase:
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

    name: str
    stage: Literal[1, 2, 3, "bf16opt"]
    dtype: Literal["fp32", "bf16"] = "fp32"
    round_robin: bool = False
    data_before_expert: bool = False
    frozen: bool = False
    largest_group: int | None = None
    sub_group_size: int | None = None
    steps: int = 3

    def to_json(self) -> dict[str, Any]:
        """Plain data from which ``AutoEpCase(**data)`` is this case again, for the way into a rank."""
        return asdict(self)


AUTOEP_EXPERTS = 4
AUTOEP_ROWS = 12
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

    Gradients are not clipped: their norm counts experts by how they lie (0.19.8, ``_average_expert_grad_norms``).
    """
    if AUTOEP_ROWS % world:
        raise ValueError(f"{world} ranks do not divide a batch of {AUTOEP_ROWS}")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": AUTOEP_ROWS // world,
        "zero_optimization": {"stage": 1 if case.stage == "bf16opt" else case.stage},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": ep,
            "use_grouped_mm": False,  # grouped products of matrices are Triton's: a CPU loops over experts
            "moe_layer_pattern": r"layers\.\d+\.moe",
            "num_experts_attr": "experts",
            "top_k_attr": "top_k",
        },
        "use_data_before_expert_parallelism": case.data_before_expert,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"torch_adam": True, "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }
    if case.round_robin:
        config["zero_optimization"]["round_robin_gradients"] = True
    if case.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else tiny models are never gathered
        if case.sub_group_size is not None:
            config["zero_optimization"]["sub_group_size"] = case.sub_group_size
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.stage == "bf16opt":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
