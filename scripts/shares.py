"""The long tests in twelve fixed shares, how long each test takes, and the record of the last run of each share.

`tests/shares.tsv` deals the tests: a line names a unit (a file, a function of a long file, or a case of a long
function), its share and its measured seconds. Share 0 is `quick`: each run of `make test` includes it. The record,
`tests/shares.json`, names the last run of each share. `make full` runs all shares, `make test` the quick one and the
next in line.

    python scripts/shares.py [-- ARGUMENTS OF PYTEST]    runs the shares that did not pass with these files
    python scripts/shares.py --table                     prints the record
    python scripts/shares.py --landed [COMMIT]           CI passed at this commit, and main has it now
    python scripts/shares.py --deal                      deals new tests into shares by their measured seconds

An interrupted run continues with the same command: a share that passed with the files of the working tree is not run
again. The exit status is 1 if a share failed, and 2 if a run of pytest ended early.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICK = 0
NUMBERS = tuple(range(1, 13))
"""The shares of the long tests."""
FULL = 13
"""The long forms of tests, marked `full`, whatever the table says of their units. `make full` runs them last."""
TABLE = ROOT / "tests" / "shares.tsv"
RECORD = ROOT / "tests" / "shares.json"
MEASURED = ROOT / "build" / "test_seconds.json"
"""The seconds of each test in the runs of this checkout; git ignores the file."""
QUICK_FOLDERS = ("house", "property", "unit")
"""Folders whose new files are quick until they are measured."""
UNKNOWN_S = 10.0
"""Seconds of a test in a folder without a measured test."""
OF_SHARES = "not gpu and not nightly"
"""The tests that belong to shares, as an expression for `pytest -m`."""

_NO_TESTS = 5
"""The exit status of pytest if no test is selected."""
_QUICK_S = 6.0
"""A file of tests that takes no longer runs in each run of `make test`."""
_UNIT_S = 300.0
"""A file that takes longer is dealt by its functions."""


@dataclass(frozen=True)
class Unit:
    """Tests that run in one share.

    Attributes:
        share: The share.
        seconds: The seconds of the tests in one process of several, set-up and tear-down included.
        measured: False if tests of the unit never ran in the checkout that dealt them, so that seconds are estimated.
    """

    share: int
    seconds: float
    measured: bool = True


class Shares:
    """The share of each test, and its seconds."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self._files: defaultdict[str, set[int]] = defaultdict(set)
        for name, unit in units.items():
            self._files[name.partition("::")[0]].add(unit.share)

    @classmethod
    def read(cls, table: Path = TABLE) -> Shares:
        """Read the table; without a file, every test is dealt by its name."""
        lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
        rows = [line.split("\t", 2) for line in lines if not line.startswith("#")]
        return cls({name: Unit(int(n), float(taken.lstrip("~")), taken[0] != "~") for n, taken, name in rows})

    def write(self, table: Path = TABLE) -> None:
        """Write the table, sorted by name, so that a diff shows what moved."""
        head = "# share (0: quick), seconds (~: estimated), unit; written by scripts/shares.py --deal"
        rows = [
            f"{unit.share}\t{'' if unit.measured else '~'}{unit.seconds:.1f}\t{name}"
            for name, unit in sorted(self.units.items())
        ]
        table.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")

    def unit_of(self, nodeid: str) -> str:
        """The unit that a test belongs to: the smallest one in the table, or its function or file if none is."""
        file, function, case = _names(nodeid)
        for name in (case, function, file):
            if name in self.units:
                return name
        return function if file in self._files else file

    def share_of(self, nodeid: str) -> int:
        """The share of a test. A new test has a share of its file, and a new file the share that its name draws."""
        name = self.unit_of(nodeid)
        return self.units[name].share if name in self.units else max(self.shares_of(name.partition("::")[0]))

    def shares_of(self, file: str) -> set[int]:
        """The shares of the tests of a file, whose path is that below tests/."""
        if file in self._files:
            return self._files[file]
        quick = file.partition("/")[0] in QUICK_FOLDERS
        return {QUICK if quick else zlib.crc32(file.encode()) % len(NUMBERS) + 1}

    def seconds_of(self, unit: str) -> float:
        """The measured seconds of a unit."""
        return self.units[unit].seconds if unit in self.units else UNKNOWN_S


def _names(nodeid: str) -> tuple[str, str, str]:
    """The file, the function and the case of a test, each with the path below tests/."""
    case = nodeid.removeprefix("tests/")
    return case.partition("::")[0], case.partition("[")[0], case


