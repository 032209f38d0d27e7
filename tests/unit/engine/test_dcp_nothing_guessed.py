"""Where a distributed checkpoint leaves something open, nobody guesses: it is proven, asked for, or said in a warning.

The state dicts are small ones of the kinds that trainers write; torch's own planner saves them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor.placement_types import Shard

import reshard
from house.expected import raised
from laws.dcp_files import Save, Sharded, read_metadata, save
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertResult
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Checkpoint, Question
from reshard_engine.formats.dcp.facts import facts_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

State = dict[str, Any]
ADAM: State = {
    "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
GALORE: State = {
    "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True, "rank": 2,
    "update_proj_gap": 200, "scale": 0.25, "proj_type": "std",
}  # fmt: skip
TIMM_RMSPROP: State = {
    "lr": 0.1, "alpha": 0.9, "eps": 1e-10, "momentum": 0.9, "weight_decay": 0, "centered": False,
    "decoupled_decay": False, "lr_in_momentum": True,
}  # fmt: skip
SHAPES = {"a.weight": (4, 3), "b.weight": (3, 2), "b.bias": (3,)}
ZERO2: State = {"to": "zero", "dp": 1, "zero_stage": 2}
ZERO3: State = {"to": "zero", "dp": 1, "zero_stage": 3}
WEIGHTS: State = {"to": "safetensors"}
DCP: State = {"to": "dcp"}


def model(seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> State:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def optimizer(params: State, *groups: list[str], **hyper: Any) -> State:
    """AdamW's state dict for some parameters; all of them are one group unless groups are said."""
    members = groups or (list(params),)
    moments = ("exp_avg", "exp_avg_sq")
    states = {
        n: {"step": torch.tensor(3.0), **{s: torch.rand(params[n].shape) for s in moments}}
        for names in members
        for n in names
    }
    return {"state": states, "param_groups": [{**ADAM, **hyper, "params": list(names)} for names in members]}


def numbered(named: State) -> State:
    """The same with numbers in place of names, as `optimizer.state_dict()` has them."""
    numbers = {name: i for i, name in enumerate(n for g in named["param_groups"] for n in g["params"])}
    groups = [{**g, "params": [numbers[n] for n in g["params"]]} for g in named["param_groups"]]
    return {"state": {numbers[n]: held for n, held in named["state"].items()}, "param_groups": groups}


def flattened(named: State) -> State:
    found = {f"state.{n}.{key}": value for n, held in named["state"].items() for key, value in held.items()}
    for group in named["param_groups"]:
        for name in group["params"]:
            found |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return found


def scheduler(rate: float, initial: float | None = None) -> State:
    return {"last_epoch": 3, "base_lrs": [initial or rate], "_last_lr": [rate], "_step_count": 4}


def saved(folder: Path, state: State, how: Save | None = None) -> Path:
    save(state, folder / "in", how or Save())
    return folder / "in"


def converted(source: Path, to: State, **options: Any) -> tuple[Path, ConvertResult]:
    place = source.parent / f"out {len(list(source.parent.iterdir()))}" / "step"
    return place, reshard.convert(source, place, **{**to, **options})


refused = partial(raised, ReshardError, converted)


def said(result: ConvertResult, text: str) -> list[str]:
    """The warnings with a text."""
    return [warning for warning in result.warnings if text in warning]


def left_out(result: ConvertResult) -> dict[str, str]:
    return {entry.path: entry.reason for entry in result.not_carried}


def loaded(target: Path) -> State:
    """The state dict of a target, by torch."""
    dcp_to_torch_save(target, target.parent / "all.pt")
    return torch.load(target.parent / "all.pt", weights_only=False)


def read(source: Path, **choices: Any) -> Checkpoint:
    ledger = OpaqueLedger(OpaquePolicy.REFUSE)
    return read_checkpoint(open_location(str(source)), None, ledger, choices=SourceChoices(**choices))


def questions(source: Path, **choices: Any) -> list[Question]:
    return [asked.question for asked in read(source, **choices).undecided]


# Models.


def test_a_model_of_int8_is_one_of_the_models(tmp_path: Path) -> None:
    weights = {n: torch.ones(4, 4, dtype=torch.int8) for n in ("a.weight", "b.weight")}
    source = saved(tmp_path, {"model": weights, "statistics": {"mean": torch.rand(5)}, "rng": torch.ones(9).byte()})
    error = refused(source, WEIGHTS)
    assert error.code == "checkpoint.ambiguous"
    assert error.fix == "--model-key model, or --model-key statistics"
    target, _ = converted(source, WEIGHTS, model_key="model")
    assert load_file(target / "model.safetensors").keys() == weights.keys()


