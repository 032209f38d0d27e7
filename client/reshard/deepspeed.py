"""DeepSpeed's conversion functions under their own names, for checkpoints of any layout at any storage URL.

Change `from deepspeed.utils.zero_to_fp32 import ...` to `from reshard.deepspeed import ...`. Names, arguments and
defaults are those of DeepSpeed 0.19.8 (`deepspeed/utils/zero_to_fp32.py`, `deepspeed/checkpoint/utils.py`). The
docstring of each function says what differs. DeepSpeed itself is not needed, and nothing in a checkpoint is
executed. Tensors need torch, which the extra `worker` brings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from reshard.api.wire import convert_request
from reshard.choices import TargetFormat, WeightDtype
from reshard.declared import Declared, options_of_target
from reshard.engine import load_engine
from reshard.errors import RequestError, printable
from reshard.filesystems import SourcePlace
from reshard.functions import layout_request, takes_keywords
from reshard.models.jobs import ConvertRequest
from reshard.models.keywords import ConvertOptions
from reshard.option import size_of
from reshard.options import SourceSpec

__all__ = [
    "clone_tensors_for_torch_save",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "to_torch_tensor",
]
_ONE_FILE_BYTES = 1 << 62
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), WeightDtype.FP32),
    **dict.fromkeys(("fp16", "float16"), WeightDtype.FP16),
    **dict.fromkeys(("bf16", "bfloat16"), WeightDtype.BF16),
}
_OF_ENGINE = {
    "dp", "tp", "pp", "ep", "zero_stage", "partition_method", "pipeline_layers", "round_robin_gradients",
    "parameter_alignment", "sub_group_size", "dtype", "tag",
}  # fmt: skip
"""Options that the engine's configuration decides, and the argument `tag`."""
Path = str | os.PathLike[str]
Model = TypeVar("Model")


def _options_of_load() -> dict[str, Declared]:
    """The options of a target that are neither the engine's own nor arguments of the function."""
    return {name: option for name, option in options_of_target(TargetFormat.ZERO).items() if name not in _OF_ENGINE}


@takes_keywords(_options_of_load())
def load_checkpoint(  # noqa: PLR0913 - the arguments are DeepSpeed's
    engine: Any,
    source: SourcePlace,
    tag: str | int | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
    *,
    compare: bool = True,
    options: Mapping[str, Any] | None = None,
    **given: Any,
) -> tuple[Any, Any]:
    """Do as `engine.load_checkpoint(source, tag, ...)`, from a checkpoint of any format and layout. Nothing is written.

    The layout is the engine's own: data, tensor, pipeline and expert parallelism, ZeRO stage and sub-groups. Each rank
    opens its own files of that layout, and their bytes come straight from the source. Proven with DeepSpeed 0.19.8.

    All processes of the run must call it. If one of them fails, all raise: the process that failed its own error, the
    others the same. After `source.changed` or another error of reading, the engine holds no state to train on; the
    same call loads it when the cause is gone.

    Args:
        engine: What `deepspeed.initialize` returned.
        source: A checkpoint, as for `reshard.inspect`; also one of FSDP.
        tag: Tag of a save directory; by default the one that `latest` names.
        load_module_strict: As in DeepSpeed, and so are the next four.
        load_optimizer_states: See above.
        load_lr_scheduler_states: See above.
        load_module_only: See above.
        custom_load_fn: See above.
        **given: The other options, as the flags of `reshard convert --to zero`.
        compare: Compare the copies and rounded masters of the source first, as `convert` does. Rank 0 reads them.
        options: Options of formats of other packages, by format.

    Returns:
        What `engine.load_checkpoint` returns: a path (of a directory that is gone) and the client state.

    Raises:
        RequestError: The arguments do not go together, or not with the source; `request.engine_missing`.
        SourceError: The checkpoint is missing, damaged, hostile, of an unsupported kind, or changes meanwhile.
        StorageError: The storage refused or failed.
        JobError: `job.peer_failed`: another process of the run failed, or is gone.
    """
    loading = load_engine().loading()
    said = {**loading.layout_of(engine), **given, **({} if tag is None else {"tag": str(tag)})}
    named = {"source": source, "target": "-", "to": TargetFormat.ZERO, "options": options}
    request = layout_request(said, "see help(reshard.deepspeed.load_checkpoint)", named)
    arguments = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    return loading.load_into_deepspeed(engine, request, arguments, compare=compare)


