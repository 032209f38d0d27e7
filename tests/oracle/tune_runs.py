"""torchtune's own checkpointers and its functions that save and load; runs inside the ranks.

torchtune 0.6.1 lies beside the environment, without its dependencies. What it imports and these functions do not call
is a stand-in here: `torchao` (its quantized tensors, of which there are none), `torchdata`, `datasets`, `PIL`,
`sentencepiece`, `tiktoken`, `kagglehub` and `blobfile` (data and tokenizers), `omegaconf` (configurations of recipes,
in place of which the checkpointer is handed over). Model, optimizer, sharding, gathering and both directions of the
files are torchtune's.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from oracle.dcp_cases import TITAN_FOLDER
from oracle.dcp_models import start_world
from oracle.fsdp_ranks_load import _SAMPLES, _STEPS, _VOCABULARY, _mean, _model
from oracle.gather import gather_states
from oracle.whole_runs import _held, _keep_loaded, _keep_truth, _plain

_ABSENT = ("torchao", "torchdata", "datasets", "PIL", "sentencepiece", "tiktoken", "kagglehub", "blobfile", "omegaconf")
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 24, "max_seq_len": 32,
    "intermediate_dim": 38,
}  # fmt: skip
FILES = {"tune": ["epoch_0/model-00001-of-00001.bin"], "hf": ["epoch_0/model-00001-of-00001.safetensors"]}
"""The files of a model after the first epoch, as a user names them to go on."""


class _Absent(MetaPathFinder, Loader):
    """Makes modules whose every name is an empty class."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = fullname.partition(".")[0] in _ABSENT
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


class _Nothing:
    """Takes any arguments, and leaves what it decorates as it is."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, decorated: Any) -> Any:
        return decorated

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Nothing,), {})


def _start() -> Any:
    """Joins the world; returns the module with torchtune's functions of training."""
    start_world()
    sys.meta_path.insert(0, _Absent())
    if TITAN_FOLDER in os.environ:
        sys.path.append(os.environ[TITAN_FOLDER])  # last: what is installed comes first
    from torchtune import training

    return training


def _fresh(*, trains: bool) -> nn.Module:
    from torchtune.models.llama3 import llama3

    torch.manual_seed(5 if trains else 99)
    model: nn.Module = llama3(**_SIZES)
    draw = torch.Generator().manual_seed(5 if trains else 99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw) + (parameter.dim() < 2))
    return model


