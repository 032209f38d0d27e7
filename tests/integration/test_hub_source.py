"""Checkpoints in repositories of the Hugging Face hub: read by exact ranges of one commit, with typed errors.

The hub is a stand-in (`servers/hub.py`); the client is the real one. Xet storage is not served.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load, save

import reshard
from house.expected import refused
from house.repository import ROOT
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import read_bytes
from reshard_engine.storage.urls import canonical_url
from servers.hub import TOKEN, Blob, Hub, hub_of_this_process
from servers.stack import Stack

SOURCE = ROOT / "tests" / "data" / "zero2_tiny"
SIZE_BYTES = 400_000


def _weights(number: float) -> bytes:
    count = SIZE_BYTES // 8
    return save({"a": np.full(count, number, np.float32), "b": np.full(count, -number, np.float32)})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    """A hub with one repository of weights."""
    with hub_of_this_process(monkeypatch) as found:
        config = json.dumps({"model_type": "llama"}).encode()
        found.repository("org/name", {"model.safetensors": _weights(1), "config.json": config, ".gitattributes": b"-"})
        yield found


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the store would have waited between its tries."""
    asked: list[float] = []
    monkeypatch.setattr("reshard_engine.storage.hub.time.sleep", asked.append)
    return asked


def test_a_training_checkpoint_is_read_as_from_a_disk(hub: Hub, tmp_path: Path) -> None:
    """A DeepSpeed run in a directory of a branch whose name has a slash: every operation gives what the files give."""
    run = {f"run/{p.relative_to(SOURCE)}": p.read_bytes() for p in SOURCE.rglob("*") if p.is_file()}
    found = hub.repository("org/training", {})
    found.refs["exp/1"] = found.refs["main"]
    found.commit("exp/1", {path: hub.blob(path, data) for path, data in run.items()}, "the run")
    url = "hf://org/training@exp%2F1/run"
    here, there = reshard.inspect(SOURCE), reshard.inspect(url)
    assert (there.format, there.tag, there.parameters) == (here.format, here.tag, here.parameters)
    assert reshard.diff(url, SOURCE).equal
    assert reshard.fingerprint(url).digest == reshard.fingerprint(SOURCE).digest
    for name, source in (("here", SOURCE), ("there", url)):
        reshard.convert(source, tmp_path / name, to="safetensors", dtype="bf16", progress=False)
    made, as_from_disk = (tmp_path / name / "model.safetensors" for name in ("there", "here"))
    assert made.read_bytes() == as_from_disk.read_bytes()
    assert reshard.plan(url, "-", to="safetensors").source_format == here.format


def test_a_job_of_a_service_reads_it(hub: Hub, tmp_path: Path) -> None:
    """Below a root, with the token of the worker's environment; an upload is refused when it is submitted."""
    roots = {"RESHARD_ROOTS": f"hf://org,{tmp_path}"}
    env = {name: value for name, value in hub.env().items() if not name.startswith("RESHARD_")}
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", scripted=False, extra={**env, **roots})
    hub.repositories["org/name"].private = True
    with stack.api() as url, stack.worker(), Client(url, None) as client:
        job = client.submit("hf://org/name", str(tmp_path / "out"), to="safetensors")
        assert client.wait(job.id, timeout_s=PATIENCE_S).state == "SUCCEEDED"
        refused(
            "request.root_forbidden", lambda: client.submit("hf://other/name", str(tmp_path / "x"), to="safetensors")
        )
        refused("request.unsatisfiable", lambda: client.submit("hf://org/name", "hf://org/new", to="safetensors"))
    assert reshard.diff("hf://org/name", tmp_path / "out").equal
    assert {*hub.repositories} == {"org/name"}


def test_a_range_is_read_as_it_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    """One conversion reads each byte once: no blocks, no second listing, and the token goes to the hub alone."""
    reshard.convert("hf://org/name", tmp_path / "out", to="safetensors", progress=False)
    assert (tmp_path / "out" / "model.safetensors").read_bytes()[-100:] == _weights(1)[-100:]
    files = hub.seen("GET", "^/get/")
    # The header comes with a first block of 64 KiB; then each tensor is read once.
    assert sum(r.sent_bytes for r in files) == SIZE_BYTES + 65_536
    assert not any(r.authorized for r in files)
    asked = [r for r in hub.requests if r not in files and r.path != "/api/agent-harnesses"]
    assert all(r.authorized for r in asked)
    # The commit, its tree in pages of three, config.json, and one request for the address of the large file.
    assert len(asked) <= 5, asked


