"""Journal and commit of the engine: killed, interrupted, raced and resumed runs, on local disk and in object stores."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import gpt_parameters

from house.expected import raised
from house.requests import asked
from house.sources import zero_source
from house.tiers import rest_full
from house.waiting import PATIENCE_S, at_once
from reshard.choices import TargetFormat, WeightDtype
from reshard.engine import load_engine
from reshard.errors import ReshardError, StorageError
from reshard.models.jobs import ConvertRequest, ConvertResult
from reshard.options import SourceSpec
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore, PartInfo
from servers.s3 import S3Server
from servers.stores import ObjectServer

PART_BYTES = 5 << 20


big = zero_source(gpt_parameters(256, 2, 16_000), stage=3)
"""A ZeRO-3 checkpoint of 2 ranks and about 70 MB."""


@pytest.fixture(scope="module")
def expected(big: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The universal form of `big`, written in one undisturbed run."""
    target = tmp_path_factory.mktemp("expected") / "global_step7_universal"
    load_engine().convert(_request(big, target))
    return _content(target)


def _request(source: Path | str, target: Path | str, **options: Any) -> ConvertRequest:
    options.setdefault("to", TargetFormat.UNIVERSAL)
    options.setdefault("part_bytes", PART_BYTES)
    return asked(source=SourceSpec(url=str(source)), target=str(target), **options)


def _content(directory: Path) -> dict[str, bytes]:
    """Every file but the manifest, which names the time."""
    files = (p for p in directory.rglob("*") if p.is_file() and p.name != "reshard.json")
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def _command(source: Path, target: Path) -> list[str]:
    options = ["--to", "universal", "--part-size", "1MiB", "--threads", "1", "--json"]
    return [sys.executable, "-m", "reshard.cli.main", "convert", str(source), str(target), *options]


def _journal_units(parent: Path) -> int:
    return sum(p.read_bytes().count(b'{"unit"') for p in parent.glob(".*.journal"))