def test_tensors_at_the_root_are_said_to_be_taken_for_the_models(tmp_path: Path) -> None:
    state = {**model(), "freqs_cis": torch.rand(2), "optimizer": optimizer(model()), "epoch": 3}
    _, result = converted(saved(tmp_path / "plain", state), WEIGHTS)
    assert result.warnings == ()
    source = saved(tmp_path / "more", {**state, "losses": torch.rand(7), "order": torch.arange(3)})
    for to in (WEIGHTS, ZERO2):
        _, result = converted(source, to)
        assert said(result, "losses, order lie at the root of the state dict") != []
    target, result = converted(source, DCP)
    assert (result.warnings, result.not_carried) == ((), ())
    assert {"losses", "order", "epoch"} < loaded(target).keys()


def test_what_is_of_another_model_is_called_so(tmp_path: Path) -> None:
    other, vae = {n: t + 1 for n, t in model().items()}, {"q": torch.rand(3, 3)}
    state = {"model": model(), "ema": other, "vae": vae, "optimizer": optimizer(model()), "epoch": 3}
    _, result = converted(saved(tmp_path, state), WEIGHTS, model_key="model")
    of_another = "it is not of the model that was read: --model-key and --optimizer-key choose another one"
    of_training = "weights hold no training state"
    assert left_out(result) == {"ema": of_another, "vae": of_another, "optimizer": of_training, "epoch": of_training}


def test_a_wrappers_name_is_left_out_with_a_word(tmp_path: Path) -> None:
    wrapped = {f"module.{n}": t for n, t in model().items()}
    source = saved(tmp_path, {"model": wrapped, "optimizer": optimizer(wrapped)})
    for to in (WEIGHTS, ZERO2, {**DCP, "framework": "accelerate"}):
        _, result = converted(source, to)
        assert said(result, "all names of the model begin with `module.`") != []
    target, result = converted(source, DCP)
    assert result.warnings == ()
    assert loaded(target)["model"].keys() == wrapped.keys()


def test_an_optimizer_of_two_places_needs_no_advice_to_copy_again(tmp_path: Path) -> None:
    joint = {f"{place}.{n}": t for place in ("actor", "critic") for n, t in model().items()}
    source = saved(tmp_path, {"actor": model(), "critic": model(1), "optimizer": optimizer(joint)})
    assert refused(source, WEIGHTS).fix == "--model-key actor, or --model-key critic"
    target, _ = converted(source, WEIGHTS, model_key="critic")
    assert load_file(target / "model.safetensors")["a.weight"].equal(model(1)["a.weight"])
    target, result = converted(source, DCP)
    assert result.not_carried == ()
    assert loaded(target)["optimizer"]["state"].keys() == joint.keys()
    error = refused(saved(tmp_path / "one", {"model": model(), "optimizer": optimizer(joint)}), ZERO2)
    assert "trains actor.a.weight" in error.message
    error = refused(saved(tmp_path / "bare", {"model": model()}), ZERO2)
    assert (error.code, "the files hold weights alone" in error.message) == ("request.unsatisfiable", True)


def test_states_without_groups_keep_their_place(tmp_path: Path) -> None:
    state = optimizer(model())["state"]
    target, result = converted(saved(tmp_path, {"model": model(), "optimizer": {"state": state}}), DCP)
    assert result.not_carried == ()
    assert loaded(target)["optimizer"]["state"].keys() == state.keys()


def test_states_among_shards_of_safetensors_are_no_weights(tmp_path: Path) -> None:
    held = {**{f"model.{n}": t for n, t in model().items()}, "state.note": torch.ones(2)}
    held |= {f"optimizer.state.{n}.exp_avg": t + 1 for n, t in model().items()}
    info = ",".join(f'"{n}":{{"saved_offsets":{[0] * t.ndim}}}' for n, t in held.items())
    (tmp_path / "in").mkdir()
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": f"{{{info}}}"}
    save_file(held, tmp_path / "in" / "shard-00001-model-00001-of-00001.safetensors", metadata)
    target, result = converted(tmp_path / "in", WEIGHTS)
    states = {name for name in held if name.startswith("optimizer.")}
    assert load_file(target / "model.safetensors").keys() == held.keys() - states
    assert left_out(result).keys() == states


# Schedulers.


def _two_of_everything(folder: Path) -> Path:
    generator, discriminator = model(), model(1, {"x": (2, 2)})
    state = {
        "disc": discriminator, "gen": generator,
        "opt_d": optimizer(discriminator, lr=0.5), "opt_g": optimizer(generator, lr=0.1),
        "sched_d": scheduler(0.5), "sched_g": scheduler(0.1),
    }  # fmt: skip
    return saved(folder, state)


