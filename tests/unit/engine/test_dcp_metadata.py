"""`.metadata` of distributed checkpoints: every form that torch and Megatron write is read, runs or nodes alike."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from house import dcp_stand_ins as d, dcp_streams as streams
from house.dcp_mutations import ROOM, agree, assert_equal, framed, mutated, opcodes
from house.expected import raised
from reshard.errors import SourceError
from reshard_engine.formats.dcp_files.metadata import parse
from reshard_engine.formats.dcp_files.metadata.model import BytesEntry, Metadata
from reshard_engine.formats.dcp_files.metadata.parse import (
    metadata_limits,
    parse_metadata,
    parts_of_nodes,
    parts_with_runs,
)


def parsed(value: Any, *, protocol: int = 4) -> Metadata:
    return parse_metadata(d.dumped(value, protocol=protocol), ".metadata")


def small(**attributes: Any) -> Any:
    """A matrix on two ranks, a number without dimensions, a value."""
    return d.Metadata(
        **{
            "state_dict_metadata": {
                "w": d.tensor((5, 2), [d.chunk((0, 0), (3, 2)), d.chunk((3, 0), (2, 2))]),
                "step": d.tensor((), [d.chunk((), ())], properties=d.properties("int64")),
                "lr": d.Bytes(),
            },
            "planner_data": {"w": ("w",), "step": ("step",), "lr": ("groups", 0, "lr")},
            "storage_data": {
                d.index("lr"): d.place("__0_0.distcp", 0, 1_261),
                d.index("w", (0, 0), 0): d.place("__0_0.distcp", 1_261, 1_577),
                d.index("step", (), 0): d.place("__0_0.distcp", 2_838, 1_577),
                d.index("w", (3, 0), 1): d.place("__1_0.distcp", 0, 1_577),
            },
        }
        | attributes
    )


def test_a_small_checkpoint() -> None:
    found = parsed(small())
    w, step = found.tensors
    assert (w.key, w.dtype.name, w.shape, w.first, w.count) == ("w", "float32", (5, 2), 0, 2)
    assert w.boxes.tolist() == [[[0, 0], [3, 2]], [[3, 0], [2, 2]]]
    assert (step.key, step.dtype.name, step.shape, step.boxes.shape) == ("step", "int64", (), (1, 2, 0))
    assert found.values == (BytesEntry("lr", 0, 0, 1_261),)
    assert found.paths == {"w": ("w",), "step": ("step",), "lr": ("groups", 0, "lr")}
    assert found.files == ("__0_0.distcp", "__1_0.distcp")
    assert (found.file.tolist(), found.offset.tolist()) == ([0, 1, 0], [1_261, 0, 2_838])
    assert found.length.tolist() == [1_577] * 3
    assert not found.transforms
    assert (found.file.dtype, found.offset.dtype, w.boxes.dtype) == (np.int32, np.int64, np.int64)


def _posix(module: str, *parts: str) -> Any:
    return d.called(f"{module}.PosixPath", *parts)


def _storage_meta(**attributes: Any) -> Any:
    return d.StorageMeta(**{"checkpoint_id": None, "save_id": "6e0a", "load_id": None} | attributes)


def _old_properties() -> Any:
    meta = small().state_dict_metadata
    return {key: _with_old(value) for key, value in meta.items()}


def _with_old(value: Any) -> Any:
    if hasattr(value, "properties"):
        value.properties = d.properties(old=True)
    return value


def _named_member(dotted: str, member: str) -> Any:
    owner, _, name = dotted.rpartition(".")
    return d.called("builtins.getattr", d.named(f"{owner}.{name}"), member)


VERSIONS: dict[str, tuple[Callable[[], Any], int]] = {
    "torch 2.1": (lambda: small(state_dict_metadata=_old_properties()), 4),
    "torch 2.3": (small, 4),
    "torch 2.4": (lambda: small(storage_meta=_storage_meta(checkpoint_id=_posix("pathlib", "/", "a"))), 4),
    "torch 2.6": (lambda: small(storage_meta=_storage_meta(checkpoint_id="s3://a/b", modules=[])), 4),
    "torch 2.13": (lambda: small(storage_meta=_storage_meta(modules=["m"]), version="1.0.0"), 4),
    "Python 3.13": (lambda: small(storage_meta=_storage_meta(checkpoint_id=_posix("pathlib._local", "/a/b"))), 4),
    "Python 3.14": (lambda: small(version="1.0.0"), 5),
    "protocol 2": (small, 2),
    "nothing told": (lambda: small(storage_meta=None, version=None), 4),
    "an attribute of a later torch": (lambda: small(something=[1, {"a": 2.5}]), 4),
}
"""By writer: the metadata and the protocol."""


@pytest.mark.parametrize("version", VERSIONS)
def test_versions(version: str) -> None:
    value, protocol = VERSIONS[version]
    data = d.dumped(value(), protocol=protocol)
    found, wanted = parse_metadata(data, ".metadata"), parsed(small())
    assert [t.key for t in found.tensors] == ["w", "step"]
    assert found.paths == wanted.paths
    assert found.offset.tolist() == wanted.offset.tolist()
    assert agree(data) == (protocol >= 4)


def test_members_of_enums_by_name() -> None:
    """Python 3.11.0 to 3.11.3 writes a member as `getattr` of its class."""
    state = (d.dtype("bfloat16"), d.STRIDED, False, _named_member(d.MEMORY_FORMAT, "TORCH_CONTIGUOUS_FORMAT"), False)
    meta = small().state_dict_metadata
    meta["w"].properties = d.Properties(*state)
    assert parsed(small(state_dict_metadata=meta)).tensors[0].dtype.name == "bfloat16"


def test_no_planner_data() -> None:
    assert parsed(small(planner_data=None)).paths is None
    absent = small()
    del absent.planner_data
    assert parsed(absent).paths is None


def test_chunks_are_found_by_name_and_offset() -> None:
    """The index of an entry is a hint, and the order of entries means nothing."""
    value = small()
    value.storage_data = {
        d.index("step", (), 7): d.place("c", 3, 4),
        d.index("w", (3, 0), 0): d.place("b", 2, 3),
        d.index("w", (0, 0), None): d.place("a", 1, 2),
        d.index("lr"): d.place("a", 0, 1),
    }
    found = parsed(value)
    assert [found.files[i] for i in found.file] == ["a", "b", "c"]
    assert found.offset.tolist() == [1, 2, 3]
    assert found.files == ("c", "b", "a")


def test_chunks_without_elements_are_left_out() -> None:
    """FSDP2 writes them for ranks without rows; the ranks share an offset, and one entry survives."""
    chunks = [d.chunk((0,), (1,)), d.chunk((1,), (0,)), d.chunk((1,), (0,)), d.chunk((1,), (0,))]
    storage = {
        d.index("b", (0,), 0): d.place("__0_0.distcp", 5, 6),
        d.index("b", (1,), 1): d.place("__1_0.distcp", 7, 8),
    }
    found = parsed(d.Metadata(state_dict_metadata={"b": d.tensor((1,), chunks)}, storage_data=storage))
    assert found.tensors[0].boxes.tolist() == [[[0], [1]]]
    assert (found.offset.tolist(), found.files) == ([5], ("__0_0.distcp", "__1_0.distcp"))


def test_a_tensor_without_elements() -> None:
    chunks = [d.chunk((0, 0), (0, 4))]
    storage = {d.index("e", (0, 0), 0): d.place()}
    found = parsed(d.Metadata(state_dict_metadata={"e": d.tensor((0, 4), chunks)}, storage_data=storage))
    assert (found.tensors[0].shape, found.tensors[0].count, found.file.tolist()) == ((0, 4), 0, [])


def test_an_empty_checkpoint() -> None:
    found = parsed(d.Metadata(state_dict_metadata={}, planner_data={}, storage_data={}))
    assert (found.tensors, found.values, found.paths, found.files, len(found.offset)) == ((), (), {}, (), 0)


def test_transforms() -> None:
    value = small()
    for number, place in enumerate(value.storage_data.values()):
        place.transform_descriptors = [f"stream.zstd/{number % 2}"] if number != 2 else None
    found = parsed(value)
    assert found.values[0].transforms == ("stream.zstd/0",)
    assert dict(found.transforms) == {0: ("stream.zstd/1",), 1: ("stream.zstd/1",)}
    assert 2 not in found.transforms
    assert len(found.transforms) == 2


def test_a_run_of_compressed_records() -> None:
    ranks = range(200)
    storage = {d.index("w", (r,), r): d.place("a", r, 5, transform_descriptors=[f"stream.{'zstd/1'}"]) for r in ranks}
    chunks = [d.chunk((r,), (1,)) for r in ranks]
    data = d.dumped(d.Metadata(state_dict_metadata={"w": d.tensor((200,), chunks)}, storage_data=storage))
    assert agree(data)
    found = parse_metadata(data, ".metadata")
    assert len(found.transforms) == 200
    assert found.transforms[199] == ("stream.zstd/1",)


def _plans(value: Any, cls: Any, **more: Any) -> list[Any]:
    """The plans of two ranks. Items share their chunks with the tensors, as Megatron makes them."""
    items: list[Any] = []
    kind = d.called(f"{d.PLANNER}.WriteItemType", 2)
    for key, meta in value.state_dict_metadata.items():
        for number, chunk in enumerate(getattr(meta, "chunks", ())):
            data = d.ItemData(chunk=chunk, properties=meta.properties, size=d.Size(meta.size))
            where = d.index(key, chunk.offsets, number)
            items.append(d.Item(index=where, type=kind, bytes_io_data=None, tensor_data=data))
    prefix = d.named(f"{d.FILESYSTEM}._StoragePrefix")(prefix="__0_")
    return [cls(items=items, storage_data=prefix, **more) for _ in "ab"]


@pytest.mark.parametrize("cls", [f"{d.PLANNER}.SavePlan", f"{d.MEGATRON}.MCoreSavePlan"])
def test_plans_of_megatron_are_skipped(cls: str) -> None:
    value = small(planner_data=None)
    value.all_local_plans = _plans(value, d.named(cls), planner_data=None)
    value.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 5)}, "step": {}}
    data = d.dumped(value)
    found = parse_metadata(data, ".metadata")
    assert found.original_shapes == {"w": (2, 5)}
    assert [t.key for t in found.tensors] == ["w", "step"]
    assert agree(data)


def test_runs_of_plan_items_take_no_memory() -> None:
    ranks = range(3_000)
    chunks = [d.chunk((r, 0), (1, 4)) for r in ranks]
    value = d.Metadata(
        state_dict_metadata={"w": d.tensor((3_000, 4), chunks)},
        storage_data={d.index("".join("w"), (r, 0), r): d.place(f"__{r}_0.distcp", 0, 5) for r in ranks},
    )
    value.all_local_plans = _plans(value, d.named(f"{d.PLANNER}.SavePlan"))
    data = d.dumped(value)
    few = replace(ROOM, opcodes=20_000)
    assert_equal(parts_with_runs(data, "m", few), parts_of_nodes(data, "m", ROOM))
    with pytest.raises(SourceError):
        parts_of_nodes(data, "m", few)


# The large streams of the tests and of the benchmark are those of Python's pickler.


def _objects(tensors: list[streams.Sharded], ranks: int) -> Any:
    """The metadata that `streams.stream` writes, as objects: texts are shared as they are after a real run."""
    parts: dict[str, str] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for t in tensors:
        first, second, rest = t.key.split(".", 2)
        paths["".join(list(t.key))] = (parts.setdefault(first, first), parts.setdefault(f"/{second}", second), rest)
    storage: dict[Any, Any] = {}
    for rank in range(ranks):
        path, end = f"__{rank}_0.distcp", 0
        for t in tensors:
            offsets, sizes = t.chunk(rank, ranks)
            length = streams.record_bytes(sizes)
            storage[d.index("".join(list(t.key)), offsets, rank)] = d.place(path, end, length)
            end += length
    meta = {t.key: d.tensor(t.shape, [d.chunk(*t.chunk(r, ranks)) for r in range(ranks)]) for t in tensors}
    return d.Metadata(state_dict_metadata=meta, planner_data=paths, storage_data=storage, version="1.0.0")


ODD = [
    streams.Sharded("app.one.weight", (70_000,)),
    streams.Sharded("app.one.bias", (9, 2, 2, 3)),
    streams.Sharded("app.two.weight", (40, 1, 1, 1, 2)),
    streams.Sharded("app.two.bias", (1 << 33, 3)),
    streams.Sharded("app.two." + 300 * "x", (40, 2)),
    streams.Sharded("app.two.Gewürz", (40, 2)),
]
WORLDS = {
    "one": (streams.model(1), 1),
    "odd": (ODD, 40),
    "wide": (streams.model(4), 1_030),
    "deep": (streams.model(60), 8),
    "whole batches": (streams.model(10), 100),
}


@pytest.mark.parametrize("world", WORLDS)
def test_large_streams_are_those_of_the_pickler(world: str) -> None:
    tensors, ranks = WORLDS[world]
    assert streams.stream(tensors, ranks) == d.dumped(_objects(tensors, ranks))


# Both readers.


@pytest.mark.parametrize("world", WORLDS)
def test_runs_are_read_as_nodes_are(world: str) -> None:
    assert agree(streams.stream(*WORLDS[world]))


def test_runs_need_no_nodes() -> None:
    """5,120 places and chunks of which a node each would take 700,000 opcodes."""
    data = streams.stream(streams.model(5), 1_024)
    few = replace(ROOM, opcodes=10_000)
    assert_equal(parts_with_runs(data, "m", few), parts_of_nodes(data, "m", ROOM))


def test_frames_cut_records_anywhere() -> None:
    data = streams.stream(ODD[:4], 30)
    found = opcodes(data)
    read = [agree(framed(found, Random(seed))) for seed in range(80)]
    assert 0 < read.count(False) < 30  # Frames that end in an opcode.


def _values(random: Random) -> Any:
    """Metadata of any kind, whose records are not all alike."""
    ranks = random.randint(1, 12)
    shapes = [(), (5,), (7, 3), (4, 2, 2, 3), (9, 1, 1)]
    shared = random.random() < 0.3
    meta: dict[str, Any] = {}
    storage: list[tuple[Any, Any]] = []
    for number in range(random.randint(1, 5)):
        tensor = streams.Sharded(f"m.{random.choice('abc')}.{number}", random.choice(shapes))
        chunks = [tensor.chunk(r, ranks) for r in range(ranks)] if tensor.shape else [((), ())]
        meta[tensor.key] = d.tensor(tensor.shape, [d.chunk(*chunk) for chunk in chunks])
        for rank, (offsets, _) in enumerate(chunks):
            more = {"transform_descriptors": [f"stream.zstd/{rank % 2}"]} if random.random() < 0.2 else {}
            key = tensor.key if shared else "".join(list(tensor.key))
            where = random.choice([0, 300, 70_000, 1 << 32, 1 << 40]), random.choice([1, 300, 1 << 20])
            place = d.place(f"__{rank}_0.distcp", *where, **more)
            storage.append((d.index(key, offsets, random.choice([rank, None])), place))
    for number in range(random.randint(0, 3)):
        meta[f"v{number}"] = d.Bytes()
        storage.append((d.index(f"v{number}"), d.place("__0_0.distcp", number, 5)))
    random.shuffle(storage)
    value = d.Metadata(state_dict_metadata=meta, planner_data=None, storage_data=dict(storage))
    if random.random() < 0.3:
        value.all_local_plans = _plans(value, d.named(f"{d.PLANNER}.SavePlan"))
    return value


@given(st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_both_readers_agree_on_anything(random: Random) -> None:
    if random.random() < 0.6:
        whole = d.dumped(_values(random))
    else:
        whole = streams.stream(streams.model(2), random.randint(2, 25))
    assert agree(whole)
    for _ in range(4):
        agree(mutated(whole, random))


# Limits.


def test_limits_follow_the_environment() -> None:
    assert metadata_limits({}).stream_bytes == parse.METADATA_BYTES
    assert metadata_limits({"RESHARD_PICKLE_STREAM_BYTES": "1000"}).stream_bytes == 1_000
    assert metadata_limits({"RESHARD_PICKLE_OPCODES": "77"}).opcodes == 77


def _refused(data: bytes, **limits: int) -> SourceError:
    return raised(SourceError, parse_metadata, data, ".metadata", limits=replace(ROOM, **limits))


def test_a_limit_says_how_to_raise_it() -> None:
    data = d.dumped(small())
    error = _refused(data, stream_bytes=100)
    assert (error.code, error.fix) == ("pickle.too_large", f"set RESHARD_PICKLE_STREAM_BYTES to {len(data)} or more")
    error = _refused(data, opcodes=100)
    assert error.code == "pickle.too_much_work"
    assert "RESHARD_PICKLE_OPCODES" in error.fix
    error = _refused(data, node_bytes=3_000)
    assert error.code == "pickle.too_much_memory"
    assert "RESHARD_PICKLE_NODE_BYTES" in error.fix


def test_a_large_checkpoint_says_what_is_wrong_with_it() -> None:
    """The interpreter of all pickles cannot read it within the limits; the error of the other one is told."""
    value = _objects(streams.model(1), 2_000)
    next(iter(value.state_dict_metadata.values())).size = "large"
    assert _refused(d.dumped(value), opcodes=20_000).code == "checkpoint.malformed"
    value = _objects(streams.model(1), 2_000)
    del value.storage_data[next(iter(value.storage_data))]
    error = _refused(d.dumped(value), opcodes=20_000)
    assert error.code == "checkpoint.incomplete"
    assert "q_proj.weight at (0, 0)" in error.message


# Real files.


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A `.metadata` of one process."""
    torch = pytest.importorskip("torch")
    dcp: Any = pytest.importorskip("torch.distributed.checkpoint")

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "lr": 3.5, "e": torch.zeros(0, 4)}
    state["half"] = torch.zeros(5, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("real") / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)
    return Path(path, ".metadata").read_bytes()


