"""Sequential reads of a mounted target beside those of the converted files: ratios of throughput.

    python bench/mount.py [--megabytes 1000] [--rounds 3] [--work DIR]

Each round drops the files from the page cache, then reads all of them with 1 MiB a call, from one reader and from two:
the converted files, and those of the mount, whose source is dropped as well. "warm" leaves the caches as they are: the
source for the mount, which is mounted again, and the converted files themselves. "again" reads the mount twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from cases import convert_command, environment, sized, written  # noqa: E402 - beside this file

_CALL_BYTES = 1 << 20
_TO = ("--to", "zero", "--dp", "3")


def files_below(tree: Path) -> list[Path]:
    """The files of a tree that hold tensors."""
    return sorted(p for p in tree.rglob("*.pt") if p.is_file())


def drop(files: Iterable[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read(path: Path) -> int:
    buffer, total = bytearray(_CALL_BYTES), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def rate(files: Sequence[Path], readers: int) -> float:
    """Bytes a second of so many readers."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        total = sum(pool.map(_read, files))
    return total / (time.perf_counter() - begun)


@contextmanager
def mounted(source: Path, place: Path) -> Generator[Path]:
    """The target, mounted by a process of its own."""
    command = [sys.executable, "-m", "reshard.cli.main", "mount", str(source), str(place), *_TO, "--no-compare"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), cwd=ROOT, text=True)
    try:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Print the rates of each round, and the medians of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="directory of a local disk; default: a new one in TMPDIR")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as name:
        work = Path(name)
        source, converted = work / "run1", work / "run2" / "made"
        written(source, sized(given.megabytes), stage=2, ranks=4)
        subprocess.run(convert_command(source, converted, *_TO), check=True, env=environment(), stdout=sys.stderr)
        sources, plain = files_below(source), files_below(converted)
        ratios: dict[str, list[float]] = {}
        for number in range(given.rounds):
            for readers in (1, 2):
                rates: dict[str, float] = {}
                drop(plain)
                rates["plain, cold"] = rate(plain, readers)
                rates["plain, warm"] = rate(plain, readers)
                for state in ("cold", "warm"):
                    with mounted(source, work / "mnt") as place:
                        if state == "cold":
                            drop(sources)
                        files = files_below(place)
                        rates[f"mount, {state}"] = rate(files, readers)
                        if state == "cold":
                            rates["mount, again"] = rate(files, readers)
                said = {what: f"{found / 1e6:,.0f} MB/s" for what, found in rates.items()}
                sys.stdout.write(f"round {number + 1}, readers {readers}: {json.dumps(said)}\n")
                for what, other in (("cold", "cold"), ("warm", "warm"), ("again", "warm")):
                    key = f"{what}, readers {readers}"
                    ratios.setdefault(key, []).append(rates[f"mount, {what}"] / rates[f"plain, {other}"])
        for key, found in ratios.items():
            sys.stdout.write(f"{key}: mount / plain = {statistics.median(found):.2f}\n")


if __name__ == "__main__":
    main()
