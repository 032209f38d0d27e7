"""Azure Blob Storage: the names of blocks, listings, errors and credentials, on Azurite and on scripted replies."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from house.expected import raised
from reshard.errors import ReshardError, SourceError, StorageError
from reshard_engine.storage import azure
from reshard_engine.storage.azure import AzureProfile, AzureStore
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import PartInfo
from reshard_engine.storage.urls import canonical_url
from servers.answering import Handler, answering
from servers.azure import ACCOUNT, KEY, AzureServer
from servers.fixtures import started
from servers.stores import ObjectServer

METADATA = {"reshard-plan": "0123456789abcdef" * 4, "odd": "a b=c&d.e~é"}


@pytest.fixture(params=["az"])
def store(request: pytest.FixtureRequest) -> ObjectServer:
    """Azurite alone, for the fixtures of any store."""
    return started(request, request.param)


@pytest.fixture
def ours(store_bucket: str) -> AzureStore:
    del store_bucket
    return AzureStore.of_profile(None)


def _parts(store: AzureStore, path: str, upload: str, *texts: bytes) -> list[PartInfo]:
    return [store.put_part(path, upload, n, memoryview(t)) for n, t in enumerate(texts, 1)]


def test_an_upload_is_known_by_its_id_alone(ours: AzureStore, store_bucket: str) -> None:
    """Another process ends it with the metadata that its beginning named."""
    path = f"{store_bucket}/run/x"
    upload = ours.create_multipart(path, metadata=METADATA)
    assert ours.list_uploads(f"{store_bucket}/run/") == [(path, upload)]
    assert ours.list_parts(path, upload) == []
    parts = _parts(ours, path, upload, b"one", b"two")
    assert ours.stat(path) is None, "nothing is readable before the commit"
    assert ours.list_tree(store_bucket) == []
    other = AzureStore.of_profile(None)
    assert other.list_parts(path, upload) == parts
    assert [p.crc32 for p in parts] == [zlib.crc32(b"one"), zlib.crc32(b"two")]
    other.complete_multipart(path, upload, parts)
    assert ours.metadata(path) == METADATA
    assert ours.list_parts(path, upload) is None
    assert ours.list_uploads(store_bucket) == []


def test_two_uploads_of_one_blob_do_not_mix(ours: AzureStore, store: AzureServer, store_bucket: str) -> None:
    path = f"{store_bucket}/x"
    first, second = (ours.create_multipart(path, metadata={"reshard-plan": plan}) for plan in "ab")
    mine = _parts(ours, path, first, b"first-1", b"first-2")
    others = _parts(ours, path, second, b"second-1", b"second-2", b"second-3")
    assert ours.list_parts(path, first) == mine
    assert ours.list_parts(path, second) == others
    assert sorted(u for _, u in ours.list_uploads(store_bucket)) == sorted([first, second])
    ours.complete_multipart(path, second, others)
    assert store.read_all(store_bucket, "") == {"x": b"second-1second-2second-3"}
    error = raised(StorageError, ours.complete_multipart, path, first, mine)
    assert (error.code, "no longer exists" in error.message) == ("storage.conflict", True)
    assert store.read_all(store_bucket, "") == {"x": b"second-1second-2second-3"}
    again = ours.create_multipart(path, metadata={})
    ours.complete_multipart(path, again, _parts(ours, path, again, b"new"))
    assert store.read_all(store_bucket, "") == {"x": b"new"}, "what is there is replaced, as in other stores"


def test_of_two_commits_at_once_one_wins(
    ours: AzureStore, store: AzureServer, store_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a blob and its commit another writer may commit: the later commit is refused."""
    path = f"{store_bucket}/x"
    first, second = (ours.create_multipart(path, metadata={}) for _ in range(2))
    mine, others = _parts(ours, path, first, b"first"), _parts(ours, path, second, b"second")
    look = AzureStore._uploads  # pyright: ignore[reportPrivateUsage]

    def then_the_other(self: AzureStore, place: str) -> object:
        found = look(self, place)
        monkeypatch.setattr(AzureStore, "_uploads", look)
        AzureStore.of_profile(None).complete_multipart(path, second, others)
        return found

    monkeypatch.setattr(AzureStore, "_uploads", then_the_other)
    assert raised(StorageError, ours.complete_multipart, path, first, mine).code == "storage.conflict"
    assert store.read_all(store_bucket, "") == {"x": b"second"}


