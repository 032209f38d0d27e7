"""Google Cloud Storage on fake-gcs-server. The oracle of names, sizes and generations is Google's own client."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_zero_checkpoint

from house.dying import dying
from house.expected import raised
from house.requests import asked
from house.saves import DATA
from house.tiers import rest_full
from house.waiting import at_once
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.storage import gcs as gcs_module
from reshard_engine.storage.gcs import GcsProfile, GcsStore
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import CopyingStore, ObjectInfo, ObjectStore, PartInfo, read_bytes
from servers.answering import Handler, answering
from servers.fixtures import started
from servers.gcs import GcsServer, documented

FLAT, WIDE = 1010, 30
KEYS = [
    *(f"flat/k{n:04}" for n in range(FLAT)),
    *(f"wide/s{n:04}/f" for n in range(WIDE)),
    *("run/", "run/a", "run/sub/x", "run.txt", "top", "ü/ñ é+%20&.txt", "a b/c d"),
]


@pytest.fixture(scope="module")
def gcs(request: pytest.FixtureRequest) -> GcsServer:
    """The server as it is."""
    found = started(request, "gs")
    assert isinstance(found, GcsServer)
    return found


@pytest.fixture(scope="module")
def listed(gcs: GcsServer) -> str:
    """A bucket with more objects than a page holds."""
    bucket = gcs.new_bucket()
    place = gcs.client().bucket(bucket)

    def put(key: str) -> None:
        place.blob(key).upload_from_string(b"" if key.endswith("/") else key.encode())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, KEYS))
    return bucket


def _facts(bucket: str, blob: Any) -> tuple[str, int, str, float]:
    return f"{bucket}/{blob.name}", blob.size, f"generation:{blob.generation}", blob.time_created.timestamp()


@pytest.mark.parametrize("path", ["", "/flat", "/wide", "/run/", "/ü", "/a b"])
def test_listings_are_those_of_googles_client(gcs: GcsServer, listed: str, path: str) -> None:
    store, place = GcsStore(GcsProfile(gcs.endpoint)), f"{listed}{path}"
    prefix = f"{path.strip('/')}/" if path else ""
    level = gcs.client().list_blobs(listed, prefix=prefix, delimiter="/")
    files = [_facts(listed, blob) for blob in level if blob.name != prefix]
    listing = store.list_directory(place)
    assert [(f.path, f.size_bytes, f.pin, f.modified_at) for f in listing.files] == sorted(files)
    assert list(listing.directories) == sorted(name[len(prefix) : -1] for name in level.prefixes)
    tree = [(f.path, f.size_bytes, f.pin, f.modified_at) for f in store.list_tree(place)]
    assert tree == sorted(_facts(listed, blob) for blob in gcs.client().list_blobs(listed, prefix=prefix))
    assert tree


@pytest.mark.parametrize("path", ["/absent", "/ru", "/top", "/flat/k0001"])
def test_nothing_is_below_what_is_no_directory(gcs: GcsServer, listed: str, path: str) -> None:
    store = GcsStore(GcsProfile(gcs.endpoint))
    assert store.list_tree(f"{listed}{path}") == []
    assert store.list_directory(f"{listed}{path}").by_name == {}


def test_the_protocol_is_kept(gcs: GcsServer) -> None:
    store, bucket = GcsStore(GcsProfile(gcs.endpoint)), gcs.new_bucket()
    assert isinstance(store, ObjectStore)
    assert not isinstance(store, CopyingStore), "the service copies no ranges"
    path = f"{bucket}/a/ü %2e"
    made = store.put(path, memoryview(bytearray(b"hello")), metadata={"Key": "v"}, if_absent=True)
    assert (made, store.metadata(path)) == (store.stat(path), {"Key": "v"})
    assert read_bytes(store, made, 1, 3) == b"ell"
    assert raised(ReshardError, store.put, path, b"x", metadata={}, if_absent=True).code == "storage.conflict"
    assert raised(ReshardError, read_bytes, store, made, 3, 9).code == "storage.unavailable"
    store.put(path, b"other", metadata={}, if_absent=False)
    assert raised(ReshardError, read_bytes, store, made).code == "source.changed"
    store.delete([path, path])
    assert (store.stat(path), store.metadata(path)) == (None, None)
    assert raised(ReshardError, read_bytes, store, made).code == "source.changed"
    assert store.copy_part(path, "id", 1, made, offset=0, length=5) is None


def test_other_bytes_than_were_sent_are_not_kept(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server as it is keeps them and tells their CRC32C; the documented one refuses the request."""
    true = gcs_module._crc32c
    with documented(gcs) as strict:
        for server in (gcs, strict):
            store, path = GcsStore(GcsProfile(server.endpoint)), f"{server.new_bucket()}/x"
            monkeypatch.setattr(gcs_module, "_crc32c", lambda data: true(bytes(data)[:-1] + b"!"))
            error = raised(ReshardError, store.put, path, b"hello", metadata={}, if_absent=True)
            assert (error.code, store.stat(path)) == ("storage.unavailable", None)
            monkeypatch.setattr(gcs_module, "_crc32c", true)
            assert store.put(path, b"hello", metadata={}, if_absent=True).size_bytes == 5