def _source(checkpoint_dir: Path, tag: str | None) -> SourceSpec:
    return SourceSpec(url=os.fspath(checkpoint_dir), tag=tag)


def weight_dtype(dtype: object) -> WeightDtype:
    """The `WeightDtype` for a torch dtype or for a name such as `bf16` or `torch.bfloat16`.

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
    """The request of `convert_zero_checkpoint_to_state_dict` and of the commands `zero-to-fp32` and `zero-to-torch`.

    Raises:
        RequestError: `request.invalid`.
    """
    limit = _ONE_FILE_BYTES if max_shard_size is None else size_of(max_shard_size)
    options: ConvertOptions = {
        "tag": tag,
        "dtype": weight_dtype(dtype),
        "max_shard_size": limit,
        "exclude_frozen": exclude_frozen_parameters,
    }
    to = TargetFormat.SAFETENSORS if safe_serialization else TargetFormat.TORCH
    called = {"url": "checkpoint_dir", "target": "output_dir"}
    return convert_request(checkpoint_dir, output_dir, to, options, flags=called)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The weights of a training checkpoint in fp32, from the optimizer's masters.

    Differences from DeepSpeed's function: tensor-parallel, pipeline, expert-parallel, universal and BF16_Optimizer
    checkpoints work, too. Frozen parameters are fp32 like all others (DeepSpeed returns the model's 16-bit type). Only
    tied tensors share storage.

    Args:
        checkpoint_dir: The directory that holds the tag, or the tag itself; a path or a URL (`s3://...`).
        tag: The tag, such as `global_step14`; by default the one that `latest` names.
        exclude_frozen_parameters: Leave out the parameters that the optimizer does not own.
        lazy_mode: Return objects that know `shape` and `dtype` and read their own bytes on `.contiguous()`.

    Returns:
        A dict from names to `torch.Tensor`s on the CPU; in lazy mode to objects with `contiguous()`. Tied names have
            the same value.

    Raises:
        SourceError: There is no such checkpoint, or it is damaged; the error's code and fix say which.
    """
    states = load_engine().state_dicts()
    lazy = states.lazy(_source(checkpoint_dir, tag), exclude_frozen=exclude_frozen_parameters)
    return lazy if lazy_mode else states.whole(lazy)


def to_torch_tensor(state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: Any = None) -> Any:
    """Read the tensors of a lazy state dict; with `dtype`, cast the floating-point ones to it.

    Args:
        state_dict: The return value of `get_fp32_state_dict_from_zero_checkpoint(..., lazy_mode=True)`.
        return_empty_tensor: Only allocate the tensors, with their shapes and types.
        dtype: A torch dtype or its name; None keeps each tensor's own.
    """
    wanted = None if dtype is None else weight_dtype(dtype)
    return load_engine().state_dicts().whole(state_dict, dtype=wanted, empty=return_empty_tensor)


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: Path, tag: str | None = None) -> Model:
    """Move a model to the CPU and load a checkpoint's fp32 weights into it, in bounded memory.

    DeepSpeed's function loads with `strict=False` and reports no mismatch. This one loads nothing and lists the names
    in an error if a shape differs, or if the model lacks names of the checkpoint and the checkpoint lacks names of
    the model.

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

    Differences from DeepSpeed's function: it copies from file to file in bounded memory. It can write tied weights as
    safetensors. No `.bin` file contains the flat buffer that its tensors were views of. A second call recognises the
    finished output. An interrupted call leaves no half-written output.

    Args:
        checkpoint_dir: As in `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: A directory or URL. Files of the same names in it are replaced when all new ones are complete.
        dtype: A torch dtype or its name, for floating-point tensors.
        max_shard_size: The largest file, such as `5GB` or a number of bytes; None for one file.
        safe_serialization: Write safetensors.
        tag: As in `get_fp32_state_dict_from_zero_checkpoint`.
        exclude_frozen_parameters: As in `get_fp32_state_dict_from_zero_checkpoint`.
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
    """Copy nested lists, tuples and mappings so that each tensor has a storage of its own on a device.

    `torch.save` then writes the tensors only, not the flat buffers that they were views of. `reshard slim` does the
    same to files that were saved without this function.
    """
    return load_engine().state_dicts().cloned(item, device)
