"""Files of FSDP's ranks under names that a script chose: `--rank-files` says them, and nothing else is guessed."""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from house.conversions import refused_conversion
from laws.dcp_files import Sharded
from laws.rank_files import FSDP1, ROWS, Placements, World, numbers, of_rank
from oracle.whole_tensors import named, whole
from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models.jobs import ConvertResult, Inspection

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # FSDP1 uses ShardedTensor
SHAPES = {"embed": (7, 4), "a.weight": (5, 4), "b.weight": (5, 4), "norm": (5,)}
UNIQUE = {"embed": (7, 4), "a.weight": (5, 4), "norm": (5,)}
PATTERN = "ckpt_{rank}.pt"
State = dict[str, Any]
Change = Callable[[int, State], None]


def model(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    return {name: numbers(100 * i, *shape) for i, (name, shape) in enumerate(shapes.items(), 1)}


def _payload(
    shapes: Mapping[str, tuple[int, ...]], placements: Placements, keys: Callable[[str], Any] = str, **more: Any
) -> State:
    def cut(tensor: torch.Tensor) -> Any:
        return Sharded(tensor, placements)  # type: ignore[arg-type]

    tensors = model(shapes)
    states = {
        keys(n): {"step": torch.tensor(3.0), "exp_avg": cut(t + 0.25), "exp_avg_sq": cut(t + 0.5)}
        for n, t in tensors.items()
    }
    hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "foreach": None}
    groups = [{**hyper, "params": [*states]}]
    weights: State = {"count": torch.tensor(7), **{n: cut(t) for n, t in tensors.items()}}
    return {"model": weights, "optimizer": {"state": states, "param_groups": groups}, **more}


