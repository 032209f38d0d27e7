"""DeepSpeed under data parallelism as a source format: which runs and cuts are drawn, and what their files keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from laws.deepspeed_files import Layout, Stage, flat_groups, sub_groups, write_checkpoint
from laws.targets import rounded
from laws.torch_values import SCALER_MODULE
from reshard_engine.testing.logical import MASTER, Case, Instance, LogicalState, Saved
from reshard_engine.testing.strategies import Rules, evenly, logical_states


def _scaler(dtype: str, scale: float) -> Instance:
    if dtype != "float16":
        return Instance(f"{SCALER_MODULE}.LossScaler", {"cur_scale": scale, "dynamic": False})
    attributes = {
        "cur_scale": scale,
        "dynamic": True,
        "cur_iter": 3,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": 1,
        "cur_hysteresis": 1,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": Instance("torch.float16", {}),
    }
    return Instance(f"{SCALER_MODULE}.DynamicLossScaler", attributes)


def _optimizer_values(dtype: str, layout: Layout, scale: float, clip: float) -> dict[str, Any]:
    if layout.stage == 0 and dtype == "float32":
        return {}
    if layout.stage == 0:
        dynamic = {"last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 4} if dtype == "float16" else {}
        clips = {"clip_grad": clip} if layout.fused else {}
        return {"dynamic_loss_scale": dtype == "float16", "cur_scale": scale, "cur_iter": 3, **dynamic, **clips}
    if layout.stage == "bf16":
        return {"clip_grad": clip}
    scaler = {"loss_scaler": _scaler(dtype, scale), "dynamic_loss_scale": dtype == "float16", "overflow": False}
    return scaler if layout.stage == 3 else {**scaler, "clip_grad": clip}


def _config(state: LogicalState, layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 1 if layout.stage == "bf16" else layout.stage}
    zero |= {"round_robin_gradients": True} if layout.round_robin else {}
    zero |= {"parameter_alignment": True} if layout.alignment else {}
    zero |= {"sub_group_size": layout.sub_group_size} if layout.sub_group_size < 10**9 else {}
    enabled = {"bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}, "float32": {}}
    # List-form states keep no hyper-parameters; the configuration does.
    first = (state.groups or ({},))[0]
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in first.items()}
    optimizer = {"optimizer": {"type": "AdamW", "params": params}} if layout.elastic else {}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **optimizer, **enabled[state.dtype]}


@dataclass(frozen=True)
class DeepSpeedSource:
    """DeepSpeed under data parallelism at one stage."""

    stage: Stage
    full: bool = True

    @property
    def name(self) -> str:
        """For reports."""
        return {0: "DeepSpeed stage 0", "bf16": "BF16_Optimizer"}.get(self.stage, f"ZeRO-{self.stage}")

    @property
    def zoo(self) -> dict[str, float]:
        """Cuts that only some stages know."""
        cuts = {1: "alignment padding", 2: "round robin", 3: "sub-groups", 0: "fused master", "bf16": "uneven cut"}
        return {cuts[self.stage]: 0.02}

    def cases(self) -> st.SearchStrategy[Case]:
        """Any run that this stage can save."""
        cases = cases_of(self.stage, rules_of(self.stage))
        return cases.map(_with_rounded_weights) if self.stage == 0 else cases

    def write(self, case: Case, directory: Path) -> Saved:
        """`latest` and the tag directory."""
        state, layout = case.state, case.layout
        write_checkpoint(state, layout, directory)
        labels = {self.name, f"world {layout.world}", *_cut_labels(state, layout)}
        if layout.world > 1:
            labels.add("world 2 to 4" if layout.world < 5 else "world 5 to 9")
        return Saved(kept(state, layout), frozenset(labels), layout.frozen_late(state))

    def checks_metadata(self, case: Case) -> bool:
        """Archives have CRCs; legacy streams have none."""
        return bool(case.layout.zip_files)


def _with_rounded_weights(case: Case) -> Case:
    """A run whose weights are its masters, rounded: they prove the order of stage 0's numbers."""
    state = case.state
    settled = [p if p.group is None else replace(p, weight=rounded(p.value, state.dtype)) for p in state.parameters]
    return replace(case, state=replace(state, parameters=tuple(settled)))


def kept(state: LogicalState, layout: Layout) -> LogicalState:
    """What the files hold of a state."""
    if layout.stage == 3:
        saved = {p.fqn for p in layout.listed_frozen(state)}
        left = (p if p.fqn in saved else replace(p, weight=None) for p in state.parameters)
        state = replace(state, parameters=tuple(left))
    if layout.elastic:
        state = replace(state, groups=None)
    return state


