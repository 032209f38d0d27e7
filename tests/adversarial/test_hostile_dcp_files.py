"""Distributed checkpoints whose files are damaged, mixed or hostile: refused with a code, or read as torch reads them.

`test_hostile_dcp_metadata.py` has the metadata alone; here are the records, and what does not belong together.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo as StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.tensor.placement_types import Replicate, Shard

from house.conversions import refused_conversion
from house.requests import asked
from laws.dcp_files import Save, Sharded, edit_metadata, read_metadata, save, torch_bytes
from reshard.engine import load_engine
from reshard.models.jobs import ConvertResult
from reshard.options import SourceSpec

ROWS = (Shard(0), Replicate())
GRID = (Shard(0), Shard(1))
"""Placements on a mesh of two by two."""
EMBED, HEAD, NORM = "model.embed.weight", "model.head.weight", "model.norm.weight"
MOMENT = "optimizer.state.head.weight.exp_avg"
NEW_FILE = "__77_0.distcp"
MESH = Save((2, 2))


def _tensor(first: int, *shape: int) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def weights() -> dict[str, torch.Tensor]:
    """The model's parameters; the numbers of all tensors are different ones."""
    return {"embed.weight": _tensor(0, 6, 4), "head.weight": _tensor(100, 6, 4), "norm.weight": _tensor(200, 5)}


def placements(name: str) -> tuple[Any, ...]:
    return {"embed.weight": GRID, "head.weight": ROWS, "norm.weight": ROWS}[name]


def state_dict(**beside: Any) -> dict[str, Any]:
    """A run of FSDP on a mesh of two by two: a grid of boxes, rows, uneven rows, replicas."""
    model = {name: Sharded(tensor, placements(name)) for name, tensor in weights().items()}
    states = {
        name: {
            "step": torch.tensor(3.0),
            "exp_avg": Sharded(tensor + 1000, placements(name)),
            "exp_avg_sq": Sharded(tensor + 2000, placements(name)),
        }
        for name, tensor in weights().items()
    }
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(weights())}
    return {"model": model, "optimizer": {"state": states, "param_groups": [group]}, **beside}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The run, saved by four ranks."""
    save(state_dict(epoch=3), tmp_path / "in", MESH)
    return tmp_path / "in"


def convert(source: Path, target: Path, to: str = "safetensors", **options: Any) -> ConvertResult:
    """Convert; tensors of training states are read by all targets."""
    request: dict[str, Any] = {"source": {"url": str(source), **options.pop("choices", {})}}
    request |= {"target": str(target), "to": to, **options}
    return load_engine().convert(asked(**request))


def code(source: Path, target: Path, to: str = "dcp", **options: Any) -> str:
    """The code of the refusal; nothing is written."""
    error = refused_conversion(convert, source, target, to, **options)
    assert error.message.isprintable()
    return error.code


# Records.


@dataclass(frozen=True)
class Record:
    """The record of a chunk, or of a value."""

    directory: Path
    index: MetadataIndex

    @classmethod
    def of(cls, directory: Path, key: str, *offset: int) -> Record:
        """The record of the chunk of a tensor at an offset; without one, of a value."""
        return cls(directory, MetadataIndex(key, offset or None))

    @property
    def place(self) -> Any:
        """Its `_StorageInfo`."""
        return read_metadata(self.directory / ".metadata").storage_data[self.index]

    def bytes(self) -> bytes:
        """Its archive."""
        place = self.place
        return (self.directory / place.relative_path).read_bytes()[place.offset : place.offset + place.length]

    def move(self, place: Any) -> None:
        """Give it another place."""
        edit_metadata(self.directory / ".metadata", lambda m: m.storage_data.__setitem__(self.index, place))

    def replace(self, data: bytes) -> None:
        """Other bytes, in a file of their own."""
        file = self.directory / NEW_FILE
        at = file.stat().st_size if file.exists() else 0
        with file.open("ab") as stream:
            stream.write(data)
        self.move(StorageInfo(NEW_FILE, at, len(data)))

    def overwrite(self, data: bytes, at: int = 0) -> None:
        """Other bytes in its place."""
        place = self.place
        with (self.directory / place.relative_path).open("r+b") as stream:
            stream.seek(place.offset + at)
            stream.write(data)


def archive(pickled: bytes, data: bytes = b"") -> bytes:
    """An archive as torch's, with a pickle of one's own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as out:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "data/0": data, "version": b"3\n"}.items():
            out.writestr(f"archive/{name}", content)
    return buffer.getvalue()