def _rates(target: Path, framework: str) -> list[float]:
    """The last rates of the schedulers that the first model's run loads, and those of further ones."""
    if framework == "state-dict":
        state = loaded(target)
        return [s["_last_lr"][0] for s in (state["lr_scheduler"], state["lr_scheduler_1"])]
    if framework == "lightning":
        return [s["_last_lr"][0] for s in torch.load(target / "meta.pt")["lr_schedulers"]]
    names = ["scheduler.pt"] if framework == "trainer" else ["scheduler.bin", "scheduler_1.bin"]
    return [torch.load(target / name)["_last_lr"][0] for name in names]


@pytest.mark.parametrize("framework", ["trainer", "lightning", "accelerate", "state-dict"])
def test_a_models_scheduler_is_the_first_of_a_target(framework: str, tmp_path: Path) -> None:
    """The source has that of the other model first."""
    options = {"model_key": "gen", "target_model_key": "model"} if framework == "state-dict" else {"model_key": "gen"}
    source = _two_of_everything(tmp_path)
    if framework == "state-dict":
        source, _ = converted(source, DCP, framework="accelerate", model_key="disc")
        options = {"model_key": "pytorch_model_fsdp_1"}
    target, result = converted(source, DCP, framework=framework, **options)
    one = framework in ("trainer", "lightning")
    assert _rates(target, framework) == ([0.1] if one else [0.1, 0.5])
    assert ("sched_d" in left_out(result)) is one


def test_without_its_scheduler_the_first_place_stays_empty(tmp_path: Path) -> None:
    options = {"framework": "accelerate", "model_key": "gen", "scheduler_key": "none"}
    target, _ = converted(_two_of_everything(tmp_path), DCP, **options)
    assert sorted(p.name for p in target.glob("scheduler*")) == ["scheduler_1.bin", "scheduler_2.bin"]


def test_a_scheduler_that_nobody_chose_sets_no_initial_rates(tmp_path: Path) -> None:
    models = {"gen": model(), "disc": model(1)}
    optimizers = {"opt_g": optimizer(model()), "opt_d": optimizer(model())}
    schedulers = {"sched_g": scheduler(0.1, 0.7), "sched_d": scheduler(0.1, 0.8)}
    source = saved(tmp_path, {**models, **optimizers, **schedulers})
    assert Question.SCHEDULER in questions(source)
    target, result = converted(source, DCP)
    assert (result.warnings, result.not_carried) == ((), ())
    state = loaded(target)
    assert not any("initial_lr" in state[key]["param_groups"][0] for key in optimizers)


def _slower(step: int, *, by: int) -> float:
    return 1 / (1 + step // by)


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR])
def test_a_schedule_of_partials_loads_what_torch_left_of_it(kind: Any, tmp_path: Path) -> None:
    """Those of transformers are `functools.partial`s without attributes: torch saves no `lr_lambdas` of them."""
    weights = model()
    adam = torch.optim.AdamW([torch.nn.Parameter(w) for w in weights.values()], lr=0.1)
    schedule = kind(adam, partial(_slower, by=2))
    for _ in range(3):
        adam.step()
        schedule.step()
    state = {"model": weights, "optimizer": optimizer(weights), "lr_scheduler": schedule.state_dict()}
    source = saved(tmp_path, state)
    assert "lr_lambdas" not in loaded(source)["lr_scheduler"]
    ranks: State = {"to": "fsdp_ranks", "dp": 2, "rank_framework": "verl", "device_type": "cpu", "buffers": "none"}
    files = {
        "mp_rank_00_model_states.pt": (ZERO2, "lr_scheduler"),
        "scheduler.bin": ({**DCP, "framework": "accelerate"}, None),
        "extra_state_world_size_2_rank_1.pt": (ranks, "lr_scheduler"),
    }
    for name, (to, key) in files.items():
        target, _ = converted(source, to)
        found = torch.load(target / name, weights_only=False)
        fresh = kind(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1), partial(_slower, by=2))
        fresh.load_state_dict(found if key is None else found[key])
        assert fresh.state_dict() == schedule.state_dict()
    same, _ = converted(source, DCP)
    assert loaded(same)["lr_scheduler"] == loaded(source)["lr_scheduler"]  # a run loads it into its own state


def test_the_only_scheduler_with_other_rates_is_taken_with_a_word(tmp_path: Path) -> None:
    state = {"model": model(), "optimizer": optimizer(model(), lr=0.1)}
    source = saved(tmp_path / "other", {**state, "sched": scheduler(0.7)})
    _, result = converted(source, ZERO2)
    assert said(result, "--scheduler-key none if it is another optimizer's") != []
    _, result = converted(source, ZERO2, scheduler_key="sched")
    assert said(result, "--scheduler-key") == []
    _, result = converted(saved(tmp_path / "own", {**state, "sched": scheduler(0.1)}), ZERO2)
    assert said(result, "--scheduler-key") == []


