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

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

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

    if writes:
        raise NotImplementedError  # it writes by the XML API, which the server does not have
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
    """Run one contender in this process; prints its numbers. Imports come first, and are not counted."""
    kind, _, client = name.partition(":")
    length = _PART_BYTES if kind == "write" else _RANGE_BYTES
    spans = [(at, min(length, size_bytes - at)) for at in range(0, size_bytes, length)]
    if kind == "copy":
        run: Callable[[], None] = _COPIES[client]
    else:
        _CLIENTS[client](spans[:1] if kind == "read" else [], writes=False)
        run = lambda: _CLIENTS[client](spans, writes=kind == "write")  # noqa: E731
    # What a process had at its peak before counts as well, and that of the process that forked it.
    Path("/proc/self/clear_refs").write_text("5")
    held_kib = _peak_kib()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    run()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "grown_mib": (_peak_kib() - held_kib) / 1024}))


def _peak_kib() -> int:
    """Most memory that this process had since its peak was reset (`proc_pid_status(5)`, `VmHWM`)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def _measure(names: Sequence[str], size_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            command = [sys.executable, "-W", "ignore", __file__, "--contender", name, "--bytes", str(size_bytes)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            if turn:
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {n: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for n, runs in found.items()}


def _table(title: str, medians: dict[str, dict[str, float]], size_bytes: int) -> None:
    print(f"\n| {title} | wall s | MiB/s | client CPU s | memory grown MiB |\n|---|---:|---:|---:|---:|")
    for name, m in medians.items():
        rate = size_bytes / m["wall_s"] / (1 << 20)
        print(
            f"| {name.partition(':')[2]} | {m['wall_s']:.2f} | {rate:.0f} | {m['cpu_s']:.2f} | {m['grown_mib']:.0f} |"
        )


def main() -> int:
    """Print Markdown tables of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-clients", action="store_true")
    parser.add_argument("--no-conversions", action="store_true")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        _contender(arguments.contender, arguments.bytes)
        return 0
    size = arguments.mebibytes << 20
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
            _table("ranged reads", _measure([f"read:{n}" for n in clients], size, arguments.rounds), size)
            writers = [f"write:{n}" for n in clients if n != "obstore"]
            _table("parts, joined", _measure(writers, size, arguments.rounds), size)
            server.delete(_BUCKET, _OBJECT)
        if not arguments.no_conversions:
            from checkpoints import gpt_parameters, write_zero_checkpoint  # brings torch

            layers = max(1, round(size / 12 / (12 * 1024 * 1024)))
            write_zero_checkpoint(Path(name) / "run", gpt_parameters(1024, layers, 1_000), stage=2, ranks=4)
            server.upload(Path(name) / "run", _BUCKET, "run")
            total = sum(p.stat().st_size for p in (Path(name) / "run").rglob("*") if p.is_file())
            _table("whole checkpoint", _measure([f"copy:{n}" for n in _COPIES], total, arguments.rounds), total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
