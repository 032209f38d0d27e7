"""DeepSpeed's conversion functions under their own names, for checkpoints of any layout at any storage URL.

Change `from deepspeed.utils.zero_to_fp32 import ...` to `from reshard.deepspeed import ...`. Names, arguments and
defaults are those of DeepSpeed 0.19.8 (`deepspeed/utils/zero_to_fp32.py`, `deepspeed/checkpoint/utils.py`); what is
different is said at each function. DeepSpeed itself is not needed, and nothing in a checkpoint is executed. Tensors
need torch, which the extra `worker` brings.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from reshard._wire import ConvertOptions, convert_request
from reshard.cli.sizes import parse_size
from reshard.errors import RequestError, printable
from reshard.local import load_engine
from reshard.models import ConvertRequest, SourceSpec, TargetFormat, WeightDtype

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "clone_tensors_for_torch_save",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "to_torch_tensor",
]
_ONE_FILE_BYTES = 1 << 62
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), WeightDtype.FP32),
    **dict.fromkeys(("fp16", "float16"), WeightDtype.FP16),
    **dict.fromkeys(("bf16", "bfloat16"), WeightDtype.BF16),
}
Path = str | os.PathLike[str]
Model = TypeVar("Model")


def _source(checkpoint_dir: Path, tag: str | None) -> SourceSpec:
    return SourceSpec(url=os.fspath(checkpoint_dir), tag=tag)


def weight_dtype(dtype: object) -> WeightDtype:
    """The type that a torch dtype, or a name such as `bf16` or `torch.bfloat16`, means.

    Raises:
        RequestError: `request.invalid`.
    """
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise RequestError(
            "request.invalid", f"dtype {printable(str(dtype))} is not supported", fix=f"one of {', '.join(_DTYPES)}"
        )
    return found


def weights_request(
    checkpoint_dir: str,
    output_dir: str,
    dtype: object,
    *,
    max_shard_size: str | int | None,
    safe_serialization: bool,
    tag: str | None,
    exclude_frozen_parameters: bool,
) -> ConvertRequest:
    """What `convert_zero_checkpoint_to_state_dict` asks of the engine, and the commands of the same names do.

    Raises:
        RequestError: `request.invalid`.
    """
    if max_shard_size is None:
        limit = _ONE_FILE_BYTES
    else:
        limit = max_shard_size if isinstance(max_shard_size, int) else parse_size(max_shard_size)
    options: ConvertOptions = {
        "tag": tag,
        "dtype": weight_dtype(dtype),
        "max_shard_bytes": limit,
        "exclude_frozen": exclude_frozen_parameters,
    }
    to = TargetFormat.SAFETENSORS if safe_serialization else TargetFormat.TORCH
    called = {"url": "checkpoint_dir", "target": "output_dir"}
    return convert_request(checkpoint_dir, output_dir, to, options, flags=called)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The weights of a training checkpoint in fp32, from the optimizer's masters.

    Unlike DeepSpeed's: tensor-parallel, pipeline, expert-parallel, universal and BF16_Optimizer checkpoints work too,
    frozen parameters are fp32 like all others (DeepSpeed returns the model's 16-bit type), and tensors share nothing
    with one another but tied ones.

    Args:
        checkpoint_dir: The directory that holds the tag, or the tag itself; a path or a URL (`s3://...`).
        tag: Such as `global_step14`; default: what `latest` names.
        exclude_frozen_parameters: Leave parameters out that the optimizer does not own.
        lazy_mode: Return objects that know `shape` and `dtype` and read their own bytes on `.contiguous()`.

    Returns:
        Names to `torch.Tensor`s on the CPU; in lazy mode to objects with `contiguous()`. Tied names have one value.

    Raises:
        SourceError: There is no such checkpoint, or it is damaged; the code and the fix say what is there.
    """
    states = load_engine().state_dicts()
    lazy = states.lazy(_source(checkpoint_dir, tag), exclude_frozen=exclude_frozen_parameters)
    return lazy if lazy_mode else states.whole(lazy)


def to_torch_tensor(state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: Any = None) -> Any:
    """The tensors of a lazy state dict, read; with `dtype` the floating ones in that type.

    Args:
        state_dict: What `get_fp32_state_dict_from_zero_checkpoint(..., lazy_mode=True)` returned.
        return_empty_tensor: Only allocate them, in their shapes and types.
        dtype: A torch dtype or its name; None keeps each tensor's own.
    """
    wanted = None if dtype is None else weight_dtype(dtype)
    return load_engine().state_dicts().whole(state_dict, dtype=wanted, empty=return_empty_tensor)


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: Path, tag: str | None = None) -> Model:
    """Move a model to the CPU and load a checkpoint's fp32 weights into it, a bounded part at a time.

    Unlike DeepSpeed's, which loads with `strict=False` and says nothing: where the model lacks names of the checkpoint
    and the checkpoint lacks names of the model, or a shape differs, nothing is loaded and the error lists them.

    Returns:
        The model.

    Raises:
        RequestError: `request.unsatisfiable` if names or shapes do not match.
        SourceError: There is no such checkpoint, or it is damaged.
    """
    states = load_engine().state_dicts()
    states.load(model, states.lazy(_source(checkpoint_dir, tag), exclude_frozen=False))
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Path,
    output_dir: Path,
    dtype: Any = "float32",
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write consolidated weights: `pytorch_model.bin` or `model.safetensors`, or shards with an index.

    Unlike DeepSpeed's: it works file to file in bounded memory, tied weights may be safetensors, no `.bin` drags a
    flat group behind it, a finished call is recognised when it is made again, and nothing is half written.

    Args:
        checkpoint_dir: As in `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: A directory or URL. Files of the same names in it are replaced when all new ones are complete.
        dtype: A torch dtype or its name, for floating tensors.
        max_shard_size: Such as `5GB` or a number of bytes; None for one file.
        safe_serialization: Write safetensors.
        tag: As above.
        exclude_frozen_parameters: As above.
    """
    request = weights_request(
        os.fspath(checkpoint_dir),
        os.fspath(output_dir),
        dtype,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    load_engine().convert_into(request)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Path,
    output_dir: Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` with fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """A copy of nested lists, tuples and mappings whose tensors have storages of their own on a device.

    What `torch.save` writes of it is as long as its tensors, not as the flat buffers that they were views of. For
    files that were saved without it there is `reshard slim`.
    """
    return load_engine().state_dicts().cloned(item, device)
