"""Optimizer states that a ZeRO-3 run kept on NVMe: raw files beside the rank files, one per sub-group and state.

A swapped sub-group's tensors are empty in the rank file. Their attribute `ds_id` names the file in the rank's folder:
`0_7.tensor.swp` for the masters of the sub-group of parameters 0 to 7, `exp_avg-0_7.tensor.swp` for a state. The file
holds the rank's flat tensor from its first byte on, in fp32, and is padded to the alignment of asynchronous I/O. It is
longer where an earlier run left a longer file. Sub-groups under 1 MiB stay in the rank file. Masters of 16 bits have
files of 16 bits, but their empty tensors say fp32: the reader refuses such runs.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`: the swap folder is copied without gradients),
`runtime/swap_tensor/optimizer_utils.py` (`SwapTensorContext`, `_get_state_tensors`, `_io_aligned_numel`),
`runtime/zero/stage3.py` (`_create_fp32_partitions`); verified by running, with libaio and without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from reshard.errors import SourceError, printable
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.deepspeed.reader.native.flat_groups import Partition
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates
from reshard_engine.formats.deepspeed.reader.native.run_config import has_16bit_masters
from reshard_engine.pickles.nodes import PTensor
from reshard_engine.storage.links import refuse_link_elsewhere
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.dtypes import FLOAT32 as MASTER

FOLDER = "offloaded_tensors"
_CPU_FIX = "save with offload_optimizer.device cpu"
_ATTRIBUTE = "ds_id"
_SUFFIX = ".tensor.swp"
_FILE = re.compile(rf"rank(?P<rank>[0-9]{{2,9}})/(?P<name>[^/]+){re.escape(_SUFFIX)}")


def with_swapped(
    states: Sequence[Sequence[RankStates]], model: ModelStates, location: Location
) -> list[list[RankStates]]:
    """All ranks, by model-parallel rank, with the files that they kept in the swap folders of the tag directory.

    Raises:
        SourceError: `source.unsupported` under model parallelism and for masters of 16 bits, `name.invalid` for a link
            to a file elsewhere.
    """
    if len(states) > 1:
        raise SourceError(
            "source.unsupported",
            f"optimizer states were offloaded to NVMe under model parallelism ({len(states)} model-parallel ranks): "
            f"the folders in {FOLDER}/ are of global ranks, and nothing says which model-parallel rank each is",
            fix=_CPU_FIX,
        )
    if has_16bit_masters(model):
        raise SourceError(
            "source.unsupported",
            "optimizer states were offloaded to NVMe with masters of 16 bits (master_weights_and_grads), and the rank "
            "files state a wrong type for these",
            fix=_CPU_FIX,
        )
    files = _swap_files(location)
    return [[_with_its_own(s, files.get(rank, {})) for rank, s in enumerate(states[0])]]


def _swap_files(location: Location) -> dict[int, dict[str, SourceFile]]:
    """The swap files by rank and by the name of the swapped tensor."""
    found: dict[int, dict[str, SourceFile]] = {}
    for path, info in location.child(FOLDER).files().items():
        if named := _FILE.fullmatch(path):
            # A swap file has no header: its bytes are written unchecked, so a link could leak any other file.
            refuse_link_elsewhere(location, info.path)
            file = SourceFile(location.store, f"{FOLDER}/{path}", (info,))
            found.setdefault(int(named["rank"]), {})[named["name"]] = file
    return found


def _with_its_own(states: RankStates, files: Mapping[str, SourceFile]) -> RankStates:
    """A rank's states with those swap files that its empty tensors name."""
    named = (name for tensor in _tensors(states) if (name := _name_of(tensor)) is not None)
    return replace(states, swapped={name: files[name] for name in named if name in files})


def swapped_partition(states: RankStates, tensor: PTensor, numel: int, number: Mapping[SourceFile, int]) -> Partition:
    """The place in a swap file of a rank's flat tensor of `numel` elements, of which the rank file has none.

    Raises:
        SourceError: `checkpoint.incomplete` if the file is missing or too short, `source.unsupported` if it may be of
            another type than fp32.
    """
    name = _name_of(tensor)
    if name is None:
        # Nothing says that it was swapped: the later check of the number of elements refuses it.
        return Partition(number[states.torch_file.file], 0, 0)
    file = states.swapped.get(name)
    if file is None:
        raise SourceError(
            "checkpoint.incomplete",
            f"{printable(states.torch_file.file.name)} says that {printable(name)}{_SUFFIX} has {numel} elements that "
            f"were offloaded to NVMe, and {FOLDER}/ has no such file for its rank",
            fix=f"copy {FOLDER}/ of the same tag; where nodes kept it for themselves (use_node_local_storage), their "
            "folders have the same names, and are not read",
        )
    if tensor.dtype != MASTER.name:
        raise SourceError(
            "source.unsupported",
            f"{printable(states.torch_file.file.name)} says that {printable(name)}{_SUFFIX} is {tensor.dtype}: "
            "nothing says which type the file has",
            fix=_CPU_FIX,
        )
    wanted = numel * MASTER.itemsize_bytes
    if file.size_bytes < wanted:
        raise SourceError(
            "checkpoint.incomplete",
            f"{printable(file.name)} has {file.size_bytes} bytes, its sub-group takes {wanted}",
            fix="the file is truncated, or of another save: copy the checkpoint again",
        )
    return Partition(number[file], 0, numel)


def _tensors(states: RankStates) -> Iterator[PTensor]:
    yield from states.fp32
    for group in states.states:
        yield from (value for value in group.values() if isinstance(value, PTensor))


def _name_of(tensor: PTensor) -> str | None:
    return None if tensor.numel else dict(tensor.attributes).get(_ATTRIBUTE)
