"""Wheel and sdist: what PyPI would get, and what a packager builds from the sdist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml

from house.repository import ROOT, SOURCE_ROOTS, packages_on_disk

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LEFT_OUT = re.compile(r"\.github/|\.ci/|\.gitignore|\.pre-commit-config\.yaml")
"""Files of the repository that do nothing outside of it."""

pytestmark = pytest.mark.timeout(300)


def build(source: Path, out: Path, *arguments: str) -> Path:
    """Build with the packages that are installed: CI needs no network for it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *arguments, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (found,) = directory.iterdir()
    return found


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_the_sdist_has_what_is_needed_to_build_and_test(unpacked: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: only git knows which files belong to the project")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {name for name in tracked - found if not LEFT_OUT.match(name)} == set()
    # New files that are not added yet may be there.
    others = found - tracked - {"PKG-INFO", ".gitignore"}
    assert {name for name in others if not (ROOT / name).exists()} == set()


def test_the_wheel_of_the_sdist_is_that_of_the_clone(unpacked: Path, wheel: Path, tmp_path: Path) -> None:
    again = build(unpacked, tmp_path, "--wheel")
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert {n: one.read(n) for n in one.namelist()} == {n: other.read(n) for n in other.namelist()}


def test_metadata_is_complete_and_links_work_on_pypi(sdist: Path, wheel: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    found = metadata_of(wheel)
    assert found["Name"] == "reshard"
    assert found["Author"] == "The Reshard project"
    assert {url.split(",")[0] for url in found.get_all("Project-URL", ())} == set(PROJECT["urls"])
    text = str(found.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10
    assert [t for t in targets if not t.startswith(("https://", "#"))] == []
    # Each link leads to a file of this repository, at the tag of this version.
    start = f"https://github.com/reshard/reshard/blob/v{PROJECT['version']}/"
    files = [t.removeprefix(start).partition("#")[0] for t in targets if t.startswith(start)]
    assert len(files) > 5
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_versions_agree() -> None:
    version = PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "reshard" / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    assert f"image: reshard:{version}" in (ROOT / "docker-compose.yml").read_text()


def targets_of(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.stem)
def test_workflows_call_what_there_is(page: Path) -> None:
    """Workflows run the Makefile's targets, with the least rights, and store no password."""
    workflow = yaml.safe_load(page.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [words for step in steps for words in re.findall(r"\bmake ([a-z -]+)", step.get("run", ""))]
    asked = {target for words in commands for target in words.split()}
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in workflow["jobs"].values()]
    asked |= {command for matrix in matrices for command in matrix.get("command", ())}
    assert asked <= targets_of((ROOT / "Makefile").read_text())
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    assert set(re.findall(r"secrets\.(\w+)", page.read_text())) <= {"GITHUB_TOKEN"}


def test_workflows_try_each_python_that_the_package_allows() -> None:
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert tests["jobs"]["test"]["strategy"]["matrix"]["python"] == named


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_quick_tests_pass_in_the_sdist(unpacked: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "RESHARD", "VIRTUAL"))}
    done = subprocess.run(
        ["make", "quick", f"PYTHON={sys.executable}"], cwd=unpacked, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d{3} passed", done.stdout)


# The package without extras: a client and a command line, and nothing heavy.


HEAVY = (
    *("boto3", "botocore", "celery", "deepspeed", "fastapi", "fsspec", "kombu", "numpy", "psycopg", "redis", "s3fs"),
    *("sqlalchemy", "starlette", "torch", "uvicorn"),
)


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
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, cwd=cwd, env=env, timeout=180)


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
