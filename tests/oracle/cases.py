"""The zoo of training runs: what each is, and the DeepSpeed configuration it means.  Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

GLOBAL_BATCH = 12  # 1, 2, 3 and 4 ranks divide it, so every world sees the same batch at the same step

Dtype = Literal["fp32", "bf16", "fp16"]
Stage = Literal[0, 1, 2, 3, "bf16opt"]
OptimizerName = Literal[
    *("adam", "adamw", "sgd", "adagrad", "lion", "plain_sgd", "adafactor", "amsgrad", "asgd", "muon"),
    *("ademamix", "radam", "nadam", "adamax", "rmsprop"),
]


@dataclass(frozen=True)
class Case:
    """One kind of training run.

    Attributes:
        name: unique; also the test id.
        stage: ZeRO stage, or ``"bf16opt"`` for DeepSpeed's BF16_Optimizer (stage 1 with fp32 gradient accumulation).
        dtype: model dtype.
        optimizer: AdamW from DeepSpeed's config; the others are client optimizers.
        two_groups: two parameter groups with their own lr and weight decay (vectors apart from matrices).
        scheduler: WarmupLR.
        round_robin: ``round_robin_gradients``.
        parameter_alignment: ``parameter_alignment``.
        elastic: ``elastic_checkpoint``.
        sub_group_size: ZeRO-3 sub-group size in elements of one rank's partition; DeepSpeed's default if None.
        tied: head shares the embedding's weight.
        frozen: a matrix without gradient.
        frozen_late: a matrix and a vector are frozen after the first step, when the optimizer has them already.
        unused: a trainable parameter that never takes part in the forward pass.
        buffers: persistent int and float buffers that training changes and the loss depends on.
        local_buffer: a float buffer that depends on the rank's own data, as batch norm's does: replicas disagree.
        empty_param: trainable parameters of no elements, of one dimension and of two.
        zip_files: False writes torch's legacy stream (``checkpoint_serialization: false``).
        steps: steps trained before the save.
        loss_scale_power: fp16's initial loss scale is 2 to this; a large one overflows and skips the first steps.
        writer: ``checkpoint.writer.type``; torch.save straight into the file if None.
        nvme: offload the optimizer's states to files, or the parameters too, or these alone: those of some size, small
            ones stay.
        tiny: one narrow layer, for frozen test data.
        extra_states: modules whose extra states the loss depends on: a mapping and a tensor, or a file of bytes too.
        nested: ``state_dict`` nests one dict per submodule, as Megatron's does, and loading wants it so.
        offload: the optimizer's states are kept on the CPU (``offload_optimizer``), or the parameters too.
        compiled: ``torch.compile`` wraps the model, or each of its layers, whose names become longer.
    """

    name: str
    stage: Stage
    dtype: Dtype
    optimizer: OptimizerName = "adamw"
    two_groups: bool = False
    scheduler: bool = False
    round_robin: bool = False
    parameter_alignment: bool = False
    elastic: bool = False
    sub_group_size: int | None = None
    tied: bool = True
    frozen: bool = True
    frozen_late: bool = False
    unused: bool = True
    buffers: bool = True
    local_buffer: bool = False
    empty_param: bool = False
    zip_files: bool = True
    steps: int = 3
    loss_scale_power: int = 4
    writer: Literal["python", "fast"] | None = None
    nvme: Literal["optimizer", "parameters", "parameters alone"] | None = None
    tiny: bool = False
    extra_states: Literal["values", "bytes"] | None = None
    nested: bool = False
    offload: Literal[False, "optimizer", "parameters"] = False
    compiled: Literal[False, "model", "layers"] = False

    def to_json(self) -> dict[str, Any]:
        """Plain data from which ``Case(**data)`` is this case again, for the way into a rank."""
        return asdict(self)


def ds_config(case: Case, world: int, *, load_universal: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration of ``case`` on ``world`` data-parallel ranks."""
    if GLOBAL_BATCH % world:
        raise ValueError(f"{world} ranks do not divide a batch of {GLOBAL_BATCH}")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": _zero_section(case),
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "checkpoint": _checkpoint_section(case, load_universal=load_universal),
    }
    if case.optimizer == "adamw":
        params = {"torch_adam": True, "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if case.optimizer == "muon":
        rates = {"muon_lr": 2e-2, "adam_lr": 1e-2, "weight_decay": 0.01}
        params = {"torch_adam": True, "momentum": 0.9, "betas": [0.9, 0.95], "eps": 1e-8, **rates}
        config["optimizer"] = {"type": "Muon", "params": params}
    if case.scheduler:
        top: float | list[float] = [1e-2, 5e-3] if case.two_groups else 1e-2
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": top, "warmup_num_steps": 10, "warmup_type": "linear"},
        }
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.dtype == "fp16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": case.loss_scale_power,
            "loss_scale_window": 4,
            "hysteresis": 1,
        }
    if case.stage == "bf16opt":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if case.offload:
        config["zero_force_ds_cpu_optimizer"] = False
    if case.nvme:
        config["zero_force_ds_cpu_optimizer"] = False
        config["aio"] = {"block_size": 512}
    return config


