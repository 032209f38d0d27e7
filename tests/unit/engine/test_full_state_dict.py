"""Training files with whole tensors: names of numbers, choices among models and optimizers, files that stand alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import reshard
from house.promises import command
from laws.dcp_files import Save, save as save_dcp
from oracle.whole_tensors import named, whole
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError, SourceError
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Checkpoint, Question
from reshard_engine.formats.model_weights import StoredNames, compiled_names, plain_names, shown_names, tensors_named
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

SHAPES = {"embed": (5, 3), "a.weight": (3, 3), "a.bias": (3,), "b.weight": (3, 3), "b.bias": (3,), "scale": ()}
ONE = [list(SHAPES)]
DECAYING = [[n for n in SHAPES if "weight" in n or n == "embed"], ["a.bias", "b.bias", "scale"]]
"""The matrices, then the rest: shapes tell the groups apart."""
MIXED = [["embed", "a.weight", "a.bias"], ["b.weight", "b.bias", "scale"]]
"""Layers in groups of their own: both groups have equal shapes."""


def model() -> dict[str, torch.Tensor]:
    """Tensors with numbers that no other one has."""
    return {n: torch.full(s, 10.0 * i) + torch.arange(torch.Size(s).numel()).reshape(s) for i, (n, s) in
            enumerate(SHAPES.items(), 1)}  # fmt: skip


def optimizer(groups: Sequence[Sequence[str]] = ONE, *, numbers: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The state dict of an optimizer with these groups, as torch numbers them or with other numbers."""
    own = {n: i for i, n in enumerate(n for group in groups for n in group)} if numbers is None else numbers
    tensors = model()
    states = {own[n]: {"step": torch.tensor(4.0), "exp_avg": tensors[n] * 3, "exp_avg_sq": tensors[n] * 5} for n in own}
    hyper = {"betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False}
    lists = [
        {"lr": 0.5 / (i + 1), **hyper, "weight_decay": 0.1 * i, "params": [own[n] for n in group]}
        for i, group in enumerate(groups)
    ]
    return {"state": dict(sorted(states.items())), "param_groups": lists}


def save(place: Path, value: Mapping[str, Any] | None = None, **more: Any) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model(), "optimizer": optimizer()} | more if value is None else value, place)
    return place


def read(place: Path, **choices: Any) -> Checkpoint:
    ledger = OpaqueLedger(OpaquePolicy.REFUSE)
    return read_checkpoint(open_location(str(place)), None, ledger, choices=SourceChoices(**choices))


def shards(place: Path, out: Path, **options: Any) -> dict[str, Any]:
    reshard.convert(place, out, to="dcp", framework="state-dict", progress=False, **options)
    return whole(out)


