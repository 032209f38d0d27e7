"""However a command ends: with a code of ours, and with JSON where JSON was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reshard.cli import local
from reshard.cli.main import run
from reshard.cli.remote import _absolute
from reshard.errors import JobError
from reshard.options import SourceSpec


class Engine:
    """Ends every call the same way."""

    def __init__(self, end: BaseException) -> None:
        self.end = end
        self.inspected: list[str] = []

    def inspect(self, source: SourceSpec, *, compare: bool = False) -> Any:
        self.inspected.append(source.url)
        raise self.end

    def convert(self, _request: Any, **_hooks: Any) -> Any:
        raise self.end


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(end: BaseException) -> Engine:
        engine = Engine(end)
        monkeypatch.setattr(local, "load_engine", lambda: engine)
        return engine

    return install


def test_a_bug_ends_as_an_error_of_ours(
    ending: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESHARD_TRACEBACK", raising=False)
    ending(ZeroDivisionError("a \x1b[31mbug\nof two lines"))
    assert run(["inspect", "/x", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["code"] == "internal.error"
    assert [line.split(":")[0] for line in shown.err.splitlines()] == ["error", "fix"]
    assert "\x1b" not in shown.err
    assert "ZeroDivisionError" in shown.err
    monkeypatch.setenv("RESHARD_TRACEBACK", "1")
    assert run(["inspect", "/x"]) == 1
    shown = capsys.readouterr()
    assert "Traceback (most recent call last)" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_a_stopped_conversion_says_so_in_the_form_that_was_asked_for(
    ending: Any, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    command = ["convert", "/x", "/y", "--to", "universal", "--quiet", *(["--json"] if as_json else [])]
    for end, sentence in (
        (JobError("job.cancelled", "stopped between units"), "cancelled this local run; finished work is kept"),
        (KeyboardInterrupt(), "interrupted"),
    ):
        ending(end)
        assert run(command) == 130
        shown = capsys.readouterr()
        assert sentence in shown.err
        assert "jobs list" not in shown.err
        if as_json:
            assert json.loads(shown.out)["error"]["code"] == "job.cancelled"
        else:
            assert shown.out == ""


def test_an_existing_name_is_inspected(
    ending: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ending(JobError("job.lost", "the end"))
    monkeypatch.chdir(tmp_path)
    assert run(["run1"]) == 2
    assert engine.inspected == []
    (tmp_path / "run1").mkdir()
    (tmp_path / "jobs").mkdir()
    assert run(["run1", "--json"]) == 6
    assert engine.inspected == ["run1"]
    run(["jobs"])
    assert engine.inspected == ["run1"]
    capsys.readouterr()


def test_what_a_service_is_told_of_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/users/me")
    assert {url: _absolute(url) for url in ("run1", "~/run1", "a:b", "c:/x", "/x/../y", "s3://b/x/../y")} == {
        "run1": f"{tmp_path}/run1",
        "~/run1": "/users/me/run1",
        "a:b": f"{tmp_path}/a:b",
        "c:/x": f"{tmp_path}/c:/x",
        "/x/../y": "/y",
        "s3://b/x/../y": "s3://b/x/../y",
    }
