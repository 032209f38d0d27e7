"""Files of FSDP's ranks that are missing, mixed, swapped, or lie about themselves: refused with a code and a fix.

torch pickles what it is given, so each lie is told to the objects before they are saved, or to the files afterwards.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import reshard
from house.conversions import refused_conversion
from house.promises import command
from laws.rank_files import FSDP1, ROWS, Placements, World, save_accelerate, save_verl, small_model
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

Q = "layers.0.q.weight"
TWO, FOUR = World(), World((4,))
BARE = World((2,), None)
HSDP = World((2, 2), ("ddp", "fsdp"))
Change = Callable[[int, str, dict[str, Any]], None]


def of_model(name: str, change: Callable[[Any], None], *, rank: int | None = 1) -> Change:
    """Tells one rank (or all) a lie about one tensor of the model."""

    def tell(at: int, item: str, value: dict[str, Any]) -> None:
        if item == "model" and rank in (None, at):
            change(value[name])

    return tell


def of_mesh(change: Callable[[dict[str, Any]], None], *, rank: int | None = 1) -> Change:
    """Tells one rank (or all) a lie about the mesh of the model."""
    return of_model(Q, lambda tensor: change(tensor.device_mesh.__dict__), rank=rank)


def of_optimizer(change: Callable[[dict[str, Any]], None], *, rank: int | None = 1) -> Change:
    def tell(at: int, item: str, value: dict[str, Any]) -> None:
        if item == "optim" and rank in (None, at):
            change(value)

    return tell


def in_model(change: Callable[[dict[str, Any]], None], *, rank: int | None = 1) -> Change:
    def tell(at: int, item: str, value: dict[str, Any]) -> None:
        if item == "model" and rank in (None, at):
            change(value)

    return tell


def _spec(tensor: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        object.__setattr__(tensor._spec, name, value)


def _meta(tensor: Any, *, shape: tuple[int, ...] | None = None, dtype: Any = torch.float32) -> None:
    size = tensor.shape if shape is None else torch.Size(shape)
    _spec(tensor, tensor_meta=TensorMeta(size, (4, 1), dtype))


def _local(tensor: Any, local: torch.Tensor) -> None:
    tensor._local_tensor = local


def _other_shape(model: dict[str, Any]) -> None:
    """A tensor of nine rows in place of five, which is right by itself."""
    tensor = model[Q]
    local = torch.zeros(4, 4)
    model[Q] = DTensor.from_local(local, tensor.device_mesh, ROWS, run_check=False, shape=(9, 4), stride=(4, 1))


def _layout(layout: Any, lengths: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A layout of other axes, of the same class."""
    axes = []
    for length, stride in zip(lengths, strides, strict=True):
        axis = object.__new__(type(layout.axes[0]))
        object.__setattr__(axis, "shape", (length,))
        object.__setattr__(axis, "stride", (stride,))
        axes.append(axis)
    found = object.__new__(type(layout))
    object.__setattr__(found, "axes", tuple(axes))
    return found


def _group(tensor: Any, **values: int) -> None:
    """Other numbers of the group of processes than the real ones; see `told_groups`."""
    tensor.told = values


def _moved(tensor: Any) -> None:
    """The second shard begins one row earlier, for all who say so."""
    metadata: ShardedTensorMetadata = tensor._metadata
    for shard in (metadata.shards_metadata[1], *(s.metadata for s in tensor._local_shards)):
        if shard.shard_offsets[0]:
            shard.shard_offsets[0] = 2


class Stranger:
    """A class of the test's own."""


@dataclass(frozen=True)
class Lie:
    """What one rank says, and how it is refused."""

    code: str
    text: str
    change: Change
    world: World = TWO
    placements: Placements = ROWS
    save: Callable[..., Path] = save_verl


