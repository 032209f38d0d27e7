"""Torch archives: our layout against torch's reader, our reader against torch's writer and against damage."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from house.expected import raised, some
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError
from reshard_engine.containers import zip_reader
from reshard_engine.containers.safetensors import safetensors_template
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.containers.zip_reader import U32_MAX, ZipDirectory, read_zip_directory
from reshard_engine.formats.deepspeed.files import joined_parts
from reshard_engine.formats.torch_archive import StorageRecord, output_tensor, zip_template
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import PTensor, mapping_items, mapping_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.local import LocalStore
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.layout import FileTemplate

FLOAT = BY_NAME["float32"]


def _source(path: Path) -> SourceFile:
    info = some(LocalStore().stat(str(path)))
    return SourceFile(LocalStore(), path.name, (info,))


def _open(path: Path) -> TorchFile:
    return open_torch_file(_source(path), OpaqueLedger(OpaquePolicy.REFUSE))


def _rendered(template: FileTemplate, bodies: list[bytes]) -> bytes:
    out = bytearray(template.size_bytes)
    for offset, data in template.literals:
        out[offset : offset + len(data)] = data
    for body in template.bodies:
        out[body.offset : body.offset + body.length_bytes] = bodies[body.slot]
    for offset, record in template.crc_slots:
        start, length = template.records[record]
        out[offset : offset + 4] = zlib.crc32(out[start : start + length]).to_bytes(4, "little")
    return bytes(out)


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_are_where_the_reader_says(tmp_path: Path, legacy: bool) -> None:
    base = torch.randn(50, 7)
    value = {"a": base, "view": base[10:20], "b": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0)}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    parsed = _open(tmp_path / "x.pt")
    assert parsed.kind == ("legacy" if legacy else "zip")
    for name, node in mapping_items(parsed.root, what="x").items():
        assert isinstance(node, PTensor)
        itemsize = BY_NAME[node.dtype].itemsize_bytes
        data = parsed.file.read(parsed.tensor_offset(node), node.numel * itemsize)
        expected = value[str(name)].contiguous().view(torch.uint8).numpy().tobytes() if node.numel else b""
        assert data == expected, name


def test_our_archive_is_torchs_archive(tmp_path: Path) -> None:
    """Same records at the same offsets with the same headers as torch.save, up to pickle and serialization id."""
    tensors = [torch.randn(5), torch.randn(0), torch.randn(100, 3)]
    path = tmp_path / "archive.pt"
    torch.save({str(i): t for i, t in enumerate(tensors)}, path)
    with zipfile.ZipFile(path) as archive:
        pickle = archive.read("archive/data.pkl")
        theirs = [(i.filename, i.header_offset, i.file_size, i.flag_bits, i.CRC) for i in archive.infolist()]
    storages = [StorageRecord(str(i), ((i, 0, t.numel(), FLOAT),)) for i, t in enumerate(tensors)]
    data = _rendered(zip_template("archive", pickle, storages), [t.numpy().tobytes() for t in tensors])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        ours = [(i.filename, i.header_offset, i.file_size, i.flag_bits, i.CRC) for i in archive.infolist()]
    assert ours[:-1] == theirs[:-1]
    assert ours[-1][:4] == theirs[-1][:4]
    expected, cut = path.read_bytes(), theirs[-1][1]
    assert data[:cut] == expected[:cut]


def test_torch_loads_our_archive_also_mapped(tmp_path: Path) -> None:
    tensor = torch.randn(64, 3)
    pickle = emit_pickle(mapping_of({"param": output_tensor("0", FLOAT, (64, 3)), "n": 5}))
    template = zip_template("fp32", pickle, [StorageRecord("0", ((0, 0, 192, FLOAT),))])
    (tmp_path / "fp32.pt").write_bytes(_rendered(template, [tensor.numpy().tobytes()]))
    for mapped in (False, True):
        again = torch.load(tmp_path / "fp32.pt", weights_only=True, mmap=mapped)
        assert torch.equal(again["param"], tensor)
        assert again["n"] == 5


def test_zip64_layout_is_read_by_zipfile_and_by_us(tmp_path: Path) -> None:
    """A record of more than 4 GiB and one behind it, as a sparse file."""
    big = (1 << 32) // 4 + 17
    storages = [StorageRecord("0", ((0, 0, big, FLOAT),)), StorageRecord("1", ((1, 0, 3, FLOAT),))]
    value = mapping_of({"a": output_tensor("0", FLOAT, (big,)), "b": output_tensor("1", FLOAT, (3,))})
    template = zip_template("big", emit_pickle(value), storages)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        file.truncate(template.size_bytes)
        for offset, data in template.literals:
            file.seek(offset)
            file.write(data)
        file.seek(template.bodies[1].offset)
        file.write(struct.pack("<3f", 1, 2, 3))
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("big/data/0").file_size == big * 4
        assert archive.getinfo("big/data/1").header_offset > 1 << 32
    directory = read_zip_directory(CachedFile(_source(path)))
    assert directory.entries["data/0"].size_bytes == big * 4
    assert directory.entries["data/1"].data_offset == template.bodies[1].offset
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded["a"].shape == (big,)
    assert loaded["b"].tolist() == [1, 2, 3]


def test_remote_offsets_are_predicted_without_touching_headers(tmp_path: Path) -> None:
    """A store that is not local gets the same offsets from the directory alone."""
    torch.save({f"t{i}": torch.randn(20_000 + i) for i in range(6)}, tmp_path / "x.pt")

    class Counting(LocalStore):
        scheme = "s3"
        reads = 0

        def read_into(self, info: Any, offset: int, buffer: memoryview) -> None:
            type(self).reads += 1
            super().read_into(info, offset, buffer)

    local = read_zip_directory(CachedFile(_source(tmp_path / "x.pt")))
    info = some(LocalStore().stat(str(tmp_path / "x.pt")))
    remote = read_zip_directory(CachedFile(SourceFile(Counting(), "x.pt", (info,))))
    assert remote == local
    assert Counting.reads == 1, "one request for the tail, none per record"


def _archive(tmp_path: Path) -> tuple[Path, bytearray]:
    torch.save({"a": torch.arange(100.0), "b": torch.ones(5)}, tmp_path / "x.pt")
    return tmp_path / "x.pt", bytearray((tmp_path / "x.pt").read_bytes())


def _code(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return raised(ReshardError, _open, path).code


def test_damaged_archives_have_their_codes(tmp_path: Path) -> None:
    path, data = _archive(tmp_path)
    central = data.index(b"PK\x01\x02")
    assert _code(path, b"\0" + data) == "source.unknown_kind"
    assert _code(path, bytes(data) + b"\0") == "zip.bad_directory"
    assert _code(path, bytes(data) + bytes(data)) in {"zip.bad_directory", "zip.ambiguous"}
    flags = bytearray(data)
    flags[central + 8] |= 1  # encrypted
    assert _code(path, flags) == "zip.unsupported"
    method = bytearray(data)
    method[central + 10] = 8
    assert _code(path, method) == "zip.unsupported"
    renamed = bytearray(data)
    renamed[central + 46] = ord("y")
    assert _code(path, renamed) == "zip.ambiguous"
    local = bytearray(data)
    local[30] = ord("y")
    assert _code(path, local) == "zip.ambiguous"
    skeleton = bytearray(data)
    at = data.index(b"\x80\x02}")
    skeleton[at + 5] ^= 1
    assert _code(path, skeleton) == "zip.crc"
    size = bytearray(data)
    size[central + 24] ^= 0x10
    assert _code(path, size) in {"zip.bad_directory", "zip.ambiguous", "zip.overlap"}


def test_every_single_byte_of_the_directory_matters_or_is_checked(tmp_path: Path) -> None:
    """Mutating any byte of the directory gives the same extents or a typed error, never another reading."""
    path, data = _archive(tmp_path)
    expected = {k: (e.offset, e.length_bytes) for k, e in _open(path).storages.items()}
    for at in range(data.index(b"PK\x01\x02"), len(data)):
        changed = bytearray(data)
        changed[at] ^= 0xFF
        path.write_bytes(changed)
        try:
            found = {k: (e.offset, e.length_bytes) for k, e in _open(path).storages.items()}
        except ReshardError as error:
            found = {error.code.split(".")[0]: (0, 0)}
        assert found == expected or set(found) <= {"zip", "name", "source", "checkpoint"}, at


def test_duplicate_and_odd_names_are_refused(tmp_path: Path) -> None:
    for names, code in (
        (["x/data.pkl", "x/DATA.pkl"], "zip.ambiguous"),
        (["x/data.pkl", "y/version"], "zip.ambiguous"),
        (["x/data.pkl", "x/../evil"], "name.invalid"),
        (["x/data.pkl", "x\\evil"], "name.invalid"),
        (["x/version"], "source.unknown_kind"),
        (["x/data.pkl", "x/code/a.py"], "source.unknown_kind"),
    ):
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            for name in names:
                archive.writestr(name, b"\x80\x02N." if name.endswith("pkl") else b"x")
        assert _code(tmp_path / "x.pt", (tmp_path / "x.pt").read_bytes()) == code, names


def test_deflated_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N." + bytes(1000))
    assert _code(tmp_path / "x.pt", (tmp_path / "x.pt").read_bytes()) == "zip.unsupported"


def test_missing_record_is_an_incomplete_checkpoint(tmp_path: Path) -> None:
    path, data = _archive(tmp_path)
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(path, "w") as out:
        for name in archive.namelist():
            if not name.endswith("data/1"):
                out.writestr(name, archive.read(name))
    parsed = _open(path)
    tensors = mapping_items(parsed.root, what="x")
    assert raised(ReshardError, parsed.tensor_offset, tensors["b"]).code == "checkpoint.incomplete"


def test_parts_of_a_stream_and_copies_of_an_archive(tmp_path: Path) -> None:
    value = {"a": torch.arange(1000.0), "b": torch.ones(5)}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "x.pt").read_bytes()
    store = LocalStore()
    for index, part in enumerate((data[:500], data[500:501], data[501:])):
        (tmp_path / f"x.pt-{index}.3").write_bytes(part)
    infos = [store.stat(str(tmp_path / f"x.pt-{i}.3")) for i in range(3)]
    joined = joined_parts(SourceFile(store, "x.pt", tuple(i for i in infos if i)))
    assert joined.size_bytes == len(data)
    assert joined.read(0, len(data)) == data
    parsed = open_torch_file(joined, OpaqueLedger(OpaquePolicy.REFUSE))
    node = mapping_items(parsed.root, what="x")["a"]
    assert np.frombuffer(joined.read(parsed.tensor_offset(node), 4000), np.float32).tolist() == value["a"].tolist()
    torch.save(value, tmp_path / "y.pt")
    copies = [store.stat(str(tmp_path / "y.pt"))] * 2
    assert len(joined_parts(SourceFile(store, "y.pt", tuple(i for i in copies if i))).objects) == 1


def test_safetensors_layout_is_read_by_the_reference(tmp_path: Path) -> None:
    tensors = [
        ("b", BY_NAME["bfloat16"], (3, 2), 6),
        ("a", FLOAT, (5,), 5),
        ("scalar", BY_NAME["int64"], (), 1),
        ("empty", FLOAT, (0, 4), 0),
        ("flag", BY_NAME["bool"], (3,), 3),
    ]
    values = [
        torch.randn(3, 2).to(torch.bfloat16),
        torch.randn(5),
        torch.tensor(7),
        torch.zeros(0, 4),
        torch.tensor([True, False, True]),
    ]
    template = safetensors_template(tensors, {"format": "pt", "alias": "a"})
    raw = [v.contiguous().flatten().view(torch.uint8).numpy().tobytes() if v.numel() else b"" for v in values]
    (tmp_path / "m.safetensors").write_bytes(_rendered(template, raw))
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "alias": "a"}
        for (name, *_), value in zip(tensors, values, strict=True):
            assert torch.equal(file.get_tensor(name), value)
    error = raised(ReshardError, safetensors_template, [("c", BY_NAME["complex128"], (1,), 1)], {})
    assert error.code == "tensor.unsupported"


# The two readers of zip directories are one: what one of them takes or refuses, the other one does, with its words.


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
