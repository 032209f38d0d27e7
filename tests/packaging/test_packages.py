"""Wheel and sdist: what PyPI would get, and what a packager builds from the sdist."""

from __future__ import annotations

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

from house.repository import ROOT

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