def test_a_push_in_the_middle_changes_nothing(hub: Hub, tmp_path: Path) -> None:
    """The branch gets other weights of equal size while the first range is read: all of them are of the old commit."""
    repository = hub.repositories["org/name"]

    def push() -> None:
        new = {**repository.files(), "model.safetensors": hub.blob("model.safetensors", _weights(2))}
        repository.commit("main", new, "new weights")

    old = repository.refs["main"]
    hub.fail("GET", "^/get/", call=push)
    reshard.convert("hf://org/name", tmp_path / "out", to="safetensors", part_size=65_536, progress=False)
    made = load((tmp_path / "out" / "model.safetensors").read_bytes())
    assert set(made["a"]) == {1.0}
    assert set(made["b"]) == {-1.0}
    assert repository.refs["main"] != old
    assert all(f"/{old}/" in r.path for r in hub.seen("GET", "/resolve/"))
    assert reshard.diff("hf://org/name", tmp_path / "out").equal is False
    assert reshard.diff(f"hf://org/name@{old}", tmp_path / "out").equal


def test_content_that_is_not_the_pinned_one_is_refused(hub: Hub) -> None:
    """The history was rewritten, or removed, after the listing."""
    repository, location = hub.repositories["org/name"], open_location("hf://org/name")
    info = location.files()["model.safetensors"]
    assert info.pin == f"sha256:{repository.files()['model.safetensors'].sha256}"
    assert read_bytes(location.store, info, 8, 1) == b"{"
    commit = repository.refs["main"]
    other = open_location("hf://org/name")
    listed = other.files()
    repository.commits[commit]["model.safetensors"] = hub.blob("model.safetensors", _weights(2))
    repository.commits[commit]["config.json"] = Blob(b"{}", large=False)
    for name in listed:
        refused("source.changed", lambda name=name: read_bytes(other.store, listed[name], 0, 1))
    repository.commits.clear()
    refused("source.changed", lambda: read_bytes(other.store, listed["config.json"], 0, 1))


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("hf://org/none", "source.not_found", "no such repository"),
        ("hf://org/name@none", "source.not_found", "no such revision"),
        ("hf://org/name/none", "source.not_found", ""),
        ("hf://org/gated", "storage.denied", "gated"),
        ("hf://org", "request.invalid", "names no repository"),
        ("hf://org/na..me", "request.invalid", "Cannot have"),
        ("hf://datasets/org/name", "request.invalid", "hf download ORG/NAME --repo-type dataset"),
        ("hf://buckets/org/name", "request.invalid", "model repositories"),
        ("hf://org/name@", "request.invalid", "%2F"),
        ("hf://org/name@a%2fb", "request.invalid", "%2F"),
    ],
)
def test_what_is_not_there_has_a_typed_error(hub: Hub, what: str, code: str, words: str) -> None:
    hub.repository("org/gated", {"model.safetensors": _weights(1)}, gated=True)
    error = refused(code, lambda: reshard.inspect(what))
    assert words in f"{error.message} {error.fix}"