def _loss(model: Any, number: int) -> torch.Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = range(rank * _SAMPLES // world, (rank + 1) * _SAMPLES // world)
    seeds = (torch.Generator().manual_seed(3000 + number * _SAMPLES + k) for k in own)
    tokens = torch.stack([torch.randint(0, _VOCABULARY, (10,), generator=seed) for seed in seeds])
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _steps(model: nn.Module, optimizer: Any, first: int) -> list[float]:
    losses: list[float] = []
    for number in range(first, first + _STEPS):
        loss = _loss(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
    return losses


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As recipes make it: of all parameters, in one group."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, fused=False)


def _checkpointer(training: Any, form: str, base: Path, run: Path, *, resumes: bool) -> Any:
    """The checkpointer of a form of files: torchtune's own names, or Hugging Face's."""
    kind = training.FullModelTorchTuneCheckpointer if form == "tune" else training.FullModelHFCheckpointer
    files = FILES[form] if resumes else ["base.pt" if form == "tune" else "model.safetensors"]
    model_type = "LLAMA3"
    return kind(str(base), files, model_type, str(run), should_load_recipe_state=resumes)


def _made_base(folder: str, form: str) -> Path:
    """The directory of the model that a run begins with."""
    base = Path(f"{folder}.base")
    if dist.get_rank() == 0:
        base.mkdir()
        if form == "hf":
            hugging_face: Any = _model({"kind": "llama"})
            hugging_face.save_pretrained(base)
        else:
            torch.save(_fresh(trains=True).state_dict(), base / "base.pt")
    dist.barrier()
    return base


def tune(folder: str, case: dict[str, Any], path: str | None = None) -> dict[str, Any]:
    """Trains and saves, or goes on, as the recipes of torchtune for full models do.

    Args:
        folder: Where the run's files go; of a run that loads, where what was loaded goes.
        case: `form` of the files, `tune` or `hf`; `recipe`, `distributed` or `single_device`.
        path: torchtune's output directory to go on from; None trains from the start.

    Returns:
        Losses of the last three steps.
    """
    training = _start()
    form, single = case["form"], case["recipe"] == "single_device"
    base = _made_base(folder, form)
    run = Path(path or Path(folder, "ckpt"))
    checkpointer = _checkpointer(training, form, base, run, resumes=path is not None)
    loaded = checkpointer.load_checkpoint()
    model = _fresh(trains=False)
    if not single:
        training.shard_model(model, [lambda n, _: n.startswith("layers.") and n.count(".") == 1], cpu_offload=False)
    device = torch.device("cpu")
    if single:
        model.load_state_dict(loaded["model"])
    else:
        training.load_from_full_model_state_dict(model, loaded["model"], device, strict=True)
    optimizer = _adamw(model)
    if path is not None:
        if single:
            optimizer.load_state_dict(loaded["optimizer"])
        else:
            training.load_from_full_optimizer_state_dict(model, optimizer, loaded["optimizer"], device)
        assert (loaded["epochs_run"], loaded["seed"], loaded["total_epochs"]) == (1, 7, 2)
        _keep_loaded(folder, _held(model, lambda p: optimizer.state[p]))
        return {"losses": _steps(model, optimizer, _STEPS)}
    _steps(model, optimizer, 0)
    _keep_truth(folder, case, _held(model, lambda p: optimizer.state[p]), _plain(optimizer.param_groups))
    (_save_single if single else _save)(training, checkpointer, model, optimizer)
    return {"losses": _steps(model, optimizer, _STEPS)}


def _save(training: Any, checkpointer: Any, model: nn.Module, optimizer: Any) -> None:
    """By the client of the distributed recipes."""
    from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress

    class _Configuration(dict[str, Any]):
        device = "cpu"

    client = CheckpointClient(_Configuration())  # type: ignore[arg-type]
    client._checkpointer = checkpointer
    progress = TrainingProgress(seed=7, epochs_run=1, total_epochs=2, max_steps_per_epoch=3)
    client.save_checkpoint(model=model, optimizer=optimizer, training_progress=progress, epoch=0)


def _save_single(training: Any, checkpointer: Any, model: nn.Module, optimizer: Any) -> None:
    """By the method of the recipe for one device."""
    import torchtune

    recipes = Path(torchtune.__file__).parents[1] / "recipes"  # no package: recipes are files to copy
    made = runpy.run_path(str(recipes / "full_finetune_single_device.py"))["FullFinetuneRecipeSingleDevice"]
    recipe = SimpleNamespace(
        _model=model, _optimizer=optimizer, _checkpointer=checkpointer, _optimizer_in_bwd=False, optimizer=optimizer,
        seed=7, epochs_run=1, total_epochs=2, max_steps_per_epoch=3, _dataloader=SimpleNamespace(state_dict=dict),
    )  # fmt: skip
    made.save_checkpoint(recipe, epoch=0)


def resume_shards(path: str, case: dict[str, Any], out: str) -> dict[str, Any]:
    """Goes on from a distributed checkpoint under FSDP2, for three steps; the first rank leaves what was loaded."""
    training = _start()
    model = _fresh(trains=False)
    training.shard_model(
        model, [lambda n, _: n.startswith("layers.") and n.count(".") == 1], cpu_offload=False,
        dp_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
    )  # fmt: skip
    optimizer = _adamw(model)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _keep_loaded(out, _held(model, lambda p: optimizer.state[p]))
    return {"losses": _steps(model, optimizer, _STEPS)}


def resume_zero(path: str, case: dict[str, Any], out: str) -> dict[str, Any]:
    """Goes on from a ZeRO checkpoint, which DeepSpeed loads itself, for three steps."""
    import deepspeed

    _start()
    model = _fresh(trains=False)
    config = {
        "train_micro_batch_size_per_gpu": _SAMPLES // dist.get_world_size(),
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, optimizer=_adamw(model), config=config)
    loaded, _ = engine.load_checkpoint(path)
    assert loaded is not None, f"DeepSpeed found no checkpoint in {path}"
    states = gather_states(engine)
    found = {f"{n}/{s}": v for key, v in states.tensors.items() for s, _, n in (key.partition("/"),)}
    found |= {f"{n}/step": torch.tensor(value) for n, value in states.scalars["step"].items()}
    _keep_loaded(out, {k: v.detach().contiguous().clone() for k, v in found.items()})
    losses: list[float] = []
    for number in range(_STEPS, 2 * _STEPS):
        loss = _loss(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(_mean(loss))
    return {"losses": losses}
