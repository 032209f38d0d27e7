"""Runs the oracle tier in this environment, which has the newest frameworks, and says what differs from the pinned one.

    .venv-newest/bin/python scripts/newest.py .venv torch transformers -- -n 2 --shares next

`make newest` makes both environments. What follows `--` goes to pytest. Each test that fails here runs once more with
the pinned versions: what fails there, too, is no matter of versions. The exit status is that of the tests here. Tables
are Markdown, and are appended to the file GITHUB_STEP_SUMMARY where GitHub names one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_TIER = "tests/oracle"
_INDEX = re.compile(r"^\S+ \(([^)]+)\)")


@dataclass(frozen=True)
class Outcome:
    """One run of pytest: its exit status, the number of tests by outcome, and the tests that failed."""

    status: int
    counts: dict[str, int]
    failed: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in self.counts.items() if number or name == "passed")


def pinned_versions(constraints: Path) -> dict[str, str]:
    """The versions of a file of pip's constraints, by the name in lower case."""
    lines = [line.partition("#")[0].strip() for line in constraints.read_text(encoding="utf-8").splitlines()]
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def newest_on_index(name: str) -> str | None:
    """The newest version that pip sees for this Python, whatever constraints say; None if it sees none."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--disable-pip-version-check"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = _INDEX.match(said)
    return found[1] if found else None


def versions(names: list[str]) -> list[str]:
    """A table of the versions: those of constraints.txt, those here, and what the index has beyond them."""
    pinned = pinned_versions(_ROOT / "constraints.txt")
    lines = ["| package | pinned | here | newest on the index |", "|---|---|---|---|"]
    for name in names:
        here, newest = importlib.metadata.version(name), newest_on_index(name)
        held = "" if newest in {None, here.partition("+")[0], here} else ": held back by a package or pip's constraints"
        lines.append(f"| {name} | {pinned.get(name.lower(), '-')} | {here} | {newest or 'not said'}{held} |")
    return lines


def run_tests(environment: Path, what: list[str], scratch: Path) -> Outcome:
    """Run the pytest of an environment; it says itself what fails, and why."""
    report, cache = scratch / "report.xml", scratch / "cache"
    programs = environment.absolute() / "bin"
    command = [str(programs / "python"), "-m", "pytest", *what, f"--junitxml={report}", "-o", f"cache_dir={cache}"]
    # Tests start programs of the environment by name, and look for torchtitan beside it.
    found = {"PATH": f"{programs}:{os.environ['PATH']}", "RESHARD_TORCHTITAN": str(programs.parent / "torchtitan")}
    status = subprocess.run(command, cwd=_ROOT, env=os.environ | found, check=False).returncode
    counts: dict[str, int] = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    if report.exists():
        for suite in ET.parse(report).getroot().iter("testsuite"):  # noqa: S314 - pytest wrote it a moment ago
            read = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
            counts["failed"] += read["failures"]
            counts["errors"] += read["errors"]
            counts["skipped"] += read["skipped"]
            counts["passed"] += read["tests"] - read["failures"] - read["errors"] - read["skipped"]
    kept = cache / "v" / "cache" / "lastfailed"
    failed = tuple(json.loads(kept.read_text(encoding="utf-8"))) if kept.exists() else ()
    return Outcome(status, counts, failed)


def differences(newest: Outcome, pinned: Outcome | None) -> list[str]:
    """What the tests say: counts, and each test that failed, with what it does under the pinned versions."""
    lines = [f"With the newest versions: {newest}."]
    if pinned is not None:
        lines += ["", "| fails with the newest | with the pinned versions |", "|---|---|"]
        lines += [f"| `{name}` | {'fails' if name in pinned.failed else 'passes'} |" for name in newest.failed]
    return lines


def _tell(lines: list[str]) -> None:
    text = "\n".join(lines) + "\n\n"
    sys.stdout.write(text)
    sys.stdout.flush()
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as kept:
            kept.write(text)


def main(arguments: list[str]) -> int:
    """Tell versions, run the tests, and run those that fail with the pinned versions."""
    given, options = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    beside, *names = given
    _tell(versions(names))
    with tempfile.TemporaryDirectory() as scratch:
        newest = run_tests(Path(sys.prefix), [_TIER, *options], Path(scratch) / "newest")
        pinned = None
        if newest.failed:
            sys.stdout.write(f"\n{len(newest.failed)} once more, with the pinned versions of {beside}\n")
            sys.stdout.flush()
            pinned = run_tests(Path(beside), list(newest.failed), Path(scratch) / "pinned")
    _tell(differences(newest, pinned))
    return newest.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