def assert_right(found: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
    """All states are those of their parameters, and all groups have their members and values, in order."""
    tensors = named(found)
    for name, value in model().items():
        assert torch.equal(tensors[f"{name}/model"], value)
        assert torch.equal(tensors[f"{name}/exp_avg"], value * 3), name
        assert torch.equal(tensors[f"{name}/exp_avg_sq"], value * 5)
    held = found["optimizer"]["param_groups"]
    assert [g["params"] for g in held] == [list(g) for g in groups]
    for own, saved in zip(held, optimizer(groups)["param_groups"], strict=True):
        assert {k: own[k] for k in saved if k != "params"} == {k: v for k, v in saved.items() if k != "params"}


# -- names of numbers --------------------------------------------------------------------------------------------------


def test_one_group_is_taken_in_the_models_order_with_a_warning(tmp_path: Path) -> None:
    place = save(tmp_path / "a.pt", epoch=7, scaler={"scale": 2.0}, best=None)
    (assumed,) = read(place).assumed
    assert assumed.question is Question.ORDER
    assert "counts and shapes fit" in assumed.text
    found = shards(place, tmp_path / "out")
    assert_right(found, ONE)
    assert (found["epoch"], found["scaler"]) == (7, {"scale": 2.0})


@pytest.mark.parametrize("keys", [("model_state_dict", "optimizer_state_dict"), ("state_dict", "opt")])
def test_other_usual_keys_and_the_prefix_of_ddp(keys: tuple[str, str], tmp_path: Path) -> None:
    wrapped = {f"module.{n}": t for n, t in model().items()}
    place = save(tmp_path / "a.pth", {keys[0]: wrapped, keys[1]: optimizer(DECAYING)})
    assert_right(shards(place, tmp_path / "out", param_order="groups"), DECAYING)


def test_unique_shapes_prove_any_order(tmp_path: Path) -> None:
    shapes = {"a": (2, 3), "b": (3, 2), "c": (4,)}
    tensors = {n: torch.ones(s) * i for i, (n, s) in enumerate(shapes.items())}
    states = {i: {"step": torch.tensor(1.0), "exp_avg": tensors[n] + 5} for i, n in enumerate(("c", "b", "a"))}
    groups = [{"lr": 0.1, "foreach": None, "params": [0, 1]}, {"lr": 0.2, "foreach": None, "params": [2]}]
    place = save(tmp_path / "a.pt", {"model": tensors, "optimizer": {"state": states, "param_groups": groups}})
    checkpoint = read(place)
    assert (checkpoint.assumed, checkpoint.undecided) == ((), ())
    assert [(p.fqn, p.group) for p in checkpoint.trained] == [("c", 0), ("b", 0), ("a", 1)]


def test_names_in_the_groups_prove_their_parameters(tmp_path: Path) -> None:
    states = optimizer(MIXED)
    for group, names in zip(states["param_groups"], MIXED, strict=True):
        group["param_names"] = names
    place = save(tmp_path / "a.pt", optimizer=states)
    assert read(place).assumed == ()
    assert_right(shards(place, tmp_path / "out"), MIXED)
    states["param_groups"][0]["param_names"] = ["a.weight", "embed", "a.bias"]
    error = read(save(tmp_path / "b.pt", optimizer=states)).no_optimizer
    assert "number 0 has states of (5, 3), and the parameter in its place, a.weight" in error


@pytest.mark.parametrize(
    ("groups", "ways", "not_ways"),
    [
        (DECAYING, ["--param-order groups if each group"], ["--param-order model"]),
        (MIXED, ["--param-order model if the run"], ["--param-order groups"]),
    ],
)
def test_several_groups_are_refused_with_the_orders_that_leave_one_way(
    groups: list[list[str]], ways: list[str], not_ways: list[str], tmp_path: Path
) -> None:
    place = save(tmp_path / "a.pt", optimizer=optimizer(groups))
    with pytest.raises(SourceError, match="6 parameters over 2 param groups, and nothing says") as caught:
        reshard.convert(place, tmp_path / "no", to="universal", progress=False)
    assert caught.value.code == "checkpoint.ambiguous"
    fix = caught.value.fix or ""
    assert all(way in fix for way in (*ways, "--param-order FILE"))
    assert not any(way in fix for way in not_ways)
    order = shlex.split(ways[0])[1]
    assert_right(shards(place, tmp_path / "said", param_order=order), groups)
    file = tmp_path / "order.txt"
    file.write_text("\n".join(n for group in groups for n in group))
    assert_right(shards(place, tmp_path / "listed", param_order=str(file)), groups)
    reshard.convert(place, tmp_path / "weights", to="safetensors", progress=False)
    assert load_file(tmp_path / "weights" / "model.safetensors").keys() == SHAPES.keys()


def test_lightning_numbers_the_model_where_lists_are_no_runs(tmp_path: Path) -> None:
    in_model = {n: i for i, n in enumerate(SHAPES)}
    head = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 4, "loops": {}, "callbacks": {}}
    saved = {**head, "state_dict": model(), "lr_schedulers": [{"last_epoch": 4, "_step_count": 5, "base_lrs": [1, 1]}]}
    place = save(
        tmp_path / "a.ckpt", {**saved, "optimizer_states": [optimizer([DECAYING[1], DECAYING[0]], numbers=in_model)]}
    )
    checkpoint = read(place)
    assert (checkpoint.format, checkpoint.counters.steps) == ("full-lightning", 4)
    assert "no runs of numbers" in checkpoint.assumed[0].text
    found = shards(place, tmp_path / "out")
    assert_right(found, [DECAYING[1], DECAYING[0]])
    assert found["lr_scheduler"]["last_epoch"] == 4
    # A file again keeps the numbers, which Lightning takes for the model's order; so it does for a compiled module.
    again = one_file(place, tmp_path / "again")
    assert [g["params"] for g in again["optimizer_states"][0]["param_groups"]] == [[2, 4, 5], [0, 1, 3]]
    longer = {**saved, "state_dict": {f"net._orig_mod.{n}": t for n, t in model().items()}}
    longer["optimizer_states"] = again["optimizer_states"]
    compiled = one_file(save(tmp_path / "d.ckpt", longer), tmp_path / "compiled")
    assert [*compiled["state_dict"]] == [*longer["state_dict"]]
    for one in (again, compiled):
        for number, value in enumerate(model().values()):
            assert torch.equal(one["optimizer_states"][0]["state"][number]["exp_avg"], value * 3)
    # Elsewhere nothing keeps them, and the file counts the groups.
    reshard.convert(place, tmp_path / "way" / "s", to="universal", progress=False)
    result = reshard.convert(tmp_path / "way" / "s", tmp_path / "other", to="torch_save", progress=False)
    assert any("ModelParallelStrategy take them for the order" in w for w in result.warnings)
    # Runs of numbers are those of torch, which nothing names.
    native = save(tmp_path / "b.ckpt", {**saved, "optimizer_states": [optimizer(DECAYING)]})
    assert "over 2 param groups" in read(native).no_optimizer
    # The same lists in a file of a script say nothing.
    plain = save(tmp_path / "c.pt", optimizer=optimizer([DECAYING[1], DECAYING[0]], numbers=in_model))
    assert "over 2 param groups" in read(plain).no_optimizer


