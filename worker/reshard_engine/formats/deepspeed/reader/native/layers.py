"""Weights of pipelines: one file per layer and tensor-parallel rank, names without the layer.

Source: deepspeed 0.19.8 `runtime/pipe/module.py` (`save_state_dict`, `ckpt_layer_path`; a tied module's first
occurrence writes its file), verified by running.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.deepspeed.names import NUMBERED, TIED
from reshard_engine.formats.deepspeed.reader.native.model_states import module_entries, module_tensors
from reshard_engine.pickles.nodes import Node, PTensor

_TIED = re.compile(rf"{re.escape(TIED)}[^.]+\.(?P<inner>.+)")


def layer_tensors(
    files: Mapping[tuple[int, int], TorchFile], trained: Collection[str]
) -> dict[int, dict[str, tuple[TorchFile, PTensor]]]:
    """Per tensor-parallel rank every tensor of the layer files under its full name.

    Args:
        files: Parsed files by layer and tensor-parallel rank.
        trained: Full names of the parameters that the optimizer owns. A tied parameter belongs to no single layer;
            its name is found among these.
    """
    tied: dict[str, list[str]] = {}
    for name in trained:
        if (match := _TIED.fullmatch(name)) is not None:
            tied.setdefault(match["inner"], []).append(name)
    known = set(trained)
    found: dict[int, dict[str, tuple[TorchFile, PTensor]]] = {}
    for (layer, tp), file in sorted(files.items()):
        table = found.setdefault(tp, {})
        for inner, tensor in module_tensors(file.root, file.file.name).items():
            name = f"{layer}.{inner}"
            owners = tied.get(inner, [])
            if name not in known and len(owners) == 1:
                name = owners[0]
            table.setdefault(name, (file, tensor))
    return found


def layer_extra_states(files: Mapping[tuple[int, int], TorchFile]) -> dict[int, dict[str, tuple[TorchFile, Node]]]:
    """Per tensor-parallel rank every entry of the layer files that is no tensor, under its full name."""
    found: dict[int, dict[str, tuple[TorchFile, Node]]] = {}
    for (layer, tp), file in sorted(files.items()):
        table = found.setdefault(tp, {})
        for entry in module_entries(file.root, file.file.name):
            if not isinstance(entry.value, PTensor):
                table[f"{layer}.{entry.name}"] = (file, entry.value)
    return found


def layer_of(name: str, files: Mapping[tuple[int, int], TorchFile]) -> int | None:
    """The layer of a parameter: the number in its name; for a tied one, the first layer whose file has its name."""
    if (match := NUMBERED.fullmatch(name)) is not None:
        return int(match["layer"])
    if (match := _TIED.fullmatch(name)) is None:
        return None
    holding = [
        layer for (layer, tp), file in files.items() if tp == 0 and match["inner"] in module_tensors(file.root, "")
    ]
    return min(holding, default=None)
