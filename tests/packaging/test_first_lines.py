"""The first line of each docstring is a whole statement: it ends with a period. How it reads is in CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from house.repository import ROOT

SOURCES = ("client", "service", "worker")


def unfinished_lines(text: str) -> Iterator[tuple[int, str]]:
    """The line number and the first line of each docstring whose first line does not end with a period."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and not docstring.splitlines()[0].endswith("."):
                yield node.body[0].lineno, docstring.splitlines()[0]


def test_first_lines_are_whole_statements() -> None:
    files = [path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))]
    assert len(files) > 100
    wrong = [(str(p), *line) for p in files for line in unfinished_lines(p.read_text(encoding="utf-8"))]
    assert wrong == []


@pytest.mark.parametrize(("first", "wrong"), [("Offsets of records", True), ("Offsets of records.", False)])
def test_an_unfinished_line_is_found(first: str, wrong: bool) -> None:
    text = f'"""A module."""\n\n\nasync def function():\n    """{first}\n\n    More.\n    """\n'
    assert list(unfinished_lines(text)) == ([(5, first)] if wrong else [])