def test_parameters_without_states_and_frozen_ones(tmp_path: Path) -> None:
    states = optimizer()
    del states["state"][3]
    found = read(save(tmp_path / "a.pt", optimizer=states))
    assert [p.fqn for p in found.trained if p.never_updated] == ["b.weight"]
    fewer = optimizer([["a.weight", "a.bias", "b.weight", "b.bias", "scale"]])
    place = save(tmp_path / "b.pt", optimizer=fewer)
    assert [p.fqn for p in read(place).frozen] == ["embed"]  # no number has its shape
    with pytest.raises(SourceError, match="which of embed are buffers"):
        reshard.convert(place, tmp_path / "no" / "s", to="zero", dp=2, zero_stage="3", progress=False)
    assert [b.fqn for b in read(place, buffers="emb*").buffers] == ["embed"]


def test_names_of_one_memory_are_tied(tmp_path: Path) -> None:
    tensors = model()
    tensors["head"] = tensors["embed"]
    checkpoint = read(save(tmp_path / "a.pt", model=tensors))
    assert checkpoint.shared == {"head": "embed"}
    assert len(checkpoint.trained) == len(SHAPES)


# -- several models, optimizers and files ------------------------------------------------------------------------------


def test_one_of_two_optimizers_is_chosen(tmp_path: Path) -> None:
    scheduler = {"last_epoch": 4, "_step_count": 5, "base_lrs": [0.5]}
    place = save(tmp_path / "a.pt", {
        "model": model(), "opt_a": optimizer(), "opt_b": optimizer([["embed"]]), "sched": scheduler
    })  # fmt: skip
    with pytest.raises(SourceError, match="holds 2 optimizers: opt_a, opt_b") as caught:
        reshard.convert(place, tmp_path / "no", to="universal", progress=False)
    assert caught.value.fix == "--optimizer-key opt_a, or --optimizer-key opt_b"
    reshard.convert(place, tmp_path / "weights", to="safetensors", progress=False)
    with pytest.raises(SourceError, match="2 optimizers and 1 learning-rate scheduler"):
        reshard.convert(place, tmp_path / "no", to="universal", optimizer_key="opt_a", progress=False)
    chosen = shards(place, tmp_path / "out", optimizer_key="opt_a", scheduler_key="sched")
    assert_right(chosen, ONE)
    with pytest.raises(ReshardError, match="no optimizer is called 'opt_c'"):
        read(place, optimizer_key="opt_c")


def test_one_of_two_models_with_the_same_names_is_chosen(tmp_path: Path) -> None:
    average = {n: t + 1 for n, t in model().items()}
    place = save(tmp_path / "a.pt", ema=average)
    with pytest.raises(SourceError, match="holds 2 models with the same names: model, ema") as caught:
        reshard.convert(place, tmp_path / "no", to="safetensors", progress=False)
    assert caught.value.fix == "--model-key model, or --model-key ema"
    reshard.convert(place, tmp_path / "ema", to="safetensors", model_key="ema", progress=False)
    assert torch.equal(load_file(tmp_path / "ema" / "model.safetensors")["embed"], average["embed"])
    assert_right(shards(place, tmp_path / "out", model_key="model"), ONE)


def test_models_under_other_keys_are_asked_for(tmp_path: Path) -> None:
    place = save(tmp_path / "a.pt", {"generator": model(), "opt": optimizer()})
    with pytest.raises(SourceError, match="holds no `model`, and generator may be it") as caught:
        read(place)
    assert caught.value.fix == "--model-key generator"
    assert read(place, model_key="generator").trained


def test_a_state_dict_alone_is_weights(tmp_path: Path) -> None:
    place = save(tmp_path / "weights.pt", model())
    reshard.convert(place, tmp_path / "out", to="safetensors", progress=False)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["embed"], model()["embed"])
    assert read(place).optimizer is None


def test_of_several_files_one_is_named(tmp_path: Path) -> None:
    for name in ("epoch=1.ckpt", "last.ckpt"):
        save(tmp_path / "run" / name)
    (tmp_path / "run" / "notes.txt").write_text("x")
    code, _, said = command("inspect", str(tmp_path / "run"))
    assert code == 3
    assert "2 files that could each be the checkpoint: epoch=1.ckpt, last.ckpt" in said
    fix = said.rpartition("reshard inspect ")[2].strip()
    code, out, _ = command("inspect", *shlex.split(fix))
    assert (code, out.partition("\n")[0]) == (0, "full-torch")
    (tmp_path / "run" / "last.ckpt").unlink()
    assert command("inspect", str(tmp_path / "run"))[0] == 0


def test_a_file_keeps_its_own_keys_unless_a_framework_is_named(tmp_path: Path) -> None:
    place = save(tmp_path / "a.pt")
    result = reshard.convert(place, tmp_path / "as-is", to="dcp", progress=False)
    assert any("numbers parameters" in w and "--framework state-dict" in w for w in result.warnings)
    assert {*whole(tmp_path / "as-is")["optimizer"]["state"]} == {*map(str, range(6))}
    _, out, _ = command("inspect", str(place))
    (line,) = [x for x in out.splitlines() if "--to dcp" in x]
    words = shlex.split(line.partition("reshard ")[2].replace("DST", str(tmp_path / "said")))
    assert command(*words)[0] == 0
    assert_right(whole(tmp_path / "said"), ONE)


