"""Logical states as consolidated weights, written by the libraries that everyone writes them with.

Source: safetensors 0.8 `torch.save`, huggingface_hub 2.4.0 (shards, index, aliases in the metadata), transformers
5.23.0 (`pytorch_model.bin` and its index).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from laws.torch_values import tensor_of
from reshard_engine.testing.logical import Case, LogicalState, Saved
from reshard_engine.testing.strategies import Rules, evenly, logical_states


@dataclass(frozen=True)
class Layout:
    """How weights were saved.

    Attributes:
        shards: number of files; 1 for one without index.
        strided: torch only: matrices and larger tensors lie transposed in the file.
    """

    shards: int
    strided: bool


@dataclass(frozen=True)
class WeightsSource:
    """One of the two containers."""

    container: str
    """`safetensors` or `torch`."""
    full: bool = False

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.container} weights"

    @property
    def zoo(self) -> dict[str, float]:
        """Shards and, where the container has them, strides."""
        return {"shards": 0.02} | ({"strided tensor": 0.02} if self.container == "torch" else {})

    def cases(self) -> st.SearchStrategy[Case]:
        """Any model."""
        states = logical_states(Rules(max_groups=1))
        strided = evenly(False, True, True) if self.container == "torch" else st.just(value=False)
        layouts = st.builds(Layout, evenly(1, 1, 2, 3), strided)
        return st.tuples(layouts, states).map(lambda pair: Case(pair[1], pair[0]))

    def write(self, case: Case, directory: Path) -> Saved:
        """One file, or shards with an index."""
        state, layout = kept(case.state), case.layout
        tensors = _tensors(state, strided=layout.strided)
        labels = {self.name} | ({"shards"} if layout.shards > 1 else set())
        if any(not t.is_contiguous() for t in tensors.values()):
            labels.add("strided tensor")
        stem, suffix = ("model", "safetensors") if self.container == "safetensors" else ("pytorch_model", "bin")
        count = min(layout.shards, len(tensors))
        where: dict[str, str] = {}
        for number in range(count):
            mine = {n: t for i, (n, t) in enumerate(tensors.items()) if i % count == number}
            aliases = {a: o for a, o in state.aliases.items() if o in mine}
            name = f"{stem}.{suffix}" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.{suffix}"
            self._save(mine, aliases, directory / name)
            where |= dict.fromkeys(mine, name)
        if count > 1:
            size = sum(t.nbytes for t in tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": where}
            (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
        return Saved(state, frozenset(labels))

    def _save(self, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], path: Path) -> None:
        if self.container == "safetensors":
            path.write_bytes(save(dict(tensors), metadata={**aliases, "format": "pt"}))
        else:
            torch.save(OrderedDict({**tensors, **{a: tensors[o] for a, o in aliases.items()}}), path)

    def checks_metadata(self, case: Case) -> bool:
        """Archives have CRCs; a safetensors header and an index have none."""
        return self.container == "torch" and case.layout.shards == 1


def kept(state: LogicalState) -> LogicalState:
    """Weights and buffers alike: names with tensors, and nothing else."""
    parameters = tuple(replace(p, group=None, states={}) for p in state.parameters)
    return replace(state, parameters=parameters, groups=(), steps=(), values={}, optimizer_values={})


def _tensors(state: LogicalState, *, strided: bool) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for parameter in state.parameters:
        if parameter.weight is None:
            raise AssertionError("cases hold every weight")
        found[parameter.fqn] = tensor_of(parameter.weight)
    found |= {name: tensor_of(bits) for name, bits in state.buffers.items()}
    if strided:
        found = {n: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t for n, t in found.items()}
    return found