LIES = {
    "the mesh is of another rank": Lie("checkpoint.mixed", "says that rank 0", of_mesh(lambda m: m.update(_rank=0))),
    "a rank that is a text": Lie("checkpoint.mixed", "says that rank x", of_mesh(lambda m: m.update(_rank="x"))),
    "a rank outside of its mesh": Lie(
        "checkpoint.mixed",
        "of the ranks 0",
        of_mesh(lambda m: m.update(_rank_map=torch.tensor([0], dtype=torch.int32), _flatten_rank_map=(0,))),
    ),
    "other coordinates": Lie(
        "checkpoint.mixed", "(1,) of its mesh", of_mesh(lambda m: m.update(_coordinate_on_dim=(0,)))
    ),
    "no coordinates": Lie(
        "checkpoint.mixed", "the mesh says None", of_mesh(lambda m: m.update(_coordinate_on_dim=None))
    ),
    "two lists of ranks": Lie(
        "checkpoint.malformed", "lists its ranks twice", of_mesh(lambda m: m.update(_flatten_rank_map=(1, 0)))
    ),
    "a rank in the mesh twice": Lie(
        "checkpoint.malformed",
        "twice",
        of_mesh(lambda m: m.update(_rank_map=torch.tensor([0, 1, 1], dtype=torch.int32), _flatten_rank_map=(0, 1, 1))),
    ),
    "a mesh of floats": Lie(
        "checkpoint.malformed", "not a tensor of integers", of_mesh(lambda m: m.update(_rank_map=torch.zeros(2)))
    ),
    "an axis longer than the mesh": Lie(
        "checkpoint.malformed",
        "do not fit a list of 2 ranks",
        of_mesh(lambda m: m.update(_layout=_layout(m["_layout"], (64,), (1,)))),
    ),
    "axes that overlap": Lie(
        "checkpoint.malformed",
        "do not fit a list of 4 ranks",
        of_mesh(lambda m: m.update(_layout=_layout(m["_layout"], (2, 2), (1, 1)))),
        FOUR,
    ),
    "a mesh of unknown form": Lie(
        "source.unsupported", "whose form is not known", of_mesh(lambda m: m.pop("_rank_map"))
    ),
    "a placement beyond the dimensions": Lie(
        "checkpoint.malformed", "dimension 7", of_model(Q, lambda t: _spec(t, placements=(Shard(7),)))
    ),
    "another placement than the local tensor's": Lie(
        "checkpoint.malformed",
        "is (5, 2), and the local tensor is (2, 4)",
        of_model(Q, lambda t: _spec(t, placements=(Shard(1),), shard_order=None)),
    ),
    "a replica that is a shard": Lie(
        "checkpoint.malformed",
        "Replicate of (5, 4)",
        of_model(Q, lambda t: _spec(t, placements=(Replicate(),), shard_order=None)),
    ),
    "more placements than axes": Lie(
        "checkpoint.malformed",
        "2 placements on a mesh of (2)",
        of_model(Q, lambda t: _spec(t, placements=(Shard(0), Shard(1)))),
    ),
    "a sum that is not finished": Lie(
        "source.unsupported", "the placement Partial", of_model(Q, lambda t: _spec(t, placements=(Partial(),)))
    ),
    "another order of cuts": Lie(
        "source.unsupported",
        "it is cut over the mesh's axes [1, 0]",
        of_model(Q, lambda t: _spec(t, shard_order=(ShardOrderEntry(0, (1, 0)),)), rank=None),
        World((2, 2), None),
        (Shard(0), Shard(0)),
    ),
    "a local tensor of less rows": Lie(
        "checkpoint.malformed", "the local tensor is (1, 4)", of_model(Q, lambda t: _local(t, t._local_tensor[:1]))
    ),
    "a local tensor of another type": Lie(
        "checkpoint.malformed",
        "its local tensor bfloat16",
        of_model(Q, lambda t: _local(t, t._local_tensor.to(torch.bfloat16))),
    ),
    "two global shapes": Lie(
        "checkpoint.malformed", "specification says (9, 4)", of_model(Q, lambda t: _meta(t, shape=(9, 4)))
    ),
    "two types": Lie(
        "checkpoint.malformed", "the DTensor is float32", of_model(Q, lambda t: _meta(t, dtype=torch.int8))
    ),
    "a repeated element": Lie(
        "tensor.amplification",
        "repeats a storage",
        of_model(Q, lambda t: _local(t, torch.zeros(1).expand(1 << 11, 1 << 11))),
    ),
    "ranks of different shapes": Lie("checkpoint.mixed", f"{Q}/weight is float32 (5, 4)", in_model(_other_shape)),
    "a tensor that one rank lacks": Lie("checkpoint.mixed", Q, in_model(lambda m: m.pop(Q))),
    "another order of names": Lie(
        "checkpoint.mixed",
        "in another order",
        in_model(lambda m: m.move_to_end("count")),  # type: ignore[attr-defined]
    ),
    "a buffer of another shape": Lie(
        "checkpoint.mixed", "table/weight is float32 (2, 3)", in_model(lambda m: m.update(table=torch.zeros(3, 2)))
    ),
    "a name that leaves the directory": Lie(
        "name.invalid", "../x", in_model(lambda m: m.update({"../x": torch.zeros(2)}), rank=None)
    ),
    "an object of a class": Lie(
        "pickle.forbidden_build", "Stranger", in_model(lambda m: m.update(x=Stranger()), rank=None)
    ),
    "a DTensor among the hyper-parameters": Lie(
        "checkpoint.malformed",
        "holds an object",
        lambda rank, item, value: (
            value["param_groups"][0].update(lr=next(iter(value["state"].values()))["exp_avg"])
            if item == "optim"
            else None
        ),
    ),
    "param groups that differ": Lie(
        "checkpoint.mixed",
        "param_groups[0].lr: 0.1 and 0.2",
        of_optimizer(lambda o: o["param_groups"][0].update(lr=0.2)),
    ),
    "steps that differ": Lie(
        "checkpoint.mixed",
        f"step of {Q} is another number",
        of_optimizer(lambda o: o["state"][1].update(step=torch.tensor(4.0))),
    ),
    "a state that one rank lacks": Lie(
        "checkpoint.mixed", "has the states exp_avg_sq, step of 1", of_optimizer(lambda o: o["state"][1].pop("exp_avg"))
    ),
    "states of no group": Lie(
        "checkpoint.malformed",
        "of no param group: 9",
        of_optimizer(lambda o: o["state"].update({9: o["state"][1]}), rank=None),
    ),
    "a number twice": Lie(
        "checkpoint.malformed",
        "2 is in the param groups twice",
        of_optimizer(lambda o: o["param_groups"][0].update(params=[0, 1, 2, 2]), rank=None),
    ),
    "numbers with gaps": Lie(
        "checkpoint.malformed",
        "leave gaps",
        of_optimizer(lambda o: o["param_groups"][0].update(params=[0, 1, 2, 3, 7]), rank=None),
    ),
    "numbers and names": Lie(
        "checkpoint.malformed",
        "names and numbers",
        of_optimizer(lambda o: o["param_groups"][0].update(params=[0, 1, 2, 3, "x"]), rank=None),
    ),
    "no state dict of an optimizer": Lie(
        "checkpoint.malformed", "`state` and `param_groups`", of_optimizer(lambda o: o.pop("param_groups"), rank=None)
    ),
    "a name that the model lacks": Lie(
        "checkpoint.incomplete",
        "the optimizer names other.weight",
        of_optimizer(lambda o: o["param_groups"][0]["params"].append("other.weight"), rank=None),
        save=save_accelerate,
    ),
    "a ShardedTensor of another rank": Lie(
        "checkpoint.mixed",
        "says that rank 0",
        of_model(Q, lambda t: _group(t, global_rank=0)),
        BARE,
        FSDP1,
        save_accelerate,
    ),
    "a ShardedTensor of more ranks": Lie(
        "checkpoint.incomplete",
        "a run of 8 ranks",
        of_model(Q, lambda t: _group(t, global_world_size=8)),
        BARE,
        FSDP1,
        save_accelerate,
    ),
    "a shard that is not listed": Lie(
        "checkpoint.malformed",
        "not one of those that the metadata lists",
        of_model(Q, lambda t: setattr(t._local_shards[0].metadata, "shard_offsets", [1, 0])),
        BARE,
        FSDP1,
        save_accelerate,
    ),
    "shards that overlap": Lie("checkpoint.coverage", Q, of_model(Q, _moved, rank=None), BARE, FSDP1, save_accelerate),
}