def test_an_aborted_upload_is_gone_though_its_blocks_stay(ours: AzureStore, store_bucket: str) -> None:
    path = f"{store_bucket}/x"
    upload, other = (ours.create_multipart(path, metadata=METADATA) for _ in range(2))
    parts = _parts(ours, path, upload, b"one")
    for _ in range(2):
        ours.abort_multipart(path, upload)
    assert ours.list_parts(path, upload) is None
    assert ours.list_uploads(store_bucket) == [(path, other)]
    assert raised(StorageError, ours.complete_multipart, path, upload, parts).code == "storage.conflict"
    ours.abort_multipart(path, other)
    ours.abort_multipart(f"{store_bucket}/never", other)
    assert ours.list_uploads(store_bucket) == []


def test_blocks_of_other_programs_are_left_alone(ours: AzureStore, store: AzureServer, store_bucket: str) -> None:
    client = store.client().get_blob_client(store_bucket, "x")
    client.stage_block("a" * 64, b"theirs")
    path = f"{store_bucket}/x"
    assert ours.list_uploads(store_bucket) == []
    upload = ours.create_multipart(path, metadata={})
    ours.complete_multipart(path, upload, _parts(ours, path, upload, b"ours"))
    assert store.read_all(store_bucket, "") == {"x": b"ours"}
    store.client().get_blob_client(store_bucket, "y").stage_block("short", b"theirs")
    error = raised(StorageError, ours.create_multipart, f"{store_bucket}/y", metadata={})
    assert (error.code, "another length" in error.message) == ("storage.conflict", True)


def test_listings_show_no_marks_of_directories(ours: AzureStore, store: AzureServer, store_bucket: str) -> None:
    client = store.client().get_container_client(store_bucket)
    client.upload_blob("run/tag", b"", metadata={"hdi_isfolder": "true"})
    for name in ("run/tag/a", "run/tag/b c%2e/é", "run/latest", "run/", "runner"):
        client.upload_blob(name, b"x")
    listing = ours.list_directory(f"{store_bucket}/run")
    assert ([f.path for f in listing.files], listing.directories) == ([f"{store_bucket}/run/latest"], ("tag",))
    assert [f.path.partition("/")[2] for f in ours.list_tree(f"{store_bucket}/run/tag")] == [
        "run/tag/a",
        "run/tag/b c%2e/é",
    ]
    assert ours.stat(f"{store_bucket}/run/tag") is None
    assert ours.list_directory(f"{store_bucket}/none") == ours.list_directory(f"{store_bucket}/runner/x")
    found = ours.list_directory(f"{store_bucket}/run", most=1)
    assert len(found.files) + len(found.directories) == 1


def test_a_read_of_another_version_is_refused(ours: AzureStore, store: AzureServer, store_bucket: str) -> None:
    path, buffer = f"{store_bucket}/x", memoryview(bytearray(4))
    info = ours.put(path, b"0123456789", metadata=METADATA, if_absent=True)
    assert ours.stat(path) == info
    assert ours.list_tree(store_bucket) == [info]
    ours.read_into(info, 3, buffer)
    assert bytes(buffer) == b"3456"
    assert raised(StorageError, ours.put, path, b"", metadata={}, if_absent=True).code == "storage.conflict"
    store.put(store_bucket, "x", b"9876543210")
    assert raised(SourceError, ours.read_into, info, 3, buffer).code == "source.changed"
    ours.delete([path, path])
    assert raised(SourceError, ours.read_into, info, 3, buffer).code == "source.changed"


def _codes(store: AzureStore, path: str) -> list[str]:
    """The code of the error of each way to look at a path: list it, list all below it, ask for the blob."""
    found: list[str] = []
    for call in (store.list_directory, store.list_tree, store.stat):
        try:
            found.append("" if call(path) is not None else "none")
        except ReshardError as error:
            found.append(error.code)
    return found


