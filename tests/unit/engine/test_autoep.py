"""Fused experts as metadata describe them: any placement, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from house.expected import raised
from reshard.errors import SourceError
from reshard_engine.checkpoint import Parameter, Scalar
from reshard_engine.formats.deepspeed.parallel.experts import FusedExperts, fused_experts, sharing_ranks
from reshard_engine.pickles.nodes import node_of
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.shard_map import ShardMapBuilder

NAME = "layers.0.moe.experts.w1"


def _entry(ranks: list[list[int]] | None, **more: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"expert_key_prefix": "layers.0.moe.experts", "num_experts": 4, "ep_size": 2}
    if ranks is not None:
        held = [{"rank": r, "experts": experts} for r, experts in enumerate(ranks)]
        entry["expert_placement"] = {"version": 1, "num_experts": 4, "ep_size": 2, "ranks": held}
    return entry | more


def _fused(*entries: dict[str, Any], **more: Any) -> FusedExperts:
    model: Any = SimpleNamespace(entries={"ds_autoep_layers": node_of(list(entries)), **more})
    return fused_experts(model)


def _parts(fused: FusedExperts, *, second_step: float = 3.0) -> tuple[ShardMapBuilder, list[Parameter]]:
    """Each rank's part of one parameter as the reader registers it, in files of its own."""
    builder, members = ShardMapBuilder(), []
    for rank, step in ((0, 3.0), (1, second_step)):
        ((name, shape),) = fused.parts(((NAME, (2, 3)),), rank)
        number = builder.tensor(name, "fp32", FLOAT32, shape)
        builder.whole(number, file=rank, offset=0)
        members.append(Parameter(name, shape, 0, None, {"fp32": number}, {"step": Scalar(step)}))
    return builder, members


@pytest.mark.parametrize("ranks", [None, [[0, 1], [2, 3]], [[3, 0], [1, 2]], [[1, 3], [0, 2]]])
def test_experts_stand_where_their_numbers_say(ranks: list[list[int]] | None) -> None:
    fused = _fused(_entry(ranks))
    builder, members = _parts(fused)
    (whole,) = fused.joined(builder, members)
    assert (whole.fqn, whole.shape) == (NAME, (4, 3))
    shard_map = builder.build()
    held = ranks or [[0, 1], [2, 3]]
    for expert in range(4):
        rank = next(r for r, experts in enumerate(held) if expert in experts)
        pieces = shard_map.pieces(whole.states["fp32"], expert * 3, expert * 3 + 3)
        assert pieces.file.tolist() == [rank]
        assert pieces.offset.tolist() == [held[rank].index(expert) * 12]


def test_one_rank_with_all_experts_needs_no_view() -> None:
    fused = _fused(_entry(None, ep_size=1))
    assert fused.parts(((NAME, (4, 3)), ("norm", (3,))), 0) == ((f"{NAME}@ep0", (4, 3)), ("norm", (3,)))
    assert fused.whole(((NAME, (4, 3)), ("norm", (3,)))) == ((NAME, (4, 3)), ("norm", (3,)))


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (_entry([[0, 1], [1, 2, 3]]), "source.unsupported"),
        (_entry([[0, 1], [2]]), "source.unsupported"),
        (_entry([[0, 1, 2, 3]]), "checkpoint.malformed"),
        (_entry([[0, 1], [2, -3]]), "rules.invalid"),
        (_entry(None, num_experts=0), "rules.invalid"),
        (_entry(None, num_experts=1 << 20), "checkpoint.malformed"),
        (_entry(None, ep_size=3), "source.unsupported"),
        (_entry(None, expert_placement={"version": 2}), "source.unsupported_version"),
        (_entry(None, expert_key_prefix=7), "checkpoint.malformed"),
        (_entry(None, expert_key_prefix="../x"), "name.invalid"),
    ],
)
def test_what_is_not_understood_is_refused(entry: dict[str, Any], code: str) -> None:
    assert raised(SourceError, _fused, entry).code == code


def test_experts_that_tensor_parallelism_cuts_are_refused() -> None:
    with pytest.raises(SourceError, match="folding"):
        _fused(_entry(None), folding=node_of({"tp_size": 2}))
    with pytest.raises(SourceError, match="twice"):
        _fused(_entry(None), _entry(None))


def test_ranks_of_several_steps_are_refused() -> None:
    fused = _fused(_entry(None))
    builder, members = _parts(fused, second_step=4.0)
    with pytest.raises(SourceError, match="expert-parallel rank 1 has other states or counters") as caught:
        fused.joined(builder, members)
    assert caught.value.code == "checkpoint.mixed"
    with pytest.raises(SourceError, match="has 1 of 2 parts"):
        fused.joined(builder, members[:1])
    with pytest.raises(SourceError, match="2, 2"):
        fused.parts(((NAME, (3, 3)),), 0)


def test_a_missing_expert_is_no_smaller_layer() -> None:
    fused, builder = _fused(_entry(None)), ShardMapBuilder()
    table = {f"{NAME}.{expert}": builder.tensor("", "weight", FLOAT32, (3, 5)) for expert in range(4)}
    assert builder.tensors[fused.whole_weights(builder, table)[NAME]].shape == (4, 3, 5)
    del table[f"{NAME}.2"]
    with pytest.raises(SourceError, match="3 of 4 experts") as caught:
        fused.whole_weights(builder, table)
    assert caught.value.code == "checkpoint.incomplete"
    assert fused.whole_weights(builder, {"norm": 0}) == {"norm": 0}


def _ranks(*stated: list[int]) -> Any:
    def state(ranks: list[int]) -> Any:
        inner = {"optimizer_state_dict": {"ds_zero_partition_groups": [{"partition_ranks": ranks}]}}
        return SimpleNamespace(torch_file=SimpleNamespace(root=node_of(inner), file=SimpleNamespace(name="f")))

    return [state(ranks) for ranks in stated]


def test_ranks_say_with_whom_they_share() -> None:
    assert sharing_ranks(_ranks([0, 2], [1, 3], [0, 2], [1, 3]), 0) == [(0, 2), (1, 3)]
    assert sharing_ranks(_ranks([0, 1], [0, 1], [2, 3], [2, 3]), 0) == [(0, 1), (2, 3)]
    for wrong in (([0, 2], [0, 3], [0, 2], [1, 3]), ([0, 1], [1], [2, 3], [2, 3])):
        assert raised(SourceError, sharing_ranks, _ranks(*wrong), 0).code == "checkpoint.mixed"
    with pytest.raises(SourceError, match="does not say that it shares sub-group 1"):
        sharing_ranks(_ranks([0]), 1)
