"""`ls` and `prune` over a run of forty checkpoints in four formats, on a disk and in an object store."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import reshard
from house.dying import dying
from house.expected import raised
from house.promises import command
from house.saves import DATA
from reshard.errors import SourceError
from reshard.local import load_engine
from servers.stores import ObjectServer

FORMATS = ("zero", "universal", "dcp", "safetensors")
STEPS = range(100, 4_100, 100)
KEPT = [100, 1_000, 2_000, 3_000, 3_800, 3_900, 4_000]
"""The last three, every thousandth, and the one that `latest` names."""
WORDS = ("--keep-last", "3", "--keep-every", "1000")


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoints are of four formats in turn, each with its own step."""
    place = tmp_path_factory.mktemp("forty")
    run, made = place / "run", place / "made"
    for step in STEPS:
        to = FORMATS[step // 100 % 4]
        target = run / f"global_step{step}"
        if to == "safetensors" and step > 300:
            shutil.copytree(run / "global_step300", target)
            continue
        base = made / f"global_step{step}"
        shutil.copytree(DATA / "zero2_tiny" / "global_step3", base)
        states = torch.load(base / "mp_rank_00_model_states.pt", weights_only=False)
        states["global_steps"] = step
        torch.save(states, base / "mp_rank_00_model_states.pt")
        if to == "zero":
            shutil.copytree(base, target)
        else:
            reshard.convert(base, target, to=to, pointer=False if to == "universal" else None)
    (run / "latest").write_text("global_step100")
    return run


@pytest.fixture
def run(forty: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(forty, tmp_path / "run"))


def table(url: str) -> list[tuple[str, str | None, int | None, int, int, bool]]:
    listed = load_engine().steps(url)
    assert (listed.others, listed.removing) == ((), ())
    return [(s.name, s.format, s.step, s.files, s.size_bytes, s.complete) for s in listed.steps]


def test_forty_checkpoints_are_listed(forty: Path) -> None:
    found = table(str(forty))
    assert [(name, step) for name, _, step, _, _, _ in found] == [(f"global_step{step}", step) for step in STEPS]
    assert all(complete for *_, complete in found)
    assert len({form for _, form, *_ in found}) == 4
    assert command("ls", str(forty))[1].count("complete") == 40


def test_pruned_on_a_disk(run: Path) -> None:
    code, out, err = command("prune", str(run), *WORDS, "--yes")
    assert code == 0, err
    assert "removed 33 checkpoints" in out
    assert [step for _, _, step, *_ in table(str(run))] == KEPT
    assert {path.name for path in run.iterdir()} == {"latest", *(f"global_step{step}" for step in KEPT)}


def test_listed_and_pruned_in_an_object_store(store: ObjectServer, store_bucket: str, forty: Path) -> None:
    store.upload(forty, store_bucket, "run")
    run = f"{store.scheme}://{store_bucket}/run"
    assert table(run) == table(str(forty))
    assert command("prune", run, *WORDS, "--yes")[0] == 0
    left = store.read_all(store_bucket, "run")
    kept = {f"global_step{step}" for step in KEPT}
    assert {name.partition("/")[0] for name in left} == {"latest", *kept}
    for name in kept:
        for path in (p for p in (forty / name).rglob("*") if p.is_file()):
            assert left[str(path.relative_to(forty))] == path.read_bytes()


_WRITES = """
from reshard_engine.storage.locations import service_store
kind = service_store({scheme!r})
for name in ("put", "delete"):
    setattr(kind, name, counted(getattr(kind, name)))
"""
"""Counts writing calls: put, delete what goes first, delete the rest, delete what put wrote."""


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_prune_that_is_killed_in_an_object_store(
    store: ObjectServer, store_bucket: str, forty: Path, calls: int
) -> None:
    names = [f"global_step{step}" for step in (200, 300, 400, 500)]
    for name in names:
        store.upload(forty / name, store_bucket, f"run/{name}")
    url = f"{store.scheme}://{store_bucket}/run"
    words = ["prune", url, "--keep-last", "1", "--yes"]
    environment = {**os.environ, **store.env()}
    writes = _WRITES.format(scheme=store.scheme)
    died = subprocess.run(dying(writes, calls, words), check=False, capture_output=True, env=environment)
    assert died.returncode == -9, died.stderr
    listed = load_engine().steps(url)
    assert [step for step in listed.steps if not step.complete] == [], "nothing half removed is listed"
    assert len(listed.removing) == 1
    if calls in (2, 3):
        # A loader that knows nothing of the removal refuses as well: the files that it begins with went first.
        assert raised(SourceError, lambda: reshard.inspect(f"{url}/{listed.removing[0]}"))
    assert command(*words)[0] == 0
    assert {name.partition("/")[0] for name in store.read_all(store_bucket, "run")} == {"global_step500"}
