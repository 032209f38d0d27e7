"""The smallest checkpoint that every command reads: ZeRO-2 on two ranks, two parameters, Adam. Entries spoil it.

Source: deepspeed 0.19.8, the keys of `tests/data/zero2_tiny`, which a real run wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adversarial.corpus import archives, opcodes as op

TAG = "global_step3"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
SHAPES = {"w": (4, 3), "b": (3,)}
"""15 elements, padded to 16, cut into two partitions of 8."""
HALF = 8


def floats(count: int, *, first: float = 0.0) -> bytes:
    """float32 values that count up."""
    return struct.pack(f"<{count}f", *(first + i for i in range(count)))


def f32(key: str, *shape: int) -> op.Code:
    """A packed float32 tensor over a storage of its own."""
    numel = 1
    for length in shape:
        numel *= length
    return op.tensor(op.storage("FloatStorage", key, numel), shape)


@dataclass
class TorchFile:
    """A file of the checkpoint: entries of its pickle, its storages, or other bytes in their place."""

    entries: dict[str, Any]
    storages: dict[str, bytes]
    pickle: bytes | None = None
    raw: bytes | None = None

    def data_pkl(self) -> bytes:
        """The pickle."""
        return op.stream(self.entries) if self.pickle is None else self.pickle

    def records(self) -> list[archives.Record]:
        """The archive's records."""
        return archives.torch_records(self.data_pkl(), self.storages)

    def bytes(self) -> bytes:
        """The file."""
        return archives.archive(self.records()) if self.raw is None else self.raw


def model_states() -> TorchFile:
    """The model states."""
    module = {"w": f32("0", 4, 3), "b": f32("1", 3)}
    entries = {
        "module": op.ordered(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [op.ordered({n: op.size(*s) for n, s in SHAPES.items()})],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 12,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}},
        "ds_version": "0.19.8",
    }
    return TorchFile(entries, {"0": floats(12), "1": floats(3, first=12.0)})


def inner(rank: int) -> dict[str, Any]:
    """What `optimizer_state_dict` of a rank's file holds."""
    flats = {key: f32(str(place), HALF) for place, key in enumerate(("fp32", "exp_avg", "exp_avg_sq"))}
    group = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    state = {0: {"step": 3, "exp_avg": flats["exp_avg"], "exp_avg_sq": flats["exp_avg_sq"]}}
    return {
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 0.0,
        "base_optimizer_state": {"state": state, "param_groups": [group]},
        "single_partition_of_fp32_groups": [flats["fp32"]],
        "zero_stage": 2,
        "group_paddings": [rank],
        "partition_count": [2],
        "ds_version": "0.19.8",
    }


def optim_states(rank: int) -> TorchFile:
    """One rank's optimizer states."""
    data = {str(i): floats(HALF, first=100.0 * i + HALF * rank) for i in range(3)}
    return TorchFile({"optimizer_state_dict": inner(rank), "ds_version": "0.19.8"}, data)


@dataclass
class Draft:
    """A checkpoint that is about to be written."""

    model: TorchFile = field(default_factory=model_states)
    optim: list[TorchFile] = field(default_factory=lambda: [optim_states(0), optim_states(1)])
    latest: bytes | None = TAG.encode()
    others: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """More files, by path below the save directory."""
    dropped: Sequence[str] = ()

    def write(self, directory: Path) -> None:
        """Write the save directory."""
        files = {f"{TAG}/{MODEL}": self.model.bytes()}
        files |= {f"{TAG}/{name}": file.bytes() for name, file in zip(OPTIM, self.optim, strict=True)}
        if self.latest is not None:
            files["latest"] = self.latest
        for path, data in (files | self.others).items():
            if path not in self.dropped:
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                (directory / path).write_bytes(data)


Build = Callable[[Path], None]


def plain(directory: Path) -> None:
    """The checkpoint as it should be."""
    Draft().write(directory)


def edited(change: Callable[[Draft], None]) -> Build:
    """The checkpoint after a change."""

    def build(directory: Path) -> None:
        draft = Draft()
        change(draft)
        draft.write(directory)

    return build


def payload(code: bytes | Callable[[], bytes]) -> Build:
    """A value in the part of the model states that no reader interprets."""

    def change(draft: Draft) -> None:
        draft.model.entries["user_state"] = op.Code(code() if callable(code) else code)

    return edited(change)


def entry(key: str, value: Any) -> Build:
    """Another value of a key of the model states that readers interpret."""
    return edited(lambda draft: draft.model.entries.__setitem__(key, value))


def pickled(data: bytes | Callable[[], bytes]) -> Build:
    """Another `data.pkl` in the model states."""

    def change(draft: Draft) -> None:
        draft.model.pickle = data() if callable(data) else data

    return edited(change)


def raw(data: bytes | Callable[[], bytes]) -> Build:
    """Other bytes in place of the model states."""

    def change(draft: Draft) -> None:
        draft.model.raw = data() if callable(data) else data

    return edited(change)


def zipped(change: Callable[[list[archives.Record]], bytes]) -> Build:
    """The model states, archived in another way."""

    def edit(draft: Draft) -> None:
        draft.model.raw = change(draft.model.records())

    return edited(edit)


def ranked(change: Callable[[dict[str, Any], int], None]) -> Build:
    """Every rank's optimizer states after a change."""

    def edit(draft: Draft) -> None:
        for rank, file in enumerate(draft.optim):
            change(file.entries["optimizer_state_dict"], rank)

    return edited(edit)


def module(tensors: dict[str, op.Code], storages: dict[str, bytes]) -> Build:
    """More entries of `module`, with their storages."""

    def edit(draft: Draft) -> None:
        draft.model.entries["module"] = op.ordered({"w": f32("0", 4, 3), "b": f32("1", 3), **tensors})
        draft.model.storages |= storages

    return edited(edit)
