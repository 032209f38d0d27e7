"""Runs that save whole tensors, trained and gone on with by those who load such files; runs inside the ranks.

Model, data, param groups and schedule are those of the real cases (`oracle.fsdp_ranks_load`). Each function trains six
steps and saves after the third, or loads a file and trains the last three. A run that saves leaves what
`house.rank_cases` reads: `ckpt/`, `expected.safetensors`, `expected.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from oracle.dcp_lightning import _CpuFsdp
from oracle.dcp_models import start_world
from oracle.fsdp_ranks_load import _BUFFERS, _SAMPLES, _STEPS, _decay, _groups, _mean, _model, _Samples, _step
from oracle.rank_runs import loss_of

Tensors = dict[str, torch.Tensor]
_LAYERS = {"llama": "LlamaDecoderLayer", "qwen": "Qwen2DecoderLayer"}


def _fresh(case: dict[str, Any], *, trains: bool) -> nn.Module:
    """The model: of a run that trains with other weights and buffers than one that loads has before."""
    model = _model(case)
    if trains:
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
            for name, buffer in model.named_buffers():
                if name.rpartition(".")[2] in _BUFFERS:
                    buffer.copy_(torch.arange(1, buffer.numel() + 1).reshape(buffer.shape))
    return model


def _full(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone().contiguous()


def _held(model: nn.Module, states: Callable[[nn.Parameter], Mapping[str, Any]]) -> Tensors:
    """What a model and its optimizer hold, by the truth's names."""
    found: Tensors = {}
    for name, parameter in model.named_parameters():
        found[f"{name}/fp32"] = _full(parameter)
        found |= {f"{name}/{state}": _full(value) for state, value in states(parameter).items()}
    buffers = {n: b for n, b in model.named_buffers() if n.rpartition(".")[2] in _BUFFERS}
    return found | {f"{name}/buffer": value.detach().clone() for name, value in buffers.items()}


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]


def _keep_truth(folder: str, case: dict[str, Any], held: Tensors, groups: list[dict[str, Any]]) -> None:
    if dist.get_rank() == 0:
        save_file(held, Path(folder, "expected.safetensors"))
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if case.get("tied") else {}
        facts = {
            "world": dist.get_world_size(), "groups": groups, "case_args": case, "tied": tied,
            "buffers": sorted(k for k in held if k.endswith("/buffer")),
        }  # fmt: skip
        Path(folder, "expected.json").write_text(json.dumps(facts))


def _keep_loaded(out: str, held: Tensors) -> None:
    """What was loaded, by the names that `oracle.whole_tensors.differences` compares."""
    if dist.get_rank() == 0:
        save_file({k.replace("/fp32", "/model").replace("/buffer", "/model"): v for k, v in held.items()}, out)


def script(folder: str, case: dict[str, Any], path: str | None = None) -> dict[str, Any]:
    """A script with DDP, perhaps with ZeroRedundancyOptimizer, which saves `model`, `optimizer` and `scheduler`.

    Args:
        folder: Where the run's files go.
        case: How the model is made; `zero` cuts the optimizer, which then has one group.
        path: The file to go on from; None trains from the start.

    Returns:
        Losses of the last three steps.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, world = start_world()
    inner = _fresh(case, trains=path is None)
    model = nn.parallel.DistributedDataParallel(inner)
    shared: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
    groups, cut = _groups(inner, verl=bool(case.get("zero"))), bool(case.get("zero"))
    optimizer: Any = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **shared) if cut else None
    optimizer = optimizer or torch.optim.AdamW(groups, **shared)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)

    def held() -> Tensors:
        """Each rank's optimizer may hold the states of its own parameters alone."""
        live = optimizer.optim if cut else optimizer
        mine = {n: dict(live.state[p]) for n, p in inner.named_parameters() if p in live.state}
        shares: list[Any] = [None] * world
        dist.all_gather_object(shares, mine)
        states = {n: s for share in shares for n, s in share.items()}
        names = {p: n for n, p in inner.named_parameters()}
        return _held(inner, lambda p: states.get(names[p], {}))

    if path is not None:
        saved = torch.load(path, weights_only=True)
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        _keep_loaded(folder, held())
    else:
        for number in range(_STEPS):
            _step(model, optimizer, scheduler, number)
        _keep_truth(folder, case, held(), _plain(optimizer.param_groups))
        if cut:
            optimizer.consolidate_state_dict(0)
        if rank == 0:
            Path(folder, "ckpt").mkdir()
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "scheduler": scheduler.state_dict(), "step": 3}, Path(folder, "ckpt", "checkpoint.pt"))
    return {"losses": [_step(model, optimizer, scheduler, number) for number in range(_STEPS, 2 * _STEPS)]}


