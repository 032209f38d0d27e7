"""Layouts do not matter: a checkpoint gets to one by way of any other, and is what a run there would have saved.

What is drawn: models with every kind of cut (see `pipeline_source`), and the data-parallel zoo of the other laws, grown
to tensor-parallel ranks by rules of the request. The long form is marked `nightly`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from hypothesis import given, seed, settings, strategies as st

from house.requests import asked
from laws import deepspeed_files
from laws.deepspeed_files import Layout
from laws.deepspeed_source import DeepSpeedSource, cases_of, rules_of as held_by
from laws.layout_cases import Drawn, configured, models, native, ranks_of
from laws.pipeline_source import Model, ParallelWriter, Part, Ranks, rules_of
from laws.profiles import laws_profile, laws_seed
from laws.torch_values import Fragment, load, tree_of
from reshard.choices import TargetFormat
from reshard.models.reports import DiffOptions
from reshard.options import DeepSpeedOptions, Options, SourceSpec
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.local import LocalEngine
from reshard_engine.storage.locations import serving
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.testing.laws import SCHEME, TARGET_NAME, convert, left_by
from reshard_engine.testing.logical import MASTER, Bits, Case, LogicalParameter, LogicalState, tree_difference
from reshard_engine.testing.stores import MemoryStore
from reshard_engine.testing.strategies import evenly

_PROFILE, _SEED = laws_profile(), laws_seed()
_CI, _LONG = 20, 400
# What a run would save that depends on nothing but its state and its layout.
_OPTIMIZER_KEYS = (
    *("single_partition_of_fp32_groups", "base_optimizer_state", "partition_count", "group_paddings"),
    *("fp32_flat_groups", "optimizer_state_dict"),
)
_MODEL_KEYS = (
    *("module", "param_shapes", "buffer_names", "frozen_param_shapes", "frozen_param_fragments", "skipped_steps"),
    *("global_steps", "global_samples", "lr_scheduler", "dp_world_size", "mp_world_size"),
    "checkpoint_parallel_dimensions",
)

# Below stage 2 nothing says that no frozen weight was left out, so a way through there loses the empty mapping, which
# is to a loader what None is, and no entry.
_FROZEN = ("frozen_param_shapes", "frozen_param_fragments")
# Read by name: a name or a pattern counts wherever it stands.
_UNORDERED = ("universal_checkpoint_info", "module")


class Ways:
    """Conversions of one checkpoint within a store of memory."""

    def __init__(self, source: Path, rules: str | None) -> None:
        """With the files of a folder as `source`; `rules` go with every request."""
        self.store, self.rules = MemoryStore(), rules
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            name = path.relative_to(source).as_posix()
            self.store.put(f"lab/source/{name}", path.read_bytes(), metadata={}, if_absent=True)

    def go(self, start: str, run: str, layout: Mapping[str, Any]) -> Mapping[str, bytes]:
        """The files of the layout, made from the source or from an earlier run's target."""
        request = asked(
            source=SourceSpec(url=self.url(start)),
            target=f"{SCHEME}://lab/{run}/{TARGET_NAME}",
            to=TargetFormat.ZERO,
            **layout,
            rules=self.rules,
        )
        convert(self.store, request)
        return left_by(self.store, run)[0]

    @staticmethod
    def url(run: str) -> str:
        """Where a run's checkpoint is."""
        return f"{SCHEME}://lab/{run}" + ("" if run == "source" else f"/{TARGET_NAME}")

    def assert_equal(self, a: str, b: str) -> None:
        """Fail if two runs' checkpoints differ in a logical tensor, a counter or a hyper-parameter."""
        specs = (SourceSpec(url=self.url(run)) for run in (a, b))
        with serving(SCHEME, self.store):
            report = LocalEngine().diff(
                *specs, DiffOptions(options=Options(deepspeed=DeepSpeedOptions(rules=self.rules)))
            )
        assert report.equal, report.differences[:5]
        assert report.identical == report.tensors > 0


def _tree(data: bytes) -> Any:
    return _plain(tree_of(load(data)))


def _plain(tree: Any) -> Any:
    """The tree with fragments as their numbers, which can be compared."""
    if isinstance(tree, Fragment):
        return dict(vars(tree))
    if type(tree) is dict:
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if type(tree) is list else tree


def _without_config(tree: Any) -> tuple[Any, dict[str, Any]]:
    """A file without its `ds_config`, and what that says beyond the defaults.

    The way leaves traces there and nowhere else: an option that one run had on is said to be off in the next one's
    config, and is not mentioned where no run had it.
    """
    if not isinstance(tree, dict) or "ds_config" not in tree:
        return tree, {}
    config = dict(tree["ds_config"])
    zero = config.pop("zero_optimization")
    said = {k: v for k, v in zero.items() if v is not False and k not in ("sub_group_size", "elastic_checkpoint")}
    config.pop("data_types", None)
    told = {k: v for k, v in tree.items() if k != "ds_config" and _says(k, v)}
    kept = {k: _unordered(v) if k in _UNORDERED else v for k, v in told.items()}
    return kept, {**config, "zero_optimization": said}