# -- torchtune ---------------------------------------------------------------------------------------------------------


def test_torchtunes_optimizer_is_read_if_it_names_the_same_parameters(tmp_path: Path) -> None:
    keys = {n: n for n in SHAPES}
    place = tmp_path / "epoch_0"
    place.mkdir()
    save_file(model(), place / "model.safetensors")
    recipe = {"optimizer": optimizer(numbers=keys), "epochs_run": 1, "seed": 3}  # type: ignore[arg-type]
    torch.save(recipe, place / "recipe_state.pt")
    assert read(place).format == "full-torchtune"
    found = shards(place, tmp_path / "out")
    assert_right(found, ONE)
    assert (found["epochs_run"], found["seed"]) == (1, 3)
    alone = tmp_path / "epoch_1"
    save(alone / "torchtune_model_0.pt", model())
    torch.save(recipe, alone / "recipe_state.pt")
    (alone / "notes.txt").write_text("x")
    assert [n.path for n in read(alone).not_carried] == ["notes.txt"]
    assert_right(shards(alone, tmp_path / "again"), ONE)
    theirs = {"state": {"tok.weight": {"step": torch.tensor(1.0)}}, "param_groups": [{"params": ["tok.weight"]}]}
    for other in (optimizer(), theirs):
        torch.save({**recipe, "optimizer": other}, place / "recipe_state.pt")
        assert "under other names" in read(place).no_optimizer
    reshard.convert(place, tmp_path / "weights", to="safetensors", progress=False)


def torchtunes(place: Path, epochs: Any = 2, **more: Any) -> Path:
    """torchtune's output directory after so many epochs, with the weights of the two last ones."""
    for number, weights in ((1, model()), (2, {n: t + 100 for n, t in model().items()})):
        save(place / f"epoch_{number}" / "model-00001-of-00001.bin", weights)
    state = {"optimizer": optimizer(), "epochs_run": epochs, "seed": 3, "total_epochs": 4, "max_steps_per_epoch": None}
    save(place / "recipe_state" / "recipe_state.pt", {**state, "dataloader": {"seen": 9}, **more})
    return place


def test_the_state_of_a_recipe_is_of_the_last_epoch_that_it_counts(tmp_path: Path) -> None:
    """The last epoch of a run leaves weights and no state, so that the newest directory is of another state."""
    place = torchtunes(tmp_path / "run")
    (place / "epoch_1" / "config.json").write_text("{}")
    (place / "logs").mkdir()
    found = read(place)
    assert found.format == "full-torchtune"
    assert {n.path: n.reason for n in found.not_carried} == {
        "epoch_1/config.json": "configuration and tokenizer: --model-files with this directory copies them beside "
        "weights",
        "epoch_2/": "weights of an epoch that the state of the recipe is not of",
        "logs/": "it lies beside the model's file, and nothing reads it",
    }
    reshard.convert(place / "epoch_2", tmp_path / "weights", to="safetensors", progress=False)
    newest = load_file(tmp_path / "weights" / "model.safetensors")
    assert all(torch.equal(newest[n], t + 100) for n, t in model().items())
    assert_right(shards(place, tmp_path / "dcp"), ONE)
    back = tmp_path / "back"
    reshard.convert(tmp_path / "dcp", back, to="torch_save", framework="torchtune", progress=False)
    weights = torch.load(back / "epoch_1" / "model-00001-of-00001.bin", weights_only=True)
    state = torch.load(back / "recipe_state" / "recipe_state.pt", weights_only=True)
    assert_right({"model": weights, "optimizer": state.pop("optimizer")}, ONE)
    told = {"epochs_run": 2, "seed": 3, "total_epochs": 4, "max_steps_per_epoch": None, "dataloader": {"seen": 9}}
    assert state == told
    reshard.convert(back, tmp_path / "itself", to="torch_save", framework="torchtune", progress=False)
    assert reshard.diff(back, tmp_path / "itself", progress=False).equal


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"epochs": 4}, "checkpoint.incomplete", "is the state after epoch_3, and"),
        ({"epochs": 0}, "checkpoint.malformed", "holds no number of epochs that are done"),
        ({"epochs": "2"}, "checkpoint.malformed", "holds no number of epochs that are done"),
    ],
)
def test_a_state_of_no_epoch_that_is_there_is_refused(
    change: dict[str, Any], code: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        read(torchtunes(tmp_path / "run", **change))
    assert caught.value.code == code
    assert "name the directory of an epoch" in (caught.value.fix or "")


def test_parts_of_torchtunes_directory_that_are_missing_are_named(tmp_path: Path) -> None:
    place = torchtunes(tmp_path / "run")
    with pytest.raises(ReshardError, match="holds one model, and --model-key chooses"):
        read(place, model_key="model")
    theirs = {"state": {"lora.a": {"step": torch.tensor(1.0)}}, "param_groups": [{"params": ["lora.a"]}]}
    assert "under other names" in read(torchtunes(tmp_path / "lora", optimizer=theirs)).no_optimizer
    # Of FullModelHFCheckpointer without safe_serialization: an index says that the names are Hugging Face's.
    weights = place / "epoch_1" / "model-00001-of-00001.bin"
    where = {"weight_map": dict.fromkeys(SHAPES, weights.name), "metadata": {}}
    (index := place / "epoch_1" / "pytorch_model.bin.index.json").write_text(json.dumps(where))
    assert "under other names" in read(place).no_optimizer
    assert [p.fqn for p in read(place / "epoch_1").parameters] == [*SHAPES]
    index.unlink()
    weights.unlink()
    with pytest.raises(SourceError, match="epoch_1 holds no weights"):
        read(place)
    (place / "recipe_state" / "recipe_state.pt").unlink()
    with pytest.raises(SourceError, match=r"holds no recipe_state\.pt"):
        read(place)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({}, "request.unsatisfiable", "no seed, total_epochs, max_steps_per_epoch of torchtune's recipe"),
        ({"torch_file": "a.pt"}, "request.invalid", "names of their own, and --torch-file"),
        ({"target_param_order": "model"}, "request.invalid", "names of their own, and --target-param-order"),
        ({"to": "dcp"}, "request.invalid", "--framework torchtune: for --to torch_save"),
    ],
)
def test_no_file_of_torchtune_is_made_of_what_is_not_there(
    options: dict[str, Any], code: str, text: str, tmp_path: Path
) -> None:
    place = save(tmp_path / "a.pt", epochs_run=1)
    told: dict[str, Any] = {"to": "torch_save", "framework": "torchtune", **options}
    with pytest.raises(ReshardError, match=text) as caught:
        reshard.convert(place, tmp_path / "out", progress=False, **told)
    assert caught.value.code == code


