"""Real checkpoints of other frameworks beside the project: where they are, and what is true of them.

They cannot be made here, so they are not part of the project: a test that wants one is skipped where it is absent.
"""

from __future__ import annotations

import json
import pickle
import types
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from oracle.outputs import Bag, load, raw
from oracle.truth import RawTensor

PEER_UNREADABLE = "moe_bf16_z1_ep2dp4"
EXPECTED = (
    "gpt_bf16_z1_tp2pp2dp2",
    "gpt_bf16_z2_nopipe_tp2dp2",
    "gpt_fp16_z1_tp2pp1dp2",
    "gpt_fp32_z1_tp2pp1dp2",
    "gptheadqkvsubw_fp32_z1_tp2pp1dp2",
    "llama_bf16_z3_nopipe_tp2dp2",
    "llama_fp32_z1_tp2pp2dp2",
)


def expected(folder: Path) -> dict[str, RawTensor]:
    """The true tensors of a folder by ``<parameter>/<state>``."""
    with safe_open(folder / "expected.safetensors", "pt") as file:
        return {key: raw(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - no mapping


def facts(folder: Path) -> dict[str, Any]:
    """What the folder says of each parameter: shape, cut, step."""
    found = json.loads((folder / "expected.json").read_text())
    parameters: dict[str, Any] = found.get("parameters") or found.get("params")
    return parameters


def load_any(path: Path) -> Any:
    """A file of the framework, with stand-ins for whatever classes it names: only tensors and numbers are looked at."""

    class Finder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith(("torch", "collections", "numpy", "_codecs")):
                return super().find_class(module, name)
            return Bag

    plain = types.ModuleType("plain_pickle")
    plain.Unpickler, plain.load = Finder, pickle.load  # type: ignore[attr-defined]
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=plain)


def atom(folder: Path, name: str, state: str, shape: tuple[int, ...]) -> RawTensor:
    """One tensor of a universal directory, a vocabulary without its rows of padding.

    The peer's bare ones of stage 3 have no shape of their own.
    """
    value = load(folder / "zero" / name / f"{state}.pt")
    tensor: torch.Tensor = value["param"] if isinstance(value, dict) else value.reshape(shape)
    return raw(tensor[: shape[0]] if isinstance(value, dict) and value.get("vocab_tensor") else tensor)


def wrong_atoms(folder: Path, wanted: dict[str, RawTensor]) -> list[str]:
    """Every expected tensor that a universal directory does not hold bit for bit."""
    return [key for key, value in wanted.items() if atom(folder, *key.rsplit("/", 1), value.shape) != value]
