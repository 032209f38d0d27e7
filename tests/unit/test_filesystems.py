"""Places on file systems of fsspec: their URLs, what is refused, and file systems that tell little."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import fsspec  # pyright: ignore[reportMissingTypeStubs]  # it has none
import pytest
from fsspec.implementations.cached import SimpleCacheFileSystem  # pyright: ignore[reportMissingTypeStubs]
from fsspec.implementations.dirfs import DirFileSystem  # pyright: ignore[reportMissingTypeStubs]
from fsspec.implementations.http import HTTPFileSystem  # pyright: ignore[reportMissingTypeStubs]
from fsspec.implementations.memory import MemoryFileSystem  # pyright: ignore[reportMissingTypeStubs]
from fsspec.implementations.zip import ZipFileSystem  # pyright: ignore[reportMissingTypeStubs]

import reshard
from house.expected import raised
from house.repository import DATA
from reshard.errors import RequestError, SourceError, StorageError
from reshard.filesystems import located
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.local import LocalEngine
from reshard_engine.storage.fsspec_store import FsspecStore
from reshard_engine.storage.locations import open_location
from reshard_jobs.limits import Roots, TenantLimits

SAMPLE = DATA / "zero3_tiny"
Entry = dict[str, Any]


@pytest.fixture
def memory() -> MemoryFileSystem:
    """A file system with the save directory `/any/run`."""
    found = MemoryFileSystem()
    found.put(str(SAMPLE), "/any/run", recursive=True)
    return found


class Plain(fsspec.AbstractFileSystem):
    """Local files below a directory, with no more details than names and sizes; for one thread at a time."""

    protocol = "plain"
    cachable = False

    def __init__(self, top: Path) -> None:
        super().__init__()
        self.top, self.within, self.calls = top, threading.Lock(), 0

    def info(self, path: str, **_: object) -> Entry:
        with self.one_at_a_time():
            return self._entry(self.top / path)

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        entries = [self._entry(p) for p in sorted((self.top / path).iterdir())]
        return entries if detail else [e["name"] for e in entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        with self.one_at_a_time():
            return (self.top / path).read_bytes()[start:end]

    def one_at_a_time(self) -> Any:
        assert not self.within.locked(), "called by two threads at once"
        self.calls += 1
        return self.within

    def _entry(self, path: Path) -> Entry:
        directory = path.is_dir()
        name, size = str(path.relative_to(self.top)), 0 if directory else path.stat().st_size
        return {"name": name, "size": size, "type": "directory" if directory else "file"}


class Moving(Plain):
    """Files with times; one of them is saved again between the look at its details and the read."""

    protocol = "moving"
    saved_again = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        if self.saved_again:
            data = (self.top / path).read_bytes()
            (self.top / path).write_bytes(data)
            os.utime(self.top / path, (1, self.calls))
        return super().cat_file(path, start, end)

    def _entry(self, path: Path) -> Entry:
        return {**super()._entry(path), "mtime": path.stat().st_mtime}


class Remembering(Moving):
    """As FTP's file system: a listing is kept until its own directory is named, the root by its name."""

    protocol = "remembering"
    root_marker = "/"

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        self.kept: dict[str, list[Entry]] = {}

    def invalidate_cache(self, path: str | None = None) -> None:
        if path is None:
            self.kept.clear()
        else:
            self.kept.pop(path, None)

    def ls(self, path: str, detail: bool = True, **options: object) -> list[Any]:
        whole = "/" + path.strip("/")
        if whole not in self.kept:
            self.kept[whole] = [{**e, "name": f"/{e['name']}"} for e in super().ls(whole.strip("/"), **options)]
        return self.kept[whole] if detail else [e["name"] for e in self.kept[whole]]

    def info(self, path: str, **_: object) -> Entry:
        if not path.strip("/"):
            return {"name": "/", "size": 0, "type": "directory"}
        found = next((e for e in self.ls(self._parent(path)) if e["name"] == path.rstrip("/")), None)
        if found is None:
            raise FileNotFoundError(path)
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        return super().cat_file(path.strip("/"), start, end)


class Far(Plain):
    """Of one host."""

    protocol = "far"
    host = "h"


class Bucket(Plain):
    """As s3fs, but for what it lists."""

    protocol = ("s3", "s3a")


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    """A zip file with the contents of the save directory at its root."""
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for path in SAMPLE.rglob("*"):
            archive.write(path, path.relative_to(SAMPLE))
    return tmp_path / "run.zip"


