"""A torchrun for tests that imports DeepSpeed once and forks its processes: each import takes three seconds of a core.

    python forked_torchrun.py --standalone --nproc-per-node N SCRIPT ARGUMENT...

The real one is run in the long form of the tutorial's test, and by tests/recipes.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys


def main(processes: int, script: str, *arguments: str) -> int:
    """Run the script as that many ranks; 0 if all ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    import deepspeed  # noqa: F401

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(processes))
    ranks: list[int] = []
    for rank in range(processes):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            os._exit(0)
        ranks.append(child)
    return int(any(os.waitpid(rank, 0)[1] for rank in ranks))


if __name__ == "__main__":
    assert sys.argv[1:3] == ["--standalone", "--nproc-per-node"]
    sys.exit(main(int(sys.argv[3]), *sys.argv[4:]))
