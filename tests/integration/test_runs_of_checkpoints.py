"""`ls` and `prune` over a run of forty checkpoints in four formats, on a disk and in an object store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import reshard
from house.dying import dying
from house.expected import raised
from house.promises import command
from house.saves import DATA
from house.waiting import PATIENCE_S
from reshard.engine import load_engine
from reshard.errors import SourceError
from reshard_engine.storage.locations import open_location
from servers.azure import sas_of
from servers.stores import ObjectServer

FORMATS = ("zero", "universal", "dcp", "safetensors")
STEPS = range(100, 4_100, 100)
KEPT = [100, 1_000, 2_000, 3_000, 3_700, 3_800, 3_900, 4_000]
"""The last three, the last three with a training state, every thousandth, and the one that `latest` names."""
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
    assert f"removed {len(STEPS) - len(KEPT)} checkpoints" in out
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


def _uploaded(store: ObjectServer, bucket: str, forty: Path, *steps: int) -> str:
    """The URL of a run with some of the forty steps in a bucket."""
    for step in steps:
        store.upload(forty / f"global_step{step}", bucket, f"run/global_step{step}")
    return f"{store.scheme}://{bucket}/run"


def test_a_step_that_was_written_again_with_the_same_bytes_stays(
    store: ObjectServer, store_bucket: str, forty: Path
) -> None:
    """S3's ETag is that of the bytes; the run that wrote them again needs them."""
    url = _uploaded(store, store_bucket, forty, 200, 500)
    words, step = ["prune", url, "--keep-last", "1", "--yes"], open_location(f"{url}/global_step200")
    environment = {**os.environ, **store.env()}
    dead = dying(_WRITES.format(scheme=store.scheme), 1, words)
    assert subprocess.run(dead, check=False, capture_output=True, env=environment).returncode == -9
    before = {path: info.modified_at for path, info in step.files().items()}
    end = time.monotonic() + PATIENCE_S
    while any(info.modified_at == before[path] for path, info in step.files().items()):
        assert time.monotonic() < end, "the store's clock stands still"
        _uploaded(store, store_bucket, forty, 200)
    assert command(*words)[0] == 0
    assert table(url) == [row for row in table(str(forty)) if row[2] in (200, 500)]


MARKS = ["..%2Fvictim", "..%2F..%2F{other}%2Fvictim", "global_step500%2F..%2F..%2Fvictim", "..", ".", "", "%2Fvictim"]
"""Marks that name a place outside the run, or no place."""


def test_marks_that_no_prune_wrote_remove_nothing_and_block_nothing(
    store: ObjectServer, store_bucket: str, forty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.scheme == "az":  # a signature with the account's key covers the path, one in a URL does not
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", sas_of(store))
    other, victim = store.new_bucket(), forty / "global_step300"
    url = _uploaded(store, store_bucket, forty, 200, 500)
    store.upload(victim, store_bucket, "victim")
    store.upload(victim, other, "victim")
    for mark in (text.format(other=other) for text in MARKS):
        place = open_location(f"{store.scheme}://{other if other in mark else store_bucket}/victim")
        files = [(f"{unquote(mark)}/{path}", i.pin, i.modified_at) for path, i in place.files().items()]
        record = json.dumps({"first": 0, "files": files}).encode()
        store.put(store_bucket, f"run/.reshard-removing-{mark}", record)
    code, out, err = command("prune", url, "--keep-last", "1", "--yes")
    for bucket in (store_bucket, other):
        assert store.read_all(bucket, "victim").keys() == {path.name for path in victim.iterdir()}
    assert code == 0, err
    assert "removed 1 checkpoint," in out
    assert out.count("(not one checkpoint)") == len(MARKS)
    assert [step.step for step in load_engine().steps(url).steps] == [500]