def test_each_kind_of_place_is_the_same_checkpoint(memory: MemoryFileSystem, zipped: Path) -> None:
    inner = DirFileSystem("/any", memory)
    places: list[tuple[Any, str]] = [
        (memory.get_mapper("/any/run"), "memory://any/run/global_step3"),
        (DirFileSystem("/any/run", memory), "memory://any/run/global_step3"),
        (DirFileSystem("run", inner), "memory://any/run/global_step3"),
        (ZipFileSystem(str(zipped)), "zip://ZipFileSystem/global_step3"),
        (ZipFileSystem(str(zipped)).get_mapper("global_step3"), "zip://global_step3"),
    ]
    for place, url in places:
        assert reshard.inspect(place).url == url
        assert reshard.diff(place, SAMPLE).equal, url


def test_an_opened_file_is_a_place_as_well(memory: MemoryFileSystem, tmp_path: Path) -> None:
    reshard.convert(SAMPLE, tmp_path / "weights", to="torch")
    memory.put(str(tmp_path / "weights" / "pytorch_model.bin"), "/any/model.pt")
    assert reshard.diff(fsspec.open("memory://any/model.pt"), SAMPLE, states="weights").equal


def test_a_local_file_system_is_this_machine() -> None:
    local = fsspec.filesystem("file")
    assert located(local.get_mapper(str(SAMPLE))) == (str(SAMPLE), None)
    assert reshard.inspect(local.get_mapper(str(SAMPLE))).url == reshard.inspect(SAMPLE).url


def test_one_file_system_has_one_profile(memory: MemoryFileSystem) -> None:
    first, second = located(memory.get_mapper("/any/run")), located(memory.get_mapper("/any"))
    assert first[1] == second[1]
    assert first[0] == second[0] + "/run"


def test_files_without_a_version_are_named(tmp_path: Path) -> None:
    found = reshard.inspect(Plain(SAMPLE).get_mapper("global_step3"))
    assert [w for w in found.warnings if "neither a version nor a time" in w] != []
    planned = reshard.plan(Plain(SAMPLE).get_mapper("global_step3"), tmp_path / "made", to="zero", dp=3)
    assert [w for w in planned.warnings if "neither a version nor a time" in w] != []


def test_a_save_between_a_look_and_a_read_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "run")
    moving = Moving(tmp_path)
    with reshard.open_layout(moving.get_mapper("run"), to="safetensors") as layout:
        name = next(f.path for f in layout.files if f.path.endswith(".safetensors"))
        moving.saved_again = True
        assert raised(SourceError, layout.read, name).code == "source.changed"


def test_a_listing_of_the_root_is_not_believed(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE / "global_step3", tmp_path / "root")
    kept = Remembering(tmp_path / "root")
    with reshard.open_layout(kept.get_mapper("/"), to="safetensors") as layout:
        name = next(f.path for f in layout.files if f.path.endswith(".safetensors"))
        kept.saved_again = True
        assert raised(SourceError, layout.read, name).code == "source.changed"


def test_a_url_of_another_host_is_not_of_this_file_system() -> None:
    url, profile = located(Far(SAMPLE).get_mapper("global_step3"))
    assert url == "far://h/global_step3"
    assert open_location(url, profile).path == "global_step3"
    for other in ("far://hw", "far://other/w"):
        assert raised(RequestError, open_location, other, profile).code == "request.unknown_scheme"


