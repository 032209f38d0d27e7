"""Runs of Megatron-core as it saves them with `fully_reshardable`, shifted by its mistake (Megatron-LM#5077) or not.

Each rank's buffer is gathered as a list of real elements, bucket after bucket without the padding at their ends, and
slices are cut out of it as `sharded_param_state_fully_reshardable` cuts them. No rule of shifts is written down here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from house.megatron_runs import (
    EMBEDDING,
    OUTPUT,
    STATES,
    MegatronRun,
    Vector,
    _Writer,  # pyright: ignore[reportPrivateUsage]
    entry_of,
)

_Boxes = list[tuple[tuple[int, ...], torch.Tensor]]


@dataclass(frozen=True)
class ShiftedRun(MegatronRun):
    """A run whose moments are numbers of their own for each element, so that any place of one can be found."""

    unit: int = 128
    """Buckets end at multiples of it: 65,536 with `pad_buckets_for_high_nccl_busbw`."""
    flat: bool = False
    """True for masters that are all the same number."""
    dtype: torch.dtype = torch.bfloat16

    @cached_property
    def truth(self) -> dict[str, dict[str, torch.Tensor]]:
        """Masters, moments and weights of the whole model, with the padding of the vocabulary."""
        made = torch.Generator().manual_seed(self.seed)
        found: dict[str, dict[str, torch.Tensor]] = {}
        first = 1.0
        for name, shape in self.shapes().items():
            master = torch.ones(shape) if self.flat else torch.randn(shape, generator=made)
            number = torch.arange(first, first + master.numel()).reshape(shape)
            first += master.numel()
            found[name] = {
                "param": master, "exp_avg": number, "exp_avg_sq": number + 0.5, "weight": master.to(self.dtype)
            }  # fmt: skip
        assert first < 1 << 22
        return found

    def padded(self, vector: Vector, ranks: int) -> tuple[list[tuple[str, int, int, int]], list[tuple[int, int]]]:
        """Slots and buckets of a buffer whose buckets end at multiples of `unit`."""
        step = math.lcm(ranks, 128, self.unit)
        begins: list[tuple[int, int]] = []
        at = 0
        for begin, _ in vector.buckets:
            number = len(begins)
            stop = -(-(at + vector.unpadded[number]) // step) * step
            begins.append((at, begin))
            at = stop
        ends = [*(new for new, _ in begins[1:]), at]
        slots = [
            (name, a - begins[b][1] + begins[b][0], z - begins[b][1] + begins[b][0], b)
            for name, a, z, b in vector.slots
        ]
        return slots, [(new, end) for (new, _), end in zip(begins, ends, strict=True)]

    def cut_out(self, state: str, *, right: bool) -> dict[str, dict[int, torch.Tensor]]:
        """The parts of a state that each tensor-parallel rank saves, by the names of parameters."""
        found: dict[str, dict[int, torch.Tensor]] = {}
        for stage in range(self.pipeline):
            for expert_rank in range(self.expert_ranks):
                for of_experts in (False, True)[: len(self.groups())]:
                    ranks = self.data // self.expert_ranks if of_experts else self.data
                    for vector in self.buffers(stage, expert_rank, of_experts=of_experts):
                        slots, buckets = self.padded(vector, ranks)
                        for rank in range(self.tensor):
                            self._cut_out(found, state, rank, vector, (slots, buckets), right=right)
        return found

    def _cut_out(
        self,
        found: dict[str, dict[int, torch.Tensor]],
        state: str,
        rank: int,
        vector: Vector,
        layout: tuple[list[tuple[str, int, int, int]], list[tuple[int, int]]],
        *,
        right: bool,
    ) -> None:
        slots, buckets = layout
        whole = torch.zeros(buckets[-1][1])
        for name, begin, end, _ in slots:
            whole[begin:end] = self.part(name, state, rank).reshape(-1)
        gathered = torch.cat([whole[begin : begin + n] for (begin, _), n in zip(buckets, vector.unpadded, strict=True)])
        for name, begin, end, _ in slots:
            taken = whole[begin:end] if right else gathered[begin:end]
            taken = torch.nn.functional.pad(taken, (0, end - begin - len(taken)))
            if not (name == OUTPUT and self.tied):  # the last stage's copy of the embedding is not saved
                found.setdefault(name, {})[rank] = taken.reshape(self.part(name, state, rank).shape)

    def save(self, root: Path, *, right: bool = False, change: Mapping[str, Any] | None = None) -> Path:
        """Write the directory of an iteration; returns it.

        Args:
            root: The directory of the run.
            right: True for states that are not shifted.
            change: Tensors to put in place of those of the whole parameter, by `NAME/STATE`.
        """
        place = root / "iter_0000007"
        place.mkdir(parents=True)
        writer = _Writer(place)
        kinds: dict[str, dict[str, dict[int, torch.Tensor]]] = {
            "": {n: {r: self.part(n, "weight", r) for r in range(self.tensor)} for n in self.shapes()}
        }
        kinds |= {f"optimizer.state.{state}.": self.cut_out(state, right=right) for state in STATES}
        for prefix, parts in kinds.items():
            for key, whole, boxes in self._entries(parts, prefix, change or {}):
                for offsets, part in boxes:
                    writer.chunk(f"{prefix}{key}", whole, offsets, part, 0)
        sharding = "fully_reshardable"
        groups = [group for of in self.groups() for group in of]
        common = {
            "args": self.args(), "checkpoint_version": 3.0, "iteration": 7,
            "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": sharding},
            "opt_param_scheduler": {"num_steps": 56}, "content_metadata": {"distrib_optim_sharding_type": sharding},
        }  # fmt: skip
        torch.save(common, place / "common.pt")
        (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        writer.close()
        return place

    def _entries(
        self, parts: Mapping[str, Mapping[int, torch.Tensor]], prefix: str, change: Mapping[str, Any]
    ) -> Iterator[tuple[str, tuple[int, ...], _Boxes]]:
        state = prefix.removeprefix("optimizer.state.").rstrip(".") or "weight"
        keys = _keys_of(self)
        for key, whole, boxes in self._model_entries():
            made: _Boxes = []
            for name, index in keys[key].items():
                held = parts[name]
                if (other := change.get(f"{name}/{state}")) is not None:
                    held = {r: self._part_of(name, other, r) for r in range(self.tensor)}
                made += [((*index, *at), part[(None,) * len(index)]) for at, part in self._cut(name, held)]
            assert [at for at, _ in made] == [at for at, _ in boxes]
            yield key, whole, made

    def _part_of(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        kept = self.truth[name]["param"]
        self.truth[name]["param"] = whole
        try:
            return self.part(name, "param", rank)
        finally:
            self.truth[name]["param"] = kept

    def _cut(self, name: str, parts: Mapping[int, torch.Tensor]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """The chunks of a parameter: rows or columns of each rank, both halves of gated units; or what all hold."""
        shape = self.shapes()[name]
        zero = (0,) * len(shape)
        gated = name.endswith("linear_fc1.weight")
        if parts[0].shape == shape and not gated:
            yield zero, parts[0]
            return
        dim = 1 if "linear_proj" in name or "linear_fc2" in name else 0
        pieces = (
            [h for at in range(2) for r in range(self.tensor) for h in [parts[r].chunk(2)[at]]]
            if gated
            else [parts[r] for r in range(self.tensor)]
        )
        for at, part in enumerate(pieces):
            yield (*zero[:dim], at * part.shape[dim], *zero[dim + 1 :]), part


def _keys_of(run: MegatronRun) -> dict[str, dict[str, tuple[int, ...]]]:
    """The keys of the model's entries, each with the names in it and their places along the axes in front."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in run.shapes():
        key, index = entry_of(name)
        found.setdefault(key, {})[name] = index
    return found


def lost_elements(run: ShiftedRun, place: str = "exp_avg") -> dict[str, torch.Tensor]:
    """By name, True for each element of a moment that no slice of the shifted save holds; found by its number."""
    parts = run.cut_out(place, right=False)
    there: set[float] = set()
    for name, ranks in parts.items():
        whole = len(ranks) == 1 or run.part(name, "param", 0).shape == run.shapes()[name]
        for rank, part in ranks.items():
            if rank == 0 or not whole:  # of parameters that are not cut, the first rank's are saved
                there |= set(part.reshape(-1).tolist())
    held = torch.tensor(sorted(there))
    found = {n: ~torch.isin(states[place], held) for n, states in run.truth.items()}
    for name in (EMBEDDING, OUTPUT):
        if name in found:
            found[name] = found[name][: run.vocabulary]
    return found
