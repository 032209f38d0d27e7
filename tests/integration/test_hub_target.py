"""Models uploaded to the Hugging Face hub: one commit, or nothing; again is nothing; what was sent is not sent again.

The hub is a stand-in (`servers/hub.py`); the client is the real one. Xet storage is not served.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants
from safetensors.numpy import load, save_file

import reshard
from house.expected import refused
from house.repository import ROOT
from house.waiting import wait_until
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest, Progress
from reshard.options import SourceSpec
from servers.hub import PART_BYTES, READER, Blob, Hub, hub_of_this_process

TINY = ROOT / "tests" / "data" / "zero2_tiny"
COUNT = 3 * PART_BYTES // 8
"""Elements of each of four tensors: a shard of two is sent in several parts."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    with hub_of_this_process(monkeypatch) as found:
        yield found


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the store, and the hub's client, would have waited between their tries."""
    asked: list[float] = []
    monkeypatch.setattr("reshard_engine.storage.hub.time.sleep", asked.append)
    return asked


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Weights whose elements all differ."""
    folder = tmp_path / "source"
    folder.mkdir()
    names = ("a", "b", "c", "d")
    save_file(
        {n: np.arange(COUNT, dtype=np.float32) + i * COUNT for i, n in enumerate(names)}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


OPTIONS: dict[str, Any] = {"to": "safetensors", "max_shard_size": 9 * COUNT, "part_size": 65_536, "progress": False}


def _upload(source: Path | str, url: str = "hf://org/name", **options: Any) -> reshard.ConvertResult:
    return reshard.convert(source, url, **{"model_files": source, **OPTIONS, **options})


def _command(source: Path, *, url: str = "hf://org/name") -> list[str]:
    options = ["--to", "safetensors", "--max-shard-size", str(9 * COUNT), "--model-files", str(source)]
    return [sys.executable, "-m", "reshard.cli.main", "convert", str(source), url, *options]


def _elements(files: dict[str, Blob]) -> dict[str, Any]:
    return {n: t for path, blob in files.items() if path.endswith(".safetensors") for n, t in load(blob.data).items()}


def test_all_files_appear_in_one_commit(hub: Hub, source: Path, tmp_path: Path) -> None:
    """With a card, a configuration and a manifest; the weights are those of a conversion to a disk, byte for byte."""
    done = _upload(source)
    found = hub.repositories["org/name"]
    assert found.private
    assert found.messages == ["initial commit", "Upload safetensors with reshard"]
    files = found.files()
    assert {*files} == {".gitattributes", "reshard.json", *(f.path for f in done.files)}
    local = reshard.convert(source, tmp_path / "out", **{**OPTIONS, "model_files": source, "card": True})
    assert [f.path for f in local.files] == [f.path for f in done.files]
    for entry in local.files:
        assert files[entry.path].data == (tmp_path / "out" / entry.path).read_bytes(), entry.path
    shards = [path for path, blob in files.items() if blob.large]
    assert len(shards) == 2
    assert len(hub.seen("PUT", r"^/put/\w+/\d+$")) == 2 * 4  # parts of PART_BYTES
    assert hub.uploaded_bytes == sum(len(files[path].data) for path in shards)
    # What was committed is read again: every byte, every tensor, the card.
    report = reshard.verify("hf://org/name")
    assert report.ok
    assert report.tensors == 4
    assert reshard.diff(source, "hf://org/name").equal
    card = ModelCard.load("org/name", ignore_metadata_errors=False)
    assert card.data.library_name == "transformers"
    card.validate()  # by the stand-in's rules: the front matter is YAML, and a base model is an id
    assert hub.seen("POST", "validate-yaml")


@pytest.mark.parametrize("to", ["torch", "peft", "zero"])
def test_other_formats(hub: Hub, to: str) -> None:
    """Weights as torch saves them are uploaded with exact CRC-32s; what is no model is refused before any request."""
    if to == "torch":
        reshard.convert(TINY, "hf://org/name", to=to, progress=False)
        assert reshard.verify("hf://org/name").ok
        assert reshard.diff(TINY, "hf://org/name", states="weights").equal
        return
    refused("request.unsatisfiable", lambda: reshard.convert(TINY, "hf://org/name", to=to, progress=False))
    assert not hub.requests


def test_the_same_again_is_no_second_commit(hub: Hub, source: Path, tmp_path: Path) -> None:
    """And no byte of the source's tensors is read; a file that someone changed there is not taken for ours."""
    _upload(source)
    commit = hub.repositories["org/name"].refs["main"]
    before = hub.uploaded_bytes
    again = _upload(source)
    assert again.already_done
    assert hub.uploaded_bytes == before
    found = hub.repositories["org/name"]
    assert found.refs["main"] == commit
    found.commit("main", {**found.files(), "LICENSE": Blob(b"mine", large=False)}, "a license")
    assert _upload(source).already_done
    ours = found.files()
    for name in ("README.md", next(n for n in ours if n.endswith(".safetensors"))):
        other = Blob(b"?" * len(ours[name].data), ours[name].large)  # as long as ours
        found.commit("main", {**ours, name: other}, "another one")
        error = refused("request.target_exists", lambda: _upload(source))
        assert name in error.message
        assert _upload(source, overwrite=True).already_done is False
        assert hub.uploaded_bytes == before  # the weights are there
    assert b"reshard convert" in found.files()["README.md"].data
    assert found.files()["LICENSE"].data == b"mine"


