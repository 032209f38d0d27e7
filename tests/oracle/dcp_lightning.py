"""The oracle's model under Lightning, with FSDP and with ModelParallel; trained, saved and resumed inside the ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from oracle.dcp_cases import FsdpRun
from oracle.dcp_models import (
    RESUME_SEED,
    SOURCE_SEED,
    STEPS,
    group_names,
    mean_over_ranks,
    optimizer_of,
    rows,
    scheduler_of,
    start_world,
    wrap_fsdp2,
)
from oracle.dcp_truth import dump
from oracle.models import Block, build_model


class _CpuFsdp(FSDPStrategy):
    """Lightning's strategy on a CPU: 2.6.6 refuses the class itself there, and gives FSDP the index of a GPU."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )


class _Module(pl.LightningModule):
    """The oracle's model below ``model``, as Lightning's users have it."""

    def __init__(self, run: FsdpRun, seed: int) -> None:
        super().__init__()
        self.run, self.seed = run, seed
        self.model: Any = build_model(run.model, seed)
        self.names = [[f"model.{name}" for name in names] for names in group_names(run, self.model)]
        self.global_losses: list[float] = []
        self.wrapped = False

    def configure_model(self) -> None:
        """Cuts the model under ``ModelParallelStrategy``, which leaves that to its users."""
        if self.run.parallel == "fsdp2" and not self.wrapped:
            self.wrapped = True
            mesh: Any = self.device_mesh
            wrap_fsdp2(self.model, mesh["data_parallel"], mesh["tensor_parallel"])

    def train_dataloader(self) -> Any:
        """Only says how many steps there can be."""
        return DataLoader(range(100), batch_size=1)  # type: ignore[arg-type]

    def training_step(self, _: Any, __: int) -> Any:
        """The loss of this rank's rows of the step, whatever the loader dealt out."""
        loss = self.model(*rows(self.run.mesh, self.global_step))
        self.global_losses.append(mean_over_ranks(loss))
        return loss

    def configure_optimizers(self) -> Any:
        """The run's own."""
        optimizer = optimizer_of(self.run, self, self.names)
        if self.run.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler_of(self.run, optimizer), "interval": "step"},
        }


class _SavesAtThree(pl.Callback):
    """Saves a checkpoint at step 3 with its truth, or dumps the state with which a resumed run begins."""

    def __init__(self, folder: Path, *, resumed: bool) -> None:
        self.folder, self.resumed = folder, resumed

    def _dump(self, trainer: Any, stem: str) -> None:
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        dump(trainer.strategy.model, trainer.optimizers[0], (schedulers or [None])[0], self.folder, stem)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called when a checkpoint is loaded."""
        if self.resumed:
            self._dump(trainer, "resumed")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Called after each step, when the scheduler has stepped."""
        if not self.resumed and trainer.global_step == STEPS:
            trainer.save_checkpoint(self.folder / "saved.ckpt")
            self._dump(trainer, "truth")


def _strategy(run: FsdpRun) -> Any:
    if run.parallel == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=run.mesh.shard, tensor_parallel_size=run.mesh.tensor)
    return _CpuFsdp(
        auto_wrap_policy=ModuleWrapPolicy({Block}), state_dict_type="sharded", use_orig_params=run.parallel == "fsdp1"
    )


def fit(run: dict[str, Any], folder: str, resume: str | None = None, line: str | None = None) -> dict[str, Any]:
    """Trains to step 6 by ``Trainer.fit``, from the start or from a checkpoint.

    Args:
        run: an ``FsdpRun`` as plain data; FSDP2 is Lightning's ModelParallelStrategy.
        folder: the checkpoint of step 3 goes into ``saved.ckpt`` there, and the truth beside it.
        resume: a checkpoint.
        line: the call of a script that resumes, in place of the one here.

    Returns:
        ``losses`` of the steps that were made.
    """
    parsed, resumed = FsdpRun.of(run), resume is not None or line is not None
    _, world = start_world()
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = _Module(parsed, RESUME_SEED if resumed else SOURCE_SEED)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=_strategy(parsed),
            max_steps=2 * STEPS,
            callbacks=[_SavesAtThree(Path(folder), resumed=resumed)],
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=folder,
        )
        if line is None:
            trainer.fit(module, ckpt_path=resume)
        else:
            eval(line, {"trainer": trainer, "model": module})
    return {"losses": module.global_losses}
