"""The stand-ins for GPUs while real megatron-core runs on CPUs and gloo; import it before `megatron`.

Versions that run here: 0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1 and 0.19.2.

In place of others, and nothing else is:

- devices, streams, events and random states of CUDA: requests for them get the CPU's, or do nothing;
- `torch.compile` and its decorators: functions stay as they are;
- `dist._coalescing_manager`: NCCL's; here the operations inside are kept, and waited for at its end;
- the fused Adam of Apex and Transformer Engine: `FusedAdam` below, with their states (exp_avg, exp_avg_sq) and the
  count of steps in the param group, as both keep it. Megatron-core takes the branches that it takes with Apex.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "as_tensor", "empty_like", "zeros_like",
    "full_like", "eye",
)  # fmt: skip
_COLLECTIVES = (
    "all_reduce", "reduce_scatter_tensor", "_reduce_scatter_base", "all_gather_into_tensor", "_all_gather_base",
)  # fmt: skip
_open: list[list[Any]] = []
"""The operations inside of each coalescing manager that is open, the innermost last."""


class _Nothing:
    """A stream, or an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for all operations that were begun inside."""
        for work in self.works:
            work.wait()


@contextlib.contextmanager
def _coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[_Works]:
    works = _Works([])
    _open.append(works.works)
    try:
        yield works
    finally:
        _open.pop()
    if not async_ops:
        works.wait()


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if _open and hasattr(work, "wait"):
            _open[-1].append(work)
        return work

    return call


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _tensor_type(tensor, *(a.replace("cuda.", "") if isinstance(a, str) else a for a in args), **kwargs)
    # Megatron's buckets of gradients ask for these words.
    return _tensor_type(tensor).replace("torch.", "torch.cuda.", 1)


_tensor_type = torch.Tensor.type


def _not_compiled(function: Any = None, *_: Any, **__: Any) -> Any:
    return (lambda given: given) if function is None else function


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the states and groups of Apex's and Transformer Engine's."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        **_: Any,
    ) -> None:
        """Take the options that Megatron-core gives; others are those of kernels."""
        options = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "bias_correction": True}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in group["params"]:
                gradient = getattr(p, "decoupled_grad", None)
                gradient = p.grad if gradient is None else gradient
                if gradient is None:
                    continue
                gradient, state = gradient.float(), self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(p, dtype=torch.float32)
                state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                root = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"]
                update = (state["exp_avg"] / (1 - first**step)) / root + group["weight_decay"] * p
                p.sub_(group["lr"] * update)


def _prepare_0_12() -> None:
    """What that version takes for granted: Transformer Engine, and a torch older than 2.7."""
    eight: Any = importlib.import_module("megatron.core.fp8_utils")
    # Without Transformer Engine it refuses to cast no parameter at all; 0.13 does nothing then.
    eight._quantize_param_shard_impl = lambda parameters, *_, **__: None if not parameters else sys.exit(1)
    files: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    form = importlib.import_module("torch.distributed.checkpoint.filesystem").SerializationFormat.TORCH_SAVE
    files._write_item = partial(files._write_item, serialization_format=form)


def prepare(megatron: str | None = None) -> None:
    """Make this process one in which megatron-core can be imported and run; it stays so.

    Args:
        megatron: The directory of its version; by default `RESHARD_MEGATRON`, or the one beside torchtitan.
    """
    warnings.filterwarnings("ignore")
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", TORCHDYNAMO_DISABLE="1")
    if megatron is not None or "RESHARD_MEGATRON" in os.environ:
        sys.path.insert(0, megatron or os.environ["RESHARD_MEGATRON"])
    elif "RESHARD_TORCHTITAN" in os.environ:
        sys.path.append(os.environ["RESHARD_TORCHTITAN"])  # last: what is installed comes first
    numpy: Any = np
    if not hasattr(np, "product"):  # Megatron-core up to 0.14 asks for it, which NumPy 1 had
        vars(numpy)["product"] = np.prod
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map()  # before functions of torch are replaced
    cuda: Any = torch.cuda
    anything: Any = torch
    anything.compile = _not_compiled
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 1
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "set_rng_state"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.get_rng_state = lambda *_, **__: torch.arange(16, dtype=torch.uint8)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = _Nothing
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    tensor: Any = torch.Tensor
    tensor.type, tensor.cuda = _type, lambda self, *_, **__: self
    anything.nn.Module.cuda = lambda self, *_, **__: self
    for name in _FACTORIES:
        setattr(anything, name, _on_cpu(getattr(anything, name)))
    inner: Any = dist.distributed_c10d
    anything.distributed._coalescing_manager = inner._coalescing_manager = _coalescing
    for name in _COLLECTIVES:
        kept = _kept(getattr(dist, name, None) or getattr(inner, name))
        setattr(dist, name, kept)
        setattr(inner, name, kept)
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state) if state.numel() > 100 else None
    moe: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    moe.te_general_gemm = None
    if importlib.import_module("megatron.core").__version__.startswith("0.12."):
        _prepare_0_12()
    optimizers: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizers.Adam = distributed.Adam = FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER, distributed.HAVE_APEX_OR_TE = False, True