class _Module(pl.LightningModule):
    """The model below `net`."""

    def __init__(self, case: dict[str, Any], *, trains: bool) -> None:
        super().__init__()
        self.net, self.case, self.losses = _fresh(case, trains=trains), case, list[float]()
        self.cut = False

    def configure_model(self) -> None:
        """Cuts the model under `ModelParallelStrategy`, which leaves that to its users."""
        if self.case["light"] == "mp" and not self.cut:
            self.cut = True
            mesh: Any = self.device_mesh
            for layer in self.net.get_submodule("model.layers").children():
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, _: Any, __: int) -> Any:
        """The loss of this rank's rows of the step, whatever the loader dealt out."""
        loss = loss_of(self.net, self.global_step)
        self.losses.append(_mean(loss))
        return loss

    def configure_optimizers(self) -> Any:
        """Two groups, vectors first, as everywhere here."""
        vectors = [p for n, p in self.named_parameters() if n.endswith(("norm.weight", ".bias"))]  # FSDP1 flattens all
        matrices = [p for n, p in self.named_parameters() if not n.endswith(("norm.weight", ".bias"))]
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _AtThree(pl.Callback):
    """Saves a checkpoint at step 3 with its truth, or keeps what a resumed run begins with."""

    def __init__(self, folder: str, *, resumed: bool) -> None:
        self.folder, self.resumed = folder, resumed

    def _held(self, trainer: Any, module: Any) -> Tensors:
        optimizer = trainer.optimizers[0]
        if module.case["light"] != "fsdp":
            return _held(module, lambda p: optimizer.state[p])
        with _on_cpu(trainer.strategy.model, 0, rank0_only=False):
            whole = FullyShardedDataParallel.optim_state_dict(trainer.strategy.model, optimizer)["state"]
        found: Tensors = {f"{n}/{s}": _full(v) for n, states in whole.items() for s, v in states.items()}
        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
            names = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in module.named_parameters()}
            return found | {f"{n}/fp32": _full(p) for n, p in names.items()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called when a checkpoint is loaded."""
        if self.resumed:
            _keep_loaded(self.folder, self._held(trainer, pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Called after each step, when the scheduler has stepped."""
        if not self.resumed and trainer.global_step == _STEPS:
            held = self._held(trainer, pl_module)
            _keep_truth(self.folder, pl_module.case, held, _plain(trainer.optimizers[0].param_groups))
            trainer.save_checkpoint(Path(self.folder, "ckpt", "step3.ckpt"))


def _on_cpu(module: Any, world_size: int, rank0_only: bool = True) -> Any:
    """Lightning's context without the copies to the CPU, which on a CPU free what they copy: rank 0 crashes."""
    full = FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)
    of_optimizer = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)
    return FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, full, of_optimizer)


def _strategy(kind: str, world: int) -> Any:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if kind == "mp":
        return ModelParallelStrategy(
            data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False,
            process_group_backend="gloo",
        )  # fmt: skip
    from pytorch_lightning.strategies import fsdp
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    fsdp._get_full_state_dict_context = _on_cpu
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return _CpuFsdp(auto_wrap_policy=policy, state_dict_type="full", use_orig_params=True)


def lightning(folder: str, case: dict[str, Any], path: str | None = None) -> dict[str, Any]:
    """Lightning's Trainer with DDP, with FSDP, or with ModelParallelStrategy, and one file of all ranks.

    Args:
        folder: Where the run's files go.
        case: How the model is made; `light` is the strategy.
        path: The file to go on from; None trains from the start.

    Returns:
        Losses of the last three steps.
    """
    _, world = start_world()
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = _Module(case, trains=path is None)
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy=_strategy(case["light"], world), max_steps=2 * _STEPS,
            callbacks=[_AtThree(folder, resumed=path is not None)], use_distributed_sampler=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False,
            default_root_dir=Path(folder).parent,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(range(100), batch_size=1), ckpt_path=path)
    return {"losses": module.losses[-_STEPS:]}