def save(
    folder: Path,
    pattern: str = PATTERN,
    world: int = 3,
    *,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    placements: Placements = ROWS,
    keys: Callable[[str], Any] = str,
    change: Change | None = None,
    mesh: World | None = None,
    **more: Any,
) -> Path:
    """The files of each rank: model and optimizer in one, or in one each for a pattern with `{item}`."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with (mesh or World((world,))).mesh_of(rank) as one:
            value = of_rank(_payload(shapes, placements, keys, **more), one, {})
            if change is not None:
                change(rank, value)
            files = value.items() if "{item}" in pattern else [("", value)]
            for item, held in files:
                torch.save(held, folder / pattern.format(rank=rank, item=item))
    return folder


def convert(source: Path, out: Path, pattern: str = PATTERN, **options: Any) -> ConvertResult:
    to: dict[str, Any] = {"to": "dcp", "framework": "state-dict"}
    return reshard.convert(source, out, rank_files=pattern, progress=False, **{**to, **options})


def inspect(source: Path, pattern: str = PATTERN, **options: Any) -> Inspection:
    return reshard.inspect(source, rank_files=pattern, **options)


def refused(source: Path, pattern: str | None = PATTERN, **options: Any) -> ReshardError:
    options |= {"to": "universal", "rank_files": pattern, "progress": False}
    error = refused_conversion(reshard.convert, source, source.parent / "no", **options)
    assert isinstance(error, SourceError | RequestError)
    return error


def assert_right(out: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> State:
    """All tensors of the target are those of the run, bit for bit, and nothing else is in it."""
    found = whole(out)
    wanted = {f"{n}/model": t for n, t in model(shapes).items()} | {"count/model": torch.tensor(7)}
    for name, tensor in model(shapes).items():
        wanted |= {f"{name}/exp_avg": tensor + 0.25, f"{name}/exp_avg_sq": tensor + 0.5}
        wanted[f"{name}/step"] = torch.tensor(3.0)
    held = named(found)
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[n], t) for n, t in wanted.items())
    return found


# -- What is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placements", [ROWS, FSDP1], ids=["DTensor", "ShardedTensor"])
@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (PATTERN, PATTERN),
        ("run7-step100.rank{rank:05d}.pth", "run7-*.rank{rank}.pth"),
        ("{item}_{rank}.bin", "{item}_{rank}.bin"),
        ("{rank}-of-3.{item}.pt", "{rank}-of-*.{item}.pt"),
        ("w[{rank}](+).pt", "w[{rank}](+).pt"),
    ],
)
def test_names_of_any_form_are_read(names: str, pattern: str, placements: Placements, tmp_path: Path) -> None:
    source = save(tmp_path / "in", names, placements=placements)
    (source / "notes.txt").write_text("beside")
    found = inspect(source, pattern)
    assert (found.format, found.world, found.warnings) == ("fsdp-ranks", {"dp": 3}, ())
    assert [n.path for n in found.not_carried] == ["notes.txt"]
    convert(source, tmp_path / "out", pattern)
    assert_right(tmp_path / "out")


def test_a_state_dict_alone_is_weights(tmp_path: Path) -> None:
    source = save(tmp_path / "in", "{item}.{rank}.pt")
    for file in source.glob("optimizer.*"):
        file.unlink()
    assert inspect(source, "model.{rank}.pt").optimizer_states == ()
    convert(source, tmp_path / "out", "*.{rank}.pt")
    assert torch.equal(whole(tmp_path / "out")["model"]["a.weight"], model()["a.weight"])


def test_what_all_ranks_hold_alike_is_carried_and_the_rest_named(tmp_path: Path) -> None:
    scheduler = {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.1], "_last_lr": [0.05]}

    def own(rank: int, value: State) -> None:
        value |= {"rng": torch.arange(4) + rank, "seed": rank}

    source = save(tmp_path / "in", change=own, sched=scheduler, epoch=7, note={"t": torch.arange(3)})
    result = convert(source, tmp_path / "out")
    found = assert_right(tmp_path / "out")
    assert found["epoch"] == 7
    assert torch.equal(found["note"]["t"], torch.arange(3))
    assert found["lr_scheduler"] == scheduler
    assert {n.path for n in result.not_carried} == {"rng", "seed"}
    with pytest.raises(RequestError, match="no scheduler at 'lr'"):
        inspect(source, scheduler_key="lr")


@pytest.mark.parametrize("mesh", [World((2, 2), ("ddp", "fsdp")), World((4,), None)])
def test_every_mesh_of_the_run_is_understood(mesh: World, tmp_path: Path) -> None:
    placements = ROWS if len(mesh.shape) == 1 else (_replicate(), *ROWS)
    source = save(tmp_path / "in", world=4, mesh=mesh, placements=placements)
    convert(source, tmp_path / "out")
    assert_right(tmp_path / "out")


def _replicate() -> Any:
    from torch.distributed.tensor.placement_types import Replicate

    return Replicate()


def test_the_pattern_is_suggested_where_names_count_ranks(tmp_path: Path) -> None:
    source = save(tmp_path / "a")
    assert "if they are of ranks: --rank-files 'ckpt_{rank}.pt'" in (refused(source, None).fix or "")
    both = save(tmp_path / "b", "{item}-r{rank}.pkl")
    assert refused(both, None).fix == "if the files are of FSDP's ranks: --rank-files '{item}-r{rank}.pkl'"
    steps = tmp_path / "c"
    for step in (10, 20):
        save(steps, f"s{step}_{{rank}}.pkl", 2)
    assert "--rank-files 's10_{rank}.pkl', or --rank-files 's20_{rank}.pkl'" in (refused(steps, None).fix or "")


def test_a_tag_names_the_directory(tmp_path: Path) -> None:
    save(tmp_path / "run" / "step-3")
    convert(tmp_path / "run", tmp_path / "out", tag="step-3")
    assert_right(tmp_path / "out")


# -- Numbers without names are proven, or asked for --------------------------------------------------------------------


def test_numbers_are_proven_by_shapes_or_asked_for(tmp_path: Path) -> None:
    proven = save(tmp_path / "a", shapes=UNIQUE, keys=[*reversed(UNIQUE)].index)
    convert(proven, tmp_path / "outa")
    assert_right(tmp_path / "outa", UNIQUE)
    order = ("norm", "b.weight", "a.weight", "embed")
    open_ = save(tmp_path / "b", keys=order.index)
    error = refused(open_)
    assert error.code == "checkpoint.ambiguous"
    assert "--param-order" in (error.fix or "")
    convert(open_, tmp_path / "outb", param_order=order)
    assert_right(tmp_path / "outb")
    reshard.convert(open_, tmp_path / "w", to="safetensors", rank_files=PATTERN, progress=False)


def test_an_order_names_parameters_with_or_without_wrappers(tmp_path: Path) -> None:
    order = ("norm", "b.weight", "a.weight", "embed")

    def wrapped(_: int, value: State) -> None:
        value["model"] = {f"_fsdp_wrapped_module.{n}": t for n, t in value["model"].items()}

    source = save(tmp_path / "in", keys=order.index, change=wrapped)
    assert {t.fqn for t in inspect(source).tensors} == {*SHAPES, "count"}
    for prefix in ("", "_fsdp_wrapped_module.", "module."):
        convert(source, tmp_path / f"out{prefix}", param_order=[f"{prefix}{name}" for name in order])
        assert_right(tmp_path / f"out{prefix}")
    error = refused(source, param_order=[*order[:-1], "embedding"])
    assert (error.code, error.fix) == ("request.invalid", "name parameters as `reshard inspect` lists them")


def test_flat_shards_of_a_script_are_not_guessed(tmp_path: Path) -> None:
    """FSDP1 with `use_orig_params=False`: one state for each unit, whose contents only its wrapping policy says."""
    flat = {"exp_avg": torch.arange(20.0), "exp_avg_sq": torch.arange(20.0), "step": torch.tensor(3.0)}

    def units(_: int, value: State) -> None:
        value["optimizer"]["state"] = {0: dict(flat), 1: dict(flat)}
        value["optimizer"]["param_groups"][0]["params"] = [0, 1]

    source = save(tmp_path / "in", change=units)
    error = refused(source)
    assert error.code == "checkpoint.ambiguous"
    assert "--param-order" in (error.fix or "")
    weights = reshard.convert(source, tmp_path / "w", to="safetensors", rank_files=PATTERN, progress=False)
    assert "optimizer" in {n.path for n in weights.not_carried}


def test_an_adapter_alone_is_not_counted_into_the_base(tmp_path: Path) -> None:
    """A save of LoRA's tensors whose optimizer numbers the base model, too: the names of numbers are in no file."""
    shapes = {f"base_model.model.{i}.lora_{x}.default.weight": (5, 4) for i in range(2) for x in "AB"}

    def of_all(_: int, value: State) -> None:
        states = value["optimizer"]["state"]
        value["optimizer"]["state"] = {3 * i + 1: states[i] for i in states}
        value["optimizer"]["param_groups"][0]["params"] = [*range(12)]

    source = save(tmp_path / "in", shapes=shapes, keys=[*shapes].index, change=of_all)
    error = refused(source)
    assert error.code == "checkpoint.ambiguous"
    assert "numbers 12 parameters, and the model's files hold 4 parameters" in error.message


