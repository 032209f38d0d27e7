"""SkyRL's own strategy of FSDP around a small model, on CPUs; runs inside the ranks.

The strategy, which wraps, saves and loads, is SkyRL's, and so are the optimizer, the scheduler and the wrapper around
the model. In place of others:

- the functions of `torch.cuda` that the strategy calls, and "cuda" of its mesh and of the buffers that it sends from
  the first rank: those of a CPU. SkyRL 0.3.0 has no other device;
- `loguru`, `jaxtyping`, `omegaconf`, `flash_attn`, and the environments of `skyrl_gym` in SkyRL's configuration: names
  that modules import, and that no call of the strategy uses;
- `__init__` of packages around the strategy: not run, for some import Ray;
- no trainer: the directory of the step, gradient clipping and the data are the caller's.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from oracle.dcp_models import start_world
from oracle.rank_runs import RESUME_SEED, SOURCE_SEED, RankRun, go_on, import_parts, small_model, with_adapter

_BARE = (
    "skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.distributed",
    "skyrl.backends.skyrl_train.distributed.ulysses",
)  # fmt: skip
_STRATEGY = "skyrl.backends.skyrl_train.distributed.fsdp_strategy"
_TOTAL_STEPS = 60


def _import() -> tuple[Any, Any, Any]:
    """SkyRL's strategy, its configuration, and the wrapper that its workers put around a model."""

    class Named:
        """A class that annotations name."""

        def __class_getitem__(cls, item: Any) -> type:
            return cls

    class Environment:
        """The configuration of an environment."""

    import_parts(
        *_BARE,
        loguru={"logger": logging.getLogger("skyrl")},
        jaxtyping={"Float": Named, "Integer": Named},
        omegaconf={"DictConfig": Named, "OmegaConf": Named},
        flash_attn={},
        flash_attn__bert_padding={"pad_input": None, "unpad_input": None},
        skyrl_gym={},
        skyrl_gym__envs={},
        skyrl_gym__envs__search={},
        skyrl_gym__envs__search__env={"SearchEnvConfig": Environment},
        skyrl_gym__envs__sql={},
        skyrl_gym__envs__sql__env={"Text2SQLEnvConfig": Environment},
    )
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    utils: Any = importlib.import_module("skyrl.backends.skyrl_train.distributed.fsdp_utils")
    utils.init_device_mesh = lambda _, **options: init_device_mesh("cpu", **options)
    utils._sync_non_persistent_buffers = _send_buffers
    strategy: Any = importlib.import_module(_STRATEGY)
    return strategy.FSDPStrategy, importlib.import_module("skyrl.train.config"), strategy.HFModelWrapper


def _send_buffers(model: torch.nn.Module, _: dict[str, Any]) -> None:
    """Send buffers that no state dict holds from the first rank to the others, as SkyRL's function does on GPUs."""
    for module in model.modules():
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers[key]
            assert buffer is not None
            sent = buffer.detach() if dist.get_rank() == 0 else torch.empty(buffer.shape, dtype=buffer.dtype)
            dist.broadcast(sent, src=0)
            module._buffers[key] = sent


class _Manager:
    """SkyRL's strategy, with the names of `rank_runs.Manager`."""

    def __init__(self, strategy: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        self._strategy, self._model = strategy, model
        self._states = {"optimizer": optimizer, "scheduler": scheduler}

    def load(self, path: str) -> None:
        _, states = self._strategy.load_checkpoint(self._model, path, **self._states)
        world, rank = dist.get_world_size(), dist.get_rank()
        assert (states["world_size"], states["rank"]) == (world, rank), states
        assert states["client_state"] == {"seen": 36}, states

    def save(self, path: str) -> None:
        rank = dist.get_rank()
        self._strategy.save_checkpoint(self._model, path, rank, client_state={"seen": 36}, **self._states)


def run(case: dict[str, Any], out: str, save: str, load: str | None = None) -> dict[str, Any]:
    """Train under SkyRL's FSDP, from files of its ranks or from the beginning; see `rank_runs.go_on`.

    Args:
        case: `lora`; as well as for `small_model`.
        out: For what was loaded and saved.
        save: For the ranks' files.
        load: The ranks' files to go on from.
    """
    start_world()
    of_fsdp, config, wrapper = _import()
    seed = SOURCE_SEED if load is None else RESUME_SEED
    model = small_model(case, seed)
    model = wrapper(with_adapter(model, seed) if case.get("lora") else model)
    strategy = of_fsdp(
        fsdp_config=config.FSDPConfig(mixed_precision=config.MixedPrecisionConfig(param_dtype="fp32")),
        optimizer_config=config.OptimizerConfig(lr=2e-3, adam_betas=[0.9, 0.98], weight_decay=0.1, num_warmup_steps=8),
        model_config=config.ModelConfig(lora=config.SkyRLLoraConfig(rank=4 if case.get("lora") else 0)),
        num_training_steps=_TOTAL_STEPS,
    )
    strategy.setup_distributed()
    model, optimizer, scheduler = strategy.prepare((model, None, None))
    manager = _Manager(strategy, model, optimizer, scheduler)
    return go_on(RankRun(model.model, optimizer, scheduler, manager), out, load, save)
