"""Nothing is mixed up or lost where a state dict has two of everything.

Each tensor of the source is in the target, or named in `not_carried`. No tensor of the target is absent from the
source, but for zeros of parameters that were never updated. A choice that the files leave open is asked for.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings, strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,  # pyright: ignore[reportPrivateUsage]
)

import reshard
from house.measured import say
from laws.profiles import laws_profile, laws_seed
from laws.several import Engine, Maker, Several
from oracle.outputs import read_universal, tensor_of
from reshard.errors import RequestError, SourceError
from reshard.models.jobs import ConvertResult

_PROFILE, _SEED = laws_profile(), laws_seed()
_TARGETS: tuple[dict[str, Any], ...] = (
    {"to": "safetensors"},
    {"to": "universal"},
    {"to": "dcp"},
    {"to": "dcp", "framework": "state-dict", "target_model_key": "there.model"},
    {"to": "dcp", "framework": "accelerate"},
    {"to": "dcp", "framework": "torchtitan"},
)
_OF_ONE_MODEL = tuple(target for target in _TARGETS if target["to"] in ("safetensors", "universal"))
"""Targets that cannot store two models: one is chosen."""
_FLAG = re.compile(r"--(model|optimizer|scheduler)-key (\S+)")
_MOST_QUESTIONS = 9


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    """The number of tensors by what became of them, printed at the end."""
    found: Counter[str] = Counter()
    yield found
    say(f"tensors of state dicts with two of everything, drawn with --hypothesis-seed={_SEED}: {dict(found)}")


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_PROFILE.max_examples * 3)
@given(number=st.integers(0, 2**48), options=st.sampled_from(_TARGETS))
def test_each_tensor_is_carried_or_named(number: int, options: dict[str, Any], counts: Counter[str]) -> None:
    random = Random(number)
    source = Maker(random).make()
    with tempfile.TemporaryDirectory() as scratch:
        source.write(Path(scratch, "source"))
        answers: dict[str, Any] = {}
        result = _converted(source, Path(scratch), options, answers, random, counts)
        if result is not None:
            target = dict(_tensors(Path(scratch, "target"), options["to"]))
            _check(source, answers, result, target, counts)
            _check_places(target, source, answers, options["to"])


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_PROFILE.max_examples // 2)
@given(number=st.integers(0, 2**48), options=st.sampled_from(_OF_ONE_MODEL))
def test_one_of_two_models_with_the_same_parameters_is_asked_for(
    number: int, options: dict[str, Any], counts: Counter[str]
) -> None:
    """Whichever place is chosen, its weights and the optimizer's states are in the target."""
    random = Random(number)
    source = Maker(random).make_twins()
    with tempfile.TemporaryDirectory() as scratch:
        source.write(Path(scratch, "source"))
        answers: dict[str, Any] = {}
        result = _converted(source, Path(scratch), options, answers, random, counts)
        assert result is not None
        target = dict(_tensors(Path(scratch, "target"), options["to"]))
    assert answers.keys() == {"model_key"}
    _check(source, answers, result, target, counts)
    _check_places(target, source, answers, options["to"])
    wanted = (answers["model_key"], *(["optimizer"] if options["to"] != "safetensors" else []))
    stored = {_bits(t) for t in target.values()}
    lost = [key for key, t in source.tensors.items() if key.startswith(wanted) and _bits(t) not in stored]
    assert [key for key in lost if not key.endswith(".step")] == []


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_PROFILE.max_examples)
@given(number=st.integers(0, 2**48))
def test_a_number_is_the_parameter_of_its_shape_or_asked_for(number: int) -> None:
    source = Maker(Random(number)).make_numbered()
    with tempfile.TemporaryDirectory() as scratch:
        source.write(Path(scratch, "source"))
        error = None
        try:
            reshard.convert(Path(scratch, "source"), Path(scratch, "target"), to="universal")
        except (SourceError, RequestError) as refused:
            error = refused
        if error is None:
            return _check_places(dict(_tensors(Path(scratch, "target"), "universal")), source, {}, "universal")
    if error.code == "request.unsatisfiable":
        return None  # the optimizers of one state dict keep different states
    assert error.code == "checkpoint.ambiguous"
    assert "--param-order" in error.fix
    (engine,), (names,) = source.engines, source.models.values()
    counts = Counter(names[n] for n in engine.order)
    available = Counter(names.values())
    groups = next(value for key, value in source.state.items() if key == engine.place[0])
    for part in engine.place[1:]:
        groups = groups[part]
    # Of optimizers that are not torch's own, states tell no shapes.
    foreign = any("foreach" not in group for group in groups["param_groups"])
    assert foreign or any(available[shape] > 1 for shape in counts)
    return None


def _converted(
    source: Several,
    scratch: Path,
    options: dict[str, Any],
    answers: dict[str, Any],
    random: Random,
    counts: Counter[str],
) -> ConvertResult | None:
    """Convert, and answer each question by one of the flags that its fix has; None if the target cannot hold it."""
    orders = [e.order for e in source.engines]
    for _ in range(_MOST_QUESTIONS):
        try:
            return reshard.convert(scratch / "source", scratch / "target", **options, **answers)
        except (SourceError, RequestError) as error:
            assert not (scratch / "target").exists()
            last = error
        wrong = last.code == "request.invalid" and "--param-order" in last.message
        if last.code == "request.unsatisfiable" or (
            "param_order" in answers and not wrong and "--param-order" in last.fix
        ):
            # A state dict may have two numbered optimizers, and one order can be said.
            counts["refused"] += 1
            return None
        assert wrong or last.code == "checkpoint.ambiguous", last
        counts["asked"] += not wrong
        if wrong and not orders:
            counts["refused"] += 1  # numbers may fit another model by their shapes: no names of that one are known
            return None
        if wrong or "--param-order" in last.fix:
            answers["param_order"] = orders.pop()  # of one of the optimizers: that of another one is refused
            continue
        asked = _FLAG.findall(last.fix)
        assert len(asked) > 1, last.fix
        what, key = random.choice(asked)
        assert f"{what}_key" not in answers, (answers, last.fix)
        answers[f"{what}_key"] = key.strip(",'")
    raise AssertionError(f"asked again and again: {answers}")