def _zero_section(case: Case) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 1 if case.stage == "bf16opt" else case.stage}
    if case.round_robin:
        zero["round_robin_gradients"] = True
    if case.parameter_alignment:
        zero["parameter_alignment"] = True
    if case.elastic:
        zero["elastic_checkpoint"] = True
    if case.sub_group_size is not None:
        zero["sub_group_size"] = case.sub_group_size
    if case.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # else tiny models are never really gathered
    if case.optimizer == "muon" and case.stage == 3:
        zero["reduce_scatter"] = False  # DeepSpeed refuses the two together
    return zero | _offloaded(case)


def _offloaded(case: Case) -> dict[str, Any]:
    cpu = {"device": "cpu", "pin_memory": False}
    found: dict[str, Any] = {}
    if case.offload or case.nvme == "parameters alone":
        found["offload_optimizer"] = cpu
    elif case.nvme:
        found["offload_optimizer"] = {"device": "nvme", "pin_memory": False, "buffer_count": 4}
    if case.offload == "parameters":
        found["offload_param"] = cpu
    elif case.nvme not in (None, "optimizer"):
        buffers = {"buffer_count": 40, "buffer_size": 400}
        found["offload_param"] = {"device": "nvme", "pin_memory": False, "max_in_cpu": 0, **buffers}
    return found


def _checkpoint_section(case: Case, *, load_universal: bool) -> dict[str, Any]:
    section: dict[str, Any] = {}
    if load_universal:
        section["load_universal"] = True
    if not case.zip_files:
        section["checkpoint_serialization"] = False
    if case.writer is not None:
        section["writer"] = {"type": case.writer, "io_buffer_size": 1 << 20, "data_parallel": "replica"}
    return section


