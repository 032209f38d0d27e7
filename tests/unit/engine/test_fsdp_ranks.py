"""Files of FSDP's ranks: boxes on meshes of every form, names of numbers, ties, buffers, frozen and second models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.tensor.placement_types import (
    Placement,
    Replicate,
    Shard,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

import reshard
from house.promises import broken_promises
from laws.rank_files import FSDP1, ROWS, Placements, Tensors, World, numbers, save_accelerate, save_verl, small_model
from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, ReshardError, SourceError
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Checkpoint, Question
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.layout_map import picture_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

HSDP = World((2, 2), ("ddp", "fsdp"))
GRID = World((2, 2), ("dp", "tp"))
CUBE = World((2, 2, 2), ("a", "b", "c"))
STRIDED = (_StridedShard(0, split_factor=2), Shard(0))


def read(folder: Path, **choices: Any) -> Checkpoint:
    ledger = OpaqueLedger(OpaquePolicy.REFUSE)
    return read_checkpoint(open_location(str(folder)), None, ledger, choices=SourceChoices(**choices))


def weights(folder: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    reshard.convert(folder, out, to="safetensors", progress=False, **options)
    return load_file(out / "model.safetensors")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    ("world", "placements", "rows"),
    [
        (World((1,)), ROWS, 5),
        (World((3,), None), ROWS, 5),
        (World((8,)), ROWS, 3),
        (World((2,)), (Shard(1),), 5),
        (World((2,)), (Replicate(),), 5),
        (HSDP, (Replicate(), Shard(0)), 5),
        (World((2, 2), None), (Shard(0), Shard(0)), 7),
        (GRID, (Shard(0), Shard(1)), 5),
        (World((2, 4), ("ddp", "fsdp"), ("fsdp",)), ROWS, 5),
        (World((2, 2, 2), ("a", "b", "c"), ("a", "c")), (Replicate(), Shard(0)), 5),
        (World((2, 2, 2), ("a", "b", "c"), ("a", "c"), flat=True), ROWS, 5),
        (World((2, 2, 2), ("a", "b", "c"), ("b", "c"), flat=True), ROWS, 5),
        (World((4,), None), FSDP1, 6),
    ],
    ids=str,
)  # fmt: skip
def test_boxes_of_every_mesh_make_up_the_tensor(
    world: World, placements: Placements, rows: int, tmp_path: Path
) -> None:
    model = small_model(placements, rows=rows)
    if placements in ((Shard(1),), (Shard(0), Shard(1))):  # a vector has no second dimension
        model = replace(model, parameters={n: p for n, p in model.parameters.items() if n != "norm.weight"})
        model = replace(model, groups=[list(model.parameters)])
    save_accelerate(model, tmp_path / "in", world)
    found = weights(tmp_path / "in", tmp_path / "out")
    assert all(same(found[name], whole) for name, (whole, _) in model.parameters.items())
    assert all(same(found[name], whole) for name, whole in model.buffers.items())


def _on_strided(shape: Sequence[int], placements: Sequence[Placement], tmp_path: Path, world: World) -> bool:
    whole = numbers(1, *shape)
    model = Tensors({"w": (whole, placements)}, {}, {}, [["w"]])
    save_accelerate(model, tmp_path / "in", world)
    return same(weights(tmp_path / "in", tmp_path / "out")["w"], whole)


@pytest.mark.parametrize(
    ("world", "placements", "shape"),
    [
        (GRID, STRIDED, (8, 3)),
        (GRID, (_StridedShard(1, split_factor=2), Shard(1)), (3, 8)),
        (World((3, 2), ("dp", "tp")), STRIDED, (12, 2)),
        (CUBE, (Replicate(), *STRIDED), (8, 2)),
        (CUBE, (_StridedShard(0, split_factor=4), Shard(0), Shard(0)), (16, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_strided_shards_lie_where_torch_lays_them(
    world: World, placements: Sequence[Placement], shape: tuple[int, ...], tmp_path: Path
) -> None:
    assert _on_strided(shape, placements, tmp_path, world)
    # The first element of each box is where torch's own rule has it.
    for rank in range(world.size):
        at = [rank // _stride(world.shape, axis) % n for axis, n in enumerate(world.shape)]
        size, offset = _compute_local_shape_and_global_offset(shape, world.shape, at, placements)
        assert _box(tmp_path / "in", rank) == (offset, size)


def _stride(shape: Sequence[int], axis: int) -> int:
    return int(torch.Size(shape[axis + 1 :]).numel())


def _box(folder: Path, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of the only tensor in a rank's file, by the rank's own elements: all numbers are different ones."""
    found = torch.load(folder / f"pytorch_model_fsdp_0_rank{rank}.bin", weights_only=False)["w"]
    local, columns = found.to_local(), found.shape[1]
    first = int(local.reshape(-1)[0]) - 1
    return (first // columns, first % columns), tuple(local.shape)


@pytest.mark.parametrize(
    ("placements", "shape"), [(STRIDED, (6, 3)), ((_StridedShard(0, split_factor=4), Shard(0)), (8, 3))]
)
def test_strided_shards_that_nothing_proves_are_refused(
    placements: Sequence[Placement], shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"such cuts are read where they are even") as caught:
        _on_strided(shape, placements, tmp_path, GRID)
    assert caught.value.code == "source.unsupported"


def _as_older_torch(rank: int, item: str, value: dict[str, Any]) -> None:
    """The attributes of meshes as torch before 2.9 pickled them."""
    held = value if item == "model" else {} if item != "optim" else {
        f"{n}.{s}": t for n, states in value["state"].items() for s, t in states.items()
    }  # fmt: skip
    for tensor in held.values():
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        if mesh is None or "mesh" in mesh.__dict__:
            continue
        own = {
            "device_type": "cpu", "mesh": mesh.mesh, "mesh_dim_names": mesh.mesh_dim_names, "_thread_id": 1,
            "_flatten_mesh_list": (0, 1, 2, 3), "_coordinate_on_dim": list(mesh.get_coordinate() or ()),
            "_dim_group_infos": [("tag", [0, 1], "name")],
        }  # fmt: skip
        mesh.__dict__.clear()
        mesh.__dict__.update(own)


def test_meshes_of_older_torch_are_read(tmp_path: Path) -> None:
    model = small_model((Replicate(), Shard(0)))
    save_accelerate(model, tmp_path / "in", HSDP, change=_as_older_torch)
    found = weights(tmp_path / "in", tmp_path / "out")
    assert all(same(found[name], whole) for name, (whole, _) in model.parameters.items())


# -- the optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_verl, save_accelerate])
def test_states_are_those_of_their_parameters(save: Callable[..., Path], tmp_path: Path) -> None:
    model = small_model()
    save(model, tmp_path / "in", World((3,)))
    reshard.convert(tmp_path / "in", tmp_path / "out" / "step", to="universal", progress=False)
    for name, (whole, _) in model.parameters.items():
        folder = tmp_path / "out" / "step" / "zero" / name
        for state, file in (("fp32", whole), ("exp_avg", whole + 1000), ("exp_avg_sq", whole + 2000)):
            held = torch.load(folder / f"{state}.pt", weights_only=False)
            assert same(held["param"] if isinstance(held, dict) else held, file)


def test_numbers_are_taken_for_the_models_order_with_a_word(tmp_path: Path) -> None:
    save_verl(small_model(), tmp_path / "in", World())
    found = read(tmp_path / "in")
    assert [p.fqn for p in found.trained] == ["embed.weight", "layers.0.q.weight", "layers.0.o.weight", "norm.weight"]
    assert [b.fqn for b in found.buffers] == ["count", "table"]
    assert dict(found.shared) == {"head.weight": "embed.weight"}
    assert [a.question for a in found.assumed] == [Question.ORDER]
    assert found.undecided == ()
    said = read(tmp_path / "in", param_order=("embed.weight", "layers.0.o.weight", "layers.0.q.weight", "norm.weight"))
    assert [p.fqn for p in said.trained] == ["embed.weight", "layers.0.o.weight", "layers.0.q.weight", "norm.weight"]
    assert said.assumed == ()


def test_names_need_no_word(tmp_path: Path) -> None:
    model = replace(small_model(), groups=[["norm.weight"], ["embed.weight", "layers.0.q.weight"]])
    save_accelerate(model, tmp_path / "in", World())
    found = read(tmp_path / "in")
    assert [(p.fqn, p.group) for p in found.parameters] == [
        ("norm.weight", 0), ("embed.weight", 1), ("layers.0.q.weight", 1), ("layers.0.o.weight", None),
    ]  # fmt: skip
    assert [a.question for a in found.assumed] == [Question.BUFFERS]
    none = read(tmp_path / "in", buffers="none")
    assert [p.fqn for p in none.frozen] == ["table", "layers.0.o.weight"]
    assert [b.fqn for b in none.buffers] == ["count"]
    assert none.assumed == ()


def _named_parameters(rank: int, item: str, value: dict[str, Any]) -> None:
    if item == "optim":
        value["param_groups"][0]["param_names"] = [
            "embed.weight", "layers.0.o.weight", "layers.0.q.weight", "norm.weight",
        ]  # fmt: skip


def test_names_that_the_groups_keep_are_the_numbers_names(tmp_path: Path) -> None:
    save_verl(small_model(), tmp_path / "in", World(), change=_named_parameters)
    found = read(tmp_path / "in")
    assert [p.fqn for p in found.trained] == ["embed.weight", "layers.0.o.weight", "layers.0.q.weight", "norm.weight"]
    assert found.assumed == ()
    assert [b.fqn for b in found.buffers] == ["count", "table"]


@pytest.mark.parametrize("order", [None, "model"])
def test_several_groups_of_numbers_need_a_word(order: str | None, tmp_path: Path) -> None:
    groups = [["embed.weight", "layers.0.q.weight"], ["layers.0.o.weight", "norm.weight"]]
    save_verl(replace(small_model(), groups=groups), tmp_path / "in", World())
    found = read(tmp_path / "in", **({} if order is None else {"param_order": order}))
    if order is None:
        assert [u.question for u in found.undecided] == [Question.ORDER]
        with pytest.raises(SourceError) as caught:
            reshard.convert(tmp_path / "in", tmp_path / "out" / "step", to="universal", progress=False)
        assert caught.value.code == "checkpoint.ambiguous"
        assert "--param-order" in (caught.value.fix or "")
        assert weights(tmp_path / "in", tmp_path / "weights")
    else:
        assert [(p.fqn, p.group) for p in found.trained] == [(n, i) for i, g in enumerate(groups) for n in g]


def _lora(alone: bool) -> Tensors:
    names = {"q.base_layer.weight": (6, 4), "q.lora_A.default.weight": (2, 4), "q.lora_B.default.weight": (6, 2)}
    parameters = {
        f"base_model.model.{n}": (numbers(100 * i, *shape), ROWS) for i, (n, shape) in enumerate(names.items())
    }
    return Tensors(parameters, {}, {}, [list(parameters)[alone:]])


def _without_base_states(rank: int, item: str, value: dict[str, Any]) -> None:
    if item == "optim":
        value["state"] = {k: v for k, v in value["state"].items() if k != 0}


def _adapter_alone(rank: int, item: str, value: dict[str, Any]) -> None:
    _without_base_states(rank, item, value)
    if item == "model":
        for name in [n for n in value if "lora_" not in n]:
            del value[name]


def test_a_base_that_peft_froze_is_frozen(tmp_path: Path) -> None:
    save_verl(_lora(alone=False), tmp_path / "in", World(), change=_without_base_states)
    found = read(tmp_path / "in")
    assert [p.fqn for p in found.frozen] == ["base_model.model.q.base_layer.weight"]
    assert len(found.trained) == 2
    assert "PEFT froze" in found.warnings[0]


def _of_two_layers(width: int) -> Tensors:
    """A LoRA run of two layers, whose optimizer has the adapter alone; each base weight has `width` columns."""
    names = [f"base_model.model.{i}.{n}" for i in range(2) for n in ("base_layer", "lora_A.default", "lora_B.default")]
    rows = {"base_layer": 6, "default": 2}
    parameters = {
        f"{n}.weight": (
            numbers(100 * i, 6 if "lora_B" in n else rows[n.rpartition(".")[2]], 2 if "_B" in n else width),
            ROWS,
        )
        for i, n in enumerate(names)
    }
    return Tensors(parameters, {}, {}, [[n for n in parameters if "lora_" in n]])


def _numbered_alone(rank: int, item: str, value: dict[str, Any]) -> None:
    """The optimizer numbers the parameters that it has."""
    if item == "optim":
        own = value["param_groups"][0]["params"]
        value["state"] = {i: value["state"][number] for i, number in enumerate(own)}
        value["param_groups"][0]["params"] = list(range(len(own)))


def test_an_optimizer_of_the_adapter_alone_is_named_where_forms_leave_one_way(tmp_path: Path) -> None:
    model = _of_two_layers(4)
    save_verl(model, tmp_path / "in", World(), change=_numbered_alone)
    found = read(tmp_path / "in")
    assert [p.fqn for p in found.trained] == model.groups[0]
    assert len(found.frozen) == 2
    assert [a.question for a in found.assumed] == [Question.ORDER]


def test_an_optimizer_of_the_adapter_alone_is_refused_where_forms_leave_several(tmp_path: Path) -> None:
    """Base weights of the shape of an adapter's matrix: the fix names a file that is taken."""
    model = _of_two_layers(2)
    save_verl(model, tmp_path / "in", World(), change=_numbered_alone)
    with pytest.raises(SourceError) as caught:
        reshard.convert(tmp_path / "in", tmp_path / "none", to="universal", progress=False)
    assert caught.value.code == "checkpoint.ambiguous"
    assert "the optimizer numbers 4 parameters, and the model's files hold 6 parameters" in str(caught.value)
    assert str(caught.value.fix).startswith("--param-order FILE")
    order = tmp_path / "order.txt"
    order.write_text("".join(f"{name}\n" for name in model.groups[0]))
    reshard.convert(tmp_path / "in", tmp_path / "out" / "step", to="universal", param_order=str(order), progress=False)
    found = read(tmp_path / "in", param_order=tuple(model.groups[0]))
    assert [p.fqn for p in found.trained] == model.groups[0]
    assert len(found.frozen) == 2


def test_an_adapter_alone_is_named_by_its_states(tmp_path: Path) -> None:
    save_verl(_lora(alone=False), tmp_path / "in", World(), change=_adapter_alone)
    found = read(tmp_path / "in")
    assert [p.fqn.rpartition("q.")[2] for p in found.trained] == ["lora_A.default.weight", "lora_B.default.weight"]
    assert all({*p.states} == {"fp32", "exp_avg", "exp_avg_sq"} for p in found.trained)
    assert [a.question for a in found.assumed] == [Question.ORDER]
    assert found.frozen_left_out


# -- what lies beside -------------------------------------------------------------------------------------------------


def test_scheduler_and_client_state_are_carried_and_random_states_named(tmp_path: Path) -> None:
    extra = {
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1], "base_lrs": [0.1]},
        "rng": {"cpu": torch.zeros(16, dtype=torch.uint8)},
        "client_state": {"epoch": 2},
        "tag": "global_step_3",
    }
    place = save_verl(small_model(), tmp_path / "in", World(), extra=extra)
    (place / "fsdp_config.json").write_text('{"fsdp_strategy": "fsdp2", "world_size": 2}')
    (place / "notes.txt").write_text("mine")
    found = read(place)
    assert found.format == "fsdp-ranks-skyrl"
    assert found.client_state == {"epoch": 2}
    assert len(found.schedulers) == 1
    assert {e.path for e in found.not_carried} == {"tag", "notes.txt"}
    result = reshard.convert(place, tmp_path / "out", to="dcp", grammar="state-dict", progress=False)
    assert "random_states" in {e.path for e in result.not_carried}


