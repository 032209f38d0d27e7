"""Stores that answer against their protocol: listings without end, XML that expands, replies that never stop."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from house.expected import raised
from reshard.errors import SourceError
from reshard_engine.storage.fsspec_store import FsspecStore
from reshard_engine.storage.locations import open_location, service_store
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore
from servers.answering import Handler, answering
from servers.s3 import S3Server

_HEAD = '<?xml version="1.0" encoding="UTF-8"?>'
_NS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
DEADLINE_S = 60


def _page(number: int, token: str) -> str:
    key = f"<Contents><Key>c/k{number}</Key><Size>1</Size><ETag>&quot;x&quot;</ETag></Contents>"
    return (
        f"{_HEAD}<ListBucketResult {_NS}><Name>b</Name><Prefix>c/</Prefix><IsTruncated>true</IsTruncated>"
        f"<KeyCount>1</KeyCount>{key}<NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
    )


def _bomb() -> str:
    levels = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
    entities = f'<!DOCTYPE x [<!ENTITY a0 "laughs">{levels}]>'
    return f"{_HEAD}{entities}<ListBucketResult {_NS}><Name>&a11;</Name></ListBucketResult>"


_OUTSIDE = (
    f'{_HEAD}<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    f"<ListBucketResult {_NS}><Name>b</Name><Contents><Key>c/&a;</Key><Size>1</Size></Contents></ListBucketResult>"
)


@contextmanager
def _answering(kind: str) -> Generator[str]:
    """An endpoint whose listings are of this kind."""
    pages = iter(range(10**9))

    class Listing(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
            number = next(pages)
            text = {
                "same-token": lambda: _page(number, "again"),
                "new-tokens": lambda: _page(number, f"token{number}"),
                "same-keys": lambda: _page(0, f"token{number}"),
                "bomb": _bomb,
                "outside": lambda: _OUTSIDE,
                "no-xml": lambda: "<html>sign in</html>",
                "cut": lambda: _page(number, "x")[:200],
                "empty": lambda: "",
            }[kind]()
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  (the name that the library calls)

    with answering(Listing) as url:
        yield url


_LOOK = """
import resource, sys
from reshard.errors import ReshardError
from reshard.engine import load_engine
from reshard.models import SourceSpec
resource.setrlimit(resource.RLIMIT_CPU, (50, 50))
try:
    load_engine().inspect(SourceSpec(url="s3://b/c"))
    print("ok")
except ReshardError as error:
    print(error.code, str(error).isprintable(), "root:" in str(error))
# Not ru_maxrss: that of a parent is inherited.
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("kind", ["same-token", "new-tokens", "same-keys", "bomb", "outside", "no-xml", "cut", "empty"])
def test_listings_against_the_protocol(kind: str) -> None:
    started = time.monotonic()
    with _answering(kind) as endpoint:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK],
            env={"PATH": "/usr/bin", **S3Server(endpoint).env()},
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    outcome, megabytes = done.stdout.splitlines()
    # botocore takes XML that cannot be parsed for a server's passing failure: it is tried again, then given up.
    code = "storage.unavailable" if kind in {"bomb", "outside", "cut"} else "storage.protocol"
    assert outcome == f"{code} True False"
    assert int(megabytes) < 600
    assert time.monotonic() - started < DEADLINE_S


# Keys with segments that HTTP clients resolve: with a SAS token, `run/../victim` reached another container on Azure.


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf", "memory"])
@pytest.mark.parametrize(
    "key", ["run/../victim", "../other/victim", "run/./victim", "run//victim", "run/..", r"run\..\victim", "run//"]
)
def test_a_key_that_a_client_may_resolve_to_another_is_rejected_before_a_request(
    monkeypatch: pytest.MonkeyPatch, scheme: str, key: str
) -> None:
    for name, value in _NOWHERE.items():
        monkeypatch.setenv(name, value)
    path = f"org/name/{key}" if scheme == "hf" else f"bucket/{key}"
    store = open_location("memory://bucket").store if scheme == "memory" else service_store(scheme).of_profile(None)
    info = ObjectInfo(path, 1, "etag:x")
    calls = [lambda: store.stat(path), lambda: store.read_into(info, 0, memoryview(bytearray(1)))]
    if key != "run//":  # a path of a directory may end with slashes
        calls += [lambda: store.list_directory(path), lambda: store.list_tree(path)]
    if isinstance(store, ObjectStore):
        calls += [
            lambda: store.put(path, b"", metadata={}, if_absent=False),
            lambda: store.delete([path]),
            lambda: store.delete([path, path], in_order=False),
            lambda: store.metadata(path),
            lambda: store.create_multipart(path, metadata={}),
            lambda: store.list_uploads(path),
        ]
    for call in calls:
        error = raised(SourceError, call)
        assert error.code == "name.invalid"
        assert "segment" in error.message


_NOWHERE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=x;AccountKey=eA==;BlobEndpoint=http://127.0.0.1:9/x;",
}


def test_a_directory_that_leads_out_of_its_parent_is_not_listed() -> None:
    class Files:
        root_marker = ""

        def invalidate_cache(self) -> None:
            """No listing is kept."""

        def cat_file(self, path: str, start: int, end: int) -> bytes:
            raise NotImplementedError

        def ls(self, path: str, *, detail: bool) -> list[dict[str, object]]:
            assert detail
            names = [("..", "directory"), (".", "directory"), ("step", "directory"), ("..", "file"), ("a", "file")]
            return [{"name": f"{path}/{name}", "type": kind, "size": 1} for name, kind in names]

    listing = FsspecStore(Files(), "any").list_directory("run")
    assert (listing.directories, [*listing.by_name]) == (("step",), ["a"])