def _zoo() -> dict[str, Case]:
    cases = [
        Case("z0_fp32", 0, "fp32"),
        Case("z0_bf16", 0, "bf16"),
        Case("z0_fp16", 0, "fp16"),
        Case("z0_two_groups", 0, "bf16", two_groups=True),
        Case("z0_before_first_step", 0, "fp32", steps=0),  # shows no shapes, so that its states have no names
        Case("z1_fp32", 1, "fp32", scheduler=True),
        Case("z1_bf16", 1, "bf16"),
        Case("z2_fp32", 2, "fp32"),
        Case("z2_bf16", 2, "bf16", scheduler=True),
        Case("z3_fp32", 3, "fp32"),
        Case("z3_bf16", 3, "bf16", scheduler=True),
        Case("bf16opt", "bf16opt", "bf16"),
        Case("bf16opt_two_groups", "bf16opt", "bf16", two_groups=True, scheduler=True),
        Case("z1_fp16", 1, "fp16"),
        Case("z2_fp16", 2, "fp16"),
        Case("z3_fp16", 3, "fp16"),
        Case("z2_fp16_skipped", 2, "fp16", loss_scale_power=22, steps=7, scheduler=True),
        Case("z1_before_first_step", 1, "fp32", steps=0),
        Case("z2_before_first_step", 2, "bf16", steps=0),
        Case("z3_before_first_step", 3, "bf16", steps=0),
        Case("z2_round_robin", 2, "bf16", round_robin=True),
        Case("z1_round_robin_two_groups", 1, "bf16", round_robin=True, two_groups=True),
        Case("z2_alignment", 2, "bf16", parameter_alignment=True),
        Case("z2_round_robin_alignment", 2, "bf16", round_robin=True, parameter_alignment=True),
        Case("z1_two_groups", 1, "bf16", two_groups=True),
        Case("z2_two_groups", 2, "bf16", two_groups=True, scheduler=True),
        Case("z3_two_groups", 3, "bf16", two_groups=True),
        Case("z3_sub_groups", 3, "bf16", sub_group_size=150),
        Case("z3_sub_groups_two_groups", 3, "bf16", sub_group_size=150, two_groups=True),
        Case("z3_nvme", 3, "fp32", sub_group_size=150, nvme="optimizer", scheduler=True),
        Case("z3_nvme_two_groups", 3, "bf16", sub_group_size=150, two_groups=True, nvme="parameters"),
        Case("z1_elastic", 1, "bf16", elastic=True),
        Case("z2_elastic", 2, "fp32", elastic=True),
        Case("z2_sgd", 2, "bf16", optimizer="sgd"),
        Case("z3_sgd", 3, "bf16", optimizer="sgd"),
        Case("z1_adagrad", 1, "bf16", optimizer="adagrad"),
        Case("z2_lion", 2, "bf16", optimizer="lion"),
        Case("z2_legacy_stream", 2, "bf16", zip_files=False),
        Case("z3_legacy_stream", 3, "bf16", zip_files=False),
        # Not at stages 1 and 2: there all ranks write `mp_rank_00_model_states.pt` at once and tear it (0.19.8).
        Case("z3_python_writer", 3, "bf16", writer="python"),
        Case("z2_fast_writer", 2, "bf16", writer="fast"),
        Case("z3_fast_writer", 3, "bf16", writer="fast"),
        Case("z2_local_buffer", 2, "bf16", local_buffer=True),
        Case("z3_local_buffer", 3, "bf16", local_buffer=True),
        Case("z1_frozen_late", 1, "fp32", frozen_late=True),
        Case("z2_frozen_late", 2, "bf16", frozen_late=True),
        Case("z3_frozen_late", 3, "bf16", frozen_late=True),
        Case("z2_frozen_late_only", 2, "fp32", frozen_late=True, frozen=False),
        Case("z3_frozen_late_only", 3, "fp32", frozen_late=True, frozen=False),
        Case("z2_empty_param", 2, "bf16", empty_param=True),
        Case("z2_plain", 2, "bf16", tied=False, frozen=False, unused=False, buffers=False),
        Case("z3_plain", 3, "bf16", tied=False, frozen=False, unused=False, buffers=False),
        Case("zero2_tiny", 2, "bf16", tiny=True, scheduler=True),
        Case("zero3_tiny", 3, "bf16", tiny=True, scheduler=True),
    ]
    return {case.name: case for case in cases}


CASES: dict[str, Case] = _zoo()
STATE_DICT_CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("z1_extra_states", 1, "fp32", extra_states="values"),
        Case("z2_extra_states", 2, "fp32", extra_states="bytes"),
        Case("z3_extra_states", 3, "fp32", extra_states="values"),
        Case("z2_nested", 2, "fp32", nested=True, frozen=False, tied=False),
        Case("z3_nested", 3, "fp32", nested=True, frozen=False, tied=False, extra_states="values"),
    )
}
"""Runs whose state dict holds more than tensors, or is nested; the zoo's matrices do without them."""
