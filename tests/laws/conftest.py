"""Fixtures of the laws, and the table of what they drew."""

from __future__ import annotations

import pytest

from laws.profiles import CENSUS_LINES
from oracle.fixtures import oracle, trained, worlds
from servers.fixtures import s3, server_directory

__all__ = ["oracle", "s3", "server_directory", "trained", "worlds"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How often each item of the zoo was drawn."""
    lines = terminalreporter.config.stash.get(CENSUS_LINES, [])
    if lines:
        terminalreporter.section("the zoo of the laws", sep="-")
        for line in lines:
            terminalreporter.write_line(line)
