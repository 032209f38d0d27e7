"""PyTorch's functions for distributed checkpoints under their own names, for checkpoints at any storage URL.

Change `from torch.distributed.checkpoint.format_utils import ...` to `from reshard.dcp import ...`. Names and arguments
are those of torch 2.13.0 (`torch/distributed/checkpoint/format_utils.py`). The docstring of each function says what
differs. Nothing in a checkpoint is executed, and memory stays bounded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any, Unpack

from reshard.api.wire import convert_request
from reshard.choices import OpaquePolicy
from reshard.declared import options_of_layout
from reshard.engine import load_engine
from reshard.errors import RequestError, printable
from reshard.filesystems import SourcePlace
from reshard.functions import layout_request, takes_keywords
from reshard.models.jobs import ConvertRequest
from reshard.models.keywords import ConversionKeywords, ConvertOptions

__all__ = ["Reader", "dcp_to_torch_save", "merge_fsdp_weights", "torch_save_to_dcp"]
Path = str | os.PathLike[str]
_MODEL = "pytorch_model_fsdp_0"
_ONE_FILE_BYTES = 1 << 62


@takes_keywords(options_of_layout())
def Reader(  # noqa: N802 - it stands where torch's class `FileSystemReader` does
    source: SourcePlace,
    *,
    compare: bool = True,
    options: Mapping[str, Any] | None = None,
    **given: Unpack[ConversionKeywords],
) -> Any:
    """Read any checkpoint with `torch.distributed.checkpoint.load`, without a conversion.

        dcp.load(state_dict, storage_reader=reshard.dcp.Reader("run1/global_step100"))

    The state dict has the keys of `reshard convert --to dcp` with the same options. Accelerate and the Trainer keep two
    checkpoints, for the model and the optimizer: a source of theirs has the keys of `framework="state-dict"`. Each rank
    reads from the source the elements that its placements need, also parts of records; torch's own reader reads whole
    records. A problem on one rank ends the call on all: torch raises a `CheckpointException` that holds the
    `reshard.ReshardError`s.

    Args:
        source: A checkpoint, as for `reshard.inspect`.
        **given: The options, as the flags of `reshard convert --to dcp`.
        compare: Compare the copies and rounded masters of the source first, as `convert` does. One rank reads them.
        options: Options of formats of other packages, by format.

    Returns:
        A `torch.distributed.checkpoint.StorageReader`. Its `layout` is the distributed checkpoint that it reads, as
        `reshard.open_layout` returns one.

    Raises:
        RequestError: The arguments do not go together; `request.engine_missing`. In `dcp.load`: `request.unsatisfiable`
            for `framework="accelerate"` and `"trainer"`, which have two checkpoints.
    """
    named = {"source": source, "target": "-", "to": "dcp", "options": options}
    request = layout_request(given, "see help(reshard.dcp.Reader)", named)
    return load_engine().storage_reader(request, compare=compare)


def dcp_to_torch_save(dcp_checkpoint_dir: Path, torch_save_path: Path) -> None:
    """Write everything that a distributed checkpoint holds as one file of `torch.save`.

    Differences from torch's function: tensors are copied from file to file in bounded memory. Objects of classes that
    are not on the allow-list are written again unexecuted. A directory of Accelerate or of the Trainer may be named,
    too. An interrupted call leaves no half-written file.

    Args:
        dcp_checkpoint_dir: The directory that holds `.metadata`; a path or a URL (`s3://...`).
        torch_save_path: The file to write; a local path. An existing file is replaced.

    Raises:
        SourceError: There is no such checkpoint, or it is damaged.
        RequestError: `request.invalid` for a file name of other characters than letters, digits, `.`, `_` and `-`.
    """
    place = os.path.abspath(torch_save_path)
    directory, name = os.path.dirname(place), os.path.basename(place)
    options: ConvertOptions = {"torch_file": name, "opaque": OpaquePolicy.KEEP}
    called = {"url": "dcp_checkpoint_dir", "target": "torch_save_path"}
    request = convert_request(os.fspath(dcp_checkpoint_dir), directory, "torch_save", options, flags=called)
    load_engine().convert_into(request)


def torch_save_to_dcp(torch_save_path: Path, dcp_checkpoint_dir: Path) -> None:
    """Write the state dict of a file of `torch.save` as a distributed checkpoint, under its own keys.

    Differences from torch's function: tensors are copied from file to file in bounded memory, and large ones are cut
    into chunks, so that every rank of a mesh reads little more than its own. Tensors that share storage stay whole.

    Args:
        torch_save_path: The file; a path or a URL.
        dcp_checkpoint_dir: The directory to create; a path or a URL.

    Raises:
        SourceError: There is no such file, or torch did not write it.
        RequestError: `request.target_exists` if the directory exists and holds something else.
    """
    options: ConvertOptions = {"opaque": OpaquePolicy.KEEP}
    called = {"url": "torch_save_path", "target": "dcp_checkpoint_dir"}
    request = convert_request(os.fspath(torch_save_path), os.fspath(dcp_checkpoint_dir), "dcp", options, flags=called)
    load_engine().convert(request)


def merge_request(checkpoint_dir: Path, output_path: Path, *, safe_serialization: bool) -> ConvertRequest:
    """The request of `merge_fsdp_weights` and of the command `merge-weights`.

    Raises:
        RequestError: `request.invalid`.
    """
    source = os.fspath(checkpoint_dir)
    if "://" not in source and os.path.isdir(inner := os.path.join(source, _MODEL)):
        source = inner
    options: ConvertOptions = {"max_shard_size": _ONE_FILE_BYTES}
    to = "safetensors" if safe_serialization else "torch"
    return convert_request(
        source, os.fspath(output_path), to, options, flags={"url": "checkpoint_directory", "target": "output_path"}
    )


def merge_fsdp_weights(
    checkpoint_dir: Path,
    output_path: Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of FSDP's shards as `model.safetensors`, or as `pytorch_model.bin`.

    Stands in for Accelerate 1.15.0 `utils/fsdp_utils.py` (`merge_fsdp_weights`). Differences: the whole directory of
    `save_state` may be named, tied weights are stored once, and memory stays bounded.

    Args:
        checkpoint_dir: `pytorch_model_fsdp_0`, the directory that holds it, or any distributed checkpoint.
        output_path: A directory. A file of the same name in it is replaced when the new one is complete.
        safe_serialization: Write safetensors.
        remove_checkpoint_dir: Remove a local `checkpoint_dir` after success.

    Raises:
        SourceError: There is no such checkpoint, or it is damaged.
        RequestError: `request.invalid` for the removal of a directory in an object store.
    """
    refuse_remote_removal(checkpoint_dir, wanted=remove_checkpoint_dir)
    load_engine().convert_into(merge_request(checkpoint_dir, output_path, safe_serialization=safe_serialization))
    if remove_checkpoint_dir:
        remove(checkpoint_dir)


def refuse_remote_removal(checkpoint_dir: Path, *, wanted: bool) -> None:
    """Refuse to remove a directory in an object store, before anything is done.

    Raises:
        RequestError: `request.invalid`.
    """
    place = os.fspath(checkpoint_dir)
    if wanted and "://" in place:
        raise RequestError(
            "request.invalid", f"{printable(place)} is in an object store", fix="remove it with the store's own tools"
        )


def remove(checkpoint_dir: Path) -> None:
    """Remove the shards of a local checkpoint, as Accelerate does after it has merged them."""
    shutil.rmtree(os.fspath(checkpoint_dir))
