"""The model, its optimizers and its data: small, odd-sized, deterministic."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.optimization import Adafactor

from oracle.cases import GLOBAL_BATCH, Case

VOCAB = 29
SEQUENCE = 9


class Block(nn.Module):
    """Norm and a gated residual; no width divides another, so partitions cut through rows."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Calibration(nn.Module):
    """Scales by what only its extra state holds, in one of the forms that real modules give it.

    A mapping with a tensor, a plain tensor (newer TransformerEngine), or a file of bytes (TransformerEngine before it).
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.seen = form, 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Scaled, and counted in training."""
        self.seen += self.training
        return hidden * (1.0 + 0.05 * self.seen)

    def get_extra_state(self) -> Any:
        """The value that ``state_dict`` holds of it."""
        if self.form == "mapping":
            return {"scale": torch.full((2,), float(self.seen)), "seen": self.seen}
        if self.form == "tensor":
            return torch.tensor([self.seen], dtype=torch.uint8)
        return io.BytesIO(str(self.seen).encode())

    def set_extra_state(self, state: Any) -> None:
        """Takes what ``get_extra_state`` gave."""
        if self.form == "mapping":
            assert torch.equal(state["scale"], torch.full((2,), float(state["seen"])))
            self.seen = state["seen"]
        else:
            self.seen = int(state[0]) if self.form == "tensor" else int(state.getvalue())