@pytest.fixture
def told_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """ShardedTensors pickle the numbers that they were told."""
    real = ShardedTensor.__getstate__

    def told(tensor: Any) -> Any:
        state = real(tensor)
        for name, value in getattr(tensor, "told", {}).items():
            setattr(state[2], name, value)
        return state

    monkeypatch.setattr(ShardedTensor, "__getstate__", told)


def refused(place: Path, target: Path, **options: Any) -> ReshardError:
    """The refusal of a conversion, which has left nothing behind; `inspect` refuses a lie of the metadata, too."""
    options = {"to": "safetensors", "progress": False} | options
    error = refused_conversion(reshard.convert, place, target, **options)
    assert error.fix or error.code.startswith(("pickle.", "tensor.", "zip."))
    return error


@pytest.mark.usefixtures("told_groups")
@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(name: str, tmp_path: Path) -> None:
    lie = LIES[name]
    model = small_model(lie.placements)
    if lie.placements not in (ROWS, FSDP1):
        model = small_model(lie.placements, rows=6)
    lie.save(model, tmp_path / "in", lie.world, change=lie.change)
    error = refused(tmp_path / "in", tmp_path / "out")
    assert error.code == lie.code, error
    assert lie.text in error.message
    # `inspect` names foreign objects, so that a user can decide about them.
    assert (command("inspect", str(tmp_path / "in"))[0] == 0) is error.code.startswith("pickle.")


