"""The table of error codes: total in both directions, and safe to show."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from traceback import format_exception
from types import SimpleNamespace

import pytest

import reshard
import reshard_engine.operations
from house.expected import raised
from reshard.cli.main import run
from reshard.cli.remote import load_command
from reshard.ensuring import local_checkpoints
from reshard.errors import (
    CODES,
    ExitCode,
    JobError,
    RequestError,
    ReshardError,
    SourceError,
    StorageError,
    class_of,
    from_problem,
    printable,
)
from reshard.local import load_engine
from reshard_engine.execute.executor import StoppedError
from reshard_engine.execute.sinks import local
from reshard_engine.storage.local import translated

ROOTS = [Path(reshard.__file__).parent, *(Path(__file__).parents[2] / d for d in ("worker", "service"))]


def test_every_code_is_raised_somewhere() -> None:
    sources = [p for root in ROOTS for p in root.rglob("*.py")]
    text = "\n".join(p.read_text() for p in sources if p.name != "errors.py")
    # Containers and the pickle interpreter add their branch to the last part of the code.
    unused = [c for c in CODES if f'"{c}"' not in text and f'"{c.partition(".")[2]}"' not in text]
    assert unused == []


@pytest.mark.parametrize("code", CODES)
def test_every_code_survives_the_wire(code: str) -> None:
    error = class_of(code)(code, "what happened", details={"n": 1})
    again = from_problem(error.to_problem())
    assert type(again) is class_of(code)
    assert (again.code, again.message, again.fix, again.details) == (code, "what happened", error.fix, {"n": 1})
    assert error.fix, "every error says what to do"
    assert isinstance(error.exit_code, ExitCode)
    assert 400 <= error.entry.http_status < 600


def test_a_code_from_the_future_keeps_its_text() -> None:
    error = from_problem({"code": "checkpoint.haunted", "detail": "boo", "title": "Ghosts", "status": 422})
    assert isinstance(error, JobError)
    assert (error.code, error.message) == ("service.protocol", "boo")
    assert error.details["problem"]["code"] == "checkpoint.haunted"


def test_unknown_codes_are_bugs() -> None:
    with pytest.raises(AssertionError):
        ReshardError("no.such_code", "x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("ok", "ok"),
    ],
)
def test_names_from_checkpoints_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_names_are_cut() -> None:
    assert printable("x" * 1_000_000) == "x" * 256 + "... (1000000 characters)"


@pytest.mark.parametrize(
    "error",
    [
        RequestError("request.invalid", "no", fix="yes", details={"tag": "a"}),
        SourceError("source.not_found", "nothing"),
        StorageError("storage.no_space", "full"),
        StoppedError(),
    ],
)
def test_errors_go_to_other_processes_whole(error: ReshardError) -> None:
    """Ranks tell one another, and pools of processes do: an error that cannot be read there hides what happened."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.to_problem() == error.to_problem()
    assert str(again) == str(error)


def test_the_text_of_an_error_has_its_fix() -> None:
    error = RequestError("request.invalid", "no ranks", fix="add --dp N")
    assert str(error) == "request.invalid: no ranks; fix: add --dp N"
    assert str(error).isprintable()


def test_the_command_line_says_the_fix_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(tmp_path / "gone")]) == 3
    assert capsys.readouterr().err.count("fix:") == 1


def test_a_missing_library_shows_one_error_and_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> object:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    def entries(**_: str) -> tuple[SimpleNamespace]:
        return (SimpleNamespace(load=load),)

    monkeypatch.setattr("importlib.metadata.entry_points", entries)
    load_engine.cache_clear()
    for call in (load_engine, lambda: load_command("serve", extra="service")):
        said = "".join(format_exception(raised(RequestError, call)))
        assert "'numpy', which is not installed" in said
        assert "ModuleNotFoundError" not in said
    load_engine.cache_clear()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "reshard_engine.operations.state_dicts", None)
    monkeypatch.delattr(reshard_engine.operations, "state_dicts", raising=False)  # where another test has imported it
    assert "ModuleNotFoundError" not in "".join(format_exception(raised(RequestError, load_engine().state_dicts)))


# Errors of the file system have one code each, whoever writes.


@pytest.mark.parametrize("door", [local_checkpoints.writing, local.writing, translated])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, "storage.denied"),
        (errno.EPERM, "storage.denied"),
        (errno.EROFS, "storage.denied"),
        (errno.ENOSPC, "storage.no_space"),
        (errno.EDQUOT, "storage.no_space"),
        (errno.EIO, "storage.unavailable"),
    ],
)
def test_codes(door: Callable[[str], AbstractContextManager[None]], number: int, code: str) -> None:
    with pytest.raises(StorageError) as caught, door("/mnt/run"):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == code
    assert "/mnt/run" in str(caught.value)