def test_another_model_is_replaced_only_when_asked(hub: Hub, source: Path) -> None:
    """A loader takes `model.safetensors` before an index: it must go with the commit that brings the shards."""
    stale = dict.fromkeys(("model.safetensors", "pytorch_model.bin", "model-00001-of-00009.safetensors"), b"old")
    found = hub.repository("org/name", {**stale, "training_args.bin": b"kept", "notes/model.safetensors": b"kept"})
    commit = found.refs["main"]
    error = refused("request.target_exists", lambda: _upload(source))
    assert "model.safetensors" in error.message
    assert "hf://ORG/NAME@BRANCH" in error.fix
    assert found.refs["main"] == commit
    assert not hub.uploaded_bytes
    _upload(source, overwrite=True)
    assert len(found.commits) == 2
    assert not set(stale) & set(found.files())
    assert {"training_args.bin", "notes/model.safetensors"} <= set(found.files())
    assert len(_elements({p: b for p, b in found.files().items() if "/" not in p})) == 4


def test_a_model_of_the_hub_gives_its_files(hub: Hub, source: Path, tmp_path: Path) -> None:
    """The configuration beside the weights comes from a repository, and the weights from another one."""
    files = {"config.json": b'{"model_type": "llama", "dtype": "float32"}', "generation_config.json": b"{}"}
    hub.repository("org/start", files)
    hub.repository("org/weights", {"model.safetensors": (source / "model.safetensors").read_bytes()})
    _upload("hf://org/weights", model_files="hf://org/start", dtype="bf16")
    found = hub.repositories["org/name"].files()
    assert json.loads(found["config.json"].data)["dtype"] == "bfloat16"
    assert found["generation_config.json"].data == b"{}"
    assert reshard.diff("hf://org/weights", "hf://org/name", states="weights").equal


def test_a_repository_can_be_cast_in_place(hub: Hub, source: Path) -> None:
    """The source is pinned to its commit, so the commit that replaces it changes nothing that is read."""
    _upload(source)
    before = hub.repositories["org/name"].refs["main"]
    _upload("hf://org/name", model_files="hf://org/name", dtype="bf16", max_shard_size=None, overwrite=True)
    found = hub.repositories["org/name"]
    assert [n for n in sorted(found.files()) if "safetensors" in n] == ["model.safetensors"]
    assert reshard.diff(f"hf://org/name@{before}", source).equal
    assert reshard.inspect("hf://org/name").dtypes == ("bfloat16",)