# -- what the files do not prove, and copies that differ --------------------------------------------------------------


def _swapped(optim: dict[str, Any]) -> None:
    optim["state"] = {0: optim["state"][1], 1: optim["state"][0], **{k: optim["state"][k] for k in (2, 3)}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            of_optimizer(_swapped, rank=None),
            "number 0 has states of (5, 4), and the parameter in its place, embed.weight",
        ),
        (
            of_optimizer(lambda o: o["state"][1].update(codes="x"), rank=None),
            "neither tensors nor numbers: codes",
        ),
    ],
)
def test_an_optimizer_that_nothing_proves_stays_unread(change: Change, text: str, tmp_path: Path) -> None:
    save_verl(small_model(), tmp_path / "in", World(), change=change)
    for to in ("universal", "dcp", "zero"):
        options: dict[str, Any] = {"dp": 2, "zero_stage": "2"} if to == "zero" else {}
        error = refused(tmp_path / "in", tmp_path / to / "step", to=to, **options)
        assert error.code == "checkpoint.ambiguous"
        assert text in error.message
    reshard.convert(tmp_path / "in", tmp_path / "weights", to="safetensors", progress=False)


def test_shapes_that_leave_one_way_prove_an_optimizer_of_some_parameters(tmp_path: Path) -> None:
    """Three numbers of four parameters, as of a run that trains some of them: the fourth has another shape than all."""
    change = of_optimizer(lambda o: (o["param_groups"][0]["params"].pop(), o["state"].pop(3)), rank=None)
    save_verl(small_model(), tmp_path / "in", World(), change=change)
    found = read_checkpoint(open_location(str(tmp_path / "in")), None, OpaqueLedger(OpaquePolicy.REFUSE))
    trained, (frozen,) = found.members(0), found.frozen
    assert [p.shape for p in trained] == [(7, 4), (5, 4), (5, 4)]
    assert frozen.shape == (5,)
    tensors = found.shard_map.tensors
    assert all(tensors[p.states["exp_avg"]].shape == p.shape for p in trained)


@pytest.mark.parametrize(
    ("world", "placements", "change"),
    [
        (World(), ROWS, in_model(lambda m: m["table"].add_(1))),
        (World(), ROWS, in_model(lambda m: m["count"].add_(1))),
        (HSDP, (Replicate(), Shard(0)), of_model(Q, lambda t: t._local_tensor.add_(1), rank=3)),
        (
            HSDP,
            (Replicate(), Shard(0)),
            of_optimizer(lambda o: o["state"][1]["exp_avg"]._local_tensor.add_(1), rank=2),
        ),
    ],
    ids=["buffer", "number", "replica", "state of a replica"],
)
def test_copies_that_differ_are_found_before_anything_is_written(
    world: World, placements: Placements, change: Change, tmp_path: Path
) -> None:
    save_verl(small_model(placements), tmp_path / "in", world, change=change)
    error = refused(tmp_path / "in", tmp_path / "out" / "step", to="universal")
    assert error.code == "checkpoint.disagreement"
    reshard.convert(tmp_path / "in", tmp_path / "first" / "s", to="universal", replicas="first", progress=False)


