"""Reading what the ranks dumped, without torch: tensors as bytes, so that equality means bits."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

# What DeepSpeed's universal loader leaves as the new run drew it (0.19.8): no evidence about the checkpoint.
NOT_LOADED_BY_UNIVERSAL = ("buffer", "frozen")


@dataclass(frozen=True)
class RawTensor:
    """A tensor as safetensors stores it: dtype word (``F32``, ``BF16``, ``I64`` ...), shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Truth:
    """A state dump: tensors keyed ``<kind>/<fqn>`` and a JSON companion.

    Kinds are ``fp32`` (master weights), the optimizer's own words (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``,
    ``sum``), ``module`` (trainable weights in model dtype), ``frozen`` and ``buffer`` (rank 0's).
    """

    def __init__(self, tensors: Path, meta: Path) -> None:
        self.tensors_path = tensors
        self.meta_path = meta

    @cached_property
    def tensors(self) -> dict[str, RawTensor]:
        """All tensors by ``<kind>/<fqn>``."""
        raw = self.tensors_path.read_bytes()
        (header_bytes,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + header_bytes])
        body = memoryview(raw)[8 + header_bytes :]
        found = {}
        for key, entry in header.items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                found[key] = RawTensor(entry["dtype"], tuple(entry["shape"]), bytes(body[begin:end]))
        return found

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The JSON companion: scalars (per-name ``step``), groups, flat_order, counters, losses, client_state."""
        loaded: dict[str, Any] = json.loads(self.meta_path.read_text())
        return loaded

    def kind(self, kind: str) -> dict[str, RawTensor]:
        """The tensors of one kind, by fqn."""
        prefix = f"{kind}/"
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}

    @property
    def kinds(self) -> set[str]:
        """The kinds that occur."""
        return {key.partition("/")[0] for key in self.tensors}

    @property
    def step(self) -> dict[str, float]:
        """Optimizer step by fqn; empty for optimizers that do not count."""
        scalars: dict[str, dict[str, float]] = self.meta["scalars"]
        return scalars.get("step", {})

    @property
    def hyper_parameters(self) -> dict[str, dict[str, Any]]:
        """The optimizer's hyper-parameters by fqn, so that group numbering and flat order do not matter.

        Without what Reshard adds for DeepSpeed's own Adam to the groups of torch's, which does not read it.
        """
        found = {}
        for group in self.meta["groups"]:
            values = {key: value for key, value in group.items() if key != "names"}
            if "amsgrad" in values and values.get("bias_correction") is True:
                del values["bias_correction"]
            found.update(dict.fromkeys(group["names"], values))
        return found


@dataclass(frozen=True)
class Resumed:
    """A checkpoint as a consumer has it: its state right after loading, and the losses of its next steps."""

    state: Truth
    losses: tuple[float, ...]

    @classmethod
    def of(cls, out: Path, losses: Sequence[float]) -> Resumed:
        """What a rank function dumped in ``out``, and the losses that it returned."""
        return cls(Truth(out / "resumed.safetensors", out / "resumed.json"), tuple(losses))

    @property
    def wrong_weights(self) -> list[str]:
        """Parameters whose model-dtype weight was not the rounded master after loading."""
        names: list[str] = self.state.meta["wrong_weights"]
        return names


_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "loss_scale", "client_state")


def meta_differences(left: Truth, right: Truth) -> list[str]:
    """Every hyper-parameter, counter, scheduler or client-state value in which two dumps differ."""
    found = [
        f"{key}: {left.meta.get(key)} != {right.meta.get(key)}"
        for key in _COUNTERS
        if left.meta.get(key) != right.meta.get(key)
    ]
    ours, theirs = left.hyper_parameters, right.hyper_parameters
    for fqn in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(fqn, {}), theirs.get(fqn, {})
        found += [f"{fqn}.{k}: {a.get(k)} != {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    return found


def differences(left: Truth, right: Truth, *, without: tuple[str, ...] = ()) -> list[str]:
    """Every ``<kind>/<fqn>`` that is missing on a side or differs in dtype, shape or any bit, and every such scalar.

    Args:
        left: one dump.
        right: the other.
        without: kinds left out of the comparison.
    """
    skip = set(without)
    found = []
    for key in sorted(left.tensors.keys() | right.tensors.keys()):
        if key.partition("/")[0] in skip:
            continue
        ours, theirs = left.tensors.get(key), right.tensors.get(key)
        if ours is None or theirs is None:
            found.append(f"{key}: only on the {'right' if ours is None else 'left'}")
        elif (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            found.append(f"{key}: {ours.dtype}{list(ours.shape)} != {theirs.dtype}{list(theirs.shape)}")
        elif ours.data != theirs.data:
            found.append(f"{key}: bits differ")
    ours_by_key, theirs_by_key = left.meta["scalars"], right.meta["scalars"]
    for key in sorted(ours_by_key.keys() | theirs_by_key.keys()):
        if ours_by_key.get(key) != theirs_by_key.get(key):
            found.append(f"scalar {key}: {ours_by_key.get(key)} != {theirs_by_key.get(key)}")
    return found