@pytest.mark.parametrize(
    "entry",
    [{"name": "run/a"}, {"name": "run/a", "type": "file"}, {"name": "run/a", "type": "file", "size": None}, "run/a",
     {"name": "run/a", "type": "file", "size": -5}, {"name": "run/a", "type": "file", "size": "abc"}],
)  # fmt: skip
def test_a_malformed_listing_is_refused(entry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Plain(tmp_path)
    monkeypatch.setattr(plain, "ls", lambda *_, **__: [entry])
    assert raised(RequestError, reshard.inspect, plain.get_mapper("run")).code == "request.invalid"


def test_links_that_lead_nowhere_hide_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ls, info = Plain(SAMPLE), Plain(SAMPLE).ls, Plain(SAMPLE).info

    def refuse(path: str) -> Entry:
        if "dead" in path:
            raise {"1": NotADirectoryError, "2": PermissionError, "3": OSError}[path[-1]](path)
        return info(path)

    dead = [{"name": f"global_step3/dead{n}", "type": "link", "size": 1} for n in (1, 2, 3)]
    monkeypatch.setattr(plain, "ls", lambda path, **_: [*ls(path), *dead])
    monkeypatch.setattr(plain, "info", refuse)
    assert reshard.inspect(plain.get_mapper("global_step3")).format == "deepspeed-zero3"


def test_a_file_that_becomes_a_directory_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Plain(SAMPLE)
    with reshard.open_layout(plain.get_mapper("global_step3"), to="safetensors") as layout:
        name = next(f.path for f in layout.files if f.path.endswith(".safetensors"))

        def refuse(*_: object, **__: object) -> bytes:
            raise NotADirectoryError

        monkeypatch.setattr(plain, "cat_file", refuse)
        assert raised(SourceError, layout.read, name).code == "source.changed"


def test_a_file_system_of_one_connection_is_called_by_one_thread_at_a_time(tmp_path: Path) -> None:
    plain = Plain(SAMPLE)
    reshard.convert(plain.get_mapper("global_step3"), tmp_path / "made", to="zero", dp=3, threads=8)
    assert plain.calls > 20
    assert reshard.diff(plain.get_mapper("global_step3"), plain.get_mapper("/global_step3")).equal
    assert reshard.diff(tmp_path / "made", SAMPLE).equal


def test_two_places_on_one_file_system_take_turns() -> None:
    """As the sides of a `diff`, or a checkpoint and its base model."""
    plain = Plain(SAMPLE)
    url, profile = located(plain.get_mapper("global_step3"))
    first, second = (open_location(url, profile).store for _ in range(2))
    info = first.list_tree("global_step3")[0]
    other = threading.Thread(target=second.stat, args=(info.path,))
    read = plain.cat_file

    def while_it_reads(path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        other.start()
        other.join(0.5)
        assert other.is_alive(), "the other place did not wait"
        return read(path, start, end)

    plain.cat_file = while_it_reads  # type: ignore[method-assign]
    first.read_into(info, 0, memoryview(bytearray(8)))
    other.join()


def test_what_another_package_raises_gets_a_type(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    class LoginError(Exception):
        """As `ftplib.Error`, it is no `OSError`."""

    def refuse(*_: object, **__: object) -> list[Entry]:
        raise LoginError("530 login first")

    monkeypatch.setattr(memory, "ls", refuse)
    error = raised(StorageError, reshard.inspect, memory.get_mapper("/any/run"))
    assert error.code == "storage.unavailable"
    assert "memory://any/run cannot be reached: 530 login first" in error.message


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (SimpleCacheFileSystem(fs=MemoryFileSystem()), "wraps another file system"),
        (HTTPFileSystem().get_mapper("http://host/run"), "cannot list directories"),
        (Bucket(SAMPLE), "Bucket alone names no bucket"),
        (3, "the source is of the type int"),
    ],
)
def test_places_that_cannot_be_read(place: Any, says: str) -> None:
    error = raised(RequestError, reshard.inspect, place)
    assert error.code == "request.invalid"
    assert says in error.message
    assert error.fix


def test_a_profile_beside_a_file_system_is_refused(memory: MemoryFileSystem) -> None:
    error = raised(RequestError, lambda: reshard.inspect(memory.get_mapper("/any/run"), profile="mine"))
    assert (error.code, "profile is mine" in error.message) == ("request.invalid", True)


def test_a_target_is_named_by_its_url(memory: MemoryFileSystem) -> None:
    for call in (
        lambda: reshard.convert(SAMPLE, memory.get_mapper("/any/made"), to="zero", dp=3),  # type: ignore[arg-type]
        lambda: reshard.ensure(SAMPLE, dp=3, out=memory.get_mapper("/any/made")),  # type: ignore[arg-type]
    ):
        error = raised(RequestError, call)
        assert error.code == "request.invalid"
        assert "memory://any/made on a file system of fsspec, which is only read" in error.message
    assert not memory.exists("/any/made")


def test_the_profile_counts_for_urls_of_its_scheme_alone(memory: MemoryFileSystem) -> None:
    """A base model, or files of a model, may be elsewhere."""
    url, profile = located(memory.get_mapper("/any/run"))
    assert open_location(url, profile).store.list_directory("/any/run").directories
    assert open_location(str(SAMPLE), profile).store.scheme == "file"
    assert isinstance(open_location(url, profile).store, FsspecStore)
    assert not isinstance(open_location("s3://bucket/base", profile).store, FsspecStore)


def test_another_process_is_told_the_reason(tmp_path: Path) -> None:
    """Whatever sends it: a client of another release, or a saved plan."""
    source = SourceSpec(url="s3://bucket/run", profile="fsspec:99")
    request = ConvertRequest.model_validate({"source": source, "target": str(tmp_path / "made"), "to": "safetensors"})
    roots = Roots.parse(f"s3://bucket,{tmp_path}")
    for call in (
        lambda: LocalEngine().inspect(source),
        lambda: LocalEngine().convert(request),
        lambda: TenantLimits().allowed_source(source, roots),
        lambda: TenantLimits().allowed_request(request, roots),
    ):
        error = raised(RequestError, call)
        assert error.code == "request.invalid"
        assert "another process has neither the object nor its credentials" in error.message
        assert "storage profile of the service" in error.fix