# -- files ------------------------------------------------------------------------------------------------------------


def _rename(place: Path, old: str, new: str) -> None:
    for file in [*place.iterdir()]:
        if old in file.name:
            file.rename(place / file.name.replace(old, new))


def _swap(place: Path) -> None:
    _rename(place, "rank_0", "rank_x")
    _rename(place, "rank_1", "rank_0")
    _rename(place, "rank_x", "rank_1")


def _mix(place: Path) -> None:
    save_verl(small_model(), place, World((3,)))


def _truncate(place: Path) -> None:
    file = place / "optim_world_size_2_rank_1.pt"
    file.write_bytes(file.read_bytes()[:-100])


FILES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "a missing rank of the model": (
        "checkpoint.incomplete",
        "1 file of 2 ranks is missing",
        lambda p: (p / "model_world_size_2_rank_1.pt").unlink(),
    ),
    "a missing rank of the optimizer": (
        "checkpoint.incomplete",
        "optim_world_size_2_rank_0.pt",
        lambda p: (p / "optim_world_size_2_rank_0.pt").unlink(),
    ),
    "a missing extra state": (
        "checkpoint.incomplete",
        "extra_state",
        lambda p: (p / "extra_state_world_size_2_rank_0.pt").unlink(),
    ),
    "no model": (
        "checkpoint.incomplete",
        "no file of the model",
        lambda p: [f.unlink() for f in p.glob("model_*")],
    ),
    "two worlds": ("checkpoint.mixed", "6 files of a run of 2 ranks, and 9 files of a run of 3 ranks", _mix),
    "a rank beyond the world": (
        "checkpoint.mixed",
        "has none of that number",
        lambda p: shutil.copy(p / "model_world_size_2_rank_1.pt", p / "model_world_size_2_rank_7.pt"),
    ),
    "ranks swapped": ("checkpoint.mixed", "was not written by rank 0", _swap),
    "files of a smaller world by name": (
        "checkpoint.incomplete",
        "of a run of 2 ranks or more",
        lambda p: ([f.unlink() for f in p.glob("*rank_1*")], _rename(p, "size_2", "size_1")),
    ),
    "another world in the configuration": (
        "checkpoint.mixed",
        "says that 8 ranks saved",
        lambda p: (p / "fsdp_config.json").write_text('{"world_size": 8}'),
    ),
    "a configuration that is no JSON": (
        "checkpoint.malformed",
        "fsdp_config.json",
        lambda p: (p / "fsdp_config.json").write_text("{"),
    ),
    "files of two frameworks": (
        "checkpoint.mixed",
        "and of Accelerate",
        lambda p: save_accelerate(small_model(), p, World()),
    ),
    "a file that is cut off": ("zip.bad_directory", "", _truncate),
    "an empty file": (
        "checkpoint.incomplete",
        "is empty",
        lambda p: (p / "model_world_size_2_rank_0.pt").write_bytes(b""),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_do_not_belong_together_are_refused(name: str, tmp_path: Path) -> None:
    code, text, change = FILES[name]
    place = save_verl(small_model(), tmp_path / "in", World())
    change(place)
    error = refused(place, tmp_path / "out")
    assert error.code == code, error
    assert text in error.message


def test_the_last_rank_of_accelerate_is_missed_by_its_meshes(tmp_path: Path) -> None:
    place = save_accelerate(small_model(), tmp_path / "in", World((3,), None))
    for file in place.glob("*rank2*"):
        file.unlink()
    error = refused(place, tmp_path / "out")
    assert error.code == "checkpoint.incomplete"
    assert "a run of 3 ranks or more, and the directory holds files of 2" in error.message


def test_only_the_group_of_a_sharded_tensor_is_read_by_getattr(tmp_path: Path) -> None:
    """`getattr` on a class is how torch pickles the state's class; any other attribute is a foreign name."""
    place = save_accelerate(small_model(FSDP1), tmp_path / "in", World((2,), None))
    reshard.convert(place, tmp_path / "weights", to="safetensors", progress=False)
    file = place / "pytorch_model_fsdp_0_rank1.bin"
    _replace_in_pickle(file, b"X\x11\x00\x00\x00ProcessGroupState", b"X\x11\x00\x00\x00ProcessGroupStatf")
    error = refused(place, tmp_path / "out")
    assert error.code == "pickle.forbidden_build"
    assert "ShardedTensor.ProcessGroupStatf" in error.message


def _replace_in_pickle(file: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of `data.pkl`; the archive is written anew, because of its sums."""
    with zipfile.ZipFile(file) as archive:
        records = [(i.filename, archive.read(i)) for i in archive.infolist()]
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records:
            changed = data.replace(old, new) if name.endswith("data.pkl") else data
            assert not name.endswith("data.pkl") or changed != data
            archive.writestr(name, changed)


# -- full files --------------------------------------------------------------------------------------------------------

ZERO: dict[str, Any] = {"to": "zero", "dp": 2, "zero_stage": "3"}


def full_model() -> dict[str, torch.Tensor]:
    """Two parameters of one shape, one of another, and a number."""
    shapes = {"a.weight": (3, 4), "b.weight": (3, 4), "c.bias": (3,)}
    model = {name: torch.arange(1, 1 + torch.Size(s).numel()).reshape(s) + len(name) for name, s in shapes.items()}
    return {**{name: tensor.float() * (1 + i) for i, (name, tensor) in enumerate(model.items())}, "n": torch.tensor(3)}


def full_states(model: dict[str, torch.Tensor], keys: dict[str, Any] | None = None) -> dict[str, Any]:
    """An optimizer of the model's parameters by name, or by these keys."""
    keys = {n: n for n in model if n != "n"} if keys is None else keys
    states = {
        key: {"step": torch.tensor(2.0), "exp_avg": model[n] * 3, "exp_avg_sq": model[n] * 5} for n, key in keys.items()
    }
    group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [*states]}
    return {"state": states, "param_groups": [group]}


def save_full(place: Path, model: Any = None, optimizer: Any = None, *, number: str = "") -> Path:
    """The full files of a model and its optimizer under Accelerate's names."""
    place.mkdir(exist_ok=True)
    model = full_model() if model is None else model
    torch.save(model, place / f"pytorch_model_fsdp{number}.bin")
    torch.save(full_states(model) if optimizer is None else optimizer, place / f"optimizer{number}.bin")
    return place


def of_another(place: Path) -> None:
    torch.save(full_states({"other.weight": torch.ones(3, 4)}), place / "optimizer.bin")


def sharded(place: Path) -> None:
    """One rank's file of two under the name of a full one."""
    save_accelerate(small_model(), place / "ranks", BARE)
    shutil.copy(place / "ranks" / "pytorch_model_fsdp_0_rank0.bin", place / "pytorch_model_fsdp.bin")


def cut_off(place: Path) -> None:
    file = place / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-100])