class Bomb:
    """An object that makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._canary),)


class Foreign:
    """An object of a class that is on no list."""


CHUNK = (HEAD, 3, 0)
"""The second of two chunks of three rows."""
PART = _tensor(112, 3, 4)
"""Its elements."""


def _replaced(make: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda source: Record.of(source, *CHUNK).replace(make())


def _shifted(by: int, longer: int = 0) -> Callable[[Path], object]:
    def change(source: Path) -> None:
        record = Record.of(source, *CHUNK)
        place = record.place
        record.move(StorageInfo(place.relative_path, place.offset + by, place.length + longer))

    return change


def _shared(source: Path) -> None:
    Record.of(source, HEAD, 3, 0).move(Record.of(source, HEAD, 0, 0).place)


def _truncated(source: Path) -> None:
    path = source / "__3_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def _damaged_pickle(source: Path) -> None:
    record = Record.of(source, *CHUNK)
    record.overwrite(b"\xff", record.bytes().index(b"_rebuild_tensor_v2"))


def _with_comment(source: Path) -> None:
    data = Record.of(source, *CHUNK).bytes()
    Record.of(source, *CHUNK).replace(data + b"more")


def _nested_archive(source: Path) -> None:
    """The archive of another tensor before the end of this one: two central directories in one record."""
    data = Record.of(source, *CHUNK).bytes()
    Record.of(source, *CHUNK).replace(Record.of(source, HEAD, 0, 0).bytes() + data)


RECORDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "begins in another": (_shifted(-100), "checkpoint.malformed"),
    "ends in another": (_shifted(0, 100), "checkpoint.malformed"),
    "is another's": (_shared, "checkpoint.malformed"),
    "begins inside itself": (_shifted(100, -100), "source.unsupported"),
    "is too short": (_shifted(0, -1), "zip.bad_directory"),
    "has no bytes": (_replaced(lambda: b""), "source.unsupported"),
    "is not an archive": (_replaced(lambda: b"x" * 2000), "source.unsupported"),
    "is a legacy stream": (_replaced(lambda: _legacy(PART)), "source.unsupported"),
    "has bytes behind it": (_with_comment, "zip.bad_directory"),
    "has an archive before it": (_nested_archive, "zip.bad_directory"),
    "holds another type": (_replaced(lambda: torch_bytes(PART.double())), "checkpoint.malformed"),
    "holds another type of the same size": (_replaced(lambda: torch_bytes(PART.int())), "checkpoint.malformed"),
    "holds another shape": (_replaced(lambda: torch_bytes(PART.reshape(4, 3))), "checkpoint.malformed"),
    "holds more rows": (_replaced(lambda: torch_bytes(_tensor(112, 4, 4))), "checkpoint.malformed"),
    "holds fewer rows": (_replaced(lambda: torch_bytes(_tensor(112, 2, 4))), "checkpoint.malformed"),
    "holds no tensor": (_replaced(lambda: torch_bytes(3)), "checkpoint.malformed"),
    "holds a dict of the tensor": (_replaced(lambda: torch_bytes({"w": PART})), "checkpoint.malformed"),
    "holds a sparse tensor": (_replaced(lambda: torch_bytes(PART.to_sparse())), "pickle.forbidden_call"),
    "is expanded from one row": (_replaced(lambda: torch_bytes(PART[:1].expand(3, 4))), "source.unsupported"),
    "lies transposed": (_replaced(lambda: torch_bytes(_turned(PART))), "source.unsupported"),
    "has a damaged pickle": (_damaged_pickle, "zip.crc"),
    "lies in a truncated file": (_truncated, "checkpoint.incomplete"),
    "lies in a file that is not there": (lambda source: (source / "__2_0.distcp").unlink(), "checkpoint.incomplete"),
}


def _legacy(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that(name: str, source: Path, tmp_path: Path) -> None:
    change, expected = RECORDS[name]
    change(source)
    assert code(source, tmp_path / "out") == expected


def by_torch(source: Path, keys: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """What torch itself loads."""
    found = {key: torch.zeros(shape) for key, shape in keys.items()}
    state_dict_loader.load(found, checkpoint_id=source, no_dist=True)  # pyright: ignore[reportUnknownMemberType]
    return found


def _exchanged(source: Path) -> None:
    one, other = Record.of(source, HEAD, 0, 0), Record.of(source, MOMENT, 0, 0)
    places = one.place, other.place
    one.move(places[1])
    other.move(places[0])


def _view(source: Path) -> None:
    Record.of(source, *CHUNK).replace(torch_bytes(_tensor(100, 6, 4)[3:]))


def _in_another_order(source: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata[HEAD]
        entry.chunks.reverse()
        metadata.storage_data = dict(reversed(metadata.storage_data.items()))

    edit_metadata(source / ".metadata", change)


def _with_stale_files(source: Path) -> None:
    (source / "__0_1.distcp").write_bytes(b"of an earlier save")
    (source / ".metadata.tmp").write_bytes(b"of a save that was killed")


def _linked(source: Path) -> None:
    elsewhere = source.parent / "elsewhere" / "shard"
    elsewhere.parent.mkdir()
    (source / "__1_0.distcp").rename(elsewhere)
    (source / "__1_0.distcp").symlink_to(elsewhere)


HARMLESS: dict[str, Callable[[Path], object]] = {
    "records exchanged between tensors of one shape": _exchanged,
    "a view of a larger storage": _view,
    "chunks in another order": _in_another_order,
    "files of earlier saves": _with_stale_files,
    "a file behind a link": _linked,
}
"""Nothing in the files says that anything is wrong: torch must be told the same as we are."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", HARMLESS)
def test_what_torch_takes_is_read_as_torch_reads_it(name: str, source: Path, tmp_path: Path) -> None:
    HARMLESS[name](source)
    convert(source, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = by_torch(source, {f"model.{n}": t.shape for n, t in weights().items()})
    assert {f"model.{n}" for n in found} == wanted.keys()
    assert all(torch.equal(wanted[f"model.{n}"], tensor) for n, tensor in found.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("turned", ["head.weight", "embed.weight"])
def test_whole_tensors_that_lie_transposed_are_read_rightly(turned: str, tmp_path: Path) -> None:
    """Their records have the lengths of packed ones: only the strides in the pickle differ."""
    model = {n: _turned(t) if n == turned else t for n, t in weights().items()}
    save({"model": model}, tmp_path / "in", Save())
    lengths = {n: Record.of(tmp_path / "in", f"model.{n}", 0, 0).place.length for n in ("head.weight", "embed.weight")}
    assert len({*lengths.values()}) == 1
    convert(tmp_path / "in", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor, weights()[n]) for n, tensor in found.items())


# Code.


@pytest.mark.parametrize("policy", ["refuse", "keep", "drop"])
@pytest.mark.parametrize("key", [HEAD, "epoch"])
def test_code_in_a_record_does_not_run(key: str, policy: str, source: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    record = Record.of(source, *CHUNK) if key == HEAD else Record.of(source, key)
    record.replace(archive(pickle.dumps(Bomb(canary), protocol=2)))
    if policy == "refuse":
        assert code(source, tmp_path / "out") == "pickle.forbidden_call"
    elif key == HEAD:
        assert code(source, tmp_path / "out", opaque=policy) == "checkpoint.malformed"
    else:
        load_engine().inspect(SourceSpec(url=str(source)))
        assert ("posix.mkdir" in foreign(source, tmp_path / "out", policy)) is (policy == "keep")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists(), "the control: it bites where Python unpickles it"


def foreign(source: Path, target: Path, policy: str) -> str:
    """All that the records of the target hold of strangers, as text; what the manifest lists must be there."""
    convert(source, target, "dcp", opaque=policy, options={"dcp": {"framework": "state-dict"}})
    held = b"".join(p.read_bytes() for p in target.iterdir() if p.suffix == ".distcp").decode("latin-1")
    if policy == "keep":
        for name in json.loads((target / "reshard.json").read_bytes())["foreign_globals"]:
            assert name.rpartition(".")[2] in held, name
    return held.replace("\n", ".")


@pytest.mark.parametrize("policy", ["refuse", "keep", "drop"])
def test_foreign_classes_of_values(policy: str, tmp_path: Path) -> None:
    save(state_dict(loader={"state": Foreign()}), tmp_path / "in", MESH)
    if policy == "refuse":
        assert code(tmp_path / "in", tmp_path / "out") == "pickle.forbidden_build"
    else:
        assert ("Foreign" in foreign(tmp_path / "in", tmp_path / "out", policy)) is (policy == "keep")


def test_foreign_classes_of_hyper_parameters(source: Path, tmp_path: Path) -> None:
    Record.of(source, "optimizer.param_groups.0.lr").replace(torch_bytes(Foreign()))
    assert code(source, tmp_path / "out") == "pickle.forbidden_build"
    result = convert(source, tmp_path / "out", "dcp", opaque="drop")
    assert "param_groups[0].lr" in [entry.path for entry in result.not_carried]


def test_a_step_that_is_no_number(source: Path, tmp_path: Path) -> None:
    key = "optimizer.state.head.weight.step"
    edit_metadata(source / ".metadata", lambda m: _as_value(m, key))
    Record.of(source, key).replace(torch_bytes("three"))
    assert code(source, tmp_path / "out") == "checkpoint.malformed"


def _as_value(metadata: Metadata, key: str) -> None:
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if i.fqn != key}


# Other streams.


def test_compressed_records_are_read(tmp_path: Path) -> None:
    save(state_dict(epoch=3), tmp_path / "in", MESH, _extensions=[ZStandard()])
    convert(tmp_path / "in", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor, weights()[n]) for n, tensor in found.items())


