"""Directories of torch_checkpointing for other numbers of ranks: each file is what torch saves on that many."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import reshard
from laws.item_files import Items, save_items
from laws.rank_files import ROWS, Placements, Tensors, World, save_accelerate, small_model
from reshard.errors import RequestError

HSDP: Placements = (Replicate(), Shard(0))
SAFETENSORS = Items(layouts={"model": "model_{rank}.safetensors"})
SCHEDULER = {"base_lrs": [0.1], "last_epoch": 3, "_last_lr": [0.05]}
OTHERS = {"lr_scheduler": SCHEDULER, "train_state": {"step": 3, "tokens": torch.tensor(360)}, "note": "hello"}


def untied(placements: Placements = ROWS) -> Tensors:
    return replace(small_model(placements), ties={})


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """The places where two values differ; DTensors with their meshes, dicts with their order."""
    if type(a) is not type(b):
        return [f"{at}: {type(a)}, {type(b)}"]
    if isinstance(a, DTensor):
        state_a, state_b = ({**t.device_mesh.__getstate__(), "_hash": 0} for t in (a, b))
        same = (str(state_a), a.placements, a.shape, a.stride()) == (str(state_b), b.placements, b.shape, b.stride())
        specs = [(t._spec.tensor_meta, t._spec.shard_order) for t in (a, b)]  # pyright: ignore[reportPrivateUsage]
        return differences(a.to_local(), b.to_local(), at) + ([] if same and specs[0] == specs[1] else [f"{at}: mesh"])
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [f"{at}: {a}, {b}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{at}: {list(a)}, {list(b)}"]
        return [d for k in a for d in differences(a[k], b[k], f"{at}.{k}")]
    if isinstance(a, list | tuple):
        found = [d for i, pair in enumerate(zip(a, b, strict=False)) for d in differences(*pair, f"{at}[{i}]")]
        return found + ([] if len(a) == len(b) else [f"{at}: {len(a)}, {len(b)}"])
    return [] if a == b else [f"{at}: {a!r}, {b!r}"]


def content(file: Path) -> Any:
    if file.suffix == ".pt":
        return torch.load(file, weights_only=False)
    if file.suffix == ".pkl":
        return pickle.loads(file.read_bytes())
    return load_file(file) if file.suffix == ".safetensors" else file.read_text()


def folder_differences(a: Path, b: Path) -> list[str]:
    names = [
        sorted(str(f.relative_to(d)) for f in d.rglob("*") if f.is_file() and f.name != "reshard.json") for d in (a, b)
    ]
    if names[0] != names[1]:
        return [f"{names[0]}, {names[1]}"]
    found = [d for n in names[0] if n != "metadata.pkl" for d in differences(content(a / n), content(b / n), n)]
    both = [content(d / "metadata.pkl") for d in (a, b) if (d / "metadata.pkl").exists()]
    return found + ([] if not both or both[0] == both[1] else ["metadata.pkl"])


@pytest.mark.parametrize(
    ("first", "second", "how", "options"),
    [
        (World((4,)), World((3,)), Items(), {}),
        (World((2,)), World((8,)), Items(), {}),
        (World((3,)), World((1,)), Items(), {}),
        (World((3,), None), World((2,), None), Items(described=()), {}),
        (World((4,)), World((3,)), SAFETENSORS, {}),
        (World((2,)), World((4,)), Items(layouts={"model": "rank_{rank}/model.pt", "c": "c_{rank}.json"}), {}),
        (World((2,)), World((3,)), Items(numbers=True), {"param_order": "model"}),
    ],
    ids=lambda value: value.shape if isinstance(value, World) else "",
)  # fmt: skip
def test_each_file_is_what_torch_saves_on_that_many_ranks(
    first: World, second: World, how: Items, options: Mapping[str, Any], tmp_path: Path
) -> None:
    model = untied() if how is SAFETENSORS else small_model()
    how = replace(how, others=OTHERS | ({"c": {"b": [1, None], "a": 2.5}} if "c" in how.layouts else {}))
    save_items(model, tmp_path / "in", first, how)
    save_items(model, tmp_path / "wanted", second, how)
    reshard.convert(
        tmp_path / "in", tmp_path / "out", to="torch_checkpointing", dp=second.size, progress=False, **options
    )
    assert folder_differences(tmp_path / "wanted", tmp_path / "out") == []


def test_replicas_are_written_on_the_mesh_of_the_run(tmp_path: Path) -> None:
    first, second = (World((n, 2), ("dp_replicate", "fsdp")) for n in (2, 3))
    save_items(small_model(HSDP), tmp_path / "in", first, Items())
    save_items(small_model(HSDP), tmp_path / "wanted", second, Items())
    made = reshard.convert(tmp_path / "in", tmp_path / "out", to="torch_checkpointing", dp=6, progress=False)
    found = folder_differences(tmp_path / "wanted", tmp_path / "out")
    assert [d for d in found if not d.endswith(": mesh")] == []  # the fake groups have names of their own
    assert made.warnings


def test_items_of_single_ranks_go_along_where_something_says_whose_they_are(tmp_path: Path) -> None:
    others = {"rng": lambda rank: torch.tensor([rank]), "loader": lambda rank: {"at": rank}, "note": "x"}
    place = save_items(small_model(), tmp_path / "in", World((2,)), Items(others=others))

    def written(dp: int, name: str, **options: Any) -> tuple[Path, dict[str, str]]:
        out = tmp_path / name
        made = reshard.convert(place, out, to="torch_checkpointing", dp=dp, progress=False, **options)
        return out, {n.path: n.reason for n in made.not_carried}

    same, told = written(2, "same")
    assert folder_differences(place, same) == []
    assert told == {}
    more, told = written(3, "more")
    assert [int(torch.load(more / f"rng_{r}.pt")) for r in range(3)] == [0, 1, 0]
    assert not [*more.glob("loader_*")]
    assert "nothing says what other ranks would hold" in told["loader"]
    none, told = written(3, "none", rng="drop")
    assert not [*none.glob("rng_*")]
    assert told["rng"] == "left out, as asked"


def test_other_sources_need_the_devices_and_name_their_axes(tmp_path: Path) -> None:
    save_accelerate(small_model(), tmp_path / "in", World((2,)))
    with pytest.raises(RequestError, match="needs the number of ranks"):
        reshard.convert(tmp_path / "in", tmp_path / "out", to="torch_checkpointing", progress=False)
    for options, text in (
        ({}, "the type of the run's devices"),
        ({"rank_framework": "verl", "device_type": "cpu"}, "--rank-framework: for files of FSDP's ranks"),
        ({"device_type": "cpu", "dtype": "bf16"}, "no --dtype"),
        ({"device_type": "cpu", "tp": 2}, "files of data-parallel ranks"),
        ({"device_type": "cpu", "fsdp_size": 2}, "no multiple"),
    ):
        with pytest.raises(RequestError, match=text):
            reshard.convert(
                tmp_path / "in", tmp_path / "out", to="torch_checkpointing", dp=3, progress=False, **options
            )
    made = reshard.convert(
        tmp_path / "in", tmp_path / "out", to="torch_checkpointing", dp=3, device_type="cpu", progress=False
    )
    assert any("the mesh's axes have no names" in w for w in made.warnings)
    save_items(small_model(), tmp_path / "wanted", World((3,), None), Items())
    assert folder_differences(tmp_path / "wanted", tmp_path / "out") == []


def test_a_grid_of_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    model = Tensors({"w": (whole, (Shard(0), Shard(1)))}, {}, {}, [["w"]])
    save_items(model, tmp_path / "in", World((2, 2), ("fsdp", "tp")), Items())
    with pytest.raises(RequestError, match="are cut in another way") as caught:
        reshard.convert(tmp_path / "in", tmp_path / "out", to="torch_checkpointing", dp=2, progress=False)
    assert caught.value.code == "request.unsatisfiable"


def test_the_metadata_come_last(tmp_path: Path) -> None:
    save_items(small_model(), tmp_path / "in", World((2,)), Items())
    reshard.convert(tmp_path / "in", tmp_path / "out", to="torch_checkpointing", dp=2, progress=False)
    manifest = json.loads((tmp_path / "out" / "reshard.json").read_text())
    assert "metadata.pkl" in json.dumps(manifest)
    times = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "out").glob("*.p*")}
    assert max(times, key=lambda n: times[n]) in ("metadata.pkl", "model_0.pt", "model_1.pt")
