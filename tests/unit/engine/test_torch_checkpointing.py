"""Directories of torch_checkpointing: items by name and rank, the metadata beside them, and contradictions of both."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

import reshard
from house.promises import command
from laws.item_files import Items, save_items
from laws.rank_files import ROWS, Placements, Tensors, World, numbers, small_model
from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, ReshardError, SourceError
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Checkpoint, Question
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.nodes import plain_value
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

GRID = World((2, 2), ("fsdp", "tp"))
SAFETENSORS = Items(layouts={"model": "model_{rank}.safetensors"})
SCHEDULER = {"base_lrs": [0.1], "last_epoch": 3, "_last_lr": [0.05], "lr_lambdas": [None]}


def read(folder: Path, **choices: Any) -> Checkpoint:
    ledger = OpaqueLedger(OpaquePolicy.REFUSE)
    return read_checkpoint(open_location(str(folder)), None, ledger, choices=SourceChoices(**choices))


def weights(folder: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    reshard.convert(folder, out, to="safetensors", progress=False, **options)
    return load_file(out / "model.safetensors")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def untied(placements: Placements = ROWS) -> Tensors:
    """A model whose state dict safetensors can hold."""
    return replace(small_model(placements), ties={})


@pytest.mark.parametrize(
    ("world", "how", "model"),
    [
        (World((4,)), Items(), small_model()),
        (World((4,)), Items(version="1.0"), small_model()),
        (World((4,)), Items(described=()), small_model()),
        (World((1,)), Items(), small_model()),
        (World((1,)), Items(described=()), small_model()),
        (World((2, 2), ("dp_replicate", "fsdp")), Items(), small_model((Replicate(), Shard(0)))),
        (World((2, 2), ("fsdp", "tp"), ("fsdp",)), Items(), small_model()),
        (World((4,)), SAFETENSORS, untied()),
        (World((4,)), replace(SAFETENSORS, version="1.0"), untied()),
        (World((2, 2), ("dp_replicate", "fsdp")), SAFETENSORS, untied((Replicate(), Shard(0)))),
        (World((2, 2), ("fsdp", "tp"), ("fsdp",)), SAFETENSORS, untied()),
        (World((4,)), Items(layouts={"model": "rank_{rank}/model.pt", "optimizer": "rank_{rank}/o.pt"}), small_model()),
    ],
    ids=lambda value: value.shape if isinstance(value, World) else "",
)  # fmt: skip
def test_each_layout_holds_the_model_and_its_optimizer(
    world: World, how: Items, model: Tensors, tmp_path: Path
) -> None:
    place = save_items(model, tmp_path / "in", world, how)
    found = weights(place, tmp_path / "out")
    assert all(same(found[name], whole) for name, (whole, _) in model.parameters.items())
    assert all(same(found[name], whole) for name, whole in model.buffers.items())
    checkpoint = read(place)
    assert checkpoint.format == "torch-checkpointing"
    assert dict(checkpoint.world) == {"dp": world.size}
    assert [p.fqn for p in checkpoint.trained] == list(model.parameters)
    assert all({*p.states} == {"fp32", "exp_avg", "exp_avg_sq"} for p in checkpoint.trained)
    assert all(p.scalars["step"].value == 3.0 for p in checkpoint.trained)
    group = checkpoint.optimizer.groups[0].hyper_parameters if checkpoint.optimizer else {}
    assert {"lr", "betas", "eps"} <= group.keys()
    assert not {"params", "param_names"} & group.keys()
    if world.size > 1:  # whole tensors beside sharded ones are buffers
        assert checkpoint.undecided == ()
        assert {a.question for a in checkpoint.assumed} <= {Question.BUFFERS}
    assert dict(checkpoint.shared) == dict(model.ties)


def test_tensor_parallel_cuts_are_read_from_both_forms(tmp_path: Path) -> None:
    whole = {"q": numbers(1, 8, 3), "o": numbers(100, 4, 6)}
    cuts: dict[str, Placements] = {"q": (_StridedShard(0, split_factor=2), Shard(0)), "o": (Shard(0), Shard(1))}
    model = Tensors({n: (t, cuts[n]) for n, t in whole.items()}, {}, {}, [[*whole]])
    for how in (Items(), SAFETENSORS):
        place = save_items(model, tmp_path / f"in{len(how.layouts)}", GRID, how)
        found = weights(place, tmp_path / f"out{len(how.layouts)}")
        assert all(same(found[name], tensor) for name, tensor in whole.items())


def test_other_items_are_carried_and_those_of_single_ranks_are_told(tmp_path: Path) -> None:
    others = {
        "lr_scheduler": SCHEDULER, "train_state": {"step": 3, "tokens": torch.tensor(360)}, "note": "hello",
        "rng": lambda rank: torch.full((8,), rank, dtype=torch.uint8), "config": {"a": [1, None]},
    }  # fmt: skip
    how = Items(others=others, layouts={"config": "config_{rank}.json"})
    place = save_items(small_model(), tmp_path / "in", World((2,)), how)
    (place / "model-00001-of-00001.safetensors").write_bytes(b"not read")
    checkpoint = read(place)
    assert checkpoint.scheduler_keys == ("lr_scheduler",)
    assert plain_value(checkpoint.schedulers[0], what="it") == SCHEDULER
    assert {*checkpoint.client_state} == {"train_state", "note", "config"}
    assert checkpoint.client_state["note"] == "hello"
    assert {*checkpoint.facts.own_state()} == {"rng"}
    told = {n.path: n.reason for n in checkpoint.not_carried}
    assert "a copy of the model's weights" in told["model-00001-of-00001.safetensors"]
    made = reshard.convert(place, tmp_path / "dcp", to="dcp", grammar="state-dict", progress=False)
    assert "rng" in {n.path for n in made.not_carried}


def test_numbers_are_named_by_the_groups_or_by_shapes_that_prove_them(tmp_path: Path) -> None:
    alone = {"a": (numbers(1, 4, 3), ROWS), "b": (numbers(50, 5, 3), ROWS)}
    proven = save_items(Tensors(alone, {}, {}, [[*alone]]), tmp_path / "a", World((2,)), Items(numbers=True))
    assert [p.fqn for p in read(proven).trained] == ["a", "b"]
    assert read(proven).undecided == ()
    place = save_items(small_model(), tmp_path / "b", World((2,)), Items(numbers=True))
    (open_question,) = read(place).undecided
    assert open_question.question is Question.ORDER
    assert weights(place, tmp_path / "weights")
    said = read(place, param_order=tuple(small_model().parameters))
    assert [p.fqn for p in said.trained] == list(small_model().parameters)

    def name(rank: int, payload: dict[str, Any]) -> None:
        payload["optimizer"]["param_groups"][0]["param_names"] = list(small_model().parameters)

    named = save_items(small_model(), tmp_path / "c", World((2,)), Items(numbers=True), change=name)
    assert read(named).undecided == ()


def test_several_models_and_optimizers_are_chosen_by_the_user(tmp_path: Path) -> None:
    def second(rank: int, payload: dict[str, Any]) -> None:
        payload |= {"critic": payload["model"], "optimizer_c": payload["optimizer"]}

    place = save_items(small_model(), tmp_path / "in", World((2,)), Items(), change=second)
    (question,) = read(place).undecided
    assert question.question is Question.MODEL
    assert "--model-key critic --optimizer-key optimizer_c" in question.fix
    (question,) = read(place, model_key="model").undecided
    assert question.question is Question.OPTIMIZER
    assert "--optimizer-key optimizer_c" in question.fix
    found = read(place, model_key="critic", optimizer_key="optimizer_c")
    assert found.undecided == ()
    assert {"model", "optimizer"} == {*found.facts.own_state()}, "a distributed checkpoint has a place for them"
    with pytest.raises(RequestError, match="no item 'nobody'"):
        read(place, model_key="nobody")


# Contradictions. Each is refused by its name, whatever is asked of it.


def _spec(metadata: dict[str, Any], item: str, path: str) -> dict[str, Any]:
    found: dict[str, Any] = metadata["metadata"][item]["nested_path_to_metadata"][path][0]
    return found


Q = '["layers.0.q.weight"]'


def _data(change: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda m: _spec(m, "model", Q)["sharding_metadata"]["data"].update(change)


def _mesh(change: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    def apply(metadata: dict[str, Any]) -> None:
        data = _spec(metadata, "model", Q)["sharding_metadata"]["data"]
        data["mesh_spec"] = {**data["mesh_spec"], **change}

    return apply


def _paths(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(metadata: dict[str, Any]) -> None:
        change(metadata["metadata"]["model"]["nested_path_to_metadata"])

    return apply


def _layouts(path: str) -> Callable[[dict[str, Any]], None]:
    form = {"file_path": path, "serialization_format": {"type": "TorchSerialization"}}
    return lambda m: m["metadata"]["model"]["rank_to_layout_info"].update({0: form})


_CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "placements that lie": (_data({"placements": [{"type": "Shard", "dim": 1}]}), "checkpoint.mixed", "Shard(1)"),
    "a replica that is none": (_data({"placements": [{"type": "Replicate"}]}), "checkpoint.mixed", "Replicate"),
    "an unknown placement": (_data({"placements": [{"type": "Partial"}]}), "source.unsupported", "Partial"),
    "a dimension too many": (_data({"placements": [{"type": "Shard", "dim": 7}]}), "checkpoint.malformed", "7"),
    "another shape": (_data({"global_shape": [6, 4]}), "checkpoint.mixed", "(6, 4)"),
    "another type": (_data({"dtype": "torch.bfloat16"}), "checkpoint.mixed", "bfloat16"),
    "no type": (_data({"dtype": "os.system"}), "checkpoint.malformed", "os.system"),
    "a negative length": (_data({"global_shape": [-5, 4]}), "checkpoint.malformed", "no counts"),
    "other names of axes": (_mesh({"mesh_dim_names": ("tp",)}), "checkpoint.mixed", "tp"),
    "another order of ranks": (_mesh({"mesh_data": (1, 0)}), "checkpoint.mixed", "layers.0.q.weight"),
    "a rank twice": (_mesh({"mesh_data": (1, 1)}), "checkpoint.malformed", "a mesh of (2,)"),
    "a rank that nobody is": (_mesh({"mesh_data": (0, 9)}), "checkpoint.malformed", "of 2"),
    "a mesh of another size": (_mesh({"mesh_shape": (3,)}), "checkpoint.malformed", "a mesh of (3,)"),
    "ranks of no mesh": (lambda m: _spec(m, "model", Q).update(ranks=(0,)), "checkpoint.malformed", "other ranks"),
    "a rank twice in its list": (lambda m: _spec(m, "model", Q).update(ranks=(0, 0)), "checkpoint.malformed", "twice"),
    "two ways for a rank": (
        lambda m: m["metadata"]["model"]["nested_path_to_metadata"][Q].append(_spec(m, "model", Q)),
        "checkpoint.malformed", "in two ways",
    ),
    "a path that is no list": (_paths(lambda p: p.update(nobody=p.pop(Q))), "checkpoint.malformed", "not valid JSON"),
    "a path of a dict": (_paths(lambda p: p.update({'{"a":1}': p.pop(Q)})), "checkpoint.malformed", "no list of names"),
    "a tensor that no file holds": (_paths(lambda p: p.update({'["x"]': p[Q]})), "checkpoint.mixed", "not hold x"),
    "a tensor that is not listed": (_paths(lambda p: p.pop(Q)), "checkpoint.mixed", "is not among the tensors"),
    "another world": (lambda m: m.update(world_size=3), "checkpoint.malformed", "not of the ranks 0 to 2"),
    "no world": (lambda m: m.update(world_size="2"), "checkpoint.malformed", "world_size"),
    "a later version": (lambda m: m.update(version="3.0"), "source.unsupported", "3.0"),
    "another kind of tensor": (
        lambda m: _spec(m, "model", Q)["sharding_metadata"].update(type="default_tensor_v1"),
        "source.unsupported", "default_tensor_v1",
    ),
    "a file elsewhere": (_layouts("../model_0.pt"), "checkpoint.malformed", "'../model_0.pt'"),
    "a file of the root": (_layouts("/etc/passwd"), "checkpoint.malformed", "'/etc/passwd'"),
    "a file that is not there": (_layouts("model_7.pt"), "checkpoint.incomplete", "model_7.pt"),
    "a file of another rank": (_layouts("model_1.pt"), "checkpoint.mixed", "model_0.pt"),
    "no items": (lambda m: m.update(metadata={}), "checkpoint.malformed", "describes no item"),
    "a class": (lambda m: m.update(extra=Path("x")), "checkpoint.malformed", "pathlib.PosixPath"),
    "a number that is none": (lambda m: m.update(extra=1.5), "checkpoint.malformed", "a value of another kind"),
}  # fmt: skip


@pytest.mark.parametrize("case", _CONTRADICTIONS)
def test_metadata_that_contradict_files_or_themselves_are_refused(case: str, tmp_path: Path) -> None:
    change, code, text = _CONTRADICTIONS[case]
    place = save_items(small_model(), tmp_path, World((2,)), change_metadata=change)
    with pytest.raises(SourceError) as caught:
        read(place)
    assert (caught.value.code, text in caught.value.message) == (code, True), caught.value.message


def test_metadata_that_would_run_something_are_refused(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "harm").touch, ())

    place = save_items(small_model(), tmp_path / "in", World((2,)))
    (place / "metadata.pkl").write_bytes(pickle.dumps({"version": "2.0", "world_size": 2, "metadata": Harm()}))
    with pytest.raises(SourceError) as caught:
        read(place)
    assert caught.value.code.startswith(("pickle.", "checkpoint.malformed"))
    assert not (tmp_path / "harm").exists()


def _without(name: str) -> Callable[[Path], Any]:
    return lambda place: (place / name).unlink()


def _copy(name: str, other: str) -> Callable[[Path], Any]:
    return lambda place: shutil.copy(place / name, place / other)


@pytest.mark.parametrize(
    ("how", "change", "code", "text"),
    [
        (Items(), _without("model_1.pt"), "checkpoint.incomplete", "model_1.pt"),
        (Items(), _without("optimizer_0.pt"), "checkpoint.incomplete", "optimizer_0.pt"),
        (Items(described=()), _without("model_1.pt"), "checkpoint.incomplete", "model_1.pt"),
        (Items(), _copy("model_1.pt", "model_2.pt"), "checkpoint.mixed", "model_2.pt"),
        (Items(others={"note": "x"}), _copy("note_1.pt", "note_2.pt"), "checkpoint.mixed", "note_2.pt"),
        (Items(), _copy("model_1.pt", "model_0.pt"), "checkpoint.mixed", "was not written by rank 0"),
        (Items(), _copy("model_1.pt", "model_01.pt"), "checkpoint.mixed", "model_01.pt"),
        (Items(described=()), _copy("model_1.pt", "model_01.pt"), "checkpoint.mixed", "of one rank"),
        (SAFETENSORS, _without("metadata.pkl"), "checkpoint.incomplete", "metadata.pkl"),
        (SAFETENSORS, _copy("model_0.safetensors", "model_1.safetensors"), "checkpoint.mixed", "gives rank 1"),
        (Items(), _copy("lr_0.pt", "model_0.pt"), "checkpoint.mixed", "model_0.pt"),
        (Items(), _copy("lr_0.pt", "optimizer_0.pt"), "checkpoint", "optimizer"),
    ],
)
def test_files_of_other_ranks_and_saves_are_refused(
    how: Items, change: Callable[[Path], Any], code: str, text: str, tmp_path: Path
) -> None:
    model = untied() if how is SAFETENSORS else small_model()
    others = {**how.others, "lr": SCHEDULER}
    place = save_items(model, tmp_path, World((2,)), replace(how, others=others))
    change(place)
    with pytest.raises(ReshardError) as caught:
        read(place).refuse_undecided()
    assert caught.value.code.startswith(code), caught.value.message
    assert text in caught.value.message


def test_whole_tensors_without_metadata_are_perhaps_of_steps(tmp_path: Path) -> None:
    for step in range(2):
        torch.save({"a": torch.ones(3)}, tmp_path / f"model_{step}.pt")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"optimizer_{step}.pt")
    with pytest.raises(SourceError, match="of steps or epochs") as caught:
        read(tmp_path)
    assert caught.value.code == "checkpoint.ambiguous"


def test_ranks_that_hold_other_hyper_parameters_are_refused(tmp_path: Path) -> None:
    def change(rank: int, payload: dict[str, Any]) -> None:
        payload["optimizer"]["param_groups"][0]["lr"] = 0.1 + rank

    place = save_items(small_model(), tmp_path, World((2,)), change=change)
    with pytest.raises(SourceError, match=r"differ at param_groups\[0\]\.lr"):
        read(place)


def test_a_later_form_of_the_optimizer_and_tensors_within_tensors_are_refused(tmp_path: Path) -> None:
    def later(rank: int, payload: dict[str, Any]) -> None:
        payload["optimizer"]["_optimizer_state_format_version"] = 2

    def nested(rank: int, payload: dict[str, Any]) -> None:
        payload["model"]["inner"] = {"a": torch.ones(2)}

    for name, change in (("later", later), ("nested", nested)):
        place = save_items(small_model(), tmp_path / name, World((2,)), Items(described=()), change=change)
        with pytest.raises(SourceError) as caught:
            read(place)
        assert caught.value.code == "source.unsupported"


def test_inspect_names_the_format_and_its_ranks(tmp_path: Path) -> None:
    place = save_items(untied(), tmp_path, World((2,)), SAFETENSORS)
    (place / "model.safetensors.index.json").write_text("{}")
    code, out, _ = command("inspect", str(place))
    assert code == 0
    assert out.startswith("torch-checkpointing, dp=2")
    assert "no training state" not in out
    assert json.loads(command("inspect", str(place), "--json")[1])["world"] == {"dp": 2}
