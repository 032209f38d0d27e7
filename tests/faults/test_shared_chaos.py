"""Several workers run one conversion while they are killed and stopped, and servers fail: none lost, no byte wrong."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from faults.shared_chaos import TARGETS, Store, Tally, a_service, contents, convert_in_turmoil, expectations
from house.measured import say
from house.seeds import run_seed
from house.sources import zero_source
from servers.faulty import faulty_proxy
from servers.postgres import PostgresServer
from servers.s3 import S3Server
from servers.stack import Stack

PARAMETERS = [(f"layer.{n}.weight", (256, 257)) for n in range(24)] + [("embed.weight", (8192, 512))]
SHORT, LONG = 1, 67
LENGTHS = [SHORT, pytest.param(LONG, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])]

pytestmark = pytest.mark.timeout(280)


source = zero_source(PARAMETERS, stage=2)
"""A ZeRO-2 checkpoint of two ranks."""


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, bytes]]:
    return expectations(source, tmp_path_factory.mktemp("expected"))


@pytest.fixture
def chance() -> random.Random:
    """The seed is printed, and can be given again."""
    seed = run_seed()
    say(f"RESHARD_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def store(s3: S3Server, source: Path, chance: random.Random) -> Generator[Store]:
    bucket = f"chaos-{uuid.uuid4().hex[:12]}"
    s3.make_bucket(bucket)
    s3.upload(source, bucket, "run")
    with faulty_proxy(s3.endpoint) as proxy:
        yield Store(s3, proxy, bucket, chance)


def report(what: str, rounds: int, tally: Tally) -> None:
    say(f"{what}: {rounds} conversions, 0 wrong, 95 % bound {3 / rounds:.3f}; {tally}")


@pytest.mark.parametrize("rounds", LENGTHS)
def test_workers_on_a_directory(
    rounds: int, source: Path, expected: dict[tuple[str, str], dict[str, bytes]], chance: random.Random, tmp_path: Path
) -> None:
    tally = Tally()
    for turn in range(rounds):
        name = chance.choice(sorted(TARGETS))
        target = tmp_path / f"turn{turn}" / "target"
        flags = (*TARGETS[name], "--part-size", "256KiB", "--threads", "1")
        convert_in_turmoil(str(source), str(target), flags, {}, chance, tally)
        assert contents(target) == expected["directory", name], turn
        subprocess.run(
            [sys.executable, "-m", "reshard.cli.main", "clean", str(target)], check=True, capture_output=True
        )
        assert [p.name for p in target.parent.iterdir() if ".reshard-" in p.name] == []
        shutil.rmtree(target.parent)
    report("4 workers on a directory", rounds, tally)


@pytest.mark.parametrize("rounds", LENGTHS)
def test_workers_on_s3(
    rounds: int, expected: dict[tuple[str, str], dict[str, bytes]], chance: random.Random, store: Store
) -> None:
    tally = Tally()
    for turn in range(rounds):
        name = chance.choice(sorted(TARGETS))
        flags = (*TARGETS[name], "--part-size", "5MiB", "--threads", "1")
        env = store.s3.env(store.proxy.endpoint)
        target = f"s3://{store.bucket}/turn{turn}/target"
        convert_in_turmoil(f"s3://{store.bucket}/run", target, flags, env, chance, tally, store)
        store.judge(f"turn{turn}", expected["s3", name])
    report("4 workers on S3", rounds, tally)


@pytest.mark.parametrize("rounds", LENGTHS)
def test_workers_of_a_service(
    rounds: int,
    expected: dict[tuple[str, str], dict[str, bytes]],
    chance: random.Random,
    store: Store,
    make_stack: Callable[[str], Stack],
    postgres: PostgresServer,
    tmp_path: Path,
) -> None:
    tally = Tally()
    stack = make_stack("celery")
    env = store.s3.env(store.proxy.endpoint)
    with a_service(stack, tmp_path, env, postgres.directory, chance) as service:
        for turn in range(rounds):
            name = chance.choice(sorted(TARGETS))
            target = f"s3://{store.bucket}/turn{turn}/target"
            service.run(f"s3://{store.bucket}/run", target, name, store, tally)
            store.judge(f"turn{turn}", expected["s3", name])
    report("4 workers of a service", rounds, tally)
