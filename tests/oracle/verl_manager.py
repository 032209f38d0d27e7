"""verl's own checkpoint manager around a small model, on CPUs; runs inside the ranks.

The manager, the wrapping by FSDP2 and FSDP1, the mesh, the optimizer and the scheduler are verl's. In place of others:

- a platform that answers "cpu": verl 0.9.1 has none, and takes every device for "cuda";
- `omegaconf` and `tensordict`: classes that verl's annotations name, and nothing else;
- `__init__` of `verl` and of the packages around the manager: not run, for they import Ray and the engines;
- FSDP1 gets `device_id` of a CPU, and neither `sync_module_states` nor `param_init_fn`, which want a GPU;
- `maybe_patch_fsdp_module`, which gives an abstract base class to the wrapper of a model that has one, does nothing:
  this process has imported Lightning 2.6, whose `_TransferableDataType` makes every module an instance of `ABC`;
- no trainer: the directory of the step, gradient clipping and the data are the caller's.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from oracle.dcp_models import start_world
from oracle.rank_runs import RESUME_SEED, SOURCE_SEED, RankRun, go_on, import_parts, small_model, with_adapter

_BARE = (
    "verl", "verl.utils", "verl.utils.checkpoint", "verl.workers", "verl.workers.config", "verl.workers.engine",
    "verl.workers.engine.fsdp", "verl.trainer",
)  # fmt: skip


def _import() -> None:
    class Named:
        """A class that annotations name."""

    import_parts(
        *_BARE,
        omegaconf={"DictConfig": Named, "MISSING": "???"},
        tensordict={"TensorDict": Named},
        tensordict__tensorclass={"NonTensorData": Named},
    )
    platforms: Any = importlib.import_module("verl.plugin.platform")
    cuda: Any = importlib.import_module("verl.plugin.platform.platform_cuda").PlatformCUDA

    class Cpu(cuda):  # type: ignore[misc]
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return False

        def current_device(self) -> torch.device:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

    platforms.set_platform(Cpu())


def _fsdp2(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    utils: Any = importlib.import_module("verl.utils.fsdp_utils")
    utils.maybe_patch_fsdp_module = nullcontext
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True)
    options = {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
    whole = model.state_dict()
    utils.apply_fsdp2(model, options, {})
    utils.fsdp2_load_full_state_dict(model, whole, mesh, None)
    return model  # type: ignore[no-any-return]


def _fsdp1(model: Any, mesh: Any, *, flat: bool) -> nn.Module:
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
        ShardedStateDictConfig,
        StateDictType,
    )

    utils: Any = importlib.import_module("verl.utils.fsdp_utils")
    engine: Any = importlib.import_module("verl.workers.engine.fsdp.utils")
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=utils.get_fsdp_wrap_policy(module=model, config=None, is_lora=False),
        device_id=torch.device("cpu"),
        sharding_strategy=engine.get_sharding_strategy(mesh),
        mixed_precision=MixedPrecision(torch.float32, torch.float32, torch.float32),
        device_mesh=mesh,
        forward_prefetch=False,
        use_orig_params=not flat,
    )
    kind = StateDictType.SHARDED_STATE_DICT
    FullyShardedDataParallel.set_state_dict_type(wrapped, kind, ShardedStateDictConfig())
    return wrapped


class _Manager:
    """verl's manager, with the names of `rank_runs.Manager`."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, *, adapter_alone: bool) -> None:
        contents = ["model", "optimizer", "extra"]
        module: Any = importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager")
        self._own = module.FSDPCheckpointManager(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            checkpoint_config={
                "save_contents": contents,
                "load_contents": contents,
                "save_lora_only": adapter_alone,
            },
        )

    def load(self, path: str) -> None:
        self._own.load_checkpoint(path)

    def save(self, path: str) -> None:
        self._own.save_checkpoint(path, global_step=3)


def run(case: dict[str, Any], out: str, save: str, load: str | None = None) -> dict[str, Any]:
    """Train under verl's FSDP, from files of its ranks or from the beginning; see `rank_runs.go_on`.

    Args:
        case: `fsdp`: 1 or 2; `flat`: FSDP1 without `use_orig_params`; `lora`, and `adapter_alone` for
            `save_lora_only`; as well as for `small_model`.
        out: For what was loaded and saved.
        save: For the ranks' files.
        load: The ranks' files to go on from.
    """
    _, world = start_world()
    _import()
    engine: Any = importlib.import_module("verl.workers.engine.fsdp.utils")
    optimizers: Any = importlib.import_module("verl.workers.config.optimizer")
    functions: Any = importlib.import_module("verl.utils.torch_functional")
    mesh = engine.create_device_mesh(world, -1)
    seed = SOURCE_SEED if load is None else RESUME_SEED
    # Nothing but the run itself has the base model where it saves the adapter alone.
    model: Any = small_model(case, SOURCE_SEED if case.get("adapter_alone") else seed)
    model = with_adapter(model, seed) if case.get("lora") else model
    model = _fsdp2(model, mesh) if case.get("fsdp", 2) == 2 else _fsdp1(model, mesh, flat=case["flat"])
    config = optimizers.FSDPOptimizerConfig(lr=2e-3, weight_decay=0.1, betas=(0.9, 0.98))
    optimizer = optimizers.build_optimizer(model.parameters(), config)
    scheduler = functions.get_constant_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=8)
    manager = _Manager(model, optimizer, scheduler, adapter_alone=case.get("adapter_alone", False))
    dist.barrier()
    return go_on(RankRun(model, optimizer, scheduler, manager), out, load, save)
