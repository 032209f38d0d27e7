"""Virtual targets: every byte of every file is that of the converted file, in any ranges, from several threads."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint.filesystem import FileSystem

import reshard
from house.expected import raised
from house.repository import ROOT
from house.waiting import PATIENCE_S
from reshard.errors import RequestError, SourceError, StorageError
from reshard_engine.operations.virtual import checkpoint as virtual

DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "checkpoints"
NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("universal", {}),
    ("safetensors", {}),
    ("safetensors", {"dtype": "bf16", "max_shard_size": "20KB"}),
    ("torch", {"dtype": "fp16"}),
    ("dcp", {}),
    ("torch_save", {}),
]
ZERO: list[tuple[str, dict[str, Any]]] = [
    ("zero", {"dp": 1}),
    ("zero", {"dp": 3}),
    ("zero", {"dp": 5}),
    ("fsdp_ranks", {"dp": 3, "rank_framework": "verl", "device_type": "cpu"}),
    ("zero", {"dp": 2, "zero_stage": "1"}),
]
TENSOR_PARALLEL: list[tuple[str, dict[str, Any]]] = [("zero", {"dp": 2, "tp": 1}), ("universal", {}), ("dcp", {})]
CASES = [
    *((DATA / name, to, given) for name in ("zero2_tiny", "zero3_tiny") for to, given in (*NEUTRAL, *ZERO)),
    (DATA / "tutorial_zero2", "zero", {"dp": 4, "zero_stage": "3"}),
    (DATA / "tutorial_zero2", "dcp", {}),
    *(
        (SHARED / name / "src", to, given)
        for name in (
            "gpt_bf16_z1_tp2pp2dp2",
            "gpt_bf16_z2_nopipe_tp2dp2",
            "gpt_fp16_z1_tp2pp1dp2",
            "gpt_fp32_z1_tp2pp1dp2",
            "llama_fp32_z1_tp2pp2dp2",
            "moe_bf16_z1_ep2dp4",
            "llama_bf16_z3_nopipe_tp2dp2",
        )
        for to, given in TENSOR_PARALLEL
    ),
]


def _name(case: tuple[Path, str, Mapping[str, Any]]) -> str:
    source, to, given = case
    return "-".join([source.parent.name, source.name, to, *(f"{k}={v}" for k, v in given.items())])


def _open(case: tuple[Path, str, Mapping[str, Any]], **more: Any) -> Any:
    source, to, options = case
    return reshard.open_layout(source, to=to, **options, **more)


@pytest.mark.parametrize("case", CASES, ids=map(_name, CASES))
def test_every_byte_is_that_of_the_converted_file(case: Any, tmp_path: Path) -> None:
    source, to, options = case
    if not source.exists():
        pytest.skip("the real checkpoint is not here: it lies outside the project")
    made = reshard.convert(source, tmp_path / "run" / "made", to=to, **options)
    written = {f.path: (tmp_path / "run" / "made" / f.path).read_bytes() for f in made.files}
    seed = random.Random(_name(case))
    with _open(case, name="made", exact_crcs=True) as exact, _open(case, name="made") as plain:
        assert {f.path: f.size_bytes for f in exact.files} == {p: len(data) for p, data in written.items()}
        assert exact.not_carried == made.not_carried
        ranges = [(path, *sorted(seed.choices(range(len(data) + 1), k=2))) for path, data in written.items()] * 3
        with ThreadPoolExecutor(8) as threads:
            parts = list(threads.map(lambda r: exact.read(r[0], r[1], r[2] - r[1]), ranges))
        assert parts == [written[path][begin:end] for path, begin, end in ranges]
        for path, data in written.items():
            assert exact.read(path) == data, path
            without = bytearray(data)
            for offset, _ in exact.file(path).template.crc_slots:
                without[offset : offset + 4] = bytes(4)
            assert plain.read(path) == without, path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, bytes]]]:
    place = tmp_path_factory.mktemp("virtual") / "run" / "made"
    made = reshard.convert(DATA / "zero3_tiny", place, to="zero", dp=3)
    written = {f.path: (place / f.path).read_bytes() for f in made.files}
    with pytest.MonkeyPatch.context() as patch:
        # Small blocks: ranges begin and end in all of their places.
        patch.setattr(virtual, "BLOCK_BYTES", 512)
        with reshard.open_layout(DATA / "zero3_tiny", to="zero", dp=3, name="made", exact_crcs=True) as layout:
            yield layout, written


@settings(max_examples=60)
@given(data=st.data())
def test_ranges_are_slices(opened: tuple[Any, dict[str, bytes]], data: st.DataObject) -> None:
    layout, written = opened
    path = data.draw(st.sampled_from(sorted(written)))
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(written[path]))] * 2)))
    assert layout.read(path, begin, end - begin) == written[path][begin:end]
    with layout.open(path) as file:
        file.seek(begin)
        assert file.read(end - begin) == written[path][begin:end]
        assert file.read() == written[path][end:]


def test_fields_of_checksums_are_exact_where_they_are_asked_for(opened: tuple[Any, dict[str, bytes]]) -> None:
    layout, written = opened
    for path in written:
        # `zipfile` compares every record with its CRC-32.
        with layout.open(path) as file, zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
    with reshard.open_layout(DATA / "zero3_tiny", to="zero", dp=3) as plain:
        archive = zipfile.ZipFile(io.BytesIO(plain.read(plain.files[0].path)))
        assert archive.testzip() is not None


def test_files_outside_are_refused(opened: tuple[Any, dict[str, bytes]]) -> None:
    layout, written = opened
    path = next(iter(written))
    assert raised(RequestError, layout.read, "../latest").code == "request.invalid"
    assert raised(StorageError, layout.read, path, len(written[path]), 1).code == "storage.protocol"
    assert raised(StorageError, layout.read, path, -1, 1).code == "storage.protocol"
    with pytest.raises(TypeError, match="overwrite"):
        reshard.open_layout(DATA / "zero3_tiny", to="zero", overwrite=True)


# -- files that programs open by path: `reshard.direct` -------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "zero2_tiny", tmp_path / "source")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of temporary directories."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def optimizer_file(path: str) -> Path:
    return next(Path(path).rglob("*_optim_states.pt"))


def test_blocks_that_overlap_leave_torch_as_it_was(source: Path, home: Path) -> None:
    load, engine = torch.load, import_module("deepspeed").DeepSpeedEngine
    create_stream, load_checkpoint = FileSystem.create_stream, engine.load_checkpoint
    first = reshard.direct(source, to="zero", dp=1)
    second = reshard.direct(source, to="zero", dp=3)
    first.__enter__()
    path = second.__enter__()
    first.__exit__(None, None, None)
    assert torch.load(optimizer_file(path), weights_only=False)["optimizer_state_dict"]
    second.__exit__(None, None, None)
    assert (torch.load, FileSystem.create_stream, engine.load_checkpoint) == (load, create_stream, load_checkpoint)
    assert list(home.iterdir()) == []


def test_blocks_of_several_threads_share_one_patch(source: Path, home: Path) -> None:
    load, here = torch.load, threading.Barrier(4, timeout=PATIENCE_S)

    def use(dp: int) -> bool:
        with reshard.direct(source, to="zero", dp=dp) as path:
            here.wait()
            return bool(torch.load(optimizer_file(path), weights_only=False))

    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(use, range(1, 5)))
        assert torch.load is load


def test_a_patch_of_somebody_else_stays(source: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "load", torch.load)  # puts it back after the test
    with reshard.direct(source, to="zero", dp=3):
        ours = torch.load

        def theirs(*arguments: Any, **more: Any) -> Any:
            calls.append(arguments)
            return ours(*arguments, **more)

        torch.load = theirs  # type: ignore[assignment]
    assert torch.load is theirs
    with reshard.direct(source, to="zero", dp=3) as path:
        assert torch.load(optimizer_file(path), weights_only=False)
    assert torch.load is theirs
    assert calls


@pytest.mark.parametrize("change", ["longer", "gone"])
@pytest.mark.parametrize("way", ["direct", "layout"])
def test_a_source_that_changes_while_it_is_loaded_is_named(source: Path, home: Path, change: str, way: str) -> None:
    """torch asks for bytes a second time after an error, and then reports that `read` does not exist."""

    def spoil() -> None:
        for file in source.rglob("*_optim_states.pt"):
            if change == "gone":
                file.unlink()
            else:
                file.write_bytes(file.read_bytes() + b"x")

    code = "source.not_found" if change == "gone" else "source.changed"
    if way == "direct":
        with reshard.direct(source, to="zero", dp=3) as path:
            spoil()
            with pytest.raises(SourceError) as caught:
                torch.load(optimizer_file(path), weights_only=False)
        assert caught.value.code == code
        return
    with reshard.open_layout(source, to="zero", dp=3) as layout:
        name = next(f.path for f in layout.files if f.path.endswith("_optim_states.pt"))
        spoil()
        file = layout.open(name)
        for read in (lambda: torch.load(file, weights_only=False), file.read, file.read):
            file.seek(0)
            with pytest.raises(SourceError) as caught:
                read()
            assert caught.value.code == code


def test_directories_of_killed_processes_are_removed_and_others_stay(source: Path, home: Path) -> None:
    program = (
        "import sys, tempfile, reshard\n"
        "tempfile.tempdir = sys.argv[2]\n"
        "with reshard.direct(sys.argv[1], to='zero', dp=3) as path:\n"
        "    print(path, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(source), str(home)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        # Imports of DeepSpeed may write lines before it.
        stubs = Path(next(line.strip() for line in child.stdout if line.startswith(str(home))))
        with reshard.direct(source, to="zero", dp=3):
            assert stubs.exists()
    finally:
        child.kill()
        child.communicate(timeout=PATIENCE_S)
    assert stubs.exists()
    (home / "reshard-stubs-of-the-user").symlink_to(source)
    with reshard.direct(source, to="zero", dp=3):
        assert not stubs.exists()
    assert [p.name for p in home.iterdir()] == ["reshard-stubs-of-the-user"]
    assert source.exists()


def test_stubs_are_known_by_every_path_and_as_open_files(
    source: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = home.with_name("link")
    link.symlink_to(home)
    monkeypatch.setattr(tempfile, "tempdir", str(link))
    with reshard.direct(source, to="zero", dp=3) as path:
        file = optimizer_file(path)
        beside = home.with_name("of the user.pt")
        beside.symlink_to(file)
        monkeypatch.chdir(path)
        for place in (file, file.resolve(), file.relative_to(path), str(file.relative_to(path)), beside):
            assert torch.load(place, weights_only=False)["optimizer_state_dict"]
        for place in (file, file.relative_to(path)):
            with place.open("rb") as opened_file:
                assert torch.load(opened_file, weights_only=False)["optimizer_state_dict"]
        own = home.with_name("own.pt")
        torch.save([1], own)
        with own.open("rb") as opened_file:
            assert torch.load(opened_file) == torch.load(io.BytesIO(own.read_bytes())) == [1]


def test_a_forked_process_that_leaves_the_block_takes_nothing_from_its_parent(source: Path, home: Path) -> None:
    program = (
        "import os, sys, tempfile, torch, reshard\n"
        "from pathlib import Path\n"
        "tempfile.tempdir = sys.argv[2]\n"
        "with reshard.direct(sys.argv[1], to='zero', dp=3) as path:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        raise SystemExit(5)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    loaded = [torch.load(file, weights_only=False) for file in Path(path).rglob('*.pt')]\n"
        "print('RESULT', code, len(loaded), os.listdir(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", program, str(source), str(home)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "RESULT 5 4 []" in done.stdout, done.stderr
