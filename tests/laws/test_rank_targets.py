"""Files of FSDP's ranks for another number of ranks hold the same training state, of any run that saved such files."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings, strategies as st

import reshard
from house.measured import say
from laws.profiles import laws_profile, laws_seed
from laws.rank_source import ITEM_SOURCE, RANK_SOURCES, RankSource
from reshard.errors import ReshardError

_SEED = laws_seed()
_EXAMPLES = max(12, laws_profile().max_examples // 2)
_NO_PLACE = ("request.unsatisfiable",)
"""Runs whose tensors no axis of the mesh cuts, and parameters without dimensions: FSDP has neither."""


@pytest.fixture(scope="module")
def met() -> Iterator[Counter[str]]:
    """What the examples came to."""
    found: Counter[str] = Counter()
    yield found
    say(f"drawn with --hypothesis-seed={_SEED}", *(f"{count} {what}" for what, count in found.items()))
    assert found["converted"] >= _EXAMPLES // 2


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", [*RANK_SOURCES, ITEM_SOURCE], ids=lambda source: source.name)
@seed(_SEED)
@settings(
    laws_profile(),
    max_examples=_EXAMPLES,
    suppress_health_check=[*laws_profile().suppress_health_check, HealthCheck.filter_too_much],
)
@given(data=st.data(), dp=st.integers(1, 6))
def test_another_number_of_ranks_holds_the_same(
    source: RankSource, met: Counter[str], data: st.DataObject, dp: int
) -> None:
    case = data.draw(source.cases())
    with tempfile.TemporaryDirectory() as folder:
        place, out = Path(folder, "in"), Path(folder, "out")
        place.mkdir()
        source.write(case, place)
        to = "torch_checkpointing" if source is ITEM_SOURCE else "fsdp_ranks"
        options: dict[str, Any] = {"device_type": "cpu", "fsdp_size": dp}
        options |= {} if source is ITEM_SOURCE else {"fsdp_version": 2}
        options |= {"rank_framework": "skyrl"} if source.numbers else {}  # verl has no client state
        refusal = None
        try:
            reshard.convert(place, out, to=to, dp=dp, progress=False, opaque="keep", **options)
        except ReshardError as error:
            refusal = error
        if refusal is not None:
            assert refusal.code in _NO_PLACE, refusal
            met[refusal.message[:60]] += 1
            assume(False)  # another run is drawn in its place
        met["converted"] += 1
        found = reshard.diff(place, out, progress=False)
        assert list(found.differences) == []
        models = [len([*d.glob("*model*")]) for d in (place, out)]
        met["of another world"] += models[0] != models[1]