def test_a_pinned_read_asks_for_its_generation(gcs: GcsServer) -> None:
    with documented(gcs) as server:
        store, path = GcsStore(GcsProfile(server.endpoint)), f"{server.new_bucket()}/x"
        info = store.put(path, b"hello", metadata={}, if_absent=True)
        assert read_bytes(store, info) == b"hello"
        store.put(path, b"other", metadata={}, if_absent=False)
        assert raised(ReshardError, read_bytes, store, info).code == "source.changed"


def test_bytes_that_change_in_memory_are_not_written(gcs: GcsServer) -> None:
    store, bucket = GcsStore(GcsProfile(gcs.endpoint)), gcs.new_bucket()
    error = raised(ReshardError, store.put, f"{bucket}/x", b"hello", metadata={}, if_absent=True, crc32=1)
    assert (error.code, store.list_tree(bucket)) == ("storage.unavailable", [])


# Uploads in parts.


@pytest.fixture(params=["fake-gcs-server", "as documented"])
def server(gcs: GcsServer, request: pytest.FixtureRequest) -> Generator[GcsServer]:
    """The server as it is, and with the documented rules that it does not keep."""
    if request.param == "fake-gcs-server":
        yield gcs
    else:
        with documented(gcs) as found:
            yield found


@pytest.fixture
def store(server: GcsServer) -> GcsStore:
    return GcsStore(GcsProfile(server.endpoint))


@pytest.fixture
def path(server: GcsServer) -> str:
    return f"{server.new_bucket()}/run/step/big.pt"


def _begun(store: GcsStore, path: str, count: int) -> tuple[str, list[PartInfo], bytes]:
    """An upload with its parts, and their bytes together."""
    upload = store.create_multipart(path, metadata={"plan": "d"})
    bodies = [os.urandom(100 + n) for n in range(count)]
    numbers = range(1, count + 1)
    parts = [store.put_part(path, upload, n, memoryview(b)) for n, b in zip(numbers, bodies, strict=True)]
    return upload, parts, b"".join(bodies)


def _keys(server: GcsServer, path: str) -> list[str]:
    return [blob.name for blob in server.client().list_blobs(path.partition("/")[0])]