def test_a_save_without_optimizer_is_weights(tmp_path: Path) -> None:
    place = save_verl(small_model(), tmp_path / "in", World())
    for file in place.glob("optim_*"):
        file.unlink()
    found = read(place)
    assert found.optimizer is None
    assert found.undecided == ()
    with pytest.raises(ReshardError):
        reshard.convert(place, tmp_path / "out" / "step", to="universal", progress=False)


def test_wrapping_modules_are_taken_off(tmp_path: Path) -> None:
    model = small_model()
    wrapped = {f"_orig_mod.{n}": p for n, p in model.parameters.items()}
    save_verl(Tensors(wrapped, {}, {}, [list(wrapped)]), tmp_path / "in", World())
    found = read(tmp_path / "in")
    assert [p.fqn for p in found.trained] == list(model.parameters)
    assert found.run_names["norm.weight"] == "_orig_mod.norm.weight"


def test_two_models_of_accelerate_are_chosen(tmp_path: Path) -> None:
    place = save_accelerate(small_model(), tmp_path / "in", World())
    for file in [*place.iterdir()]:
        (place / file.name.replace("_0_", "_1_")).write_bytes(file.read_bytes())
    with pytest.raises(SourceError) as caught:
        read(place)
    assert caught.value.code == "checkpoint.ambiguous"
    assert caught.value.fix == "--model-key pytorch_model_fsdp_0, or --model-key pytorch_model_fsdp_1"
    found = read(place, model_key="pytorch_model_fsdp_1")
    assert all(f.name.startswith(("pytorch_model_fsdp_1", "optimizer_1")) for f in found.files)
    assert {e.path for e in found.not_carried} == {p.name for p in place.glob("*_0_*")}
    with pytest.raises(RequestError, match="there is pytorch_model_fsdp_0, pytorch_model_fsdp_1"):
        read(place, model_key="actor")
    with pytest.raises(RequestError, match="--scheduler-key"):
        read(place, model_key="pytorch_model_fsdp_1", scheduler_key="x")


def test_pictures_name_the_ranks(tmp_path: Path) -> None:
    place = save_verl(small_model(), tmp_path / "in", World())
    picture = picture_of(read(place), "layers.0.q.weight")
    assert {f.rank for f in picture.files} == {"rank 0", "rank 1"}


def _tensor_rates(rank: int, item: str, value: dict[str, Any]) -> None:
    if item == "optim":
        value["param_groups"][0]["lr"] = torch.tensor(0.5)


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    place = save_accelerate(small_model(), tmp_path / "in", World(), change=_tensor_rates)
    reshard.convert(place, tmp_path / "out", to="dcp", grammar="state-dict", progress=False)
    found = reshard.diff(place, tmp_path / "out", progress=False)
    assert [d for d in found.differences if "param_groups" in d.name] == []


@pytest.mark.parametrize("save", [save_verl, save_accelerate])
def test_what_inspect_promises_works(save: Callable[..., Path], tmp_path: Path) -> None:
    place = save(small_model(rows=6), tmp_path / "in", World())
    assert broken_promises(place, tmp_path / "out") == []
