"""A runner that takes its time: after each finished unit it rests, so that a test can watch a small checkpoint move.

`PACE_S=0.2 python paced_runner.py`.
"""

from __future__ import annotations

import os
import sys
import time

from reshard_engine.execute.sinks.local import LocalJournal
from reshard_worker import runner


def main() -> int:
    pace_s, append = float(os.environ.get("PACE_S", "0.2")), LocalJournal.append

    def paced(self: LocalJournal, record: object) -> None:
        append(self, record)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        time.sleep(pace_s)

    LocalJournal.append = paced  # type: ignore[method-assign] # pyright: ignore[reportAttributeAccessIssue]
    return runner.main()


if __name__ == "__main__":
    sys.exit(main())
