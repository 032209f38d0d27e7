"""Reading what Reshard wrote, in the test's process: torch's own safe loader, tensors as bits.

Universal directories load under ``weights_only=True`` with stand-ins for DeepSpeed's three classes: the output needs
nothing else, and that is a promise of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from house import conversions
from oracle.truth import RawTensor
from reshard.engine import load_engine
from reshard.models.jobs import ConvertResult, NotCarried

_WORDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class Bag:
    """Stands for a loss scaler: takes its attributes and does nothing."""

    def __new__(cls, *_: Any) -> Bag:
        """As an unpickler makes it."""
        return object.__new__(cls)


class Address(NamedTuple):
    """Stands for ``fragment_address``."""

    numel: int
    start: int


_STAND_INS: list[Any] = [
    (Bag, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Bag, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Address, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Address, "deepspeed.runtime.bf16_optimizer.fragment_address"),
    (Bag, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
]


def convert(source: Path, target: Path, to: str, *, tag: str | None = None, **options: Any) -> ConvertResult:
    """Converts with our engine and verifies what it wrote."""
    result = conversions.convert(source, target, to, tag=tag, **options)
    report = load_engine().verify(str(target))
    assert report.ok, report.problems
    left = unexpected(result)
    assert left == [], left
    return result


def unexpected(result: ConvertResult) -> list[NotCarried]:
    """Entries that a conversion of a real checkpoint left out although nothing says that it may.

    Weights hold no training state, and safetensors only tensors. Where ranks of the source differ by design, the first
    one's values stand: buffers that follow a rank's own data, and random states.
    """
    return [entry for entry in result.not_carried if not any(p.fullmatch(_said(entry)) for p in _MAY_BE_LEFT_OUT)]


def _said(entry: NotCarried) -> str:
    return f"{entry.path}: {entry.reason}"


_MAY_BE_LEFT_OUT = [
    re.compile(pattern)
    for pattern in (
        r".*: weights hold no training state",
        r"optimizer\.RMS: one number for each rank's partition, which Adafactor computes anew before it reads it",
        r".*: the format holds tensors only, .*",
        r".*: left out, as asked",
        r"optimizer: its states have no names",
        r"module\.adapter\.weight: an empty placeholder that nothing describes",  # ZeRO-3 before 0.9.1 lost it
        r"module\..*: no part of the (adapter|merged model)",
        r"module\.running: ranks hold different values: .*",
        r"(.*_)?rng_(tracker_)?states?: the target holds the states of \d+ ranks?, the source those of \d+",
        r".*: an object of a class that is not listed: dropped, as asked",
    )
]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a target by its path, but for the manifest, which names the source."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "reshard.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def raw(tensor: Tensor) -> RawTensor:
    """A tensor as the truth holds it."""
    flat = tensor.detach().contiguous().flatten()
    return RawTensor(_WORDS[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())


def tensor_of(value: RawTensor) -> Tensor:
    """The tensor that ``raw`` described."""
    dtype = next(dtype for dtype, word in _WORDS.items() if word == value.dtype)
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape)


def cast(value: RawTensor, dtype: torch.dtype) -> RawTensor:
    """What torch's ``.to(dtype)`` makes of a tensor."""
    return raw(tensor_of(value).to(dtype))


def load(path: Path) -> Any:
    """A ``torch.save`` file, with nothing of it run."""
    with torch.serialization.safe_globals(_STAND_INS):
        return torch.load(path, map_location="cpu", weights_only=True)


