"""A small language model, trained by DeepSpeed ZeRO-2 on the CPU: the run that `make demo` stops and resumes.

    python deploy/demo/train.py --ranks 2 --save .demo/run1  # 5 steps, a checkpoint, 3 more steps
    python deploy/demo/train.py --ranks 3 --load .demo/dp3   # the same 3 steps, on other ranks

The global batch of a step does not depend on the number of ranks. A line of output is a step and the mean loss of its
global batch. Everything is fp32, so that the losses of two runs can be compared to six digits.
"""
# Neither DeepSpeed nor torch.distributed has full types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

GLOBAL_BATCH = 12
"""Rows of a step. 1, 2, 3, 4 and 6 ranks divide it."""
SEQUENCE, WIDTH, LAYERS, BYTES = 64, 48, 2, 256
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


class Model(nn.Module):
    """A transformer that predicts the next byte of a text; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.place = nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, rows: Tensor) -> Tensor:
        """Mean cross-entropy of the next bytes."""
        tokens, targets = rows[:, :-1], rows[:, 1:]
        hidden = self.embed(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE)
        hidden = self.norm(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), targets.flatten())


def rows_of(step: int, rank: int, ranks: int) -> Tensor:
    """The rows of a rank. Those of all ranks together are the same for any number of ranks."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - SEQUENCE - 1, (GLOBAL_BATCH,), generator=generator)
    share = GLOBAL_BATCH // ranks
    mine = starts[rank * share : (rank + 1) * share]
    return text[mine[:, None] + torch.arange(SEQUENCE + 1)]


def engine_of(ranks: int, seed: int) -> Any:
    """A DeepSpeed engine with freshly drawn weights."""
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // ranks,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": 10**9,
    }
    model = Model()
    parameters: Any = model.parameters()  # the declared type, a module, is not what DeepSpeed documents
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def train(engine: Any, steps: int, rank: int, ranks: int) -> None:
    """Train, and print the mean loss of each global batch."""
    for _ in range(steps):
        step = engine.global_steps + 1
        loss = engine(rows_of(step, rank, ranks))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.9f}", flush=True)  # noqa: T201


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """One rank of the run."""
    # The ranks meet in a file; DeepSpeed wants to see an address none the less.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # DeepSpeed would compile a shared-memory all-reduce for a minute; gloo does as well. The package
    # `deepspeed.comm` gives the name `torch` to another module than this one.
    comm: Any = sys.modules["deepspeed.comm.torch"]
    comm.build_shm_op = lambda: None
    deepspeed.init_distributed(
        dist_backend="gloo", init_method=store, rank=rank, world_size=options.ranks, verbose=False
    )
    # A resumed run draws other weights: what the checkpoint does not bring shows in the losses.
    engine = engine_of(options.ranks, seed=2 if options.load else 1)
    if options.load:
        engine.load_checkpoint(options.load)
    else:
        train(engine, options.steps, rank, options.ranks)
        engine.save_checkpoint(options.save)
    train(engine, options.more, rank, options.ranks)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks as children, and end when they have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", metavar="DIR", help="train from the beginning, and save a checkpoint there")
    what.add_argument("--load", metavar="DIR", help="resume from the checkpoint there")
    parser.add_argument("--steps", type=int, default=5, help="steps before the checkpoint")
    parser.add_argument("--more", type=int, default=3, help="steps after it")
    options = parser.parse_args()
    if options.ranks < 1 or GLOBAL_BATCH % options.ranks:
        parser.error(f"--ranks {options.ranks} does not divide the global batch of {GLOBAL_BATCH} rows")
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports half of torch: here once, and not in each rank
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed 0.19 calls what torch 2.13 has renamed
    with tempfile.TemporaryDirectory(prefix="reshard-demo-") as folder:
        # A file where the ranks meet: nobody else can take it, as they can a port.
        arguments = (options, f"file://{folder}/store")
        start_processes(run_rank, arguments, nprocs=options.ranks, start_method="fork")


if __name__ == "__main__":
    main()
