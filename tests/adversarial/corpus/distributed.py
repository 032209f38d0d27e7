"""Distributed checkpoints of PyTorch: metadata that lie, records that are others, values that would run something.

The smallest one that every command reads: FSDP on two ranks, two parameters, Adam. Its metadata are pickled by Python
with stand-ins for torch's classes, its records are the archives of the other entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adversarial.corpus import archives, opcodes as op
from adversarial.corpus.carriers import Build, f32, floats
from adversarial.corpus.entry import OK, Entry
from adversarial.corpus.pickle_code import CALL, COMMAND, GLOBAL, SYSTEM
from house import dcp_stand_ins as dcp

_INCOMPLETE, _MALFORMED, _COVERAGE = "checkpoint.incomplete", "checkpoint.malformed", "checkpoint.coverage"
_EXTENT, _UNSUPPORTED = "tensor.bad_extent", "source.unsupported"
FILES = ("__0_0.distcp", "__1_0.distcp")
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def record(pickled: bytes, data: bytes | None = None) -> bytes:
    """An archive of one pickle, and of one storage."""
    return archives.archive(archives.torch_records(pickled, {} if data is None else {"0": data}))


def tensor_record(shape: tuple[int, ...], *, first: float = 0.0, pickled: bytes | None = None) -> bytes:
    """The record of a chunk."""
    numel = 1
    for length in shape:
        numel *= length
    return record(op.stream(f32("0", *shape)) if pickled is None else pickled, floats(numel, first=first))


@dataclass
class Saved:
    """One entry of the state dict: records by box; a value has the box None."""

    path: tuple[str | int, ...]
    records: dict[Box | None, bytes]
    shape: tuple[int, ...] = ()


@dataclass
class Draft:
    """A checkpoint that is about to be written."""

    entries: dict[str, Saved] = field(default_factory=lambda: dict(_entries()))
    metadata: Callable[[Any], Any] = lambda metadata: metadata
    """Makes other metadata of the good ones: objects, or a pickle."""
    dropped: tuple[str, ...] = ()

    def write(self, directory: Path) -> None:
        """Write the directory."""
        directory.mkdir(parents=True)
        for name, content in self.files().items():
            if name not in self.dropped:
                (directory / name).write_bytes(content)

    def files(self) -> dict[str, bytes]:
        """All files by name."""
        data: dict[str, bytes] = dict.fromkeys(FILES, b"")
        described: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        for key, saved in self.entries.items():
            boxes = [box for box in saved.records if box is not None]
            described[key] = dcp.tensor(saved.shape, [dcp.chunk(*b) for b in boxes]) if boxes else dcp.Bytes()
            for number, (box, content) in enumerate(saved.records.items()):
                name = FILES[min(number, 1)]
                index = dcp.index(key) if box is None else dcp.index(key, box[0], number)
                places[index] = dcp.place(name, len(data[name]), len(content))
                data[name] += content
        paths = {key: saved.path for key, saved in self.entries.items()}
        good = dcp.Metadata(state_dict_metadata=described, planner_data=paths, storage_data=places, version="1.0.0")
        made = self.metadata(good)
        return {**data, ".metadata": made if isinstance(made, bytes) else dcp.dumped(made)}


def _entries() -> dict[str, Saved]:
    found: dict[str, Saved] = {}

    def tensor(path: tuple[str, ...], first: float, *rows: int, width: int = 3) -> None:
        boxes: dict[Box | None, bytes] = {}
        at = 0
        for count in rows:
            boxes[(at, 0), (count, width)] = tensor_record((count, width), first=first + at * width)
            at += count
        found[".".join(path)] = Saved(path, boxes, (at, width))

    def value(path: tuple[str | int, ...], content: Any) -> None:
        found[".".join(map(str, path))] = Saved(path, {None: record(op.stream(content))})

    for number, name in enumerate(("w", "v")):
        tensor(("model", name), 100.0 * number, 2, 2 - number)
        for state, first in (("exp_avg", 1000.0), ("exp_avg_sq", 2000.0)):
            tensor(("optimizer", "state", name, state), first + 100 * number, 2, 2 - number)
    group = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": ["w", "v"]}
    for key, content in group.items():
        value(("optimizer", "param_groups", 0, key), content)
    value(("user_state",), "three")
    return found


def edited(change: Callable[[Draft], object]) -> Build:
    """The checkpoint after a change."""

    def build(directory: Path) -> None:
        draft = Draft()
        change(draft)
        draft.write(directory)

    return build


def _metadata(make: Callable[[Any], Any]) -> Build:
    return edited(lambda draft: setattr(draft, "metadata", make))


def _records(key: str, change: Callable[[dict[Box | None, bytes]], object]) -> Build:
    return edited(lambda draft: change(draft.entries[key].records))


TOP: Box = ((0, 0), (2, 3))
REST: Box = ((2, 0), (2, 3))


def _second(data: bytes) -> Build:
    return _records("model.w", lambda records: records.update({REST: data}))


def _value(pickled: bytes) -> Build:
    return _records("user_state", lambda records: records.update({None: record(pickled)}))


def _moved(**attributes: Any) -> Build:
    """Another place for the second chunk of `model.w`."""

    def make(metadata: Any) -> Any:
        index = next(i for i in metadata.storage_data if i.fqn == "model.w" and i.index == 1)
        for name, value in attributes.items():
            setattr(metadata.storage_data[index], name, value)
        return metadata

    return _metadata(make)


def _box(box: Box) -> Build:
    def change(records: dict[Box | None, bytes]) -> None:
        del records[REST]
        records[box] = tensor_record(box[1])

    return _records("model.w", change)


def _plain(directory: Path) -> None:
    Draft().write(directory)


_CALLING = op.stream(op.call(SYSTEM, COMMAND))
_MILLION = 100_000


def _many_chunks(metadata: Any) -> Any:
    metadata.state_dict_metadata["model.w"].chunks *= _MILLION
    return metadata


def _entry(name: str, code: str, build: Build, *, inspect: str | None = None, runs: bytes | None = None) -> Entry:
    return Entry(115, f"dcp-{name}", code, build, inspect=inspect, runs=runs)


ENTRIES = (
    _entry("good", OK, _plain),
    _entry("metadata-that-calls", GLOBAL, _metadata(lambda _: _CALLING), runs=_CALLING),
    _entry("metadata-of-a-dict", _MALFORMED, _metadata(lambda _: op.stream({"state_dict_metadata": {}}))),
    _entry("metadata-empty", "pickle.truncated", _metadata(lambda _: b"")),
    _entry("metadata-missing", _INCOMPLETE, edited(lambda draft: setattr(draft, "dropped", (".metadata",)))),
    _entry("chunk-past-global", _EXTENT, _box(((3, 0), (2, 3)))),
    _entry("chunk-far-past-global", _EXTENT, _box(((1 << 60, 0), (2, 3)))),
    _entry("path-escape", "name.invalid", _moved(relative_path="../../etc/passwd")),
    _entry("path-of-no-file", _INCOMPLETE, _moved(relative_path="__9_0.distcp")),
    _entry("place-past-the-end", _INCOMPLETE, _moved(offset=1 << 40)),
    _entry("place-negative", _EXTENT, _moved(length=-1)),
    _entry("place-inside-a-record", _UNSUPPORTED, _moved(offset=10)),
    _entry("place-over-another-record", _MALFORMED, _moved(length=1_000)),
    _entry("million-chunks", "checkpoint.ambiguous", _metadata(_many_chunks)),
    _entry("hole", _COVERAGE, _records("model.w", lambda records: records.pop(REST))),
    _entry("two-over-one", _COVERAGE, _box(((1, 0), (3, 3)))),
    _entry("boxes-over-one-another", _COVERAGE, _box(((2, 1), (2, 2)))),
    _entry("file-missing", _INCOMPLETE, edited(lambda draft: setattr(draft, "dropped", (FILES[1],)))),
    _entry("record-of-another-shape", _MALFORMED, _second(tensor_record((3, 2)))),
    _entry("record-transposed", _UNSUPPORTED, _second(tensor_record((2, 3), pickled=op.stream(op.tensor(op.storage("FloatStorage", "0", 6), (2, 3), stride=(1, 2)))))),
    _entry("record-past-its-storage", _EXTENT, _second(tensor_record((2, 3), pickled=op.stream(op.tensor(op.storage("FloatStorage", "0", 6), (2, 3), offset=1))))),
    _entry("record-is-no-archive", _UNSUPPORTED, _second(b"\x80\x02K\x03." * 100)),
    _entry("record-that-calls", CALL, _second(record(_CALLING, floats(6))), inspect=_MALFORMED, runs=_CALLING),
    _entry("value-that-calls", CALL, _value(_CALLING), inspect=OK, runs=_CALLING),
    _entry("value-of-a-foreign-class", GLOBAL, _value(op.stream(op.name("evil", "Gadget"))), inspect=OK),
    _entry("transform-of-another-name", _UNSUPPORTED, _moved(transform_descriptors=["stream.rot13/1"])),
    _entry("transform-that-is-code", _MALFORMED, _moved(transform_descriptors=["__import__('os').system('touch x')"])),
    _entry("flat-parameters", _UNSUPPORTED, edited(lambda draft: draft.entries.update({"model.x": Saved(("model", "block._flat_param"), {((0,), (2,)): tensor_record((2,))}, (2,))}))),
)  # fmt: skip