def _tensors(target: Path, to: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a target, by torch and safetensors themselves."""
    if to == "safetensors":
        yield from load_file(target / "model.safetensors").items()
    elif to == "universal":
        found = read_universal(target)
        yield from ((name, tensor_of(raw)) for name, raw in found.atoms.items())
        yield from _nested(found.model, "model")
    else:
        for metadata in target.rglob(".metadata"):
            described = FileSystemReader(metadata.parent).read_metadata().state_dict_metadata
            state = {
                k: torch.zeros(e.size, dtype=e.properties.dtype) for k, e in described.items() if hasattr(e, "size")
            }
            _load_state_dict(state, FileSystemReader(metadata.parent), no_dist=True)  # pyright: ignore[reportUnknownArgumentType]
            yield from ((f"{metadata.parent.name}/{key}", tensor) for key, tensor in state.items())
        for file in target.rglob("*.bin"):
            yield from _nested(torch.load(file, weights_only=True), file.name)


def _nested(value: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield key, value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _nested(inner, f"{key}.{name}")
    elif hasattr(value, "data") and hasattr(value, "shape"):
        yield key, tensor_of(value)


def _check(
    source: Several,
    answers: dict[str, Any],
    result: ConvertResult,
    target: dict[str, torch.Tensor],
    counts: Counter[str],
) -> None:
    held = {_bits(t) for t in target.values()}
    models = [{_bits(source.tensors[".".join((*p, n))]) for n in names} for p, names in source.models.items()]
    if answers.get("model_key") == ".":  # tensors that are in no place are a model of that key
        models.append({_bits(t) for key, t in source.tensors.items() if key in source.state})
    assert any(weights <= held for weights in models), "the target has all weights of no model"
    named = [f".{entry.path}." for entry in result.not_carried]
    for key, tensor in source.tensors.items():
        if key.endswith(".step"):  # a number, which targets keep in forms of their own
            continue
        carried = _bits(tensor) in held
        assert carried or _is_named(source, key, named), (key, answers, result.not_carried)
        counts["carried" if carried else "named"] += 1
    known = {_bits(t): key for key, t in source.tensors.items()}
    for key, tensor in target.items():
        # No parameter of these runs was never updated: zeros would be the states of another optimizer.
        assert tensor.any(), f"{key} is zeros"
        assert tensor.numel() == 1 or _bits(tensor) in known, f"{key} holds what no tensor of the source holds"


def _check_places(target: dict[str, torch.Tensor], source: Several, answers: dict[str, Any], to: str) -> None:
    """Weights are of one model, which nobody had to guess, and states are those of the parameter."""
    known = {_bits(t): key for key, t in source.tensors.items()}
    if to == "safetensors":
        places = {known[_bits(t)].removesuffix(name).rstrip(".") for name, t in target.items()}
        assert len(places) == 1, f"weights of several models: {places}"
        assert answers.get("model_key", ".") in (".", *places)
    if to in ("safetensors", "universal") and "model_key" not in answers:
        engines = [e for e in source.engines if answers.get("optimizer_key") in (None, ".".join(e.place))]
        trained = {place for place, names in source.models.items() if any(e.fits(names) for e in engines)}
        assert len(trained or source.models) < 2, f"{trained or source.models} are models, and none was asked for"
    for key, tensor in target.items() if to == "universal" and "param_order" not in answers else ():
        state, _, name = key.partition("/")
        if name and state not in ("fp32", "step") and name in str(source.tensors):
            engine, parameter = _parameter_of(source, known[_bits(tensor)])
            chosen_amiss = "model_key" in answers and name not in engine.order
            assert parameter == name or chosen_amiss, (key, known[_bits(tensor)])


def _parameter_of(source: Several, key: str) -> tuple[Engine, str]:
    """The optimizer that a key of the source is a state of, and the name of its parameter."""
    engine = max((e for e in source.engines if key.startswith(".".join(e.place) + ".")), key=lambda e: len(e.place))
    label = key.removeprefix(".".join(engine.place) + ".state.").rpartition(".")[0]
    return engine, engine.order[int(label)] if label.isdecimal() else label


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def _is_named(source: Several, key: str, named: list[str]) -> bool:
    """True if an entry names the tensor, a place above it, or a kind of state."""
    dotted = f".{key}."
    if any(path in dotted for path in named) or ("..." in named and key in source.state):
        return True
    # `optimizer` names the states of the one that is read, and `optimizer.state.*.NAME` those of one kind.
    within = [e for e in source.engines if dotted.startswith(f".{'.'.join(e.place)}.")]
    state = dotted.rstrip(".").rpartition(".")[2]
    return bool(within) and (".optimizer." in named or f".optimizer.state.*.{state}." in named)