# -- one file again ----------------------------------------------------------------------------------------------------


def one_file(place: Path, out: Path, **options: Any) -> dict[str, Any]:
    reshard.convert(place, out, to="torch_save", progress=False, **options)
    (file,) = (f for f in out.iterdir() if f.name != "reshard.json")
    return dict(torch.load(file, weights_only=True))


def live(groups: Sequence[Sequence[str]]) -> tuple[dict[str, torch.nn.Parameter], torch.optim.AdamW]:
    """Parameters of zeros and an optimizer of these groups."""
    parameters = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
    return parameters, torch.optim.AdamW([{"params": [parameters[n] for n in group]} for group in groups])


@pytest.mark.parametrize("groups", [ONE, DECAYING, MIXED], ids=["one", "decaying", "mixed"])
def test_torchs_optimizer_loads_the_numbers_that_are_written(groups: list[list[str]], tmp_path: Path) -> None:
    """From a distributed target and back: names become numbers again, those of the groups."""
    states = optimizer(groups)
    for group, names in zip(states["param_groups"], groups, strict=True):
        group["param_names"] = names
    place = save(tmp_path / "a.pt", optimizer=states, epoch=7)
    reshard.convert(place, tmp_path / "universal" / "s", to="universal", progress=False)
    found = one_file(tmp_path / "universal" / "s", tmp_path / "out")
    parameters, adam = live(groups)
    adam.load_state_dict(found["optimizer"])
    for name, value in model().items():
        assert torch.equal(found["model"][name], value)
        held = adam.state[parameters[name]]
        assert torch.equal(held["exp_avg"], value * 3)
        assert torch.equal(held["exp_avg_sq"], value * 5)
        assert held["step"] == 4
    assert [g["lr"] for g in adam.param_groups] == [0.5 / (i + 1) for i in range(len(groups))]
    assert found["epoch"] == 7


def test_names_of_full_files_become_numbers(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    torch.save(model(), tmp_path / "in" / "pytorch_model_fsdp.bin")
    torch.save(optimizer(DECAYING, numbers={n: n for n in SHAPES}), tmp_path / "in" / "optimizer.bin")  # type: ignore[arg-type]
    found = one_file(tmp_path / "in", tmp_path / "out", torch_file="run.pt")
    assert (tmp_path / "out" / "run.pt").exists()
    assert [g["params"] for g in found["optimizer"]["param_groups"]] == [[0, 1, 2], [3, 4, 5]]
    _, adam = live(DECAYING)
    adam.load_state_dict(found["optimizer"])


def test_ties_and_missing_states_stay_what_they_are(tmp_path: Path) -> None:
    tensors, states = model(), optimizer()
    tensors["head"] = tensors["embed"]
    del states["state"][3]
    found = one_file(save(tmp_path / "a.pt", model=tensors, optimizer=states), tmp_path / "out")
    assert found["model"]["head"].data_ptr() == found["model"]["embed"].data_ptr()
    assert [*found["optimizer"]["state"]] == [0, 1, 2, 4, 5]
    assert [*found["model"]] == [*tensors]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"framework": "torchtitan"}, "request.invalid", "a single file has the keys of a script, or Lightning's"),
        ({"framework": "lightning"}, "request.unsatisfiable", "no state of Lightning's loops"),
        ({"target_model_key": "epoch"}, "request.unsatisfiable", "client state has the keys epoch"),
        ({"dtype": "bf16"}, "request.invalid", "no --dtype"),
        ({"framework": "trainer", "dtype": "bf16"}, "request.invalid", "no --dtype"),
        ({"framework": "trainer", "torch_file": "a.pt"}, "request.invalid", "names of their own, and --torch-file"),
        ({"framework": "accelerate", "target_model_key": "net"}, "request.invalid", "and --target-model-key asks"),
        ({"framework": "trainer", "target_param_order": "model"}, "request.invalid", "and --target-param-order asks"),
        ({"target_scheduler_key": "s"}, "request.unsatisfiable", "the source holds 0 schedulers, and the key is"),
    ],
)
def test_files_that_no_script_would_load_are_not_written(
    options: dict[str, Any], code: str, text: str, tmp_path: Path
) -> None:
    place = save(tmp_path / "a.pt", epoch=7)
    with pytest.raises(ReshardError, match=text) as caught:
        one_file(place, tmp_path / "out", **options)
    assert caught.value.code == code
    other = one_file(place, tmp_path / "said", target_model_key="net", target_optimizer_key="opt")
    assert {*other} == {"net", "opt", "epoch"}


