"""What a command does not need, it does not import: that is what makes the command line answer at once.

Modules are named, not milliseconds: a slow machine must not fail this.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from house.repository import ROOT

CHECKPOINT = str(ROOT / "tests" / "data" / "zero3_tiny")
CODE = """
import json, sys
from reshard.cli.main import run
status = run(sys.argv[1:])
sys.stderr.write(json.dumps([status, sorted(sys.modules)]))
"""
NETWORK = ("aiohttp", "botocore", "fsspec", "h11", "httpcore", "httpx", "s3fs", "ssl")
GUESTS = ("celery", "fastapi", "redis", "sqlalchemy", "torch", "transformers")
ENGINE = ("numpy", "reshard_engine", "xxhash")
CONVERSION = (
    "reshard_engine.operations.conversion",
    "reshard_engine.execute.executor",
    "reshard_engine.operations.diff",
)
SCREEN = ("rich", "rich.console", "rich.progress")
MODELS = ("reshard.models", "reshard.models.reports", "reshard.models.reports", "reshard.ensuring")


def imported_by(*arguments: str) -> set[str]:
    """The modules that are there when a command has ended."""
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=180)
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0, done.stderr
    return set(modules)


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (("--help",), (*NETWORK, *GUESTS, *ENGINE, *MODELS, *SCREEN, "importlib.metadata", "pydantic")),
        (("convert", "--help"), (*NETWORK, *GUESTS, *ENGINE, *MODELS, *SCREEN)),
        (("ensure", "--help"), (*NETWORK, *GUESTS, *ENGINE, *MODELS, *SCREEN)),
        (("jobs", "list", "--help"), (*NETWORK, *GUESTS, *ENGINE, *MODELS, *SCREEN)),
        (("--version",), (*NETWORK, *GUESTS, *ENGINE, *MODELS, *SCREEN)),
        ((), (*NETWORK, *GUESTS, *ENGINE, *MODELS, *SCREEN)),
        (("inspect", CHECKPOINT, "--json"), (*NETWORK, *GUESTS, *CONVERSION, *SCREEN)),
        (("inspect", CHECKPOINT), (*NETWORK, *GUESTS, *CONVERSION, *SCREEN)),
    ],
    ids=" ".join,
)
def test_what_a_command_does_not_import(arguments: tuple[str, ...], unwanted: tuple[str, ...]) -> None:
    assert imported_by(*arguments) & set(unwanted) == set()


def test_the_command_that_talks_to_a_service_does() -> None:
    """The control: the names above are those that Python knows these modules by."""
    code = "import sys, reshard.api.client; assert {'httpx', 'ssl'} <= set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
