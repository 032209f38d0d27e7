"""The embedded executor: one child process beside the API, restarted when it dies."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

logger = logging.getLogger(__name__)

_RESTART_S = 2.0
_STOP_S = 10.0


class ExecutorProcess:
    """Keeps `python -m reshard_worker.embedded` running until stopped.

    The child asks the kernel to end it with its parent thread, so that `kill -9` of the API leaves
    nothing behind. Therefore the thread that starts the child lives as long as this object is in use.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, name="executor", daemon=True)

    def start(self) -> None:
        """Start the child."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the child, which requeues its job first."""
        self._stop.set()
        self._thread.join()

    def _keep_running(self) -> None:
        while not self._stop.is_set():
            process = subprocess.Popen([sys.executable, "-m", "reshard_worker.embedded"], stdin=subprocess.DEVNULL)
            while process.poll() is None and not self._stop.wait(0.2):
                continue
            if self._stop.is_set():
                _end(process)
                return
            logger.warning("the executor ended with status %d and is started again", process.returncode)
            self._stop.wait(_RESTART_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
