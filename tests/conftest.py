"""What every run shows at its end: the tables that tests made."""

from __future__ import annotations

import pytest

from house.measured import said


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables, counts and seeds."""
    if lines := said():
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
