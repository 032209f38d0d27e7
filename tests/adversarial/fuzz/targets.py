"""What is fuzzed: functions of bytes that return, or raise a `ReshardError`; anything else is a find."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from adversarial.corpus import carriers, containers, opcodes as op, safetensors_files
from adversarial.corpus.archives import Ending, archive
from adversarial.corpus.pickle_code import ENTRIES as PAYLOADS
from adversarial.fuzz import distributed, ranks
from house import dcp_stand_ins as dcp, dcp_streams
from house.dcp_mutations import assert_equal
from reshard.choices import OpaquePolicy, TargetFormat
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.containers.safetensors import open_safetensors_file
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.execute.journal import ChunkRecord, UnitRecord
from reshard_engine.execute.sinks.control_objects import ControlObjects
from reshard_engine.formats.dcp_files.metadata.parse import metadata_of, parse_metadata, parts_of_nodes, parts_with_runs
from reshard_engine.formats.registry import writer_of
from reshard_engine.formats.sources import find_checkpoint, read_checkpoint
from reshard_engine.formats.weight_files import read_index
from reshard_engine.integrity import manifest
from reshard_engine.integrity.manifest import parse_manifest
from reshard_engine.operations.inspection import describe
from reshard_engine.pickles import policy
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import PickleLimits
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.pickles.vm import parse_pickle
from reshard_engine.plan.model import Chunk
from reshard_engine.storage.locations import Location
from reshard_engine.testing.stores import MemoryStore

DATA = Path(__file__).parents[2] / "data"
LIMITS = PickleLimits(opcodes=100_000, node_bytes=16 << 20, stream_bytes=1 << 20)
Target = Callable[[bytes], None]


def fuzz_dcp_metadata(data: bytes) -> None:
    """The metadata of a distributed checkpoint: what is read with runs of records is read so without them."""
    try:
        found = parts_with_runs(data, ".metadata", LIMITS)
    except ReshardError:
        parse_metadata(data, ".metadata", limits=LIMITS)
        return
    try:
        assert_equal(found, parts_of_nodes(data, ".metadata", LIMITS))
    except ReshardError as error:
        raise AssertionError("only one of two readers refuses it") from error
    read = metadata_of(found)
    for path in read.files:
        if path.startswith("/") or ".." in path.split("/"):
            raise AssertionError(f"{path!r} lies outside of the directory")


def _stored(name: str, data: bytes) -> SourceFile:
    store = MemoryStore()
    return SourceFile(store, name, (store.put(f"b/{name}", data, metadata={}, if_absent=False),))


def _keep() -> OpaqueLedger:
    return OpaqueLedger(OpaquePolicy.KEEP)


def fuzz_pickle(data: bytes) -> None:
    """Parsed, written, parsed and written again: the second writing is the first."""
    value, _ = parse_pickle(data, _keep(), limits=LIMITS, allow_trailing=True)
    once = emit_pickle(rewrite(value, lambda t: t, lambda f: f), keep_foreign=True)
    twice = emit_pickle(parse_pickle(once, _keep())[0], keep_foreign=True)
    # Bytes and sets are written as calls, and calls are read as calls: from the second writing on nothing changes.
    if emit_pickle(parse_pickle(twice, _keep())[0], keep_foreign=True) != twice:
        raise AssertionError("what was written is not what is read")


def fuzz_zip(data: bytes) -> None:
    """A torch file, and every tensor's extent inside it."""
    file = open_torch_file(_stored("x.pt", data), _keep(), limits=LIMITS)
    for record in file.storages.values():
        if record.offset < 0 or record.length_bytes < 0 or record.offset + record.length_bytes > len(data):
            raise AssertionError("a record outside of its file")


_FILES = (
    (carriers.model_states(), carriers.MODEL),
    (carriers.optim_states(0), carriers.OPTIM[0]),
    (carriers.optim_states(1), carriers.OPTIM[1]),
)
_GOOD = {f"{carriers.TAG}/{name}": file.bytes() for file, name in _FILES} | {"latest": carriers.TAG.encode()}


def _checkpoint(path: str, data: bytes) -> Location:
    store = MemoryStore()
    files = {**_GOOD, path: data}
    for name, content in files.items():
        store.put(f"b/{name}", content, metadata={}, if_absent=False)
    return Location(store, "b", "mem://b")


