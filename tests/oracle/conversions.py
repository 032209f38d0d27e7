"""Conversions of the zoo by our engine, once per session, and what must come out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from oracle.cases import CASES, Case, Stage
from oracle.driver import Trained
from oracle.fixtures import TrainedFactory
from oracle.outputs import Universal, cast, convert, plain, raw, read_universal
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, RawTensor, Resumed, Truth, differences, meta_differences

MODULE_KINDS = ("module", "frozen", "buffer")
UNIVERSAL_CASES = tuple(name for name in CASES if name != "z0_before_first_step")
# At stage 3 the loader loses the second group's hyper-parameters: tests of their own.
TWO_GROUPS_AT_STAGE_3 = ("z3_two_groups", "z3_sub_groups_two_groups")
_ADAM_STATES = ("exp_avg", "exp_avg_sq")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
_SPREAD_CASES = ("z1_bf16", "z2_bf16", "bf16opt", "z3_bf16", "z3_sub_groups", "z1_adagrad")


@dataclass(frozen=True)
class Converted:
    """A real checkpoint and the universal directory that our engine made of it.

    Attributes:
        run: the source.
        folder: the universal directory; its parent holds ``latest_universal``.
        warnings: what the conversion warned of.
    """

    run: Trained
    folder: Path
    warnings: tuple[str, ...]

    @property
    def root(self) -> Path:
        """The folder that DeepSpeed is told to load from."""
        return self.folder.parent


UniversalFactory: TypeAlias = Callable[..., Converted]


@pytest.fixture(scope="session")
def universal(trained: TrainedFactory, tmp_path_factory: pytest.TempPathFactory) -> UniversalFactory:
    """``universal(case_name, world=2)``: trained and converted once per session.  Read-only for all tests."""
    done: dict[tuple[str, int], Converted] = {}

    def make(case_name: str, world: int = 2) -> Converted:
        key = (case_name, world)
        if key not in done:
            run = trained(case_name, world)
            folder = tmp_path_factory.mktemp(f"universal-{case_name}-{world}") / f"{run.tag}_universal"
            result = convert(run.dir, folder, "universal")
            done[key] = Converted(run, folder, result.warnings)
        return done[key]

    return make


BF16_SPREAD = 0.0018
"""How far one bf16 run's losses lie apart in DeepSpeed itself when only the number of ranks differs.

