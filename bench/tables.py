"""Results as a Markdown table and as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLUMNS = {
    "case": "case",
    "name": "command",
    "wall_s": "wall s (median)",
    "times_ours": "time / ours",
    "peak_anonymous_mib": "anonymous MiB",
    "peak_file_backed_mib": "file-backed MiB",
    "read_mb": "read MB",
    "written_mb": "written MB",
}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One table."""
    lines = ["| " + " | ".join(_COLUMNS.values()) + " |", "|---|---|" + "---:|" * (len(_COLUMNS) - 2)]
    lines += ["| " + " | ".join(str(row[name]) for name in _COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def draw(facts: Mapping[str, Any], out: Path) -> None:
    """PNGs of memory and plans, where they were measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    if memory := facts.get("memory"):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for target in sorted({m["to"] for m in memory}):
            some = [m for m in memory if m["to"] == target]
            axes.plot([m["gigabytes"] for m in some], [m["peak_anonymous_mib"] for m in some], "o-", label=target)
        axes.set(xlabel="checkpoint, GB", ylabel="peak anonymous memory, MiB", ylim=(0, None))
        axes.legend()
        figure.savefig(out / "memory.png", dpi=110)
        plt.close(figure)
    if plans := facts.get("plans"):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for kind in sorted({p["kind"] for p in plans}):
            some = sorted((p for p in plans if p["kind"] == kind), key=lambda p: p["pieces"])
            axes.loglog([p["pieces"] for p in some], [p["wall_s"] for p in some], "o-", label=kind)
        axes.set(xlabel="pieces of the shard map", ylabel="reshard plan, s")
        axes.legend()
        figure.savefig(out / "plans.png", dpi=110)
        plt.close(figure)
