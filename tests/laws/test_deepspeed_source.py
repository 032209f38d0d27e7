"""The synthetic writer against real checkpoints: extract the logical state, write it again, compare the files."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from laws.deepspeed_files import PADDING, VERSION, Layout, write_checkpoint
from laws.torch_values import bits_of, tree_of
from oracle.cases import CASES, Case, ds_config
from oracle.fixtures import TrainedFactory
from oracle.truth import RawTensor, Truth
from reshard_engine.tensors.dtypes import BY_SAFETENSORS
from reshard_engine.testing.logical import MASTER, Bits, LogicalParameter, LogicalState

DATA = Path(__file__).parent.parent / "data"
_EXTRAS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_STAGE0_EXTRAS = (
    *("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"),
)
_VALUES = ("lr_scheduler", "skipped_steps", "global_steps", "global_samples", "ds_config")
_OWN = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_version"),
)
TRAINED = ("z0_bf16", "z1_elastic", "z2_round_robin_alignment", "bf16opt_two_groups", "z3_sub_groups_two_groups")
TRAINED_TOO = (
    *("z0_fp32", "z0_fp16", "z0_two_groups", "z1_fp16", "z1_before_first_step", "z2_sgd", "z2_empty_param"),
    *("z2_round_robin", "z2_legacy_stream", "z3_before_first_step", "z3_fp32"),
)


def _bits(raw: RawTensor) -> Bits:
    return Bits(BY_SAFETENSORS[raw.dtype].name, raw.shape, raw.data)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)  # what we or DeepSpeed wrote a moment ago


def _layout(case: Case, world: int, tag: str) -> Layout:
    return Layout(
        "bf16" if case.stage == "bf16opt" else case.stage,
        world,
        round_robin=case.round_robin,
        alignment=case.parameter_alignment,
        sub_group_size=case.sub_group_size or 10**9,
        elastic=case.elastic,
        zip_files=case.zip_files,
        tag=tag,
    )


def _state(tag_dir: Path, truth: Truth, layout: Layout) -> LogicalState:
    """The logical state of a real checkpoint: tensors from the recorded truth, everything else from rank 0's files."""
    model = _load(next(p for p in sorted(tag_dir.glob("*mp_rank_00_model_states.pt"))))
    optim = sorted(tag_dir.glob("*rank_0_mp_rank_00_optim_states.pt"))
    inner = _load(optim[0])["optimizer_state_dict"] if optim else (model["optimizer"] or {})
    base = inner.get("base_optimizer_state", inner.get("optimizer_state_dict", inner))
    real_groups = truth.meta["groups"]
    group_of = {name: i for i, g in enumerate(real_groups) for name in g["names"]}
    states = [k for k in truth.kinds if k not in {MASTER, "module", "frozen", "buffer"}]
    parameters: list[LogicalParameter] = []
    for name in model["module"]:
        weight = truth.tensors.get(f"module/{name}", truth.tensors.get(f"frozen/{name}"))
        if weight is None:
            continue
        kinds = [MASTER, *(s for s in ("exp_avg", "exp_avg_sq", "momentum_buffer") if s in states)]
        tensors = {k: _bits(truth.tensors[f"{k}/{name}"]) for k in kinds if f"{k}/{name}" in truth.tensors}
        group = group_of.get(name) if tensors else None
        parameters.append(LogicalParameter(name, weight.shape, group, _bits(weight), tensors))
    aliases = truth.meta["aliases"]
    groups = [
        {k: v for k, v in g.items() if k != "params"}
        for g in (base["param_groups"] if isinstance(base, dict) else [{} for _ in real_groups])
    ]
    entries = base["state"] if isinstance(base, dict) else dict(enumerate(base))
    steps = tuple(bits_of(e["step"]) if "step" in e else None for e in list(entries.values())[: len(groups)])
    values = {k: tree_of(v) for k, v in model.items() if k not in _OWN}
    extras = _STAGE0_EXTRAS if layout.stage == 0 and "optimizer_state_dict" in inner else _EXTRAS
    weights = truth.kind("module")
    return LogicalState(
        {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[next(iter(weights.values())).dtype],
        tuple(parameters),
        {n: _bits(t) for n, t in truth.kind("buffer").items()},
        aliases,
        tuple(model["module"]),
        tuple(groups),
        steps or (None,) * len(groups),
        values,
        {k: tree_of(inner[k]) for k in extras if k in inner},
    )


def _shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor in a file but its elements."""
    storage = tensor.untyped_storage().nbytes()
    facts = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage)
    return (*facts, tensor.requires_grad, dict(vars(tensor)))


def _difference(real: Any, ours: Any, where: str) -> str | None:
    """Where two files differ in keys, types, storages or elements, paddings left out."""
    if type(real) is not type(ours):
        return f"{where}: {type(real)} and {type(ours)}"
    if isinstance(real, torch.Tensor):
        return _tensor_difference(real, ours, where)
    if isinstance(real, dict):
        if list(real) != list(ours):
            return f"{where}: {list(real)} and {list(ours)}"
        pairs = [(f"{where}.{k}", real[k], ours[k]) for k in real]
    elif isinstance(real, list | tuple):
        if len(real) != len(ours):
            return f"{where}: {len(real)} and {len(ours)} items"
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(real, ours, strict=True))]
    elif hasattr(real, "__dict__") and not isinstance(real, int):
        return _difference(vars(real), vars(ours), where)
    else:
        return None if real == ours else f"{where}: {real!r} and {ours!r}"
    return next((found for name, a, b in pairs if (found := _difference(a, b, name)) is not None), None)


def _tensor_difference(real: torch.Tensor, ours: torch.Tensor, where: str) -> str | None:
    if _shape_of(real) != _shape_of(ours):
        return f"{where}: {_shape_of(real)} and {_shape_of(ours)}"
    size = real.element_size()
    theirs, mine = bits_of(real).data, bits_of(ours).data
    pad = bytes([PADDING]) * size
    wrong = [i for i in range(0, len(mine), size) if mine[i : i + size] not in (pad, theirs[i : i + size])]
    return f"{where}: {len(wrong)} elements differ" if wrong else None


def _padding_elems(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        size = value.element_size()
        data = bits_of(value).data
        return sum(data[i : i + size] == bytes([PADDING]) * size for i in range(0, len(data), size))
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_padding_elems, items))


def _compare(source: Path, tag: str, truth: Truth, case: Case, world: int, scratch: Path) -> None:
    layout = _layout(case, world, tag)
    state = _state(source / tag, truth, layout)
    scratch.mkdir()
    write_checkpoint(state, layout, scratch)
    real = {p.name: p for p in (source / tag).iterdir()}
    ours = {p.name: p for p in (scratch / tag).iterdir()}
    assert sorted(ours) == sorted(real)
    assert (scratch / "latest").read_bytes() == (source / "latest").read_bytes()
    padding = 0
    for name in sorted(real):
        found = _load(ours[name])
        assert _difference(_load(real[name]), found, name) is None
        if "optim_states" in name:
            padding += _padding_elems(found)
    # Paddings were left out of the comparison: there are no more of them than the rank files need.
    owned, states = [prod(p.shape) for p in state.trained], 1 + len(state.state_names)
    bound = (world - 1) * len(owned) if layout.stage == 3 else (2 * world + 8 * len(owned)) * len(state.groups or ())
    assert padding <= bound * states


@pytest.mark.parametrize("name", ["zero2_tiny", "zero3_tiny"])
def test_frozen_checkpoints_are_written_again(name: str, tmp_path: Path) -> None:
    truth = Truth(DATA / name / "expected.safetensors", DATA / name / "expected.json")
    assert truth.meta["ds_version"] == VERSION
    _compare(DATA / name, truth.meta["tag"], truth, CASES[name], 2, tmp_path / "again")


@pytest.mark.parametrize("name", [*TRAINED, *(pytest.param(n, marks=pytest.mark.full) for n in TRAINED_TOO)])
def test_trained_checkpoints_are_written_again(name: str, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name, world=3)
    assert ds_config(run.case, run.world)
    _compare(run.dir, run.tag, run.truth, run.case, run.world, tmp_path / "again")