def deal(
    seconds: Mapping[str, float], before: Shares, *, quick_s: float, unit_s: float, estimated: Collection[str] = ()
) -> Shares:
    """Deal tests into shares of equal duration; tests that a unit of `before` covers keep its share.

    A new file is one unit unless it takes longer than `unit_s`; then each of its functions is a unit, and each case of
    a function that takes longer. Units of QUICK_FOLDERS up to `unit_s`, and of other files up to `quick_s`, are quick.
    The longest unit is dealt first, to the share with the fewest seconds.

    Args:
        seconds: The seconds of each test, measured or estimated.
        before: The table so far.
        quick_s: The most seconds of a quick file outside QUICK_FOLDERS.
        unit_s: The most seconds of a unit that could be divided.
        estimated: The tests whose seconds are estimated. They do not replace measured seconds of a unit.
    """
    new = _units({n: taken for n, taken in seconds.items() if before.unit_of(n) not in before.units}, before, unit_s)
    table = Shares({**before.units, **{name: Unit(QUICK, taken) for name, taken in new.items()}})
    guessed = {table.unit_of(nodeid) for nodeid in estimated}
    known: defaultdict[str, float] = defaultdict(float)
    for nodeid, taken in seconds.items():
        if (name := before.unit_of(nodeid)) in before.units:
            known[name] += taken
    units = dict(before.units)
    for name, taken in known.items():
        if name not in guessed or not units[name].measured:
            units[name] = Unit(units[name].share, round(taken, 1), name not in guessed)
    files: defaultdict[str, float] = defaultdict(float)
    for name, taken in new.items():
        files[name.partition("::")[0]] += taken
    totals = dict.fromkeys((QUICK, *NUMBERS), 0.0)
    for unit in units.values():
        totals[unit.share] += unit.seconds
    for name in sorted(new, key=lambda name: (-new[name], name)):
        file = name.partition("::")[0]
        small = files[file] <= quick_s or (file.partition("/")[0] in QUICK_FOLDERS and new[name] <= unit_s)
        share = QUICK if small else min(NUMBERS, key=lambda number: (totals[number], number))
        units[name] = Unit(share, round(new[name], 1), name not in guessed)
        totals[share] += new[name]
    return Shares(units)


