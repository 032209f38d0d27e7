"""DeepSpeed's own offline converters, run inside a rank of a world of one."""

from __future__ import annotations

import enum
import inspect
import sys
import types
from argparse import Namespace
from typing import Any

from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from safetensors.torch import save_file


def peer_fp32(checkpoint_dir: str, out: str, tag: str | None = None) -> dict[str, Any]:
    """Consolidates with zero_to_fp32 into the safetensors file ``out``; returns the names or the error's text."""
    try:
        state: Any = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=tag)
    except Exception as error:  # noqa: BLE001 - which way the peer fails is the answer
        return {"names": [], "error": f"{type(error).__name__}: {error}"}
    # Cloned, because safetensors refuses the tied names that share memory.
    save_file({name: value.detach().clone().contiguous() for name, value in state.items()}, out)
    return {"names": list(state), "error": None}


def _stub_megatron() -> None:
    """The one class of Megatron that its checkpoints name, in modules of its own."""

    class ModelType(enum.Enum):
        encoder_or_decoder = 1
        encoder_and_decoder = 2

    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        sys.modules[name] = types.ModuleType(name)
    ModelType.__module__, ModelType.__qualname__ = "megatron.core.enums", "ModelType"
    sys.modules["megatron.core.enums"].ModelType = ModelType  # type: ignore[attr-defined]


def _mended() -> Any:
    """A copy of the converter that passes over the entries of ``module`` that are not tensors.

    Without pipeline, Megatron nests dictionaries there, and ds_to_universal (0.19.8) calls ``.float()`` on them.
    """
    source = inspect.getsource(ds_to_universal)
    loop = "            for name, tensor in module_state.items():\n"
    if source.count(loop) != 1:
        raise AssertionError("the converter's loop over `module` is not where it was")
    mend = "                if not torch.is_tensor(tensor):\n                    continue\n"
    copy = types.ModuleType("mended_ds_to_universal")
    exec(compile(source.replace(loop, loop + mend), "mended_ds_to_universal.py", "exec"), copy.__dict__)
    sys.modules[copy.__name__] = copy  # its workers find their functions by name
    return copy


def peer_universal(tag_dir: str, out_dir: str, megatron: bool = False, nested: bool = False) -> dict[str, Any]:
    """Converts one tag's folder with ds_to_universal into ``out_dir``; returns the error's text or None."""
    if megatron:
        _stub_megatron()
    converter: Any = _mended() if nested else ds_to_universal
    arguments = Namespace(
        input_folder=tag_dir,
        output_folder=out_dir,
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        converter.main(arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - which way the peer fails is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def peer_safetensors(checkpoint_dir: str, out_dir: str) -> dict[str, Any]:
    """Consolidates with zero_to_fp32 straight into safetensors; returns the error's text or None."""
    try:
        convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, out_dir, safe_serialization=True)
    except Exception as error:  # noqa: BLE001 - which way the peer fails is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}
