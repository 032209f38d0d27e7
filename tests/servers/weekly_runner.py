"""A runner that fails some jobs when the first of their units is to be recorded: what they leave is really there.

The name of the target, an S3 URL, says which: `fails` until a file of that name is in the directory `HEALED`, and
`dies` once, by SIGKILL, as if the host had run out of memory.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from reshard.errors import StorageError
from reshard_engine.storage.locations import service_store, serving
from reshard_engine.testing.stores import FaultyStore, Steps
from reshard_worker import runner

_T = TypeVar("_T")
_DOOMED = re.compile("/\\.(?P<name>job[0-9]+-(?P<how>fails|dies))\\.reshard-[^/]*/unit-")


class DoomedRecords(Steps):
    """Fails before the record of a unit of a job that is to fail."""

    def step(self, name: str, path: str, effect: Callable[[], _T], short: Callable[[], _T] | None = None) -> _T:
        found = _DOOMED.search(path) if name == "put" else None
        if found is not None:
            healed = Path(os.environ["HEALED"], found["name"])
            if not healed.exists():
                if found["how"] == "dies":
                    healed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                raise StorageError("storage.protocol", "injected")
        return super().step(name, path, effect, short)


def main() -> int:
    steps = DoomedRecords()

    with serving("s3", FaultyStore(service_store("s3").of_profile(None), steps)):
        return runner.main()


if __name__ == "__main__":
    sys.exit(main())