def test_a_private_repository_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub does not say whether it exists, and a wrong token is another error than none."""
    hub.repository("org/private", {"model.safetensors": _weights(1)}, private=True)
    assert reshard.inspect("hf://org/private").format == "safetensors"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused("storage.denied", lambda: reshard.inspect("hf://org/private"))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    error = refused("source.not_found", lambda: reshard.inspect("hf://org/private"))
    assert "HF_TOKEN" in error.fix
    assert TOKEN not in str(error)


def test_a_rate_limit_is_waited_for_as_long_as_the_hub_asks(hub: Hub, waits: list[float]) -> None:
    """By either header; and a limit that does not end is `storage.unavailable` with the seconds."""
    hub.fail("GET", "/tree/", status=429, headers={"Retry-After": "7"})
    hub.fail("GET", "/resolve/", status=429, headers={"RateLimit": '"resolvers";r=0;t=55'})
    assert reshard.inspect("hf://org/name").parameters == 2
    assert waits == [8.0, 56.0]
    hub.fail("GET", "/revision/", status=429, times=100, headers={"Retry-After": "9000"})
    error = refused("storage.unavailable", lambda: reshard.inspect("hf://org/name"))
    assert "wait 300 s" in error.message
    assert error.retryable


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408])
def test_a_failure_that_passes_is_tried_again(hub: Hub, waits: list[float], tmp_path: Path, status: int) -> None:
    for path in ("/revision/", "/tree/", "/resolve/", "^/get/"):
        hub.fail("GET", path, status=status, times=2)
    reshard.convert("hf://org/name", tmp_path / "out", to="safetensors", progress=False)
    assert (tmp_path / "out" / "model.safetensors").read_bytes()[-SIZE_BYTES:] == _weights(1)[-SIZE_BYTES:]
    assert len(waits) == 8
    hub.fail("GET", "^/get/", status=status, times=100)
    refused("storage.unavailable", lambda: reshard.diff("hf://org/name", tmp_path / "out"))


def test_a_body_that_ends_early_is_read_again(hub: Hub, waits: list[float], tmp_path: Path) -> None:
    hub.fail("GET", "^/get/", cut=True, times=3)
    reshard.convert("hf://org/name", tmp_path / "out", to="safetensors", progress=False)
    assert reshard.diff(tmp_path / "out", "hf://org/name").equal
    hub.fail("GET", "^/get/", cut=True, times=100)
    refused("storage.unavailable", lambda: reshard.diff("hf://org/name", tmp_path / "out"))


def test_a_server_that_does_not_answer_is_given_up(
    hub: Hub, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.fail("GET", "^/get/", times=5, call=lambda: released.wait(120))
    error = refused("storage.unavailable", lambda: reshard.inspect("hf://org/name"))
    assert "did not answer in time" in error.message
    released.set()


def test_a_signed_address_that_expired_is_asked_for_again(hub: Hub) -> None:
    location = open_location("hf://org/name")
    info = location.files()["model.safetensors"]
    whole = _weights(1)
    assert read_bytes(location.store, info, 0, 100) == whole[:100]
    assert read_bytes(location.store, info, 100, 100) == whole[100:200]
    assert len(hub.seen("GET", "/resolve/")) == 1
    hub.generation += 1
    assert read_bytes(location.store, info, 200, 100) == whole[200:300]
    assert len(hub.seen("GET", "/resolve/")) == 2


def test_a_server_without_ranges_is_refused(hub: Hub) -> None:
    """A whole file in place of a range would be taken for the range."""
    hub.ranges = False
    location = open_location("hf://org/name")
    info = location.files()["model.safetensors"]
    error = refused("storage.protocol", lambda: read_bytes(location.store, info, 0, 100))
    assert "bytes 0-99 were asked for, and the answer is 200" in error.message
    assert read_bytes(location.store, info) == _weights(1)


def test_offline_mode_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused("request.invalid", lambda: reshard.inspect("hf://org/name")).fix == "unset HF_HUB_OFFLINE"


def test_a_place_has_one_spelling() -> None:
    """Roots and permissions compare the place that is opened."""
    assert {canonical_url(u) for u in ("hf://o/n/p", "hf://models/o/n@main/p", "HF://o/n@main/p/")} == {"hf://o/n/p"}
    assert (
        canonical_url("hf://o/n@refs/pr/1/p") == canonical_url("hf://o/n@refs%2Fpr%2F1/p") == "hf://o/n@refs%2Fpr%2F1/p"
    )
    for wrong in ("hf://o/n/p%2Fq", "hf://o@r/n", "hf://o/n@a@b", "hf://o/n@%2e%2e", "hf://o/n/../m"):
        refused("request.invalid", lambda wrong=wrong: canonical_url(wrong))


def test_without_the_library_the_error_names_its_extra() -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from reshard.cli.main import run\nrun(['inspect', 'hf://org/name'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "request.unknown_scheme" in done.stderr
    assert "[hub]" in done.stderr
