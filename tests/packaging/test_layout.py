"""pyproject.toml, the folders and the installed distribution say the same."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from house.repository import ROOT, SOURCE_ROOTS, packages_on_disk, pyproject


def test_the_wheel_lists_the_packages_that_are_there() -> None:
    listed = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(listed) == packages_on_disk()


def test_boundaries_know_every_package() -> None:
    named = pyproject()["tool"]["importlinter"]["root_packages"]
    assert sorted(named) == sorted(path.split("/")[1] for path in packages_on_disk())


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_is_no_package(root: str) -> None:
    # All three roots are on sys.path: `worker/utils.py` would be `import utils`.
    assert [path.name for path in (ROOT / root).glob("*.py")] == []


@pytest.mark.parametrize(
    ("group", "names"), [("reshard.engine", {"local"}), ("reshard.commands", {"db", "gc", "serve", "worker"})]
)
def test_entry_points_resolve(group: str, names: set[str]) -> None:
    found = entry_points(group=group)
    assert {point.name for point in found} == names
    for point in found:
        assert point.load() is not None


def test_the_lower_bounds_are_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = pyproject()["project"]
    wanted = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    names = {text.split(";")[0].split("[")[0].split(">")[0].strip().lower().replace("_", "-") for text in wanted}
    assert names - {"reshard"} - pinned == set()