def fuzz_latest(data: bytes) -> None:
    """A pointer file: the tag that it names lies below the directory."""
    found = find_checkpoint(_checkpoint("latest", data), None)
    if not found.location.path.startswith("b/") or ".." in found.location.path:
        raise AssertionError(f"{found.location.path} is outside of the directory")


def fuzz_checkpoint(data: bytes) -> None:
    """`data.pkl` of one of three files in a checkpoint, up to the layout of a target."""
    which, pickle = data[:1], data[1:]
    file, name = _FILES[which[0] % len(_FILES)] if which else _FILES[0]
    spoilt = carriers.TorchFile(file.entries, file.storages, pickle=pickle)
    location = _checkpoint(f"{carriers.TAG}/{name}", spoilt.bytes())
    checkpoint = read_checkpoint(location, None, OpaqueLedger(OpaquePolicy.DROP))
    describe(checkpoint).model_dump_json()
    request = ConvertRequest(source=SourceSpec(url="/data/in"), target="/data/out", to=TargetFormat.UNIVERSAL)
    request = request.model_copy(update={"opaque": OpaquePolicy.DROP})
    writer_of(TargetFormat.UNIVERSAL).lay_out(checkpoint, request, name="out")


def fuzz_manifest(data: bytes) -> None:
    """`reshard.json` as it is, and with the digest that it should have, which nobody guesses."""
    for text in (data, _sealed(data)):
        with suppress(ReshardError):
            parse_manifest(text)


def _sealed(head: bytes) -> bytes:
    digest = hashlib.sha256(head + manifest._TAIL % manifest._NO_DIGEST).hexdigest()
    return head + manifest._TAIL % digest.encode()


def fuzz_journal(data: bytes) -> None:
    """The objects beside a target: claim, plan, uploads, records of units; a line's CRC-32 is put right."""
    journal = f".out.reshard-{'d' * 16}"
    store = MemoryStore()
    for name in (".out.reshard-claim", f"{journal}/plan.json", f"{journal}/upload-0.json", f"{journal}/unit-0.json"):
        store.put(f"b/{name}", data, metadata={}, if_absent=False)
    control = ControlObjects(store, "b/out")
    reads = (control.claimed_by, lambda: control.stored_plan("d" * 64), lambda: control.uploads(f"b/{journal}"))
    for read in reads:
        with suppress(ReshardError):
            read()
    UnitRecord.from_line(data)
    UnitRecord.from_line(b"%08x %s" % (zlib.crc32(data), data))


def fuzz_safetensors(data: bytes) -> None:
    """A safetensors file, and every tensor inside it."""
    file = open_safetensors_file(_stored("x.safetensors", data))
    for tensor in file.tensors:
        if tensor.offset < 8 or tensor.offset > len(data):
            raise AssertionError("a tensor outside of its file")


def fuzz_index(data: bytes) -> None:
    """An index of sharded weights: it names plain files only."""
    store = MemoryStore()
    info = store.put("b/model.safetensors.index.json", data, metadata={}, if_absent=False)
    for file in read_index(store, info, suffix=".safetensors").names_by_file:
        if "/" in file or "\\" in file or file.startswith("."):
            raise AssertionError(f"{file!r} is not a plain name")


def _archives() -> list[bytes]:
    records = carriers.model_states().records()
    # Without CRC-32s a mutated pickle is still read.
    open_ended = [replace(r, crc=0) for r in records]
    plain = [replace(r, flags=0x800) for r in records]
    return [
        archive(records),
        archive(open_ended),
        archive(plain),
        archive(records, Ending(zip64={})),
        containers.legacy(),
        *(p.read_bytes() for p in sorted(DATA.glob("zero?_tiny/*/*.pt"))),
    ]


def _pickles() -> list[bytes]:
    found = [file.data_pkl() for file, _ in _FILES]
    payloads = [b"\x80\x02" + e.runs[2:] for e in PAYLOADS if e.runs is not None]
    framed = op.stream({"a": [1, 2.5, None, True, b"x", ("y",)], "z": op.ordered({"k": 1 << 70})})
    return [*found, *payloads, framed, containers.legacy()[:200]]


def _manifests() -> list[bytes]:
    sample = {
        "schema_version": manifest.MANIFEST_SCHEMA_VERSION,
        "tool": "reshard 0.1.0",
        "files": [{"path": "a", "size_bytes": 3, "pin": "x", "chunks": [[0, 3, 5]]}],
        "foreign_globals": [],
    }
    return [json.dumps(sample, separators=(",", ":")).encode()[:-1], b"{", json.dumps(sample).encode()]


