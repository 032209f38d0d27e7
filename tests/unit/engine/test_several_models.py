"""Saves with two of everything: what belongs together is told, the choice is asked for, and the chosen run goes on.

Every source is saved with real modules and real optimizers after three steps. What is read is compared with them bit
for bit, and so is the next step of training.
"""

from __future__ import annotations

import copy
import shlex
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor.placement_types import Replicate

import reshard
from laws.dcp_files import Save, Sharded, save as save_dcp
from laws.item_files import Items, save_payloads
from laws.rank_files import ROWS, Placements, World, of_rank
from oracle.whole_tensors import whole
from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models.jobs import ConvertResult, Inspection

State = dict[str, Any]


def _net(sizes: tuple[int, int], seed: int) -> nn.Module:
    torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    first, last = nn.Linear(5, sizes[0]), nn.Linear(sizes[0], sizes[1])
    return nn.Sequential(OrderedDict(body=first, act=nn.Tanh(), head=last))


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    data = torch.arange(10, dtype=torch.float32).reshape(2, 5) / (number + 3)
    optimizer.zero_grad()
    net(data).square().mean().backward()
    optimizer.step()


class Live:
    """A run of two models, each with its optimizer, and an average of the first one."""

    def __init__(self, *, alike: bool = False) -> None:
        """Train both for three steps; `alike` gives both the same shapes."""
        self.nets = {"a": _net((4, 3), 1), "b": _net((4, 3) if alike else (6, 2), 2)}
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "a": torch.optim.AdamW(self.nets["a"].parameters(), lr=0.01, weight_decay=0.1),
            "b": torch.optim.AdamW(self.nets["b"].parameters(), lr=0.03, betas=(0.5, 0.9)),
        }
        for number in range(3):
            for key, net in self.nets.items():
                _step(net, self.optimizers[key], number)

    def model(self, key: str) -> State:
        return dict(self.nets[key].state_dict())

    def average(self) -> State:
        return {name: tensor * 0.5 for name, tensor in self.model("a").items()}

    def numbered(self, key: str) -> State:
        return self.optimizers[key].state_dict()

    def named(self, key: str) -> State:
        return get_optimizer_state_dict(self.nets[key], self.optimizers[key])


def _cut(value: Any, placements: Placements = ROWS) -> Any:
    """The value with sharded tensors in place of those that have rows."""
    if isinstance(value, torch.Tensor):
        return Sharded(value.detach().clone(), placements) if value.dim() else value
    return {k: _cut(v, placements) for k, v in cast("State", value).items()} if isinstance(value, dict) else value


