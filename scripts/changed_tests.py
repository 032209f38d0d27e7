"""The files of tests that reach what was changed, nearest first: `make test-changed` runs them.

A file reaches a module that it imports, directly or through others, its conftest.py files included. Imports inside
functions count, and so do names of modules in strings (`python -m`, entry points, patched names), files of Python that
are named (scripts that tests start), and commands of `reshard` that tests type.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("client", "worker", "service", "tests", "bench", "scripts")
"""Folders that Python imports from."""
TESTS = "tests/"
_DOTTED = re.compile(r"[A-Za-z_][\w.]*")


class ImportGraph:
    """Which files of a repository name which others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {
            name: path.relative_to(root).as_posix()
            for base in ROOTS
            for path in sorted((root / base).rglob("*.py"))
            if (name := _module_name(path.relative_to(root / base)))
        }
        """The file of each module, relative to the repository."""
        self._by_file_name: defaultdict[str, set[str]] = defaultdict(set)
        for file in self.files.values():
            self._by_file_name[file.rpartition("/")[2]].add(file)

    @cached_property
    def users(self) -> Mapping[str, set[str]]:
        """The files that name a file."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for file in self.files.values():
            for used in self._used_by(file):
                found[used].add(file)
        return found

    def tests_of(self, changed: Iterable[str]) -> dict[str, int]:
        """Files of tests that reach a changed file, with the number of imports between them, nearest first."""
        far = dict.fromkeys(self._executed_with(changed), 0)
        edge = list(far)
        while edge:
            further = sorted({user for file in edge for user in self.users.get(file, ())} - far.keys())
            far |= dict.fromkeys(further, far[edge[0]] + 1)
            edge = further
        tests = [f for f in far if f.startswith(TESTS) and f.rpartition("/")[2].startswith("test_")]
        return {file: far[file] for file in sorted(tests, key=lambda file: (far[file], file))}

    def undecided(self, changed: Iterable[str]) -> list[str]:
        """The changed files that are no modules, so that imports do not tell which tests use them."""
        return sorted(set(changed) - set(self.files.values()))

    def _executed_with(self, changed: Iterable[str]) -> set[str]:
        """The changed files, and every file below a package whose `__init__` changed: its import runs that first."""
        known = set(self.files.values())
        found = known.intersection(changed)
        folders = tuple(file.removesuffix("__init__.py") for file in found if file.endswith("/__init__.py"))
        return found | {file for file in known if file.startswith(folders)} if folders else found

    def _used_by(self, file: str) -> set[str]:
        tree = ast.parse((self.root / file).read_text(encoding="utf-8"), file)
        names: set[str] = set()
        texts: set[str] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=aliases):
                    names.update(alias.name for alias in aliases)
                case ast.ImportFrom(module=str(module), names=aliases):
                    names.update(f"{module}.{alias.name}" for alias in aliases)
                case ast.Constant(value=str(text)):
                    texts.add(text)
                case _:
                    pass
        names |= self._modules_in(texts, of_tests=file.startswith(TESTS))
        found = {self.files[module] for name in names if (module := self._module_of(name))}
        if file.startswith(TESTS):
            found.update(*(self._by_file_name[text.rpartition("/")[2]] for text in texts if text.endswith(".py")))
            found |= self._conftests(file)
        return found - {file}

    def _modules_in(self, texts: set[str], *, of_tests: bool) -> set[str]:
        """Modules that strings name: `python -m`, patched names, entry points, and commands that tests type."""
        names = {name for text in texts if "." in (name := text.partition(":")[0]) and _DOTTED.fullmatch(name)}
        found = {name for name in names if "." in (self._module_of(name) or "")}
        groups, programs, commands = self._entry_points
        found.update(groups[text] for text in texts & groups.keys())
        if of_tests and (texts & programs.keys() or names & set(programs.values())):
            found.update((programs | commands)[text] for text in texts & (programs | commands).keys())
        return found

    def _module_of(self, name: str) -> str | None:
        """The module that a dotted name begins with."""
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name or None

    @cached_property
    def _entry_points(self) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        """The modules behind groups of one entry point, behind programs, and behind entry points of other groups.

        A program takes one of several by the name that a user types: its code reaches none of them.
        """
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        groups: dict[str, str] = {}
        commands: dict[str, str] = {}
        for group, points in project.get("entry-points", {}).items():
            modules = {name: point.partition(":")[0] for name, point in points.items()}
            if len(modules) == 1:
                groups[group] = next(iter(modules.values()))
            else:
                commands |= modules
        programs = {name: point.partition(":")[0] for name, point in project.get("scripts", {}).items()}
        return groups, programs, commands

    def _conftests(self, file: str) -> set[str]:
        """What pytest imports before a file of tests."""
        if not file.startswith(TESTS):
            return set()
        folders = [parent.as_posix() for parent in Path(file).parents][:-1]
        wanted = {f"{folder}/conftest.py" for folder in folders}
        return wanted & self._by_file_name["conftest.py"]


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def changed_files(root: Path, base: str) -> list[str]:
    """Files that differ from where this branch left the base, committed or not, untracked ones included."""
    since = _git(root, "merge-base", base, "HEAD")[0]
    lists = (("diff", "--name-only", since), ("ls-files", "--others", "--exclude-standard"))
    return sorted({file for command in lists for file in _git(root, *command)})


def _git(root: Path, *command: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def main() -> None:
    """Print the files of tests to stdout, and what was looked at to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="the branch or commit to compare with")
    parser.add_argument("--within", type=int, help="at most so many imports between test and change")
    options = parser.parse_args()
    changed = changed_files(REPOSITORY, options.base)
    graph = ImportGraph(REPOSITORY)
    tests = graph.tests_of(changed)
    near = [test for test, far in tests.items() if options.within is None or far <= options.within]
    undecided = graph.undecided(changed)
    sys.stderr.write(f"{len(changed)} files changed since {options.base}: {len(tests)} files of tests reach them")
    sys.stderr.write(f", {len(near)} of them within {options.within} imports\n" if options.within is not None else "\n")
    if undecided:
        sys.stderr.write("imports do not tell which tests use these (make full runs all):\n")
        sys.stderr.writelines(f"  {file}\n" for file in undecided)
    sys.stdout.writelines(f"{test}\n" for test in near)


if __name__ == "__main__":
    main()