def _killed_midway(command: list[str], parent: Path, number: int) -> int:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    while _journal_units(parent) < 5:
        assert process.poll() is None, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    process.communicate(timeout=180)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_disturbed_local_run_leaves_nothing_readable_and_resumes(
    big: Path, expected: dict[str, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    target = tmp_path / "global_step7_universal"
    code = _killed_midway(_command(big, target), tmp_path, number)
    assert code == (130 if number is signal.SIGINT else -signal.SIGKILL)
    assert not target.exists()
    assert not (tmp_path / "latest_universal").exists()
    finished = subprocess.run(_command(big, target), capture_output=True, text=True, timeout=120, check=True)
    result = ConvertResult.model_validate_json(finished.stdout.splitlines()[-1])
    assert result.resumed_bytes >= 5 << 20
    assert _content(target) == expected
    assert (tmp_path / "latest_universal").read_text() == target.name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step7_universal", "latest_universal"]


def test_torn_journal_line_is_ignored(big: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    target = tmp_path / "global_step7_universal"
    _killed_midway(_command(big, target), tmp_path, signal.SIGKILL)
    journal = next(tmp_path.glob(".*.journal"))
    journal.write_bytes(journal.read_bytes()[:-20])
    load_engine().convert(_request(big, target, part_bytes=1 << 20, threads=1))
    assert _content(target) == expected


def test_two_runs_to_one_local_target(big: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    target = tmp_path / "global_step7_universal"
    outcomes: list[ConvertResult | ReshardError] = []

    def run() -> None:
        try:
            outcomes.append(load_engine().convert(_request(big, target)))
        except ReshardError as error:
            outcomes.append(error)

    at_once([run] * 4)
    results = [o for o in outcomes if isinstance(o, ConvertResult)]
    errors = [o.code for o in outcomes if isinstance(o, ReshardError)]
    assert sum(not r.already_done for r in results) == 1
    assert set(errors) <= {"request.target_busy", "request.target_exists"}
    assert _content(target) == expected


def test_another_request_cleans_up_what_an_earlier_one_left(big: Path, tmp_path: Path) -> None:
    target = tmp_path / "global_step7_universal"
    _killed_midway(_command(big, target), tmp_path, signal.SIGKILL)
    load_engine().convert(_request(big, target, to=TargetFormat.SAFETENSORS))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step7_universal"]


def test_discard_removes_staging(big: Path, tmp_path: Path) -> None:
    target = tmp_path / "global_step7_universal"
    _killed_midway(_command(big, target), tmp_path, signal.SIGKILL)
    load_engine().discard(_request(big, target))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def room(store: ObjectServer, store_bucket: str) -> Generator[str]:
    """A bucket of each kind of store in which no upload is left behind."""
    yield store_bucket
    assert store.unfinished(store_bucket) == [], "an upload was left behind"


def test_store_to_store_gives_the_same_bytes(
    store: ObjectServer, room: str, big: Path, expected: dict[str, bytes]
) -> None:
    store.upload(big, room, "source")
    request = _request(f"{store.scheme}://{room}/source", f"{store.scheme}://{room}/out/global_step7_universal")
    engine = load_engine()
    result = engine.convert(request)
    assert result.write_bytes == sum(map(len, expected.values()))
    found = store.read_all(room, "out")
    assert found.pop("latest_universal") == b"global_step7_universal"
    found.pop("global_step7_universal/reshard.json")
    assert {k.removeprefix("global_step7_universal/"): v for k, v in found.items()} == expected
    assert engine.verify(request.target).ok
    assert engine.convert(request).already_done


@pytest.mark.parametrize("stop_after", rest_full([1, 4, 9], 1, 9))
def test_stopped_run_in_a_store_resumes_or_is_discarded(
    store: ObjectServer, room: str, big: Path, expected: dict[str, bytes], stop_after: int
) -> None:
    request = _request(big, f"{store.scheme}://{room}/out/global_step7_universal", threads=2)
    engine = load_engine()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > stop_after

    def stopped() -> None:
        nonlocal asked
        asked = 0
        assert raised(ReshardError, engine.convert, request, should_stop=stop).code == "job.cancelled"
        keys = store.read_all(room, "out/global_step7_universal").keys()
        assert not any(k.endswith(("_states.pt", "optimizer_state.pt", "reshard.json")) for k in keys)
        assert "latest_universal" not in store.read_all(room, "out")

    stopped()
    engine.discard(request)
    assert store.read_all(room, "") == {}
    stopped()
    result = engine.convert(request)
    assert result.resumed_bytes > 0
    found = store.read_all(room, "out/global_step7_universal")
    found.pop("reshard.json")
    assert found == expected
    assert {k for k in store.read_all(room, "") if ".reshard-" in k} == set()


def _losing(store: ObjectStore, lost: set[str]) -> None:
    """Let a store do what it is asked, then say that it failed: the first time for each kind of call."""
    put, complete = store.put, store.complete_multipart

    def lose(kind: str) -> None:
        if kind not in lost:
            lost.add(kind)
            raise StorageError("storage.unavailable", f"the reply to {kind} was lost")

    def losing_put(
        path: str, data: bytes, *, metadata: Mapping[str, str], if_absent: bool, **options: Any
    ) -> ObjectInfo:
        info = put(path, data, metadata=metadata, if_absent=if_absent, **options)
        if metadata and if_absent:
            lose("manifest" if path.endswith("reshard.json") else "put")
        return info

    def losing_complete(path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        complete(path, upload_id, parts)
        lose("complete")

    vars(store).update(put=losing_put, complete_multipart=losing_complete)


def test_lost_acknowledgements_are_resolved_by_reading_back(
    store: ObjectServer, room: str, big: Path, expected: dict[str, bytes]
) -> None:
    request = _request(big, f"{store.scheme}://{room}/out/global_step7_universal")
    conversion = Conversion.prepare(request)
    target, lost = conversion.target.store, set[str]()
    assert isinstance(target, ObjectStore)
    _losing(target, lost)
    conversion.run(on_progress=None, should_stop=None)
    assert lost == {"put", "complete", "manifest"}
    found = store.read_all(room, "out/global_step7_universal")
    found.pop("reshard.json")
    assert found == expected
    assert load_engine().verify(request.target).ok


def test_another_plan_gets_a_conflict_until_it_overwrites(store: ObjectServer, room: str, big: Path) -> None:
    target = f"{store.scheme}://{room}/out/model"
    engine = load_engine()
    first = _request(big, target, to=TargetFormat.SAFETENSORS)
    with pytest.raises(ReshardError):
        engine.convert(first, should_stop=iter([False, True, True]).__next__)
    other = _request(big, target, to=TargetFormat.SAFETENSORS, dtype=WeightDtype.BF16)
    claim = store.read_all(room, "out/.model.reshard-claim")
    error = raised(ReshardError, engine.convert, other)
    assert error.code in {"request.target_busy", "request.target_exists"}
    assert len(claim) == 1
    assert store.read_all(room, "out/.model.reshard-claim") == claim, "the refused one left the first one's claim alone"
    assert "--overwrite" in error.fix
    assert len(store.unfinished(room)) == 1, "the stopped run left its upload for a resume"
    engine.convert(other.model_copy(update={"overwrite": True}))
    assert not store.unfinished(room), "and the next one removed it"
    assert set(store.read_all(room, "")) == {"out/model/model.safetensors", "out/model/reshard.json"}
    assert engine.verify(target).ok
    assert raised(ReshardError, engine.convert, first).code == "request.target_exists"


def test_clean_leaves_what_has_written_lately_and_removes_what_nobody_goes_on_with(
    store: ObjectServer, room: str, big: Path
) -> None:
    target = f"{store.scheme}://{room}/out/model"
    engine = load_engine()
    with pytest.raises(ReshardError):
        engine.convert(
            _request(big, target, to=TargetFormat.SAFETENSORS), should_stop=iter([False, True, True]).__next__
        )
    before = store.read_all(room, "")
    found = engine.clean(target)
    assert {"claim", "journal", "upload"} <= {item.kind for item in found.leftovers}
    assert all(item.in_use for item in found.leftovers)
    assert not found.removed
    assert store.read_all(room, "") == before
    assert not engine.clean(target, dry_run=True, idle=True).removed
    assert store.read_all(room, "") == before
    assert engine.clean(target, idle=True).removed
    assert not store.read_all(room, "")
    assert not store.unfinished(room)
    assert engine.clean(target).leftovers == ()


def _crash_before_the_pointer(request: ConvertRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_self: ObjectSink, _pointer: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectSink, "finish", crash)
        with pytest.raises(KeyboardInterrupt):
            load_engine().convert(request)


def test_crash_between_manifest_and_pointer_is_finished_by_the_next_run(
    store: ObjectServer, room: str, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = _request(big, f"{store.scheme}://{room}/out/global_step7_universal")
    _crash_before_the_pointer(request, monkeypatch)
    assert "latest_universal" not in store.read_all(room, "out")
    assert load_engine().convert(request).already_done
    keys = set(store.read_all(room, ""))
    assert "out/latest_universal" in keys
    assert not any(".reshard-" in k for k in keys)


def test_storage_errors_are_typed(s3: S3Server, bucket: str, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine()

    def code(source: str, target: str) -> str:
        error = raised(ReshardError, engine.convert, _request(source, target))
        assert error.fix
        return error.code

    good = f"s3://{bucket}/out"
    assert code("s3://no-such-bucket-here/x", good) == "storage.no_bucket"
    assert code(f"s3://{bucket}/absent", good) == "source.not_found"
    assert code(str(big), "s3://no-such-bucket-here/out") == "storage.no_bucket"
    assert code("s3://", good) == "request.invalid"
    assert code(f"s3://{bucket}/../x", good) == "request.invalid"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert code(f"s3://{bucket}/absent", good) == "storage.denied"
    assert code(str(big), good) == "storage.denied"
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert code(f"s3://{bucket}/absent", good) == "storage.denied"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert code(f"s3://{bucket}/absent", good) == "storage.unavailable"


def test_profiles_name_credentials(
    s3: S3Server, bucket: str, big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = s3.env()
    for name in env:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "profiles.toml").write_text(
        f'[profiles.here]\nendpoint_url = "{env["AWS_ENDPOINT_URL"]}"\naccess_key_id = "{env["AWS_ACCESS_KEY_ID"]}"\n'
        f'secret_access_key = "{env["AWS_SECRET_ACCESS_KEY"]}"\nregion = "us-east-1"\n'
    )
    monkeypatch.setenv("RESHARD_PROFILES", str(tmp_path / "profiles.toml"))
    request = _request(big, f"s3://{bucket}/out", to=TargetFormat.SAFETENSORS, target_profile="here")
    load_engine().convert(request)
    assert load_engine().verify(request.target, profile="here").ok
    error = raised(ReshardError, load_engine().convert, request.model_copy(update={"target_profile": "elsewhere"}))
    assert error.code == "request.unknown_profile"
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def test_discard_between_manifest_and_pointer_leaves_nothing_readable(
    store: ObjectServer, room: str, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = _request(big, f"{store.scheme}://{room}/out/global_step7_universal")
    _crash_before_the_pointer(request, monkeypatch)
    load_engine().discard(request)
    assert store.read_all(room, "") == {}
    load_engine().convert(request)
    load_engine().discard(request)
    assert load_engine().verify(request.target).ok, "a finished conversion is nobody's to discard"


def test_the_store_refuses_other_bytes_than_were_meant(store: ObjectServer, room: str) -> None:
    """Damaged between checksum and wire: a real store compares, and keeps nothing."""
    ours, data = open_location(f"{store.scheme}://{room}").store, b"x" * PART_BYTES
    assert isinstance(ours, ObjectStore)
    wrong = zlib.crc32(data) ^ 1
    error = raised(StorageError, ours.put, f"{room}/small", data[:100], metadata={}, if_absent=True, crc32=wrong)
    assert error.code == "storage.unavailable"
    upload = ours.create_multipart(f"{room}/large", metadata={})
    error = raised(StorageError, ours.put_part, f"{room}/large", upload, 1, memoryview(data), crc32=wrong)
    assert error.code == "storage.unavailable"
    assert ours.stat(f"{room}/small") is None
    assert not ours.list_parts(f"{room}/large", upload)
    part = ours.put_part(f"{room}/large", upload, 1, memoryview(data), crc32=zlib.crc32(data))
    ours.complete_multipart(f"{room}/large", upload, [PartInfo(1, len(data), part.etag, zlib.crc32(data))])
    assert ours.stat(f"{room}/large") is not None