FULL: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "an optimizer of another model": ("checkpoint.incomplete", "names other.weight, and the model has no", of_another),
    "a file of one rank of two": ("checkpoint.incomplete", "a run of 2 ranks or more", sharded),
    "files of ranks beside them": (
        "checkpoint.mixed",
        "and full files (optimizer.bin, pytorch_model_fsdp.bin)",
        lambda p: save_accelerate(small_model(), p, BARE),
    ),
    "a second model": (
        "checkpoint.ambiguous",
        "2 models: pytorch_model_fsdp, pytorch_model_fsdp_1",
        lambda p: save_full(p, number="_1"),
    ),
    "an optimizer that is cut off": ("zip.bad_directory", "", cut_off),
    "an optimizer that is a model": (
        "checkpoint.malformed",
        "`state` and `param_groups`",
        lambda p: torch.save(full_model(), p / "optimizer.bin"),
    ),
    "a trainer's state that is no JSON": (
        "checkpoint.malformed",
        "trainer_state.json",
        lambda p: (p / "trainer_state.json").write_text("{"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_full_files_that_do_not_belong_together_are_refused(name: str, tmp_path: Path) -> None:
    code, text, change = FULL[name]
    place = save_full(tmp_path / "in")
    change(place)
    error = refused(place, tmp_path / "out")
    assert error.code == code, error
    assert text in error.message


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"a.weight": 0, "b.weight": 1, "c.bias": 2}, "their shapes alone do not tell which is which"),
        ({"a.weight": 1, "b.weight": 2, "c.bias": 0}, "number 0 has states of (3,), and the parameter in its place"),
        ({"a.weight": 0, "c.bias": 1}, "numbers 2 parameters, and the model's files hold 3"),
    ],
)
def test_numbers_of_a_full_optimizer_are_never_guessed(keys: dict[str, int], text: str, tmp_path: Path) -> None:
    model = full_model()
    place = save_full(tmp_path / "in", model, full_states(model, keys))
    for options in (ZERO, {"to": "dcp"}, {"to": "universal"}):
        error = refused(place, tmp_path / "out" / "step", **options)
        assert error.code == "checkpoint.ambiguous"
        assert text in error.message
        assert "--param-order" in (error.fix or "")
    reshard.convert(place, tmp_path / "weights", to="safetensors", progress=False)
    order = tmp_path / "order.txt"
    order.write_text("".join(f"{name}\n" for name in sorted(keys, key=lambda n: keys[n])))
    reshard.convert(place, tmp_path / "said" / "s", to="universal", param_order=str(order), progress=False)