def _journals() -> list[bytes]:
    record = UnitRecord(3, (ChunkRecord(Chunk(0, 0, 10), 7, "etag"),), ((0, 0, 0, 10, 7),))
    line = record.to_line()
    texts = ({"plan": "d" * 64, "clearing": False}, {"id": "upload"}, {"schema_version": 1, "files": [], "units": []})
    return [line, line[9:], *(json.dumps(t).encode() for t in texts)]


def _indexes() -> list[bytes]:
    whole = {"metadata": {"total_size": 12, "a": "w"}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    return [json.dumps(whole).encode(), b'{"weight_map":{}}']


def _headers() -> list[bytes]:
    tensor, file_of = safetensors_files.tensor, safetensors_files.file_of
    two = {"a": tensor(), "b": tensor(12, 16, ()), "__metadata__": {"format": "pt", "x": "a"}}
    return [file_of({"w": tensor()}), file_of(two, bytes(16)), *(p.read_bytes() for p in DATA.glob("*/*.safetensors"))]


def _latest() -> list[bytes]:
    return [carriers.TAG.encode(), b"../../x", b"a/b", b"\xff\xfe", b"global_step3\r\n"]


def _dcp_metadata() -> list[bytes]:
    chunks = [dcp.chunk((row, 0), (1, 3)) for row in range(4)]
    meta = {"w": dcp.tensor((4, 3), chunks), "s": dcp.tensor((), [dcp.chunk((), ())]), "v": dcp.Bytes()}
    places = {dcp.index("w", (row, 0), row): dcp.place(f"__{row}_0.distcp", row << 30) for row in range(4)}
    places |= {dcp.index("s", (), 0): dcp.place(), dcp.index("v"): dcp.place(transform_descriptors=["stream.zstd/1"])}
    whole = dcp.Metadata(state_dict_metadata=meta, planner_data={"v": ("a", 0)}, storage_data=places, version="1.0.0")
    plain = dcp.dumped(whole)
    items = [
        dcp.Item(index=dcp.index("w", chunk.offsets, None), type=2, bytes_io_data=None, tensor_data=dcp.ItemData(
            chunk=chunk, properties=meta["w"].properties, size=dcp.size(4, 3)))
        for chunk in chunks
    ]  # fmt: skip
    whole.all_local_plans = [items]
    streamed = [dcp_streams.stream(dcp_streams.model(tensors), ranks) for tensors, ranks in ((1, 1), (3, 9))]
    # Without frames, opcodes can be put in anywhere.
    return [plain, plain[:2] + plain[11:], dcp.dumped(whole), *streamed, streamed[1][:2] + streamed[1][11:]]


def words(seeds: list[bytes]) -> list[bytes]:
    """Words of the seeds and of the allow-list, for the fuzzer to put where it likes."""
    found = {w for seed in seeds for w in re.findall(rb"[A-Za-z_][A-Za-z0-9_.]{2,40}", seed)}
    lines = {name.rpartition(".")[0] + "\n" + name.rpartition(".")[2] + "\n" for name in policy._CALLABLE}
    return sorted(found)[:500] + [b"c" + line.encode() for line in sorted(lines)]


TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    "pickle": (fuzz_pickle, _pickles),
    "zip": (fuzz_zip, _archives),
    "checkpoint": (fuzz_checkpoint, lambda: [bytes([i]) + f.data_pkl() for i, (f, _) in enumerate(_FILES)]),
    "safetensors": (fuzz_safetensors, _headers),
    "dcp_metadata": (fuzz_dcp_metadata, _dcp_metadata),
    "dcp": (distributed.fuzz_dcp, distributed.seeds),
    "fsdp_ranks": (ranks.fuzz_fsdp_ranks, ranks.seeds_of_ranks),
    "torch_checkpointing": (ranks.fuzz_items, ranks.seeds_of_items),
    "full_state_dict": (ranks.fuzz_whole_tensors, ranks.seeds_of_whole_tensors),
    "megatron": (ranks.fuzz_megatron, ranks.seeds_of_megatron),
    "index": (fuzz_index, _indexes),
    "latest": (fuzz_latest, _latest),
    "manifest": (fuzz_manifest, _manifests),
    "journal": (fuzz_journal, _journals),
}
"""By name: the function, and its seeds."""
