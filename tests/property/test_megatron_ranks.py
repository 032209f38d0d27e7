"""The parts that ranks of Megatron-core hold, for random models and layouts: every element, and its place.

The truth is `MegatronRun`, which writes the rules down on its own.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from house.megatron_runs import EMBEDDING, MegatronRun, Vector, laid_out
from reshard.choices import OpaquePolicy
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.megatron.common import CommonState
from reshard_engine.formats.megatron.model import MegatronFacts
from reshard_engine.formats.megatron.placement import Run
from reshard_engine.formats.megatron.ranks import GradientBuffer, LocalModels, Runs
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location
from reshard_engine.tensors.layout import ZEROS

KINDS = {"fp32": "param"}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[MegatronRun, MegatronRun]:
    """One model in two layouts."""
    layers = draw(st.sampled_from([4, 8]))
    hidden = draw(st.sampled_from([6, 12]))
    vocabulary = draw(st.integers(8, 12))
    experts = draw(st.sampled_from([0, 0, 4]))
    model = MegatronRun(
        layers=layers, hidden=hidden, vocabulary=vocabulary, experts=experts, tied=draw(st.booleans()),
        said={"accumulate_allreduce_grads_in_fp32": True},
    )  # fmt: skip

    return draw(laid_out(model)), draw(laid_out(model))


def checkpoint_of(place: Path) -> Checkpoint:
    return read_checkpoint(open_location(str(place)), None, OpaqueLedger(OpaquePolicy.DROP))


def models_of(checkpoint: Checkpoint, run: MegatronRun, **changed: object) -> LocalModels:
    assert isinstance(checkpoint.facts, MegatronFacts)
    args = {**checkpoint.facts.common.args, **vars(run.args()), **changed}
    common = CommonState(checkpoint.facts.common.items, args)
    return LocalModels(checkpoint, Run.of(common), divisor=run.rows // run.tensor)


class Elements:
    """The values of a checkpoint's tensors, and how often each element was taken."""

    def __init__(self, checkpoint: Checkpoint, models: LocalModels, run: MegatronRun) -> None:
        self._models, self._first = models, len(checkpoint.shard_map.tensors)
        self._values: dict[int, np.ndarray] = {}
        self.taken: dict[int, np.ndarray] = {}
        self.names: dict[int, str] = {}
        for p in checkpoint.parameters:
            assert p.weight is not None
            truth = run.truth[p.fqn]
            for state, number in {**p.states, "weight": p.weight}.items():
                values = truth[KINDS.get(state, state)].float().numpy()
                self._add(p.fqn, number, values[: p.shape[0]])
                if state in p.padding:
                    self._add(f"{p.fqn} (padding)", p.padding[state], values[p.shape[0] :])

    def _add(self, name: str, number: int, values: np.ndarray) -> None:
        self.names[number] = name
        self._values[number] = values.reshape(-1)
        self.taken[number] = np.zeros(values.size, dtype=np.int64)

    def of(self, runs: Runs, *, count: bool = True) -> torch.Tensor:
        """The elements of runs."""
        found: list[np.ndarray] = []
        for number, begin, end in runs:
            if number == ZEROS:
                found.append(np.zeros(end - begin, dtype=np.float32))
            elif number < self._first:
                found.append(self._take(number, begin, end, count))
            else:
                held = self._models.parts[number - self._first][1].runs(begin, end)
                for tensor, source, length in zip(held.tensor, held.source, held.length, strict=True):
                    found.append(self._take(int(tensor), int(source), int(source + length), count))
        return torch.from_numpy(np.concatenate(found))

    def _take(self, number: int, begin: int, end: int, count: bool) -> np.ndarray:
        self.taken[number][begin:end] += count
        return self._values[number][begin:end]


def copies_of(name: str, run: MegatronRun) -> int:
    """The ranks that hold the same element."""
    whole = any(part in name for part in ("layernorm", "router"))
    shared = run.expert_ranks == 1 or ".experts." not in name
    tied = run.tied and run.pipeline > 1 and name.startswith(EMBEDDING)
    return (run.tensor if whole else 1) * (run.expert_ranks if shared else 1) * (2 if tied else 1)


def places(buffer: GradientBuffer) -> list[tuple[str, int, int, int]]:
    return [(buffer.held[s.name].key, s.bucket, s.begin, s.end) for s in buffer.slots]


def wanted_places(vector: Vector, local: dict[str, str]) -> list[tuple[str, int, int, int]]:
    first = [begin for begin, _ in vector.buckets]
    return [(local[n], at, begin - first[at], end - first[at]) for n, begin, end, at in vector.slots]


@settings(max_examples=30, deadline=None)
@given(pairs(), st.sampled_from(["legacy", "torch_dist"]))
def test_ranks_hold_every_element_where_the_run_has_it(runs: tuple[MegatronRun, MegatronRun], kind: str) -> None:
    source, run = runs
    with tempfile.TemporaryDirectory() as place:
        saved = source.save_legacy(Path(place)) if kind == "legacy" else source.save_torch_dist(Path(place))
        checkpoint = checkpoint_of(saved)
    models = models_of(checkpoint, run)
    elements = Elements(checkpoint, models, source)
    for rank in models.run.ranks():
        held = models.chunks(rank)
        wanted = [run.held(rank.stage, chunk, rank.expert) for chunk in range(run.chunks)]
        assert [[h.key for h in chunk] for chunk in held] == [[key for _, key in chunk] for chunk in wanted]
        for one, (name, _) in zip((h for c in held for h in c), (w for c in wanted for w in c), strict=True):
            for state, runs_ in {**one.states, "weight": one.weight}.items():
                part = run.part(name, KINDS.get(state, state), rank.tensor)
                assert one.shape == part.shape
                assert torch.equal(elements.of(runs_).reshape(one.shape), part.float()), (rank, name, state)
        for of_experts in (False, True)[: len(run.groups())]:
            vectors = [*run.buffers(rank.stage, rank.expert, of_experts=of_experts)]
            buffers = models.buffers(rank, of_experts=of_experts)
            local = [dict(chunk) for chunk in wanted]
            for chunk, (vector, buffer) in enumerate(zip(vectors, buffers, strict=True)):
                assert places(buffer) == wanted_places(vector, local[chunk])
                assert [b.unpadded for b in buffer.buckets] == vector.unpadded
                assert [b.numel for b in buffer.buckets] == [end - begin for begin, end in vector.buckets]
                assert buffer.states() == ["fp32", "exp_avg", "exp_avg_sq"]
                for bucket, length in enumerate(vector.unpadded):
                    values = elements.of(buffer.runs(bucket, "fp32"), count=False)
                    assert len(values) == length
                    for name, begin, end, at in vector.slots:
                        if at == bucket:
                            first = vector.buckets[bucket][0]
                            part = run.part(name, "param", rank.tensor).reshape(-1)
                            assert torch.equal(values[begin - first : end - first], part)
    for number, taken in elements.taken.items():
        name = elements.names[number]
        assert (taken == copies_of(name, run)).all(), (name, Counter(taken.tolist()))
