"""Runs of the Megatron-shaped GPT: what each is, and its DeepSpeed configuration.  Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

BLOCKS = 2
ROWS = 12


@dataclass(frozen=True)
class MegatronCase:
    """One kind of run.

    Attributes:
        stage: ZeRO stage. At 3 there is one param group, elsewhere there are two.
        pad_to: `make_vocab_size_divisible_by`: at 24 the 37 words have 48 rows on one and on two tensor-parallel ranks.
        weight_decay: of matrices, where Megatron gives them any.
        whole_shapes: the run's code groups by the whole shapes of parameters, so that there are two groups at 3 too.
        steps: steps trained before the save.
    """

    stage: Literal[1, 2, 3]
    pad_to: int = 24
    weight_decay: float = 0.1
    steps: int = 3
    whole_shapes: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data from which ``MegatronCase(**data)`` is this case again, for the way into a rank."""
        return asdict(self)


def megatron_config(case: MegatronCase, dp: int) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``dp`` data-parallel ranks."""
    if ROWS % dp:
        raise ValueError(f"{dp} ranks do not divide a batch of {ROWS}")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // dp,
        "zero_optimization": {"stage": case.stage},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"torch_adam": True, "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0},
        },
    }
    if case.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else tiny models are never gathered
    return config