@pytest.mark.parametrize("count", rest_full([1, 32, 33, 1025], 1, 32, 33), ids=lambda n: f"{n} parts")
def test_an_object_appears_whole_and_its_parts_go(server: GcsServer, store: GcsStore, path: str, count: int) -> None:
    upload, parts, content = _begun(store, path, count)
    bucket = path.partition("/")[0]
    assert store.list_parts(path, upload) == parts
    assert store.list_uploads(f"{bucket}/run/") == [(path, upload)]
    assert store.list_uploads(f"{bucket}/run/step/bi") == [(path, upload)]
    assert store.list_uploads(f"{bucket}/run/other") == []
    assert store.list_tree(bucket) == []
    assert store.list_directory(f"{bucket}/run/step").by_name == {}
    assert store.list_directory(f"{bucket}/run/step").directories == ()
    store.complete_multipart(path, upload, parts)
    assert _keys(server, path) == ["run/step/big.pt"]
    info = store.stat(path)
    assert info is not None
    assert read_bytes(store, info) == content
    assert store.metadata(path) == {"plan": "d"}
    assert (store.list_uploads(f"{bucket}/"), store.list_parts(path, upload)) == ([], None)
    assert raised(ReshardError, store.put_part, path, upload, 1, memoryview(b"late")).code == "storage.conflict"
    assert raised(ReshardError, store.complete_multipart, path, upload, parts).code == "storage.conflict"
    store.abort_multipart(path, upload)
    assert _keys(server, path) == ["run/step/big.pt"], "what came too late left nothing"


def test_an_upload_that_was_aborted_is_gone(server: GcsServer, store: GcsStore, path: str) -> None:
    upload, parts, _ = _begun(store, path, 3)
    store.abort_multipart(path, upload)
    assert _keys(server, path) == []
    assert store.list_parts(path, upload) is None
    assert raised(ReshardError, store.put_part, path, upload, 4, memoryview(b"late")).code == "storage.conflict"
    assert raised(ReshardError, store.complete_multipart, path, upload, parts).code == "storage.conflict"
    assert _keys(server, path) == []


def test_a_part_that_is_sent_again_replaces_the_first(store: GcsStore, path: str) -> None:
    upload, parts, _ = _begun(store, path, 2)
    again = store.put_part(path, upload, 2, memoryview(b"other"))
    assert again.etag != parts[1].etag
    assert raised(ReshardError, store.complete_multipart, path, upload, parts).code == "storage.protocol"
    assert store.put_part(path, upload, 2, memoryview(b"other")) == again, "equal bytes, equal receipts"
    store.complete_multipart(path, upload, [parts[0], again])


def test_an_upload_whose_object_exists_is_over(server: GcsServer, store: GcsStore, path: str) -> None:
    """As after a process died that had made the object, and had not yet removed the parts."""

    class Dies(GcsStore):
        def abort_multipart(self, path: str, upload_id: str) -> None:
            raise KeyboardInterrupt

    upload, parts, _ = _begun(store, path, 3)
    with pytest.raises(KeyboardInterrupt):
        Dies(GcsProfile(server.endpoint)).complete_multipart(path, upload, parts)
    assert store.list_parts(path, upload) is None
    assert store.list_uploads(path.partition("/")[0] + "/") == [(path, upload)]
    store.abort_multipart(path, upload)
    assert _keys(server, path) == ["run/step/big.pt"]


def test_an_object_that_another_wrote_is_not_replaced(gcs: GcsServer) -> None:
    with documented(gcs) as server:
        store, path = GcsStore(GcsProfile(server.endpoint)), f"{server.new_bucket()}/x"
        upload, parts, _ = _begun(store, path, 33)
        other = store.put(path, b"other", metadata={}, if_absent=True)
        assert raised(ReshardError, store.complete_multipart, path, upload, parts).code == "storage.conflict"
        assert store.stat(path) == other
        assert store.list_parts(path, upload) == parts


def test_two_that_complete_one_upload_make_one_object(server: GcsServer, store: GcsStore, path: str) -> None:
    upload, parts, content = _begun(store, path, 40)
    ends: list[str] = []

    def complete() -> None:
        try:
            store.complete_multipart(path, upload, parts)
            ends.append("done")
        except ReshardError as error:
            ends.append(error.code)

    at_once([complete] * 3)
    assert "done" in ends
    assert set(ends) <= {"done", "storage.conflict", "storage.unavailable", "storage.protocol"}
    info = store.stat(path)
    assert info is not None
    assert read_bytes(store, info) == content
    store.abort_multipart(path, upload)
    assert _keys(server, path) == ["run/step/big.pt"]


