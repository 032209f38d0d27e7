"""Claims: one process owns one, and it ends with its owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from house.expected import some
from reshard.ensuring import election as _election
from reshard.ensuring.election import Election
from reshard.shared_work import Lease, process_ended, process_name

ELSEWHERE = "0123456789-1-0123456789ab"
"""The name of a process of another host."""


def name_of_an_ended_process() -> str:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    scope, _, nonce = process_name().split("-")
    return f"{scope}-{ended.pid}-{nonce}"


@contextmanager
def held(path: Path) -> Iterator[None]:
    claim = some(Election(str(path)).claim())
    with claim:
        yield


def test_a_claim_is_one_processs_and_ends_with_it(tmp_path: Path) -> None:
    path = str(tmp_path / "claim")
    first, second = Election(path), Election(path)
    claim = some(first.claim())
    with claim:
        assert [second.claim(), second.claim(), first.claim()] == [None, None, None]
    assert not os.path.exists(path)
    again = some(second.claim())
    with again:
        pass


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"where": "another-host pid:[1]", "pid": 1, "nonce": "x"}),
        ELSEWHERE,
        None,
        "",
        "{",
        "[]",
        json.dumps({"where": 3, "pid": []}),
    ],
)
def test_a_claim_that_nobody_touches_is_taken_over(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "claim"
    # A name that is not whole is still being written, and may go on with another process id.
    path.write_text(name_of_an_ended_process()[:-1] if content is None else content)
    election = Election(str(path), stale_s=0.2)
    began = time.monotonic()
    while (claim := election.claim()) is None:
        time.sleep(0.02)
    assert time.monotonic() - began >= 0.2
    with claim:
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_is_touched_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_election, "BEAT_S", 0.05)
    path = tmp_path / "claim"
    watcher = Election(str(path), stale_s=0.5)
    with held(path):
        text = path.read_text()
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            assert watcher.claim() is None
            time.sleep(0.02)
        assert path.read_text() == text


def test_a_claim_of_this_host_is_freed_at_once_when_its_process_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    path.write_text(name_of_an_ended_process())
    election = Election(str(path))
    assert election.claim() is None
    claim = some(election.claim())
    with claim:
        pass


def test_one_of_many_takes_a_stale_claim_over(tmp_path: Path) -> None:
    owners, most, lock = [0], [0], threading.Lock()

    def compete(election: Election) -> None:
        while (claim := election.claim()) is None:
            time.sleep(0.005)
        with claim:
            with lock:
                owners[0] += 1
                most[0] = max(most[0], owners[0])
            time.sleep(0.02)
            with lock:
                owners[0] -= 1

    for attempt in range(4):
        path = tmp_path / f"claim-{attempt}"
        path.write_text("another host's")
        # An owner that does not run for so long has lost its claim: a busy machine keeps threads waiting 0.1 s.
        threads = [threading.Thread(target=compete, args=(Election(str(path), stale_s=0.8),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
    assert most == [1]


def test_a_takeover_that_was_killed_half_way_blocks_nobody(tmp_path: Path) -> None:
    path, takeover = tmp_path / "claim", tmp_path / "claim.takeover"
    for owner in (name_of_an_ended_process(), ELSEWHERE):
        path.write_text("another host's")
        takeover.write_text(owner)
        election, began = Election(str(path), stale_s=0.3), time.monotonic()
        while (claim := election.claim()) is None:
            assert time.monotonic() - began < 60
            time.sleep(0.02)
        with claim:
            assert not takeover.exists()
        assert list(tmp_path.iterdir()) == []


def test_a_process_that_saw_a_stale_claim_leaves_the_claim_that_followed_it(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    path.write_text("another host's")
    slow, fast = Election(str(path), stale_s=0.1), Election(str(path), stale_s=0.1)
    seen = some(_election._read(str(path)))
    while (claim := fast.claim()) is None:
        time.sleep(0.02)
    with claim:
        text = path.read_text()
        slow._remove(seen)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == []


def test_only_whole_names_of_this_host_tell_that_a_process_has_ended() -> None:
    mine = process_name()
    scope, pid, nonce = mine.split("-")
    assert mine != process_name()
    assert int(pid) == os.getpid()
    assert not process_ended(mine)
    ended = name_of_an_ended_process()
    assert process_ended(ended)
    assert process_ended(f"{scope}-{10**12}-{nonce}"), "no process has such an id"
    assert not any(map(process_ended, (ended[:-1], f"{ended}0", f"x{ended[1:]}", ELSEWHERE, f"{scope}-1-{nonce}", "")))


def test_a_lease_is_over_when_nothing_has_changed_for_its_length() -> None:
    now = [0.0]
    lease = Lease(10.0, lambda: now[0])
    now[0] = 9.0
    lease.saw("first")
    now[0] = 19.0
    lease.saw("first")
    assert not lease.is_over
    now[0] = 19.5
    assert lease.is_over
    lease.saw("second")
    assert not lease.is_over
