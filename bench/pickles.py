"""Opcodes per second of the pickle interpreter on a skeleton of 20,000 parameters, beside CPython's own.

    python bench/pickles.py [--parameters 20000] [--rounds 5]

CPython's unpickler runs in C, builds real tensors' metadata and trusts its input; it is the ceiling,
not a peer.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import pickletools
import statistics
import sys
import time
import zipfile
from typing import Any

import torch

from reshard.choices import OpaquePolicy
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import parse_pickle


class _Ceiling(pickle.Unpickler):
    """Python's unpickler with storages left out."""

    def persistent_load(self, pid: Any) -> Any:
        return torch.UntypedStorage(0)

    def find_class(self, module: str, name: str) -> Any:
        return (lambda *_: None) if name.startswith("_rebuild") else super().find_class(module, name)


def _median(rounds: int, work: Any) -> float:
    seconds: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    buffer = io.BytesIO()
    torch.save({f"model.layers.{i}.weight": torch.zeros(2) for i in range(arguments.parameters)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        data = archive.read(archive.namelist()[0])
    opcodes = sum(1 for _ in pickletools.genops(data))
    ours = _median(arguments.rounds, lambda: parse_pickle(data, OpaqueLedger(OpaquePolicy.REFUSE)))
    ceiling = _median(arguments.rounds, lambda: _Ceiling(io.BytesIO(data)).load())
    facts = {
        "parameters": arguments.parameters,
        "opcodes": opcodes,
        "seconds": round(ours, 3),
        "opcodes_per_s": round(opcodes / ours),
        "cpython_c_opcodes_per_s": round(opcodes / ceiling),
    }
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
