"""S3 listings and their errors on a real server. The oracle of names, sizes and ETags is s3fs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import s3fs

from house.conversions import convert
from house.saves import DATA
from reshard.errors import ReshardError
from reshard_engine.storage.s3 import S3Profile, S3Store
from servers.answering import Handler, answering
from servers.proxy import LoggingProxy, logging_proxy
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

    class Failing(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
            self.answer(status, body)

        do_HEAD = do_GET  # noqa: N815  (the name that the library calls)

    with answering(Failing) as url:
        yield S3Profile(url, "key", "secret", region="us-east-1")


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"


# Objects are removed many at a time, on a real server, and one by one where a store has no such call.


OBJECTS = 1005
ODD = ("a b/c+d&<e>", "ü/%2e%2e", "line\nbreak", "\x01")


@pytest.fixture
def bucket(s3: S3Server) -> str:
    bucket = f"test-{os.urandom(6).hex()}"
    s3.make_bucket(bucket)
    return bucket


@pytest.fixture
def proxy(s3: S3Server) -> Generator[LoggingProxy]:
    with logging_proxy(s3.endpoint) as proxy:
        yield proxy


def _store(endpoint: str) -> S3Store:
    return S3Store(S3Profile(endpoint, ACCESS_KEY, SECRET_KEY, region="us-east-1"))


def _deletes(proxy: LoggingProxy) -> tuple[int, int]:
    """Requests that removed one object, and those that removed many."""
    one = sum(1 for r in proxy.requests if r.method == "DELETE")
    return one, sum(1 for r in proxy.requests if r.method == "POST" and "delete" in r.query)


def test_a_thousand_objects_go_in_one_request(s3: S3Server, bucket: str, proxy: LoggingProxy) -> None:
    names = [f"{bucket}/old/{n:04}" for n in range(OBJECTS)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: s3.client().put_object(Bucket=bucket, Key=n.partition("/")[2], Body=b"x"), names[::25]))
    store = _store(proxy.endpoint)
    store.delete(names, in_order=False)
    assert _deletes(proxy) == (0, 2)
    assert store.list_tree(bucket) == []


def test_names_of_all_kinds_go(s3: S3Server, bucket: str, proxy: LoggingProxy) -> None:
    made = [name for name in ODD if name != "\x01"]
    for name in (*made, "stays"):
        s3.client().put_object(Bucket=bucket, Key=name, Body=b"x")
    store = _store(proxy.endpoint)
    store.delete([f"{bucket}/{name}" for name in (*ODD, "absent")], in_order=False)
    assert [info.path for info in store.list_tree(bucket)] == [f"{bucket}/stays"]
    assert _deletes(proxy)[1] == 1


def test_overwrite_removes_the_old_target_with_few_requests(
    s3: S3Server, bucket: str, proxy: LoggingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.env(), "AWS_ENDPOINT_URL": proxy.endpoint}.items():
        monkeypatch.setenv(name, value)
    s3.upload(DATA / "zero3_tiny", bucket, "run/tag")
    many = [f"run/tag/old/{n}" for n in range(40)]
    for key in many:
        s3.client().put_object(Bucket=bucket, Key=key, Body=b"x")
    convert(DATA / "zero3_tiny", f"s3://{bucket}/run/tag", overwrite=True)
    left = {i.path for i in _store(s3.endpoint).list_tree(f"{bucket}/run")}
    assert not left & {f"{bucket}/{key}" for key in many}
    one, requests = _deletes(proxy)
    assert requests >= 2, "those that a loader needs go before the others"
    assert one <= 5, "claim and journal"


@contextmanager
def _replying(*replies: tuple[int, str]) -> Generator[tuple[S3Store, list[str]]]:
    """A store whose n-th answer to DeleteObjects is fixed, the last one for all after it; and what it was asked."""
    asked: list[str] = []

    class Deleting(Handler):
        def do_POST(self) -> None:  # noqa: N802
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = replies[min(asked.count("POST"), len(replies) - 1)]
            asked.append("POST")
            self.answer(status, body.encode())

        def do_DELETE(self) -> None:  # noqa: N802
            asked.append(self.path)
            denied = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
            self.answer(*((403, denied.encode()) if "denied" in self.path else (204, b"")))

    with answering(Deleting) as url:
        yield _store(url), asked


@pytest.mark.parametrize(
    ("status", "code"),
    [(501, "NotImplemented"), (405, "MethodNotAllowed"), (400, "MalformedXML"), (400, "MissingContentMD5")],
)
def test_a_store_without_the_call_removes_one_by_one(status: int, code: str) -> None:
    with _replying((status, f"<Error><Code>{code}</Code><Message>no</Message></Error>")) as (store, asked):
        store.delete(["b/x", "b/y"], in_order=False)
        store.delete(["b/x", "b/z"], in_order=False)
    assert sorted(asked[-4:]) == ["/b/x", "/b/x", "/b/y", "/b/z"]
    assert 1 <= asked.count("POST") <= 5, "botocore tries a 501 again; we do not ask a second time"


def _result(*failed: tuple[str, str]) -> str:
    errors = "".join(f"<Error><Key>{k}</Key><Code>{code}</Code></Error>" for k, code in failed)
    return f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{errors}</DeleteResult>'


def test_a_key_that_failed_is_tried_again_and_its_error_told() -> None:
    with _replying((200, _result(("slow", "SlowDown")))) as (store, asked):
        store.delete(["b/x", "b/slow"], in_order=False)
    assert asked == ["POST", "/b/slow"]
    with (
        _replying((200, _result(("denied", "AccessDenied")))) as (store, _asked),
        pytest.raises(ReshardError, match=r"storage\.denied.*b/denied"),
    ):
        store.delete(["b/x", "b/denied"], in_order=False)


def test_an_order_is_kept() -> None:
    with _replying((200, _result())) as (store, asked):
        store.delete(["b/first", "b/second"])
    assert asked == ["/b/first", "/b/second"]