def test_the_only_scheduler_of_two_optimizers_is_the_others(tmp_path: Path) -> None:
    """The rates tell that it is not this optimizer's; they need not tell whose it is."""
    small = model(1, {"x": (2, 2)})
    state = {"gen": model(), "disc": small, "opt_g": optimizer(model(), lr=0.1), "opt_d": optimizer(small, lr=0.5)}
    source = saved(tmp_path, {**state, "sched_d": scheduler(0.5)})
    error = refused(source, ZERO2, model_key="gen")
    assert error.code == "checkpoint.ambiguous"
    assert error.fix == "--scheduler-key sched_d, or --scheduler-key none"
    assert read(source, model_key="disc").undecided == ()
    for key, there in (("none", None), ("sched_d", [0.5])):
        target, _ = converted(source, ZERO2, model_key="gen", scheduler_key=key)
        states: Any = torch.load(target / "mp_rank_00_model_states.pt", weights_only=False)
        assert (states["lr_scheduler"] or {}).get("base_lrs") == there


def test_a_scripts_own_counters_are_no_scheduler(tmp_path: Path) -> None:
    state = {"model": model(), "optimizer": optimizer(model()), "progress": {"last_epoch": 3, "best": 0.5}}
    source = saved(tmp_path / "progress", state)
    assert read(source).schedulers == ()
    target, _ = converted(source, DCP, framework="torchtitan")
    assert loaded(target)["progress"] == state["progress"]
    for number, other in enumerate(
        (
            {"last_epoch": 3},
            {"factor": 0.1, "best": 0.3, "num_bad_epochs": 1, "last_epoch": 4},
            {"_schedulers": [scheduler(0.1), scheduler(0.1)], "_last_lr": [0.1]},
        )
    ):
        source = saved(tmp_path / str(number), {"model": model(), "optimizer": optimizer(model()), "lr": other})
        assert read(source).scheduler_keys == ("lr",)


