"""Files of FSDP's ranks for another number of ranks hold the same training state, of any run that saved such files."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed, settings, strategies as st

import reshard
from house.measured import say
from laws.profiles import laws_profile, laws_seed
from laws.rank_source import ITEM_SOURCE, RANK_SOURCES, RankSource
from reshard.errors import RequestError
from reshard_engine.testing.logical import Case

_SEED = laws_seed()
_SOURCES = (*RANK_SOURCES, ITEM_SOURCE)
_EXAMPLES = max(12, laws_profile().max_examples // 2)


@pytest.fixture(scope="module")
def met() -> Iterator[Counter[str]]:
    """What the examples came to."""
    found: Counter[str] = Counter()
    yield found
    say(f"drawn with --hypothesis-seed={_SEED}", *(f"{count} {what}" for what, count in found.items()))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: source.name)
@seed(_SEED)
@settings(laws_profile(), max_examples=_EXAMPLES)
@given(data=st.data(), dp=st.integers(1, 6))
def test_another_number_of_ranks_holds_the_same(
    source: RankSource, met: Counter[str], data: st.DataObject, dp: int
) -> None:
    _check(source, data.draw(source.fsdp_cases()), dp, met)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: source.name)
@seed(_SEED)
@settings(laws_profile(), max_examples=_EXAMPLES // 3)
@given(data=st.data(), dp=st.integers(1, 6))
def test_a_run_that_fsdp_cannot_have_holds_the_same_or_is_refused(
    source: RankSource, met: Counter[str], data: st.DataObject, dp: int
) -> None:
    """Tensors that are partitioned along another dimension, or by no axis of the mesh, and parameters without any."""
    try:
        _check(source, data.draw(source.cases()), dp, met)
    except RequestError as error:
        assert error.code == "request.unsatisfiable"  # noqa: PT017
        met[error.message[:60]] += 1


def _check(source: RankSource, case: Case, dp: int, met: Counter[str]) -> None:
    """Convert a run to so many ranks, and compare both."""
    with tempfile.TemporaryDirectory() as folder:
        place, out = Path(folder, "in"), Path(folder, "out")
        place.mkdir()
        source.write(case, place)
        to = "torch_checkpointing" if source is ITEM_SOURCE else "fsdp_ranks"
        options: dict[str, Any] = {"device_type": "cpu", "fsdp_size": dp}
        options |= {} if source is ITEM_SOURCE else {"fsdp_version": 2}
        options |= {"rank_framework": "skyrl"} if source.numbers else {}  # verl has no client state
        reshard.convert(place, out, to=to, dp=dp, progress=False, opaque="keep", **options)
        met["converted"] += 1
        report = reshard.diff(place, out, progress=False)
        assert list(report.differences) == []
        models = [len([*d.glob("*model*")]) for d in (place, out)]
        met["of another world"] += models[0] != models[1]