def estimates(nodeids: Iterable[str], seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of tests that were not measured: the mean of their function, or else of their file or folder."""
    means: defaultdict[str, list[float]] = defaultdict(list)
    for nodeid, taken in seconds.items():
        for group in _groups(nodeid):
            means[group].append(taken)
    unmeasured = {nodeid: next((group for group in _groups(nodeid) if group in means), "") for nodeid in nodeids}
    return {
        nodeid: statistics.mean(means[group]) if group else UNKNOWN_S
        for nodeid, group in unmeasured.items()
        if nodeid not in seconds
    }


def _groups(nodeid: str) -> tuple[str, ...]:
    file, function, _ = _names(nodeid)
    return function, file, file.partition("/")[0]


def _units(seconds: Mapping[str, float], before: Shares, unit_s: float) -> dict[str, float]:
    files: defaultdict[str, float] = defaultdict(float)
    functions: defaultdict[str, float] = defaultdict(float)
    for nodeid, taken in seconds.items():
        file, function, _ = _names(nodeid)
        files[file] += taken
        functions[function] += taken
    units: defaultdict[str, float] = defaultdict(float)
    for nodeid, taken in seconds.items():
        file, function, case = _names(nodeid)
        whole = before.unit_of(nodeid) == file and files[file] <= unit_s
        units[file if whole else function if functions[function] <= unit_s else case] += taken
    return dict(units)


@dataclass(frozen=True)
class Selection:
    """The tests of a run: those of shares, and units that a change reaches.

    Attributes:
        shares: The shares, all their tests.
        units: Units of other shares.
        files: The files of tests that the change itself has: their tests that the table does not know run.
    """

    shares: frozenset[int]
    units: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()

    def takes(self, nodeid: str, table: Shares, *, full: bool = False) -> bool:
        """True if a test is selected; `full` is True for a test with that marker."""
        if full:
            return FULL in self.shares
        unit = table.unit_of(nodeid)
        new = unit not in table.units and unit.partition("::")[0] in self.files
        return new or unit in self.units or table.share_of(nodeid) in self.shares

    def takes_file(self, file: str, table: Shares) -> bool:
        """True if a file, named by its path below tests/, may have a selected test."""
        mine = FULL in self.shares or not table.shares_of(file).isdisjoint(self.shares)
        return mine or file in self.files or any(unit.partition("::")[0] == file for unit in self.units)


def reach(
    distances: Mapping[str, int], table: Shares, shares: Collection[int], budget_s: float
) -> tuple[list[str], dict[str, float]]:
    """The units to run of files that a change reaches, and the seconds by file of those that the budget leaves out.

    Units of the nearest files come first, the quickest unit of a file before its others. A unit that does not fit is
    left out, and later ones that fit are taken.

    Args:
        distances: The files by the number of imports between them and the change, named by their paths below tests/.
        table: The units and their seconds.
        shares: Shares that run anyway.
        budget_s: Seconds of all test processes together.
    """
    units = [name for name, unit in table.units.items() if unit.share not in shares]
    units += distances.keys() - {name.partition("::")[0] for name in table.units}
    candidates = [
        (distances[file], table.seconds_of(u), u) for u in units if (file := u.partition("::")[0]) in distances
    ]
    taken: list[str] = []
    left_out: defaultdict[str, float] = defaultdict(float)
    for _, seconds, unit in sorted(candidates):
        if seconds <= budget_s:
            budget_s -= seconds
            taken.append(unit)
        else:
            left_out[unit.partition("::")[0]] += seconds
    return taken, dict(left_out)


@dataclass(frozen=True)
class Run:
    """The last run of a share, and its last pass.

    Attributes:
        commit: The commit whose files were tested.
        at: When the run ended, in UTC.
        tests: The number of tests, skipped ones included; None where only the outcome is known.
        skipped: The number of skipped tests.
        failed: The tests that failed.
        seconds: The seconds of all test processes together.
        passed_commit: The commit of the last pass.
        passed_at: When the last pass ended, in UTC.
    """

    commit: str
    at: str
    tests: int | None = None
    skipped: int | None = None
    failed: tuple[str, ...] = ()
    seconds: float | None = None
    passed_commit: str | None = None
    passed_at: str | None = None


class Record:
    """The last run of each share, and the commit that landed last.

    Attributes:
        landed: The commit of main that a change is compared with; None in a repository that records none.
        runs: The last run by share.
    """

    def __init__(self, landed: str | None = None, runs: Mapping[int, Run] | None = None) -> None:
        self.landed = landed
        self.runs = dict(runs or {})

    @classmethod
    def read(cls, path: Path = RECORD, *, text: str | None = None) -> Record:
        """Read the record from a file or from its text; a missing file is a record without runs."""
        if text is None and not path.exists():
            return cls()
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8") if text is None else text)
        runs: dict[int, Run] = {}
        for share, run in stored["shares"].items():
            fields: dict[str, Any] = {**run, "failed": tuple(run["failed"])}
            runs[int(share)] = Run(**fields)
        return cls(stored["landed"], runs)

    def write(self, path: Path = RECORD) -> None:
        """Write the record as JSON, the shares in order."""
        shares = {str(share): asdict(run) for share, run in sorted(self.runs.items())}
        path.write_text(json.dumps({"landed": self.landed, "shares": shares}, indent=1) + "\n", encoding="utf-8")

    def passed(self, share: int, root: Path = ROOT) -> bool:
        """True if the last run of a share passed with the files of the working tree."""
        run = self.runs.get(share)
        return run is not None and not run.failed and same_tree(run.commit, root)

    def note(self, share: int, run: Run) -> None:
        """Record a run. A failed run keeps the last pass of its share."""
        before = self.runs.get(share)
        if not run.failed:
            run = replace(run, passed_commit=run.commit, passed_at=run.at)
        elif before is not None:
            run = replace(run, passed_commit=before.passed_commit, passed_at=before.passed_at)
        self.runs[share] = run

    def in_line(self, shares: Sequence[int] = NUMBERS) -> list[int]:
        """The shares in the order in which they run: failed ones, then those whose last pass is oldest."""

        def order(share: int) -> tuple[bool, str, int]:
            run = self.runs.get(share)
            return (not (run and run.failed), (run and run.passed_at) or "", share)

        return sorted(shares, key=order)

    def lines(self) -> list[str]:
        """The record as a table."""
        rows = ["share   result      tests  skipped  seconds  commit    date              last pass"]
        for share in (QUICK, *NUMBERS, FULL):
            name = share_name(share)
            if run := self.runs.get(share):
                result = f"{len(run.failed)} failed" if run.failed else "passed"
                passed = f"{run.passed_commit[:8]} {run.passed_at[:16]}" if run.passed_commit and run.passed_at else "-"
                counts = (run.tests, run.skipped, run.seconds and round(run.seconds))
                numbers = "  ".join(f"{'-' if count is None else count:>7}" for count in counts)
                rows.append(f"{name:7} {result:9} {numbers}  {run.commit[:8]}  {run.at[:16]}  {passed}")
                rows += [f"        failed: {nodeid}" for nodeid in run.failed]
            else:
                rows.append(f"{name:7} never ran")
        return rows


def share_name(share: int) -> str:
    """The name of a share on the command line."""
    return {QUICK: "quick", FULL: "full"}.get(share, str(share))


def shares_named(text: str, record: Record) -> frozenset[int]:
    """The shares of a comma-separated list: `quick`, `full`, numbers from 1 to 12, and `next`, the one next in line.

    Raises:
        ValueError: A name is none of these.
    """
    known = {"quick": QUICK, "full": FULL, "next": record.in_line()[0], **{str(number): number for number in NUMBERS}}
    if unknown := [name for name in text.split(",") if name not in known]:
        raise ValueError(f"no such share: {', '.join(unknown)}; there are {', '.join(known)}")
    return frozenset(known[name] for name in text.split(","))


def keep_seconds(seconds: Mapping[str, float], path: Path = MEASURED) -> None:
    """Add the seconds of tests to those of earlier runs, which `scripts/shares.py --deal` reads."""
    known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {nodeid: round(taken, 3) for nodeid, taken in seconds.items()}
    path.write_text(json.dumps(known | rounded, indent=0, sort_keys=True), encoding="utf-8")


def commit_of(root: Path = ROOT) -> str | None:
    """The commit of the working tree; None without git, or where a tracked file but the record differs from it."""
    head = _git(root, "rev-parse", "HEAD")
    if head.returncode:
        return None
    commit = head.stdout.strip()
    return commit if same_tree(commit, root) else None


def same_tree(commit: str, root: Path = ROOT) -> bool:
    """True if the tracked files are those of the commit, but for the record and the table of shares."""
    others = (f":(exclude){path.relative_to(ROOT).as_posix()}" for path in (RECORD, TABLE))
    return _git(root, "diff", "--quiet", commit, "--", ".", *others).returncode == 0


def _git(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False)


def run_all(arguments: list[str]) -> int:
    """Run the shares that did not pass with these files, in the order of the line."""
    if commit_of() is None:
        _say("Tracked files differ from the commit, so no run would be recorded: commit them first.")
        return 2
    dealt = {unit.share for unit in Shares.read().units.values()}
    for share in (QUICK, *(share for share in Record.read().in_line() if share in dealt), FULL):
        if Record.read().passed(share):
            _say(f"== share {share_name(share)} passed with these files")
            continue
        _say(f"== share {share_name(share)}")
        command = [sys.executable, "-m", "pytest", "--shares", share_name(share), *arguments]
        if (status := subprocess.run(command, cwd=ROOT, check=False).returncode) not in {0, 1, _NO_TESTS}:
            _say("The run ended early; the same command continues with this share.")
            return status
    _say(*Record.read().lines())
    return int(any(run.failed for run in Record.read().runs.values()))


def landed(commit: str) -> None:
    """Record that CI passed at a commit: the quick tests, and the share that was next in the record of that commit."""
    head, committed = _shown("show", "--no-patch", "--format=%H %cI", commit).split()
    at = datetime.fromisoformat(committed).astimezone(UTC).isoformat(timespec="seconds")
    before = Record.read(text=_shown("show", f"{head}:{RECORD.relative_to(ROOT).as_posix()}"))
    record = Record.read()
    record.landed = head
    for share in (QUICK, before.in_line()[0]):
        record.note(share, Run(head, at))
    record.write()


def deal_all() -> None:
    """Deal the tests that the table does not know, by the seconds of the tests that this checkout has run.

    Units of files that are gone leave the table.
    """
    listing = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    nodeids = [line for line in listed if line.startswith("tests/") and "::" in line]
    stored: dict[str, float] = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    measured = {nodeid: stored[nodeid] for nodeid in nodeids if nodeid in stored}
    guesses = estimates(nodeids, measured)
    files = {nodeid.removeprefix("tests/").partition("::")[0] for nodeid in nodeids}
    known = {name: unit for name, unit in Shares.read().units.items() if name.partition("::")[0] in files}
    table = deal(measured | guesses, Shares(known), quick_s=_QUICK_S, unit_s=_UNIT_S, estimated=guesses)
    table.write()
    for share in (QUICK, *NUMBERS):
        units = [unit for unit in table.units.values() if unit.share == share]
        seconds = sum(unit.seconds for unit in units)
        guessed = sum(unit.seconds for unit in units if not unit.measured)
        _say(f"{share_name(share):7} {len(units):4} units {seconds:6.0f} s, {guessed:6.0f} s of them estimated")


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _shown(*command: str) -> str:
    done = _git(ROOT, *command)
    if done.returncode:
        sys.exit(f"git {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    """Do what the options say; without options, run all shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the record")
    parser.add_argument("--landed", metavar="COMMIT", nargs="?", const="HEAD", help="record a commit that has landed")
    parser.add_argument("--deal", action="store_true", help="deal new tests into shares")
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    if options.landed:
        landed(options.landed)
    if options.deal:
        deal_all()
    if options.table or options.landed:
        _say(*Record.read().lines())
    elif not options.deal:
        sys.exit(run_all(options.arguments))


if __name__ == "__main__":
    main()