# Refusals, and replies that are none.


@contextmanager
def _replying(status: int, body: bytes) -> Generator[GcsStore]:
    class Failing(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
            self.answer(status, body)

    with answering(Failing) as url:
        yield GcsStore(GcsProfile(url))


def _refusal(code: int, reason: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": "no", "errors": [{"reason": reason}]}}).encode()


def _codes(store: GcsStore) -> list[str]:
    """The code of the error of each way to look at a path: list it, list all below it, ask for the object, read it."""
    found: list[str] = []
    info = ObjectInfo("b/x", 5, "generation:1")
    for call in (store.list_directory, store.list_tree, store.stat, lambda _: read_bytes(store, info)):
        try:
            found.append("" if call("b/x") is not None else "none")
        except ReshardError as error:
            found.append(error.code if error.fix else f"{error.code} without a fix")
    return found


@pytest.mark.parametrize(
    ("status", "body", "typed"),
    [
        (401, _refusal(401, "required"), ["storage.denied"] * 4),
        (403, _refusal(403, "forbidden"), ["storage.denied"] * 4),
        (403, _refusal(403, "rateLimitExceeded"), ["storage.unavailable"] * 4),
        (404, _refusal(404, "notFound"), ["storage.no_bucket", "storage.no_bucket", "none", "source.changed"]),
        (409, _refusal(409, "conflict"), ["storage.conflict"] * 3 + ["source.changed"]),
        (412, _refusal(412, "conditionNotMet"), ["storage.conflict"] * 3 + ["source.changed"]),
        (400, _refusal(400, "invalid"), ["storage.protocol"] * 4),
        (302, b"", ["storage.protocol"] * 4),
        (400, b"<html>", ["storage.protocol"] * 4),
        (403, b'{"error": []}', ["storage.denied"] * 4),
        (200, b"<html>", ["storage.protocol"] * 3 + ["source.changed"]),
        (200, b"[" * 100_000, ["storage.protocol"] * 3 + ["source.changed"]),
        (200, b'{"items": [{"name": 1}], "name": {}}', ["storage.protocol"] * 3 + ["source.changed"]),
        (200, b'{"items": [{"name": "x/a", "size": "-1x", "generation": "1"}]}', ["storage.protocol"] * 3),
        (200, b'{"items": [{"name": "other/a", "size": "1", "generation": "1"}]}', ["storage.protocol"] * 2),
        (200, b'{"nextPageToken": "again"}', ["storage.protocol"] * 2),
    ],
)
def test_errors_are_typed(status: int, body: bytes, typed: list[str]) -> None:
    with _replying(status, body) as store:
        assert _codes(store)[: len(typed)] == typed


@pytest.mark.full
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_passes_is_tried_again_and_then_unavailable(status: int) -> None:
    with _replying(status, _refusal(status, "backendError")) as store:
        assert raised(ReshardError, store.stat, "b/x").code == "storage.unavailable"


def test_nobody_answers_and_nobody_has_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert raised(ReshardError, GcsStore(GcsProfile("http://127.0.0.1:9")).stat, "b/x").code == "storage.unavailable"
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    error = raised(ReshardError, open_location("gs://b/x").store.stat, "b/x")
    assert (error.code, "gcloud auth application-default login" in error.fix) == ("storage.denied", True)


def test_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:1")
    found = open_location("gcs://bucket/a%2eb")
    assert (found.url, found.path) == ("gs://bucket/a%2eb", "bucket/a%2eb")
    assert isinstance(found.store, GcsStore)
    assert found.store.profile.endpoint_url == "http://localhost:1"


# Conversions.


@pytest.fixture
def place(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of its own, and an environment that finds its server."""
    for name, value in gcs.env().items():
        monkeypatch.setenv(name, value)
    return gcs.new_bucket()


TARGET = "global_step3_universal"


def _request(target: str, source: str = str(DATA / "zero2_tiny"), **options: Any) -> ConvertRequest:
    options.setdefault("part_bytes", 5 << 20)
    return asked(source=SourceSpec(url=source), target=target, to=TargetFormat.UNIVERSAL, **options)


def test_a_conversion_from_and_to_the_store_gives_the_same_bytes(gcs: GcsServer, place: str, tmp_path: Path) -> None:
    engine = load_engine()
    gcs.upload(DATA / "zero2_tiny", place, "run")
    request = _request(f"gs://{place}/out/{TARGET}", f"gs://{place}/run")
    engine.convert(request)
    engine.convert(_request(str(tmp_path / TARGET)))
    expected = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    found = gcs.read_all(place, "out")
    for files in (expected, found):
        files.pop(f"{TARGET}/reshard.json")
    assert found == expected
    assert engine.verify(request.target).ok
    assert engine.convert(request).already_done


# Killed before a request, and run again, or cleaned up.

PARAMETERS = [("embed.weight", (1500, 1024)), ("norm.weight", (1024,))]
_COUNTED = "from reshard_engine.storage.gcs import GcsStore; GcsStore._send = counted(GcsStore._send)"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint whose largest atoms are two parts each, and what an undisturbed conversion writes."""
    folder = tmp_path_factory.mktemp("killed")
    write_zero_checkpoint(folder / "run", PARAMETERS, stage=3, ranks=2)
    load_engine().convert(_request(str(folder / "out" / TARGET), str(folder / "run")))
    files = {str(p.relative_to(folder / "out")): p for p in (folder / "out").rglob("*") if p.is_file()}
    return folder / "run", {name: p.read_bytes() for name, p in files.items() if p.name != "reshard.json"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("percent", rest_full([*range(0, 100, 4), 97, 98, 99], 20, 64, 98))
def test_killed_before_a_request(
    gcs: GcsServer, place: str, killed: tuple[Path, dict[str, bytes]], percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = killed
    engine, request = load_engine(), _request(f"gs://{place}/out/{TARGET}", str(source), threads=1)
    sent: list[str] = []
    send = GcsStore._send
    monkeypatch.setattr(GcsStore, "_send", lambda *a, **k: sent.append(a[1]) or send(*a, **k))
    engine.convert(request.model_copy(update={"target": f"gs://{place}/whole/{TARGET}"}))
    monkeypatch.setattr(GcsStore, "_send", send)
    words = ["convert", str(source), request.target, "--to", "universal", "--part-size", "5MiB", "--threads", "1"]
    done = subprocess.run(dying(_COUNTED, len(sent) * percent // 100, words), capture_output=True, timeout=200)
    assert done.returncode == -9, done.stderr[-2000:]
    cleaned = f"gs://{place}/cleaned"
    bucket = gcs.client().bucket(place)
    for blob in gcs.client().list_blobs(place, prefix="out/"):
        bucket.copy_blob(blob, bucket, f"cleaned/{blob.name.removeprefix('out/')}")
    there = gcs.read_all(place, "out")
    finished = f"{TARGET}/reshard.json" in there
    if finished or any(name.endswith("optimizer_state.pt") or name == "latest_universal" for name in there):
        # The files without which no loader reads the target come last.
        assert there.items() >= {k: v for k, v in expected.items() if k != "latest_universal"}.items()
    engine.clean(f"{cleaned}/{TARGET}", idle=True)
    left = gcs.read_all(place, "cleaned")
    assert finished or left == {}
    assert not [name for name in left if ".reshard-" in name]
    engine.convert(request)
    found = gcs.read_all(place, "out")
    assert found.pop(f"{TARGET}/reshard.json")
    assert found == expected
    assert engine.verify(request.target).ok