class TinyLM(nn.Module):
    """A language model of a couple of thousand parameters with the switches of ``Case``."""

    seen: Tensor
    wave: Tensor
    running: Tensor

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, inner, depth = (6, 7, 1) if case.tiny else (11, 17, 3)
        self.case = case
        self.embed = nn.Embedding(VOCAB, width)
        nn.init.normal_(self.embed.weight, std=0.3)  # it is the head too: unit variance would start far off
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.gain = nn.Parameter(torch.ones(1))  # fewer elements than ranks: some ranks own none of it
        self.head = nn.Linear(width, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.frozen:
            self.adapter = nn.Linear(width, width, bias=False)
            self.adapter.weight.requires_grad_(False)
        if case.unused:
            self.unused = nn.Parameter(torch.linspace(-1.0, 1.0, 7))
        if case.extra_states:
            forms = ("mapping", "tensor", "bytes")[: 2 if case.extra_states == "values" else 3]
            self.calibrations = nn.ModuleList(Calibration(form) for form in forms)
        if case.empty_param:
            self.empty = nn.Parameter(torch.empty(0))
            self.no_rows = nn.Parameter(torch.empty(0, 4))
        if case.buffers:
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("wave", torch.zeros(5))
        if case.local_buffer:
            self.register_buffer("running", torch.zeros(3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens."""
        hidden = self.embed(tokens)
        if self.case.frozen:
            hidden = hidden + 0.1 * self.adapter(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.case.extra_states:
            for calibration in self.calibrations:
                hidden = calibration(hidden)
        logits = self.head(hidden).float() * self.gain.float()
        if self.case.empty_param:
            # A gradient without elements reaches it, so that optimizers keep states for it; none reaches the other.
            logits = logits + self.empty.float().sum()
        if self.case.buffers:
            self._advance_buffers()
            # The loss depends on the buffer, so losing it on the way shows in the losses.
            logits = logits * (1.0 + self.wave.float().mean())
        if self.case.local_buffer and self.training:
            with torch.no_grad():
                self.running.mul_(0.9).add_(0.1 * hidden.float().std())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _advance_buffers(self) -> None:
        """Moves the buffers in a way that does not depend on the rank's own data: replicas stay equal."""
        if self.training:
            self.seen.add_(1)
            step = float(self.seen.item())
            phase = torch.arange(self.wave.numel(), dtype=torch.float32)
            self.wave.mul_(0.5).add_(torch.sin(phase + step).abs().to(self.wave.dtype), alpha=0.1)


class NestedLM(TinyLM):
    """A model whose state dict is nested, one dict per submodule.

    Source: Megatron-DeepSpeed (July 2025) ``megatron/model/gpt_model.py`` (``state_dict_for_save_checkpoint``, and a
    ``load_state_dict`` that looks for the same keys).
    """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Entries of submodules below the submodule's name."""
        nested: dict[str, Any] = {}
        for name, value in super().state_dict(*args, **kwargs).items():
            head, dot, tail = name.partition(".")
            if dot:
                nested.setdefault(head, {})[tail] = value
            else:
                nested[name] = value
        return nested

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Takes what ``state_dict`` gives; a dotted name at the top is nobody's."""
        flat: dict[str, Any] = {}
        for key, value in state_dict.items():
            if isinstance(value, dict):
                flat |= {f"{key}.{inner}": v for inner, v in value.items()}
            elif "." not in key:
                flat[key] = value
        return super().load_state_dict(flat, strict=strict, assign=assign)


class Lion(torch.optim.Optimizer):
    """Sign momentum (arXiv 2302.06675): one moment and no step counter, unlike the Adam family."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; the closure is ignored."""
        for group in self.param_groups:
            first, second = group["betas"]
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                moment = state["exp_avg"]
                param.mul_(1.0 - group["lr"] * group["weight_decay"])
                param.add_(torch.sign(first * moment + (1.0 - first) * param.grad), alpha=-group["lr"])
                moment.mul_(second).add_(param.grad, alpha=1.0 - second)


class AdEMAMix(torch.optim.Optimizer):
    """Two means of gradients, a fast and a slow one (arXiv 2409.03137), under the names of its authors' code."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99, 0.999), "eps": 1e-8, "alpha": 2.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; the closure is ignored."""
        for group in self.param_groups:
            fast, square, slow = group["betas"]
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state |= {name: torch.zeros_like(param) for name in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")}
                state["step"] += 1
                state["exp_avg_fast"].lerp_(param.grad, 1.0 - fast)
                state["exp_avg_slow"].lerp_(param.grad, 1.0 - slow)
                state["exp_avg_sq"].mul_(square).addcmul_(param.grad, param.grad, value=1.0 - square)
                mean = state["exp_avg_fast"] / (1.0 - fast ** state["step"]) + group["alpha"] * state["exp_avg_slow"]
                root = (state["exp_avg_sq"] / (1.0 - square ** state["step"])).sqrt() + group["eps"]
                param.addcdiv_(mean, root, value=-group["lr"])


def build_model(case: Case, seed: int) -> Any:
    """The model of ``case`` with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    model = NestedLM(case) if case.nested else TinyLM(case)
    if not case.compiled:
        return model
    torch.compiler.set_stance("force_eager")  # compiling takes a minute, and changes only names
    if case.compiled == "model":
        return torch.compile(model)
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer)
    return model


def freeze_late(model: Any) -> None:
    """Freezes a matrix and a vector, in the middle of the flat order, of a model whose optimizer has them already."""
    model.layers[1].up.weight.requires_grad_(False)
    model.layers[1].norm.bias.requires_grad_(False)


def param_groups(case: Case, model: nn.Module) -> list[Any]:
    """Trainable parameters as DeepSpeed's ``model_parameters``; frozen ones stay out, as frameworks do it."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not case.two_groups:
        return trainable
    return [
        {
            "params": [p for p in trainable if p.ndim > 1],
            "lr": 1e-2,
            "weight_decay": 0.3 if case.optimizer == "adam" else 0.1,
        },
        {"params": [p for p in trainable if p.ndim <= 1], "lr": 5e-3, "weight_decay": 0.0},
    ]


_CLIENT_OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=5e-2, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=2e-2, eps=1e-8),
    "plain_sgd": lambda groups: torch.optim.SGD(groups, lr=5e-2),
    "adafactor": lambda groups: Adafactor(groups, lr=1e-2, scale_parameter=True, relative_step=False),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=1e-2, t0=1),
    "lion": lambda groups: Lion(groups, lr=2e-3, weight_decay=0.01),
    "ademamix": lambda groups: AdEMAMix(groups, lr=5e-3),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=5e-2, weight_decay=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=5e-3, momentum=0.9, centered=True),
}


def client_optimizer(case: Case, groups: list[Any]) -> torch.optim.Optimizer | None:
    """The optimizer object for kinds that DeepSpeed's config cannot name on a CPU, else None."""
    make = _CLIENT_OPTIMIZERS.get(case.optimizer)
    return None if make is None else make(groups)


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of the global batch of ``step``; the rows of all ranks together do not depend on ``world``."""
    generator = torch.Generator().manual_seed(90_001 + step)
    rows = torch.randint(VOCAB, (GLOBAL_BATCH, SEQUENCE), generator=generator)
    # A learnable rule, so that losses move: every other token repeats its neighbour.
    rows[:, 1::2] = rows[:, 0:-1:2]
    mine = rows[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
    return mine[:, :-1], mine[:, 1:]
