"""Files with whole tensors as source formats: one of a script, whose optimizer numbers or names, and Accelerate's two.

Source: torch 2.13.0 `optim/optimizer.py` (`state_dict`); accelerate 1.15.0 `utils/fsdp_utils.py` (FULL_STATE_DICT).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import strategies as st

from laws.dcp_files import Save
from laws.dcp_kept import with_zeros
from laws.dcp_layout import Layout
from laws.dcp_runs import as_run, idle_parameters
from laws.dcp_state_dicts import _write_companions
from laws.torch_values import tensor_of, torch_value, tree_of
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.testing.logical import Bits, Case, LogicalParameter, LogicalState, Saved, Tree
from reshard_engine.testing.strategies import Rules, evenly, logical_states

_RULES = Rules(dtypes=("float32",), frozen_dtypes=("uint8", "float32", "bfloat16"))
_FILE = "checkpoint.pt"
Form = Literal["numbers", "names", "pair"]


@dataclass(frozen=True)
class WholeSource:
    """Files in which every tensor is whole.

    Attributes:
        name: for reports.
        form: one file whose optimizer has numbers or names, or one file of the model and one of its optimizer.
        full: they hold the optimizer.
    """

    name: str
    form: Form
    full: bool = True

    @property
    def zoo(self) -> Mapping[str, float]:
        """Orders of numbers that no rule gives."""
        return {"tied weights": 0.02} | ({"numbers out of order": 0.05} if self.form == "numbers" else {})

    def cases(self) -> st.SearchStrategy[Case]:
        """Runs of one process, or of ranks of which one saved everything."""
        return _cases(pair=self.form == "pair")

    def write(self, case: Case, directory: Path) -> Saved:
        """The directory that a user names."""
        run = _Run(case.state, case.layout, self.form)
        if self.form == "pair":
            torch.save(run.model(), directory / "pytorch_model_fsdp.bin")
            torch.save(run.optimizer(), directory / "optimizer.bin")
            _write_companions(run.beside(), directory, of_trainer=False, world=1)
        else:
            torch.save({"model": run.model(), "optimizer": run.optimizer(), **run.beside()}, directory / _FILE)
        return run.saved(self.name)

    def checks_metadata(self, case: Case) -> bool:
        """Archives have CRCs."""
        return True


@dataclass(frozen=True)
class _Run:
    """A run, and what the files hold of it."""

    state: LogicalState
    layout: Layout
    form: Form

    @property
    def idle(self) -> frozenset[str]:
        """Parameters without states."""
        return idle_parameters(self.state, self.layout)

    def _bits(self, name: str) -> Bits:
        owner = self.state.aliases.get(name, name)
        bits = self.state.buffers.get(owner) or self.state.parameter(owner).weight
        if bits is None:
            raise AssertionError("cases hold every weight")
        return bits

    def _tensor(self, bits: Bits) -> torch.Tensor:
        tensor = tensor_of(bits)
        turned = self.layout.turned and tensor.dim() > 1
        return tensor.transpose(0, -1).contiguous().transpose(0, -1) if turned else tensor

    def model(self) -> dict[str, torch.Tensor]:
        """The model's state dict, in which tied names are one memory."""
        found = {n: self._tensor(self._bits(n)) for n in self.state.order}
        return {n: found[self.state.aliases.get(n, n)] for n in found}

    def order(self) -> list[str]:
        """The optimizer's parameters as they are numbered: groups in order, each in an order of its own."""
        found: list[str] = []
        for number in range(len(self.state.groups or ())):
            members = [p.fqn for p in self.state.of_group(number)]
            if self.form == "numbers":
                self.layout.chance("order", number).shuffle(members)
            found += members
        return found

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict."""
        order = self.order()
        keys: dict[str, Any] = {n: i if self.form == "numbers" else n for i, n in enumerate(order)}
        groups = [
            {
                **torch_value(dict(group)),
                "params": [keys[n] for n in order if self.state.parameter(n).group == number],
            }
            for number, group in enumerate(self.state.groups or ())
        ]
        states = {keys[n]: dict(self._states(n)) for n in order if n not in self.idle}
        return {"state": {key: held for key, held in states.items() if held}, "param_groups": groups}

    def _states(self, name: str) -> Iterator[tuple[str, Any]]:
        parameter = self.state.parameter(name)
        if (step := self.state.steps[parameter.group or 0]) is not None:
            yield "step", torch_value(step)
        yield from ((s, self._tensor(parameter.states[s])) for s in self.state.state_names)

    def beside(self) -> dict[str, Any]:
        """What a script saves beside model and optimizer."""
        return {name: torch_value(value) for name, value in self.state.values.items()}

    def saved(self, name: str) -> Saved:
        """What the files hold, and what the user says of it."""
        state = self.state
        trained = {p.fqn: p for p in state.trained}
        ties = {a: o for a, o in state.aliases.items() if self._bits(o).numel}
        loose = [n for n in state.order if n not in trained and n not in ties]
        floats = [n for n in loose if n in state.buffers and BY_NAME[self._bits(n).dtype].trainable]
        buffers = {n: self._bits(n) for n in loose if n in floats or not BY_NAME[self._bits(n).dtype].trainable}
        parameters = [
            trained.get(n) or LogicalParameter(n, self._bits(n).shape, None, self._bits(n), {})
            for n in state.order
            if n not in ties and n not in buffers
        ]
        found = replace(state, parameters=tuple(parameters), buffers=buffers, aliases=ties, values=self._values())
        choices: dict[str, Any] = {"buffers": ",".join(floats) or "none"}
        order = self.order()
        if self.form == "numbers" and order:
            choices["param_order"] = order
        labels = {name, *self._labels(order)}
        return Saved(with_zeros(found, self.idle), frozenset(labels), frozenset(), self.idle, choices=choices)

    def _values(self) -> dict[str, Tree]:
        values = tree_of(self.beside())
        if self.form != "pair":
            return dict(values)
        scheduler = {k: values.pop(k) for k in ("lr_scheduler",) if k in values}
        return {**scheduler, **({"custom_checkpoint_0.pkl": values} if values else {})}

    def _labels(self, order: list[str]) -> Iterator[str]:
        if self.layout.turned and any(len(p.shape) > 1 and p.shape[0] > 1 < p.shape[-1] for p in self.state.parameters):
            yield "strided storage"
        if self.idle:
            yield "never updated"
        if order != [p.fqn for i in range(len(self.state.groups or ())) for p in self.state.of_group(i)]:
            yield "numbers out of order"


def _is_like_a_model(value: Tree) -> bool:
    """True for a mapping of names to tensors, which a reader takes for a further model."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(v, Bits) and isinstance(k, str) for k, v in value.items())


@st.composite
def _cases(draw: st.DrawFn, *, pair: bool) -> Case:
    layout = Layout(
        "accelerate" if pair else "nested",
        ("shard",),
        Save((1,)),
        wrapper="",
        idle=draw(evenly(False, False, True)),
        turned=draw(evenly(False, False, True)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    drawn = draw(logical_states(_RULES))
    state = as_run(drawn, layout)
    if not idle_parameters(state, layout):  # then nothing needs to say that the optimizer is torch's
        layout = replace(layout, idle=False)
        state = as_run(drawn, layout)
    return Case(replace(state, values={k: v for k, v in state.values.items() if not _is_like_a_model(v)}), layout)


WHOLE_SOURCES = (
    WholeSource("a script's file of numbers", "numbers"),
    WholeSource("a script's file of names", "names"),
    WholeSource("full files of Accelerate", "pair"),
)