def _cut_labels(state: LogicalState, layout: Layout) -> Iterator[str]:
    numels = [prod(p.shape) for p in state.trained]
    world = layout.world
    switches = {
        "round robin": layout.round_robin,
        "alignment padding": layout.alignment and any(any(f.pads) for f in flat_groups(state, layout)),
        "sub-groups": layout.stage == 3 and len(sub_groups(state, layout)) > len(state.groups or ()),
        "fused master": layout.fused,
        "legacy stream": not layout.zip_files,
        "elastic": layout.elastic,
        "frozen late": bool(layout.late and state.trained),
    }
    yield from (label for label, present in switches.items() if present)
    if layout.stage in {0, 3}:
        if world > 1 and (state.buffers or layout.stage == 0):
            yield "replicas"
        if layout.stage == 3 and any(n % world for n in numels):
            yield "uneven cut"
        if layout.stage == 3 and all(n <= (world - 1) * -(-n // world) for n in numels):
            yield "rank with nothing"
        return
    for flat in flat_groups(state, layout):
        length = -(-flat.used // (2 * world)) * 2 * world
        if length != flat.used:
            yield "uneven cut"
        if length // world * (world - 1) >= flat.used:
            yield "rank with nothing"


def rules_of(stage: Stage) -> Rules:
    """What a stage can hold."""
    if stage == 0:
        # States have no names: only shapes of their own tell parameters apart.
        return Rules(distinct_shapes=True, stepped=True)
    dtypes = ("bfloat16",) if stage == "bf16" else Rules().dtypes
    # Stage 3 stores frozen parameters in the model's type only.
    return replace(Rules(dtypes=dtypes), **({"frozen_dtypes": ()} if stage == 3 else {}))


def _cuts(stage: Stage) -> st.SearchStrategy[Layout]:
    never, seldom, often = st.just(value=False), evenly(*[False] * 5, True), evenly(False, True)
    zero12 = stage in {1, 2}
    # One seed gives every stage the same numbers: each begins to count its worlds elsewhere.
    first = 2 * [0, 1, 2, 3, "bf16"].index(stage)
    return st.builds(
        Layout,
        st.just(stage),
        evenly(*(1 + (first + n) % 9 for n in range(9))),
        round_robin=often if zero12 else never,
        alignment=often if zero12 else never,
        sub_group_size=evenly(10**9, 1, 1, 8) if stage == 3 else st.just(10**9),
        counter=evenly(*["state"] * 4, "group"),
        elastic=seldom if zero12 else never,
        fused=often if stage == 0 else never,
        zip_files=evenly(*[True] * 5, False),
        tag=st.sampled_from(["global_step3", "pytorch_model", "checkpoint", "タグ"]),
        late=evenly(0, 0, 1, 2) if stage in {2, 3} else st.just(0),
    )


@st.composite
def cases_of(draw: st.DrawFn, stage: Stage, rules: Rules) -> Case:
    """Runs at a stage within rules, each with a cut."""
    # The cut is drawn first and evenly; what does not go with the state that comes is given up.
    cut = draw(_cuts(stage))
    fused = cut.fused
    # One flat master keeps names only if it has one possible order: everything, in one group.
    state = draw(logical_states(replace(rules, frozen=False, max_groups=1, stepped=False) if fused else rules))
    has_states = bool(state.state_names) and not rules.stepped_adam
    elastic = cut.elastic and has_states
    layout = replace(
        cut,
        counter="group" if cut.counter == "group" and has_states and state.steps[0] is not None else "state",
        elastic=elastic,
        fused=fused and state.dtype != "float32",
    )
    if elastic:
        layout = replace(layout, counter="state")
    if stage == 0 and state.dtype == "float32":
        # There is no master beside the weight: the weight is it.
        same = [replace(p, states={**p.states, MASTER: p.weight}) if p.states else p for p in state.parameters]
        state = replace(state, parameters=tuple(same))
    scale, clip = draw(st.sampled_from([1.0, 65536.0, 0.5])), draw(st.sampled_from([0.0, 0.5, 1.0]))
    state = replace(
        state,
        values={**state.values, "ds_config": _config(state, layout)},
        optimizer_values=_optimizer_values(state.dtype, layout, scale, clip),
    )
    return Case(state, layout)


STAGES = tuple(DeepSpeedSource(stage) for stage in (0, 1, 2, 3, "bf16"))
