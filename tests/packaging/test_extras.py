"""Each extra alone has what it is for: by what its code imports, and, at length, by doing it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from house.repository import ROOT, pyproject
from servers.process import ServerProcess, free_port
from servers.stack import end_tree

CHECKPOINT = ROOT / "tests" / "data" / "zero2_tiny"

RUNS = {
    "": ("client/reshard",),
    "service": ("client/reshard", "worker/reshard_engine", "worker/reshard_worker", "service"),
    "worker": ("client/reshard", "worker/reshard_engine", "worker/reshard_worker", "service/reshard_jobs"),
}
"""The packages whose code runs where an extra is installed alone."""
COMES_WITH = {"kombu": "celery", "markupsafe": "jinja2", "pydantic-core": "pydantic", "starlette": "fastapi"}
"""Imported by us, and part of the interface of something that we declare."""


def third_party_imports(folder: Path) -> Iterator[tuple[str, Path]]:
    """Distributions that the modules below a folder import, wherever in the module."""
    known = packages_distributions()
    for path in sorted(folder.rglob("*.py")):
        if "reshard_engine/testing/" in path.as_posix():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            for name in {name.partition(".")[0] for name in names}:
                if name in sys.stdlib_module_names or name.startswith("reshard"):
                    continue
                yield _plain(known[name][0]), path


def declared(extra: str) -> set[str]:
    project = pyproject()["project"]
    lines = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
    return {_plain(re.match(r"[\w.-]+", line)[0]) for line in lines}  # pyright: ignore[reportOptionalSubscript]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


OTEL = {_plain(name) for name in packages_distributions()["opentelemetry"]}
SIGNING = {"cryptography", "securesystemslib"}
AZURE = {"requests", *(_plain(name) for name in packages_distributions()["azure"])}
GOOGLE = {"requests", "urllib3", *(_plain(name) for name in packages_distributions()["google"]), "google-crc32c"}
HUB = {"huggingface-hub"}
GUESTS = {
    "": {"ipython"},
    "service": {"ipython", "torch", *OTEL, *SIGNING, *AZURE, *GOOGLE, *HUB},
    "worker": {"ipython", *OTEL, *SIGNING, *AZURE, *GOOGLE, *HUB},
}
"""Looked for before they are imported: the code does without, or says which extra has it."""


@pytest.mark.parametrize("extra", sorted(RUNS))
def test_an_extra_declares_what_its_code_imports(extra: str) -> None:
    missing = {
        f"{name} ({path.relative_to(ROOT)})"
        for folder in RUNS[extra]
        for name, path in third_party_imports(ROOT / folder)
        if COMES_WITH.get(name, name) not in declared(extra) | GUESTS[extra]
    }
    assert missing == set()


@pytest.fixture(scope="module", params=["service", "worker"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[str, Path]]:
    """An extra, and the `bin` folder of an environment that has it alone."""
    directory = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    what = f"reshard[{request.param}] @ {wheel.as_uri()}"
    done = subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield request.param, directory / "bin"
    # With torch a gigabyte, which pytest would keep for three runs.
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_extra_alone_does_what_it_is_for(installed: tuple[str, Path], tmp_path: Path) -> None:
    extra, programs = installed
    reshard = str(programs / "reshard")
    for number, options in enumerate((["--to", "universal"], ["--to", "safetensors", "--dtype", "bf16"])):
        target = str(tmp_path / f"local{number}")
        assert run(reshard, "convert", str(CHECKPOINT), target, *options) == target
        run(reshard, "verify", target)
    if extra == "worker":
        return
    port, state = free_port(), {"XDG_STATE_HOME": str(tmp_path / "state")}
    argv = [reshard, "serve", "--port", str(port), "--data-dir", str(tmp_path / "service")]
    service = ServerProcess(argv, env={**_environment(), **state}, log=tmp_path / "serve.log", cwd=tmp_path)
    try:
        service.wait_until(lambda: "Application startup complete" in service.log.read_text())
        at = {"RESHARD_URL": f"http://127.0.0.1:{port}", **state}
        target = str(tmp_path / "by_job")
        assert run(reshard, "submit", str(CHECKPOINT), target, "--to", "safetensors", "--wait", **at) == target
        run(reshard, "verify", target)
    finally:
        end_tree(service)


def run(*argv: str, **settings: str) -> str:
    """The stdout of a command that must succeed."""
    env = {**_environment(), **settings}
    done = subprocess.run(list(argv), capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RESHARD_", "PYTHON"))}
