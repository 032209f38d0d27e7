"""Runs under FSDP whose checkpoints PyTorch DCP writes, and the meshes on which they are trained and resumed.

Needs no torch.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from oracle.cases import Case

Parallel = Literal["fsdp2", "fsdp1", "fsdp1_flat"]
OptimizerName = Literal["adamw", "amsgrad", "sgd", "adam"]

GRAMMARS = ("app", "nested", "flat", "titan", "raw")
"""Grammars of keys in which torch alone saves a run; ``oracle.dcp_grammars`` says what each is."""
VARIANTS = ("async", "no_collectives", "threads", "items", "v2_3")
"""Other ways to write ``app``."""
HUGGING_FACE = ("hf", "hf_consolidated")
"""Weights by ``HuggingFaceStorageWriter(save_distributed=True)``, and with one consolidated file beside the shards."""
LOST = ("raw", "local")
"""Saves of FSDP1 from which nobody gets the state back.

An optimizer's own state dict is one rank's flat pieces, and LOCAL_STATE_DICT has flat parameters without names.
"""

ITEM_FORMS = ("metadata", "safetensors")
"""Saves of torch_checkpointing: all items by ``torch.save``, or the model as safetensors of each rank's parts."""

TITAN_FOLDER = "RESHARD_TORCHTITAN"
"""The variable that names the folder of torchtitan, torchao and torch_checkpointing, unless they are installed.

Only some parts of torchtitan are wanted, without what it depends on for others: ``pip install --no-deps --target FOLDER
torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser typeguard``.
"""

_MODEL = Case("dcp", 2, "fp32", two_groups=True, unused=False)
_UNTIED = replace(_MODEL, tied=False)


@dataclass(frozen=True, repr=False)
class Mesh:
    """Arrangement of the ranks.

    Attributes:
        shard: ranks over which FSDP cuts a parameter.
        replicate: copies of that (HSDP).
        tensor: ranks over which tensor parallelism cuts it first.
        named: its axes have names; without, there is one axis, as ``fully_shard`` makes it.
    """

    shard: int
    replicate: int = 1
    tensor: int = 1
    named: bool = True

    @property
    def world(self) -> int:
        """All ranks."""
        return self.shard * self.replicate * self.tensor

    @property
    def data(self) -> int:
        """Ranks with rows of their own."""
        return self.shard * self.replicate

    def __repr__(self) -> str:
        """Short, for the names of tests: ``4``, ``2x2hsdp``, ``2x2tp``."""
        name = str(self.shard)
        name += f"x{self.replicate}hsdp" if self.replicate > 1 else ""
        name += f"x{self.tensor}tp" if self.tensor > 1 else ""
        return name if self.named else f"{name}unnamed"


