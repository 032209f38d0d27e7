"""Files of FSDP's ranks for other worlds: each rank's file holds what torch itself saves on that many ranks."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import reshard
from laws.rank_files import FSDP1, ROWS, Placements, Tensors, World, numbers, save_accelerate, save_verl, small_model
from reshard.errors import RequestError, ReshardError

HSDP = (Replicate(), Shard(0))
RANDOM = {"cpu": torch.zeros(8, dtype=torch.uint8), "numpy": ("MT19937", 1), "random": (3, None)}
NO_STATES = {"lr_scheduler": None}
SCHEDULER = {"last_epoch": 3, "_step_count": 4, "_last_lr": [0.1], "base_lrs": [0.1]}


def convert(place: Path, out: Path, dp: int, **options: Any) -> Any:
    return reshard.convert(place, out, to="fsdp_ranks", dp=dp, progress=False, **options)


def _same(a: Any, b: Any, where: str) -> list[str]:
    """The places at which two values differ: types, tensors bit for bit, the meshes and specifications of DTensors."""
    if is_mapping(a) and is_mapping(b):
        same = [*a] == [*b] if type(a) is type(b) is OrderedDict else {*a} == {*b}
        keys = [] if same else [f"{where}: keys {[*a]} and {[*b]}"]
        return keys or [p for k in a for p in _same(a[k], b[k], f"{where}.{k}")]
    if type(a) is not type(b):
        return [f"{where}: {type(a)} and {type(b)}"]
    if type(a) in (list, tuple):
        lengths = [f"{where}: {len(a)} and {len(b)} items"] if len(a) != len(b) else []
        return lengths or [p for i, v in enumerate(a) for p in _same(v, b[i], f"{where}[{i}]")]
    if type(a) is DTensor:
        problems = [] if _said_of(a) == _said_of(b) else [f"{where}: {_said_of(a)} and {_said_of(b)}"]
        return problems + _same(a.to_local(), b.to_local(), f"{where} locally")
    if type(a) is torch.Tensor:
        return [] if (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b) else [f"{where}: other elements"]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]


def is_mapping(value: Any) -> bool:
    return type(value) in (dict, OrderedDict)


def _said_of(tensor: Any) -> tuple[object, ...]:
    """What a DTensor says of the whole tensor, of the mesh, and of its rank's place and process groups in it."""
    mesh = tensor.device_mesh
    groups, rank = mesh._dim_group_names, mesh._rank
    return tensor._spec, mesh, groups, rank, mesh.get_coordinate(), tensor.stride(), tensor.requires_grad


def _differences(found: Path, wanted: Path, world: World) -> list[str]:
    """The differences of two directories of ranks' files, each file loaded by torch as its rank."""
    names = sorted(p.name for p in wanted.iterdir() if p.suffix in (".pt", ".bin"))
    problems = [] if names == sorted(p.name for p in found.iterdir() if p.suffix in (".pt", ".bin")) else ["names"]
    for name in names:
        rank = int(name.rpartition(".")[0].rpartition("rank")[2].lstrip("_"))
        with world.mesh_of(rank):
            a, b = (torch.load(place / name, weights_only=True) for place in (found, wanted))
            problems += _same(a, b, name)
    return problems


@pytest.mark.parametrize("save", [save_verl, save_accelerate])
@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        (World((4,)), World((3,)), {}),
        (World((4,)), World((1,)), {}),
        (World((1,)), World((8,)), {}),
        (World((2, 2), ("ddp", "fsdp")), World((3, 2), ("ddp", "fsdp")), {}),
        (World((2, 2), ("ddp", "fsdp")), World((2,)), {}),
        (World((2, 2), ("ddp", "fsdp")), World((2, 4), ("ddp", "fsdp")), {"fsdp_size": 4}),
    ],
    ids=str,
)  # fmt: skip
def test_each_file_holds_what_torch_saves_on_that_many_ranks(
    save: Callable[..., Path], source: World, target: World, options: dict[str, Any], tmp_path: Path
) -> None:
    if save is save_accelerate and len(source.shape) == 1:
        source, target = replace(source, names=None), replace(target, names=None)
    if save is save_accelerate and len(source.shape) != len(target.shape):
        target = replace(target, names=None)
    extra: dict[str, Any] = {"extra": {"lr_scheduler": SCHEDULER}} if save is save_verl else {}
    save(small_model(_rows(source)), tmp_path / "in", source, **extra)
    save(small_model(_rows(target)), tmp_path / "wanted", target, **extra)
    convert(tmp_path / "in", tmp_path / "out", target.size, **options)
    assert _differences(tmp_path / "out", tmp_path / "wanted", target) == []


