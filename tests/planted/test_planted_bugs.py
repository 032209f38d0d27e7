"""A suite that never fails proves nothing: each patch here plants one realistic bug, and the suite must catch it.

A patch begins with `Bug:` (what a colleague might have done) and `Tests:` (which tests to run against it), then a
diff that `git apply` takes. It is applied to a copy of the sources; a patch that no longer applies fails.

`make test` plants one for each kind of test and looks that all apply. The others tell something new only when a test
changes: they are marked `full`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from house.measured import say
from house.repository import ROOT
from house.seeds import run_seed

HERE = Path(__file__).parent
PATCHES = sorted(HERE.glob("*.patch"))
SOURCES = ("client", "worker", "service")
ALWAYS = {
    "a_claim_of_an_old_fence_counts",  # tests/distributed
    "crc_not_checked",  # tests/adversarial
    "journal_trusted",  # tests/integrity
    "padding_between_parameters",  # tests/laws
    "shares_in_reverse",  # tests/golden
    "skipped_fence",  # tests/integration
}
TESTS_FAILED = 1
"""pytest's exit status for failed tests; others are a broken run, which catches nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the suite said of one planted bug."""

    status: int
    output: str
    seed: int
    """Of everything that the tests drew: `RESHARD_SEED` and `--hypothesis-seed`."""
    wall_s: float

    @property
    def caught_by(self) -> str:
        """The first test that failed."""
        failed = re.search(r"^FAILED (\S+)", self.output, re.MULTILINE)
        return failed[1].removeprefix("tests/") if failed else "nothing"


def copy_sources(directory: Path) -> None:
    """Put the sources into a directory that a bug may be planted in."""
    for name in SOURCES:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))


def git_apply(patch: Path, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "apply", *options, str(patch)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def run_with(patch: Path, directory: Path) -> Outcome:
    """Plant the bug in a copy of the sources and run its tests against the copy."""
    seed = run_seed()
    facts = dict(re.findall(r"^(Bug|Tests): (.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE))
    copy_sources(directory)
    applied = git_apply(patch, directory)
    if applied.returncode:
        return Outcome(-1, f"the patch does not apply any more:\n{applied.stderr}", seed, 0.0)
    paths = os.pathsep.join(str(directory / name) for name in SOURCES)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-s", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
    started = time.monotonic()
    ran = subprocess.run(
        [*command, "--basetemp", str(directory / "tmp"), *shlex.split(facts["Tests"])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "RESHARD_SEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Outcome(ran.returncode, ran.stdout + ran.stderr, seed, time.monotonic() - started)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Outcome]]:
    """Every patch that was asked for at work, two at a time."""
    items = (i for i in request.session.items if isinstance(i, pytest.Function) and i.path == Path(__file__))
    wanted = [i.callspec.params["patch"] for i in items if hasattr(i, "callspec")]
    pool = ThreadPoolExecutor(2)
    found = {p.stem: pool.submit(run_with, p, tmp_path_factory.mktemp(p.stem)) for p in wanted}
    pool.shutdown(wait=False)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "patch",
    [p if p.stem in ALWAYS else pytest.param(p, marks=pytest.mark.full) for p in PATCHES],
    ids=lambda p: p.stem,
)
def test_the_suite_catches(patch: Path, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[patch.stem].result()
    say(f"planted {patch.stem}: {outcome.caught_by} (seed {outcome.seed}, {outcome.wall_s:.0f} s)")
    assert outcome.status == TESTS_FAILED, outcome.output[-3000:]
    assert outcome.caught_by != "nothing", outcome.output[-3000:]


def test_every_patch_applies(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    for patch in PATCHES:
        checked = git_apply(patch, tmp_path, "--check")
        assert checked.returncode == 0, f"{patch.name}: {checked.stderr}"


def test_there_are_enough() -> None:
    assert len(PATCHES) >= 12
    assert {p.stem for p in PATCHES} >= ALWAYS
