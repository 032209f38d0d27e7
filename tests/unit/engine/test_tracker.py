"""Megatron's tracker file beside `latest`, on an object store too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from house.requests import asked
from laws.deepspeed_files import Layout
from laws.pipeline_source import ParallelWriter, Part, Ranks, seeded_model
from reshard.choices import TargetFormat
from reshard.options import RunLayout, SourceSpec
from reshard_engine.storage.protocol import read_bytes
from reshard_engine.testing.laws import SCHEME, convert
from reshard_engine.testing.stores import MemoryStore

NAME = "latest_checkpointed_iteration.txt"


def _converted(folder: Path, **values: object) -> tuple[MemoryStore, list[str]]:
    model = seeded_model({"weight": ((4, 2), Part("whole", 0))}, piped=False, layers=1, told=False)
    model = replace(model, state=replace(model.state, values={**model.state.values, **values}))
    ParallelWriter(model, Ranks(1, (0,), Layout(1, 2)), folder).write()
    store = MemoryStore()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        store.put(f"lab/source/{path.relative_to(folder)}", path.read_bytes(), metadata={}, if_absent=True)
    source = SourceSpec(url=f"{SCHEME}://lab/source")
    target = f"{SCHEME}://lab/run/global_step3"
    convert(store, asked(source=source, target=target, to=TargetFormat.ZERO, layout=RunLayout(dp=3)))
    return store, sorted(i.path for i in store.list_tree("lab/run") if i.path.count("/") == 2)


def test_it_lies_beside_latest_in_an_object_store(tmp_path: Path) -> None:
    store, beside = _converted(tmp_path, args={"seq_length": 4}, checkpoint_version=3.0, iteration=1200)
    assert beside == ["lab/run/latest", f"lab/run/{NAME}"]
    info = store.stat(f"lab/run/{NAME}")
    assert info is not None
    assert read_bytes(store, info) == b"1200"


def test_other_frameworks_have_none(tmp_path: Path) -> None:
    _, beside = _converted(tmp_path, iteration=1200)
    assert beside == ["lab/run/latest"]
