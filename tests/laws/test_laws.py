"""All laws over all source formats and all targets, on generated checkpoints that hold the zoo.

`make test` runs 40 examples a source format, so that the five of DeepSpeed have 200 together, `make laws` 625 of
each. There, each example meets every law; here, each meets those of `_ALWAYS`, and the others take turns. The seed is
printed at the end: `pytest tests/laws/test_laws.py --hypothesis-seed=N` draws the same examples again, and
`--hypothesis-profile=laws-shrink` makes the one that failed smaller.
"""

from __future__ import annotations

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
_TENTH = 0.1
"""20 of 200."""
_CUTS = {"world 2 to 4": _TENTH, "world 5 to 9": _TENTH, "legacy stream": 0.02}
_WORLDS = {f"world {n}": 0.005 for n in range(1, 10)}
"""Of 200: each at least once."""
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
    """What the examples of this module met. It must be the whole zoo, unless only some sources ran."""
    found = Census()
    yield found
    stages = [s.name for s in STAGES]
    say(f"drawn with --hypothesis-seed={_SEED}", *found.table(stages))
    say("of distributed checkpoints", *found.table([s.name for s in DCP_SOURCES]))
    say(*(f"consolidated files that {library} itself opened: {count}" for library, count in OPENED.items()))
    lacking: dict[str, str] = {}
    asked = _PROFILE.max_examples
    if all(found.examples([s]) >= _PROFILE.max_examples for s in stages):
        lacking |= found.lacking(stages, dict.fromkeys((*EVERYWHERE, *CUTS), _TENTH) | _CUTS | _WORLDS, asked)
    distributed = [s.name for s in DCP_SOURCES]
    if all(found.examples([s]) >= _PROFILE.max_examples for s in distributed):
        wanted = (*DCP_ZOO, *(GRAMMARS if _is_long() else ()))
        lacking |= found.lacking(distributed, dict.fromkeys(wanted, 0.005), asked)
    for source in SOURCES:
        if found.examples([source.name]) >= _PROFILE.max_examples:
            lacking |= found.lacking([source.name], source.zoo, asked)
    assert not lacking, f"too seldom drawn: {lacking}"


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
