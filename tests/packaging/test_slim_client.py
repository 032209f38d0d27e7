"""The package without extras: a client and a command line, and nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from house.repository import ROOT, SOURCE_ROOTS, packages_on_disk

HEAVY = (
    *("boto3", "botocore", "celery", "deepspeed", "fastapi", "fsspec", "kombu", "numpy", "psycopg", "redis", "s3fs"),
    *("sqlalchemy", "starlette", "torch", "uvicorn"),
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def slim(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel and its own dependencies."""
    directory = tmp_path_factory.mktemp("slim")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory / "bin"


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RESHARD_", "PYTHON"))}
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, cwd=cwd, env=env, timeout=60)


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(ROOT / root))
        for root in SOURCE_ROOTS
        for package in packages_on_disk()
        if package.startswith(f"{root}/")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in path.parts)
    }
    assert names == wanted


def test_every_module_of_the_client_imports(slim: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, importlib.util, json, pkgutil, sys
import reshard
for module in pkgutil.walk_packages(reshard.__path__, "reshard."):
    importlib.import_module(module.name)
for name in reshard.__all__:
    getattr(reshard, name)
heavy = {HEAVY!r}
print(json.dumps({{
    "installed": [name for name in heavy if importlib.util.find_spec(name)],
    "imported": [name for name in heavy if name in sys.modules],
    "file": reshard.__file__,
}}))
"""
    done = run(slim / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["installed"] == []
    assert found["imported"] == []
    assert not found["file"].startswith(str(ROOT))


def test_the_command_line_works(slim: Path, tmp_path: Path) -> None:
    done = run(slim / "reshard", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "reshard 0.1.0\n")
    done = run(slim / "reshard", "convert", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--overwrite" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("inspect", "ckpt"), "worker"),
        (("convert", "ckpt", "out", "--to", "universal"), "worker"),
        (("verify", "out"), "worker"),
        (("serve",), "service,worker"),
    ],
)
def test_what_needs_an_extra_says_which(slim: Path, tmp_path: Path, arguments: tuple[str, ...], extra: str) -> None:
    done = run(slim / "reshard", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: request.engine_missing: " in done.stderr
    # The environment has a wheel, and no clone.
    assert f"-m pip install -c reshard/constraints.txt './reshard[{extra}]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_without_a_service_the_client_says_how_to_name_one(slim: Path, tmp_path: Path) -> None:
    done = run(slim / "reshard", "jobs", "list", cwd=tmp_path)
    assert done.returncode == 2
    assert "fix: export RESHARD_URL=" in done.stderr
