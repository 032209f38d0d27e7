"""Shows how the product is cut into modules, and fails if imports form a circle. `make structure`; CI runs it."""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOTS = ("client", "worker", "service")


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    path: Path
    lines: int
    imports: frozenset[str]
    """Modules of the product that it imports anywhere, also in functions and for types alone."""
    lazy: int
    """Import statements inside functions."""

    @property
    def package(self) -> str:
        """The package that it is in."""
        return self.name.rpartition(".")[0]

    @property
    def is_init(self) -> bool:
        """True for the `__init__` of a package."""
        return self.path.name == "__init__.py"


def modules(tree: Path) -> dict[str, Module]:
    """Every module of the product below `tree`, by its name."""
    files: dict[str, Path] = {}
    for root in ROOTS:
        for path in sorted((tree / root).rglob("*.py")):
            name = ".".join(path.relative_to(tree / root).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    return {name: _module(name, path, files) for name, path in files.items()}


def _module(name: str, path: Path, files: dict[str, Path]) -> Module:
    text = path.read_text()
    parsed = ast.parse(text)
    imported = {found for node in ast.walk(parsed) for found in _imported(node, files)} - {name}
    lazy = {
        id(node)
        for function in ast.walk(parsed)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return Module(name, path, text.count("\n"), frozenset(imported), len(lazy))


def _imported(node: ast.AST, files: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in files:
                yield inner
            elif node.module in files:
                yield node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in files)


def circles(found: dict[str, Module], root: str) -> list[list[str]]:
    """Sets of modules below `root` that import one another, directly or not. Lazy imports and those for types count."""
    edges = {
        n: [i for i in m.imports if i.partition(".")[0] == root]
        for n, m in found.items()
        if n.partition(".")[0] == root
    }
    reach = {name: _reachable(name, edges) for name in edges}
    left, out = set(edges), list[list[str]]()
    while left:
        name = left.pop()
        circle = {other for other in left if other in reach[name] and name in reach[other]}
        left -= circle
        if circle:
            out.append(sorted({name, *circle}))
    return out


def _reachable(name: str, edges: dict[str, list[str]]) -> set[str]:
    seen, todo = set[str](), [name]
    while todo:
        for following in edges.get(todo.pop(), ()):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def numbers(tree: Path) -> dict[str, int]:
    """The numbers that this page is about; packages' `__init__` files count only for folders and lines."""
    found = modules(tree)
    importers = defaultdict[str, set[Module]](set)
    for module in found.values():
        for imported in module.imports:
            importers[imported].add(module)
    real = [m for m in found.values() if not m.is_init]
    alone = [m for m in real if len(importers[m.name]) == 1 and next(iter(importers[m.name])).package == m.package]
    folders = Counter(m.path.parent for m in found.values())
    cli = [
        m
        for m in found.values()
        if not m.name.startswith("reshard.cli") and any(i.startswith("reshard.cli") for i in m.imports)
    ]
    return {
        "modules": len(real),
        "modules with one importer, in the same package": len(alone),
        "files in the largest folder": max(folders.values()),
        "median lines of a module": int(statistics.median(m.lines for m in real)),
        "lines of the longest module": max(m.lines for m in real),
        "modules below 60 lines": sum(m.lines < 60 for m in real),
        "lines of the product": sum(m.lines for m in found.values()),
        "lines of tests": sum(p.read_text().count("\n") for p in (tree / "tests").rglob("*.py")),
        "modules of dcp's reader and metadata": _below(
            real, "reshard_engine.formats.dcp.reader", "reshard_engine.formats.dcp_files.metadata"
        ),
        "modules outside reshard.cli that import it": len(cli),
        "imports inside functions": sum(m.lazy for m in found.values()),
        "modules of the client in circles": sum(len(c) for c in circles(found, "reshard")),
        "modules of the engine in circles": sum(len(c) for c in circles(found, "reshard_engine")),
    }


def _below(found: list[Module], *packages: str) -> int:
    return sum(any(m.name.startswith(f"{p}.") for p in packages) for m in found)


AT_MOST = {
    "modules outside reshard.cli that import it": 0,
    "modules of the client in circles": 0,
    "modules of the engine in circles": 0,
}
"""Facts that hold for every module. The other numbers are shown and not bounded: a concept gets the modules that it
needs, and a bound that is raised with each of them decides nothing."""


def main() -> int:
    """Prints the numbers of this tree, beside those of another one if it is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, whose numbers are printed first")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    chosen = parser.parse_args()
    now = numbers(chosen.tree)
    before = numbers(chosen.before) if chosen.before else {}
    broken = 0
    for what, number in now.items():
        bound = AT_MOST.get(what)
        bad = bound is not None and number > bound
        broken += bad
        said = "" if bound is None else f"  (at most {bound:,}{': BROKEN' if bad else ''})"
        sys.stdout.write(f"{what:50} {f'{before[what]:>8,} → ' if before else ''}{number:>8,}{said}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
