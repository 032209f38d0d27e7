"""Room on the disk: compared with the plan before the first byte, and what is said when it ends all the same."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.promises import command
from house.saves import DATA
from reshard.errors import ExitCode, StorageError
from reshard_engine.execute.sinks import free_space
from reshard_engine.execute.sinks.free_space import Room, require_room, room_at
from reshard_engine.storage.local import translated

SOURCE = str(DATA / "zero2_tiny")
MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, which only root may mount."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False, timeout=20
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=20)


def test_a_target_that_does_not_fit_is_refused_before_anything_is_written(small_disk: Path) -> None:
    target = small_disk / "not" / "yet" / "universal"
    code, _, said = command("convert", SOURCE, str(target), "--to", "universal", "-q")
    assert code == ExitCode.REFUSED
    assert "storage.no_room" in said
    assert "64 KiB are free" in said
    assert "fix: free " in said
    assert list(small_disk.iterdir()) == []


def test_an_old_target_stays_until_the_new_one_is_whole(small_disk: Path) -> None:
    target = small_disk / "weights"
    words = ("convert", SOURCE, str(target), "--to", "safetensors", "--dtype", "bf16", "-q")
    assert command(*words)[0] == 0
    (small_disk / "filler").write_bytes(bytes(room_at(str(small_disk)).free_bytes - 4096))  # type: ignore[union-attr]
    code, _, said = command(*words[:-1], "--exclude-frozen", "--overwrite", "-q")
    assert code == ExitCode.REFUSED
    assert "remove it first" in said
    assert command("verify", str(target))[0] == 0


def test_a_disk_that_fills_up_later_keeps_what_is_written(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(small_disk / "universal")
    monkeypatch.setattr(free_space, "room_at", lambda _path: None)  # as where the system does not say
    code, _, said = command("convert", SOURCE, target, "--to", "universal", "-q")
    assert code == ExitCode.REFUSED
    assert "storage.no_space" in said
    assert "is kept" in said
    assert "fix: free space there" in said
    assert [name for name in os.listdir(small_disk) if name.endswith(".journal")]
    code, told, _ = command("clean", target)
    assert code == 0
    assert "removed: staging" in told
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_fix_and_retryable_agree(number: int) -> None:
    """Nothing passes by itself: a loop that tries again waits for ever."""
    with pytest.raises(StorageError) as caught, translated("/a"):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == "storage.no_space"
    assert not caught.value.retryable
    assert caught.value.fix.startswith("free space")


def test_what_an_earlier_attempt_wrote_needs_no_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    (staging / "file").write_bytes(os.urandom(3 * MIB))
    monkeypatch.setattr(free_space, "room_at", lambda _path: Room(2 * MIB, "file system"))
    target = str(tmp_path / "target")
    require_room(target, [4 * MIB], staging=str(staging), replaces=False)
    with pytest.raises(StorageError) as caught:
        require_room(target, [4 * MIB], staging=str(tmp_path / "none"), replaces=False)
    assert caught.value.details["needed_bytes"] >= 4 * MIB
    assert caught.value.details["free_bytes"] == 2 * MIB


def test_a_quota_is_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_space, "_quota_bytes", lambda _place: [MIB, 5 * MIB])
    assert room_at(str(tmp_path / "a" / "b")) == Room(MIB, "quota")
    with pytest.raises(StorageError, match="quota"):
        require_room(str(tmp_path / "a"), [2 * MIB], staging="", replaces=False)


def test_systems_that_do_not_count_refuse_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(os.statvfs(tmp_path))
    values[2:5] = [0, 0, 0]
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(values))
    assert room_at(str(tmp_path)) is None