def test_errors_of_a_server(ours: AzureStore, store: AzureServer, store_bucket: str) -> None:
    assert _codes(ours, "no-such-container/x") == ["storage.no_bucket"] * 3
    assert _codes(ours, "x/y") == ["storage.no_bucket"] * 3
    url = f"{store.endpoint}/{ACCOUNT}"
    wrong = KEY.replace("E", "F", 1)
    for profile in (
        AzureProfile(endpoint_url=url, account_name=ACCOUNT, account_key=wrong),
        AzureProfile(endpoint_url=url, sas_token="sv=2020-01-01&sig=x"),
    ):
        assert set(_codes(AzureStore(profile), f"{store_bucket}/x")) == {"storage.denied"}
    assert _codes(AzureStore(AzureProfile(endpoint_url=url, account_name=ACCOUNT, account_key=KEY)), store_bucket) == [
        *("", "", "none"),
    ]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without pauses."""

    class Hasty(azure.ExponentialRetry):
        def get_backoff_time(self, settings: object) -> float:
            del settings
            return 0.0

    monkeypatch.setattr(azure, "ExponentialRetry", Hasty)


@contextmanager
def _answering(status: int, code: str, body: bytes | None = None) -> Generator[AzureStore]:
    """A store that answers every request with one error, or with a body."""
    error = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()

    class Failing(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
            self.answer(status, error if body is None else body, x_ms_error_code=code)

        do_HEAD = do_GET  # noqa: N815  (the name that the library calls)

    with answering(Failing) as url:
        yield AzureStore(AzureProfile(endpoint_url=f"{url}/a", account_name="a", account_key=KEY))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("status", "code", "typed"),
    [
        (503, "ServerBusy", {"storage.unavailable"}),
        (500, "InternalError", {"storage.unavailable"}),
        (429, "TooManyRequests", {"storage.unavailable"}),
        (403, "AuthorizationFailure", {"storage.denied"}),
        (401, "NoAuthenticationInformation", {"storage.denied"}),
        (400, "InvalidQueryParameterValue", {"storage.protocol"}),
        (409, "SnapshotsPresent", {"storage.protocol"}),
        (404, "ContainerNotFound", {"storage.no_bucket"}),
        (404, "BlobNotFound", {"source.not_found", "none"}),
    ],
)
def test_errors_are_typed(status: int, code: str, typed: set[str]) -> None:
    with _answering(status, code) as store:
        assert set(_codes(store, "box/x")) == typed


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("body", [b"", b"<html>", b"<html></html>", b"{}", b"<EnumerationResults/>", b"\xff\x00"])
def test_what_is_no_listing_is_refused(body: bytes) -> None:
    with _answering(200, "", body) as store:
        assert _codes(store, "box/x") == ["storage.protocol"] * 3


@pytest.mark.usefixtures("hasty")
def test_a_service_that_is_not_there() -> None:
    store = AzureStore(AzureProfile(endpoint_url="http://127.0.0.1:9/a", account_name="a", account_key=KEY))
    assert set(_codes(store, "box/x")) == {"storage.unavailable"}


def test_credentials_are_found_as_the_field_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECTION_STRING", "ACCOUNT_NAME", "ACCOUNT", "ACCOUNT_KEY", "KEY", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    assert AzureStore.credentials() is None
    error = raised(StorageError, open_location("az://box/x").store.stat, "box/x")
    assert (error.code, "AZURE_STORAGE_ACCOUNT_NAME" in error.fix) == ("storage.denied", True)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acc")
    assert AzureStore.credentials() == "Azure: from azure-identity, for https://acc.blob.core.windows.net/"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2020-01-01&sig=hush")
    assert AzureStore.credentials() == "Azure: from a SAS token, for https://acc.blob.core.windows.net/"
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    assert AzureStore.credentials() == "Azure: from an account key, for https://acc.blob.core.windows.net/"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "nonsense")
    error = raised(StorageError, AzureStore.credentials)
    assert (error.code, "nonsense" in error.message) == ("storage.denied", False)
    assert "hush" not in repr(AzureProfile.from_environment())
    assert KEY not in repr(AzureProfile.from_environment())


def test_a_url_with_an_account_is_refused_with_the_form_to_write() -> None:
    assert canonical_url("abfss://box/run/a%2e") == "az://box/run/a%2e"
    error = raised(ReshardError, canonical_url, "abfss://box@acc.dfs.core.windows.net/run/x")
    assert (error.code, error.fix) == ("request.invalid", "write az://box/run/x")
