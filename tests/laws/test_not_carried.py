"""Nothing is lost in silence: a key that no framework writes is in the target, or in `not_carried` of the result."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, seed, settings, strategies as st

from house.measured import say
from house.requests import asked
from laws.deepspeed_source import STAGES
from laws.drawing import trials
from laws.layout_cases import Drawn, configured, models, native, ranks_of
from laws.pipeline_source import ParallelWriter, Ranks
from laws.planting import Gardener, Place, is_named, keys_in
from laws.profiles import laws_profile, laws_seed
from laws.universal_source import UniversalSource
from reshard.choices import TargetFormat
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.testing.laws import SCHEME, SOURCE, TARGET_NAME, ObservedStore, convert, left_by
from reshard_engine.testing.logical import Case, SourceFormat
from reshard_engine.testing.strategies import evenly

_PROFILE, _SEED = laws_profile(), laws_seed()
_SOURCES: tuple[SourceFormat, ...] = (*STAGES, UniversalSource())
_MAY_BE_REFUSED = {
    Place.STATE: {"checkpoint.mixed", "checkpoint.incomplete", "request.unsatisfiable"},
    Place.ENTRY: {
        *("checkpoint.incomplete", "request.unsatisfiable", "source.unsupported"),
        *("checkpoint.unexplained", "rules.contradiction", "checkpoint.ambiguous"),
    },
    Place.OTHER: set[str](),
}
"""Codes that a planted key can explain, by its place. Of optimizer states: other ranks lack them, or the target cannot
store them. Of entries of the state dict: tensor-parallel ranks differ, no file specifies how the entry is
partitioned, the target cannot store it, or the optimizer of stage 0 may number the new tensor. A conversion with
other keys is never refused."""


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    """The number of planted keys by what became of them, printed at the end."""
    found: Counter[str] = Counter()
    yield found
    total = sum(found.values())
    say(f"planted keys, drawn with --hypothesis-seed={_SEED}: {total}, {dict(found)}")


def _check(
    files: Mapping[str, bytes], random: Random, request: ConvertRequest, counts: Counter[str], *, times: int
) -> None:
    """Plant keys into a copy of a checkpoint, convert it within a store of memory, and look for every planted key.

    A refusal must be one that a planted key explains. Then other keys are planted, none of them in such a place, so
    that every example ends with a conversion whose keys are all carried or named.
    """
    places = set(Place)
    while True:
        gardener = Gardener(files, random)
        gardener.plant(times=times, places=places)
        store = ObservedStore()
        for name, content in gardener.files.items():
            store.put(f"{SOURCE}/{name}", content, metadata={}, if_absent=True)
        try:
            _, result = convert(store, request)
        except ReshardError as error:
            explained_by = {p.place for p in gardener.planted if error.code in _MAY_BE_REFUSED[p.place]}
            assert explained_by, (error.code, error.message, gardener.planted)  # noqa: PT017
            counts[f"refused: {error.code}"] += len(gardener.planted)
            places -= explained_by
            continue
        break
    carried_keys = keys_in(left_by(store, "planted")[0])
    assert len(gardener.planted) == times
    for planted in gardener.planted:
        carried, named = planted.key in carried_keys, is_named(planted, result.not_carried)
        assert carried or named, (planted, [(n.path, n.file) for n in result.not_carried])
        counts["carried" if carried else "named"] += 1


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: source.name)
@seed(_SEED)
@settings(_PROFILE, max_examples=_PROFILE.max_examples // 2)
@given(data=st.data())
def test_a_planted_key_is_carried_or_named(source: SourceFormat, counts: Counter[str], data: st.DataObject) -> None:
    drawn = data.draw(trials(source))
    # torch cannot load every legacy stream that it writes, and the container says nothing of keys.
    case = Case(drawn.case.state, replace(drawn.case.layout, zip_files=True))
    trial = replace(drawn, case=case, execution={})
    _check(trial.source_files, trial.random, trial.request("planted"), counts, times=4)


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
        source = {p.relative_to(scratch).as_posix(): p.read_bytes() for p in files}
    request = asked(
        source=SourceSpec(url=f"{SCHEME}://{SOURCE}"),
        target=f"{SCHEME}://lab/planted/{TARGET_NAME}",
        to=to,
        **(native(target, pad_to=model.pad_to) if to is TargetFormat.ZERO else {}),
    )
    _check(source, random, request, counts, times=3)
