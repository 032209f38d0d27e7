"""A Lightning run under DeepSpeed that goes on with whatever number of devices it is started with.

    torchrun --nproc-per-node 2 train_lightning.py runs/one

The model and the data are as small as they can be; what matters is `ckpt_path`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset

import reshard

GLOBAL_BATCH = 12  # of all processes together: steps stay the same steps on any number of them
WIDTH, STEPS, SAVE_EVERY = 16, 6, 3


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Stands for your data."""

    def __len__(self) -> int:
        return GLOBAL_BATCH * SAVE_EVERY  # an epoch: where an epoch is resumed in its middle, Lightning begins it anew

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randint(WIDTH, (), generator=generator)


class Classifier(lightning.LightningModule):
    """Stands for your model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> torch.Tensor:
        """The loss of this process's rows."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_index: int) -> None:
        """Shows how it goes."""
        self.print(f"step {self.global_step} loss {float(self.trainer.callback_metrics['loss']):.7f}")

    def configure_optimizers(self) -> dict[str, object]:
        """Adam, and a schedule that is resumed too."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(output: Path) -> None:
    """Trains to the end, from the newest checkpoint in `output` if there is one."""
    world = int(os.environ["WORLD_SIZE"])
    found = sorted(output.glob("*.ckpt"), key=lambda p: int(p.stem.rpartition("=")[2]))
    trainer = lightning.Trainer(
        default_root_dir=output,
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DeepSpeedStrategy(stage=2, config=None, logging_batch_size_per_gpu=GLOBAL_BATCH // world),
        max_steps=STEPS,
        callbacks=[ModelCheckpoint(output, every_n_train_steps=SAVE_EVERY, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(Rows(), batch_size=GLOBAL_BATCH // world, shuffle=False)
    trainer.fit(Classifier(), loader, ckpt_path=reshard.ensure(str(found[-1])) if found else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
