"""One checkpoint converted by tasks on a Dask cluster.

    DASK_SCHEDULER=tcp://host:8786 python convert_with_dask.py 8 /shared/run1 /shared/run1_universal --to universal

Dask only places the processes. If a node is lost, its work is taken over, and Dask starts its task again somewhere.
"""

import os
import subprocess
import sys

from distributed import Client


def convert(number: int, count: int, words: list[str]) -> int:
    """Run one worker of the conversion, and return its exit code."""
    argv = [sys.executable, "-m", "reshard.cli.main", "convert", *words]
    return subprocess.run([*argv, "--workers", str(count), "--worker", str(number)], check=False).returncode


def main() -> int:
    """Start the tasks, and return the highest exit code."""
    count, words = int(sys.argv[1]), sys.argv[2:]
    # Without an address Dask starts a cluster on this machine. A task is not pure: it is never answered from a cache.
    with Client(os.environ.get("DASK_SCHEDULER")) as client:
        futures = [client.submit(convert, number, count, words, pure=False, retries=3) for number in range(count)]
        return max(client.gather(futures))


if __name__ == "__main__":
    sys.exit(main())