def _says(key: str, value: Any) -> bool:
    return bool(value) or key not in _FROZEN


def _unordered(facts: Any) -> Any:
    """Without the order of names and patterns, which nobody reads: it is that of the stages or groups on the way."""
    if not isinstance(facts, dict):
        return facts
    ordered = {key: sorted(value, key=repr) if isinstance(value, list) else value for key, value in facts.items()}
    return dict(sorted(ordered.items()))


def assert_same_run(left: Mapping[str, bytes], right: Mapping[str, bytes]) -> None:
    """Fail unless two targets have the same files with the same content, options of the way there apart."""
    assert sorted(left) == sorted(right)
    for name in left:
        if left[name] == right[name]:
            continue
        (one, said), (other, again) = _without_config(_tree(left[name])), _without_config(_tree(right[name]))
        assert tree_difference(one, other) is None, f"{name}: {tree_difference(one, other)}"
        assert said == again, name


def assert_as_saved(found: Mapping[str, bytes], model: Model, ranks: Ranks) -> None:
    """Fail unless a target holds what a run of these ranks would have saved, padding zeroed."""
    with tempfile.TemporaryDirectory() as scratch, patch.object(deepspeed_files, "PADDING", 0):
        ParallelWriter(configured(model, ranks), ranks, Path(scratch)).write()
        folder = Path(scratch, ranks.data.tag)
        saved = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert sorted(found) == sorted(saved)
    for name, data in saved.items():
        ours, theirs = _tree(found[name]), _tree(data)
        if name.endswith("optim_states.pt"):
            ours, theirs = ours["optimizer_state_dict"], theirs["optimizer_state_dict"]
        # Loaders take the weights of a layer by name; a group's members stand together in ours.
        keys = sorted(theirs) if name.startswith("layer_") else _MODEL_KEYS
        keys = _OPTIMIZER_KEYS if name.endswith("optim_states.pt") else keys
        ours, theirs = (
            {k: _unordered(t[k]) if k in _UNORDERED else t[k] for k in keys if k in t and _says(k, t[k])}
            for t in (ours, theirs)
        )
        difference = tree_difference(theirs, ours)
        assert difference is None, f"{name}: {difference}"


def _yaml(rules: Mapping[str, Any]) -> str:
    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            """Rules are read without aliases."""
            return True

    Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
    return yaml.dump({**rules, "default": "column"}, Dumper=Dumper, allow_unicode=True)


def _check_model(drawn: Drawn, a: Ranks, b: Ranks, c: Ranks) -> None:
    """A to C, and A to B to C, and what a run on C would save: all the same."""
    model = drawn.model
    with tempfile.TemporaryDirectory() as scratch:
        ParallelWriter(configured(model, a), a, Path(scratch)).write()
        ways = Ways(Path(scratch), None if model.told else _yaml(model.rules))
    direct = ways.go("source", "direct", native(c, pad_to=model.pad_to))
    ways.go("source", "way", native(b, pad_to=model.pad_to))
    arrived = ways.go("way", "arrived", native(c, pad_to=model.pad_to))
    assert_same_run(direct, arrived)
    for run in ("way", "direct", "arrived"):
        ways.assert_equal("source", run)
    assert_as_saved(direct, model, c)


@st.composite
def _three(draw: st.DrawFn) -> tuple[Drawn, Ranks, Ranks, Ranks]:
    drawn = draw(models())
    return drawn, draw(ranks_of(drawn)), draw(ranks_of(drawn)), draw(ranks_of(drawn))


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_CI)
@given(case=_three())
def test_the_way_over_another_layout_does_not_matter(case: tuple[Drawn, Ranks, Ranks, Ranks]) -> None:
    _check_model(*case)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_LONG)
@given(case=_three())
def test_the_way_over_another_layout_does_not_matter_long(case: tuple[Drawn, Ranks, Ranks, Ranks]) -> None:
    _check_model(*case)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_whose_part_is_all_padding_has_the_types_of_the_others(stage: int) -> None:
    """Found by the law: such a master was written as fp32, beside fp16 ones, and could not be read again."""
    values = Bits("float16", (1, 3), np.float16([1.5, -2.0, 0.25]).tobytes())
    name = "embed.tokens.weight"
    state = LogicalState(
        "float16",
        (LogicalParameter(name, (1, 3), 0, values, dict.fromkeys((MASTER, "exp_avg", "exp_avg_sq"), values)),),
        buffers={},
        aliases={},
        order=(name,),
        groups=({"lr": 0.25, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},),
        steps=(Bits("float32", (), np.float32(3).tobytes()),),
        values={"lr_scheduler": None, "skipped_steps": 0, "global_steps": 3, "global_samples": 24},
        optimizer_values={},
    )
    parts = {name: Part("vocabulary", 0)}
    model = Model(state, parts, piped=False, layers=4, pad_to=1, told=True, rules=rules_of(parts, {name: (1, 3)}, 4))
    one, two = Ranks(1, (0,), Layout(stage, 2)), Ranks(2, (0,), Layout(stage, 2))
    _check_model(Drawn(model, (1, 2), 1), one, two, one)
    _check_model(Drawn(model, (1, 2), 1), two, one, two)


