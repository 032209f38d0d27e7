"""The loss scale of fp16 between DeepSpeed and Megatron-core: from the same state both go through the same scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, strategies as st

from reshard_engine.checkpoint import LossScale
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, _entries_of
from reshard_engine.pickles.nodes import Node, PObject, mapping_items

STATES = st.builds(
    LossScale,
    scale=st.sampled_from([2.0**4, 2.0**10]),
    good_steps=st.integers(-1, 4),
    overflows=st.integers(1, 3),
    window=st.integers(5, 7),
    hysteresis=st.integers(3, 4),
    least=st.just(1.0),
)


def of_megatron(state: LossScale, flags: Sequence[bool]) -> list[float]:
    """The scales after each step, by Megatron-core's rule (`DynamicGradScaler.update`)."""
    scale, good, left, found = state.scale, state.good_steps, state.overflows, list[float]()
    for overflow in flags:
        if overflow:
            good, left = 0, left - 1
            scale = max(scale * 0.5, state.least or 0.0) if left <= 0 else scale
        else:
            good += 1
            if good == state.window:
                good, left, scale = 0, state.hysteresis, scale * 2.0
        found.append(scale)
    return found


def of_deepspeed(entries: dict[str, Node], flags: Sequence[bool]) -> list[float]:
    """The scales after each step, by DeepSpeed's rule (`DynamicLossScaler.update_scale`)."""
    scaler = entries["loss_scaler"]
    assert isinstance(scaler, PObject)
    said: dict[str, float] = {
        str(k): v for k, v in mapping_items(scaler.state, what="").items() if isinstance(v, int | float)
    }
    found = list[float]()
    for overflow in flags:
        if overflow:
            if said["delayed_shift"] == 1 or said["cur_hysteresis"] == 1:
                said["cur_scale"] = max(said["cur_scale"] / said["scale_factor"], said["min_scale"])
            else:
                said["cur_hysteresis"] -= 1
            said["last_overflow_iter"] = said["cur_iter"]
        else:
            stable = said["cur_iter"] - said["last_overflow_iter"] - 1
            if stable > 0 and stable % said["scale_window"] == 0:
                said["cur_hysteresis"] = said["delayed_shift"]
                said["cur_scale"] *= said["scale_factor"]
        said["cur_iter"] += 1
        found.append(said["cur_scale"])
    return found


@given(STATES, st.lists(st.booleans(), max_size=4), st.integers(0, 30))
def test_both_go_through_the_same_scales(state: LossScale, flags: list[bool], steps: int) -> None:
    """Until the first overflow after which the scale grows: DeepSpeed counts one good step more behind an overflow."""
    quiet = [False] * (state.window - state.good_steps)
    entries = _entries_of(state, steps)
    assert of_deepspeed(dict(entries), quiet) == of_megatron(state, quiet)
    assert of_deepspeed(dict(_entries_of(state, None)), quiet) == of_megatron(state, quiet)
    assert of_deepspeed(dict(entries), flags[: state.window - 4]) == of_megatron(state, flags[: state.window - 4])


@given(STATES, st.integers(0, 30))
def test_a_scale_comes_back_as_it_was(state: LossScale, steps: int) -> None:
    facts = DeepSpeedFacts(optimizer_entries=_entries_of(state, steps))
    found = facts.loss_scale()
    assert found is not None
    assert found.entries == ("optimizer_state_dict.loss_scaler", "optimizer_state_dict.dynamic_loss_scale")
    assert replace(found, entries=()) == state


def test_a_scale_that_is_not_all_known_is_none() -> None:
    whole = _entries_of(LossScale(16.0, 2, 2, 5, 2, 1.0), 3)
    scaler = whole["loss_scaler"]
    assert isinstance(scaler, PObject)
    items = mapping_items(scaler.state, what="")

    def scale(**changes: Node) -> LossScale | None:
        from reshard_engine.pickles.nodes import mapping_of

        held = {k: v for k, v in {**items, **changes}.items() if v is not None}
        return DeepSpeedFacts(
            optimizer_entries={**whole, "loss_scaler": replace(scaler, state=mapping_of(held))}
        ).loss_scale()

    assert scale() is not None
    for changes in (
        {"consecutive_hysteresis": True}, {"scale_factor": 1.5}, {"cur_scale": "16"}, {"scale_window": 0},
        {"last_overflow_iter": 3}, {"cur_iter": None}, {"cur_hysteresis": 1.5},
    ):  # fmt: skip
        assert scale(**changes) is None
    least = scale(min_scale=None)
    assert least is not None
    assert least.least is None
    static = DeepSpeedFacts(optimizer_entries={**whole, "dynamic_loss_scale": False})
    assert static.loss_scale() is None
    # Optimizers of stage 0 keep plain entries and no hysteresis.
    plain = {
        "dynamic_loss_scale": True, "cur_scale": 16.0, "cur_iter": 3, "last_overflow_iter": -1, "scale_factor": 2.0,
        "scale_window": 5,
    }  # fmt: skip
    found = DeepSpeedFacts(optimizer_entries={**plain}).loss_scale()
    assert found is not None
    assert (found.good_steps, found.overflows, found.hysteresis, found.least) == (2, 1, 1, None)
