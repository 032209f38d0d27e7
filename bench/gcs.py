"""Clients of Google Cloud Storage beside each other, and conversions beside a plain copy by Google's own client.

    python bench/gcs.py [--mebibytes 256] [--rounds 3] [--no-clients] [--no-conversions]

Starts fake-gcs-server on loopback, with its objects in memory. Contenders take turns, each in a process of its own.

Clients: one object is read in ranges of 8 MiB, and another is written in parts of 64 MiB that are joined, four at a
time. `plain copy` and `ours`: a ZeRO-2 checkpoint of four ranks is downloaded and uploaded with `transfer_manager` by
way of a disk in memory, or converted to two ranks within the store, with all checks.

gcsfs is measured where it is installed. Client and server share the machine: read the ratios, the processor time and
the memory. The choice that follows is docs/adr/0030.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from clients import measure, parser_of, print_table, put_checkpoint, run_contender

from servers.gcs import GcsServer, gcs_server

_BUCKET, _OBJECT = "bench", "object"
_RANGE_BYTES, _PART_BYTES, _CONCURRENCY = 8 << 20, 64 << 20, 4
_ENDPOINT = "STORAGE_EMULATOR_HOST"
Spans = Sequence[tuple[int, int]]


def _each(one: Callable[[tuple[int, int]], object], spans: Spans) -> None:
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        list(pool.map(one, spans))


def _ours(spans: Spans, *, writes: bool) -> None:
    from reshard_engine.storage.gcs import GcsStore

    store = GcsStore.of_profile(None)
    if writes:
        path, data = f"{_BUCKET}/ours", memoryview(bytearray(_PART_BYTES))
        upload = store.create_multipart(path, metadata={})
        with ThreadPoolExecutor(_CONCURRENCY) as pool:
            parts = pool.map(lambda s: store.put_part(path, upload, s[0] // _PART_BYTES + 1, data[: s[1]]), spans)
            store.complete_multipart(path, upload, list(parts))
        return
    info = store.stat(f"{_BUCKET}/{_OBJECT}")
    assert info is not None
    _each(lambda s: store.read_into(info, s[0], memoryview(bytearray(s[1]))), spans)


def _google(spans: Spans, *, writes: bool) -> None:
    bucket = GcsServer(os.environ[_ENDPOINT]).client().bucket(_BUCKET)
    if writes:
        data = memoryview(bytearray(_PART_BYTES))
        parts = [bucket.blob(f"google/{at}") for at, _ in spans]

        def write(span: tuple[int, int]) -> None:
            bucket.blob(f"google/{span[0]}").upload_from_string(bytes(data[: span[1]]), checksum="crc32c")

        _each(write, spans)
        bucket.blob("google-whole").compose(parts, if_generation_match=0)
        for part in parts:
            part.delete()
        return
    blob = bucket.blob(_OBJECT)
    _each(lambda s: len(blob.download_as_bytes(start=s[0], end=sum(s) - 1, raw_download=True, checksum=None)), spans)


def _gcsfs(spans: Spans, *, writes: bool) -> None:
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # asks for the kind of the bucket by gRPC
    import gcsfs

    files: Any = gcsfs.GCSFileSystem(token="anon", endpoint_url=os.environ[_ENDPOINT])
    if writes:
        data = bytes(_PART_BYTES)
        names = {f"{_BUCKET}/gcsfs/{at}": data[:length] for at, length in spans}
        files.pipe(names, batch_size=_CONCURRENCY)
        files.merge(f"{_BUCKET}/gcsfs-whole", list(names))
        files.rm(list(names))
        return
    ends = [sum(span) for span in spans]
    files.cat_ranges([f"{_BUCKET}/{_OBJECT}"] * len(spans), [at for at, _ in spans], ends, batch_size=_CONCURRENCY)


def _obstore(spans: Spans, *, writes: bool) -> None:
    import obstore
    from obstore.store import GCSStore

    assert not writes
    store: Any = GCSStore(
        _BUCKET,
        client_options={"allow_http": True},
        config={"base_url": os.environ[_ENDPOINT], "skip_signature": True},
    )
    _each(lambda s: len(obstore.get_range(store, _OBJECT, start=s[0], length=s[1])), spans)


def _plain_copy() -> None:
    from google.cloud.storage import transfer_manager

    bucket = GcsServer(os.environ[_ENDPOINT]).client().bucket(_BUCKET)
    names = [blob.name for blob in bucket.list_blobs(prefix="run/")]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        options: dict[str, Any] = {"worker_type": transfer_manager.THREAD, "max_workers": 8, "raise_exception": True}
        transfer_manager.download_many_to_path(bucket, names, destination_directory=place, **options)
        transfer_manager.upload_many_from_filenames(
            bucket, names, source_directory=place, blob_name_prefix="plain/", **options
        )


def _conversion() -> None:
    import reshard

    reshard.convert(f"gs://{_BUCKET}/run", f"gs://{_BUCKET}/ours-{os.getpid()}/tag", to="zero", dp=2)


_CLIENTS = {"ours": _ours, "google-cloud-storage": _google, "gcsfs": _gcsfs, "obstore": _obstore}
_COPIES = {"plain copy": _plain_copy, "ours, converting": _conversion}


def _contender(name: str, size_bytes: int) -> None:
    kind, _, client = name.partition(":")
    length = _PART_BYTES if kind == "write" else _RANGE_BYTES
    spans = [(at, min(length, size_bytes - at)) for at in range(0, size_bytes, length)]
    if kind == "copy":
        run_contender(_COPIES[client])
        return
    _CLIENTS[client](spans[:1] if kind == "read" else [], writes=False)  # what it imports is not counted
    run_contender(lambda: _CLIENTS[client](spans, writes=kind == "write"))


def main() -> int:
    """Print Markdown tables of medians."""
    arguments = parser_of(__doc__).parse_args()
    if arguments.contender:
        _contender(arguments.contender, arguments.bytes)
        return 0
    size, rounds = arguments.mebibytes << 20, arguments.rounds
    with tempfile.TemporaryDirectory(prefix="reshard-bench-") as name, gcs_server(Path(name)) as server:
        os.environ.update(server.env())
        server.make_bucket(_BUCKET)
        if not arguments.no_clients:
            server.put(_BUCKET, _OBJECT, os.urandom(size))
            clients = [
                n
                for n in _CLIENTS
                if n == "ours" or importlib.util.find_spec(n.replace("google-cloud-storage", "google.cloud.storage"))
            ]
            # obstore writes by the XML API, which the server does not have.
            writers = [n for n in clients if n != "obstore"]
            for kind, title, names in (("read", "ranged reads", clients), ("write", "parts, joined", writers)):
                found = measure(__file__, [f"{kind}:{n}" for n in names], ["--bytes", str(size)], rounds)
                print_table(title, found, size)
            server.delete(_BUCKET, _OBJECT)
        if not arguments.no_conversions:
            total = put_checkpoint(server, _BUCKET, Path(name) / "run", size, width=1024)
            copies = measure(__file__, [f"copy:{n}" for n in _COPIES], ["--bytes", "0"], rounds)
            print_table("whole checkpoint", copies, total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