def test_a_file_that_is_made_goes_past_xet(hub: Hub, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends it by LFS, although hf_xet is installed: Xet takes no file that is made while it is sent."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    _upload(source)
    assert reshard.verify("hf://org/name").ok


def test_a_branch_is_written_and_made(hub: Hub, source: Path, tmp_path: Path) -> None:
    found = hub.repository("org/name", {"LICENSE": b"mine"})
    main = found.refs["main"]
    _upload(source, "hf://org/name@exp%2F1")
    assert found.refs["main"] == main
    assert {"LICENSE", "model.safetensors.index.json"} <= set(found.files("exp/1"))
    assert reshard.verify("hf://org/name@exp%2F1").problems[0].path == "LICENSE"  # it is in no manifest
    assert _upload(source, "hf://org/name@exp%2F1").already_done
    # A new branch begins at `main`, whose model is not asked for: nothing is lost.
    _upload(source)
    main = found.refs["main"]
    hub.damages = True
    refused("storage.protocol", lambda: _upload(source, "hf://org/name@half", dtype="bf16", max_shard_size=None))
    assert found.refs["half"] == main  # what the interrupted upload leaves: a branch that is where `main` is
    hub.damages = False
    _upload(source, "hf://org/name@half", dtype="bf16", max_shard_size=None)
    assert found.refs["main"] == main
    refused("request.target_exists", lambda: _upload(source, "hf://org/name@half"))
    assert [n for n in sorted(found.files("half")) if "safetensors" in n] == ["model.safetensors"]
    reshard.convert(source, tmp_path / "out", to="safetensors", progress=False)
    assert reshard.push(tmp_path / "out", "hf://org/name@pushed").already_done is False
    assert [n for n in sorted(found.files("pushed")) if "safetensors" in n] == ["model.safetensors"]


def test_a_rule_of_git_leaves_nothing_out(hub: Hub, source: Path) -> None:
    """The hub leaves files out that a .gitignore of the repository names, and commits the rest without a word."""
    found = hub.repository("org/name", {".gitignore": b"*.safetensors\n*.json\n"})
    _upload(source)
    assert len(_elements(found.files())) == 4


def test_a_branch_that_moves_meanwhile_is_a_conflict(hub: Hub, source: Path) -> None:
    found = hub.repository("org/name", {"LICENSE": b"mine"})
    theirs = {"LICENSE": Blob(b"theirs", large=False)}
    hub.fail("PUT", "^/put/", call=lambda: found.commit("main", theirs, "their commit"))
    error = refused("storage.conflict", lambda: _upload(source))
    assert "moved" in error.message
    assert found.messages == ["initial commit", "their commit"]
    assert found.files() == theirs
    before = hub.uploaded_bytes
    _upload(source)
    assert hub.uploaded_bytes == before
    assert found.messages[2:] == ["Upload safetensors with reshard"]


def test_a_lost_answer_is_no_second_commit(hub: Hub, source: Path) -> None:
    """The hub commits, and its answer ends early; the second try finds that the branch has moved, by itself."""
    found = hub.repository("org/name", {})
    hub.fail("POST", "/commit/", cut=True)
    assert _upload(source).already_done is False
    assert len(found.messages) == 2
    assert reshard.verify("hf://org/name").ok


@pytest.mark.parametrize("status", [500, 503, 429])
def test_failures_that_pass(hub: Hub, source: Path, waits: list[float], status: int) -> None:
    """At every step of an upload; the commit itself is tried again, because its parent is named."""
    steps = ("/preupload/", "/objects/batch", "/lfs-complete/", "/lfs-verify/", "/commit/", "/repos/create")
    for path in steps:
        hub.fail("POST", path, status=status, headers={"Retry-After": "3"})
    hub.fail("PUT", "^/put/", status=status, times=2)
    _upload(source)
    assert reshard.verify("hf://org/name").ok
    assert len(hub.repositories["org/name"].messages) == 2
    assert len(waits) >= len(steps)


def test_failures_that_stay(hub: Hub, source: Path, waits: list[float]) -> None:
    """The branch stays as it was, and the next run sends what is missing."""
    found = hub.repository("org/name", {})
    commit = found.refs["main"]
    hub.fail("PUT", "^/put/", status=500, times=10_000)
    error = refused("storage.unavailable", lambda: _upload(source))
    assert error.retryable
    assert found.refs["main"] == commit
    hub.faults.clear()
    _upload(source)
    assert reshard.verify("hf://org/name").ok


def test_damage_on_the_way_is_found(hub: Hub, source: Path, waits: list[float]) -> None:
    """The hub compares the SHA-256 of what it received."""
    found = hub.repository("org/name", {})
    hub.damages = True
    error = refused("storage.protocol", lambda: _upload(source))
    assert "the content is not that of the oid" in error.message
    assert found.messages == ["initial commit"]


def test_a_source_that_changes_meanwhile_is_not_committed(hub: Hub, source: Path) -> None:
    """The bytes are made twice; both times they are those of the pinned source."""
    found = hub.repository("org/name", {})
    hub.fail("PUT", "^/put/", call=lambda: os.utime(source / "model.safetensors", ns=(1, 1)))
    refused("source.changed", lambda: _upload(source))
    assert found.messages == ["initial commit"]


def test_rights(hub: Hub, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that only reads, and none."""
    hub.repository("org/name", {})
    monkeypatch.setenv("HF_TOKEN", READER)
    error = refused("storage.denied", lambda: _upload(source))
    assert "HF_TOKEN" in error.fix
    refused("storage.denied", lambda: _upload(source, "hf://org/none"))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    refused("storage.denied", lambda: _upload(source))
    assert {*hub.repositories} == {"org/name"}
    assert len(hub.repositories["org/name"].commits) == 1


def test_what_cannot_be_a_target(hub: Hub, source: Path) -> None:
    for url in ("hf://org/name/folder", f"hf://org/name@{'0' * 40}", "hf://org", "hf://datasets/org/name"):
        refused("request.invalid", lambda url=url: _upload(source, url))
    refused("request.invalid", lambda: _upload(source, verify="full"))
    refused("request.unsatisfiable", lambda: _upload(source, workers=2, worker=0))
    request = ConvertRequest(source=SourceSpec(url=str(source)), target="hf://org/name", to="safetensors")
    error = refused("request.unsatisfiable", lambda: load_engine().convert(request, on_plan=lambda *_: None))
    assert "jobs of a service" in error.message  # what the engine of a job is called with
    assert not hub.requests


def test_a_plan_names_the_files_and_sends_nothing(hub: Hub, source: Path) -> None:
    found = reshard.plan(source, "hf://org/name", **{n: v for n, v in OPTIONS.items() if n != "progress"})
    assert "README.md" in [f.path for f in found.files]
    assert found.target == "hf://org/name"
    assert "<svg" in found._repr_html_()  # the picture of the target that a notebook draws
    assert not hub.requests


def test_it_stops_when_asked(hub: Hub, source: Path) -> None:
    """Before the bytes are sent, and while they are; progress never goes back."""
    request = ConvertRequest(source=SourceSpec(url=str(source)), target="hf://org/name", to="safetensors")

    def stopped_in(phase: str) -> ReshardError:
        seen: list[Progress] = []

        def stop() -> bool:
            return any(p.phase == phase for p in seen)

        return refused(
            "job.cancelled", lambda: load_engine().convert(request, on_progress=seen.append, should_stop=stop)
        )

    for phase in ("running", "committing"):
        assert "the same command" in stopped_in(phase).fix
        assert not hub.objects
    seen: list[Progress] = []
    load_engine().convert(request, on_progress=seen.append)
    counts = [p.bytes_done for p in seen]
    assert counts == sorted(counts)
    assert counts[-1] == seen[-1].bytes_total
    assert seen[-1].phase == "done"


@pytest.mark.parametrize(
    "step", ["/preupload/", "/objects/batch", "^/put/", "/lfs-complete/", "/lfs-verify/", "/commit/"]
)
def test_a_killed_upload_changes_nothing_and_the_next_one_ends_it(hub: Hub, source: Path, step: str) -> None:
    """SIGKILL when a request of each kind arrives for the second time, or for the first if there is but one."""
    found = hub.repository("org/name", {"LICENSE": b"mine"})
    started: list[subprocess.Popen[str]] = []
    arrived: list[int] = []
    wanted = 2 if step in ("/lfs-complete/", "/lfs-verify/") else 6 if step == "^/put/" else 1

    def arrive() -> bool:
        arrived.append(1)
        if len(arrived) < wanted:
            return False
        started[0].send_signal(signal.SIGKILL)
        started[0].wait(120)
        return step != "/commit/"  # the hub makes a commit that it has received, whoever waits for its answer

    hub.fail("PUT" if "put" in step else "POST", step, times=10_000, call=arrive)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started.append(subprocess.Popen(_command(source), env=hub.env(), **pipes))
    started[0].communicate(timeout=240)
    assert started[0].returncode == -signal.SIGKILL
    hub.faults.clear()
    if step == "/commit/":
        wait_until(lambda: len(found.messages) == 2)
    else:
        assert found.messages == ["initial commit"]
        assert set(found.files()) == {"LICENSE"}
    kept = len(hub.objects)
    before = hub.uploaded_bytes
    done = subprocess.run(_command(source), env=hub.env(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "hf://org/name"
    assert len(found.messages) == 2
    assert reshard.verify("hf://org/name").problems[0].path == "LICENSE"
    assert len(_elements(found.files())) == 4
    # A file that the hub had whole is not sent again.
    assert hub.uploaded_bytes - before == sum(len(d) for d in list(hub.objects.values())[kept:])


# A finished directory.


def test_push_uploads_what_was_written(hub: Hub, source: Path, tmp_path: Path) -> None:
    """The command line: the card is written for it, the path stays the last line on stdout, again is nothing."""
    out = tmp_path / "out"
    command = [*_command(source, url=str(out)), "--push", "hf://org/name"]
    for first in (True, False):
        done = subprocess.run(command, env=hub.env(), capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(out)
        commit = hub.repositories["org/name"].refs["main"]
        assert ("got them with commit" if first else "holds these files already, at commit") in done.stderr
        assert commit in done.stderr
    found = hub.repositories["org/name"]
    assert len(found.messages) == 2
    names = {p.name for p in out.iterdir()}
    assert "README.md" in names
    assert {*found.files()} == names | {".gitattributes"}
    assert all(found.files()[name].data == (out / name).read_bytes() for name in names)
    assert reshard.push(out, "hf://org/name").already_done
    assert reshard.verify("hf://org/name").ok
    shutil.rmtree(out)
    reshard.convert(source, out, to="safetensors", dtype="bf16", progress=False)
    refused("request.target_exists", lambda: reshard.push(out, "hf://org/name"))
    assert reshard.push(out, "hf://org/name", overwrite=True).already_done is False
    assert not any("-of-" in name for name in found.files())
    assert reshard.diff(out, "hf://org/name").equal
    # The same conversion made elsewhere, at another time, is what the branch holds.
    again = reshard.convert(source, tmp_path / "again", to="safetensors", dtype="bf16", progress=False)
    assert reshard.push(again.target, "hf://org/name").already_done
    # What was converted is told, also if it cannot be uploaded.
    command = [*_command(source, url=str(tmp_path / "other")), "--push", "hf://org/name"]
    done = subprocess.run(command, env=hub.env(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 5
    assert "request.target_exists" in done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "other")


def test_a_killed_push_changes_nothing_and_the_next_one_ends_it(hub: Hub, source: Path, tmp_path: Path) -> None:
    """The first shard is not sent again."""
    out = tmp_path / "out"
    command = [*_command(source, url=str(out)), "--push", "hf://org/name"]
    found = hub.repository("org/name", {"LICENSE": b"mine"})
    started: list[subprocess.Popen[bytes]] = []

    def arrive() -> bool:
        if not hub.objects:
            return False
        started[0].send_signal(signal.SIGKILL)
        started[0].wait(120)
        return True

    hub.fail("POST", "/lfs-verify/", times=2, call=arrive)
    started.append(subprocess.Popen(command, env=hub.env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    assert started[0].wait(240) == -signal.SIGKILL
    assert found.messages == ["initial commit"]
    before = hub.uploaded_bytes
    done = subprocess.run(command, env=hub.env(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "already done" in done.stderr
    assert len(found.messages) == 2
    assert len(hub.objects) == 2
    assert hub.uploaded_bytes - before == len(list(hub.objects.values())[1])
    assert reshard.diff(out, "hf://org/name").equal


def test_push_takes_finished_weights_alone(hub: Hub, source: Path, tmp_path: Path) -> None:
    refused("source.not_found", lambda: reshard.push(source, "hf://org/name"))
    reshard.convert(TINY, tmp_path / "zero" / "global_step3", to="zero", dp=1, progress=False)
    refused("request.unsatisfiable", lambda: reshard.push(tmp_path / "zero" / "global_step3", "hf://org/name"))
    reshard.convert(source, tmp_path / "out", to="safetensors", progress=False)
    (tmp_path / "out" / "model.safetensors").write_bytes(b"short")
    refused("integrity.mismatch", lambda: reshard.push(tmp_path / "out", "hf://org/name"))
    assert not hub.requests
