"""The parent's side of the fork-server: start it once, run worlds in it.  Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_TESTS = Path(__file__).resolve().parent.parent


class WorldError(RuntimeError):
    """A rank raised, died or was killed; ``errors`` holds each failed rank's traceback and the tail of its log."""

    def __init__(self, function: str, errors: dict[str, str]) -> None:
        self.function = function
        self.errors = errors
        text = "\n".join(f"=== rank {rank} ===\n{error}" for rank, error in errors.items())
        super().__init__(f"{function} failed\n{text}")


@dataclass(frozen=True)
class Launch:
    """One finished world: what ran, on how many ranks, for how many seconds."""

    function: str
    world: int
    seconds: float


class Worlds:
    """A warmed DeepSpeed process that forks worlds of ranks.

    Use it as a context manager.  One launch runs at a time; when ``run`` returns or raises, no process of that world is
    left.

    Example::

        with Worlds() as worlds:
            per_rank = worlds.run("oracle.train:train_and_save", world=2, case=..., save_dir=...)
    """

    def __init__(
        self, import_paths: tuple[Path, ...] = (), timeout_s: float = 120.0, python: str = sys.executable
    ) -> None:
        """Starts the server.

        Args:
            import_paths: searched for rank functions besides the ``tests`` folder.
            timeout_s: how long a launch may take unless it says otherwise.
            python: the interpreter of the server and its ranks.
        """
        self.timeout_s = timeout_s
        self.launches: list[Launch] = []
        path = os.pathsep.join([str(_TESTS), *map(str, import_paths), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "PYTHONPATH": path.rstrip(os.pathsep),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [python, "-m", "oracle.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._last_id = 0
        self._answer()

    def run(self, function: str, *, world: int, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """The JSON results of ``function(**kwargs)`` on each of ``world`` ranks, in rank order.

        Args:
            function: ``"module:function"``, imported inside the rank.
            world: number of ranks.
            timeout_s: after it all ranks are killed; the server's default if None.
            **kwargs: JSON-able arguments.

        Raises:
            WorldError: a rank failed; never retried.
        """
        assert self._process.stdin is not None
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._last_id += 1
        request = {"id": self._last_id, "world": world, "function": function, "kwargs": kwargs, "timeout_s": timeout_s}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.launches.append(Launch(function, world, answer["seconds"]))
        if not answer["ok"]:
            raise WorldError(function, answer["errors"])
        results: list[Any] = answer["results"]
        return results

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # An earlier run may have been interrupted while it waited (a test's time limit): its answer is passed over.
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if answer["id"] == self._last_id:
                return answer
        self._log.seek(0)
        raise RuntimeError(f"the DeepSpeed server died:\n{self._log.read()[-4000:]}")

    def close(self) -> None:
        """Ends the server; harmless when repeated."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
