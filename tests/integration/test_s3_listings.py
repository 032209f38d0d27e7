"""S3 listings and their errors on a real server. The oracle of names, sizes and ETags is s3fs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import s3fs  # pyright: ignore[reportMissingTypeStubs]

from reshard.errors import ReshardError
from reshard_engine.storage.profiles import S3Profile
from reshard_engine.storage.s3 import S3Store
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

BUCKET = "listings"
FLAT, WIDE = 1010, 1005
KEYS = [
    *(f"flat/k{n:04}" for n in range(FLAT)),
    *(f"wide/s{n:04}/f" for n in range(WIDE)),
    *("run/", "run/a", "run/sub/x", "run.txt", "top", "ü/ñ é+%20&.txt", "a b/c d"),
]


@pytest.fixture(scope="module")
def profile(s3: S3Server) -> S3Profile:
    """A bucket with more keys than a page holds, on one level and in sub-directories."""
    client = s3.client()
    client.create_bucket(Bucket=BUCKET)

    def put(key: str) -> None:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"" if key.endswith("/") else key.encode())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, KEYS))
    return S3Profile(s3.endpoint, ACCESS_KEY, SECRET_KEY, region="us-east-1")


@pytest.fixture(scope="module")
def oracle(profile: S3Profile) -> Any:
    """The S3 file system that most Python programs use."""
    return s3fs.S3FileSystem(
        key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=profile.endpoint_url, use_listings_cache=False
    )


def _facts(entry: dict[str, Any]) -> tuple[str, int, str, float]:
    return (entry["name"], entry["size"], "etag:" + entry["ETag"].strip('"'), entry["LastModified"].timestamp())


@pytest.mark.parametrize("path", ["", "/flat", "/wide", "/run/", "/ü", "/a b"])
def test_listings_are_those_of_s3fs(profile: S3Profile, oracle: Any, path: str) -> None:
    store, place = S3Store(profile), f"{BUCKET}{path}"
    listing = store.list_directory(place)
    entries = [e for e in oracle.ls(place, detail=True) if e["name"].rstrip("/") != place.rstrip("/")]
    files = [e for e in entries if e["type"] == "file"]
    assert [(f.path, f.size_bytes, f.pin, f.modified_at) for f in listing.files] == sorted(map(_facts, files))
    assert list(listing.directories) == sorted(
        e["name"].rpartition("/")[2] for e in entries if e["type"] == "directory"
    )
    tree = [(f.path, f.size_bytes, f.pin, f.modified_at) for f in store.list_tree(place)]
    assert tree == sorted(map(_facts, oracle.find(place, detail=True).values()))
    assert tree


def test_more_keys_than_a_page_holds(profile: S3Profile) -> None:
    store = S3Store(profile)
    assert len(store.list_directory(f"{BUCKET}/flat").files) == FLAT
    assert len(store.list_directory(f"{BUCKET}/wide").directories) == WIDE
    assert len(store.list_tree(BUCKET)) == len(KEYS)


@pytest.mark.parametrize("path", ["/absent", "/ru", "/top", "/flat/k0001"])
def test_nothing_is_below_what_is_no_directory(profile: S3Profile, path: str) -> None:
    store = S3Store(profile)
    assert store.list_tree(f"{BUCKET}{path}") == []
    listing = store.list_directory(f"{BUCKET}{path}")
    assert (listing.files, listing.directories) == ((), ())


def _codes(store: S3Store, path: str, count: int = 3) -> list[str]:
    """The code of the error of each way to look at a path: list it, list all below it, ask for the object."""
    found: list[str] = []
    for call in (store.list_directory, store.list_tree, store.stat)[:count]:
        try:
            found.append("" if call(path) is not None else "none")
        except ReshardError as error:
            found.append(error.code)
    return found


def test_errors_of_a_server(profile: S3Profile) -> None:
    here = f"{BUCKET}/run/a"
    assert _codes(S3Store(profile), "no-such-bucket/x") == ["storage.no_bucket", "storage.no_bucket", "none"]
    for wrong in (replace(profile, access_key_id="nobody"), replace(profile, secret_access_key="wrong")):
        assert _codes(S3Store(wrong), here) == ["storage.denied"] * 3


@contextmanager
def _answering(status: int, code: str) -> Generator[S3Profile]:
    """An endpoint that answers every request with one error."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  (the name that the library calls)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield S3Profile(f"http://127.0.0.1:{server.server_port}", "key", "secret", region="us-east-1")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "typed"),
    [
        (503, "SlowDown", ["storage.unavailable"]),  # each takes botocore's pauses between five tries
        (403, "AccessDenied", ["storage.denied"] * 3),
        (507, "InsufficientStorage", ["storage.no_space"] * 3),
        (400, "InvalidRequest", ["storage.protocol"] * 3),
        (301, "PermanentRedirect", ["storage.protocol"] * 3),
        (404, "NoSuchBucket", ["storage.no_bucket", "storage.no_bucket", "none"]),
        (404, "NoSuchKey", ["source.not_found", "source.not_found", "none"]),
    ],
)
def test_errors_are_typed(status: int, code: str, typed: list[str]) -> None:
    with _answering(status, code) as profile:
        assert _codes(S3Store(profile), "b/x", len(typed)) == typed


def test_s3_is_opened_without_s3fs() -> None:
    """Its import takes as long again as that of botocore."""
    program = """
import sys
from reshard_engine.storage.locations import open_location
open_location("s3://bucket/run")
print(sorted({"s3fs", "aiobotocore", "aiohttp"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