@dataclass
class Universal:
    """A universal directory as loaded.

    Attributes:
        atoms: whole tensors by ``<state>/<fqn>``, ``step`` left out.
        steps: the value of each ``step.pt`` by fqn.
        model: the model states.
        optimizer: ``zero/optimizer_state.pt``.
    """

    folder: Path
    atoms: dict[str, RawTensor] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)

    def kind(self, state: str) -> dict[str, RawTensor]:
        """The atoms of one state, by fqn."""
        prefix = f"{state}/"
        return {key.removeprefix(prefix): value for key, value in self.atoms.items() if key.startswith(prefix)}

    @property
    def model(self) -> dict[str, Any]:
        """The model states; equal under both names but for weights of trained parameters, or an assertion fails."""
        first, second = (load(self.folder / name) for name in MODEL_FILES)
        rest = {k: v for k, v in first.items() if k != "module"}
        assert plain(rest) == plain({k: v for k, v in second.items() if k != "module"})
        trained = {n for group in first["param_shapes"] for n in group}
        tied = {first["module"][n].data_ptr() for n in trained if n in first["module"]}
        whole = {n: v for n, v in first["module"].items() if n not in trained and v.data_ptr() not in tied}
        assert plain(whole) == plain(dict(second["module"]))
        found: dict[str, Any] = first
        return found

    @property
    def optimizer(self) -> dict[str, Any]:
        """What stands beside the atoms."""
        found: dict[str, Any] = load(self.folder / "zero" / "optimizer_state.pt")
        return found


def read_universal(folder: Path) -> Universal:
    """Every atom of a universal directory."""
    found = Universal(folder)
    for path in _atom_files(folder / "zero"):
        fqn = str(path.parent.relative_to(folder / "zero"))
        value = load(path)
        if path.stem == "step":
            found.steps[fqn] = float(value)
        else:
            assert list(value) == ["param"], f"{path} holds {list(value)}"
            found.atoms[f"{path.stem}/{fqn}"] = raw(value["param"])
    return found


def _atom_files(zero: Path) -> Iterator[Path]:
    return (path for path in sorted(zero.rglob("*.pt")) if path.parent != zero)


def plain(value: Any) -> Any:
    """The value as JSON would hold it (tuples are lists), tensors as bits: comparable with ``==``."""
    if isinstance(value, Tensor):
        return raw(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Bag):
        return {key: plain(item) for key, item in vars(value).items()}
    return value


@dataclass(frozen=True)
class Weights:
    """Consolidated weights as loaded: tensors by name, aliases by name, and the files that hold them."""

    tensors: dict[str, RawTensor]
    aliases: dict[str, str]
    files: tuple[str, ...]


def read_safetensors(folder: Path) -> Weights:
    """The weights that Hugging Face finds in ``folder``; the index must name exactly what the files hold."""
    tensors: dict[str, RawTensor] = {}
    aliases: dict[str, str] = {}
    files = _files(folder, "model.safetensors")
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            metadata = file.metadata()
            assert metadata.pop("format") == "pt"
            aliases |= metadata
            tensors |= {key: raw(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - no mapping
    _check_index(folder, "model.safetensors", set(tensors), sum(len(t.data) for t in tensors.values()))
    return Weights(tensors, aliases, files)


def read_bin(folder: Path) -> Weights:
    """As ``read_safetensors`` for ``pytorch_model.bin``; two names of one storage are an alias."""
    tensors: dict[str, RawTensor] = {}
    aliases: dict[str, str] = {}
    files = _files(folder, "pytorch_model.bin")
    for name in files:
        owners: dict[int, str] = {}
        for key, value in torch.load(folder / name, weights_only=True).items():
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), f"{key}: foreign bytes"
            owner = owners.setdefault(value.untyped_storage().data_ptr(), key) if value.numel() else key
            if owner == key:
                tensors[key] = raw(value)
            else:
                aliases[key] = owner
    return Weights(tensors, aliases, files)


def _files(folder: Path, single: str) -> tuple[str, ...]:
    index = folder / f"{single}.index.json"
    if not index.exists():
        return (single,)
    assert not (folder / single).exists()
    return tuple(dict.fromkeys(json.loads(index.read_text())["weight_map"].values()))


def _check_index(folder: Path, single: str, names: set[str], total_bytes: int) -> None:
    index = folder / f"{single}.index.json"
    if index.exists():
        said = json.loads(index.read_text())
        assert set(said["weight_map"]) == names
        assert said["metadata"]["total_size"] == total_bytes