def test_a_trainers_files_bring_their_own_scheduler(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    torch.save(scheduler(0.3), tmp_path / "files" / "scheduler.pt")
    options = {"framework": "trainer", "model_key": "gen", "trainer_files": str(tmp_path / "files")}
    target, _ = converted(_two_of_everything(tmp_path), DCP, **options)
    assert _rates(target, "trainer") == [0.3]


# Files beside the shards.


def test_what_lies_beside_the_shards_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": model(), "optimizer": optimizer(model())})
    torch.save(scheduler(0.1), source / "scheduler.pt")
    (source / "unet_ema").mkdir()
    _, result = converted(source, DCP)
    assert left_out(result).keys() == {"scheduler.pt", "unet_ema/"}


def _of_accelerate(folder: Path) -> Path:
    save({"model": model()}, folder / "pytorch_model_fsdp_0", Save())
    save({"optimizer": optimizer(model())}, folder / "optimizer_0", Save())
    return folder


def test_what_lies_beside_accelerates_directories_is_named(tmp_path: Path) -> None:
    source = _of_accelerate(tmp_path / "in")
    save({"optimizer": optimizer(model())}, source / "optimizer_1", Save())
    torch.save({"python": 0}, source / "random_states_0.pkl")
    torch.save({"python": 2}, source / "random_states_2.pkl")
    (source / "unet_ema").mkdir()
    (source / "notes.txt").write_text("")
    target, result = converted(source, DCP)
    assert left_out(result).keys() == {"optimizer_1/", "unet_ema/", "notes.txt", "random states of rank 2"}
    assert [p.name for p in target.glob("random_states_*")] == ["random_states_0.pkl"]


OF_ACCELERATE = {"step": 3, "random_state": [1], "torch_manual_seed": torch.ones(3).byte()}
OF_TRAINER = {"python": [1], "numpy": [2], "cpu": torch.ones(3).byte()}


@pytest.mark.parametrize("of_trainer", [False, True])
def test_random_states_go_to_the_framework_that_knows_them(of_trainer: bool, tmp_path: Path) -> None:
    """The Trainer looks up `python`, and Accelerate `random_state`."""
    source = _of_accelerate(tmp_path / "in")
    if of_trainer:
        (source / "trainer_state.json").write_text('{"global_step": 7, "log_history": []}')
        torch.save(OF_TRAINER, source / "rng_state.pth")
    else:
        torch.save(OF_ACCELERATE, source / "random_states_0.pkl")
    names = {"trainer": "rng_state.pth", "accelerate": "random_states_0.pkl"}
    own, other = ("trainer", "accelerate") if of_trainer else ("accelerate", "trainer")
    target, result = converted(source, DCP, framework=own)
    assert (target / names[own]).exists()
    assert result.not_carried == ()
    for framework in (other, "lightning", "torchtitan", "state-dict"):
        target, result = converted(source, DCP, framework=framework)
        assert not any((target / name).exists() for name in names.values())
        assert left_out(result).keys() == {"random_states"} | ({"trainer_state.json"} if of_trainer else set())


def test_what_a_framework_insists_on_is_made_with_a_word(tmp_path: Path) -> None:
    state = {"model": model(), "optimizer": optimizer(model())}
    state["optimizer"]["state"]["b.bias"]["step"] = torch.tensor(7.0)
    source = saved(tmp_path, state)
    _, result = converted(source, {"to": "universal"})
    assert said(result, "the parameters of group 0 have 3 to 7 steps") != []
    _, result = converted(source, DCP, framework="lightning")
    assert said(result, "the epoch begins at 0") != []
    target, result = converted(source, DCP, framework="torchtitan")
    assert said(result, "parameters were updated 3 to 7 times, and the number of steps is taken to be 7") != []
    assert loaded(target)["train_state"]["step"] == 7


@pytest.mark.parametrize(
    "options",
    [DCP, {"to": "torch_save"}, {"to": "torch_save", "torch_file": "optimizer.pt"}],
    ids=["shards", "full files", "without FSDP"],
)
def test_the_trainer_gets_a_scheduler_without_which_it_loads_no_optimizer(options: State, tmp_path: Path) -> None:
    """A run's own is taken in its place. The made one is read as none, so that another target makes its own."""
    source = saved(tmp_path, {"model": model(), "optimizer": optimizer(model())})
    target, result = converted(source, options, framework="trainer")
    assert said(result, "goes on as after 3 updates") != []
    state = torch.load(target / "scheduler.pt")
    assert (state["last_epoch"], state["_step_count"], state["lr_lambdas"]) == (3, 4, [])
    assert read(target, param_order="model").schedulers == ()
    own = saved(tmp_path / "own", {"model": model(), "optimizer": optimizer(model()), "lr_scheduler": scheduler(0.1)})
    target, result = converted(own, options, framework="trainer")
    assert said(result, "scheduler.pt was made") == []
    assert _rates(target, "trainer") == [0.1]


def test_weights_alone_get_no_scheduler_of_the_trainer(tmp_path: Path) -> None:
    target, result = converted(saved(tmp_path, {"model": model()}), DCP, framework="trainer")
    assert said(result, "scheduler.pt was made") == []
    assert not (target / "scheduler.pt").exists()


# Numbers in place of names.


def test_a_further_numbered_optimizer_stays_as_it_is(tmp_path: Path) -> None:
    other = model(1, {"x": (2, 2), "y": (5,)})
    numbers = numbered(optimizer(other, ["y", "x"]))
    state = {"gen": model(), "disc": other, "opt_g": optimizer(model()), "opt_d": numbers}
    source = saved(tmp_path, state)
    target, result = converted(source, DCP)
    assert (result.warnings, result.not_carried) == ((), ())
    found = loaded(target)["opt_d"]
    assert found["param_groups"][0]["params"] == [0, 1]
    assert found["state"].keys() == loaded(source)["opt_d"]["state"].keys() == {"0", "1"}
    assert all(found["state"][str(i)]["exp_avg"].equal(numbers["state"][i]["exp_avg"]) for i in (0, 1))
    # Read for itself, its shapes tell the names: no other model has them.
    masters = {p.fqn: p.shape for p in read(source, model_key="disc").trained}
    assert masters == {"y": (5,), "x": (2, 2)}


def test_numbers_that_fit_two_models_are_paired_with_none(tmp_path: Path) -> None:
    two = {"one": model(1, {"x": (2, 2)}), "two": model(2, {"z": (2, 2)})}
    source = saved(
        tmp_path, {**two, "gen": model(), "opt_g": optimizer(model()), "opt": numbered(optimizer(two["one"]))}
    )
    others = [facts_of(other) for other in facts_of(read(source, model_key="gen")).others]  # type: ignore[union-attr]
    assert [(f.model_path, f.optimizer_path) for f in others if f and f.optimizer_path] == [(None, ("opt",))]
    assert questions(source) == [Question.MODEL]
    assert "--model-key one" in refused(source, ZERO2, optimizer_key="opt").fix


def test_a_projections_shape_is_not_that_of_the_parameter(tmp_path: Path) -> None:
    """GaLore keeps moments of two rows for `a`, which is what Adam would keep for `b`."""
    params = {"a": torch.rand(4, 3), "b": torch.rand(2, 3)}
    projected = optimizer({"a": params["b"]})
    source = saved(tmp_path / "known", {"model": params, "optimizer": numbered(projected)})
    assert [p.fqn for p in read(source).trained] == ["b"]
    projected["param_groups"] = [{**GALORE, "params": ["a"]}]
    source = saved(tmp_path / "galore", {"model": params, "optimizer": numbered(projected)})
    assert Question.ORDER in questions(source)
    assert "--param-order" in refused(source, {"to": "universal"}).fix


@pytest.mark.parametrize(
    "second",
    [{"target": "equal"}, {"target": "other"}, {"router.expert_bias": "other"}],
    ids=["equal matrix", "other matrix", "bias of experts"],
)
def test_two_candidates_of_one_shape_are_not_told_apart_by_numbers(second: dict[str, str], tmp_path: Path) -> None:
    params = {"w": torch.rand(4, 3), "router.bias": torch.rand(4)}
    name, kind = next(iter(second.items()))
    twin = params["router.bias" if "router" in name else "w"]
    held = {**params, name: twin.clone() if kind == "equal" else twin + 1}
    source = saved(tmp_path, {"model": held, "optimizer": numbered(optimizer(params))})
    assert Question.ORDER in questions(source)
    # The user's word on buffers leaves one candidate.
    found = read(source, buffers=name)
    assert (found.undecided, [p.fqn for p in found.trained]) == ((), list(params))
    # A script under DDP has longer names than `inspect` lists, and either form is the tensor's.
    under_ddp = saved(
        tmp_path / "ddp",
        {"model": {f"module.{n}": t for n, t in held.items()}, "optimizer": numbered(optimizer(params))},
    )
    for said in (name, f"module.{name}"):
        found = read(under_ddp, buffers=said)
        assert (found.undecided, [p.fqn for p in found.trained]) == ((), list(params))
        wrapped = tuple(f"{said.removesuffix(name)}{n}" for n in params)
        assert [p.fqn for p in read(under_ddp, param_order=wrapped).trained] == list(params)


# Tensors that no optimizer trains.


def test_equal_tensors_are_written_as_tensors_of_their_own(tmp_path: Path) -> None:
    """A target network equals its online network; nothing says that they are one parameter."""
    held = {**model(), "target.weight": model()["a.weight"].clone()}
    source = saved(tmp_path, {"model": held, "optimizer": optimizer(model())})
    assert read(source).shared == {"target.weight": "a.weight"}
    target, _ = converted(source, WEIGHTS)
    found = load_file(target / "model.safetensors")
    assert found.keys() == held.keys()
    assert found["target.weight"].equal(held["target.weight"])
    target, _ = converted(source, DCP)
    assert loaded(target)["model"].keys() == held.keys()
    for to in (ZERO2, ZERO3):
        target, _ = converted(source, to)
        states: Any = torch.load(next(target.glob("*model_states.pt")), weights_only=False)
        assert states["frozen_param_shapes"] == {"target.weight": torch.Size((4, 3))}
        fragment = states["frozen_param_fragments"]["target.weight"]
        assert fragment.reshape(4, 3).equal(held["target.weight"])


def test_without_checksums_nothing_is_tied(tmp_path: Path) -> None:
    held = {**model(), "target.weight": model()["a.weight"].clone()}
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        source = saved(tmp_path, {"model": held, "optimizer": optimizer(model())})
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    found = read(source)
    assert (found.shared, found.copies, found.unproven) == ({}, {}, {"target.weight"})


def test_marks_prove_parameters_and_nothing_else(tmp_path: Path) -> None:
    held: State = {**{n: torch.nn.Parameter(t) for n, t in model().items()}, "plain": torch.rand(3, 3)}
    trained = {"a.weight": held["a.weight"]}
    source = saved(tmp_path, {"model": held, "optimizer": optimizer(trained)})
    entries: Any = read_metadata(source / ".metadata").state_dict_metadata
    marks = {key for key, entry in entries.items() if hasattr(entry, "size") and entry.properties.requires_grad}
    assert marks == {f"model.{name}" for name in model()}  # by torch itself
    found = read(source)
    assert found.unproven == {"plain"}
    assert {p.fqn for p in found.frozen} > {"b.weight", "b.bias"}
    error = refused(source, ZERO3)
    assert error.code == "checkpoint.ambiguous"
    assert "which of plain are buffers" in error.message


def test_bytes_may_be_parameters_until_the_user_says_it(tmp_path: Path) -> None:
    held = {
        **model(), "q.weight": torch.ones(4, 4, dtype=torch.uint8), "k.weight": torch.ones(4, 4, dtype=torch.int8),
        "mask": torch.ones(4, 4, dtype=torch.bool),
    }  # fmt: skip
    source = saved(tmp_path, {"model": held, "optimizer": optimizer(model())})
    error = refused(source, ZERO3)
    assert error.code == "checkpoint.ambiguous"
    assert "q.weight, k.weight, mask" in error.message
    for said_buffers, buffers in (("mask", {"mask"}), ("none", set[str]()), ("*", {"q.weight", "k.weight", "mask"})):
        found = read(source, buffers=said_buffers)
        assert {b.fqn for b in found.buffers} == buffers
        assert {p.fqn for p in found.frozen} == held.keys() - model().keys() - buffers
        assert found.undecided == ()


def test_a_question_stays_open_on_the_way(tmp_path: Path) -> None:
    """What the source does not say, a target of ours does not say either; what it says is kept."""
    sharded = {n: Sharded(t, (Shard(0),)) for n, t in model().items()}
    held = {
        **sharded, "cut": Sharded(torch.rand(4, 3), (Shard(0),)), "q.weight": torch.ones(4, 4, dtype=torch.uint8),
        "whole": torch.rand(4, 3), "twin": sharded["a.weight"],
    }  # fmt: skip
    state = {"model": held, "optimizer": optimizer(model())}
    source = saved(tmp_path, state, Save((2,)))
    again, result = converted(source, DCP)
    assert result.not_carried == ()
    thrice, _ = converted(again, DCP)
    before, after, last = read(source), read(again), read(thrice)
    assert questions(source) == questions(again) == questions(thrice) == [Question.BUFFERS]
    assert before.unproven == after.unproven == last.unproven == {"q.weight", "whole"}
    assert before.copies.keys() == after.copies.keys() == last.copies.keys() == {"twin"}
    assert "cut" in {p.fqn for p in last.frozen}
    decided, _ = converted(source, DCP, buffers="whole")
    assert read(decided).undecided == ()
    assert [b.fqn for b in read(decided).buffers] == ["whole"]


# States.


@pytest.mark.parametrize(("hyper", "zeros"), [(ADAM, True), (TIMM_RMSPROP, False), (GALORE, False)])
def test_zeros_are_made_for_known_optimizers_alone(hyper: State, zeros: bool, tmp_path: Path) -> None:
    """RMSprop of timm begins `square_avg` as ones."""
    held = optimizer(model())
    names = {"exp_avg": "square_avg", "exp_avg_sq": "momentum_buffer"} if hyper is TIMM_RMSPROP else {}
    states = {n: {names.get(s, s): t for s, t in one.items()} for n, one in held["state"].items() if n != "b.bias"}
    state = {"model": model(), "optimizer": {"state": states, "param_groups": [{**hyper, "params": list(model())}]}}
    target, result = converted(saved(tmp_path, state), DCP)
    found = loaded(target)["optimizer"]["state"]
    assert ("b.bias" in found) is zeros
    assert (said(result, "nothing says which ones their optimizer begins with") != []) is not zeros
    if zeros:
        assert not any(t.any() for t in found["b.bias"].values())


def test_zeros_have_the_type_of_their_parameter(tmp_path: Path) -> None:
    params = {"a": torch.rand(3, 2), "b": torch.rand(4, 2).bfloat16(), "c": torch.rand(5, 2)}
    held = optimizer(params)
    held["state"]["b"] = {s: t.bfloat16() for s, t in held["state"]["b"].items()}
    del held["state"]["c"]
    target, _ = converted(saved(tmp_path, {"model": params, "optimizer": held}), DCP)
    assert {s: t.dtype for s, t in loaded(target)["optimizer"]["state"]["c"].items() if s != "step"} == {
        "exp_avg": torch.float32, "exp_avg_sq": torch.float32,
    }  # fmt: skip


@pytest.mark.parametrize("flat", [False, True])
def test_nested_states_are_kept_or_named(flat: bool, tmp_path: Path) -> None:
    """Those of SOAP: a list of matrices that may have one shape, and values that are not tensors."""
    held = optimizer(model())
    for state in held["state"].values():
        state |= {"GG": [torch.rand(2, 2), torch.rand(2, 2)], "Q": None, "info": {"k": 3, "t": torch.rand(2)}}
    whole = {**model(), "optimizer": flattened(held)} if flat else {"model": model(), "optimizer": held}
    source = saved(tmp_path, whole)
    target, result = converted(source, DCP)
    assert (result.warnings, result.not_carried) == ((), ())
    found = loaded(target)["optimizer"]
    for name, state in held["state"].items():
        got = {k: found[f"state.{name}.{k}"] for k in state} if flat else found["state"][name]
        assert all(a.equal(b) for a, b in zip(got["GG"], state["GG"], strict=True))
        assert (got["Q"], got["info"]["k"], got["info"]["t"].equal(state["info"]["t"])) == (None, 3, True)
    _, result = converted(source, {"to": "universal"})
    assert left_out(result).keys() == {f"optimizer.state.*.{s}" for s in ("GG", "Q", "info")}


def test_codes_of_an_eight_bit_optimizer_are_no_moments(tmp_path: Path) -> None:
    """Those of bitsandbytes have the parameter's shape, and mean nothing without their maps."""
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "alpha": 0.0, "params": list(model())}
    ]
    codes = ("state1", "state2")
    states = {
        n: {"step": 3, "qmap1": torch.rand(256), **{s: torch.ones(t.shape, dtype=torch.uint8) for s in codes}}
        for n, t in model().items()
    }
    source = saved(tmp_path, {"model": model(), "optimizer": {"state": states, "param_groups": groups}})
    target, result = converted(source, DCP)
    assert result.not_carried == ()
    assert loaded(target)["optimizer"]["state"]["b.bias"]["state1"].dtype == torch.uint8
    _, result = converted(source, {"to": "universal"})
    assert left_out(result).keys() == {f"optimizer.state.*.{s}" for s in (*codes, "qmap1")}
    assert said(result, "the source has no moments of each element") != []
    assert said(result, "no optimizer step had been taken") == []


