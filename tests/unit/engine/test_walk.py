"""The walk of one unit through the executor: how many modules it passes, and how often it enters each.

A package directly below `reshard_engine.execute` counts as one module. A module is entered when a function of it is
called or resumed by one of another module. Constructors are not entries: no byte has moved. The units are of one item,
so that nothing is counted twice because a loop turns twice.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import reshard_engine.execute as package
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.executor import Executor
from reshard_engine.execute.sinks.local import LocalSink
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.plan.model import Chunk, Plan, PlannedFile, Unit
from reshard_engine.storage.local import LocalStore
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.layout import Body, FileTemplate, KnownFiles, TargetFile, TargetLayout
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMapBuilder
from reshard_engine.tensors.views import Box, LoraMerge, View
from reshard_engine.testing.stores import MemoryStore

ROOT = Path(package.__file__).parent
SHAPE, HEADER = (400, 400), 64
NUMEL = 160_000
MOST_MODULES, MOST_ENTRIES = 8, 2


@dataclass(frozen=True)
class Walk:
    """The modules that a unit entered, in order, each with the one that it was entered from."""

    entered: list[tuple[str, str | None]]

    @property
    def modules(self) -> list[str]:
        """The modules that were entered, in order."""
        pairs = [(here.split(".")[0], (there or "").split(".")[0]) for here, there in self.entered]
        return [here for here, there in pairs if there and here != there]


def _module(frame: FrameType | None) -> str | None:
    """The module below `execute` whose code a frame runs, or the nearest one that called it."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT):
            return ".".join(file.relative_to(ROOT).with_suffix("").parts)
        frame = frame.f_back
    return None


@contextmanager
def noted(walk: Walk) -> Iterator[None]:
    """Note every call or resumption of a function that comes from another module."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "__init__" and Path(code.co_filename).is_relative_to(ROOT):
            here, there = _module(frame), _module(frame.f_back)
            if here is not None and here != there:
                walk.entered.append((here, there))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def _source(directory: Path, kind: str) -> tuple[Checkpoint, int]:
    """Two tensors in one file, and the number of one that is made of them in some way."""
    values = np.random.default_rng(5).standard_normal(2 * NUMEL).astype(np.float32)
    (directory / "source").write_bytes(values.tobytes())
    info = LocalStore().stat(str(directory / "source"))
    assert info is not None
    builder = ShardMapBuilder()
    number, other = (builder.tensor(name, "fp32", FLOAT32, SHAPE) for name in ("a", "b"))
    builder.whole(number, file=0, offset=0)
    builder.whole(other, file=0, offset=4 * NUMEL)
    if kind == "view":
        half = NUMEL // 2
        boxes = Box(number, (NUMEL,), (half,), (0,), (half,)), Box(other, (NUMEL,), (0,), (half,), (half,))
        number = builder.view("v", "fp32", View((NUMEL,), boxes), SHAPE)
    elif kind == "mean":
        number = builder.mean("m", "fp32", [number, other], FLOAT32)
    shard_map = builder.build()
    if kind == "merge":
        merge = LoraMerge(number, other, other, 2.0, transposed=False, magnitude=None)
        shard_map = shard_map.with_derived([(LogicalTensor("w", "weight", FLOAT32, SHAPE), merge)])
        number = 2
    facts: dict[str, Any] = {"framework_version": None, "optimizer": None}
    rest: dict[str, Any] = {"buffers": (), "shared": {}, "foreign_globals": (), "warnings": (), "parameters": ()}
    checkpoint = Checkpoint(
        url=str(directory), tag=None, format="x", world={},
        files=(SourceFile(LocalStore(), "source", (info,)),), shard_map=shard_map, **facts, **rest,
    )  # fmt: skip
    return checkpoint, number


def walk_of(directory: Path, kind: str, dtype: str, *, cut: bool, stored: bool = False) -> Walk:
    """The walk of the first unit of a conversion of one tensor: the whole file, or a chunk that ends in a block."""
    checkpoint, number = _source(directory, kind)
    body = Body(HEADER, 0, 0, NUMEL, BY_NAME[dtype], 0)
    size = HEADER + body.length_bytes
    template = FileTemplate(
        size + 4, ((0, bytes(HEADER)), (size, bytes(4))), (body,), ((HEADER, size - HEADER),), ((size, 0),)
    )
    file = TargetFile("t", template, (number,))
    edges = [0, size // 2, size + 4] if cut else [0, size + 4]
    units = tuple(Unit(i, (Chunk(0, low, high - low),), commit=False) for i, (low, high) in enumerate(pairwise(edges)))
    plan = Plan({}, {}, (PlannedFile("t", size + 4, False, template.digest),), units, size, 0, size, None, 0)
    sink: Any = LocalSink(str(directory / "target"), known=KnownFiles())
    if stored:
        sink = ObjectSink(MemoryStore(min_part_bytes=1), "bucket/target", known=KnownFiles())
    sink.begin(plan, overwrite=False)
    executor = Executor(
        checkpoint, TargetLayout((file,), None), plan, sink, done={}, on_progress=lambda _: None, should_stop=None
    )
    walk = Walk([])
    with noted(walk):
        executor._run_unit(units[0], "running")  # as a thread of `run` does
    assert executor.records[0].blocks
    sink.close()
    return walk


@pytest.mark.parametrize("stored", [False, True], ids=["local", "object store"])
@pytest.mark.parametrize("cut", [False, True], ids=["file", "chunk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["stored", "view", "mean", "merge"])
def test_a_unit_enters_no_room_often(tmp_path: Path, kind: str, dtype: str, cut: bool, stored: bool) -> None:
    walk = walk_of(tmp_path, kind, dtype, cut=cut, stored=stored)
    entries = Counter(walk.modules)
    assert len(entries) <= MOST_MODULES, walk.modules
    assert max(entries.values()) <= MOST_ENTRIES, walk.modules