def _of_ranks(folder: Path, payloads: Mapping[str, State], world: int = 2) -> Path:
    """Files of ranks of FSDP2, each under a name with `{rank}`."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with World((world,)).mesh_of(rank) as mesh:
            for name, value in payloads.items():
                torch.save(of_rank(_cut(value), mesh, {}), folder / name.format(rank=rank))
    return folder


def _two_in_one(live: Live) -> State:
    return {"gen": live.model("a"), "disc": live.model("b"), "opt_g": live.numbered("a"), "opt_d": live.numbered("b")}


def _two_named(live: Live) -> State:
    return {"gen": live.model("a"), "disc": live.model("b"), "opt_g": live.named("a"), "opt_d": live.named("b")}


def _file(value: Callable[[Live], State], name: str = "a.pt") -> Callable[[Live, Path], Path]:
    def write(live: Live, folder: Path) -> Path:
        folder.mkdir(parents=True)
        torch.save(value(live), folder / name)
        return folder / name

    return write


def _lightning(state: State, optimizers: list[State], **more: Any) -> State:
    """A checkpoint of Lightning.

    Source: lightning 2.6.6 `pytorch/trainer/connectors/checkpoint_connector.py` (`dump_checkpoint`).
    """
    return {
        "epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.6", "state_dict": state, "loops": {},
        "callbacks": {}, "optimizer_states": optimizers, "lr_schedulers": [], **more,
    }  # fmt: skip


def _gan(live: Live) -> State:
    """Both models in one module, whose optimizers have numbers of their own."""
    both = {f"{key}.{n}": t for key in ("a", "b") for n, t in live.model(key).items()}
    return _lightning(both, [live.numbered("a"), live.numbered("b")])


def _averaged(live: Live) -> State:
    """As `WeightAveraging` saves: the average under `state_dict`, the weights that are trained beside it.

    Source: lightning 2.6.6 `pytorch/callbacks/weight_averaging.py` (`on_save_checkpoint`).
    """
    more = {"current_model_state": live.model("a"), "averaging_state": {"n_averaged": torch.tensor(2)}}
    return _lightning(live.average(), [live.numbered("a")], **more)


def _callback(live: Live) -> State:
    """A callback that keeps an average as its own state."""
    shadow = {"EMA": {"decay": 0.999, "shadow": live.average()}}
    return _lightning(live.model("a"), [live.numbered("a")], callbacks=shadow)


def _accelerate_ranks(live: Live, folder: Path) -> Path:
    return _of_ranks(folder, {
        f"{what}_{i}_rank{{rank}}.bin": value
        for i, key in enumerate("ab")
        for what, value in (("pytorch_model_fsdp", live.model(key)), ("optimizer", live.named(key)))
    })  # fmt: skip


def _accelerate_full(live: Live, folder: Path) -> Path:
    folder.mkdir()
    for key, number in (("a", ""), ("b", "_1")):
        torch.save(live.model(key), folder / f"pytorch_model_fsdp{number}.bin")
        torch.save(live.named(key), folder / f"optimizer{number}.bin")
    return folder


def _verl(live: Live, folder: Path) -> Path:
    for key, role in (("a", "actor"), ("b", "critic")):
        names = {f"{what}_world_size_2_rank_{{rank}}.pt": value for what, value in
                 (("model", live.model(key)), ("optim", live.numbered(key)))}  # fmt: skip
        for step in (2, 10):
            _of_ranks(folder / f"global_step_{step}" / role, names)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def _items(live: Live, folder: Path) -> Path:
    names = {key: [*live.nets[key].state_dict()] for key in "ab"}

    def optimizer(key: str) -> State:
        states = live.named(key)
        groups = [{"param_names": names[key], **{k: v for k, v in g.items() if k != "params"}}
                  for g in states["param_groups"]]  # fmt: skip
        return {"state": states["state"], "param_groups": groups, "_optimizer_state_format_version": 1}

    payload = {"actor": live.model("a"), "critic": live.model("b"), "optimizer": optimizer("a"),
               "optimizer_critic": optimizer("b")}  # fmt: skip
    return save_payloads(
        lambda _, mesh: of_rank(_cut(payload), mesh, {}), folder, World((2,)), Items(described=tuple(payload))
    )


def _dcp(live: Live, folder: Path) -> Path:
    save_dcp(_cut(_two_named(live)), folder, Save((2,)))
    return folder


def _one_per_rank(live: Live, folder: Path) -> Path:
    return _of_ranks(folder, {"save-{rank}.pt": _two_named(live)})


def _item_per_rank(live: Live, folder: Path) -> Path:
    return _of_ranks(folder, {f"{key}.{{rank}}.pth": value for key, value in _two_named(live).items()})


@dataclass(frozen=True)
class Case:
    """One kind of save.

    Attributes:
        write: Saves it.
        asked: The texts that the refusal's fix has, of which each chooses; none if the files prove the answer.
        told: Texts by which `inspect`, or its refusal, says what there is and what belongs together.
        picks: For each model of the run the choices that read it.
        others: Names of what is then not read.
        carried: Those of them that a distributed checkpoint holds.
        prefix: What its names have before those of the live module.
        always: Options that each call has.
    """

    write: Callable[[Live, Path], Path]
    asked: tuple[str, ...]
    told: tuple[str, ...]
    picks: Mapping[str, dict[str, Any]]
    others: Mapping[str, tuple[str, ...]]
    carried: bool = False
    prefix: Mapping[str, str] = field(default_factory=dict[str, str])
    always: Mapping[str, Any] = field(default_factory=dict[str, Any])


_PAIRS = ("--model-key gen --optimizer-key opt_g", "--model-key disc --optimizer-key opt_d")
_FITS = ("opt_g fits gen", "opt_d fits disc")
_GAN_PICKS = {
    "a": {"model_key": "gen", "optimizer_key": "opt_g"},
    "b": {"model_key": "disc", "optimizer_key": "opt_d"},
}
_GAN_OTHERS = {"a": ("disc", "opt_d"), "b": ("gen", "opt_g")}
_B_NAMES = tuple(f"b.{n}" for n, _ in _net((6, 2), 0).named_parameters())
_A_NAMES = tuple(f"a.{n}" for n, _ in _net((4, 3), 0).named_parameters())
CASES: dict[str, Case] = {
    "a file with an average": Case(
        _file(lambda live: {"model": live.model("a"), "ema": live.average(), "optimizer": live.numbered("a")}),
        ("--model-key model", "--model-key ema"),
        ("2 models with the same names: model, ema", "optimizer fits model and ema"),
        {"a": {"model_key": "model"}},
        {"a": ("ema",)},
        carried=True,
    ),
    "a file of a GAN": Case(_file(_two_in_one), _PAIRS, _FITS, _GAN_PICKS, _GAN_OTHERS, carried=True),
    "a file with another's optimizer": Case(
        _file(
            lambda live: {
                "model": live.model("a"),
                "optimizer_critic": live.numbered("b"),
                "optimizer": live.numbered("a"),
            }
        ),
        (),
        ("it also holds optimizer_critic",),
        {"a": {}},
        {"a": ("optimizer_critic",)},
        carried=True,
    ),
    "a file of actor and critic": Case(
        _file(
            lambda live: {
                "model": live.model("a"),
                "critic": live.model("b"),
                "optimizer": live.numbered("a"),
                "optimizer_critic": live.numbered("b"),
            }
        ),
        ("--model-key model --optimizer-key optimizer,", "--model-key critic --optimizer-key optimizer_critic"),
        ("optimizer fits model;", "optimizer_critic fits critic"),
        {"a": {"model_key": "model"}, "b": {"model_key": "critic", "optimizer_key": "optimizer_critic"}},
        {"a": ("critic", "optimizer_critic"), "b": ("model", "optimizer")},
        carried=True,
    ),
    "Lightning's two optimizers": Case(
        _file(_gan, "a.ckpt"),
        ("--optimizer-key optimizer_states.0", "--optimizer-key optimizer_states.1"),
        ("holds 2 optimizers: optimizer_states.0, optimizer_states.1",),
        {
            "a": {"optimizer_key": "optimizer_states.0", "param_order": _A_NAMES},
            "b": {"optimizer_key": "optimizer_states.1", "param_order": _B_NAMES},
        },
        {"a": ("optimizer_states.1",), "b": ("optimizer_states.0",)},
        carried=True,
        prefix={"a": "a.", "b": "b."},
        always={"buffers": "none"},
    ),
    "Lightning's average": Case(
        _file(_averaged, "a.ckpt"),
        ("--model-key state_dict", "--model-key current_model_state"),
        ("state_dict, current_model_state", "optimizer_states.0 fits state_dict and current_model_state"),
        {"a": {"model_key": "current_model_state"}},
        {"a": ("state_dict",)},
        carried=True,
    ),
    "an average in a callback of Lightning": Case(
        _file(_callback, "a.ckpt"), (), (), {"a": {}}, {"a": ("callbacks",)}, carried=True
    ),
    "Accelerate's ranks": Case(
        _accelerate_ranks,
        ("--model-key pytorch_model_fsdp_0", "--model-key pytorch_model_fsdp_1"),
        ("optimizer_0 is that of pytorch_model_fsdp_0", "optimizer_1 is that of pytorch_model_fsdp_1"),
        {
            "a": {"model_key": "pytorch_model_fsdp_0", "optimizer_key": "optimizer_0"},
            "b": {"optimizer_key": "optimizer_1"},
        },
        {
            "a": tuple(f"{w}_1_rank{r}.bin" for w in ("pytorch_model_fsdp", "optimizer") for r in range(2)),
            "b": tuple(f"{w}_0_rank{r}.bin" for w in ("pytorch_model_fsdp", "optimizer") for r in range(2)),
        },
    ),
    "Accelerate's full files": Case(
        _accelerate_full,
        ("--model-key pytorch_model_fsdp", "--model-key pytorch_model_fsdp_1"),
        ("optimizer is that of pytorch_model_fsdp;", "optimizer_1 is that of pytorch_model_fsdp_1"),
        {
            "a": {"model_key": "pytorch_model_fsdp"},
            "b": {"model_key": "pytorch_model_fsdp_1", "optimizer_key": "optimizer_1"},
        },
        {"a": ("pytorch_model_fsdp_1.bin", "optimizer_1.bin"), "b": ("pytorch_model_fsdp.bin", "optimizer.bin")},
    ),
    "a run of verl": Case(
        _verl,
        ("--tag global_step_10/actor", "--tag global_step_10/critic"),
        ("holds 2 models, each with a training state of its own: global_step_10/actor, global_step_10/critic",),
        {"a": {"tag": "global_step_10/actor"}, "b": {"tag": "global_step_10/critic"}},
        {"a": (), "b": ()},
    ),
    "items of torch_checkpointing": Case(
        _items,
        ("--model-key actor --optimizer-key optimizer,", "--model-key critic --optimizer-key optimizer_critic"),
        ("optimizer fits actor;", "optimizer_critic fits critic"),
        {"a": {"model_key": "actor"}, "b": {"model_key": "critic", "optimizer_key": "optimizer_critic"}},
        {"a": ("critic", "optimizer_critic"), "b": ("actor", "optimizer")},
        carried=True,
    ),
    "a distributed checkpoint": Case(
        _dcp,
        ("--model-key gen", "--model-key disc"),
        ("2 places hold all parameters of an optimizer: gen, disc",),
        _GAN_PICKS,
        _GAN_OTHERS,
        carried=True,
        always={"target_model_key": "model", "target_optimizer_key": "optimizer"},
    ),
    "one file of each rank": Case(
        _one_per_rank, _PAIRS, _FITS, _GAN_PICKS, _GAN_OTHERS, carried=True, always={"rank_files": "save-{rank}.pt"}
    ),
    "a file of each item and rank": Case(
        _item_per_rank,
        _PAIRS,
        _FITS,
        _GAN_PICKS,
        _GAN_OTHERS,
        carried=True,
        always={"rank_files": "{item}.{rank}.pth"},
    ),
}
_EACH = [pytest.param(case, id=name) for name, case in CASES.items()]


def _convert(case: Case, source: Path, out: Path, **options: Any) -> ConvertResult:
    to: dict[str, Any] = {"to": "dcp", "framework": "state-dict"} if options.get("to", "dcp") == "dcp" else {}
    return reshard.convert(source, out, progress=False, **{**to, **_own(case, to), **options})


def _own(case: Case, to: Mapping[str, str]) -> dict[str, Any]:
    return {k: v for k, v in case.always.items() if to or not k.startswith("target_")}


def _inspected(case: Case, source: Path) -> str:
    """What `inspect` says: its warnings, or its refusal."""
    try:
        found: Inspection = reshard.inspect(source, **_own(case, {}))
    except ReshardError as refused:
        return f"{refused.message} {refused.fix}"
    return " ".join((*found.warnings, *(n.path for n in found.not_carried)))


@pytest.mark.parametrize("case", _EACH)
def test_what_belongs_together_is_told_and_asked_for(case: Case, tmp_path: Path) -> None:
    source = case.write(Live(), tmp_path / "in")
    said = _inspected(case, source)
    assert all(text in said for text in case.told), said
    if not case.asked:
        return
    assert all(flags.rstrip(",") in said for flags in case.asked), said
    for to in ("universal", "dcp"):
        with pytest.raises(SourceError) as refused:
            _convert(case, source, tmp_path / "no", to=to)
        assert refused.value.code == "checkpoint.ambiguous"
        assert all(flags in f"{refused.value.fix}," for flags in case.asked), refused.value.fix
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("case", _EACH)
def test_the_chosen_run_goes_on(case: Case, tmp_path: Path) -> None:
    live = Live()
    source = case.write(live, tmp_path / "in")
    for key, picked in case.picks.items():
        result = _convert(case, source, tmp_path / key, **picked)
        found = whole(tmp_path / key)
        _assert_run(found, copy.deepcopy(live.nets[key]), live.optimizers[key], case.prefix.get(key, ""))
        named = {n.path for n in result.not_carried}
        for other in case.others[key]:  # the target's own model and optimizer have the usual keys
            carried = case.carried and other not in ("model", "optimizer")
            assert (other in found, other in named)[not carried], (other, named)
            assert not (carried and other in named)
        zero = _convert(case, source, tmp_path / f"{key}-zero", to="universal", **picked)
        lost = {n.path for n in zero.not_carried}
        client = "callbacks"  # a script's own state, which DeepSpeed's client state has a place for
        assert all(o in lost for o in case.others[key] if o != client), (lost, case.others[key])


def _assert_run(found: State, net: nn.Module, optimizer: torch.optim.Optimizer, prefix: str) -> None:
    """The target holds the live run bit for bit, and a run that begins with it makes the same next step."""
    weights = {n.removeprefix(prefix): t for n, t in found["model"].items() if n.startswith(prefix)}
    for name, tensor in net.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    states = {n.removeprefix(prefix): s for n, s in found["optimizer"]["state"].items()}
    numbers = [name for name, _ in net.named_parameters()]
    own = optimizer.state_dict()
    assert states.keys() == {*numbers}
    for number, name in enumerate(numbers):
        assert states[name].keys() == own["state"][number].keys()
        assert all(torch.equal(states[name][k], v) for k, v in own["state"][number].items()), name
    fresh = copy.deepcopy(net)
    for parameter in fresh.parameters():
        parameter.data.zero_()
    fresh.load_state_dict(weights)
    groups = [
        {**g, "params": [n.removeprefix(prefix) for n in g["params"]]} for g in found["optimizer"]["param_groups"]
    ]
    began = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    set_optimizer_state_dict(fresh, began, {"state": states, "param_groups": groups})
    goes_on = torch.optim.AdamW(net.parameters())
    goes_on.load_state_dict(copy.deepcopy(own))
    for one, other in ((fresh, began), (net, goes_on)):
        _step(one, other, 7)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), net.parameters(), strict=True))


def _payload(live: Live) -> State:
    """Two models with a buffer that no mesh shards, their optimizers, and an average with a place of its own."""
    buffer = torch.arange(3.0)
    nested = {"nets": [live.average()], "decay": 0.5}
    return {"gen": live.model("a"), "disc": {**live.model("b"), "buf": buffer}, "opt_g": live.named("a"),
            "opt_d": live.named("b"), "ema": nested}  # fmt: skip


Change = Callable[[int, State], None]


def _saved_ranks(kind: str, payload: State, folder: Path, world: World, change: Change | None = None) -> dict[str, Any]:
    """Save what each rank holds, with `buf` whole; return the options that read it."""

    def of(rank: int, mesh: Any) -> State:
        (average,) = payload["ema"]["nets"]
        cut = _cut({**payload, "ema": average}, (*[Replicate()] * (len(world.shape) - 1), *ROWS))
        cut["disc"]["buf"] = payload["disc"]["buf"].clone()
        found = of_rank(cut, mesh, {})
        found["ema"] = {**payload["ema"], "nets": [found["ema"]]}
        if change is not None:
            change(rank, found)
        return found

    if kind in ("items", "safetensors"):
        layouts = {"disc": "disc_{rank}.safetensors"} if kind == "safetensors" else {}
        save_payloads(of, folder, world, Items(described=tuple(payload), layouts=layouts))
        return {}
    folder.mkdir(parents=True)
    for rank in range(world.size):
        with world.mesh_of(rank) as mesh:
            held = of(rank, mesh)
            for name, value in held.items() if kind == "each" else ():
                torch.save(value, folder / f"{name}.{rank}.pth")
            if kind == "one":
                torch.save(held, folder / f"r{rank}.pt")
    return {"rank_files": "{item}.{rank}.pth" if kind == "each" else "r{rank}.pt"}


_WORLDS = [World((2,)), World((2, 2), ("ddp", "fsdp"))]


@pytest.mark.parametrize("world", _WORLDS, ids=lambda world: f"{world.size}")
@pytest.mark.parametrize("kind", ["items", "safetensors", "each", "one"])
def test_a_distributed_checkpoint_holds_the_other_models_of_ranks(kind: str, world: World, tmp_path: Path) -> None:
    """Each tensor whole and bit for bit, each group and number, under the key that it had."""
    live = Live()
    payload = _payload(live)
    options = _saved_ranks(kind, payload, tmp_path / "in", world)
    to: dict[str, Any] = {"to": "dcp", "framework": "state-dict", "model_key": "gen", "optimizer_key": "opt_g"}
    result = reshard.convert(tmp_path / "in", tmp_path / "out", progress=False, **to, **options)
    assert {n.path for n in result.not_carried} & {*payload} == set()
    found = whole(tmp_path / "out")
    _assert_run(found, copy.deepcopy(live.nets["a"]), live.optimizers["a"], "")
    if kind == "each":  # what is in the file of one item has the keys that lead to it
        found["ema"] = {"nets": found.pop("ema.nets"), "decay": found.pop("ema.decay")}
    for key in ("disc", "opt_d", "ema"):
        assert _equal(found[key], payload[key]), key
    assert reshard.verify(tmp_path / "out").ok


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        held: State = cast("State", a)
        return held.keys() == b.keys() and all(_equal(held[k], b[k]) for k in held)
    if isinstance(a, list | tuple):
        return len(cast("list[Any]", a)) == len(b) and all(map(_equal, cast("list[Any]", a), b))
    return bool(a == b)


def _other_buffer(rank: int, held: State) -> None:
    held["disc"]["buf"] += rank


def _other_rate(rank: int, held: State) -> None:
    held["opt_d"]["param_groups"][0]["lr"] = 0.1 + rank


def _other_names(rank: int, held: State) -> None:
    if rank:
        held["ema"]["nets"][0] = {f"x{n}": t for n, t in held["ema"]["nets"][0].items()}


@pytest.mark.parametrize("kind", ["items", "one"])
@pytest.mark.parametrize(
    ("change", "key", "told"),
    [
        (_other_buffer, "disc", "nothing proves that all ranks hold the same disc.buf"),
        (_other_rate, "opt_d", "holds another value than the first rank's file"),
        (_other_names, "ema", "holds another value than the first rank's file"),
    ],
)
def test_another_model_that_ranks_hold_in_different_ways_is_named(
    change: Change, key: str, told: str, kind: str, tmp_path: Path
) -> None:
    """The chosen model goes on all the same."""
    live = Live()
    options = _saved_ranks(kind, _payload(live), tmp_path / "in", World((2,)), change)
    to: dict[str, Any] = {"to": "dcp", "framework": "state-dict", "model_key": "gen", "optimizer_key": "opt_g"}
    result = reshard.convert(tmp_path / "in", tmp_path / "out", progress=False, **to, **options)
    (reason,) = (n.reason for n in result.not_carried if n.path == key)
    assert told in reason
    found = whole(tmp_path / "out")
    assert key not in found
    _assert_run(found, copy.deepcopy(live.nets["a"]), live.optimizers["a"], "")


@pytest.mark.parametrize("kind", ["items", "each"])
def test_a_damaged_file_of_another_model_is_named(kind: str, tmp_path: Path) -> None:
    live = Live()
    options = _saved_ranks(kind, _payload(live), tmp_path / "in", World((2,)))
    (tmp_path / "in" / ("disc_1.pt" if kind == "items" else "disc.1.pth")).write_bytes(b"cut short")
    to: dict[str, Any] = {"to": "dcp", "framework": "state-dict", "model_key": "gen", "optimizer_key": "opt_g"}
    result = reshard.convert(tmp_path / "in", tmp_path / "out", progress=False, **to, **options)
    assert "cannot be read" in next(n.reason for n in result.not_carried if n.path == "disc")
    held = whole(tmp_path / "out")
    assert "disc" not in held
    assert "opt_d" in held


@pytest.mark.parametrize("kind", ["items", "one"])
def test_other_targets_name_the_other_models_of_ranks_once(kind: str, tmp_path: Path) -> None:
    options = _saved_ranks(kind, _payload(Live()), tmp_path / "in", World((2,)))
    targets: list[dict[str, Any]] = [
        {"to": "dcp", "framework": "accelerate"}, {"to": "torch_save", "framework": "accelerate"},
        {"to": "safetensors"}, {"to": "fsdp_ranks", "dp": 3, "rank_framework": "verl", "device_type": "cpu"},
        {"to": "torch_checkpointing", "dp": 3, "device_type": "cpu"}, {"to": "zero", "dp": 3, "zero_stage": 2},
        {"to": "universal"},
    ]  # fmt: skip
    for number, to in enumerate(targets):
        more = {**to, **options, "model_key": "gen", "optimizer_key": "opt_g", "progress": False}
        result = reshard.convert(tmp_path / "in", tmp_path / f"{number}", **more)
        named = [n.path for n in result.not_carried]
        assert [named.count(key) for key in ("disc", "opt_d", "ema")] == [1, 1, 1], (to, named)


def _choices(fix: str) -> list[dict[str, Any]]:
    """The keyword arguments of each choice that a fix offers, as a shell reads its flags."""
    found: list[dict[str, Any]] = []
    for text in fix.split(", or "):
        words = shlex.split(text)
        found.append({f.removeprefix("--").replace("-", "_"): v for f, v in zip(words[::2], words[1::2], strict=True)})
    return found


@pytest.mark.parametrize("ranks", [False, True])
def test_pairs_that_nothing_tells_apart_are_all_offered(ranks: bool, tmp_path: Path) -> None:
    """Two models of equal names and shapes: each optimizer may be that of each. Keys may have blanks and quotes."""
    live = Live(alike=True)
    keys = {"the model": live.model("a"), "o'ther": live.model("b")}
    always = {"rank_files": "r{rank}.pt"} if ranks else {}
    if ranks:
        value = {**keys, "opt a": live.named("a"), "opt_b": live.named("b")}
        source = _of_ranks(tmp_path / "in", {"r{rank}.pt": value})
    else:
        value = {**keys, "opt a": live.numbered("a"), "opt_b": live.numbered("b")}
        source = _file(lambda _: value)(live, tmp_path / "in")
    to: dict[str, Any] = {"to": "dcp", "framework": "state-dict", "progress": False, **always}
    with pytest.raises(SourceError, match="opt a fits the model and o'ther") as refused:
        reshard.convert(source, tmp_path / "no", **to)
    offered = _choices(refused.value.fix or "")
    assert len(offered) == 4
    for number, choice in enumerate(offered):
        reshard.convert(source, tmp_path / f"{number}", **to, **choice)
        found = whole(tmp_path / f"{number}")
        net, optimizer = ("ab"[choice["model_key"] != "the model"], "ab"[choice["optimizer_key"] != "opt a"])
        assert all(torch.equal(found["model"][n], t) for n, t in live.model(net).items())
        states = live.named(optimizer)["state"]
        assert all(torch.equal(found["optimizer"]["state"][n]["exp_avg"], states[n]["exp_avg"]) for n in states)
    with pytest.raises(SourceError, match="holds 2 optimizers") as refused:
        reshard.convert(source, tmp_path / "no", **to, model_key="the model")
    assert _choices(refused.value.fix or "") == [{"optimizer_key": "opt a"}, {"optimizer_key": "opt_b"}]
    mistaken: list[dict[str, Any]] = [{"model_key": "gen"}, {"optimizer_key": "opt"}]
    for wrong in mistaken:
        with pytest.raises(RequestError, match="there is"):
            reshard.convert(source, tmp_path / "no", **to, **wrong)


@pytest.mark.parametrize(
    "to",
    [
        {"to": "dcp", "framework": "accelerate"},
        {"to": "torch_save"},
        {"to": "torch_save", "framework": "accelerate"},
        {"to": "safetensors"},
        {"to": "fsdp_ranks", "dp": 2, "rank_framework": "verl", "device_type": "cpu"},
        {"to": "torch_checkpointing", "dp": 2, "device_type": "cpu"},
        {"to": "zero", "dp": 2, "zero_stage": 2},
    ],
    ids=lambda to: "-".join(map(str, to.values())),
)
def test_no_target_loses_the_others_in_silence(to: dict[str, Any], tmp_path: Path) -> None:
    source = _file(_two_in_one)(Live(), tmp_path / "in")
    result = reshard.convert(source, tmp_path / "out", model_key="gen", progress=False, **to)
    named = [n.path for n in result.not_carried]
    assert named.count("disc") == named.count("opt_d") == 1


def test_a_trainers_files_leave_the_others_where_they_are(tmp_path: Path) -> None:
    live = Live()
    source = _file(_two_in_one)(live, tmp_path / "in")
    (tmp_path / "files").mkdir()
    torch.save({"last_epoch": 3, "base_lrs": [0.1], "_last_lr": [0.1]}, tmp_path / "files" / "scheduler.pt")
    out, files = tmp_path / "out", str(tmp_path / "files")
    options: dict[str, Any] = {"model_key": "gen", "trainer_files": files, "progress": False, "to": "dcp"}
    reshard.convert(source, out, framework="state-dict", **options)
    assert {"disc", "opt_d", "lr_scheduler"} <= whole(out).keys()
    result = reshard.convert(source, tmp_path / "trainer", framework="trainer", **options)
    assert [n.path for n in result.not_carried].count("opt_d") == 1
