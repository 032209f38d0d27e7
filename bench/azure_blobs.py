"""Clients of Azure Blob Storage beside each other, and conversions beside a plain copy by Microsoft's own client.

    python bench/azure_blobs.py [--mebibytes 256] [--rounds 3] [--data /dev/shm] [--no-clients] [--no-conversions]

Starts Azurite on loopback. Contenders take turns, each in a process of its own.

Clients: one blob is read in ranges of 8 MiB, and another is written in blocks of 32 MiB, four at a time; then sixteen
threads create one blob at once. `plain copy` and `ours`: a ZeRO-2 checkpoint of four ranks is downloaded and uploaded
by the official client by way of a disk in memory, or converted to two ranks within the store, with all checks.

Client and server share the machine, and Azurite is one process of JavaScript: read the ratios, the processor time and
the memory. The choice that follows is docs/adr/0030.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from azure.core.exceptions import ResourceExistsError
from azure.storage.blob import BlobServiceClient
from clients import measure, parser_of, print_table, put_checkpoint, run_contender

from reshard.errors import StorageError
from reshard_engine.storage.azure import AzureStore
from servers.azure import ACCOUNT, KEY, azure_server

_BOX, _BLOB = "bench", "object"
_RANGE_BYTES, _PART_BYTES, _CONCURRENCY, _CREATORS = 8 << 20, 32 << 20, 4, 16
_SETTING = "AZURE_STORAGE_CONNECTION_STRING"
Spans = Sequence[tuple[int, int]]


def _each(one: Callable[[tuple[int, int]], object], spans: Spans) -> None:
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        list(pool.map(one, spans))


def _spans(size_bytes: int, length: int) -> Spans:
    return [(at, min(length, size_bytes - at)) for at in range(0, size_bytes, length)]


# Reads, writes and creation of one blob by each client.


def _ours(size_bytes: int, kind: str) -> None:
    store = AzureStore.of_profile(None)
    if kind == "read":
        info = store.stat(f"{_BOX}/{_BLOB}")
        assert info is not None
        _each(lambda s: store.read_into(info, s[0], memoryview(bytearray(s[1]))), _spans(size_bytes, _RANGE_BYTES))
        return
    path, data = f"{_BOX}/ours", memoryview(bytearray(_PART_BYTES))
    upload = store.create_multipart(path, metadata={})
    spans = _spans(size_bytes, _PART_BYTES)
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        parts = pool.map(lambda s: store.put_part(path, upload, s[0] // _PART_BYTES + 1, data[: s[1]]), spans)
        store.complete_multipart(path, upload, list(parts))


def _official(size_bytes: int, kind: str) -> None:
    service = BlobServiceClient.from_connection_string(os.environ[_SETTING], max_block_size=_PART_BYTES)
    blob = service.get_blob_client(_BOX, _BLOB if kind == "read" else "official")
    if kind == "read":
        _each(lambda s: blob.download_blob(s[0], s[1]).readall(), _spans(size_bytes, _RANGE_BYTES))
    else:
        blob.upload_blob(bytes(size_bytes), overwrite=True, max_concurrency=_CONCURRENCY)


def _obstore_store() -> Any:
    from obstore.store import AzureStore as ObstoreAzure

    endpoint = os.environ[_SETTING].partition("BlobEndpoint=")[2].rstrip(";")
    return ObstoreAzure(
        _BOX, account_name=ACCOUNT, account_key=KEY, endpoint=endpoint, client_options={"allow_http": True}
    )


def _obstore(size_bytes: int, kind: str) -> None:
    import obstore

    store = _obstore_store()
    if kind == "read":
        _each(lambda s: len(obstore.get_range(store, _BLOB, start=s[0], length=s[1])), _spans(size_bytes, _RANGE_BYTES))
    else:
        obstore.put(store, "obstore", bytes(size_bytes), chunk_size=_PART_BYTES, max_concurrency=_CONCURRENCY)


def _adlfs_files() -> Any:
    import adlfs

    return adlfs.AzureBlobFileSystem(connection_string=os.environ[_SETTING], max_concurrency=_CONCURRENCY)


def _adlfs(size_bytes: int, kind: str) -> None:
    files = _adlfs_files()
    if kind == "read":
        spans = _spans(size_bytes, _RANGE_BYTES)
        ends = [sum(span) for span in spans]
        files.cat_ranges([f"{_BOX}/{_BLOB}"] * len(spans), [at for at, _ in spans], ends, batch_size=_CONCURRENCY)
    else:
        files.pipe_file(f"{_BOX}/adlfs", bytes(size_bytes))


def _creations() -> dict[str, Callable[[str, bytes], object]]:
    """The calls by which each client creates a blob that must not be there yet."""
    import obstore

    store, ours, files = _obstore_store(), AzureStore.of_profile(None), _adlfs_files()
    service = BlobServiceClient.from_connection_string(os.environ[_SETTING])
    return {
        "ours": lambda name, data: ours.put(f"{_BOX}/{name}", data, metadata={}, if_absent=True),
        "azure-storage-blob": lambda name, data: service.get_blob_client(_BOX, name).upload_blob(data),
        "obstore": lambda name, data: obstore.put(store, name, data, mode="create"),
        "adlfs": lambda name, data: files.pipe_file(f"{_BOX}/{name}", data, overwrite=False, mode="create"),
    }


def _winners(create: Callable[[str, bytes], object], name: str) -> int:
    """The number of threads that believe that they created the blob."""
    import obstore.exceptions

    refusals = (StorageError, ResourceExistsError, FileExistsError, obstore.exceptions.AlreadyExistsError)

    def one(number: int) -> bool:
        try:
            create(name, b"%d" % number)
        except refusals:
            return False
        return True

    with ThreadPoolExecutor(_CREATORS) as pool:
        return sum(pool.map(one, range(_CREATORS)))


# A whole checkpoint: copied, and converted.


def _plain_copy() -> None:
    box = BlobServiceClient.from_connection_string(os.environ[_SETTING]).get_container_client(_BOX)
    names = [entry.name for entry in box.list_blobs("run/")]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, ThreadPoolExecutor(_CONCURRENCY) as pool:

        def get(name: str) -> Path:
            path = Path(place, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                box.download_blob(name, max_concurrency=2).readinto(file)
            return path

        def put(path: Path) -> None:
            with path.open("rb") as file:
                name = f"plain/{path.relative_to(place)}"
                box.upload_blob(name, file, overwrite=True, max_concurrency=2)

        list(pool.map(put, list(pool.map(get, names))))


def _conversion() -> None:
    from reshard.engine import load_engine
    from reshard.models.jobs import ConvertRequest

    place = {"source": {"url": f"az://{_BOX}/run"}, "target": f"az://{_BOX}/ours-{os.getpid()}/tag"}
    request = {**place, "to": "zero", "layout": {"dp": 2}}
    load_engine().convert(ConvertRequest.model_validate(request))


_CLIENTS = {"ours": _ours, "azure-storage-blob": _official, "obstore": _obstore, "adlfs": _adlfs}
_COPIES = {"plain copy": _plain_copy, "ours, converting": _conversion}


def _contender(name: str, size_bytes: int) -> None:
    kind, _, client = name.partition(":")
    if kind == "copy":
        run_contender(_COPIES[client])
        return
    _CLIENTS[client](_RANGE_BYTES, "read")  # what it imports is not counted
    run_contender(lambda: _CLIENTS[client](size_bytes, kind))


def main() -> int:
    """Print Markdown tables of medians."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="where the server's data go, such as /dev/shm")
    arguments = parser.parse_args()
    if arguments.contender:
        _contender(arguments.contender, arguments.bytes)
        return 0
    size, rounds = arguments.mebibytes << 20, arguments.rounds
    with (
        tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.data) as name,
        azure_server(Path(name) / "azurite") as server,
    ):
        os.environ.update(server.env())
        server.client().create_container(_BOX)
        if not arguments.no_clients:
            server.put(_BOX, _BLOB, os.urandom(size))
            for kind, title in (("read", "ranged reads"), ("write", "one blob in blocks")):
                found = measure(__file__, [f"{kind}:{n}" for n in _CLIENTS], ["--bytes", str(size)], rounds)
                print_table(title, found, size)
            print(f"\n| {_CREATORS} threads create one blob | winners |\n|---|---:|")
            for client, create in _creations().items():
                print(f"| {client} | {_winners(create, f'once-{client}')} |")
        if not arguments.no_conversions:
            total = put_checkpoint(server, _BOX, Path(name) / "run", size, width=2048)
            copies = measure(__file__, [f"copy:{n}" for n in _COPIES], ["--bytes", "0"], rounds)
            print_table("whole checkpoint", copies, total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
