"""Makes a process look as if it ran on another host: for tests, found by PYTHONPATH.

OTHER_HOST names the host; its file locks hold nobody back, as on a network file system that is mounted with local locks
(nfs(5), `local_lock=flock`). CLOCK_SKEW_S shifts its clocks.
"""

import fcntl
import os
import socket
import time


def _shift(seconds: float) -> None:
    monotonic, wall, wall_ns = time.monotonic, time.time, time.time_ns
    time.monotonic = lambda: monotonic() + seconds
    time.time = lambda: wall() + seconds
    time.time_ns = lambda: wall_ns() + int(seconds * 1e9)


def _move(host: str) -> None:
    socket.gethostname = lambda: host
    fcntl.flock = lambda descriptor, operation: None


if os.environ.get("CLOCK_SKEW_S"):
    _shift(float(os.environ["CLOCK_SKEW_S"]))
if os.environ.get("OTHER_HOST"):
    _move(os.environ["OTHER_HOST"])
