"""First lines of docstrings are plain statements: they name their subject and do not begin with a relative clause."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.repository import ROOT

BANNED = re.compile(r"(What|Whether|Of|How|Where|Why|Which|Who|When|The same)\b")
"""A predicate is `True if ...`, a value is a noun phrase, a function says what it does."""
SOURCES = ("client", "service", "worker")


def banned_lines(text: str) -> Iterator[tuple[int, str]]:
    """The line number and the first line of each docstring that begins with a banned word."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and BANNED.match(docstring):
                yield node.body[0].lineno, docstring.splitlines()[0]


def found() -> Iterator[str]:
    """The banned first lines of the product, with their places."""
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            for number, line in banned_lines(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(ROOT).as_posix()}:{number}: {line}"


def test_first_lines_are_plain_statements() -> None:
    assert not (lines := list(found())), "\n".join(lines)


@pytest.mark.parametrize("first", ["What it does.", "Whether it is.", "Of the file.", "The same again.", "How many."])
def test_a_banned_word_is_found(first: str) -> None:
    text = f'"""A module."""\n\n\nasync def function():\n    """{first}\n\n    More.\n    """\n'
    assert list(banned_lines(text)) == [(5, first)]


@pytest.mark.parametrize("first", ["Whatever it is, it is kept.", "Offsets of records.", "True if it is.", "Howl."])
def test_other_words_are_not(first: str) -> None:
    assert not list(banned_lines(f'class Thing:\n    """{first}"""\n'))


def test_sources_are_there() -> None:
    assert all(Path(ROOT / source).is_dir() for source in SOURCES)