# -- Hostile and damaged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["ckpt", "ckpt_*.pt", "{rank}_{rank}.pt", "{item}{rank}{item}", "a/{rank}.pt", "..\\{rank}.pt", "***{rank}.pt",
     "ckpt_1{rank}.pt", "{rank}0.pt", "../in/ckpt_{rank}.pt"],
)  # fmt: skip
def test_patterns_that_are_none_are_refused(pattern: str, tmp_path: Path) -> None:
    error = refused(save(tmp_path / "in", world=2), pattern)
    assert error.code == "request.invalid"
    assert "--rank-files" in error.message


def test_a_pattern_that_names_nothing_says_what_is_there(tmp_path: Path) -> None:
    source = save(tmp_path / "in", world=2)
    for pattern in ("chkpt_{rank}.pt", "ckpt.{rank}.pt", "ckpt_{rank}.pth", "c.*_{rank}.pt", "[c]kpt_{rank}.pt"):
        error = refused(source, pattern)
        assert (error.code, error.fix) == ("source.not_found", "--rank-files 'ckpt_{rank}.pt'")
        assert "there is ckpt_0.pt, ckpt_1.pt" in error.message
    assert refused(tmp_path / "nowhere").code == "source.not_found"
    assert refused(source / "ckpt_0.pt").code in ("source.not_found", "source.unknown_kind")


def _lose(*ranks: int) -> Callable[[Path], None]:
    def lose(folder: Path) -> None:
        for rank in ranks:
            (folder / f"ckpt_{rank}.pt").unlink()

    return lose


def _mixed_worlds(folder: Path) -> None:
    """A save of two ranks went over one of three."""
    save(folder, world=2)


def _other_worlds_rank(folder: Path) -> None:
    save(folder.parent / "other", world=4)
    shutil.copy(folder.parent / "other" / "ckpt_1.pt", folder / "ckpt_1.pt")


def _swap(folder: Path) -> None:
    shutil.copy(folder / "ckpt_2.pt", folder / "ckpt_1.pt")


def _rates(folder: Path) -> None:
    def other(_: int, value: State) -> None:
        value["optimizer"]["param_groups"][0]["lr"] = 0.7

    save(folder.parent / "other", change=other)
    shutil.copy(folder.parent / "other" / "ckpt_2.pt", folder / "ckpt_2.pt")


