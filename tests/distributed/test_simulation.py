"""The protocol of many workers under faults that a seed draws: kills, pauses past the lease, skewed clocks, errors.

The invariants are checked after each step (`simulation.World.check`, `write`); here is what must hold at the end.
"""

from __future__ import annotations

from collections import Counter

import pytest

from distributed.simulation import World, simulate
from house.measured import say

SEEDS, CHUNKS = 500, 2
LONG_SEEDS = 20_000


def judge(world: World) -> None:
    """What holds when all workers have ended."""
    results = set(world.results.values())
    if world.disagrees:
        assert world.target is None
        assert not world.claimed, "something was written before all was compared"
        assert results <= {"killed", "storage.unavailable", "checkpoint.disagreement"}
        return
    assert "done" not in results or world.target is not None, "a worker says that it is done, and nothing is committed"
    if world.target is None:
        assert results <= {"killed", "storage.unavailable", "storage.protocol", "storage.conflict"}
        return
    for file, parts in world.target.items():
        assert sorted(parts) == sorted(u for u, of in world.file_of.items() if of == file)
        assert all(etag.startswith(f"{unit}-") for unit, etag in parts.items())
    if world.scheduler.dead:
        return  # `reshard clean` removes what a killed worker wrote after the commit
    assert not world.texts, f"left behind: {sorted(world.texts)}"
    assert all(u.state != "open" for u in world.uploads.values()), "an upload is left behind"


def run(seeds: range) -> Counter[str]:
    """Simulate, judge and count."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = simulate(seed)
            judge(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts += Counter(world.results.values())
        counts["committed"] += world.target is not None
        counts["checks"] += len(world.made)
        for one in world.counters:
            counts["runs"] += one.runs
            counts["takeovers"] += one.takeovers
            counts["splits"] += one.splits
            counts["sessions lost"] += one.epochs_lost
    return counts


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_conversions_end_whole_whatever_happens_to_their_workers(chunk: int) -> None:
    size = SEEDS // CHUNKS
    counts = run(range(chunk * size, (chunk + 1) * size))
    say(f"simulated conversions of 4 workers, seeds {chunk * size} to {(chunk + 1) * size - 1}: {dict(counts)}")
    assert counts["committed"] > 0.9 * size
    assert min(counts[what] for what in ("takeovers", "splits", "sessions lost", "killed")) > 0, "too little happened"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_conversions_end_whole_in_many_more_simulations() -> None:
    counts = run(range(SEEDS, SEEDS + LONG_SEEDS))
    say(f"simulated conversions of 4 workers, {LONG_SEEDS} seeds: {dict(counts)}, bound {3 / LONG_SEEDS:.5f}")


def test_undisturbed_workers_send_no_part_twice_and_make_no_check_twice() -> None:
    for seed in range(100):
        world = simulate(seed, chaos=False)
        judge(world)
        if world.disagrees:
            assert set(world.results.values()) == {"checkpoint.disagreement"}
            assert not world.texts, f"left behind: {sorted(world.texts)}"
            continue
        assert set(world.results.values()) == {"done"}
        assert world.committed_by[1:] == []
        assert {unit: len(by) for unit, by in world.sent.items()} == {u.index: 1 for u in world.units}
        checks = [(1, i.wave, i.index) for waves in world.checks.values() for items in waves.units for i in items]
        assert {check: len(by) for check, by in world.made.items()} == dict.fromkeys(checks, 1)
