"""All laws over all source formats and all targets, on generated checkpoints that hold the zoo.

`make test` runs 40 examples a source format, so that the five of DeepSpeed have 200 together, `make laws` 625 of
each. There, each example meets every law; here, each meets those of `_ALWAYS`, and the others take turns. The seed is
printed at the end: `pytest tests/laws/test_laws.py --hypothesis-seed=N` draws the same examples again, and
`--hypothesis-profile=laws-shrink` makes the one that failed smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, seed, settings, strategies as st

from house.measured import say
from laws.dcp_source import DCP_SOURCES, GRAMMARS, ZOO as DCP_ZOO
from laws.deepspeed_source import STAGES
from laws.drawing import SOURCES, trials
from laws.profiles import laws_profile, laws_seed
from laws.targets import OPENED
from laws.zoo import CUTS, EVERYWHERE, Census, labels_of
from reshard_engine.testing.laws import LAWS, Law, check, every_byte_once, gather_then_slice, verification_agrees
from reshard_engine.testing.logical import SourceFormat
from reshard_engine.testing.strategies import evenly

_PROFILE, _SEED = laws_profile(), laws_seed()
_WORLDS = tuple(f"world {n}" for n in range(1, 10))
_ZOOS: dict[str, tuple[tuple[SourceFormat, ...], tuple[str, ...]]] = {
    "DeepSpeed": (STAGES, (*EVERYWHERE, *CUTS, *_WORLDS, "legacy stream")),
    "distributed checkpoints": (DCP_SOURCES, (*DCP_ZOO, *GRAMMARS)),
    **{source.name: ((source,), tuple(source.zoo)) for source in SOURCES if source.zoo},
}
"""Items that sources must meet, together or each alone."""
_LEAST, _MOST_ROUNDS = 2, 50
"""Examples with each item, and rounds of `max_examples` of each source in which they are sought."""
_ALWAYS = (gather_then_slice, every_byte_once, verification_agrees)
"""They look at the one conversion that every example needs; each of the others makes some of its own."""
_TURNS = 3


def _is_long() -> bool:
    return _PROFILE is settings.get_profile("laws-long")


def laws_of(turn: int) -> tuple[Law, ...]:
    """The laws that an example meets: all in the long run, in the short one a third of those that are not for all."""
    if _is_long():
        return LAWS
    others = [law for law in LAWS if law not in _ALWAYS]
    return (*_ALWAYS, *others[turn::_TURNS])


@pytest.fixture(scope="module")
def census() -> Iterator[Census]:
    """Counts the items of the zoo in the examples of this module, for the table at the end."""
    found = Census()
    yield found
    stages = [s.name for s in STAGES]
    say(f"drawn with --hypothesis-seed={_SEED}", *found.table(stages))
    say("of distributed checkpoints", *found.table([s.name for s in DCP_SOURCES]))
    say(*(f"consolidated files that {library} itself opened: {count}" for library, count in OPENED.items()))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@seed(_SEED)
@settings(_PROFILE)
@given(data=st.data())
def test_laws(source: SourceFormat, census: Census, data: st.DataObject) -> None:
    trial = data.draw(trials(source))
    turn = data.draw(evenly(*range(_TURNS)))
    census.note(source.name, labels_of(trial.saved))
    check(trial, laws_of(turn))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", _ZOOS)
def test_every_item_of_the_zoo_is_met(name: str) -> None:
    """The items that `test_laws` meets depend on the seed; here, examples are drawn until each item was in some."""
    sources, items = _ZOOS[name]
    missing = Counter(dict.fromkeys(items, _LEAST))
    for number in range(_MOST_ROUNDS):
        for source in sources:
            _meet(source, missing, _SEED + number)
            if not +missing:
                return
    raise AssertionError(f"never drawn, or too seldom: {+missing}")


def _meet(source: SourceFormat, missing: Counter[str], number: int) -> None:
    """Check laws over the examples of a seed that have a missing item, and count it down."""

    @seed(number)
    @settings(_PROFILE)
    @given(data=st.data())
    def meet(data: st.DataObject) -> None:
        trial = data.draw(trials(source))
        if not +missing:
            return
        if met := {item for item in labels_of(trial.saved) if missing[item] > 0}:
            check(trial, _ALWAYS)
            missing.subtract(met)

    meet()
