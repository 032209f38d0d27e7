"""A real server of Azure Blob Storage: Azurite, Microsoft's emulator, one process."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from servers.process import free_port, running
from servers.stores import ObjectServer, upload

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has (its README). The key is public."""
_PROGRAM = Path(sys.prefix) / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
"""The place where `make setup` installs it."""


@dataclass(frozen=True)
class AzureServer:
    """The address of the server, and the account that may use it."""

    endpoint: str
    scheme: str = "az"

    def env(self, endpoint: str | None = None) -> dict[str, str]:
        """Environment variables with which any client finds the server (or a proxy before it)."""
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={endpoint or self.endpoint}/{ACCOUNT};"
        }

    def client(self) -> Any:
        """The official client: the tests' own eyes."""
        from azure.storage.blob import BlobServiceClient  # an extra, which the environments of some tests leave out

        return BlobServiceClient.from_connection_string(self.env()["AZURE_STORAGE_CONNECTION_STRING"])

    def new_bucket(self) -> str:
        """Create a container that no other test has; its name."""
        name = f"test-{os.urandom(6).hex()}"
        self.client().create_container(name)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write a blob."""
        self.client().get_blob_client(bucket, key).upload_blob(data, overwrite=True)

    def delete(self, bucket: str, key: str) -> None:
        """Remove a blob."""
        self.client().get_blob_client(bucket, key).delete_blob()

    def upload(self, directory: Path, bucket: str, prefix: str) -> None:
        """Put every file of a directory under a prefix."""
        upload(self, directory, bucket, prefix)

    def read_all(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Every blob under a prefix, by its name relative to it."""
        client = self.client().get_container_client(bucket)
        names = [entry.name for entry in client.list_blobs(prefix)]
        return {name.removeprefix(prefix).lstrip("/"): client.download_blob(name).readall() for name in names}

    def part_of(self, method: str, target: str) -> tuple[str, str, str] | None:
        """(path, upload id, part number) if a request uploads a block; the id of a block names all three."""
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        if method != "PUT" or query.get("comp") != "block":
            return None
        block = base64.b64decode(query["blockid"]).decode()
        return (url.path, block[7:19], block[19:24]) if block[19:24] not in {"00000", "99999"} else None

    def unfinished(self, bucket: str) -> list[str]:
        """The names of all blobs with blocks of an upload that was not aborted.

        Azure cannot drop blocks. An aborted upload has a block with the last number.
        """
        client = self.client().get_container_client(bucket)
        found: list[str] = []
        for entry in client.list_blobs(include=["uncommittedblobs"]):
            _, blocks = client.get_blob_client(entry.name).get_block_list("uncommitted")
            tags = {block.id[7:19] for block in blocks} - {b.id[7:19] for b in blocks if b.id[19:24] == "99999"}
            found += [entry.name] * len(tags)
        return found


def sas_of(server: ObjectServer) -> str:
    """A connection string with a SAS token of an hour, in place of the account's key."""
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas  # an extra, as above

    token = generate_account_sas(
        ACCOUNT,
        KEY,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(read=True, write=True, delete=True, list=True, create=True, add=True),
        datetime.now(UTC) + timedelta(hours=1),
    )
    return f"BlobEndpoint={server.endpoint}/{ACCOUNT};SharedAccessSignature={token};"


@contextmanager
def azure_server(directory: Path) -> Generator[AzureServer]:
    """Azurite with its data in `directory`."""
    pytest.importorskip("azure.storage.blob", reason="az:// needs reshard[azure]")
    node = shutil.which("node")
    if node is None or not _PROGRAM.exists():
        pytest.skip("az:// needs node, and Azurite below the environment: make setup")
    port = free_port()
    # It knows the REST versions of some months before the newest client.
    argv = [
        *(node, str(_PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory)),
        *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),
    ]
    directory.mkdir(parents=True, exist_ok=True)
    endpoint = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        try:
            return httpx.get(f"{endpoint}/{ACCOUNT}", timeout=1.0).status_code > 0
        except httpx.TransportError:
            return False

    with running(
        argv, env=os.environ, log=directory / "azurite.log", cwd=directory, stop_sign=signal.SIGKILL
    ) as process:
        try:
            process.wait_until(healthy)
            yield AzureServer(endpoint)
        finally:
            # `node` may be a script that starts it, as in the wheel that basedpyright brings.
            os.killpg(process.pid, signal.SIGKILL)
