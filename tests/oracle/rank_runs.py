"""Runs whose ranks' files a framework's own manager saves and loads; inside the ranks.

A run trains a small model. Its manager loads before the first step, if told to, and saves after the third one.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from oracle.dcp_cases import TITAN_FOLDER
from oracle.dcp_truth import dump

_VOCABULARY, _SAMPLES, STEPS = 67, 12, 3
"""Samples of a step on all ranks, which 2, 3 and 4 divide, and steps before and after a save."""
SOURCE_SEED, RESUME_SEED = 5, 99
"""Seeds of the weights: those of a run that resumes are others, so that what a loader leaves out shows."""


class Manager(Protocol):
    """What saves and loads a run."""

    def load(self, path: str) -> None:
        """Load this rank's files."""

    def save(self, path: str) -> None:
        """Save this rank's files."""


@dataclass
class RankRun:
    """A wrapped model, its optimizer and its scheduler, and who saves them."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    manager: Manager


def import_parts(*bare: str, **made: dict[str, Any]) -> None:
    """Make a framework importable of which some parts are not here.

    Args:
        bare: Packages whose own `__init__` is not run, each after the one around it: it imports parts of the framework
            that no manager uses, and their requirements. Modules within are the framework's.
        made: Modules that are not installed, `_` in place of a dot, with all names that the framework takes from them.
    """
    if TITAN_FOLDER in os.environ:
        sys.path.append(os.environ[TITAN_FOLDER])  # last: what is installed comes first
    for name in bare:
        first, *rest = name.split(".")
        spec = None if rest else importlib.util.find_spec(first)
        around = list(sys.modules[name.rpartition(".")[0]].__path__) if rest else []
        places = [str(Path(place, rest[-1])) for place in around] if rest else spec and spec.submodule_search_locations
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = list(places or ())
    for name, names in made.items():
        sys.modules[name.replace("__", ".")] = module = ModuleType(name)
        module.__dict__.update(names, __path__=[])


def small_model(case: dict[str, Any], seed: int) -> nn.Module:
    """A causal language model, some of whose parameters have fewer rows than there are ranks, and others uneven ones.

    Args:
        case: `tied`: embedding and head are one parameter. `buffers`: of several types.
        seed: For the weights.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=_VOCABULARY, hidden_size=6, intermediate_size=5, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=case.get("tied", False),
        attn_implementation="eager", pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config)
    model.config.architectures = [type(model).__name__]  # verl looks it up when it saves
    if case.get("buffers"):
        drawn = 1.0 if seed == SOURCE_SEED else 0.0
        model.register_buffer("count", torch.tensor(int(11 * drawn)))
        model.register_buffer("table", torch.arange(6.0).reshape(2, 3) * drawn / 7)
        model.register_buffer("flag", torch.tensor([drawn > 0, False]))
        model.register_buffer("scratch", torch.ones(2), persistent=False)
        if case.get("fsdp", 2) == 2:  # FSDP1 casts buffers when it begins to run
            model.model.register_buffer("short", torch.arange(5).to(torch.bfloat16) * drawn / 3)
    return model  # type: ignore[no-any-return]


def with_adapter(model: Any, seed: int) -> Any:
    """The model with an adapter, as verl's `_build_lora_module` makes it, whose second matrices are not zero."""
    from peft import LoraConfig, TaskType, get_peft_model

    model.enable_input_require_grads()
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules="all-linear", bias="none")
    adapted: Any = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapted


def go_on(run: RankRun, out: str, load: str | None, save: str) -> dict[str, Any]:
    """Load, train three steps, save and train three more.

    Args:
        run: The run.
        out: Where the state goes as it was loaded (`loaded.*`) and as it was saved (`saved.*`), gathered.
        load: Files of all ranks; None for a run that begins.
        save: A directory for files of all ranks.

    Returns:
        Losses before and after the save, and digests of this rank's random states when it had loaded and saved.
    """
    seed = 50 + dist.get_rank() + (0 if load is None else 1000)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - this generator is the one that the managers save
    torch.manual_seed(seed)
    if load is not None:
        run.manager.load(load)
        dump(run.model, run.optimizer, run.scheduler, Path(out), "loaded")
    begin = int(run.scheduler.last_epoch)
    drawn = {"random_loaded": _random_digest()}
    losses = [_step(run, number) for number in range(begin, begin + STEPS)]
    dump(run.model, run.optimizer, run.scheduler, Path(out), "saved")
    drawn["random_saved"] = _random_digest()
    run.manager.save(save)
    after = [_step(run, number) for number in range(begin + STEPS, begin + 2 * STEPS)]
    return {"losses": losses, "losses_after": after, **drawn}


def _step(run: RankRun, number: int) -> float:
    """Train on this rank's part of a step's samples; the loss is the mean of all ranks'."""
    loss = loss_of(run.model, number)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.scheduler.step()
    _ = torch.rand(1), np.random.random(), random.random()  # noqa: NPY002 - other random states at each step
    return mean_of(loss)


def loss_of(model: Any, number: int) -> torch.Tensor:
    """The loss of this rank's part of a step's samples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = range(rank * _SAMPLES // world, (rank + 1) * _SAMPLES // world)
    seeds = (torch.Generator().manual_seed(3000 + number * _SAMPLES + k) for k in own)
    tokens = torch.stack([torch.randint(0, _VOCABULARY, (10,), generator=seed) for seed in seeds])
    logits = model(input_ids=tokens).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mean_of(loss: torch.Tensor) -> float:
    """The mean of all ranks' losses."""
    mean = loss.detach().to(torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _random_digest() -> str:
    """A digest of the random states of torch, NumPy and Python."""
    held = (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())  # noqa: NPY002
    with np.printoptions(threshold=10_000):
        return hashlib.sha256(repr(held).encode()).hexdigest()