def _no_optimizer(folder: Path) -> None:
    def without(_: int, value: State) -> None:
        del value["optimizer"]

    save(folder.parent / "other", change=without)
    shutil.copy(folder.parent / "other" / "ckpt_1.pt", folder / "ckpt_1.pt")


def _other_names(folder: Path) -> None:
    save(folder.parent / "other", shapes=UNIQUE)
    shutil.copy(folder.parent / "other" / "ckpt_1.pt", folder / "ckpt_1.pt")


def _text(folder: Path) -> None:
    (folder / "ckpt_1.pt").write_text("not an archive")


def _cut_short(folder: Path) -> None:
    data = (folder / "ckpt_1.pt").read_bytes()
    (folder / "ckpt_1.pt").write_bytes(data[: len(data) // 2])


class _Runs:
    def __reduce__(self) -> Any:
        return (exec, ("open('/tmp/never','w')",))


def _code(folder: Path) -> None:
    value: State = {"model": {}, "x": _Runs()}
    torch.save(value, folder / "ckpt_1.pt", pickle_module=pickle)


def _twice(folder: Path) -> None:
    shutil.copy(folder / "ckpt_1.pt", folder / "ckpt_01.pt")


def _far(folder: Path) -> None:
    shutil.copy(folder / "ckpt_2.pt", folder / "ckpt_999999.pt")


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "the last rank is missing": (_lose(2), "checkpoint.incomplete", "1 file of 3 ranks is missing: ckpt_2.pt"),
    "two ranks are missing": (
        _lose(1, 2),
        "checkpoint.incomplete",
        "2 files of 3 ranks are missing: ckpt_1.pt, c",
    ),
    "the first rank is missing": (_lose(0), "checkpoint.incomplete", "is missing: ckpt_0.pt"),
    "one within is missing": (_lose(1), "checkpoint.incomplete", "is missing: ckpt_1.pt"),
    "a save of two ranks over one of three": (_mixed_worlds, "checkpoint.mixed", "is of a run of 2 ranks"),
    "one rank of another world": (_other_worlds_rank, "checkpoint.incomplete", "is of a run of 4 ranks"),
    "one rank's file under another's name": (_swap, "checkpoint.mixed", "was not written by rank 1 of 3"),
    "another learning rate on one rank": (_rates, "checkpoint.mixed", "differ at param_groups"),
    "a rank without the optimizer": (_no_optimizer, "checkpoint.mixed", "has nothing at optimizer"),
    "a rank with other names": (_other_names, "checkpoint.mixed", "hold other tensors"),
    "no archive": (_text, "source.unknown_kind", "neither a torch zip archive"),
    "half a file": (_cut_short, "zip.", ""),
    "a file that runs code": (_code, "pickle.", ""),
    "two files of one rank": (_twice, "checkpoint.mixed", "ckpt_01.pt and ckpt_1.pt of one rank"),
    "a number beyond all ranks": (_far, "checkpoint.incomplete", "are missing: ckpt_3.pt"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    source = save(tmp_path / "in")
    damage, code, text = DAMAGE[case]
    damage(source)
    error = refused(source)
    assert error.code.startswith(code), error
    assert text in error.message, error.message


def test_a_star_is_one_text_for_a_whole_save(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for step in (100, 200):
        save(source, f"step{step}_{{rank}}.pt")
    error = refused(source, "step*_{rank}.pt")
    assert error.code == "checkpoint.ambiguous"
    assert error.fix == "--rank-files 'step100_{rank}.pt', or --rank-files 'step200_{rank}.pt'"
    convert(source, tmp_path / "out", "step200_{rank}.pt")
    assert_right(tmp_path / "out")


def test_whole_tensors_are_perhaps_of_epochs(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for epoch in range(3):
        torch.save(model(), source / f"epoch_{epoch}.pt")
    error = refused(source, "epoch_{rank}.pt")
    assert error.code == "checkpoint.ambiguous"
    assert "not of steps or epochs" in error.message


def test_the_files_of_an_optimizer_alone_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "in", "{item}_{rank}.bin", 2)
    error = refused(source, "optimizer_{rank}.bin")
    assert (error.code, "{item}" in (error.fix or "")) == ("checkpoint.incomplete", True)


def test_long_names_take_no_time(tmp_path: Path) -> None:
    source = save(tmp_path / "in", world=2)
    for i in range(200):
        (source / f"{i}{'a_1_' * 60}.p").write_text("")
    began = time.process_time()
    convert(source, tmp_path / "out", "*t_{rank}.p*")
    assert time.process_time() - began < 60
    assert_right(tmp_path / "out")