def test_steps_that_groups_count_are_the_steps(tmp_path: Path) -> None:
    held = optimizer(model(), ["a.weight"], ["b.weight", "b.bias"], step=5)
    for state in held["state"].values():
        del state["step"]
    source = saved(tmp_path / "alike", {"model": model(), "optimizer": held})
    assert read(source).counters.steps == 5
    held["param_groups"][0]["step"] = 4
    assert read(saved(tmp_path / "apart", {"model": model(), "optimizer": held})).counters.steps is None


def test_an_entry_called_param_groups_is_no_optimizer(tmp_path: Path) -> None:
    state = {"model": model(), "optimizer": optimizer(model()), "config": {"param_groups": 2, "names": ["x"]}}
    target, result = converted(saved(tmp_path, state), DCP)
    assert result.not_carried == ()
    assert loaded(target)["config"] == state["config"]


def test_groups_that_were_joined_are_said_to_be(tmp_path: Path) -> None:
    held = flattened(optimizer(model(), ["a.weight"], ["b.weight", "b.bias"]))
    source = saved(tmp_path, {**model(), "optimizer": held})
    _, result = converted(source, DCP, framework="accelerate")
    assert said(result, "parameters with equal hyper-parameters are one group, which makes 1") != []
    _, result = converted(source, DCP)
    assert result.warnings == ()