def test_numbers_count_the_model_where_asked(tmp_path: Path) -> None:
    """As Lightning's FSDP takes them: those of frozen parameters count, and groups list numbers in their own order."""
    groups = [["b.bias", "a.bias"], ["embed", "b.weight"]]
    place = save(tmp_path / "a.pt", optimizer=optimizer(groups), lr_sched={"last_epoch": 4, "base_lrs": [0.5, 0.25]})
    order = tmp_path / "order.txt"
    order.write_text("b.bias a.bias embed b.weight".replace(" ", "\n"))
    said: dict[str, Any] = {"param_order": str(order), "buffers": "scale"}
    with pytest.raises(ReshardError, match="are buffers, and which are frozen parameters"):
        one_file(place, tmp_path / "no", param_order=str(order), target_param_order="model")
    found = one_file(place, tmp_path / "out", target_param_order="model", target_scheduler_key="sched", **said)
    states = found["optimizer"]
    names = [n for n in SHAPES if n != "scale"]
    assert [[names[i] for i in g["params"]] for g in states["param_groups"]] == groups
    assert all(torch.equal(held["exp_avg"], model()[names[i]] * 3) for i, held in states["state"].items())
    assert found["sched"] == {"last_epoch": 4, "base_lrs": [0.5, 0.25]}
    by_groups = one_file(place, tmp_path / "groups", target_param_order="groups", **said)
    assert [g["params"] for g in by_groups["optimizer"]["param_groups"]] == [[0, 1], [2, 3]]
    with pytest.raises(ReshardError, match="--to dcp does not take --target-param-order; it is for --to torch_save"):
        shards(place, tmp_path / "no", target_param_order="model", **said)
    weights = tmp_path / "sorted"  # safetensors keep no order
    weights.mkdir()
    save_file({n: t for n, t in model().items() if n != "scale"}, weights / "model.safetensors")
    torch.save(optimizer(groups), weights / "optimizer.pt")
    with pytest.raises(ReshardError, match="does not keep the order of the model's parameters") as caught:
        one_file(weights, tmp_path / "no", target_param_order="model", param_order=str(order), buffers="none")
    assert caught.value.code == "request.unsatisfiable"


# -- the full files of Accelerate and the Trainer again ----------------------------------------------------------------