def _frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


FRAMES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a truncated frame": (lambda data: _frame(data)[:-1], "checkpoint.malformed"),
    "two frames": (lambda data: _frame(data) + _frame(b"more"), "checkpoint.malformed"),
    "no frame": (lambda data: data, "checkpoint.malformed"),
    "a frame of nothing": (lambda _: _frame(b""), "source.unsupported"),
    "a frame of another stream": (lambda data: _frame(_frame(data)), "source.unsupported"),
    "a frame of four gigabytes": (lambda _: _zeros(4 << 30), "zip.bomb"),
}


def _zeros(count: int) -> bytes:
    """A frame of so many zeros: 128 KiB are four bytes, which no compressor of the tests has to make."""
    block = 128 << 10
    head = (0xFD2FB528).to_bytes(4, "little") + bytes([0b1100_0000, 0x38]) + count.to_bytes(8, "little")
    blocks = count // block
    one = ((block << 3) | (1 << 1)).to_bytes(3, "little") + b"\0"
    last = ((block << 3) | (1 << 1) | 1).to_bytes(3, "little") + b"\0"
    return head + one * (blocks - 1) + last


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("key", [CHUNK, ("epoch",)], ids=["tensor", "value"])
def test_records_that_are(name: str, key: tuple[Any, ...], tmp_path: Path) -> None:
    save(state_dict(epoch=3), tmp_path / "in", MESH, _extensions=[ZStandard()])
    change, expected = FRAMES[name]
    record = Record.of(tmp_path / "in", *key)
    record.replace(change(zstandard.ZstdDecompressor().decompressobj().decompress(record.bytes())))
    record.move(StorageInfo(NEW_FILE, 0, record.place.length, ["stream.zstd/1"]))
    tracemalloc.start()
    try:
        assert code(tmp_path / "in", tmp_path / "out") == expected
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_compressed_tensors_for_which_the_disk_has_no_room(tmp_path: Path) -> None:
    save(state_dict(epoch=3), tmp_path / "in", MESH, _extensions=[ZStandard()])
    edit_metadata(tmp_path / "in" / ".metadata", _huge)
    assert code(tmp_path / "in", tmp_path / "out") == "storage.no_space"