def test_the_order_of_flattened_groups_is_that_of_initial_rates(tmp_path: Path) -> None:
    held = optimizer(model(), ["b.weight", "b.bias"], ["a.weight"])
    held["param_groups"][0]["lr"] = 0.2
    state = {**model(), "optimizer": flattened(held)}

    def rates(name: str, *initial: float, **choices: Any) -> tuple[list[Any], list[Question], bool]:
        kept = {"last_epoch": 3, "base_lrs": list(initial), "_last_lr": [0.2, 0.1]}
        source = tmp_path / name / "in"
        if not source.exists():
            saved(tmp_path / name, {**state, **({"lr_scheduler": kept} if initial else {})})
        found = read(source, **choices)
        assert found.optimizer is not None
        warned = any("no order of the groups fits" in text for text in found.warnings)
        return [g.hyper_parameters["lr"] for g in found.optimizer.groups], [u.question for u in found.undecided], warned

    assert rates("told", 0.2, 0.1) == ([0.2, 0.1], [], False)
    assert rates("turned", 0.1, 0.2) == ([0.1, 0.2], [], False)
    assert rates("untold")[1:] == ([Question.GROUPS], False)
    assert rates("untold", param_order="model") == ([0.1, 0.2], [], False)
    assert rates("amiss", 0.7, 0.1)[1:] == ([Question.GROUPS], True)
    assert refused(tmp_path / "untold" / "in", ZERO2).code == "checkpoint.ambiguous"