def full_files(place: Path, out: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model and the optimizer of full files that are written."""
    reshard.convert(place, out, to="torch_save", progress=False, **{"framework": "accelerate", **options})
    found = (torch.load(out / f"{stem}.bin", weights_only=True) for stem in ("pytorch_model_fsdp", "optimizer"))
    return next(found), next(found)


def of_names(groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    return optimizer(groups, numbers={n: n for n in SHAPES})  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["itself", "dcp", "universal", "torch_save"])
def test_names_are_the_keys_of_full_files(way: str, tmp_path: Path) -> None:
    """By whatever target the state came: the files are those of the run that saved it."""
    source = tmp_path / "in"
    source.mkdir()
    torch.save(model(), source / "pytorch_model_fsdp.bin")
    torch.save(of_names(DECAYING), source / "optimizer.bin")
    torch.save({"last_epoch": 4, "base_lrs": [0.5, 0.25], "lr_lambdas": [{}, {}]}, source / "scheduler.bin")
    torch.save({"seen": 9}, source / "custom_checkpoint_0.pkl")
    more = {"param_order": "groups"} if way == "torch_save" else {}
    if way != "itself":
        reshard.convert(source, tmp_path / "way" / "s", to=way, progress=False)
        source = tmp_path / "way" / "s"
    weights, states = full_files(source, tmp_path / "out", **more)
    assert [*weights] == [*SHAPES]
    assert_right({"model": weights, "optimizer": states}, DECAYING)
    assert all(held["step"] == 4 for held in states["state"].values())
    kept = torch.load(tmp_path / "out" / "scheduler.bin", weights_only=True)
    assert kept["lr_lambdas"] == ([None, None] if way == "dcp" else [{}, {}])
    if way != "torch_save":  # its client state has a name of a script's own
        assert torch.load(tmp_path / "out" / "custom_checkpoint_0.pkl", weights_only=True) == {"seen": 9}
    assert read(tmp_path / "out").format == "fsdp-full-accelerate"


def test_full_files_hold_zeros_of_their_own_for_what_was_never_updated(tmp_path: Path) -> None:
    states = optimizer(DECAYING)
    numbers = {n: i for i, n in enumerate(n for group in DECAYING for n in group)}
    for name in ("a.weight", "b.weight"):
        del states["state"][numbers[name]]
    for group, names in zip(states["param_groups"], DECAYING, strict=True):
        group |= {"param_names": names, "foreach": None}  # without it, nothing tells that this is torch's Adam
    place = save(tmp_path / "a.pt", optimizer=states)
    _, found = full_files(place, tmp_path / "out", framework="trainer")
    begun = [found["state"][n][s] for n in ("a.weight", "b.weight") for s in ("exp_avg", "exp_avg_sq")]
    assert all(torch.equal(t, torch.zeros(3, 3)) for t in begun)
    assert len({t.data_ptr() for t in begun}) == len(begun)
    assert (tmp_path / "out" / "trainer_state.json").exists()
    _, left = full_files(place, tmp_path / "left", missing_moments="omit")
    assert {*SHAPES} - left["state"].keys() == {"a.weight", "b.weight"}


def test_a_distributed_checkpoint_becomes_a_scripts_file(tmp_path: Path) -> None:
    """A framework's keys ask for the training state: its names become numbers, and nothing else does."""
    groups = DECAYING
    shards(save(tmp_path / "a.pt", optimizer=optimizer(groups)), tmp_path / "dcp", param_order="groups")
    as_it_is = one_file(tmp_path / "dcp", tmp_path / "tree")
    assert as_it_is["optimizer"]["state"].keys() == SHAPES.keys()
    found = one_file(tmp_path / "dcp", tmp_path / "out", framework="state-dict")
    parameters, adam = live(groups)
    adam.load_state_dict(found["optimizer"])
    for name, value in model().items():
        assert torch.equal(found["model"][name], value)
        assert torch.equal(adam.state[parameters[name]]["exp_avg"], value * 3)


@pytest.mark.parametrize("way", ["universal", "dcp"])
def test_the_trainers_numbers_come_back_beside_weights(way: str, tmp_path: Path) -> None:
    """What the Trainer saves without FSDP, from any source whose groups have an order."""
    place = tmp_path / "in"
    place.mkdir()
    save_file(model(), place / "model.safetensors")
    torch.save(optimizer(DECAYING), place / "optimizer.pt")
    (place / "trainer_state.json").write_text('{"global_step": 4}')
    files: dict[str, Any] = {
        "to": "torch_save",
        "framework": "trainer",
        "torch_file": "optimizer.pt",
        "progress": False,
    }
    with pytest.raises(ReshardError, match="do not keep the model's order"):
        reshard.convert(place, tmp_path / "no", **files)
    (tmp_path / "order.txt").write_text("\n".join(n for group in DECAYING for n in group))
    reshard.convert(place, tmp_path / "way" / "s", to=way, param_order=str(tmp_path / "order.txt"), progress=False)
    reshard.convert(tmp_path / "way" / "s", tmp_path / "out", **files)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == SHAPES.keys()
    states = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert [g["params"] for g in states["param_groups"]] == [[0, 1, 2], [3, 4, 5]]
    parameters, adam = live(DECAYING)
    adam.load_state_dict(states)
    for name, value in model().items():
        assert torch.equal(weights[name], value)
        assert torch.equal(adam.state[parameters[name]]["exp_avg"], value * 3)
    assert read(tmp_path / "out").format == "full-trainer"


@pytest.mark.parametrize(
    ("options", "file", "key"),
    [
        ({"framework": "state-dict"}, "checkpoint.pt", 0),
        ({"framework": "accelerate"}, "optimizer.bin", "weight"),
        ({"framework": "trainer", "torch_file": "optimizer.pt"}, "optimizer.pt", 0),
    ],
)
def test_states_of_other_shapes_go_along(options: dict[str, Any], file: str, key: int | str, tmp_path: Path) -> None:
    """Adafactor keeps means of rows and columns, for which no other target has a place."""
    net = torch.nn.Linear(3, 4)
    adafactor = torch.optim.Adafactor(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    adafactor.step()
    weights, states = get_state_dict(net, adafactor)
    save_dcp({"model": weights, "optimizer": states}, tmp_path / "in", Save())
    result = reshard.convert(tmp_path / "in", tmp_path / "out", to="torch_save", progress=False, **options)
    assert result.not_carried == ()
    found = torch.load(tmp_path / "out" / file, weights_only=True)
    held = found.get("optimizer", found)["state"][key]
    assert held.keys() == {"step", "row_var", "col_var"}
    assert all(torch.equal(value, states["state"]["weight"][name]) for name, value in held.items())


@pytest.mark.parametrize(
    ("longer", "run"),
    [
        ("_orig_mod.up.weight", "_orig_mod.up.weight"),
        ("_orig_mod.module.up.weight", "_orig_mod.up.weight"),
        ("module._orig_mod.up.weight", "_orig_mod.up.weight"),
        ("module.up._orig_mod.weight", "up._orig_mod.weight"),
        ("_fsdp_wrapped_module._orig_mod.up.weight", "_orig_mod.up.weight"),
    ],
)
def test_an_engine_loads_the_names_of_a_compiled_model_without_those_of_other_wrappers(longer: str, run: str) -> None:
    """`compile(DDP(model))` gave `_orig_mod.module.` to targets of DeepSpeed, which nothing loads."""
    assert compiled_names({"up.weight": longer}) == {"up.weight": run}


def test_a_list_of_names_is_read_as_inspect_lists_them_if_it_can_be() -> None:
    """DDP's prefix before a submodule that is called `module`: one name is two tensors', by who says it."""
    stored = StoredNames(plain_names(["module.module.up", "module.up"]))
    assert stored.of_list(["module.up", "up"]) == ["module.module.up", "module.up"]
    assert stored.of_list(["module.module.up", "module.up"]) == ["module.module.up", "module.up"]
    assert stored.of("module.up") == "module.up", "an optimizer of the file has the names of the file"
    compiled = StoredNames(plain_names(["_orig_mod.module.up", "_orig_mod.module.down"]))
    names = ["up", "module.up", "_orig_mod.up", "module._orig_mod.up", "_orig_mod.module.up"]
    assert compiled.of_list(names) == ["_orig_mod.module.up"] * 5
    assert compiled.of_list(["up", "left"]) == ["_orig_mod.module.up", None]


def test_a_form_of_two_names_is_the_name_of_neither() -> None:
    stored = StoredNames(shown_names(["_orig_mod.up", "up"]))
    assert [stored.of(name) for name in ("up", "_orig_mod.up")] == ["up", "_orig_mod.up"]
    assert stored.of("_fsdp_wrapped_module.up") is None


def test_a_pattern_names_the_tensors_that_inspect_lists_first() -> None:
    shown = plain_names(["module.module.mean", "module.mean"])
    assert tensors_named("module.*", shown) == {"module.module.mean"}
    assert tensors_named("*.mean", shown) == {"module.module.mean"}
    assert tensors_named("module.module.*", shown) == {"module.module.mean"}
    assert tensors_named("left", shown) == set()


def test_a_tie_of_integers_is_kept_for_deepspeed(tmp_path: Path) -> None:
    """DeepSpeed's files call integers buffers, and a second name of a buffer was in none of them."""
    weight, table = torch.randn(4, 2), torch.arange(3, dtype=torch.uint8)
    moments = {"step": torch.tensor(1.0), "exp_avg": weight * 2, "exp_avg_sq": weight**2}
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    model = {"weight": weight, "table": table, "again": table}
    place = save(tmp_path / "c.pt", {"model": model, "optimizer": {"state": {0: moments}, "param_groups": [group]}})
    options: dict[str, Any] = {"to": "zero", "dp": 2, "zero_stage": "2", "buffers": "none", "progress": False}
    reshard.convert(place, tmp_path / "out" / "tag", **options)
    written = torch.load(tmp_path / "out" / "tag" / "mp_rank_00_model_states.pt", weights_only=False)
    assert [*written["module"]] == ["weight", "table", "again"]
    assert written["shared_params"] == {"again": "table"}
    reshard.convert(tmp_path / "out", tmp_path / "weights", to="torch", progress=False)
    found = torch.load(tmp_path / "weights" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize(
    ("make", "state", "said"),
    [
        (partial(torch.optim.Adam, amsgrad=True), "max_exp_avg_sq", "amsgrad=True"),
        (partial(torch.optim.RMSprop, centered=True), "grad_avg", "centered=True"),
        (partial(torch.optim.RMSprop, momentum=0.9), "momentum_buffer", "momentum=0.9"),
        (partial(torch.optim.Adam, amsgrad=False), None, ""),
        (partial(torch.optim.RMSprop, momentum=0.9, centered=True), None, ""),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "momentum_buffer", ""),
    ],
)
def test_states_that_hyper_parameters_require_are_missed(
    make: Callable[..., torch.optim.Optimizer], state: str | None, said: str, tmp_path: Path
) -> None:
    """What the warning says, torch does: its first step ends. SGD begins a new momentum."""
    model = torch.nn.Linear(3, 2)

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    first = make(model.parameters())
    step(first)
    held = first.state_dict()
    for states in held["state"].values():
        states.pop(state, None)
    torch.save({"model": model.state_dict(), "optimizer": held}, tmp_path / "run.pt")
    warnings = reshard.convert(tmp_path / "run.pt", tmp_path / "out", to="torch_save", progress=False).warnings
    assert [text.partition(",")[0] for text in warnings if f"no {state} " in text] == (
        [f"param group 0 has {said}"] if said else []
    )
    again = make(model.parameters())
    again.load_state_dict(held)
    with pytest.raises(KeyError, match=str(state)) if said else nullcontext():
        step(again)
    if said:  # what the warning advises
        again.param_groups[0][said.partition("=")[0]] = False
        step(again)