# -- the zoo of data parallelism, grown by rules of the request -------------------------------------------------------


def _grown_rules(draw: st.DrawFn, case: Case, tps: tuple[int, ...]) -> str:
    """Rules for the parameters of any model: each is cut in a way that all of the ranks divide, or whole."""
    rules: dict[str, list[str]] = {
        "tp_replicated_parameter_patterns": [],
        "parameter_with_row_parallelism_patterns": [],
        "parameter_with_column_parallelism_patterns": [],
    }
    for parameter in case.state.parameters:
        kinds = ["tp_replicated_parameter_patterns"]
        for dim, kind in enumerate(("column", "row")):
            fits = len(parameter.shape) > dim and all(parameter.shape[dim] % tp == 0 for tp in tps)
            kinds += [f"parameter_with_{kind}_parallelism_patterns"] * (3 * fits)
        rules[draw(st.sampled_from(kinds))].append(f"^{re.escape(parameter.fqn)}$")
    return yaml.safe_dump(rules, allow_unicode=True)


@st.composite
def _grown(draw: st.DrawFn) -> tuple[Case, str, Mapping[str, Any], Mapping[str, Any]]:
    stage = draw(evenly(1, 2, 3, "bf16"))
    case = draw(cases_of(stage, replace(held_by(stage), dtypes=("bfloat16",) if stage == "bf16" else ("float32",))))
    values = {**case.state.values}
    # A run that clips says so in its config too, which is all that stage 3 saves of it.
    clip = case.state.optimizer_values.get("clip_grad", 0.0)
    values["ds_config"] = {**values["ds_config"], "gradient_clipping": clip}
    # Weights beside masters travel as they are stored, and stage 3 stores none: they must be the rounded masters.
    parameters = tuple(
        p
        if p.weight is None or MASTER not in p.states
        else replace(p, weight=_rounded(p.states[MASTER], p.weight.dtype))
        for p in case.state.parameters
    )
    case = Case(replace(case.state, values=values, parameters=parameters), case.layout)
    layouts = [_layout(draw, case) for _ in range(2)]
    if layouts[0]["zero_stage"] not in {"2", "3"}:
        # Files of the other stages do not say what was frozen late: it is lost on that way.
        case = Case(case.state, replace(case.layout, late=0))
    return case, _grown_rules(draw, case, tuple(t["tp"] for t in layouts)), layouts[0], layouts[1]


def _rounded(bits: Bits, dtype: str) -> Bits:
    """As the engine rounds: the payload of a NaN is its own."""
    if bits.dtype == dtype:
        return bits  # it moves what it need not cast, NaNs that a cast would quiet too
    data = np.frombuffer(bits.data, dtype=np.uint8)
    return Bits(dtype, bits.shape, default_kernel().cast(data, BY_NAME[bits.dtype], BY_NAME[dtype]).tobytes())


def _layout(draw: st.DrawFn, case: Case) -> dict[str, Any]:
    stages = ["1", "2", "3"] + (["bf16"] if case.state.dtype == "bfloat16" else [])
    return {
        "zero_stage": draw(evenly(*stages)),
        "dp": draw(st.integers(1, 5)),
        "tp": draw(evenly(1, 2, 3)),
        "round_robin_gradients": draw(st.booleans()),
        "parameter_alignment": draw(st.booleans()),
        "sub_group_size": draw(evenly(10**9, 1, 20)),
    }


def _check_grown(case: Case, rules: str, b: Mapping[str, Any], c: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        DeepSpeedSource(case.layout.stage).write(case, Path(scratch))
        ways = Ways(Path(scratch), rules)
    direct = ways.go("source", "direct", c)
    ways.go("source", "way", b)
    arrived = ways.go("way", "arrived", c)
    assert_same_run(direct, arrived)
    ways.assert_equal("direct", "arrived")
    ways.assert_equal("way", "arrived")


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_CI)
@given(case=_grown())
def test_any_model_grows_by_rules(case: tuple[Case, str, Mapping[str, Any], Mapping[str, Any]]) -> None:
    _check_grown(*case)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_LONG)
@given(case=_grown())
def test_any_model_grows_by_rules_long(case: tuple[Case, str, Mapping[str, Any], Mapping[str, Any]]) -> None:
    _check_grown(*case)
