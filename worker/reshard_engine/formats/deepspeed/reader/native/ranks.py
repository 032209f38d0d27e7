"""Entries that the files of several ranks should hold alike: a checkpoint keeps those of the first rank.

DeepSpeed has every rank write its own copy of counters, hyper-parameters and client state. Where a rank's copy
differs or has more entries, the report names the difference: a target has no place for it.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_checkpoint`: ZeRO-3 and every model-parallel rank save all of
`_common_checkpoint_state` and of the client's state), `runtime/pipe/engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.deepspeed.names import (
    FROZEN_FRAGMENTS,
    FROZEN_SHAPES,
    FUSED_LAYERS,
    FUSED_LAYERS_LEGACY,
    INFO,
    PARAM_SHAPES,
    RNG_KEYS,
)
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, parse_model_states
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates
from reshard_engine.formats.deepspeed.reader.native.rank_opener import RankOpener
from reshard_engine.formats.not_carried import NotCarriedKeys
from reshard_engine.pickles.differences import TensorsAt, TreeDifference, compare_trees
from reshard_engine.pickles.nodes import Node, PTensor

OTHER = "ranks hold different values: the target gets the first rank's"
_OWN = frozenset(
    {
        *("module", "optimizer", PARAM_SHAPES, FROZEN_SHAPES, FROZEN_FRAGMENTS, "shared_params"),
        *("buffer_names", FUSED_LAYERS, FUSED_LAYERS_LEGACY, *RNG_KEYS),
    }
)
"""Entries that differ by rank on purpose. The reader takes them from every rank where they matter."""
_OPEN_AT_ONCE = 16
_OF_PROCESS = frozenset({"args.rank", "args.local_rank", "args.curr_ckpt_iteration"})
"""Megatron's arguments that say which process a rank was."""
_PLACEMENT = f"{INFO}.{FUSED_LAYERS}"
"""The start of paths that repeat the entry `ds_autoep_layers`: they say which experts a rank holds."""


def note_models(models: Sequence[Sequence[ModelStates]], noted: NotCarriedKeys) -> None:
    """Compare the model states of all ranks, by model-parallel rank, with those of the first."""
    first = models[0][0]
    mine = _shared_entries(first)
    others = [m for group in models for m in group if m is not first]
    tensors = [d for d in _differences(mine, mine) if isinstance(d, TensorsAt)] if others else []
    for other in others:
        files = (first.torch_file, other.torch_file)
        # One pickle for both: only what tensors hold can differ.
        alike = other.entries is first.entries
        found = _unlike(tensors if alike else _differences(mine, _shared_entries(other)), files)
        told = (p for p in found if p not in _OF_PROCESS and not p.startswith(_PLACEMENT))
        noted.add_all(told, OTHER, file=other.torch_file.file.name)
    for group in models:
        for other in group[1:]:
            noted.add_all(_module_differences(group[0], other), OTHER, file=other.torch_file.file.name)


def note_copies(first: ModelStates, files: Sequence[SourceFile], opener: RankOpener, noted: NotCarriedKeys) -> None:
    """Compare model states with those of a first rank, for files from which nothing else is needed.

    Args:
        first: Model states of the first data-parallel rank of a model-parallel rank.
        files: The files of the other data-parallel ranks. A few are open at a time.
        opener: Opens the files.
        noted: Collects the paths of entries that differ.
    """
    for begin in range(0, len(files), _OPEN_AT_ONCE):
        chunk = files[begin : begin + _OPEN_AT_ONCE]
        others = open_all(chunk, lambda f: opener.states(f, parse_model_states))
        note_models([[first, *others]], noted)


def note_optimizers(states: Sequence[RankStates], noted: NotCarriedKeys) -> None:
    """Compare the param groups and other entries of all ranks' optimizer files with those of the first rank."""
    first = states[0]
    for other in states[1:]:
        files = (first.torch_file, other.torch_file)
        found = list(_unlike(_differences(first.extras, other.extras), files))
        for index, (a, b) in enumerate(zip(first.param_groups, other.param_groups, strict=False)):
            found += _unlike(_differences(_without_params(a), _without_params(b), f"param_groups[{index}]"), files)
        noted.add_all(found, OTHER, file=other.torch_file.file.name)


def _shared_entries(model: ModelStates) -> dict[str | int, Node]:
    return {k: v for k, v in model.entries.items() if k not in _OWN}


def _without_params(group: Mapping[str | int, Node]) -> dict[str | int, Node]:
    return {k: v for k, v in group.items() if k != "params"}


def _differences(
    mine: Mapping[Any, Node], theirs: Mapping[Any, Node], prefix: str = ""
) -> Iterator[TreeDifference | TensorsAt]:
    for key in dict.fromkeys((*mine, *theirs)):
        path = f"{prefix}.{key}" if prefix else str(key)
        if key in mine and key in theirs:
            yield from compare_trees(mine[key], theirs[key], path)
        else:
            yield TreeDifference(path, None, None)


def _unlike(found: Iterable[TreeDifference | TensorsAt], files: tuple[TorchFile, TorchFile]) -> Iterator[str]:
    """The paths of entries that differ. Tensors differ if their metadata or checksums do."""
    return (d.path for d in found if not (isinstance(d, TensorsAt) and _same_tensor(d.a, d.b, files)))


def _module_differences(first: ModelStates, other: ModelStates) -> Iterator[str]:
    """Entries of two data-parallel ranks' state dicts that differ: buffers, extra states, and what hooks add."""
    files = (first.torch_file, other.torch_file)
    for name in dict.fromkeys((*first.module, *other.module)):
        a, b = first.module.get(name), other.module.get(name)
        # Placeholders of sharded parameters are empty.
        if a is None or b is None or ((a.numel or b.numel) and not _same_tensor(a, b, files)):
            yield f"module.{name}"
    yield from _unlike(_differences(first.extra_states, other.extra_states, "module"), files)


def _same_tensor(a: Node, b: Node, files: tuple[TorchFile, TorchFile]) -> bool:
    """True if two tensors are equal by metadata: by shape, type, and the checksums of their storages."""
    if not (isinstance(a, PTensor) and isinstance(b, PTensor)):
        return False
    if (a.shape, a.dtype, a.offset, a.stride) != (b.shape, b.dtype, b.offset, b.stride):
        return False
    sums = [_crc32(t, f) for t, f in zip((a, b), files, strict=True)]
    return None in sums or sums[0] == sums[1]


def _crc32(tensor: PTensor, file: TorchFile) -> int | None:
    """The checksum of a tensor's storage; None where the file keeps none."""
    record = file.storages.get(tensor.storage.key)
    return None if record is None else record.crc32
