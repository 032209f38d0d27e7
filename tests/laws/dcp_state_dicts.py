"""State dicts of a run of FSDP under the keys of each framework, and the files that trainers write beside them.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (keys by name and flattened), `optim/optimizer.py` (keys by
number); accelerate 1.15.0 `utils/fsdp_utils.py`, `checkpointing.py`; transformers 5.23.0 `trainer.py`;
pytorch-lightning 2.6.6 `strategies/fsdp.py`; torchtitan 0.3.0 `components/checkpoint.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from laws.dcp_files import Sharded, save
from laws.dcp_layout import Layout
from laws.dcp_runs import idle_parameters
from laws.torch_values import tensor_of, torch_value
from reshard_engine.testing.logical import Bits, LogicalParameter, LogicalState


@dataclass(frozen=True)
class StateDicts:
    """The state dicts of a run."""

    state: LogicalState
    layout: Layout

    def model(self) -> dict[str, Any]:
        """The model's state dict, wrappers and ties included."""
        found: dict[str, Any] = {}
        for name in self.state.order:
            owner = self.state.aliases.get(name, name)
            bits = self.state.buffers.get(owner)
            found[self.layout.wrapped(name)] = self._of_parameter(owner) if bits is None else self._whole(bits)
        return found

    def _of_parameter(self, fqn: str) -> Any:
        weight = self.state.parameter(fqn).weight
        if weight is None:
            raise AssertionError("cases hold every weight")
        return self.sharded(fqn, weight)

    def sharded(self, fqn: str, bits: Bits) -> Any:
        """A tensor of a parameter; those without dimensions, or without elements and chunks, are not shards."""
        if not bits.shape or not (bits.numel or self.layout.how.empty_chunks):
            return self._whole(bits)
        return Sharded(self._whole(bits), self.layout.placements(fqn, bits.shape))

    def _whole(self, bits: Bits) -> torch.Tensor:
        tensor = tensor_of(bits)
        if self.layout.turned and tensor.dim() > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        return tensor

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict: by name or by number, nested or flattened."""
        idle = idle_parameters(self.state, self.layout)
        keys = self._keys()
        states = {keys[p.fqn]: dict(self._states(p)) for p in self.state.trained if p.fqn not in idle}
        states = {key: found for key, found in states.items() if found}
        groups = [
            {**torch_value(dict(group)), "params": [keys[p.fqn] for p in self.state.of_group(number)]}
            for number, group in enumerate(self.state.groups or ())
        ]
        if self.layout.grammar != "flat":
            return {"state": states, "param_groups": groups}
        flat = {f"state.{key}.{name}": value for key, found in states.items() for name, value in found.items()}
        for group in groups:
            members = group.pop("params")
            flat |= {f"param_groups.{key}.{name}": value for key in members for name, value in group.items()}
        return flat

    def _keys(self) -> dict[str, Any]:
        if self.layout.grammar == "numbers":
            groups = range(len(self.state.groups or ()))
            ordered = [p.fqn for group in groups for p in self._in_order() if p.group == group]
            return {fqn: number for number, fqn in enumerate(ordered)}
        return {p.fqn: self.layout.optimizers_name(p.fqn) for p in self.state.trained}

    def _in_order(self) -> list[LogicalParameter]:
        owners = [n for n in self.state.order if n not in self.state.aliases and n not in self.state.buffers]
        return [self.state.parameter(n) for n in owners]

    def _states(self, parameter: LogicalParameter) -> Iterator[tuple[str, Any]]:
        step = self.state.steps[parameter.group or 0]
        if step is not None:
            yield "step", torch_value(step)
        for name in self.state.state_names:
            yield name, self.sharded(parameter.fqn, parameter.states[name])

    def beside(self) -> dict[str, Any]:
        """What a script saves beside model and optimizer."""
        values = {name: torch_value(value) for name, value in self.state.values.items()}
        if self.layout.grammar == "flat":  # every tensor at the root is the model's
            return {name: value if name == "lr_scheduler" else {"value": value} for name, value in values.items()}
        return values


def write_run(state: LogicalState, layout: Layout, directory: Path) -> None:
    """Write the files of a run as its framework does."""
    writer, how, grammar = StateDicts(state, layout), layout.how, layout.grammar
    model = writer.model()
    if grammar == "bare":
        save(model if layout.how.flatten is False else {"model": model}, directory, how)
    elif layout.folders:
        save({"model": model}, directory / "pytorch_model_fsdp_0", how)
        save({"optimizer": writer.optimizer()}, directory / "optimizer_0", how)
        _write_companions(writer.beside(), directory, of_trainer=grammar == "trainer", world=prod(how.mesh))
    elif grammar == "lightning":
        save({"model": model, "optimizer_0": writer.optimizer()}, directory, how)
        torch.save(lightning_meta(writer.beside()), directory / "meta.pt")
    elif grammar == "flat":
        save({**model, "optimizer": writer.optimizer(), **writer.beside()}, directory, how)
    elif grammar == "app":
        beside = writer.beside()
        inside = {k: v for k, v in beside.items() if layout.chance("inside", k).random() < 0.5}
        outside = {k: v for k, v in beside.items() if k not in inside}
        save({"app": {"model": model, "optim": writer.optimizer(), **inside}, **outside}, directory, how)
    else:
        save({"model": model, "optimizer": writer.optimizer(), **writer.beside()}, directory, how)


def _write_companions(values: dict[str, Any], directory: Path, *, of_trainer: bool, world: int) -> None:
    scheduler = values.pop("lr_scheduler", None)
    if scheduler is not None:
        torch.save(scheduler, directory / ("scheduler.pt" if of_trainer else "scheduler.bin"))
    random = {"step": 3, "random_state": (3, (1, 2), None), "torch_manual_seed": torch.zeros(8, dtype=torch.uint8)}
    for rank in range(world):
        one = "rng_state.pth" if world == 1 else f"rng_state_{rank}.pth"
        torch.save(random, directory / (one if of_trainer else f"random_states_{rank}.pkl"))
    if of_trainer:
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log_history": []}))
    elif values:
        torch.save(values, directory / "custom_checkpoint_0.pkl")


def lightning_meta(values: dict[str, Any]) -> dict[str, Any]:
    """Lightning's `meta.pt`: its checkpoint without weights and optimizer."""
    scheduler = values.pop("lr_scheduler", None)
    made = {"epoch": 2, "global_step": 3, "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {"n": [1]}}}
    return {**made, **values, "lr_schedulers": [] if scheduler is None else [scheduler]}
