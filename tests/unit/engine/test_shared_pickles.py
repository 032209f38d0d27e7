"""Equal pickles of a checkpoint's files are interpreted once, and nothing can be told from it but the time."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from reshard.choices import OpaquePolicy
from reshard.errors import SourceError
from reshard_engine.containers import torch_file as shared_pickles
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import SharedPickles, open_torch_file
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import DEFAULT_LIMITS, PBytearray, PList, collector_paused
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.storage.local import LocalStore


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each interpretation."""
    found: list[int] = []
    real = shared_pickles.parse_pickle

    def counting(data: bytes, *args: object, **kwargs: object) -> object:
        found.append(len(data))
        return real(data, *args, **kwargs)

    monkeypatch.setattr(shared_pickles, "parse_pickle", counting)
    return found


def _file(path: Path, value: object) -> SourceFile:
    torch.save(value, path)
    store = LocalStore()
    info = store.stat(str(path))
    assert info is not None
    return SourceFile(store, path.name, (info,))


def _pickles() -> SharedPickles:
    return SharedPickles(OpaqueLedger(OpaquePolicy.KEEP))


def test_ranks_share_the_skeleton_and_keep_their_bytes(tmp_path: Path, runs: list[int]) -> None:
    pickles = _pickles()
    files: list[SourceFile] = []
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        files.append(_file(tmp_path / str(rank) / "x.pt", {"w": torch.full((3,), rank)}))
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda f: open_torch_file(f, pickles.ledger, pickles=pickles), files))
    assert len(runs) == 1
    assert len({id(o.root) for o in opened}) == 1
    tensor = opened[0].root.pairs[1]
    for rank, torch_file in enumerate(opened):
        assert torch_file.file.read(torch_file.tensor_offset(tensor), 8) == rank.to_bytes(8, "little")


def test_one_byte_makes_another_pickle(runs: list[int]) -> None:
    pickles = _pickles()
    values = [pickles.parse(pickle.dumps(v, 2), DEFAULT_LIMITS) for v in ([1, 2], [1, 3], [1, 2])]
    assert len(runs) == 2
    assert values[0] is values[2]
    assert values[1].items == [1, 3]


def test_only_the_latest_are_kept(runs: list[int]) -> None:
    pickles = _pickles()
    for number in [*range(100), *range(90, 100), 0]:
        pickles.parse(pickle.dumps([number], 2), DEFAULT_LIMITS)
    assert len(runs) == 101


def test_what_is_refused_is_refused_each_time(runs: list[int]) -> None:
    pickles = SharedPickles(OpaqueLedger(OpaquePolicy.REFUSE))
    for _ in range(2):
        with pytest.raises(SourceError) as caught:
            pickles.parse(b"\x80\x02cos\nsystem\n)R.", DEFAULT_LIMITS)
        assert caught.value.code == "pickle.forbidden_call"
    assert len(runs) == 2


def test_bytes_after_the_pickle_are_refused() -> None:
    with pytest.raises(SourceError) as caught:
        _pickles().parse(pickle.dumps([1], 2) + b".", DEFAULT_LIMITS)
    assert caught.value.code == "pickle.trailing"


def test_what_is_written_does_not_show_what_was_shared() -> None:
    shared = PBytearray(b"state")
    copies = [rewrite(PList([shared]), lambda t: t, lambda f: f) for _ in range(2)]
    apart = [PList([PBytearray(b"state")]) for _ in range(2)]
    assert emit_pickle(PList(list(copies))) == emit_pickle(PList(list(apart)))
    alias = rewrite(PList([shared, shared]), lambda t: t, lambda f: f)
    assert alias.items[0] is alias.items[1]


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