`measured_spread` rounded up (deepspeed 0.19.8, torch 2.13.0 on a CPU, losses of 2.6 to 3.0). A test in `full` measures
it again: it takes 24 runs of training.
"""


@pytest.fixture(scope="session")
def bf16_spread() -> float:
    """See `BF16_SPREAD`."""
    return BF16_SPREAD


def measured_spread(trained: TrainedFactory) -> float:
    """The largest difference in any of the three losses after the save, over `_SPREAD_CASES` and 1 to 4 ranks."""
    found = 0.0
    for name in _SPREAD_CASES:
        losses = [trained(name, world=world).losses_after for world in (1, 2, 3, 4)]
        for left, right in combinations(losses, 2):
            found = max(found, *(abs(a - b) for a, b in zip(left, right, strict=True)))
    return found


def target_of(case: Case, stage: Stage | None = None) -> Case:
    """The run that continues ``case`` from a universal directory, at ``stage`` or as near to the source's as can be.

    DeepSpeed 0.19.8 loads no universal checkpoint at stage 0; at stage 3 it knows Adam's states only; and it permutes
    the weights of a target with ``round_robin_gradients``.  How the source's files were written is over.
    """
    target = replace(
        case, round_robin=False, elastic=False, zip_files=True, writer=None, sub_group_size=None, nvme=None
    )
    if stage is not None:
        return replace(target, stage=stage)
    if case.stage == 0:
        return replace(target, stage=1)
    if case.stage == 3 and case.optimizer != "adamw":
        return replace(target, stage=2)
    return target


def agree(ours: tuple[float, ...], theirs: tuple[float, ...], *, significant: int) -> bool:
    """Whether all numbers are equal to so many significant digits."""
    unit = 10.0 ** (1 - significant)
    return len(ours) == len(theirs) and all(
        abs(a - b) <= unit * 10.0 ** _exponent(b) / 2 for a, b in zip(ours, theirs, strict=True)
    )


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def expected_atoms(run: Trained) -> dict[str, RawTensor]:
    """Every atom that a universal directory of this run must hold, ``step`` left out; no more and no less."""
    truth = run.truth
    atoms = {key: value for key, value in truth.tensors.items() if key.partition("/")[0] not in MODULE_KINDS}
    masters = truth.kind("fp32")
    if run.case.steps == 0 and run.case.optimizer == "adamw":
        zeros = {fqn: RawTensor("F32", m.shape, bytes(len(m.data))) for fqn, m in masters.items()}
        atoms |= {f"{state}/{fqn}": zero for state in _ADAM_STATES for fqn, zero in zeros.items()}
    # What the optimizer does not own: frozen parameters, and trainable ones without elements.
    loose = {k: v for k, v in (truth.kind("frozen") | truth.kind("module")).items() if k not in masters}
    return atoms | {f"fp32/{fqn}": cast(value, torch.float32) for fqn, value in loose.items()}


def expected_steps(run: Trained) -> dict[str, float]:
    """The value of every ``step.pt``."""
    if run.case.steps == 0 and run.case.optimizer == "adamw":
        return dict.fromkeys(run.truth.kind("fp32"), 0.0)
    return run.truth.step


def universal_problems(converted: Converted) -> list[str]:
    """Everything in which a universal directory is not the state of the run that it came from."""
    found, run = read_universal(converted.folder), converted.run
    return [*_atom_problems(found, run), *_model_problems(found, run), *_optimizer_problems(found, run)]


def _atom_problems(found: Universal, run: Trained) -> Iterator[str]:
    wanted = expected_atoms(run)
    yield from (f"{key}: missing" for key in wanted.keys() - found.atoms.keys())
    yield from (f"{key}: not in the source" for key in found.atoms.keys() - wanted.keys())
    yield from (f"{key}: differs" for key in wanted.keys() & found.atoms.keys() if wanted[key] != found.atoms[key])
    if found.steps != expected_steps(run):
        yield f"steps: {found.steps} != {expected_steps(run)}"


def _model_problems(found: Universal, run: Trained) -> Iterator[str]:
    model, truth = found.model, run.truth
    yield from _module_problems({fqn: raw(tensor) for fqn, tensor in model["module"].items()}, run)
    if run.case.stage in (2, 3):
        fragments = {fqn: raw(t) for fqn, t in (model["frozen_param_fragments"] or {}).items() if t.numel()}
        if fragments != truth.kind("frozen"):
            yield "frozen_param_fragments differ"
    yield from (f"{k}: {model[k]} != {truth.meta[k]}" for k in _COUNTERS if plain(model[k]) != truth.meta[k])
    for key, value in truth.meta["client_state"].items():
        if plain(model.get(key)) != value:
            yield f"client state {key}: {model.get(key)}"
    if set(model["buffer_names"]) != set(truth.kind("buffer")):
        yield f"buffer_names: {model['buffer_names']}"


def _module_problems(module: dict[str, RawTensor], run: Trained) -> Iterator[str]:
    truth = run.truth
    kinds = MODULE_KINDS if run.case.stage != 3 else ("frozen", "buffer")  # stage 3 stores no 16-bit weights
    for kind in kinds:
        for fqn, value in truth.kind(kind).items():
            if module.get(fqn) != value:
                yield f"module: {kind} {fqn} differs"
    for alias, owner in truth.meta["aliases"].items() if run.case.stage != 3 else ():
        if module.get(alias) != module[owner]:
            yield f"module: alias {alias} differs"


def _optimizer_problems(found: Universal, run: Trained) -> Iterator[str]:
    optimizer, truth = found.optimizer, run.truth
    wanted = [{k: v for k, v in group.items() if k != "names"} for group in truth.meta["groups"]]
    for where in (optimizer, optimizer["optimizer_state_dict"]):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in plain(where["param_groups"])]
        if groups != wanted:
            yield f"param_groups: {groups} != {wanted}"
    scale = truth.meta["loss_scale"]
    if scale is not None and plain(optimizer["loss_scaler"])["cur_scale"] != scale:
        yield f"loss_scaler: {plain(optimizer['loss_scaler'])}"
    step = optimizer["optimizer_state_dict"]["state"][0]["step"]
    if expected_steps(run) and float(step) not in expected_steps(run).values():
        yield f"step in optimizer_state.pt: {step}"


def assert_continues(resumed: Resumed, converted: Converted, spread: float, *, losses: bool = True) -> None:
    """States, hyper-parameters and counters are the source's; the next losses are the uninterrupted run's."""
    run, truth = converted.run, converted.run.truth
    before_first_step = run.case.steps == 0
    wrong = differences(truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL)
    if before_first_step:  # the source has no moments yet; the target starts with Adam's zeros, step 0
        states = ("exp_avg", "exp_avg_sq")
        wrong = [text for text in wrong if not text.startswith((*states, "scalar step: None"))]
        for state in states:
            assert all(not any(value.data) for value in resumed.state.kind(state).values())
        assert set(resumed.state.step.values()) == {0.0}
    assert wrong == []
    stage0 = run.case.stage == 0  # keeps its loss scale elsewhere
    wrong = [text for text in meta_differences(truth, resumed.state) if not (stage0 and text.startswith("loss_scale"))]
    assert wrong == []
    assert resumed.wrong_weights == []
    if losses and run.case.dtype == "fp32":
        assert agree(resumed.losses, run.losses_after, significant=6)
    elif losses:
        assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=spread)


def hyper_parameters_of(truth: Truth, fqn: str, keys: tuple[str, ...] = ("lr", "weight_decay")) -> tuple[Any, ...]:
    """Some hyper-parameters of one parameter."""
    return tuple(truth.hyper_parameters[fqn][key] for key in keys)


def _scale(state: Truth) -> float | None:
    scale: float | None = state.meta["loss_scale"] or state.meta["plain_loss_scale"]
    return scale


def assert_native_continues(run: Trained, resumed: Resumed, case: Case, spread: float) -> None:
    """States and counters of a run that has loaded a native checkpoint are the source's, and so are the next losses."""
    wrong = differences(run.truth, resumed.state)
    if run.case.steps == 0:
        # Engines make the moments before the first step, and leave them out of the file.
        wrong = [text for text in wrong if not text.startswith(("exp_avg", "scalar step"))]
    assert wrong == []
    other = meta_differences(run.truth, resumed.state)
    assert [text for text in other if not text.startswith("loss_scale:")] == []
    # Optimizers that never scale have no scale at all, or 1; those of stage 0 keep it in another place.
    assert (_scale(run.truth) or 1.0) == (_scale(resumed.state) or 1.0)
    assert resumed.wrong_weights == []
    if case.dtype == "fp32":
        assert agree(resumed.losses, run.losses_after, significant=6)
    elif (case.stage == 0) != (run.case.stage == 0):
        # DeepSpeed's 16-bit optimizers of stage 0 step differently from its ZeRO optimizers (0.013 after one step, from
        # equal weights): only the loss before the first step says something.
        assert agree(resumed.losses[:1], run.losses_after[:1], significant=6)
    else:
        assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=spread)
