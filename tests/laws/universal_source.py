"""Logical states as the universal directories that `ds_to_universal` of DeepSpeed 0.19.8 writes.

They are made of what the run saved: copies of its model states, atoms of its optimizer states. Stages 1 and 2 and
BF16_Optimizer give mappings with shapes and a `step.pt`; stage 3 gives bare flat tensors, and the counter only in
rank 0's whole optimizer state.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from laws.deepspeed_files import CheckpointWriter, Layout, flat_groups, sub_groups
from laws.deepspeed_source import cases_of, kept, rules_of
from laws.torch_values import tensor_of, torch_value
from reshard_engine.testing.logical import Case, LogicalState, Saved
from reshard_engine.testing.strategies import evenly

_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


@dataclass(frozen=True)
class UniversalSource:
    """What `ds_to_universal` makes of data-parallel runs."""

    name: str = "ds_to_universal"
    full: bool = True

    @property
    def zoo(self) -> dict[str, float]:
        """Both shapes."""
        return {"bare atoms": 0.02, "mapped atoms": 0.1}

    def cases(self) -> st.SearchStrategy[Case]:
        """Runs of stages that can be converted, by an Adam that has stepped: the tool knows no other."""
        stages = evenly(1, 2, 3, "bf16")
        found = stages.flatmap(lambda stage: cases_of(stage, replace(rules_of(stage), stepped_adam=True)))  # type: ignore[arg-type]
        return found.map(_without_round_robin)

    def write(self, case: Case, directory: Path) -> Saved:
        """`latest_universal` and the directory that it names."""
        state, layout = case.state, case.layout
        folder = directory / f"{layout.tag}_universal"
        (folder / "zero").mkdir(parents=True)
        (directory / "latest_universal").write_text(folder.name)
        writer = CheckpointWriter(state, layout, folder)
        if layout.stage == 3:
            _write_stage3(writer, state, layout)
        else:
            _write_zero12(writer, state, layout)
        shape = "bare atoms" if layout.stage == 3 else "mapped atoms"
        return Saved(kept(state, layout), frozenset({self.name, shape}), layout.frozen_late(state))

    def checks_metadata(self, case: Case) -> bool:
        """Archives have CRCs; legacy streams have none."""
        return bool(case.layout.zip_files)


def _without_round_robin(case: Case) -> Case:
    """`ds_to_universal` exchanges parameters under round robin; the reader refuses that."""
    config = dict(case.state.values["ds_config"])
    zero = {k: v for k, v in config["zero_optimization"].items() if k != "round_robin_gradients"}
    values = {**case.state.values, "ds_config": {**config, "zero_optimization": zero}}
    return Case(replace(case.state, values=values), replace(case.layout, round_robin=False))


def _save_atom(writer: CheckpointWriter, name: str, state: str, value: Any) -> None:
    folder = writer.directory / "zero" / name
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(value, folder / f"{state}.pt")


def _write_zero12(writer: CheckpointWriter, state: LogicalState, layout: Layout) -> None:
    flats = flat_groups(state, layout)
    model = writer.model_states(0, flats, None)
    writer.save(model, "mp_rank_00_model_states.pt")
    for parameter in state.trained:
        for name, bits in parameter.states.items():
            _save_atom(writer, parameter.fqn, name, {"param": tensor_of(bits), "cat_dim": 0})
        _save_atom(writer, parameter.fqn, "step", torch_value(state.steps[parameter.group or 0]))
    owned = {p.fqn for p in state.trained}
    for name, tensor in model["module"].items():
        if name not in owned:  # frozen, buffers (even integers) and aliases get a master from the model states
            real = tensor.real if tensor.is_complex() else tensor
            _save_atom(writer, name, "fp32", {"param": real.to(torch.float32)})
    inner = writer.zero12(0, flats)
    common = {k: v for k, v in inner.items() if k not in _SHARDED}
    torch.save(
        {**common, "param_groups": inner["base_optimizer_state"]["param_groups"]},
        writer.directory / "zero" / "optimizer_state.pt",
    )


def _write_stage3(writer: CheckpointWriter, state: LogicalState, layout: Layout) -> None:
    flats = sub_groups(state, layout)
    for rank in range(layout.world):
        writer.save(writer.model_states(rank, flats, None), f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    for parameter in state.trained:
        for name, bits in parameter.states.items():
            _save_atom(writer, parameter.fqn, name, tensor_of(bits).flatten())
    inner = writer.zero3(0, flats)
    torch.save(
        {**inner, "param_groups": inner["optimizer_state_dict"]["param_groups"]},
        writer.directory / "zero" / "optimizer_state.pt",
    )