@pytest.mark.parametrize("root", [True, False])
def test_without_paths_the_optimizers_names_tell_the_model(root: bool, tmp_path: Path) -> None:
    """A planner without flattening keeps keys alone."""
    weights = model() if root else {f"model.{n}": t for n, t in model().items()}
    state = {f"optimizer.{key}": value for key, value in flattened(optimizer(model())).items()}
    source = saved(tmp_path, {**weights, **state}, Save(flatten=False))
    found = read(source)
    assert {p.fqn for p in found.trained} == model().keys()
    assert found.undecided == ()
    target, _ = converted(source, WEIGHTS)
    assert load_file(target / "model.safetensors").keys() == model().keys()


def test_a_train_state_is_kept_or_named(tmp_path: Path) -> None:
    counted = {"step": torch.tensor(9), "ntokens_seen": torch.tensor(7), "losses": [0.1, 0.2]}
    source = saved(tmp_path, {**model(), "optimizer": flattened(optimizer(model())), "train_state": counted})
    target, result = converted(source, DCP)
    assert result.not_carried == ()
    assert loaded(target)["train_state"] == counted
    assert (read(source).counters.steps, read(source).counters.tokens) == (9, 7)
    _, result = converted(source, DCP, framework="accelerate")
    assert left_out(result).keys() == {"train_state"}
