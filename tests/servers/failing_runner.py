"""A runner whose storage fails after a number of finished units: what a permanent failure leaves is really there.

`FAIL_AFTER_UNITS=3 FAIL_WITH=storage.protocol python failing_runner.py`. A source whose URL has none of the words in
`FAIL_SOURCES` is converted without a fault, and so is everything when `FAIL_UNLESS` names a file that exists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from reshard.errors import RequestError, StorageError
from reshard_engine.execute.sinks.local import LocalJournal
from reshard_engine.storage.locations import WRITABLE, service_store, serving
from reshard_engine.testing.stores import FaultyStore, Steps
from reshard_worker import runner

_T = TypeVar("_T")


class FailingRecords(Steps):
    """Lets so many records of units be written, and no more."""

    def step(self, name: str, path: str, effect: Callable[[], _T], short: Callable[[], _T] | None = None) -> _T:
        if name == "put" and "/unit-" in path:
            count_or_fail()
        return super().step(name, path, effect, short)


_left = [int(os.environ.get("FAIL_AFTER_UNITS", "0"))]


def count_or_fail() -> None:
    if Path(os.environ.get("FAIL_UNLESS", "/nowhere")).exists():
        return
    if _left[0] <= 0:
        raise StorageError(os.environ["FAIL_WITH"], "injected")
    _left[0] -= 1


def main() -> int:
    steps = FailingRecords()

    append = LocalJournal.append

    def counted(self: LocalJournal, record: object) -> None:
        count_or_fail()
        append(self, record)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    LocalJournal.append = counted  # type: ignore[method-assign] # pyright: ignore[reportAttributeAccessIssue]
    with ExitStack() as served:
        for scheme in WRITABLE:
            with suppress(RequestError):  # what it needs is not installed
                served.enter_context(serving(scheme, FaultyStore(service_store(scheme).of_profile(None), steps)))
        return runner.main()


if __name__ == "__main__":
    sys.exit(main())
