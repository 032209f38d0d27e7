"""Draws how long we take beside the peers, as SVG, from what a run of the benchmark has measured.

    python bench/plot.py bench/out/bench.json docs/images/benchmark.svg

Colours are those of Okabe and Ito, which colour-blind people tell apart. The picture has a background of its own, and
follows the reader's light or dark scheme.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import COPY, FULL, OURS, WRITE

KINDS = {
    "ours": "reshard, verified and synced",
    "peer": "DeepSpeed's own scripts, not synced",
    "copy": "cp -r of our result, synced",
}
_COLOURS = {"ours": "#0072b2", "peer": "#e69f00", "copy": "#8c8c8c"}
_TEXT, _FAINT, _GRID, _BACK = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
_SCHEME = {
    "ours": ("fill", _COLOURS["ours"], "#56b4e9"),
    "text": ("fill", _TEXT, "#e6edf3"),
    "faint": ("fill", _FAINT, "#9ba5b0"),
    "grid": ("stroke", _GRID, "#30363d"),
    "back": ("fill", _BACK, "#0d1117"),
}
"""What is drawn in another colour for readers whose scheme is dark."""
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
_LEAST_ROOM = 1.16
"""The axis is as much longer than the longest bar, whose number stands behind it."""


def kind_of(name: str) -> str | None:
    """The bar of a row of the results; None if it is left out."""
    if name in {FULL, WRITE}:
        return None
    return {OURS: "ours", COPY: "copy"}.get(name, "peer")


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Rows by case and kind, in the order of the run."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if kind := kind_of(row["name"]):
            found.setdefault(row["case"], {})[kind] = row
    return {case: by_kind for case, by_kind in found.items() if "ours" in by_kind and len(by_kind) > 1}


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 1 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def source_line(facts: Mapping[str, Any]) -> str:
    """The machine, date and versions that the numbers are from."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"Medians of {facts['rounds']} rounds in turn. {facts['cores']} cores, {facts['machine']}, {versions}. "
        f"{facts['date']}, load {facts['load']:.1f} before."
    )


def draw(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write the plot; without rows that can be compared, nothing."""
    import matplotlib as mpl

    shown = bars(rows)
    if not shown:
        return
    mpl.use("Agg")
    from matplotlib.figure import Figure

    settings = {"svg.fonttype": "none", "svg.hashsalt": "reshard", "font.size": 10, "font.family": "DejaVu Sans"}
    with mpl.rc_context(settings):
        count = sum(len(by_kind) for by_kind in shown.values())
        figure = Figure(figsize=(8.6, 1.5 + 0.21 * count + 0.2 * len(shown)), layout="constrained")
        _fill(figure, facts, shown)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Title": "Time to convert a checkpoint"})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_styled(text.getvalue()), encoding="utf-8")


def _fill(figure: Any, facts: Mapping[str, Any], shown: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    axes = figure.add_subplot()
    figure.patch.set_gid("background")
    figure.patch.set_facecolor(_BACK)
    axes.patch.set_visible(False)
    places, labels, top = [], [], 0.0
    for number, (case, by_kind) in enumerate(shown.items()):
        first = top
        for kind in (kind for kind in KINDS if kind in by_kind):
            row = by_kind[kind]
            patch = axes.barh(top, row["wall_s"], height=0.86, color=_COLOURS[kind])[0]
            patch.set_gid(f"bar-{number}-{kind}")
            # Of the medians that are drawn: the median of the ratios of single rounds differs a little.
            times = "" if kind == "ours" else f" · {_short(row['wall_s'] / by_kind['ours']['wall_s'])}×"
            axes.annotate(
                f"{_short(row['wall_s'])} s{times}",
                (row["wall_s"], top),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=_TEXT,
            )
            top += 1
        places.append((first + top - 1) / 2)
        labels.append(case.replace(" to ", "\nto ", 1))
        top += 0.9
    axes.set_yticks(places, labels)
    axes.set_ylim(top - 0.9 - 0.4, -0.6)
    axes.set_xlim(0, _LEAST_ROOM * max(row["wall_s"] for by_kind in shown.values() for row in by_kind.values()))
    _dress(figure, axes, facts)


def _dress(figure: Any, axes: Any, facts: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    axes.tick_params(length=0, colors=_TEXT)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("seconds, and as a multiple of ours; shorter is better", color=_TEXT)
    legend = figure.legend(
        handles=[Patch(facecolor=_COLOURS[kind], edgecolor="none", label=label) for kind, label in KINDS.items()],
        loc="outside upper left",
        title="Time to convert a DeepSpeed checkpoint",
        title_fontproperties={"size": 13, "weight": "bold"},
        alignment="left",
        borderaxespad=0.4,
        ncols=len(KINDS),
        frameon=False,
        fontsize=9,
        labelcolor=_TEXT,
        handlelength=1.0,
        handleheight=0.9,
    )
    legend.get_title().set_color(_TEXT)
    figure.supxlabel(source_line(facts), x=0.012, ha="left", fontsize=7.5, color=_FAINT)


def _styled(svg: str) -> str:
    """The picture with the fonts of the reader's system, and with a dark scheme."""
    dark = "".join(f".{name}{{{what}:{colour}!important}}" for name, (what, _, colour) in _SCHEME.items())
    style = f"text{{font-family:{_FONT}!important}}@media (prefers-color-scheme:dark){{{dark}}}"
    svg = svg.replace("</metadata>", f"</metadata>\n <style>{style}</style>", 1)
    for name, (what, colour, _) in _SCHEME.items():
        svg = re.sub(rf'(style="[^"]*\b{what}: {colour})', rf'class="{name}" \1', svg)
    return svg


def main() -> None:
    """Draw the plot of a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    draw(result, result["rows"], arguments.out)


if __name__ == "__main__":
    main()
