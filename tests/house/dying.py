"""Commands whose process kills itself before one of its writing operations."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_PROGRAM = """
import os, signal, sys
count = int(sys.argv.pop(1))
def counted(function):
    def call(*args, **more):
        global count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)
    return call
{replaced}
from reshard.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def dying(replaced: str, operations: int, words: Sequence[str]) -> list[str]:
    """The arguments of a process that runs a command of reshard, and kills itself after so many operations.

    Args:
        replaced: Statements that put `counted(operation)` in the place of each operation that counts.
        operations: The number of operations that succeed.
        words: The command.
    """
    return [sys.executable, "-c", _PROGRAM.format(replaced=replaced), str(operations), *words]
