"""The short form of `make fuzz`: every target, a few seconds each, and nothing found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from adversarial.fuzz.run import SHARES, Report, fuzz_all
from adversarial.fuzz.targets import TARGETS
from reshard.errors import ReshardError

SECONDS = 6.0
"""Time of two processes together. Starting a target takes some more, which is most of the time."""
pytestmark = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no build for this platform")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    found = fuzz_all(list(SHARES), SECONDS, 2, tmp_path_factory.mktemp("finds"))
    return {r.target: r for r in found}


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_finds_anything(target: str, reports: dict[str, Report]) -> None:
    report = reports[target]
    assert report.finds == (), report.log
    # Each run of `dcp` takes 20 ms, since it converts what it reads; it has 8 seeds.
    assert report.executions > (20 if target == "dcp" else 100)
    assert report.edges > 0, "the engine is instrumented"


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_reach_what_is_fuzzed(target: str) -> None:
    work, seeds = TARGETS[target]
    accepted = 0
    for seed in seeds():
        try:
            work(seed)
            accepted += 1
        except ReshardError:
            continue
    assert accepted, "a fuzzer that starts from refusals stays there"


def test_the_table_of_shares_is_the_table_of_targets() -> None:
    assert SHARES.keys() == TARGETS.keys()


def test_a_planted_find_is_found(tmp_path: Path) -> None:
    """The control: an exception that is not ours is reported, with the input that made it."""
    (report,) = fuzz_all(["latest"], 20, 1, tmp_path, planted=True)
    assert report.finds
    assert "planted" in report.log