def accelerate(folder: str, case: dict[str, Any], path: str | None = None) -> dict[str, Any]:
    """Accelerate with FSDP2, which saves and loads full files itself by `save_state` and `load_state`.

    Args:
        folder: Where the run's files go.
        case: How the model is made; `ids` has torch give the names in `optimizer.bin` the optimizer's numbers.
        path: The directory to go on from; None trains from the start.

    Returns:
        Losses of the last three steps.
    """
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from oracle.dcp_accelerate import join_as_accelerate

    rank, _ = join_as_accelerate()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT",
        transformer_cls_names_to_wrap=[_LAYERS[case["kind"]]], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin, step_scheduler_with_optimizer=False)
    inner = _fresh(case, trains=path is None)
    own = torch.optim.AdamW(_groups(inner, verl=False), lr=2e-3, betas=(0.9, 0.98))
    made: Any = accelerator.prepare(inner, own, torch.optim.lr_scheduler.LambdaLR(own, _decay))
    model, optimizer, scheduler = made[0], made[1].optimizer, made[2].scheduler
    if path is not None:
        accelerator.load_state(path)
        _keep_loaded(folder, _held(model, lambda p: optimizer.state[p]))
    else:
        for number in range(_STEPS):
            _step(model, optimizer, scheduler, number)
        _keep_truth(folder, case, _held(model, lambda p: optimizer.state[p]), _plain(optimizer.param_groups))
        accelerator.save_state(str(Path(folder, "ckpt")))
        if rank == 0 and case.get("ids"):
            file, plain = Path(folder, "ckpt", "optimizer.bin"), _fresh(case, trains=False)
            numbers = torch.optim.AdamW(_groups(plain, verl=False))
            by_id, saved = OptimStateKeyType.PARAM_ID, torch.load(file, weights_only=True)
            named = FullyShardedDataParallel.rekey_optim_state_dict(saved, by_id, plain, optim=numbers)
            torch.save(named, file)
    return {"losses": [_step(model, optimizer, scheduler, number) for number in range(_STEPS, 2 * _STEPS)]}


class _Truth(TrainerCallback):
    """Keeps the truth at step 3."""

    def __init__(self, folder: str, case: dict[str, Any]) -> None:
        self.folder, self.case = folder, case
        self.run: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when the scheduler has stepped."""
        if state.global_step == _STEPS:
            live = getattr(self.run.optimizer, "optimizer", self.run.optimizer)
            held = _held(self.run.model, lambda p: live.state[p])
            _keep_truth(self.folder, self.case, held, _plain(live.param_groups))


def trainer(folder: str, case: dict[str, Any], path: str | None = None, way: str | None = None) -> dict[str, Any]:
    """The Trainer, which loads a `checkpoint-N` itself.

    Args:
        folder: A directory for the Trainer.
        case: How the model is made.
        path: The directory to go on from; None trains from the start.
        way: `ddp`; `full` or `sharded` for FSDP2 with such files; `zero` for DeepSpeed's ZeRO-3. By default the case
            says it.

    Returns:
        Losses of the last three steps.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    from oracle.dcp_accelerate import join_as_accelerate
    from oracle.ensured import join_as_deepspeed, zero_config

    more: dict[str, Any] = {}
    way = way or case["way"]
    if way == "ddp":
        start_world()
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        state: Any = PartialState
        state._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    elif way == "zero":
        join_as_deepspeed()
        more = {"deepspeed": {**zero_config(3), "gradient_clipping": "auto"}}
    else:
        join_as_accelerate()
        config = {
            "version": 2, "transformer_layer_cls_to_wrap": [_LAYERS[case["kind"]]],
            "state_dict_type": f"{way.upper()}_STATE_DICT", "sync_module_states": "false",
        }  # fmt: skip
        more = {"fsdp": True, "fsdp_config": config}
    arguments = TrainingArguments(
        output_dir=str(Path(folder, "run")), per_device_train_batch_size=_SAMPLES // dist.get_world_size(),
        max_steps=2 * _STEPS, learning_rate=2e-3, weight_decay=0.1, warmup_steps=0, lr_scheduler_type="linear",
        save_strategy="no" if path else "steps", save_steps=_STEPS, logging_steps=1, report_to=[], disable_tqdm=True,
        seed=1, **more,
    )  # fmt: skip
    truth = _Truth(folder, case)
    made = _fresh(case, trains=path is None)
    run: Any = Trainer(
        model=made,  # type: ignore[arg-type]
        args=arguments,
        train_dataset=_Samples(),
        callbacks=[] if path else [truth],
    )
    truth.run = run
    run.train(resume_from_checkpoint=path)
    if path is None and dist.get_rank() == 0:
        shutil.copytree(Path(folder, "run", "checkpoint-3"), Path(folder, "ckpt", "checkpoint-3"))
    return {"losses": [log["loss"] for log in run.state.log_history if "loss" in log][-_STEPS:]}
