"""Images and workflows fetch packages and base images by digest, and actions by commit."""

from __future__ import annotations

import re
import tomllib

import pytest

from house.images import DOCKERFILE, stages_of
from house.repository import ROOT

IMAGES = ROOT / "deploy" / "images"
_PACKAGE = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def packages(name: str) -> dict[str, str]:
    """The packages of a file of ours by their names, with versions; every line belongs to one."""
    text = (IMAGES / name).read_text()
    assert _PACKAGE.sub("", text).split() == []
    return {_plain(found[1]): found[2] for found in _PACKAGE.finditer(text)}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ["build.txt", "cpu.txt", "gpu.txt"])
def test_images_install_the_tested_versions_by_digest(name: str) -> None:
    pinned = {_plain(key): value for key, value in re.findall(r"^([\w.-]+)==(\S+)$", _constraints(), re.MULTILINE)}
    found = packages(name)
    assert found
    # The libraries of CUDA are not part of the environment that tests run in: torch's own metadata choose them.
    cuda = {key for key in found if re.match(r"nvidia|cuda|triton", key)}
    assert (name == "gpu.txt") == bool(cuda)
    assert {key: value for key, value in found.items() if key not in cuda and pinned.get(key) != value} == {}


def test_images_have_what_their_extras_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def named(*extras: str) -> set[str]:
        lines = [*project["dependencies"], *(x for e in extras for x in project["optional-dependencies"][e])]
        return {_plain(re.match(r"[\w.-]+", line)[0]) for line in lines}  # pyright: ignore[reportOptionalSubscript]

    assert named("service", "postgres", "otel", "sign", "azure", "gcs", "hub") <= set(packages("cpu.txt"))
    assert named("service", "postgres", "otel", "sign", "azure", "gcs", "hub", "worker") <= set(packages("gpu.txt"))
    assert "torch" not in packages("cpu.txt")


def test_nothing_is_installed_into_an_image_but_by_digest() -> None:
    steps = [value for stage in stages_of(DOCKERFILE).values() for word, value in stage.steps if word == "RUN"]
    installs = [part for value in steps for part in value.split("&&") if "pip install" in part]
    assert len(installs) >= 3
    assert [part for part in installs if "--require-hashes" not in part and "--no-index" not in part] == []


def test_actions_are_named_by_commit() -> None:
    uses = [
        line.partition("uses:")[2].strip()
        for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for line in workflow.read_text().splitlines()
        if "uses:" in line
    ]
    assert len(uses) > 10
    # The version stands beside it, for those who renew it.
    assert [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use)] == []


def _constraints() -> str:
    return (ROOT / "constraints.txt").read_text()
