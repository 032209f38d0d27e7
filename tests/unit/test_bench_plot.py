"""The plot of the benchmark says what was measured: each bar has the length of its time, and its numbers beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import plot
import pytest

from house.repository import ROOT

SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = ROOT / "docs" / "images" / "benchmark.json"
UNIVERSAL, RANKS = "ZeRO-2, 4 ranks, 1 GB to universal", "ZeRO-3, 4 ranks, 1 GB to 3 ranks"


def row(case: str, name: str, wall_s: float, times_ours: float) -> dict[str, Any]:
    return {"case": case, "name": name, "wall_s": wall_s, "times_ours": times_ours}


RESULT: dict[str, Any] = {
    "machine": "Linux 6.18",
    "cores": 2,
    "rounds": 3,
    "date": "2026-11-24",
    "load": 0.31,
    "versions": {"Reshard": "0.1.0", "DeepSpeed": "0.19.8"},
    "rows": [
        row(UNIVERSAL, "reshard", 1.5, 1.0),
        row(UNIVERSAL, "cp -r of our output, synced", 0.84, 0.6),
        row(UNIVERSAL, "as many bytes written from memory, synced", 0.9, 0.7),
        row(UNIVERSAL, "ds_to_universal", 6.0, 4.1),
        row(UNIVERSAL, "reshard --verify full", 3.0, 2.4),
        row(RANKS, "reshard", 2.0, 1.0),
        row(RANKS, "cp -r of our output, synced", 3.0, 1.6),
        row("nothing to compare with", "reshard", 9.0, 1.0),
    ],
}


def lengths(svg: Path) -> dict[str, float]:
    """The width of each bar in the picture, by its id."""
    found: dict[str, float] = {}
    for group in ET.parse(svg).iter(f"{SVG}g"):
        if group.get("id", "").startswith("bar-"):
            (path,) = group.iter(f"{SVG}path")
            across = [float(x) for x, _ in re.findall(r"([\d.]+) ([\d.]+)", path.get("d", ""))]
            found[group.get("id", "")] = max(across) - min(across)
    return found


def words(svg: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ET.parse(svg).iter(f"{SVG}text")]


def assert_true(result: dict[str, Any], svg: Path) -> None:
    """Every bar is as long as its time, on one scale from nothing."""
    drawn = lengths(svg)
    expected = {
        f"bar-{number}-{kind}": row["wall_s"]
        for number, by_kind in enumerate(plot.bars(result["rows"]).values())
        for kind, row in by_kind.items()
    }
    assert drawn.keys() == expected.keys()
    longest = max(expected, key=lambda name: expected[name])
    scale = drawn[longest] / expected[longest]
    assert drawn == pytest.approx({name: seconds * scale for name, seconds in expected.items()}, rel=1e-3)


def test_each_bar_is_as_long_as_its_time(tmp_path: Path) -> None:
    plot.draw(RESULT, RESULT["rows"], tmp_path / "plot.svg")
    assert_true(RESULT, tmp_path / "plot.svg")
    drawn = lengths(tmp_path / "plot.svg")
    assert sorted(drawn) == ["bar-0-copy", "bar-0-ours", "bar-0-peer", "bar-1-copy", "bar-1-ours"]
    assert drawn["bar-0-peer"] == pytest.approx(4 * drawn["bar-0-ours"], rel=1e-3)


def test_numbers_units_title_and_source_are_text(tmp_path: Path) -> None:
    plot.draw(RESULT, RESULT["rows"], tmp_path / "plot.svg")
    said = words(tmp_path / "plot.svg")
    assert {
        "1.5 s",
        "6.0 s · 4.0×",
        "2.0 s",
        "3.0 s · 1.5×",
        "0.84 s · 0.56×",
        "Time to convert a DeepSpeed checkpoint",
    } <= set(said)
    assert any(text.startswith("seconds") for text in said)
    (source,) = [text for text in said if "rounds" in text]
    assert all(part in source for part in ("2 cores, Linux 6.18", "DeepSpeed 0.19.8", "2026-11-24", "load 0.3"))


def test_the_same_numbers_make_the_same_file(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot.draw(RESULT, RESULT["rows"], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_dark_scheme_changes_text_and_background(tmp_path: Path) -> None:
    plot.draw(RESULT, RESULT["rows"], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme:dark)" in text
    for name in ("ours", "text", "faint", "grid", "back"):
        assert f'class="{name}"' in text, name
        assert f".{name}{{" in text, name
    # Text of no class would be dark on dark.
    assert not [t for t in ET.parse(tmp_path / "plot.svg").iter(f"{SVG}text") if not t.get("class")]


def test_a_run_without_peers_draws_nothing(tmp_path: Path) -> None:
    plot.draw(RESULT, RESULT["rows"][-1:], tmp_path / "plot.svg")
    assert not (tmp_path / "plot.svg").exists()


def test_the_plot_in_the_documents_is_that_of_its_numbers() -> None:
    assert_true(json.loads(COMMITTED.read_text()), COMMITTED.with_suffix(".svg"))
