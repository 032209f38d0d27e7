"""Nothing is lost in silence: a key that no framework writes is in the target, or in `not_carried` of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, seed, settings, strategies as st

from house.measured import say
from laws.deepspeed_source import STAGES
from laws.drawing import TARGETS
from laws.planting import EXTRA, Gardener, is_named, keys_in
from laws.profiles import laws_profile, laws_seed
from laws.universal_source import UniversalSource
from reshard.errors import ReshardError
from reshard.models import TargetFormat
from reshard_engine.testing.formats import Case, SourceFormat
from reshard_engine.testing.strategies import evenly
from reshard_engine.testing.trial import SOURCE, ObservedStore, Trial, convert, finished

_PROFILE, _SEED = laws_profile(), laws_seed()
_SOURCES: tuple[SourceFormat, ...] = (*STAGES, UniversalSource())
_REFUSED = {"checkpoint.mixed", "checkpoint.incomplete", "request.unsatisfiable"}
"""What planted states of an optimizer may end in: other ranks lack them, or the target has no place for them."""


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    """How many keys were planted, and what became of them."""
    found: Counter[str] = Counter()
    yield found
    total = sum(found.values())
    say(f"planted keys, drawn with --hypothesis-seed={_SEED}: {total}, {dict(found)}")
    assert not total or found["carried"] + found["named"] > 0.8 * total, found


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: source.name)
@seed(_SEED)
@settings(_PROFILE)
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
    store = ObservedStore()
    trial.fill(store, gardener.files, SOURCE)
    try:
        conversion, result = convert(store, trial.request("planted"))
    except ReshardError as error:
        assert error.code in _REFUSED, (error.code, error.message, gardener.planted)  # noqa: PT017
        counts["refused"] += len(gardener.planted)
        return
    held = keys_in(finished(store, "planted", conversion, result).files)
    for planted in gardener.planted:
        carried, named = planted.key in held, is_named(planted, result.not_carried)
        assert carried or named, (planted, [n.path for n in result.not_carried])
        counts["carried" if carried else "named"] += 1
    if oracle.name == TargetFormat.SAFETENSORS:
        assert f"module.{EXTRA}" in {n.path for n in result.not_carried}
