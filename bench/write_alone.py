"""The roofline of a disk: as many bytes as a tree has, in files of the same sizes, from memory, with one sync.

    python bench/write_alone.py TREE COPY

Nothing is read, summed or cast; two threads write the same megabyte again and again. No converter is faster on this
disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_WINDOW = memoryview(os.urandom(1 << 20))


def _write(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        while size:
            size -= os.write(descriptor, _WINDOW[:size])
    finally:
        os.close(descriptor)


def main() -> None:
    """Write the tree."""
    tree, copy = Path(sys.argv[1]), Path(sys.argv[2])
    files = [(p, p.stat().st_size) for p in tree.rglob("*") if p.is_file()]
    for path, _ in files:
        (copy / path.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda f: _write(copy / f[0].relative_to(tree), f[1]), files))
    subprocess.run(["sync", "-f", str(copy)], check=True)


if __name__ == "__main__":
    main()