def _rows(world: World) -> Placements:
    return ROWS if len(world.shape) == 1 else HSDP


def _states_of(folder: Path) -> list[Any]:
    files = sorted(folder.glob("extra_state_*"))
    return [torch.load(f, weights_only=False) for f in files]


def _with_extra(folder: Path, world: int, **more: Any) -> Path:
    def change(rank: int, item: str, value: dict[str, Any]) -> None:
        if item == "extra_state" and value.get("rng") is not None:
            value["rng"] = {**value["rng"], "cpu": torch.full((8,), rank, dtype=torch.uint8)}

    extra = {"lr_scheduler": SCHEDULER, "rng": RANDOM, **more}
    return save_verl(small_model(), folder, World((world,)), change=change, extra=extra)


def test_scheduler_and_random_states_go_to_each_rank(tmp_path: Path) -> None:
    place = _with_extra(tmp_path / "in", 2)
    result = convert(place, tmp_path / "out", 3)
    found = _states_of(tmp_path / "out")
    assert [{**f, "rng": int(f["rng"]["cpu"][0])} for f in found] == [
        {"lr_scheduler": SCHEDULER, "rng": rank} for rank in (0, 1, 0)
    ]
    assert json.loads((tmp_path / "out" / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 3}
    assert "rank r gets those of source rank r mod 2" in "".join(result.warnings)
    convert(place, tmp_path / "none", 3, rng="drop")
    assert [list(f) for f in _states_of(tmp_path / "none")] == [["lr_scheduler"]] * 3


def test_skyrl_gets_its_own_keys(tmp_path: Path) -> None:
    place = _with_extra(tmp_path / "in", 2, client_state={"epoch": 2}, tag="global_step_3")
    (place / "fsdp_config.json").write_text('{"fsdp_strategy": "fsdp2", "world_size": 2}')
    convert(place, tmp_path / "out", 3)
    found = _states_of(tmp_path / "out")
    assert [(f["world_size"], f["rank"], f["fsdp_strategy"], f["tag"]) for f in found] == [
        (3, rank, "fsdp2", None) for rank in range(3)
    ]
    assert all((f["client_state"], f["lr_scheduler"]) == ({"epoch": 2}, SCHEDULER) for f in found)
    said = json.loads((tmp_path / "out" / "fsdp_config.json").read_text())
    assert said == {"fsdp_strategy": "fsdp2", "world_size": 3}


def test_one_word_of_skyrl_does_not_say_the_version(tmp_path: Path) -> None:
    """`fsdp` was FSDP1 in skyrl-train, and is FSDP2 since SkyRL 0.3.0: states on a mesh prove it, or the user says."""
    place = _with_extra(tmp_path / "in", 2)
    (place / "fsdp_config.json").write_text('{"fsdp_strategy": "fsdp", "world_size": 2}')
    convert(place, tmp_path / "out", 3)
    said = json.loads((tmp_path / "out" / "fsdp_config.json").read_text())
    assert said == {"fsdp_strategy": "fsdp", "world_size": 3}
    assert [f["fsdp_strategy"] for f in _states_of(tmp_path / "out")] == ["fsdp"] * 3
    for file in place.glob("optim_*"):
        file.unlink()
    with pytest.raises(ReshardError, match="FSDP1 or FSDP2") as caught:
        convert(place, tmp_path / "none", 3)
    assert "--fsdp-version 2" in caught.value.fix
    convert(place, tmp_path / "none", 3, fsdp_version=2)
    assert len([*(tmp_path / "none").glob("model_world_size_3_rank_*.pt")]) == 3


def test_small_files_beside_go_along_and_weights_are_named(tmp_path: Path) -> None:
    place = save_verl(small_model(), tmp_path / "in", World())
    (place / "huggingface").mkdir()
    (place / "huggingface" / "config.json").write_text("{}")
    (place / "huggingface" / "model.safetensors").write_text("weights")
    (place / "lora_train_meta.json").write_text('{"r": 4}')
    (place / "notes.txt").write_text("mine")
    result = convert(place, tmp_path / "out", 3)
    assert (tmp_path / "out" / "huggingface" / "config.json").read_text() == "{}"
    assert (tmp_path / "out" / "lora_train_meta.json").read_text() == '{"r": 4}'
    assert {e.path for e in result.not_carried} == {"notes.txt", "huggingface/model.safetensors"}


def test_a_save_without_optimizer_or_extra_state_gets_none(tmp_path: Path) -> None:
    place = save_verl(small_model(), tmp_path / "in", World())
    for file in (*place.glob("optim_*"), *place.glob("extra_*")):
        file.unlink()
    with pytest.raises(RequestError, match="FSDP1 or FSDP2"):  # the models of both are alike
        convert(place, tmp_path / "out", 3)
    result = convert(place, tmp_path / "out", 3, fsdp_version=2)
    assert sorted(p.name.partition("_world")[0] for p in (tmp_path / "out").glob("*.pt")) == ["model"] * 3
    assert any("begin its optimizer anew" in w for w in result.warnings)


def test_parameters_that_were_never_updated_get_no_states(tmp_path: Path) -> None:
    def change(_rank: int, item: str, value: dict[str, Any]) -> None:
        if item == "optim":
            del value["state"][1]

    save_verl(small_model(), tmp_path / "in", World(), change=change, extra=NO_STATES)
    save_verl(small_model(), tmp_path / "wanted", World((3,)), change=change, extra=NO_STATES)
    convert(tmp_path / "in", tmp_path / "out", 3)
    assert _differences(tmp_path / "out", tmp_path / "wanted", World((3,))) == []


def test_the_names_and_module_versions_of_the_run_stay(tmp_path: Path) -> None:
    model = small_model()
    wrapped = {f"_orig_mod.{n}": p for n, p in model.parameters.items()}

    def change(_rank: int, item: str, value: Any) -> None:
        if item == "model":
            value._metadata = {"": {"version": 1}, "_orig_mod.norm": {"version": 2}}

    tensors = Tensors(wrapped, {}, {}, [list(wrapped)])
    save_verl(tensors, tmp_path / "in", World(), change=change, extra=NO_STATES)
    save_verl(tensors, tmp_path / "wanted", World((3,)), change=change, extra=NO_STATES)
    convert(tmp_path / "in", tmp_path / "out", 3)
    assert _differences(tmp_path / "out", tmp_path / "wanted", World((3,))) == []
    found = torch.load(tmp_path / "out" / "model_world_size_3_rank_0.pt", weights_only=False)
    assert found._metadata == {"": {"version": 1}, "_orig_mod.norm": {"version": 2}}


def test_what_the_user_orders_keeps_its_numbers(tmp_path: Path) -> None:
    model = small_model()
    turned = replace(model, groups=[[*model.parameters][::-1]])

    def change(_rank: int, item: str, value: dict[str, Any]) -> None:
        if item == "optim":  # the optimizer counts from the last parameter on
            last = len(model.parameters) - 1
            value["state"] = {last - k: s for k, s in value["state"].items()}
            value["param_groups"][0]["params"] = list(range(last + 1))

    save_verl(turned, tmp_path / "in", World(), change=change, extra=NO_STATES)
    save_verl(turned, tmp_path / "wanted", World((3,)), change=change, extra=NO_STATES)
    order = tmp_path / "order.txt"
    order.write_text("\n".join([*model.parameters][::-1]))
    convert(tmp_path / "in", tmp_path / "out", 3, param_order=order)
    assert _differences(tmp_path / "out", tmp_path / "wanted", World((3,))) == []


def test_accelerate_becomes_verl_and_goes_back(tmp_path: Path) -> None:
    model = small_model()
    save_accelerate(model, tmp_path / "in", World((2,), None))
    convert(tmp_path / "in", tmp_path / "verl", 3, rank_framework="verl", buffers="count,table")
    save_verl(model, tmp_path / "wanted", World((3,)))
    for file in (*(tmp_path / "wanted").glob("extra_*"), *(tmp_path / "verl").glob("extra_*")):
        file.unlink()
    assert _differences(tmp_path / "verl", tmp_path / "wanted", World((3,))) == []
    convert(tmp_path / "verl", tmp_path / "back", 2, rank_framework="accelerate")
    assert _differences(tmp_path / "back", tmp_path / "in", World((2,), None)) == []


def test_zero_becomes_verl_with_what_the_user_says(tmp_path: Path) -> None:
    place = _with_extra(tmp_path / "in", 2)
    reshard.convert(place, tmp_path / "zero" / "step3", to="zero", dp=2, zero_stage="2", progress=False)
    with pytest.raises(RequestError, match="the source is of none"):
        convert(tmp_path / "zero" / "step3", tmp_path / "out", 2)
    with pytest.raises(RequestError, match="the source does not say it") as caught:
        convert(tmp_path / "zero" / "step3", tmp_path / "out", 2, rank_framework="verl")
    assert "--device-type cuda" in caught.value.fix
    convert(tmp_path / "zero" / "step3", tmp_path / "out", 2, rank_framework="verl", device_type="cpu")
    found = reshard.diff(place, tmp_path / "out", progress=False)
    # DeepSpeed's optimizer got a key that torch's does not have, and no place of ZeRO's takes random states by rank.
    assert {d.state or d.name for d in found.differences} == {"random_states"}


def _older_mesh(rank: int, item: str, value: dict[str, Any]) -> None:
    for tensor in value.values() if item == "model" else ():
        if isinstance(tensor, DTensor) and "mesh" not in tensor.device_mesh.__dict__:
            mesh: Any = tensor.device_mesh
            own = {"device_type": "cpu", "mesh": mesh.mesh, "mesh_dim_names": ("fsdp",), "_coordinate_on_dim": [rank]}
            mesh.__dict__.clear()
            mesh.__dict__.update(own)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        ("plain", {"dtype": "bf16"}, "no --dtype"),
        ("plain", {"exclude_frozen": True}, "no --exclude-frozen"),
        ("plain", {"tp": 2}, "--to fsdp_ranks does not take --"),
        ("plain", {"zero_stage": "2"}, "--to fsdp_ranks does not take --"),
        ("plain", {"dp": None}, "--to fsdp_ranks needs --dp"),
        ("plain", {"fsdp_version": 1}, "none of FSDP1"),
        ("plain", {"dp": 4, "fsdp_size": 3}, "4 ranks are no multiple of the 3 ranks"),
        ("hsdp", {"dp": 5}, "5 ranks are no multiple of the 2 ranks that share one copy as in the source"),
        ("fsdp1", {}, "saved by FSDP1"),
        ("tensor-parallel", {}, "FSDP alone, which cuts rows"),
        ("columns", {}, "are cut in another way"),
        ("older", {}, "older form"),
        ("groups", {"rank_framework": "verl"}, "makes one of all parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_files_cannot_hold_is_refused(make: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    place, model = tmp_path / "in", small_model(rows=6)
    match make:
        case "hsdp":
            save_verl(small_model(HSDP), place, World((2, 2), ("ddp", "fsdp")))
        case "fsdp1":
            save_accelerate(small_model(FSDP1), place, World((2,), None))
        case "tensor-parallel":
            save_accelerate(small_model((Shard(0), Shard(0)), rows=8), place, World((2, 2), ("dp", "tp")))
        case "columns":
            matrices = {n: (numbers(i, 6, 4), (Shard(1),)) for i, n in enumerate(("a", "b"))}
            save_accelerate(Tensors(matrices, {}, {}, [list(matrices)]), place, World())
        case "older":
            save_verl(model, place, World(), change=_older_mesh)
        case "groups":
            names = list(model.parameters)
            save_accelerate(replace(model, groups=[names[:2], names[2:]]), place, World((2,), None))
        case _:
            save_verl(model, place, World())
    given: dict[str, Any] = {"to": "fsdp_ranks", "dp": 3, "progress": False, **options}
    with pytest.raises(ReshardError, match=says) as caught:
        reshard.convert(place, tmp_path / "out", **given)
    assert caught.value.code in ("request.invalid", "request.unsatisfiable")
    assert caught.value.fix


def test_options_of_ranks_are_for_ranks(tmp_path: Path) -> None:
    place = save_verl(small_model(), tmp_path / "in", World())
    with pytest.raises(RequestError, match="does not take --device-type; it is for --to fsdp_ranks, torch_check"):
        reshard.convert(place, tmp_path / "out", to="dcp", device_type="cuda", progress=False)


def test_a_run_on_gpus_names_them(tmp_path: Path) -> None:
    save_verl(small_model(), tmp_path / "in", World())
    convert(tmp_path / "in", tmp_path / "out", 2, device_type="cuda")
    with World().mesh_of(1):
        found = torch.load(tmp_path / "out" / "model_world_size_2_rank_1.pt", weights_only=True)
    assert found["embed.weight"].device_mesh.device_type == "cuda"
    assert found["embed.weight"].to_local().device.type == "cpu"