def test_numbers_of_a_full_optimizer_are_taken_where_shapes_prove_them(tmp_path: Path) -> None:
    model = {"a.weight": torch.ones(3, 4), "b.weight": torch.ones(4, 3), "c.bias": torch.ones(3)}
    keys = {name: number for number, name in enumerate(model)}
    named = save_full(tmp_path / "named", model)
    numbered = save_full(tmp_path / "numbered", model, full_states(model, keys))
    assert reshard.diff(named, numbered, progress=False).equal


def test_states_that_do_not_fit_their_parameters_stay_unread(tmp_path: Path) -> None:
    optimizer = full_states(full_model())
    optimizer["state"]["a.weight"]["exp_avg"] = torch.ones(4, 3)
    place = save_full(tmp_path / "in", optimizer=optimizer)
    error = refused(place, tmp_path / "out" / "step", **ZERO)
    assert error.code == "checkpoint.ambiguous"
    assert "exp_avg of a.weight is (4, 3)" in error.message
    reshard.convert(place, tmp_path / "weights", to="safetensors", progress=False)


def test_a_model_without_a_file_of_its_optimizer_is_weights(tmp_path: Path) -> None:
    place = save_full(tmp_path / "in")
    (place / "optimizer.bin").rename(place / "optimizer_1.bin")
    assert command("inspect", str(place))[1].startswith("torch-weights")


def test_each_of_two_models_is_read_with_its_own_optimizer(tmp_path: Path) -> None:
    place = save_full(tmp_path / "in")
    second = {name: tensor + 1 for name, tensor in full_model().items()}
    save_full(place, second, number="_1")
    alone = save_full(tmp_path / "alone", second)
    torch.save({"last_epoch": 2, "_last_lr": [0.5], "base_lrs": [0.5]}, place / "scheduler.bin")
    options: dict[str, Any] = {"to": "universal", "model_key": "pytorch_model_fsdp_1"}
    error = refused(place, tmp_path / "out" / "s", **options)
    assert error.code == "checkpoint.ambiguous"
    assert "2 optimizers and 1 learning-rate scheduler" in error.message
    result = reshard.convert(place, tmp_path / "out" / "s", scheduler_key="none", progress=False, **options)
    assert {n.path for n in result.not_carried} >= {"pytorch_model_fsdp.bin", "optimizer.bin"}
    found = reshard.diff(alone, tmp_path / "out" / "s", progress=False)
    assert [d for d in found.differences if d.name != "counters and client state"] == []
    with pytest.raises(ReshardError, match="no model is called"):
        reshard.convert(place, tmp_path / "no" / "s", **(options | {"model_key": "pytorch_model_fsdp_2"}))


def test_a_tensor_that_no_optimizer_trains_is_asked_about(tmp_path: Path) -> None:
    model = {**full_model(), "table": torch.ones(7)}
    place = save_full(tmp_path / "in", model, full_states(full_model()))
    error = refused(place, tmp_path / "out" / "step", **ZERO)
    assert error.code == "checkpoint.ambiguous"
    assert "which of table are buffers" in error.message
    for said in ("none", "table"):
        reshard.convert(place, tmp_path / said / "step", buffers=said, progress=False, **ZERO)