def _huge(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata[HEAD]
    entry.size = torch.Size((6, 1 << 48))
    entry.chunks = [ChunkStorageMetadata(c.offsets, torch.Size((3, 1 << 48))) for c in entry.chunks]


def test_transforms_of_another_name(source: Path, tmp_path: Path) -> None:
    record = Record.of(source, *CHUNK)
    place = record.place
    record.move(StorageInfo(place.relative_path, place.offset, place.length, ["stream.rot13/1"]))
    assert code(source, tmp_path / "out") == "source.unsupported"


@pytest.mark.parametrize("values", [{}, {"epoch": 3}])
def test_the_serialization_that_torch_cannot_read_back(values: dict[str, Any], tmp_path: Path) -> None:
    model = {"model": {n: Sharded(t, placements(n)) for n, t in weights().items()}, **values}
    save(model, tmp_path / "in", MESH, serialization_format=SerializationFormat.SAFETENSORS)
    assert code(tmp_path / "in", tmp_path / "out") == "source.unsupported"


# Boxes.


def _chunk(key: str, number: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Path], object]:
    """Another box of a chunk, whose record has a tensor of that shape."""

    def change(source: Path) -> None:
        path = source / ".metadata"

        def edit(metadata: Metadata) -> None:
            entry: Any = metadata.state_dict_metadata[key]
            place = metadata.storage_data.pop(MetadataIndex(key, entry.chunks[number].offsets))
            entry.chunks[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            metadata.storage_data[MetadataIndex(key, offsets, number)] = place

        edit_metadata(path, edit)
        Record.of(source, key, *offsets).replace(torch_bytes(_tensor(0, *sizes)))

    return change


def _without_chunk(key: str, number: int) -> Callable[[Path], object]:
    def change(source: Path) -> None:
        def edit(metadata: Metadata) -> None:
            entry: Any = metadata.state_dict_metadata[key]
            del metadata.storage_data[MetadataIndex(key, entry.chunks.pop(number).offsets)]

        edit_metadata(source / ".metadata", edit)

    return change


def _larger(source: Path) -> None:
    def edit(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata[HEAD]
        entry.size = torch.Size((7, 4))

    edit_metadata(source / ".metadata", edit)


BOXES: dict[str, Callable[[Path], object]] = {
    "rows left out": _without_chunk(HEAD, 0),
    "a box left out": _without_chunk(EMBED, 3),
    "all rows left out": lambda source: [_without_chunk(HEAD, 0)(source) for _ in range(2)],
    "rows twice": _chunk(HEAD, 1, (2, 0), (4, 4)),
    "rows too few": _chunk(HEAD, 1, (3, 0), (2, 4)),
    "rows as a box": _chunk(HEAD, 1, (3, 1), (3, 3)),
    "boxes over one another": _chunk(EMBED, 1, (0, 1), (3, 3)),
    "boxes apart": _chunk(EMBED, 1, (0, 3), (3, 1)),
    "a tensor with more rows than it has": _larger,
}


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_boxes_that_do_not_cover_their_tensor_once(name: str, to: str, source: Path, tmp_path: Path) -> None:
    BOXES[name](source)
    assert code(source, tmp_path / "out", to) == "checkpoint.coverage"


# Saves without collectives.


def _alone(state: Mapping[str, Any], directory: Path) -> Path:
    save(state, directory, Save((2, 2), collectives=False))
    return directory


def test_metadata_of_a_rank_that_is_missing(tmp_path: Path) -> None:
    source = _alone(state_dict(), tmp_path / "in")
    (source / "__1.metadata").rename(tmp_path / "kept")
    assert code(source, tmp_path / "out") == "checkpoint.incomplete"
    (tmp_path / "kept").rename(source / "__1.metadata")
    (source / "__3.metadata").unlink()  # the last one: only the boxes that nobody has tell of it
    assert code(source, tmp_path / "out") == "checkpoint.coverage"


def test_metadata_of_ranks_of_two_saves(tmp_path: Path) -> None:
    source = _alone(state_dict(), tmp_path / "in")
    larger = {"model": {"head.weight": Sharded(_tensor(0, 8, 4), ROWS)}}
    _alone(larger, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "__2.metadata", source)
    shutil.copy(tmp_path / "other" / "__2_0.distcp", source)
    assert code(source, tmp_path / "out") == "checkpoint.mixed"


def test_a_tensor_of_one_rank_is_another_value_of_the_next(tmp_path: Path) -> None:
    source = _alone(state_dict(extra=torch.ones(2)), tmp_path / "in")
    _alone(state_dict(extra="none"), tmp_path / "other")
    for name in ("__2.metadata", "__2_0.distcp"):
        shutil.copy(tmp_path / "other" / name, source)
    assert code(source, tmp_path / "out") == "checkpoint.mixed"


def test_replicas_that_differ(tmp_path: Path) -> None:
    source = _alone(state_dict(), tmp_path / "in")
    metadata = read_metadata(source / "__1.metadata")
    place = metadata.storage_data[MetadataIndex(HEAD, (0, 0))]
    data = bytearray((source / place.relative_path).read_bytes())
    record = bytes(data[place.offset : place.offset + place.length])
    at = place.offset + record.index(_tensor(100, 3, 4).numpy().tobytes())
    data[at] ^= 1
    (source / place.relative_path).write_bytes(data)
    assert code(source, tmp_path / "out") == "checkpoint.disagreement"


def test_values_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    source = _alone(state_dict(seed=0), tmp_path / "in")
    _alone(state_dict(seed=1), tmp_path / "other")
    for name in ("__2.metadata", "__2_0.distcp"):
        shutil.copy(tmp_path / "other" / name, source)
    result = convert(source, tmp_path / "out", "dcp")
    assert [entry.path for entry in result.not_carried] == ["seed"]


# What does not belong together.


def _saved(state: Mapping[str, Any], directory: Path) -> Path:
    save(state, directory, MESH)
    return directory


def test_flat_parameters_of_fsdp1(tmp_path: Path) -> None:
    source = _saved({"model": {"block._flat_param": Sharded(_tensor(0, 10), ROWS)}}, tmp_path / "in")
    assert code(source, tmp_path / "out") == "source.unsupported"


def _accelerate(directory: Path, *, optimizer: Mapping[str, Any] | None = None) -> Path:
    whole = state_dict()
    save({"model": whole["model"]}, directory / "pytorch_model_fsdp_0", MESH)
    save({"optimizer": optimizer or whole["optimizer"]}, directory / "optimizer_0", MESH)
    return directory


def test_two_models_of_accelerate(tmp_path: Path) -> None:
    source = _accelerate(tmp_path / "in")
    shutil.copytree(source / "pytorch_model_fsdp_0", source / "pytorch_model_fsdp_1")
    # The second model is nobody's optimizer's: the first one is read, and the second is named.
    result = convert(source, tmp_path / "weights")
    assert "pytorch_model_fsdp_1.model" in [entry.path for entry in result.not_carried]
    convert(source, tmp_path / "out", "dcp")
    assert {d.name for d in (tmp_path / "out").iterdir() if d.is_dir()} >= {"pytorch_model_fsdp_1", "optimizer_0"}


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    other = state_dict()["optimizer"]
    other["state"]["stranger.weight"] = other["state"].pop("head.weight")
    other["param_groups"][0]["params"] = [*other["state"]]
    source = _accelerate(tmp_path / "in", optimizer=other)
    assert code(source, tmp_path / "out") == "checkpoint.incomplete"


def test_states_of_no_param_group(tmp_path: Path) -> None:
    other = state_dict()["optimizer"]
    other["param_groups"][0]["params"].remove("head.weight")
    assert code(_accelerate(tmp_path / "in", optimizer=other), tmp_path / "out") == "checkpoint.malformed"


def test_a_parameter_of_two_groups(tmp_path: Path) -> None:
    other = state_dict()["optimizer"]
    other["param_groups"] *= 2
    assert code(_accelerate(tmp_path / "in", optimizer=other), tmp_path / "out") == "checkpoint.malformed"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_of_another_shape_are_kept_or_named(tmp_path: Path) -> None:
    other = state_dict()["optimizer"]
    other["state"]["head.weight"]["exp_avg"] = Sharded(_tensor(0, 4, 6), ROWS)
    source = _accelerate(tmp_path / "in", optimizer=other)
    assert convert(source, tmp_path / "out", "dcp").not_carried == ()
    key = "optimizer.state.head.weight.exp_avg"
    out = tmp_path / "out" / "optimizer_0"
    one, two = (by_torch(place, {key: torch.Size((4, 6))})[key] for place in (out, source / "optimizer_0"))
    assert torch.equal(one, two)
    named = convert(source, tmp_path / "weights").not_carried
    assert "optimizer.state.*.exp_avg" in [entry.path for entry in named]


def _numbered(optimizer: dict[str, Any], *names: str) -> dict[str, Any]:
    states = {number: optimizer["state"][name] for number, name in enumerate(names)}
    return {"state": states, "param_groups": [{**optimizer["param_groups"][0], "params": [*range(len(names))]}]}


def test_numbers_of_parameters_that_shapes_do_not_tell_apart(tmp_path: Path) -> None:
    whole = state_dict()
    told = {**whole, "optimizer": _numbered(whole["optimizer"], "embed.weight", "head.weight", "norm.weight")}
    order = {"param_order": ["embed.weight", "head.weight", "norm.weight"]}
    assert code(_saved(told, tmp_path / "told"), tmp_path / "out") == "checkpoint.ambiguous"
    convert(tmp_path / "told", tmp_path / "out", "dcp", choices=order)
    for wrong in (["head.weight", "norm.weight"], [*order["param_order"][:2]] * 2, ["a", "b", "c"]):
        refused = code(tmp_path / "told", tmp_path / "no", choices={"param_order": wrong})
        assert refused == "request.invalid", wrong
    # One of two matrices of one shape is frozen: its number may be either's.
    untold = {**whole, "optimizer": _numbered(whole["optimizer"], "head.weight", "norm.weight")}
    assert code(_saved(untold, tmp_path / "untold"), tmp_path / "again") == "checkpoint.ambiguous"
    # Nothing has this shape.
    more = {**whole["optimizer"], "state": {**whole["optimizer"]["state"], "x": {"exp_avg": _tensor(0, 9)}}}
    none = {**whole, "optimizer": _numbered(more, "x")}
    assert code(_saved(none, tmp_path / "none"), tmp_path / "third") == "checkpoint.ambiguous"


@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_half_a_directory_of_accelerate(folder: str, tmp_path: Path) -> None:
    source = _accelerate(tmp_path / "in")
    (source / folder / ".metadata").unlink()
    assert code(source, tmp_path / "out") == "checkpoint.incomplete"


COMPANIONS: dict[str, tuple[bytes, str]] = {
    "scheduler.bin": (torch_bytes(Foreign()), "pickle.forbidden_build"),
    "random_states_0.pkl": (torch_bytes([1, 2]), "checkpoint.malformed"),
    "trainer_state.json": (b"{", "checkpoint.malformed"),
    "custom_checkpoint_0.pkl": (b"no archive", "source.unknown_kind"),
}


@pytest.mark.parametrize("name", COMPANIONS)
def test_files_of_trainers_that_are_no_such_files(name: str, tmp_path: Path) -> None:
    source = _accelerate(tmp_path / "in")
    (source / name).write_bytes(COMPANIONS[name][0])
    assert code(source, tmp_path / "out") == COMPANIONS[name][1]


# Files of the Hugging Face storage writer.


def _shards(directory: Path, *parts: tuple[torch.Tensor, Any]) -> Path:
    directory.mkdir()
    for rank, (tensor, info) in enumerate(parts, start=1):
        metadata = {} if info is None else {"DCP_SHARDING_INFO": info if isinstance(info, str) else json.dumps(info)}
        path = directory / f"shard-{rank:05}-model-00001-of-00001.safetensors"
        save_file({"w": tensor}, path, metadata={"format": "pt", **metadata})
    return directory


def _at(*offsets: Any) -> dict[str, Any]:
    return {"w": {"saved_offsets": list(offsets)}}


TOP, REST = _tensor(0, 2, 3), _tensor(6, 1, 3)
SHARDS: dict[str, tuple[tuple[tuple[torch.Tensor, Any], ...], str]] = {
    "a hole": (((TOP, _at(0, 0)), (REST, _at(3, 0))), "checkpoint.coverage"),
    "rows twice": (((TOP, _at(0, 0)), (REST, _at(1, 0))), "checkpoint.coverage"),
    "the first shard missing": (((REST, _at(2, 0)),), "checkpoint.coverage"),
    "two types": (((TOP, _at(0, 0)), (REST.half(), _at(2, 0))), "checkpoint.mixed"),
    "no offsets": (((TOP, _at(0, 0)), (REST, None)), "checkpoint.malformed"),
    "offsets of no JSON": (((TOP, "{"),), "checkpoint.malformed"),
    "offsets that are not numbers": (((TOP, _at(0, "1")),), "checkpoint.malformed"),
    "negative offsets": (((TOP, _at(-1, 0)),), "checkpoint.malformed"),
    "too few offsets": (((TOP, _at(0)),), "checkpoint.malformed"),
    "offsets of 2^61": (((TOP, _at(1 << 61, 0)),), "checkpoint.coverage"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_with(name: str, tmp_path: Path) -> None:
    parts, expected = SHARDS[name]
    assert code(_shards(tmp_path / "in", *parts), tmp_path / "out", "safetensors") == expected


def test_shards_that_cover_their_tensor(tmp_path: Path) -> None:
    convert(_shards(tmp_path / "in", (REST, _at(2, 0)), (TOP, _at(0, 0))), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], _tensor(0, 3, 3))