def test_a_real_file_is_read_as_torch_reads_it(real: bytes) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    assert agree(real)
    found, theirs = parse_metadata(real, ".metadata"), pickle.loads(real)
    values = {key for key, value in theirs.state_dict_metadata.items() if isinstance(value, BytesStorageMetadata)}
    assert {entry.key for entry in found.values} == values
    for entry in found.values:
        place = theirs.storage_data[MetadataIndex(entry.key)]
        assert (found.files[entry.file], entry.offset) == (place.relative_path, place.offset)
        assert entry.length == place.length
    for entry in found.tensors:
        meta = theirs.state_dict_metadata[entry.key]
        assert (f"torch.{entry.dtype.name}", entry.shape) == (str(meta.properties.dtype), tuple(meta.size))
        kept = [c for c in meta.chunks if c.sizes.numel()]
        assert entry.boxes.tolist() == [[list(c.offsets), list(c.sizes)] for c in kept]
        for row, chunk in enumerate(kept, entry.first):
            place = theirs.storage_data[MetadataIndex(entry.key, chunk.offsets)]
            assert found.files[found.file[row]] == place.relative_path
            assert (found.offset[row], found.length[row]) == (place.offset, place.length)
    assert found.paths == theirs.planner_data


def test_stand_ins_are_written_as_torch_writes_its_own() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import metadata as m

    filesystem: Any = pytest.importorskip("torch.distributed.checkpoint.filesystem")

    def chunk(offsets: list[int], sizes: list[int]) -> Any:
        return m.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    ours = {
        "w": d.tensor((5, 2), [d.chunk((0, 0), (3, 2)), d.chunk((3, 0), (2, 2))]),
        "s": d.tensor((), [d.chunk((), ())]),
        "v": d.Bytes(),
    }
    properties = [m.TensorProperties(torch.float32), m.TensorProperties(torch.float32)]
    theirs = {
        "w": m.TensorStorageMetadata(properties[0], torch.Size([5, 2]), [chunk([0, 0], [3, 2]), chunk([3, 0], [2, 2])]),
        "s": m.TensorStorageMetadata(properties[1], torch.Size([]), [chunk([], [])]),
        "v": m.BytesStorageMetadata(),
    }
    our_places = {d.index("w", (3, 0), 1): d.place("a", 1, 2), d.index("v"): d.place("b", 3, 4)}
    their_places = {
        m.MetadataIndex("w", torch.Size([3, 0]), 1): filesystem._StorageInfo("a", 1, 2),
        m.MetadataIndex("v"): filesystem._StorageInfo("b", 3, 4),
    }
    meta = d.StorageMeta(checkpoint_id="x", save_id="y", load_id=None, modules=[])
    one = d.Metadata(
        state_dict_metadata=ours, planner_data=None, storage_data=our_places, storage_meta=meta, version="1.0.0"
    )
    other = m.Metadata(theirs, None, their_places, m.StorageMeta("x", "y"), "1.0.0")
    assert d.dumped(one) == pickle.dumps(other, protocol=4)
