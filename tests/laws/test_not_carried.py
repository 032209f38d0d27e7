"""Nothing is lost in silence: a key that no framework writes is in the target, or in `not_carried` of the result."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, seed, settings, strategies as st

from house.measured import say
from house.requests import asked
from laws.deepspeed_source import STAGES
from laws.drawing import TARGETS
from laws.layout_cases import Drawn, configured, models, native, ranks_of
from laws.pipeline_source import ParallelWriter, Ranks
from laws.planting import Gardener, is_named, keys_in
from laws.profiles import laws_profile, laws_seed
from laws.universal_source import UniversalSource
from reshard.choices import TargetFormat
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.testing.laws import SCHEME, SOURCE, TARGET_NAME, ObservedStore, Trial, convert, left_by
from reshard_engine.testing.logical import Case, SourceFormat
from reshard_engine.testing.strategies import evenly

_PROFILE, _SEED = laws_profile(), laws_seed()
_SOURCES: tuple[SourceFormat, ...] = (*STAGES, UniversalSource())
_REFUSED = {
    *("checkpoint.mixed", "checkpoint.incomplete", "request.unsatisfiable"),
    *("source.unsupported", "checkpoint.unexplained", "rules.contradiction"),
}
"""Codes that planted states of an optimizer may end in: other ranks lack them, or the target has no place for them. And
entries of the state dict where tensor-parallel ranks differ, or nothing says how they are cut."""


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    """The number of planted keys by what became of them."""
    found: Counter[str] = Counter()
    yield found
    total = sum(found.values())
    say(f"planted keys, drawn with --hypothesis-seed={_SEED}: {total}, {dict(found)}")
    assert not total or found["carried"] + found["named"] > 0.4 * total, found


def _check(gardener: Gardener, request: ConvertRequest, counts: Counter[str]) -> None:
    """Convert what was planted into, within a store of memory, and look for every planted key."""
    store = ObservedStore()
    for name, content in gardener.files.items():
        store.put(f"{SOURCE}/{name}", content, metadata={}, if_absent=True)
    try:
        _, result = convert(store, request)
    except ReshardError as error:
        assert error.code in _REFUSED, (error.code, error.message, gardener.planted)  # noqa: PT017
        counts[f"refused: {error.code}"] += len(gardener.planted)
        return
    held = keys_in(left_by(store, "planted")[0])
    for planted in gardener.planted:
        carried, named = planted.key in held, is_named(planted, result.not_carried)
        assert carried or named, (planted, [(n.path, n.file) for n in result.not_carried])
        counts["carried" if carried else "named"] += 1


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: source.name)
@seed(_SEED)
@settings(_PROFILE, max_examples=_PROFILE.max_examples // 2)
@given(data=st.data())
def test_a_planted_key_is_carried_or_named(source: SourceFormat, counts: Counter[str], data: st.DataObject) -> None:
    oracle = data.draw(evenly(*TARGETS))
    random: Random = data.draw(st.randoms(use_true_random=False))
    drawn = data.draw(source.cases())
    # torch cannot load every legacy stream that it writes, and the container says nothing of keys.
    case = Case(drawn.state, replace(drawn.layout, zip_files=True))
    trial = Trial(source, case, oracle, dict(data.draw(oracle.options())), {}, random)
    gardener = Gardener(trial.source_files, random)
    gardener.plant(times=4)
    _check(gardener, trial.request("planted"), counts)


@st.composite
def _parallel(draw: st.DrawFn) -> tuple[Drawn, Ranks, Ranks]:
    drawn = draw(models())
    return drawn, draw(ranks_of(drawn)), draw(ranks_of(drawn))


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(_PROFILE, max_examples=_PROFILE.max_examples // 2)
@given(case=_parallel(), to=evenly(TargetFormat.ZERO, TargetFormat.UNIVERSAL, TargetFormat.TORCH), random=st.randoms())
def test_a_planted_key_of_a_model_parallel_run_is_carried_or_named(
    case: tuple[Drawn, Ranks, Ranks], to: TargetFormat, random: Random, counts: Counter[str]
) -> None:
    drawn, ranks, target = case
    model = replace(drawn.model, told=True)
    with tempfile.TemporaryDirectory() as scratch:
        ParallelWriter(configured(model, ranks), ranks, Path(scratch)).write()
        files = [p for p in sorted(Path(scratch).rglob("*")) if p.is_file()]
        gardener = Gardener({p.relative_to(scratch).as_posix(): p.read_bytes() for p in files}, random)
    gardener.plant(times=3)
    request = asked(
        source=SourceSpec(url=f"{SCHEME}://{SOURCE}"),
        target=f"{SCHEME}://lab/planted/{TARGET_NAME}",
        to=to,
        layout=native(target, pad_to=model.pad_to) if to is TargetFormat.ZERO else None,
    )
    _check(gardener, request, counts)
