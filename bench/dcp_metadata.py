"""Seconds and memory to read the `.metadata` of a distributed checkpoint, beside Python's own unpickler.

    python bench/dcp_metadata.py [--large 5000x1024] [--peers 500x64 2000x8] [--rounds 3] [--json]

Each reading runs in a process of its own; its memory is its peak less what it had before. Ours ends with columns in
which every chunk is matched with its place and every number is checked; the unpickler ends with torch's objects, and
runs whatever the file names. It is not run on the large file: there its objects would take about 14 GB.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


class _Meter:
    """Time, processor time and memory of what runs within it."""

    def __enter__(self) -> _Meter:
        self._before = _peak_bytes()
        self._started, self._cpu = time.perf_counter(), time.process_time()
        self.read: dict[str, float] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.read["seconds"] = time.perf_counter() - self._started
        self.read["cpu_seconds"] = time.process_time() - self._cpu
        self.read["peak_bytes"] = _peak_bytes()
        self.read["memory_bytes"] = _peak_bytes() - self._before


def _read_by_us(path: Path) -> dict[str, Any]:
    from reshard_engine.formats.dcp_files.metadata.parse import parse_metadata

    with _Meter() as meter:
        found = parse_metadata(path.read_bytes(), path.name)
    return {"chunks": len(found.length), **meter.read}


def _read_by_pickle(path: Path) -> dict[str, Any]:
    import_module("torch.distributed.checkpoint")  # The classes that the file names.
    with _Meter() as meter, path.open("rb") as file:
        found = pickle.load(file)
    return {"chunks": sum(len(meta.chunks) for meta in found.state_dict_metadata.values()), **meter.read}


def _measured(reader: str, path: Path, rounds: int) -> dict[str, Any]:
    """The fastest of several processes."""
    command = [sys.executable, __file__, "--child", reader, str(path)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(rounds)]
    return min(runs, key=lambda run: run["seconds"]) | {"reader": reader, "file_bytes": path.stat().st_size}


def _case(text: str, readers: list[str], rounds: int, directory: Path) -> list[dict[str, Any]]:
    from house.dcp_streams import model, stream

    tensors, ranks = map(int, text.split("x"))
    path = directory / ".metadata"
    path.write_bytes(stream(model(tensors), ranks))
    return [{"tensors": tensors, "ranks": ranks, **_measured(reader, path, rounds)} for reader in readers]


def main() -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", nargs="*", default=["5000x1024"], help="tensors x ranks")
    parser.add_argument("--peers", nargs="*", default=["500x64", "2000x8"], help="tensors x ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("READER", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        reader, path = chosen.child
        print(json.dumps((_read_by_us if reader == "ours" else _read_by_pickle)(Path(path))))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for text in chosen.peers:
            rows += _case(text, ["ours", "pickle"], chosen.rounds, Path(directory))
        for text in chosen.large:
            rows += _case(text, ["ours"], chosen.rounds, Path(directory))
    if chosen.json:
        print(json.dumps(rows))
        return 0
    print(f"Python {platform.python_version()}, {platform.machine()}; seconds of the clock and of the processor")
    heads = f"{'tensors x ranks':>15}  {'reader':7} {'file MB':>9} {'chunks':>11}"
    print(f"{heads} {'clock':>7} {'CPU':>7} {'more MB':>9} {'peak MB':>8}")
    for row in rows:
        file, more, peak = (row[key] / 1e6 for key in ("file_bytes", "memory_bytes", "peak_bytes"))
        world = f"{row['tensors']:,} x {row['ranks']:,}"
        print(
            f"{world:>15}  {row['reader']:7} {file:9,.1f} {row['chunks']:11,} {row['seconds']:7.2f} "
            f"{row['cpu_seconds']:7.2f} {more:9,.1f} {peak:8,.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
