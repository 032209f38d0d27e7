"""One checkpoint converted by tasks on a Ray cluster, one on each node where there is room.

    python convert_with_ray.py 8 /shared/run1 /shared/run1_universal --to universal

Ray only places the processes. If a node is lost, its work is taken over, and Ray starts its task again somewhere.
"""

import subprocess
import sys

import ray


@ray.remote(num_cpus=1, max_retries=3, scheduling_strategy="SPREAD")
def convert(number: int, count: int, words: list[str]) -> int:
    """Run one worker of the conversion, and return its exit code."""
    argv = [sys.executable, "-m", "reshard.cli.main", "convert", *words]
    return subprocess.run([*argv, "--workers", str(count), "--worker", str(number)], check=False).returncode


def main() -> int:
    """Start the tasks, and return the highest exit code."""
    count, words = int(sys.argv[1]), sys.argv[2:]
    # `ray job submit` and RAY_ADDRESS name the cluster; without them Ray starts on this machine.
    ray.init()
    return max(ray.get([convert.remote(number, count, words) for number in range(count)]))


if __name__ == "__main__":
    sys.exit(main())
