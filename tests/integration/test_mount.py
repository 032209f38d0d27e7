"""`reshard mount`: the kernel shows what a conversion would leave, until the process ends, however it ends."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import reshard
from house.expected import raised
from house.mounts import Mounted, files_below, is_mounted, mounted, start
from house.promises import command
from house.repository import ROOT, real_checkpoint
from house.waiting import wait_until
from reshard.errors import RequestError, ReshardError, StorageError
from reshard_engine.operations.virtual import mounting

DATA = ROOT / "tests" / "data"
ZERO = ("--to", "zero", "--dp", "3")
CASES: list[tuple[str, tuple[str, ...]]] = [
    ("zero3_tiny", ZERO),
    ("zero3_tiny", ("--to", "zero", "--dp", "2", "--zero-stage", "1", "--name", "step-3")),
    ("zero2_tiny", ("--to", "universal")),
    ("zero2_tiny", ("--to", "safetensors", "--dtype", "bf16", "--max-shard-size", "20KB")),
    ("zero2_tiny", ("--to", "dcp")),
    ("zero2_tiny", ("--to", "torch")),
    ("tutorial_zero2", ("--to", "fsdp_ranks", "--dp", "3", "--rank-framework", "verl", "--device-type", "cpu")),
    ("gpt_bf16_z1_tp2pp2dp2/src", ("--to", "zero", "--dp", "2", "--tp", "1")),
]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="FUSE of Linux")


def _source(name: str) -> Path:
    return real_checkpoint(name) if "/" in name else DATA / name


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "mnt"


def _converted(source: Path, found: Mounted, run: Path, words: tuple[str, ...]) -> dict[str, bytes]:
    """The files that a conversion into an empty directory leaves there: below a tag, if the target has one."""
    given = [word for word in words if word not in ("--name", "step-3")]
    target = run / found.target.relative_to(found.place)
    assert command("convert", str(source), str(target), *given)[0] == 0
    return files_below(run)


@pytest.mark.parametrize(("name", "words"), CASES)
def test_the_mount_shows_what_a_conversion_leaves(
    name: str, words: tuple[str, ...], place: Path, tmp_path: Path
) -> None:
    source = _source(name)
    with mounted(source, place, *words, "--exact-crcs") as found:
        written = _converted(source, found, tmp_path / "run", words)
        assert files_below(place) == written
        assert (found.facts["pointer"] is None) == (found.target == place)
        assert found.facts["files"] == len(files_below(found.target))
        for path, data in written.items():
            assert (place / path).stat().st_size == len(data)
            assert subprocess.run(["cmp", place / path, tmp_path / "run" / path], check=False).returncode == 0
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            (place / "new").touch()
        with pytest.raises(FileNotFoundError):
            (place / "none").read_bytes()
    assert not is_mounted(place)
    assert found.process.returncode == 0


def _output(reader: subprocess.Popen[bytes]) -> bytes:
    return reader.communicate(timeout=60)[0]


def test_two_processes_read_at_once(place: Path, tmp_path: Path) -> None:
    source = DATA / "tutorial_zero2"
    with mounted(source, place, *ZERO, "--exact-crcs") as found:
        written = _converted(source, found, tmp_path / "run", ZERO)
        readers = [
            subprocess.Popen(["cat", *(str(place / path) for path in order)], stdout=subprocess.PIPE)
            for order in (sorted(written), sorted(written, reverse=True))
        ]
        with ThreadPoolExecutor(2) as pool:
            read = list(pool.map(_output, readers))
        assert read == [b"".join(data for _, data in sorted(written.items(), reverse=back)) for back in (False, True)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_also_while_a_file_is_open(number: int, place: Path) -> None:
    found = start(DATA / "zero2_tiny", place, *ZERO)
    file = os.open(place / "latest", os.O_RDONLY)
    assert found.end(number) == 0
    assert not is_mounted(place)
    assert raised(OSError, os.read, file, 1).errno in (errno.ENOTCONN, errno.ECONNABORTED)
    with suppress(OSError):  # the kernel may ask whoever is gone for a flush
        os.close(file)
    # `mount` made the directory.
    assert not place.exists()
    assert "Ctrl-C unmounts" in found.said


def test_whoever_unmounts_ends_the_process(place: Path) -> None:
    with mounted(DATA / "zero2_tiny", place, *ZERO) as found:
        if subprocess.run(["umount", str(place)], check=False).returncode:
            pytest.skip("this user may not unmount")
        assert found.process.wait(60) == 0


def test_readers_of_a_killed_mount_end_and_its_directory_is_free(place: Path, tmp_path: Path) -> None:
    place.mkdir()
    found = start(DATA / "tutorial_zero2", place, *ZERO)
    code = (
        "import os, sys\n"
        "paths = [os.path.join(sys.argv[1], name) for name in sorted(os.listdir(sys.argv[1]))]\n"
        "while True:\n"
        "    for path in paths:\n"
        "        file = os.open(path, os.O_RDONLY)\n"
        "        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "        while os.read(file, 1 << 16): pass\n"
        "        os.close(file)\n"
        "        print('.', flush=True)\n"
    )
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(found.target)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline()
    assert found.end(signal.SIGKILL) == -signal.SIGKILL
    for reader in readers:
        _, said = reader.communicate(timeout=60)
        assert reader.returncode == 1
        assert b"Error" in said
    # What watches over the process unmounts.
    wait_until(lambda: not is_mounted(place))
    assert list(place.iterdir()) == []
    with mounted(DATA / "zero2_tiny", place, *ZERO) as again:
        assert (place / "latest").read_text() == again.target.name


def test_a_dead_mount_is_replaced(place: Path) -> None:
    found = start(DATA / "zero2_tiny", place, *ZERO)
    for guard in psutil.Process(found.process.pid).children():
        guard.kill()
    found.end(signal.SIGKILL)
    try:
        assert is_mounted(place)
        assert raised(OSError, os.statvfs, place).errno in (errno.ENOTCONN, errno.ECONNABORTED)
        with mounted(DATA / "zero2_tiny", place, *ZERO) as again:
            assert (place / "latest").read_text() == again.target.name
        assert not is_mounted(place)
    finally:
        if is_mounted(place):
            subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_source_that_changes_is_an_error_for_readers_with_its_reason_in_the_log(place: Path, tmp_path: Path) -> None:
    source = tmp_path / "run1"
    shutil.copytree(DATA / "zero2_tiny", source)
    with mounted(source, place, *ZERO) as found:
        for path in source.rglob("*.pt"):
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        states = next(found.target.glob("*_optim_states.pt"))
        for _ in range(2):
            assert raised(OSError, states.read_bytes).errno == errno.EIO
        wait_until(lambda: "changed while it was read" in found.said)
        assert found.said.count("source.changed") == 1
        # What needs nothing of the source is still there.
        assert (place / "latest").read_text() == found.target.name
        assert found.end() == 0


class _Slow:
    """A layout whose largest file is only there when `open` is set."""

    def __init__(self, layout: Any) -> None:
        self._layout, self.open, self.asked = layout, threading.Event(), threading.Event()
        self.slow = max(layout.files, key=lambda file: file.size_bytes).path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if path == self.slow:
            self.asked.set()
            assert self.open.wait(60)
        self._layout.read_into(path, offset, buffer)


@pytest.fixture
def layout() -> Iterator[Any]:
    with reshard.open_layout(DATA / "zero2_tiny", to="zero", dp=3) as found:
        yield found


def _refused(*_: object) -> None:
    """The system call where a process may not mount."""


def _mount(layout: Any, place: Path, told: list[ReshardError]) -> mounting.Mount:
    try:
        return mounting.mount(layout, str(place), on_error=told.append)
    except StorageError as error:
        pytest.skip(error.message)


def test_a_slow_store_holds_up_nobody_else(layout: Any, place: Path) -> None:
    slow, told = _Slow(layout), list[ReshardError]()
    with _mount(slow, place, told) as found, ThreadPoolExecutor(1) as pool:
        target = Path(found.target)
        waiting = pool.submit((target / slow.slow).read_bytes)
        assert slow.asked.wait(60)
        for file in layout.files:
            if file.path != slow.slow:
                assert (target / file.path).read_bytes() == layout.read(file.path)
        assert not waiting.done()
        slow.open.set()
        assert waiting.result(60) == layout.read(slow.slow)
    assert told == []


def test_a_bug_ends_as_an_error_for_whoever_reads(layout: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[ReshardError]()

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(layout, "read_into", broken)
    with _mount(layout, place, told) as found:
        path = Path(found.target) / layout.files[0].path
        assert raised(OSError, path.read_bytes).errno == errno.EIO
    assert [(error.code, error.message) for error in told] == [("internal.error", "ValueError: no")]


def test_what_cannot_be_mounted_on_is_refused(layout: Any, tmp_path: Path) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    (full / "x").mkdir(parents=True)
    file.touch()
    for place, code in ((full, "target_exists"), (file, "target_exists"), (tmp_path / "none" / "here", "invalid")):
        assert raised(RequestError, mounting.mount, layout, str(place)).code == f"request.{code}"
    assert not (tmp_path / "none").exists()


def test_one_directory_has_one_mount(layout: Any, place: Path) -> None:
    with _mount(layout, place, []):
        error = raised(RequestError, mounting.mount, layout, str(place))
        assert (error.code, "mounted already" in error.message) == ("request.target_exists", True)
        assert "umount DIR" in error.fix
    assert not is_mounted(place)


def test_a_mount_that_does_not_answer_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped: whoever asks for its attributes waits in the kernel, where no SIGTERM ends it."""
    found = start(DATA / "zero2_tiny", place, *ZERO)
    (tmp_path / "link").symlink_to(place)
    os.kill(found.process.pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(mounting, "_ANSWER_S", 0.2)
        for way in (place, tmp_path / "link"):
            with reshard.open_layout(DATA / "zero2_tiny", to="zero", dp=3) as layout:
                error = raised(RequestError, mounting.mount, layout, str(way))
            assert (error.code, "does not answer" in error.message) == ("request.target_exists", True)
            assert f"umount -l {place}" in error.fix
    finally:
        os.kill(found.process.pid, signal.SIGCONT)
        found.end(signal.SIGTERM)
    assert not is_mounted(place)


def test_what_somebody_else_mounts_over_the_directory_stays(layout: Any, place: Path) -> None:
    with _mount(layout, place, []):
        if subprocess.run(
            ["mount", "-t", "tmpfs", "over", str(place)], check=False, stderr=subprocess.DEVNULL
        ).returncode:
            pytest.skip("this user cannot mount")
        (place / "theirs").touch()
    try:
        assert (place / "theirs").exists()
    finally:
        subprocess.run(["umount", str(place)], check=True)
        subprocess.run(["umount", "-l", str(place)], check=False, stderr=subprocess.DEVNULL)


def test_without_fuse_the_error_names_what_to_use(
    layout: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounting, "_DEVICE", str(tmp_path / "no-fuse"))
    code, _, said = command("mount", str(DATA / "zero2_tiny"), str(place), *ZERO)
    assert code == 8
    assert "storage.no_fuse" in said
    assert "reshard convert" in said
    assert "reshard.open_layout" in said
    monkeypatch.setattr(mounting, "_DEVICE", "/dev/null")
    monkeypatch.setattr(mounting, "_mounted_by_call", _refused)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = raised(StorageError, mounting.mount, layout, str(place))
    assert (error.code, "fuse3" in error.fix) == ("storage.no_fuse", True)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(mounting, "_DEVICE", str(tmp_path / "no-fuse"))
    assert "darwin" in raised(StorageError, mounting.mount, layout, str(place)).message
    assert not place.exists()


@pytest.mark.skipif(shutil.which("fusermount3") is None, reason="there is no fusermount3 (package fuse3)")
def test_users_mount_by_the_program_that_may(layout: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounting, "_mounted_by_call", _refused)
    with _mount(layout, place, []) as found:
        assert found.helper == "fusermount3"
        path = layout.files[0].path
        assert (Path(found.target) / path).read_bytes() == layout.read(path)
    assert not is_mounted(place)
