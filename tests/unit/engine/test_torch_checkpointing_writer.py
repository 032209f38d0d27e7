"""Directories of torch_checkpointing for other numbers of ranks: each file is what torch saves on that many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

import reshard
from house.requests import asked
from laws.item_files import Items, folder_differences, save_items
from laws.rank_files import ROWS, Placements, Tensors, World, save_accelerate, small_model
from reshard.errors import RequestError
from reshard_engine.formats.registry import writer_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

HSDP: Placements = (Replicate(), Shard(0))
SAFETENSORS = Items(layouts={"model": "model_{rank}.safetensors"})
SCHEDULER = {"base_lrs": [0.1], "last_epoch": 3, "_last_lr": [0.05]}
OTHERS = {"lr_scheduler": SCHEDULER, "train_state": {"step": 3, "tokens": torch.tensor(360)}, "note": "hello"}


def untied(placements: Placements = ROWS) -> Tensors:
    return replace(small_model(placements), ties={})


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
    with pytest.raises(RequestError, match="--to torch_checkpointing needs --dp"):
        reshard.convert(tmp_path / "in", tmp_path / "out", to="torch_checkpointing", progress=False)
    for options, text in (
        ({}, "the type of the run's devices"),
        ({"rank_framework": "verl", "device_type": "cpu"}, "does not take --rank-framework; it is for --to fsdp_ranks"),
        ({"device_type": "cpu", "dtype": "bf16"}, "no --dtype"),
        ({"device_type": "cpu", "tp": 2}, "does not take --tp; it is for --to zero"),
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


def test_what_its_loader_asks_for_is_published_last(tmp_path: Path) -> None:
    save_items(small_model(), tmp_path / "in", World((2,)), Items())
    source, target = str(tmp_path / "in"), str(tmp_path / "out")
    request = asked(source={"url": source}, target=target, to="torch_checkpointing", dp=2)
    checkpoint = read_checkpoint(open_location(source), None, OpaqueLedger(request.opaque))
    layout = writer_of("torch_checkpointing").lay_out(checkpoint, request, name="out")
    assert {f.path for f in layout.files if f.commit} == {"metadata.pkl", "model_0.pt", "model_1.pt"}
    assert {f.path for f in layout.files if not f.commit} == {"optimizer_0.pt", "optimizer_1.pt"}