@dataclass(frozen=True)
class FsdpRun:
    """One kind of training run.

    Attributes:
        name: unique; also the test id.
        parallel: FSDP2, or FSDP1 with its original parameters or with flat ones only.
        model: the switches of the model; of this only what the model and its groups want is read.
        mesh: the ranks that train the source.
        optimizer: AdamW, AdamW with AMSGrad, Adam with a weight decay that shows, or SGD with momentum.
        scheduler: ExponentialLR, which DeepSpeed can run as well, or none.
        by_block: the two groups are the first block and the rest, for FSDP1's flat parameters are whole blocks; else
            they are matrices and vectors.
    """

    name: str
    parallel: Parallel = "fsdp2"
    model: Case = _MODEL
    mesh: Mesh = Mesh(4)
    optimizer: OptimizerName = "adamw"
    scheduler: bool = True
    by_block: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data for the way into a rank; `FsdpRun.of` takes it."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> FsdpRun:
        """The run that ``to_json`` described."""
        known: dict[str, Any] = data | {"model": Case(**data["model"]), "mesh": Mesh(**data["mesh"])}
        return cls(**known)

    def on(self, mesh: Mesh, parallel: Parallel | None = None) -> FsdpRun:
        """The run that continues this one on another mesh."""
        return replace(self, mesh=mesh, parallel=parallel or self.parallel)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The checkpoints that torch can save of this run and that hold all of it."""
        every = (*GRAMMARS, *VARIANTS)
        # Under FSDP1 `async_save` fails (torch 2.13).
        return every if self.parallel == "fsdp2" else tuple(kind for kind in every if kind not in ("async", *LOST))

    @property
    def other_kinds(self) -> tuple[str, ...]:
        """What torch saves of it besides: weights alone, and what is lost.

        Consolidation fails on integers (torch 2.13).
        """
        weights = HUGGING_FACE if not self.model.buffers else HUGGING_FACE[:1]
        return weights if self.parallel == "fsdp2" else (*weights, *LOST)


def _runs() -> dict[str, FsdpRun]:
    runs = [
        FsdpRun("fsdp2"),
        FsdpRun("fsdp2_unused", model=replace(_MODEL, unused=True)),
        FsdpRun("hsdp", mesh=Mesh(2, replicate=2), model=_UNTIED),
        FsdpRun("fsdp2_tp", mesh=Mesh(2, tensor=2), model=_UNTIED),
        FsdpRun("fsdp1", parallel="fsdp1", model=replace(_MODEL, unused=True)),
        FsdpRun("fsdp1_flat", parallel="fsdp1_flat", by_block=True),
        FsdpRun("fsdp2_sgd", optimizer="sgd"),
        FsdpRun("fsdp2_amsgrad", optimizer="amsgrad", scheduler=False),
        FsdpRun("fsdp2_adam", optimizer="adam", model=_UNTIED),
        FsdpRun("fsdp2_plain", model=replace(_UNTIED, frozen=False, buffers=False, two_groups=False), scheduler=False),
    ]
    return {run.name: run for run in runs}


RUNS: dict[str, FsdpRun] = _runs()


def is_here(package: str) -> bool:
    """True if torchtitan, or a package beside it, can be imported."""
    there = Path(os.environ.get(TITAN_FOLDER, os.devnull), package).is_dir()
    return there or importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class EmaLayout:
    """A state dict with a model and its moving average: M, E, and O, F or R for the optimizer.

    Attributes:
        state: the nesting; ``**`` merges a part into its dict. O is by names, F flattened, R by numbers.
        model: the key of the model, as a user names it.
        average: that of the average.
    """

    state: dict[str, Any]
    model: str
    average: str

    @property
    def flat(self) -> bool:
        """True if the optimizer is flattened."""
        return "F" in repr(self.state)

    @property
    def numbered(self) -> bool:
        """True if the optimizer numbers its parameters."""
        return "'R'" in repr(self.state)


EMA_LAYOUTS: dict[str, EmaLayout] = {
    "ema_unet": EmaLayout({"ema": "E", "unet": "M", "optimizer": "O"}, "unet", "ema"),
    "unet_ema": EmaLayout({"unet": "M", "ema": "E", "optimizer": "O"}, "unet", "ema"),
    "model_ema": EmaLayout({"model": "M", "ema": "E", "optimizer": "O"}, "model", "ema"),
    "average_first": EmaLayout({"model_ema": "E", "model": "M", "optimizer": "O"}, "model", "model_ema"),
    "average_is_model": EmaLayout({"model": "E", "online": "M", "optimizer": "O"}, "online", "model"),
    "app": EmaLayout({"app": {"ema": {"model": "E"}, "net": "M", "optim": "O"}}, "app.net", "app.ema.model"),
    "app_and_ema": EmaLayout({"app": {"model": "M", "optim": "O"}, "ema": "E", "epoch": 3}, "app.model", "ema"),
    "shadow": EmaLayout({"net": "M", "optimizer": "O", "ema": {"decay": 0.5, "shadow": "E"}}, "net", "ema.shadow"),
    "deep": EmaLayout(
        {"state": {"online": {"weights": "M"}, "target": {"weights": "E"}}, "optim": "O"},
        "state.online.weights",
        "state.target.weights",
    ),
    "root": EmaLayout({"**": "M", "ema": "E", "optimizer": "F"}, ".", "ema"),
    "raw": EmaLayout({"ema": "E", "unet": "M", "optimizer": "R"}, "unet", "ema"),
}
"""The layouts in which trainers of diffusion models and others save a moving average."""
