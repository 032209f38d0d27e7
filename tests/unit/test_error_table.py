"""The table of error codes: total in both directions, and safe to show."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from reshard.engine import load_engine
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
    exhaustion_of,
    from_problem,
    printable,
)
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


# Secrets: whatever a client of a store or the store itself quotes, errors do not show the operator's credentials.

_PLANTED = "Canary/pl4nted+S3cret=="


@pytest.mark.parametrize(
    "text",
    [
        "Max retries exceeded with url: /c?comp=list&sv=2025-01-05&sig=Canary%2Fpl4nted%2BS3cret%3D%3D",
        "Could not connect to the endpoint URL: http://ops:Canary%2fpl4nted%2bS3cret%3d%3d@h:1/bucket?list-type=2",
        'Could not connect to the endpoint URL: "https://h/bucket?apikey=Canary"',
        'the request was: {"X-Amz-Security-Token": "Canary", "x": 1} X-Amz-Security-Token: Canary',
        "you sent Authorization: Bearer hf_Canary0123 and Authorization: Basic b3BzOkNhbmFyeQ==",
        f"echo {_PLANTED} and {_PLANTED!r}",
        "x" * 240 + f" {_PLANTED}",
        "ftp://u:Can@ary@host/x and redis://:Canary@host",
        'Could not connect to the endpoint URL: "http://Canary0123@127.0.0.1:1/b?list-type=2"',
        "HTTPS://Can@ary@host, git+https://Canary@host",
    ],
)
def test_no_error_shows_a_secret_that_a_client_quotes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", _PLANTED)
    for said in (text, printable(text)):
        error = StorageError("storage.unavailable", said, fix=f"see {text}", details={"seen": [{"text": text}]})
        shown = repr((error, error.to_problem(), pickle.loads(pickle.dumps(error)).to_problem()))
        assert "anary" not in shown
        assert "[hidden]" in shown
        assert "b3BzOkNhbmFyeQ" not in shown


def test_secrets_of_a_profile_are_hidden_in_every_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = tmp_path / "profiles.toml"
    monkeypatch.setenv("RESHARD_PROFILES", str(profiles))
    profiles.write_text(
        '[profiles.a]\nendpoint_url = "http://ops:P4ssw%2Ford-canary@h:1?k=Qu3ry-canary"\n'
        'secret_access_key = "K3y-canary"\n'
        '[profiles.b]\nsas_token = "sv=2025&sig=S1g%2Fcanary%3D"\n'
        '[profiles.c]\nconnection_string = "BlobEndpoint=http://h:1/acct;AccountKey=Acc0unt/canary=="\n'
        '[profiles.d]\nendpoint_url = "http://T0ken-canary@h:1"\n'
    )
    seen = (
        "P4ssw%2Ford-canary", "P4ssw/ord-canary", "Qu3ry-canary", "K3y-canary", "S1g%2Fcanary%3D", "S1g/canary=",
        "S1g%2fcanary%3d", "Acc0unt/canary==", "Acc0unt%2Fcanary%3D%3D", "T0ken-canary",
    )  # fmt: skip
    for text in seen:
        assert "canary" not in str(StorageError("storage.denied", f"the store sent <{text}>")), text
    assert "http://h:1/acct" in str(StorageError("storage.denied", "http://h:1/acct cannot be reached"))
    # The operator replaces a key: the new one is hidden at once.
    profiles.write_text('[profiles.a]\nsecret_access_key = "N3w-and-longer-canary"\n')
    assert "canary" not in str(StorageError("storage.denied", "N3w-and-longer-canary"))


def test_secrets_of_settings_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_KEY_PASSPHRASE", "canary-passphrase")
    monkeypatch.setenv("RESHARD_WEBHOOK_KEYS", "canary-new=, canary-old=")
    monkeypatch.setenv("HTTPS_PROXY", "http://u:canary-proxy@host:3128")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://canary%2Ftoken:@host")
    hidden = ("canary-passphrase", "canary-new=", "canary-old=", "canary-proxy", "canary/token", "canary%2ftoken")
    for secret in hidden:
        assert "canary" not in str(StorageError("storage.unavailable", f"<{secret}>"))


def test_a_secret_that_is_not_utf_8_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTP_PASSWORD", os.fsdecode(b"canary-pa\xdfword"))
    text = "canary-pa\udcdfword canary-pa%DFword canary-pa%dfword"
    assert StorageError("storage.unavailable", text).message == "[hidden] [hidden] [hidden]"


def test_a_signing_key_is_hidden_unless_it_is_the_path_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "MC4CAQAwBQYDK2VwBCIEIcanary"
    for value in (f"\n-----BEGIN PRIVATE KEY-----\n{line}\n-----END PRIVATE KEY-----\n", line, f"/gone/{line}"):
        monkeypatch.setenv("RESHARD_SIGNING_KEY", value)
        for text in (value, value.strip(), repr(value), printable(value), value.splitlines()[-2:][0]):
            assert line not in StorageError("storage.denied", f"there is no {text}").message
    file = tmp_path / "signing-key.pem"
    file.touch()
    monkeypatch.setenv("RESHARD_SIGNING_KEY", str(file))
    assert str(file) in StorageError("storage.denied", f"{file} is not a key").message


def test_hiding_secrets_leaves_other_words() -> None:
    for text in (
        "basic authentication is off",
        "write hf://ORG/NAME@REVISION, az://container/path or hdfs://host:9000/x@y",
        "abfs://container@account.dfs.core.windows.net/x, postgresql://reshard@host/jobs, https://host/x@y?z=a@b",
        "https://host?mail=a@b and http://[::1]:9000/b",
        "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...",
    ):
        assert StorageError("storage.denied", text).message == text


def test_a_thread_that_the_system_refuses_is_the_hosts_fault() -> None:
    before = threading.stack_size(1 << 47)
    try:
        with ThreadPoolExecutor(1) as pool:
            error = raised(RuntimeError, pool.submit, print)
    finally:
        threading.stack_size(before)
    found = exhaustion_of(error)
    assert found is not None
    assert found.code == "job.host_exhausted"
    assert found.retryable
    assert exhaustion_of(OSError(errno.EMFILE, "Too many open files")) is not None
    assert exhaustion_of(raised(RuntimeError, threading.Thread().join)) is None
    assert exhaustion_of(OSError(errno.ENOENT, "No such file")) is None
