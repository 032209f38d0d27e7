"""The two readers of zip directories are one: what one of them takes or refuses, the other one does, with its words."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.errors import ReshardError
from reshard_engine.containers import zip_reader
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.zip_reader import U32_MAX, ZipDirectory, read_zip_directory
from reshard_engine.formats.torch_archive import StorageRecord, zip_template
from reshard_engine.storage.local import LocalStore
from reshard_engine.tensors.dtypes import BY_NAME


class FarStore(LocalStore):
    """A store whose every request costs."""

    scheme = "s3"


def outcome(path: Path, store: LocalStore) -> ZipDirectory | tuple[str, str]:
    info = store.stat(str(path))
    assert info is not None
    try:
        return read_zip_directory(CachedFile(SourceFile(store, path.name, (info,))))
    except ReshardError as error:
        return error.code, error.message


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], ZipDirectory | tuple[str, str]]:
    """What both readers say of a file, from a local store and from another one."""

    def read(path: Path) -> ZipDirectory | tuple[str, str]:
        found: list[Any] = []
        for store in (LocalStore(), FarStore()):
            for first in (1 << 30, 1):
                monkeypatch.setattr(zip_reader, "COLUMNS_FROM", first)
                found.append(outcome(path, store))
            assert found[-2] == found[-1]
        return found[0]

    return read


def in_columns(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the fast reader takes the file by itself."""
    monkeypatch.setattr(zip_reader, "COLUMNS_FROM", 1)
    with monkeypatch.context() as patch:
        patch.delattr(zip_reader, "_central_entries")
        try:
            return isinstance(outcome(path, LocalStore()), ZipDirectory)
        except NameError:
            return False


def torch_archive(path: Path) -> bytes:
    sizes = (3, 0, 20_000)
    torch.save({f"t{i}": torch.arange(n, dtype=torch.float32) for i, n in enumerate(sizes)}, path)
    return path.read_bytes()


def flip(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([value]))


def test_what_torch_writes_is_read_in_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: Callable[[Path], Any]
) -> None:
    torch_archive(tmp_path / "x.pt")
    assert len(both(tmp_path / "x.pt").entries) == 9
    assert in_columns(tmp_path / "x.pt", monkeypatch)


def test_records_behind_four_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: Callable[[Path], Any]
) -> None:
    sizes = (1 << 31, (1 << 31) + 4096, 4096, 0, 12)
    runs = [((0, 0, n // 4, BY_NAME["float32"]),) if n else () for n in sizes]
    template = zip_template("x", b"\x80\x02N.", [StorageRecord(str(i), r) for i, r in enumerate(runs)])
    with (tmp_path / "x.pt").open("wb") as file:
        file.truncate(template.size_bytes)
        for at, literal in template.literals:
            file.seek(at)
            file.write(literal)
    found = both(tmp_path / "x.pt")
    assert max(e.header_offset for e in found.entries.values()) > U32_MAX
    assert in_columns(tmp_path / "x.pt", monkeypatch)


@pytest.mark.parametrize("bits", [0x01, 0x08, 0xFF])
def test_any_damage_has_the_same_end(tmp_path: Path, both: Callable[[Path], Any], bits: int) -> None:
    """Every byte that is not data: local headers and descriptors, the directory, the end record."""
    path = tmp_path / "x.pt"
    data = torch_archive(path)
    entries = both(path).entries.values()
    inside = {at for e in entries for at in range(e.data_offset, e.data_offset + e.size_bytes)}
    padding = {at for e in entries for at in range(e.header_offset + 40, e.data_offset)}
    for at in range(len(data)):
        if at in inside or at in padding:
            continue
        flip(path, at, data[at] ^ bits)
        both(path)
        flip(path, at, data[at])


@pytest.mark.parametrize(
    "names",
    [
        ["x/data.pkl", "x/DATA.pkl"],
        ["x/data.pkl", "x/data.pkl"],
        ["x/data.pkl", "y/version"],
        ["x/data.pkl", "version"],
        ["x/data.pkl", "x/../evil"],
        ["x/data.pkl", "x/./evil"],
        ["x/data.pkl", "x//evil"],
        ["x/data.pkl", "x/evil/"],
        ["/data.pkl", "/evil"],
        ["x/data.pkl", "x/..."],
        ["x/data.pkl", "x\\evil"],
        ["x/data.pkl", "x/\nx/evil"],
        ["x/data.pkl", "x/\x7f"],
        ["x/data.pkl", "x/" + "n" * 511],
        ["x/data.pkl", "x/" + "n" * 510],
        ["\xe9/data.pkl", "\xe9/\u212b"],
        ["x/\u212b", "x/\xe5"],
        ["x"],
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names(tmp_path: Path, both: Callable[[Path], Any], names: list[str]) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"12")
    both(tmp_path / "x.pt")


def test_a_longer_name_in_the_local_header_is_refused(tmp_path: Path, both: Callable[[Path], Any]) -> None:
    """Its first bytes are the name of the directory, and the data begin where they did: only the length tells."""
    path = tmp_path / "x.pt"
    data = bytearray(torch_archive(path))
    name, extra = struct.unpack_from("<HH", data, 26)
    struct.pack_into("<HH", data, 26, name + 4, extra - 4)
    path.write_bytes(data)
    assert both(path)[0] == "zip.ambiguous"


def test_records_in_another_order(tmp_path: Path, both: Callable[[Path], Any]) -> None:
    """The directory may list them as it likes."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x/a", "x/b", "x/c"):
            archive.writestr(zipfile.ZipInfo(name), name)
        archive.filelist.reverse()
        archive._didModify = True
    assert list(both(path).entries) == ["a", "b", "c"]
