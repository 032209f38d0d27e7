"""`make digests` tells what differs from the record, and part of the record is made here again."""

from __future__ import annotations

import json
from typing import Any

from laws.drawing import SOURCES, TARGETS
from laws.output_digests import RECORD, compared, of_laws

BEFORE = [
    ("a to zero", "s", "p", "l", "c"),
    ("b to zero", "s", "request.invalid", "", ""),
    ("c to dcp", "s", "p", "l", "c"),
]


def told(after: list[Any]) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return compared(BEFORE, after, lines.append), lines


def test_equal_digests_are_equal() -> None:
    equal, lines = told(list(BEFORE))
    assert equal
    assert lines[0] == "3 conversions compared, 1 of them refused: 0 differ"


def test_each_digest_that_differs_is_named() -> None:
    after = [("a to zero", "s", "p", "L", "c"), ("b to zero", "s", "p", "l", "c"), ("c to dcp", "S", "P", "L", "C")]
    equal, lines = told(after)
    assert not equal
    assert lines[0] == "a to zero: layout: p l c became p L c"
    assert lines[1].startswith("b to zero: plan, layout, content: ")
    assert lines[2:] == [
        "2 conversions compared, 1 of them refused: 2 differ",
        "1 have other sources, 0 of the record were not made here",
    ]


def test_conversions_that_were_not_made_are_counted() -> None:
    assert told(BEFORE[:1])[1][-1] == "0 have other sources, 2 of the record were not made here"


def test_the_record_is_that_of_this_checkout() -> None:
    """A sample: one source of each kind of file. `make digests` compares all."""
    before = [tuple(line) for line in json.loads(RECORD.read_text())]
    names = {line[0] for line in before}
    sample = [(s, t) for s in range(0, len(SOURCES), 5) for t in range(len(TARGETS))]
    after = [line for s, t in sample for line in of_laws(s, t)]
    assert after
    assert {line[0] for line in after} <= names
    lines: list[str] = []
    assert compared([line for line in before if line[0] in {a[0] for a in after}], after, lines.append), lines
