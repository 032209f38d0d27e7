"""The throughput of a job over time, from its event log, as the points of a drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from reshard.models import JobEvent

WIDTH, HEIGHT = 720, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 12, 28
_MOST_STEPS = 90
_LEAST_STEP_S = 0.5


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of bytes per second over time; places are in its own units."""

    curve: str
    area: str
    marks: tuple[tuple[float, float], ...]
    """(place from the top, bytes per second) of the horizontal lines."""
    times: tuple[tuple[float, float], ...]
    """(place from the left, seconds) of the labels below."""
    seconds: float
    mean: float
    most: float
    steps: tuple[tuple[float, float], ...]
    """(seconds since the start, bytes per second): the drawing as numbers."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM


def chart_of(events: Sequence[JobEvent]) -> Chart | None:
    """The chart of a job; None while there is nothing to draw."""
    gained = _gains(events)
    if not gained:
        return None
    begin, end = gained[0][0], gained[-1][1]
    seconds = end - begin
    step = max(_LEAST_STEP_S, seconds / _MOST_STEPS)
    count = max(1, math.ceil(seconds / step - 1e-9))
    sums = [0.0] * count
    for since, until, size in gained:
        _spread(sums, (since - begin) / step, (until - begin) / step, size)
    lengths = [min(step, seconds - at * step) for at in range(count)]
    rates = [size / length if length > 0 else 0.0 for size, length in zip(sums, lengths, strict=True)]
    most = max(rates)
    top = _round_up(most)
    if top <= 0:
        return None
    across, down = (WIDTH - _LEFT - _RIGHT) / seconds, (HEIGHT - _TOP - _BOTTOM) / top
    floor = HEIGHT - _BOTTOM
    path = [f"M{_LEFT:.1f} {floor - rates[0] * down:.1f}"]
    for at, rate in enumerate(rates):
        right = _LEFT + min(seconds, (at + 1) * step) * across
        path.append(f"V{floor - rate * down:.1f}H{right:.1f}")
    curve = "".join(path)
    return Chart(
        curve=curve,
        area=f"{curve}V{floor}H{_LEFT}Z",
        marks=tuple((floor - top * part * down, top * part) for part in (0.0, 0.5, 1.0)),
        times=tuple((_LEFT + seconds * part * across, seconds * part) for part in (0.0, 0.5, 1.0)),
        seconds=seconds,
        mean=sum(sums) / seconds,
        most=most,
        steps=tuple((at * step, rate) for at, rate in enumerate(rates)),
    )


def _gains(events: Sequence[JobEvent]) -> list[tuple[float, float, int]]:
    """(from, until, bytes) between entries of progress. An attempt that begins again has gained none."""
    told = [
        (e.at.timestamp(), e.progress.bytes_done) for e in events if e.progress is not None and e.progress.bytes_total
    ]
    return [
        (since, until, max(0, after - before)) for (since, before), (until, after) in pairwise(told) if until > since
    ]


def _spread(sums: list[float], since: float, until: float, size: float) -> None:
    """Add bytes to the steps in whose time they were written."""
    length = until - since
    for at in range(int(since), min(len(sums), math.ceil(until))):
        overlap = min(until, at + 1) - max(since, at)
        if overlap > 0:
            sums[at] += size * overlap / length


def _round_up(rate: float) -> float:
    """The next round number of bytes, KiB, MiB or GiB: a scale that reads well."""
    unit = 1
    while unit * 1024 <= rate:
        unit *= 1024
    for part in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1024):
        if rate <= part * unit:
            return float(part * unit)
    return rate
