"""The order of the files of a run: longest first, those that wait beside those that compute."""

from __future__ import annotations

from itertools import zip_longest

import pytest

WAITING = ("acceptance", "browser", "contract", "distributed", "faults", "integration", "recipes")
"""Folders whose tests start servers and processes, and wait for them more than they compute."""
LONG_S = {
    "acceptance/test_shared_jobs.py": 150,
    "laws/test_laws.py": 150,
    "faults/test_every_step.py": 120,
    "contract/test_openapi.py": 115,
    "integration/test_database_outage.py": 115,
    "faults/test_shared_chaos.py": 100,
    "integration/test_life_of_data.py": 98,
    "recipes/test_training.py": 94,
    "integration/test_doorbell.py": 94,
    "packaging/test_tutorial.py": 93,
    "distributed/test_shared_checks.py": 91,
    "integration/test_alive.py": 159,
    "integration/test_drivers.py": 87,
    "integration/test_api.py": 87,
    "integration/test_traces.py": 83,
    "integration/test_engine_commit.py": 80,
    "acceptance/test_a_week.py": 70,
    "acceptance/test_demo.py": 45,
    "adversarial/fuzz/test_fuzz.py": 45,
    "integration/test_access.py": 45,
    "faults/test_random_kills.py": 40,
    "oracle/test_slim_real_files.py": 40,
    "browser/test_dashboard_in_browser.py": 40,
    "packaging/test_documents.py": 40,
    "planted/test_planted_bugs.py": 32,
}
"""Seconds of a run without a sample on two cores, of files that would be last in no order but this one."""
_OF_FOLDERS_S = {"integration": 30, "acceptance": 30, "distributed": 15, "faults": 15, "recipes": 25, "oracle": 18}
"""Of other files in these folders."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the files of a run, so that its processes end at the same time and share the processor.

    pytest-xdist hands files out in this order. The tests of a file stay in their order.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0].removeprefix("tests/"), []).append(item)
    by_length = sorted(files, key=lambda file: -LONG_S.get(file, _OF_FOLDERS_S.get(file.partition("/")[0], 0)))
    waiting = [file for file in by_length if file.startswith(WAITING)]
    busy = [file for file in by_length if not file.startswith(WAITING)]
    in_turn = [file for pair in zip_longest(waiting, busy) for file in pair if file is not None]
    items[:] = [item for file in in_turn for item in files[file]]
