"""Concurrent ranged reads of one object with each client that could move our bytes, in one run.

    python bench/object_reads.py [--mebibytes 256] [--concurrency 8] [--rounds 5]

Starts SeaweedFS on loopback. Client and server share the machine: read the ratios and the client's
processor time. The choice that follows is docs/adr/0003.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import obstore
import s3fs
from obstore.store import S3Store as ObstoreS3

from reshard_engine.storage.s3 import S3Store
from servers.s3 import s3_server

_RANGE_BYTES = 8 << 20


def _contenders(size_bytes: int, concurrency: int) -> dict[str, Callable[[], int]]:
    ranges = [(at, min(_RANGE_BYTES, size_bytes - at)) for at in range(0, size_bytes, _RANGE_BYTES)]
    ours = S3Store.of_profile(None)
    info = ours.stat("bench/object")
    if info is None:
        raise RuntimeError("the object is not there")
    generic: Any = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    rust: Any = ObstoreS3(
        "bench",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def threaded(one: Callable[[tuple[int, int]], int]) -> int:
        with ThreadPoolExecutor(concurrency) as pool:
            return sum(pool.map(one, ranges))

    def read_ours(span: tuple[int, int]) -> int:
        buffer = bytearray(span[1])
        ours.read_into(info, span[0], memoryview(buffer))
        return len(buffer)

    def read_rust(span: tuple[int, int]) -> int:
        return len(obstore.get_range(rust, "object", start=span[0], length=span[1]))

    def read_s3fs() -> int:
        starts = [at for at, _ in ranges]
        ends = [at + n for at, n in ranges]
        return sum(map(len, generic.cat_ranges(["bench/object"] * len(ranges), starts, ends)))

    return {
        "botocore in threads (ours)": lambda: threaded(read_ours),
        "obstore get_range in threads": lambda: threaded(read_rust),
        "s3fs cat_ranges": read_s3fs,
    }


def main() -> int:
    """Print a Markdown table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    size = arguments.mebibytes << 20
    with tempfile.TemporaryDirectory(prefix="reshard-bench-") as directory, s3_server(Path(directory)) as server:
        os.environ.update(server.env())
        server.make_bucket("bench")
        server.client().put_object(Bucket="bench", Key="object", Body=os.urandom(size))
        contenders = _contenders(size, arguments.concurrency)
        wall: dict[str, list[float]] = {name: [] for name in contenders}
        cpu: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(arguments.rounds + 1):
            for name, read in contenders.items():
                started, used = time.perf_counter(), time.process_time()
                if read() != size:
                    raise RuntimeError(f"{name} read another number of bytes")
                if turn:
                    wall[name].append(time.perf_counter() - started)
                    cpu[name].append(time.process_time() - used)
    base = statistics.median(wall["s3fs cat_ranges"])
    print("| client | wall s (median) | times faster than s3fs | client CPU s |\n|---|---:|---:|---:|")
    for name in contenders:
        middle = statistics.median(wall[name])
        print(f"| {name} | {middle:.3f} | {base / middle:.2f} | {statistics.median(cpu[name]):.3f} |")
    print(
        json.dumps(
            {"mebibytes": arguments.mebibytes, "concurrency": arguments.concurrency, "wall_s": wall, "cpu_s": cpu}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
