"""A Trainer run under DeepSpeed that goes on with whatever number of processes it is started with.

    torchrun --nproc-per-node 4 train_trainer.py runs/one

The model and the data are as small as they can be; what matters are the two lines that resume.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import reshard

GLOBAL_BATCH = 12  # of all processes together: steps stay the same steps on any number of them
WORDS, LENGTH, STEPS = 61, 12, 6


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Stands for your data."""

    def __len__(self) -> int:
        return GLOBAL_BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index % 4))
        return {"input_ids": ids, "labels": ids}


def main(output: str) -> None:
    """Trains to the end, from the newest checkpoint in `output` if there is one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=20,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        save_steps=2,
        logging_steps=1,
        learning_rate=3e-3,
        warmup_steps=2,
        report_to=[],
        disable_tqdm=True,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    checkpoint = get_last_checkpoint(output) if os.path.isdir(output) else None
    trainer.train(resume_from_checkpoint=checkpoint and reshard.ensure(checkpoint))


if __name__ == "__main__":
    main(sys.argv[1])
