"""Real megatron-core on CPUs: saves the benchmark's source, or takes a checkpoint to other files as its users do.

    python bench/megatron_ranks.py save RUN.json DIRECTORY FORM
    python bench/megatron_ranks.py convert RUN.json DIRECTORY OUTPUT

Megatron-core has no converter of its own: a run is built at the new layout, loads, and saves. What stands in for GPUs
is in `tests/oracle/megatron_cpu.py`. A form is `torch`, or a sharding of `torch_dist`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import torch.multiprocessing as mp

from oracle import megatron_cpu
from oracle.dcp_models import start_world
from oracle.megatron_train import Run, Training


def _rank(rank: int, store: str, run: dict[str, Any], job: tuple[str, str, str]) -> None:
    what, directory, to = job
    began = time.perf_counter()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(Run(**run).world), ORACLE_STORE=store)
    start_world()
    megatron_cpu.prepare()
    training = Training(Run(**run), resumed=what == "convert")
    built = loaded = time.perf_counter()
    if what == "save":
        training.step(1)
        form, out = to, Path(directory)
    else:
        source = next(Path(directory).glob("iter_*"))
        legacy = next(source.glob("mp_rank_*"), None) is not None
        (training.load_legacy if legacy else training.load_distributed)(source)
        loaded = time.perf_counter()
        form, out = "fully_reshardable", Path(to)
    if form == "torch":
        training.save_legacy(out)
    else:
        training.save_distributed(out, form)
    os.sync()
    if rank == 0:
        said = {"build": built - began, "load": loaded - built, "save": time.perf_counter() - loaded}
        print(json.dumps({name: round(seconds, 1) for name, seconds in said.items()}), flush=True)


def main() -> None:
    """Do what the arguments name, on as many ranks as the run has."""
    what, run, directory, to = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3], sys.argv[4]
    Path(to if what == "convert" else directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (f"file://{scratch}/store", run, (what, directory, to))
        if Run(**run).world == 1:
            _rank(0, *arguments)
        else:
            mp.spawn(_rank, arguments, nprocs=Run(**run).world)


if __name__ == "__main__":
    main()
