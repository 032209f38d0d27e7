"""What a machine without a GPU lacks for these recipes, put in when the libraries are imported; on PYTHONPATH of tests.

In a warmed world some of the libraries are imported already; theirs is put in at once.

- DeepSpeed's shared-memory op would be compiled, and leaves 64 MiB for each rank and run in /dev/shm: gloo works too.
- Accelerate 1.15.0 (`state.py`, `_prepare_backend`) finds no backend for DeepSpeed on a CPU, and takes each process for
  a world of its own.
- Lightning 2.6.6 refuses DeepSpeed without CUDA, by the class of its accelerator, and wants devices with numbers.
- Gloo's threads run on when a script ends without an end of its process group, as the Trainer's does. Seen once
  on a busy machine: C++ then aborts the process at its exit ("terminate called without an active exception").
- ``DIE_AT=N``: rank 0 kills itself when it has saved step N and was not restarted yet. Nothing of DeepSpeed is touched
  in any other run: frameworks look at the signature of `save_checkpoint` before they decide what to save.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any


def _without_op(module: Any) -> None:
    # How ranks talk, not what they say: gloo's sums are what a machine without the compiled op has anyway.
    module.build_shm_op = lambda: None


def _with_backend(module: Any) -> None:
    # Only the name of a backend that is missing on CPUs; what is saved and loaded does not pass here.
    from accelerate.utils import DistributedType

    module.PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)


def _with_cpu(module: Any) -> None:
    # Only the class of devices; Lightning's strategy and DeepSpeed below it save and load as they are.
    import torch
    from pytorch_lightning.accelerators import CPUAccelerator

    module.CUDAAccelerator = CPUAccelerator
    CPUAccelerator.get_parallel_devices = staticmethod(lambda count: [torch.device("cpu", i) for i in range(count)])


def _mortal(module: Any) -> None:
    save = module.DeepSpeedEngine.save_checkpoint

    @wraps(save)
    def save_and_die(engine: Any, *args: Any, **kwargs: Any) -> Any:
        done = save(engine, *args, **kwargs)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and engine.global_rank == 0 and str(engine.global_steps) == os.environ.get("DIE_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    module.DeepSpeedEngine.save_checkpoint = save_and_die


def _with_an_end(module: Any) -> None:
    @atexit.register
    def _end() -> None:
        if module.is_initialized():
            module.destroy_process_group()


_PATCHES: dict[str, Callable[[Any], None]] = {
    "deepspeed.comm.torch": _without_op,
    "torch.distributed.distributed_c10d": _with_an_end,
    **({"deepspeed.runtime.engine": _mortal} if "DIE_AT" in os.environ else {}),
    "accelerate.state": _with_backend,
    "pytorch_lightning.strategies.deepspeed": _with_cpu,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, execute, patch = spec.loader, spec.loader.exec_module, _PATCHES.pop(name)

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


for _name in [n for n in _PATCHES if n in sys.modules]:
    _PATCHES.pop(_name)(sys.modules[_name])
sys.meta_path.insert(0, _Finder())
