"""The directory of a Lightning run: `prune` keeps what its callbacks record."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from house.promises import command


class LinearModule(pl.LightningModule):
    """A model whose loss increases with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.log("loss", float(number))
        return self.linear(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.mark.filterwarnings("ignore")
def test_the_best_checkpoint_of_lightning_stays(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=-1, every_n_train_steps=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[kept],
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_steps=6,
    )
    trainer.fit(LinearModule(), DataLoader(torch.ones(8, 2), batch_size=1))
    best = Path(str(kept.best_model_path)).name  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    code, told, err = command("prune", str(tmp_path), "--keep-last", "1", "--yes")
    assert code == 0, err
    assert best == "epoch=0-step=2.ckpt"
    assert f"stays: {best} (the best checkpoint of epoch=0-step=6.ckpt, by its record)" in told
    assert {path.name for path in tmp_path.iterdir()} == {best, "epoch=0-step=6.ckpt"}, told
