"""The API keeps what its `/openapi.json` says, for whatever a caller sends: schemathesis against a real service.

The service has PostgreSQL, Redis' place is taken by an embedded executor, and its engine follows scripts, so that jobs
succeed, fail and wait within milliseconds. The callers are the operator, a token of each scope, and nobody. CI gives
the operator twenty seconds and the others six, with one seed. The long form takes ten minutes and a seed of its own:
`pytest tests/contract -m nightly`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from house.seeds import run_seed
from reshard.api.client import Client
from reshard.choices import TokenScope
from servers.postgres import PostgresServer
from servers.stack import Stack

HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
TOKEN = "the-token-of-the-operator"
FULL_SECONDS = int(os.environ.get("RESHARD_CONTRACT_S", "600"))
SEED = 18
_LEAST_CASES = 40


@dataclass(frozen=True)
class Principal:
    """A caller."""

    name: str
    seconds: int = 6
    """Time that CI gives it."""
    without_checks: tuple[str, ...] = ("positive_data_acceptance",)
    """Checks that cannot hold for this caller: calls without their scope are refused, valid or not."""


PRINCIPALS = (
    Principal("operator", seconds=20, without_checks=()),
    *(Principal(scope.value) for scope in TokenScope),
    Principal("nobody"),
)


@dataclass(frozen=True)
class Service:
    url: str
    root: Path
    tokens: Mapping[str, str]
    """The token of each principal that has one."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Generator[Service]:
    directory = tmp_path_factory.mktemp("contract")
    settings = {"RESHARD_ANONYMOUS": "", "RESHARD_TOKEN": TOKEN, "RESHARD_ROOTS": str(directory)}
    stack = Stack(directory / "logs", postgres.new_database(), extra=settings)
    with stack.api() as url, stack.worker(), Client(url, token=TOKEN) as client:
        client.admin.create_tenant("team")
        made = {s.value: client.admin.create_token(s.value, [s], tenant="team").secret for s in TokenScope}
        yield Service(url, directory, {"operator": TOKEN, **made})


def for_seconds(seconds: int) -> tuple[str, ...]:
    """Flags that let schemathesis go on for a time."""
    return ("--max-time", str(seconds))


FEW_CASES = ("--phases", "examples,fuzzing", "--max-examples", "2")
"""Flags that let it make two cases of each operation, however long that takes."""


def fuzz(service: Service, principal: Principal, directory: Path, extent: tuple[str, ...], *, seed: int) -> str:
    """Let schemathesis call the service as a principal; returns what it said. It must find nothing."""
    argv = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"),
        *(f"{service.url}/openapi.json", "--checks", "all", *extent, "--seed", str(seed)),
        *("--generation-database", "none", "--request-timeout", "30", "--no-color", "--continue-on-failure"),
    ]
    if principal.name in service.tokens:
        argv += ["--header", f"Authorization: Bearer {service.tokens[principal.name]}"]
    if principal.without_checks:
        argv += ["--exclude-checks", ",".join(principal.without_checks)]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), "CONTRACT_ROOT": str(service.root), "PYTHONWARNINGS": ""}
    # Its cache lands in the working directory.
    done = subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True)
    log = (service.root / "logs" / "api.log").read_text(errors="replace")
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-4_000:]}\n{log[-4_000:]}"
    assert "Traceback" not in log, log[-8_000:]
    return done.stdout


def cases_in(said: str) -> int:
    """How many cases schemathesis says that it made: it says no number if it came to no call at all."""
    return int([0, *re.findall(r"(\d+) generated", said)][-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("principal", PRINCIPALS, ids=lambda principal: principal.name)
def test_the_api_keeps_its_schema(service: Service, principal: Principal, tmp_path: Path) -> None:
    # A busy machine makes few calls in this time: then it gets a number of cases instead of a time.
    said = fuzz(service, principal, tmp_path, for_seconds(principal.seconds), seed=SEED)
    if cases_in(said) <= _LEAST_CASES:
        said = fuzz(service, principal, tmp_path, FEW_CASES, seed=SEED)
    assert cases_in(said) > _LEAST_CASES, said


@pytest.mark.nightly
@pytest.mark.timeout(FULL_SECONDS + 600)
@pytest.mark.parametrize("principal", PRINCIPALS, ids=lambda principal: principal.name)
def test_the_api_keeps_its_schema_for_long(service: Service, principal: Principal, tmp_path: Path) -> None:
    seed = run_seed()
    sys.stdout.write(fuzz(service, principal, tmp_path, for_seconds(FULL_SECONDS // len(PRINCIPALS)), seed=seed))
