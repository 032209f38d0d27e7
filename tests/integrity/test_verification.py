"""The two levels of checking, `reshard verify`, and the digests that both compare."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import struct
import warnings
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from checkpoints import many_small_parameters, write_zero_checkpoint
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

import reshard
from house.requests import asked
from integrity.covered import covered_spans
from reshard.choices import TargetFormat, VerifyLevel, WeightDtype
from reshard.cli.main import app
from reshard.engine import load_engine
from reshard.errors import IntegrityError, JobError, RequestError, ReshardError, SourceError, StorageError
from reshard.models.jobs import ConvertRequest, Progress
from reshard.option import parse_percent
from reshard.options import SourceSpec
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.checks.unit_sums import BlockDigests
from reshard_engine.execute.sinks.local import LocalChunkFile
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.integrity.checksums import (
    BLOCK_BYTES,
    RecordReads,
    TensorDigests,
    TensorStream,
    blocks_beginning_in,
    tensor_digest,
)
from reshard_engine.integrity.manifest import Manifest, parse_manifest
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage import local_writes
from reshard_engine.storage.locations import serving
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.testing.stores import MemoryStore
from reshard_worker.settings import WorkerSettings

DATA = Path(__file__).parent.parent / "data"


def request_for(target: Path | str, **options: Any) -> ConvertRequest:
    options = {"to": TargetFormat.UNIVERSAL, "part_bytes": 4 << 10, **options}
    source = options.pop("source", DATA / "zero2_tiny")
    return asked(source=SourceSpec(url=str(source)), target=str(target), **options)


def manifest_of(target: Path) -> Manifest:
    return parse_manifest((target / "reshard.json").read_bytes())


# -- digests --------------------------------------------------------------------------------------------


def plain_digest(data: bytes) -> str:
    """The documented definition, written down once more."""
    blocks = [data[at : at + 262_144] for at in range(0, len(data), 262_144)]
    return xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_64_intdigest(b).to_bytes(8, "little") for b in blocks))


@given(
    size=st.integers(0, 3 * BLOCK_BYTES + 5),
    cuts=st.lists(st.integers(0, 3 * BLOCK_BYTES + 5), max_size=12),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_digest_does_not_depend_on_how_the_bytes_arrive(size: int, cuts: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    data = random.bytes(size)
    edges = sorted({0, size, *(min(c, size) for c in cuts)})
    pieces = list(pairwise(edges))
    random.shuffle(pieces)
    stream = TensorStream()
    for begin, end in pieces:
        stream.feed(0, "uint8", size, begin=int(begin), data=memoryview(data)[int(begin) : int(end)])
    assert stream.digests.digest(0, "uint8", size) == plain_digest(data)


@given(st.lists(st.integers(0, 10 * BLOCK_BYTES), min_size=1, max_size=20))
def test_units_that_tile_a_tensor_tile_its_blocks(cuts: list[int]) -> None:
    edges = sorted({0, *cuts})
    runs = [blocks_beginning_in(a, b) for a, b in pairwise(edges)]
    assert [n for run in runs for n in run] == list(range(-(-edges[-1] // BLOCK_BYTES)))


def test_a_tensor_with_missing_blocks_has_no_digest() -> None:
    assert TensorDigests().digest(0, "uint8", 1) is None
    assert TensorDigests().digest(0, "uint8", 0) == tensor_digest(b"")


def test_digests_of_tensors_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    engine = load_engine()
    engine.convert(request_for(tmp_path / "universal", part_bytes=1 << 10))
    engine.convert(request_for(tmp_path / "torch", to=TargetFormat.TORCH))
    engine.convert(request_for(tmp_path / "shards", to=TargetFormat.SAFETENSORS, max_shard_bytes=1_000))
    found = [
        {t.fqn: t.xxh3 for t in manifest_of(tmp_path / name).tensors if t.state == "fp32"}
        for name in ("universal", "torch", "shards")
    ]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) > 5


def test_digests_are_those_of_the_elements(tmp_path: Path) -> None:
    load_engine().convert(request_for(tmp_path / "out", to=TargetFormat.SAFETENSORS, dtype=WeightDtype.BF16))
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors = manifest_of(tmp_path / "out").tensors
    assert {t.fqn for t in tensors} == set(header) - {"__metadata__"}
    for tensor in tensors:
        low, high = header[tensor.fqn]["data_offsets"]
        assert tensor.xxh3 == plain_digest(data[start + low : start + high])


# -- levels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 7])
def test_bytes_that_change_after_their_digests_were_taken(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor or a disk that lies: damaged between digest and write, found by `full`, in either sink."""
    store = MemoryStore()
    where = ((LocalChunkFile, "put", str(tmp_path / "out")), (ObjectSink, "write", "mem://bucket/out"))
    for kind, name, target in where:
        write, count = getattr(kind, name), iter(range(10_000))

        def lying(self: Any, at: Any, data: memoryview, *rest: Any, write: Any = write, count: Any = count) -> Any:
            if next(count) % every == 0 and len(data):
                damaged = bytearray(data)
                damaged[len(damaged) // 2] ^= 16
                data = memoryview(damaged)
            return write(self, at, data, *rest)

        with serving("mem", store):
            with monkeypatch.context() as patch:
                patch.setattr(kind, name, lying)
                with pytest.raises(ReshardError) as caught:
                    load_engine().convert(request_for(target, verify=VerifyLevel.FULL))
            # A store compares what arrives with the CRC-32 that was taken before, and does not keep it.
            assert caught.value.code == ("integrity.mismatch" if kind is LocalChunkFile else "storage.unavailable")
            assert kind is ObjectSink or not (tmp_path / "out").exists()
            assert not any(p.endswith(("reshard.json", "_states.pt")) for p in store.snapshot())
            load_engine().convert(request_for(target, verify=VerifyLevel.FULL))
            assert load_engine().verify(target).ok


def test_full_says_what_it_read(tmp_path: Path) -> None:
    result = load_engine().convert(request_for(tmp_path / "out", verify=VerifyLevel.FULL))
    manifest = manifest_of(tmp_path / "out")
    assert result.verification is manifest.verification is VerifyLevel.FULL
    assert all(f.sha256 for f in manifest.files)
    assert all(s.sha256 and s.directory_sha256 for s in manifest.sources)
    assert all(s.uncovered_bytes == sum(n for _, n in s.uncovered) < s.size_bytes for s in manifest.sources)
    assert manifest.uncovered == ()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize(
    "shapes", [[(0,), (4,)], [(4,), (0,)], [(0,), (3, 0), (2, 3), (0, 5), (7,)]], ids=["first", "last", "several"]
)
def test_full_tells_tensors_without_elements_from_those_behind_them(
    to: str, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Both begin at one offset: the digest of the next tensor was compared with that of no bytes."""
    tensors = {f"t{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    target = tmp_path / "out"
    load_engine().convert(request_for(target, source=tmp_path / "source", to=to, verify=VerifyLevel.FULL))
    if to == "dcp":
        loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        keys = FileSystemReader(target).read_metadata().state_dict_metadata
        asked_for = {key: loaded[key.rpartition(".")[2]] for key in keys}
        dcp.load(asked_for, checkpoint_id=target, no_dist=True)
    elif to == "torch":
        loaded = torch.load(target / "pytorch_model.bin", weights_only=True)
    else:
        loaded = load_file(target / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with reshard.open_layout(tmp_path / "source", to=to, exact_crcs=True) as layout:
        for file in layout.files:
            if file.path != "reshard.json" and not file.path.endswith(".metadata"):
                assert layout.read(file.path) == (target / file.path).read_bytes()


def test_a_finished_target_is_read_when_full_is_asked_for_later(tmp_path: Path) -> None:
    engine, target = load_engine(), tmp_path / "out"
    engine.convert(request_for(target, to=TargetFormat.SAFETENSORS))
    again = engine.convert(request_for(target, to=TargetFormat.SAFETENSORS, verify=VerifyLevel.FULL))
    assert again.already_done
    path = target / "model.safetensors"
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert engine.convert(request_for(target, to=TargetFormat.SAFETENSORS)).already_done
    with pytest.raises(IntegrityError, match="damaged"):
        engine.convert(request_for(target, to=TargetFormat.SAFETENSORS, verify=VerifyLevel.FULL))


def flip_quietly(path: Path, at: int) -> None:
    """Flip a bit as a disk does: size and times stay."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("level", list(VerifyLevel))
def test_overwrite_repairs_a_damaged_target(level: VerifyLevel, tmp_path: Path) -> None:
    engine, target = load_engine(), tmp_path / "out"
    engine.convert(request_for(target, to=TargetFormat.SAFETENSORS))
    flip_quietly(target / "model.safetensors", -1)
    again = engine.convert(request_for(target, to=TargetFormat.SAFETENSORS, overwrite=True, verify=level))
    assert not again.already_done
    assert engine.verify(str(target)).ok


def test_full_reads_the_source_of_a_finished_target_too(tmp_path: Path) -> None:
    source = shutil.copytree(DATA / "zero2_tiny", tmp_path / "source")
    engine, target = load_engine(), tmp_path / "out"
    path = source / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    offset, length = covered_spans(path)[-1]
    flip_quietly(path, covered_spans(path)[1][0])
    assert length + offset < path.stat().st_size
    engine.convert(request_for(target, source=source))
    with pytest.raises(SourceError) as caught:
        engine.convert(request_for(target, source=source, verify=VerifyLevel.FULL))
    assert caught.value.code == "zip.crc"


# -- the source's own checksums, compared while it is read ----------------------------------------------

ZERO_FILE = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def records_of_tensors(path: Path, *, least_bytes: int = 17) -> list[tuple[int, int]]:
    """(offset, length) of the records of tensors, by default of those that are not read with the metadata."""
    with zipfile.ZipFile(path) as archive:
        return [
            (at, info.file_size)
            for info in archive.infolist()
            if "/data/" in info.filename and info.file_size >= least_bytes
            for at in [data_offset(path, info)]
        ]


def data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + name + extra


def damaged_source(directory: Path, record: int, byte: int) -> Path:
    source = shutil.copytree(DATA / "zero2_tiny", directory)
    path = source / "global_step3" / ZERO_FILE
    offset, length = records_of_tensors(path)[record]
    flip_quietly(path, offset + byte % length)
    return source


@pytest.mark.parametrize(("record", "byte"), [(0, 0), (0, -1), (1, 77), (-1, -1)])
@pytest.mark.parametrize("to", [TargetFormat.ZERO, TargetFormat.UNIVERSAL])
def test_one_flipped_byte_of_a_source_ends_the_conversion(
    to: TargetFormat, record: int, byte: int, tmp_path: Path
) -> None:
    source = damaged_source(tmp_path / "source", record, byte)
    options: dict[str, Any] = {"dp": 3} if to is TargetFormat.ZERO else {}
    request = request_for(tmp_path / "out", source=source, to=to, **options)
    # The second attempt finds what the first one has written, and must not bless it.
    for _ in range(2):
        with pytest.raises(SourceError, match=f"1 record .*{ZERO_FILE}") as caught:
            load_engine().convert(request)
        assert caught.value.code == "zip.crc"
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", [TargetFormat.SAFETENSORS, TargetFormat.TORCH])
def test_a_damaged_record_that_a_small_target_takes_in_part_ends_the_conversion(
    to: TargetFormat, tmp_path: Path
) -> None:
    """A small target has no units but the last ones, and the tensor leaves 12 KB of its storage out."""
    place = tmp_path / "part.pt"
    torch.save({"a": torch.arange(300_000.0)[:297_000]}, place)
    offset, length = records_of_tensors(place)[0]
    flip_quietly(place, offset + length // 2)
    for _ in range(2):
        with pytest.raises(SourceError) as caught:
            reshard.convert(place, tmp_path / "out", to=to, progress=False)
        assert caught.value.code == "zip.crc"
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["torch_save", "dcp"])
def test_a_damaged_step_count_or_scalar_ends_the_conversion(to: str, tmp_path: Path) -> None:
    """Records of a few bytes: the steps of Adam are read with the metadata, a scalar buffer with the tensors."""
    model = torch.nn.BatchNorm1d(3)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    adam.step()
    place = tmp_path / "small.pt"
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, place)
    small = [(offset, length) for offset, length in records_of_tensors(place, least_bytes=1) if length <= 8]
    assert len(small) == 3
    checks = reshard.convert(place, tmp_path / "whole", to=to, progress=False).source_check
    assert checks is not None
    assert checks.matching == checks.records == len(records_of_tensors(place, least_bytes=1))
    whole = place.read_bytes()
    for offset, length in small:
        flip_quietly(place, offset + length - 1)
        with pytest.raises(SourceError) as caught:
            reshard.convert(place, tmp_path / "out", to=to, progress=False)
        assert caught.value.code == "zip.crc"
        assert not (tmp_path / "out").exists()
        place.write_bytes(whole)


@pytest.fixture(scope="module")
def dcp_save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save with large and equal chunks, a transposed tensor, one-element tensors and an object that has a tensor."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.Linear(70, 70), torch.nn.BatchNorm1d(70))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 70)).sum().backward()
    adam.step()
    place = tmp_path_factory.mktemp("dcp") / "save"
    weights, optimizer = get_state_dict(model, adam)
    state = {
        "model": weights,
        "optim": optimizer,
        "transposed": torch.arange(600.0).reshape(20, 30).t(),
        "history": {"losses": (torch.arange(500.0),)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process, as wanted
        dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def records_of_dcp(save: Path) -> list[tuple[Path, int, int]]:
    """(file, offset, length) of the records of tensors of a save."""
    import io
    import pickle

    rows = pickle.loads((save / ".metadata").read_bytes()).storage_data.values()  # what torch wrote for this test
    found = []
    for row in rows:
        path = save / row.relative_path
        archive = path.read_bytes()[row.offset :][: row.length]
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            for info in opened.infolist():
                if "/data/" in info.filename and info.file_size:
                    name, extra = struct.unpack_from("<HH", archive, info.header_offset + 26)
                    found.append((path, row.offset + info.header_offset + 30 + name + extra, info.file_size))
    return sorted(found)


@pytest.mark.parametrize("to", ["dcp", "torch_save"])
def test_a_damaged_record_of_a_dcp_save_ends_the_conversion(to: str, dcp_save: Path, tmp_path: Path) -> None:
    records = records_of_dcp(dcp_save)
    sizes = [length for _, _, length in records]
    assert min(sizes) <= 8
    assert max(sizes) == 4 * 70 * 70
    check = reshard.convert(dcp_save, tmp_path / "whole", to=to, progress=False).source_check
    assert check is not None
    assert check.matching == check.records == len(records)
    for path, offset, length in records:
        for at in (offset, offset + length - 1):
            damaged = shutil.copytree(dcp_save, tmp_path / "damaged")
            flip_quietly(damaged / path.name, at)
            with pytest.raises(SourceError) as caught:
                reshard.convert(damaged, tmp_path / "out", to=to, progress=False)
            assert caught.value.code == "zip.crc", (path.name, at)
            assert not (tmp_path / "out").exists()
            shutil.rmtree(damaged)


def test_a_damaged_step_leaves_all_but_the_training_state(dcp_save: Path, tmp_path: Path) -> None:
    """A step of Adam is read with the metadata: it is named, and weights can still be rescued."""
    steps = [(path, offset) for path, offset, length in records_of_dcp(dcp_save) if length == 4]
    assert len(steps) >= 4
    damaged = shutil.copytree(dcp_save, tmp_path / "damaged")
    flip_quietly(damaged / steps[0][0].name, steps[0][1])
    options: dict[str, Any] = {"progress": False, "model_key": "model"}
    reshard.convert(dcp_save, tmp_path / "whole", to="safetensors", **options)
    reshard.convert(damaged, tmp_path / "weights", to="safetensors", **options)
    weights = "model.safetensors"
    assert (tmp_path / "weights" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    assert reshard.inspect(damaged).format == reshard.inspect(dcp_save).format
    (note,) = [n for n in reshard.fingerprint(damaged, progress=False).notes if "CRC-32" in n]
    assert note.startswith("1 record of the source does not match the CRC-32 in the archive: ")
    with pytest.raises(SourceError) as caught:
        reshard.convert(damaged, tmp_path / "training", to="dcp", progress=False)
    assert caught.value.code == "zip.crc"
    with reshard.open_layout(damaged, to="dcp", compare=False) as layout:
        with pytest.raises(SourceError) as read:
            layout.read(layout.files[0].path)
        assert read.value.code == "zip.crc"


def test_a_damaged_descriptor_of_a_dcp_save_ends_the_conversion(dcp_save: Path, tmp_path: Path) -> None:
    """The CRC-32 of a chunk is read from the bytes after it, which may be the damaged ones."""
    for path, offset, length in records_of_dcp(dcp_save)[:6]:
        for at in (offset + length, offset + length + 7):
            damaged = shutil.copytree(dcp_save, tmp_path / "damaged")
            flip_quietly(damaged / path.name, at)
            with pytest.raises(SourceError) as caught:
                reshard.convert(damaged, tmp_path / "out", to="torch_save", progress=False)
            assert caught.value.code.startswith("zip."), (path.name, at)
            shutil.rmtree(damaged)


@pytest.mark.parametrize(("record", "byte"), [(0, 0), (0, -1), (-1, -1)])
def test_the_digests_of_a_damaged_source_name_its_damage(record: int, byte: int, tmp_path: Path) -> None:
    source = damaged_source(tmp_path / "source", record, byte)
    report = reshard.fingerprint(source, progress=False)
    assert report.digest != reshard.fingerprint(DATA / "zero2_tiny", progress=False).digest
    assert any(
        f"1 record of the source does not match the CRC-32 in the archive: {ZERO_FILE}" in n for n in report.notes
    )
    assert not any("CRC-32" in n for n in reshard.fingerprint(DATA / "zero2_tiny", progress=False).notes)


def test_files_that_are_never_written_compare_records(tmp_path: Path) -> None:
    place = tmp_path / "model.pt"
    torch.save({"a": torch.arange(300_000.0), "b": torch.ones(3, 5)}, place)
    for offset, length in records_of_tensors(place):
        whole = place.read_bytes()
        flip_quietly(place, offset + length // 2)
        with reshard.open_layout(place, to="safetensors") as layout, pytest.raises(SourceError) as read:
            layout.read("model.safetensors")
        assert read.value.code == "zip.crc"
        place.write_bytes(whole)


def test_an_attempt_that_resumes_reads_the_rest_of_its_records(tmp_path: Path) -> None:
    """The units of a damaged record are finished before the process is stopped; only the next attempt can see it."""
    engine = load_engine()
    stops = iter([False] * 4)
    request = request_for(tmp_path / "out", source=damaged_source(tmp_path / "source", 0, 0), part_bytes=1 << 10)
    with pytest.raises(ReshardError) as stopped:
        engine.convert(request.model_copy(update={"threads": 1}), should_stop=lambda: next(stops, True))
    assert stopped.value.code in {"job.cancelled", "zip.crc"}
    with pytest.raises(SourceError) as caught:
        engine.convert(request)
    assert caught.value.code == "zip.crc"


def test_the_result_says_what_was_compared(tmp_path: Path) -> None:
    result = load_engine().convert(request_for(tmp_path / "out"))
    check = result.source_check
    assert check is not None
    assert check.records is not None
    assert 0 < check.matching <= check.records
    assert check.in_part == 0
    assert check.matching_bytes + check.without_crc_bytes == check.read_bytes
    assert f"{check.matching} of {check.records} records were compared with the CRC-32 in the archive" in str(check)
    ran = CliRunner().invoke(
        app, ["convert", str(DATA / "zero2_tiny"), str(tmp_path / "again"), "--to", "universal", "--verify", "full"]
    )
    assert ran.exit_code == 0, ran.output
    assert "target verified" in ran.stderr
    assert "source: every record with a CRC-32 matches" in ran.stderr


def test_a_writer_without_checksums_is_not_damage(tmp_path: Path) -> None:
    """torch writes 0 for all records, or only for those whose data is filled in later."""
    state = {"a": torch.arange(5_000.0), "b": torch.ones(40, 50)}
    without, later = (tmp_path / name / "pytorch_model.bin" for name in ("without", "later"))
    without.parent.mkdir()
    later.parent.mkdir()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save(state, without)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    to = TargetFormat.SAFETENSORS
    result = load_engine().convert(request_for(tmp_path / "a", source=without.parent, to=to))
    assert str(result.source_check) == "source: not checked, its files store no CRC-32"
    with torch.serialization.skip_data():
        torch.save(state, later)
    with zipfile.ZipFile(later) as archive, later.open("r+b") as file:
        for info in archive.infolist():
            if "/data/" in info.filename:
                file.seek(data_offset(later, info))
                file.write(b"\x3f" * info.file_size)
    load_engine().convert(request_for(tmp_path / "b", source=later.parent, to=to))


@given(data=st.data(), size=st.integers(1, 400))
def test_pieces_in_any_order_have_the_sum_of_the_record(data: st.DataObject, size: int) -> None:
    content = np.random.default_rng(size).bytes(size + 20)
    expected = zlib.crc32(content[7 : 7 + size])
    reads = RecordReads([np.array([[7], [size], [expected]], dtype=np.int64)])
    pieces = data.draw(st.lists(st.tuples(st.integers(0, size + 20), st.integers(0, size + 20)), max_size=20))
    for low, high in map(sorted, pieces):
        reads.add(0, low, memoryview(content)[low:high])
    seen = {at for low, high in map(sorted, pieces) for at in range(max(low, 7), min(high, 7 + size))}
    assert reads.matching_bytes + reads.in_part_bytes == len(seen)
    for _, low, high in list(reads.unread(most_bytes=lambda length: length)):
        assert not seen & set(range(low, high))
        reads.add(0, low, memoryview(content)[low:high])
    assert (reads.matching, reads.in_part, reads.damaged) == (bool(seen), 0, [])


def test_records_in_more_pieces_than_are_kept_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard_engine.integrity.checksums._MOST_SPANS", 4)
    reads = RecordReads([np.array([[0], [100], [1]], dtype=np.int64)])
    for at in range(0, 100, 2):
        reads.add(0, at, memoryview(b"x"))
    assert (reads.in_part, reads.matching, reads.damaged) == (1, 0, [])


def test_a_source_that_was_read_wrong_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store or a memory that lies for one read: its checksums fit afterwards, the tensor does not."""
    read_into, lied = SourceFile.read_into, []

    def lying(self: SourceFile, offset: int, buffer: memoryview) -> None:
        read_into(self, offset, buffer)
        if "running" in phases and not lied and "optim" in self.name:
            lied.append(offset)
            buffer[0] ^= 1

    phases: list[str] = []
    request = request_for(tmp_path / "out", verify=VerifyLevel.FULL)
    with monkeypatch.context() as patch:
        patch.setattr(SourceFile, "read_into", lying)
        patch.setattr(RecordReads, "add", lambda *_: None)  # which would find it first
        with pytest.raises(IntegrityError, match="read again"):
            load_engine().convert(request, on_progress=lambda p: phases.append(p.phase))
    assert lied
    load_engine().convert(request)
    clean = load_engine().convert(request_for(tmp_path / "clean"))
    for file in clean.files:
        assert (tmp_path / "out" / file.path).read_bytes() == (tmp_path / "clean" / file.path).read_bytes()


def test_bytes_that_change_between_digest_and_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CRC-32 is of the damaged bytes, so that the journal believes them: the next run writes them anew."""
    add, flipped = BlockDigests.add, []

    def lying(self: BlockDigests, item: Any, data: Any) -> None:
        add(self, item, data)
        for body in item.file.template.bodies_in(item.begin, item.begin + item.length_bytes):
            if not flipped and body.offset >= item.begin:
                flipped.append(item)
                data[body.offset - item.begin] ^= 1

    request = request_for(tmp_path / "out", verify=VerifyLevel.FULL, to=TargetFormat.SAFETENSORS)
    with monkeypatch.context() as patch:
        patch.setattr(BlockDigests, "add", lying)
        with pytest.raises(IntegrityError):
            load_engine().convert(request)
    assert flipped
    load_engine().convert(request)
    assert load_engine().verify(str(tmp_path / "out")).ok


def test_a_sync_that_fails_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def syncfs(_descriptor: int) -> int:
            ctypes.set_errno(errno.EIO)
            return -1

    request = request_for(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(local_writes, "LIBC", Library)
        with pytest.raises(StorageError):
            load_engine().convert(request)
    assert not (tmp_path / "out").exists()
    load_engine().convert(request)
    assert load_engine().verify(str(tmp_path / "out")).ok


def test_full_can_be_stopped(tmp_path: Path) -> None:
    phases: list[str] = []

    def on_progress(progress: Progress) -> None:
        phases.append(progress.phase)

    with pytest.raises(JobError, match="stopped"):
        Conversion.prepare(request_for(tmp_path / "out", verify=VerifyLevel.FULL)).run(
            on_progress=on_progress, should_stop=lambda: "verifying" in phases
        )
    assert not (tmp_path / "out").exists()


class _CountedReads(MemoryStore):
    """Counts the reads of the source."""

    reads = 0

    def read_into(self, info: ObjectInfo, begin: int, memory: memoryview) -> None:
        """As `MemoryStore.read_into`, counted."""
        type(self).reads += info.path.startswith("lab/save/")
        super().read_into(info, begin, memory)


def test_full_reads_many_small_tensors_together(tmp_path: Path) -> None:
    """A tensor of a stage-3 source lies on every rank: gathered one by one, each took a read of every file."""
    parameters = many_small_parameters(300, size=9)
    tag = write_zero_checkpoint(tmp_path / "save", parameters, stage=3, ranks=12)
    reads: dict[VerifyLevel, int] = {}
    for level in VerifyLevel:
        store = _CountedReads()
        for path in tag.iterdir():
            store.put(f"lab/save/{path.name}", path.read_bytes(), metadata={}, if_absent=True)
        _CountedReads.reads = 0
        with serving("mem", store):
            source = SourceSpec(url="mem://lab/save")
            request = ConvertRequest(source=source, target="mem://lab/out", to=TargetFormat.UNIVERSAL, verify=level)
            load_engine().convert(request)
        reads[level] = _CountedReads.reads
    # The checksums of the containers, the first gathering and the second.
    assert reads[VerifyLevel.FULL] <= 3 * reads[VerifyLevel.DEFAULT], reads


def test_the_operator_may_ask_for_full() -> None:
    assert WorkerSettings.from_env({"RESHARD_VERIFY": "full"}).verify is VerifyLevel.FULL
    assert WorkerSettings.from_env({}).verify is VerifyLevel.DEFAULT


# -- reshard verify -------------------------------------------------------------------------------------


def test_a_sample_is_labelled_and_finds_what_it_reads(tmp_path: Path) -> None:
    engine, target = load_engine(), tmp_path / "out"
    engine.convert(request_for(target))
    report = engine.verify(str(target), sample=0.25)
    total = sum(f.size_bytes for f in manifest_of(target).files)
    assert report.ok
    assert report.sampled == 0.25
    assert report.tensors == 0
    assert 0.25 * total <= report.read_bytes < total
    shown = CliRunner().invoke(app, ["verify", str(target), "--sample", "25%"])
    assert shown.stdout.startswith("sampled: ")
    assert "the rest was not read" in shown.stdout
    for path in target.rglob("*.pt"):
        damaged = bytearray(path.read_bytes())
        damaged[::50] = bytes(b ^ 1 for b in damaged[::50])
        path.write_bytes(damaged)
    assert not engine.verify(str(target), sample=0.01).ok
    for text in ("0", "0%", "101%", "0.5", "1", "-2%", "nan%", ""):
        with pytest.raises(RequestError):
            parse_percent(text)


def test_what_is_missing_shorter_or_more_is_named(tmp_path: Path) -> None:
    engine, target = load_engine(), tmp_path / "out"
    engine.convert(request_for(target))
    (target / "zero" / "gain" / "fp32.pt").unlink()
    (target / "zero" / "optimizer_state.pt").write_bytes(b"short")
    (target / "stranger").write_bytes(b"")
    (tmp_path / "latest_universal").write_text("nowhere")
    problems = {p.path: p.problem for p in engine.verify(str(target)).problems}
    assert set(problems) == {"zero/gain/fp32.pt", "zero/optimizer_state.pt", "stranger", "latest_universal"}
    sampled = {p.path for p in engine.verify(str(target), sample=1).problems}
    assert sampled == set(problems)


def test_every_damaged_range_of_a_tensor_names_it(tmp_path: Path) -> None:
    engine, target = load_engine(), tmp_path / "out"
    engine.convert(request_for(target, to=TargetFormat.SAFETENSORS, part_bytes=1 << 10))
    spans = {t.fqn: (t.extents[0][1], t.extents[0][1] + t.extents[0][3] - 1) for t in manifest_of(target).tensors}
    name = next(fqn for fqn, (first, last) in spans.items() if first >> 10 != last >> 10)
    for at in spans[name]:
        flip_quietly(target / "model.safetensors", at)
    assert [p.tensor for p in engine.verify(str(target)).problems] == [name] * 2


@pytest.mark.parametrize("extent", [(), ((7, 0, 0, 4),), ((0, 0, 0, 1 << 40),), ((0, -1, 0, 4),), ((0, 0, 4, 0),)])
def test_manifests_that_no_writer_makes(extent: tuple[tuple[int, int, int, int], ...], tmp_path: Path) -> None:
    target = tmp_path / "out"
    load_engine().convert(request_for(target, to=TargetFormat.SAFETENSORS))
    manifest = manifest_of(target)
    odd = manifest.tensors[0].model_copy(update={"extents": extent})
    with pytest.raises(IntegrityError, match="contradicts"):
        parse_manifest(manifest.model_copy(update={"tensors": (odd,)}).to_bytes())
    with pytest.raises(IntegrityError, match="contradicts"):
        parse_manifest(manifest.model_copy(update={"pointer": "a\0b"}).to_bytes())


def test_source_names_that_are_no_text(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    load_engine().convert(request_for(weights, to=TargetFormat.SAFETENSORS))
    (weights / "model.safetensors").rename(weights / os.fsdecode(b"m\xff.safetensors"))
    load_engine().convert(request_for(tmp_path / "out", source=weights, to=TargetFormat.TORCH, verify=VerifyLevel.FULL))
    assert load_engine().verify(str(tmp_path / "out")).ok


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    load_engine().convert(request_for(target))
    other = manifest_of(target).model_copy(update={"schema_version": 99})
    with pytest.raises(IntegrityError, match="schema version 99"):
        parse_manifest(other.to_bytes())
    for data in (b"", b"{}", b'{"schema_version":1}\n', other.to_bytes()[:-1], other.to_bytes() + b" "):
        with pytest.raises(IntegrityError, match="damaged"):
            parse_manifest(data)
