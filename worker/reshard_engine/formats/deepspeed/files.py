"""Names of DeepSpeed's files, entries and keys, and the roles of the files in a tag directory.

Source: deepspeed 0.19.8 `checkpoint/constants.py`, `runtime/pipe/module.py` (`tied_modules`),
`module_inject/auto_ep.py` and `runtime/engine.py` (`ds_autoep_layers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from reshard.choices import POINTERS
from reshard.errors import SourceError, counted, printable
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.storage.protocol import Listing, ObjectInfo, Store, read_bytes

LATEST, LATEST_UNIVERSAL = POINTERS
"""Pointer files beside tag directories: the training run's own, then that of universal checkpoints."""

INFO = "universal_checkpoint_info"
CONFIG = "ds_config"
"""The entry of model states that holds the run's configuration."""
VERSION = "ds_version"
SCHEDULER = "lr_scheduler"
COUNTERS = {"skipped_steps": "skipped_steps", "global_steps": "steps", "global_samples": "samples"}
"""Keys of counters in model states, each with its field of `checkpoint.Counters`."""
OPTIMIZER_STATE = "optimizer_state_dict"
"""The entry of optimizer files that holds everything of the optimizer."""
PARAM_SHAPES = "param_shapes"
FROZEN_SHAPES, FROZEN_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
PARALLEL_DIMENSIONS = "checkpoint_parallel_dimensions"
LAYOUT_NOTES = "reshard_layout"
"""An entry that our universal writer adds to model states. DeepSpeed's loaders pass unknown entries to the client."""

RNG_KEYS = ("rng_state", "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
"""Entries of model states that hold random states: Megatron's `rng_state`, and the keys of the entries inside it."""
DESCRIBED_KEYS = frozenset(
    {
        *("module", "optimizer", PARAM_SHAPES, FROZEN_SHAPES, FROZEN_FRAGMENTS, "shared_params", "buffer_names"),
        LAYOUT_NOTES,
    }
)
"""Entries of model states that name, shape or hold tensors."""
FUSED_LAYERS = "ds_autoep_layers"
FUSED_LAYERS_LEGACY = "autoep_layers"
LAYOUT_KEYS = DESCRIBED_KEYS | {"dp_world_size", "mp_world_size", PARALLEL_DIMENSIONS, INFO, CONFIG, VERSION}
"""Entries of model states that describe the files or their tensors. Another layout has other values.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_checkpoint`).
"""
OWN_KEYS = LAYOUT_KEYS | {
    *(FUSED_LAYERS, FUSED_LAYERS_LEGACY, "data_sampler", "random_ltd", "sparse_tensor_module_names"),
}
"""Entries of model states that mean something to DeepSpeed only."""
TIED = "tied_modules."
"""The prefix of the names of modules that several layers of a pipeline share."""
NUMBERED = re.compile(r"(?P<layer>0|[1-9][0-9]{0,5})\..+")
"""A name that begins with the number of its layer."""
EXPERT = re.compile(r"(?P<head>(?:.*\.)?deepspeed_experts\.)(?P<number>[0-9]{1,9})(?P<tail>\..*)")
"""A parameter of an expert, numbered in its layer."""

FUSED_WEIGHTS = ("w1", "w2", "w3")
"""Parameters in which AutoEP fuses the experts of a layer."""


def round_robin_order(count: int, ranks: int) -> list[int]:
    """The flat order of a group's parameters under `round_robin_gradients`.

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`).
    """
    return [index for first in range(min(ranks, count)) for index in range(first, count, ranks)]


# Files that DeepSpeed's FAST writer left in parts: copies of one archive, or byte ranges of one stream.
#
# Source: deepspeed 0.19.8 `runtime/model_checkpointing/writer_factory.py` (names `<file>-<writer>.<writers>`),
# `io/fast_file_writer.py`; verified by running: with stock torch every part is a complete archive, the
# byte-range form comes from `save_torch_storage_object_list`, whose first part alone begins the stream.

_ZIP_MAGIC = b"PK\x03\x04"
_EOCD_BYTES = 22


def joined_parts(file: SourceFile) -> SourceFile:
    """The whole file that the parts of a split file make up; a file that is not split is returned as it is."""
    if len(file.objects) == 1:
        return file
    return whole_copy(file) or file


def whole_copy(file: SourceFile) -> SourceFile | None:
    """The first part, if every part is a complete archive; None if the parts are byte ranges of one stream."""
    if all(_is_whole_archive(file, index) for index in range(len(file.objects))):
        return SourceFile(file.store, file.name, file.objects[:1])
    return None


def _is_whole_archive(file: SourceFile, index: int) -> bool:
    info = file.objects[index]
    if info.size_bytes < _EOCD_BYTES:
        return False
    head = read_bytes(file.store, info, 0, 4)
    tail = read_bytes(file.store, info, info.size_bytes - _EOCD_BYTES, 4)
    return head == _ZIP_MAGIC and tail == b"PK\x05\x06"


# Roles of the files in a tag directory, from their names: ranks are parsed to integers, never sorted as text.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_optimizer_ckpt_name`,
# `_get_expert_ckpt_name`), `runtime/model_checkpointing/writer_factory.py` (FAST parts), `runtime/pipe/module.py`.

_N = r"(0|[1-9][0-9]{0,8})"  # a rank that is not padded
_P = r"([0-9]{2,9})"  # a rank padded to two digits
# `_optim_states` lost its underscore in very old checkpoints; the engine still accepts that.
_OPTIM = re.compile(rf"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<dp>{_N})_mp_rank_(?P<mp>{_P})_?optim_states\.pt")
_MODEL_Z3 = re.compile(rf"zero_pp_rank_(?P<dp>{_N})_mp_rank_(?P<mp>{_P})_model_states\.pt")
_MODEL = re.compile(rf"mp_rank_(?P<mp>{_P})_model_states\.pt")
_EXPERT = re.compile(rf"(?:layer_(?P<layer>{_N})_)?expert_(?P<expert>{_N})_mp_rank_(?P<mp>{_P})_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_[0-9]+_.*_optim_states\.pt")
_LAYER = re.compile(rf"layer_(?P<layer>{_P})(?:-model_(?P<tp>{_P}))?-model_states\.pt")
_K = TypeVar("_K")
_PART = re.compile(r"(?P<name>.+\.pt)-(?P<rank>0|[1-9][0-9]{0,5})\.(?P<count>[1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a tag directory by role."""

    models: Mapping[int, SourceFile]
    """`mp_rank_*_model_states.pt` by model-parallel rank."""
    models_by_rank: Mapping[tuple[int, int], SourceFile]
    """Model states at ZeRO-3, where every rank writes a file, by data-parallel and model-parallel rank."""
    optim: Mapping[tuple[int, int], SourceFile]
    """Optimizer files by data-parallel and model-parallel rank."""
    prefix: str
    """The prefix of optimizer files' names: `bf16_`, `fp16_` or empty."""
    experts: Mapping[tuple[int, int, int], SourceFile]
    """Expert files by MoE layer (0 in old names without a layer), global expert and model-parallel rank."""
    expert_optim: tuple[str, ...]
    """Names of the optimizer files of experts, which runs at stage 0 write."""
    layers: Mapping[tuple[int, int], SourceFile]
    """Weights of pipeline layers by layer and tensor-parallel rank."""
    others: tuple[str, ...] = ()
    """Names of files that no version of DeepSpeed gives."""

    @property
    def model_parallel(self) -> int:
        """Number of model-parallel ranks in the names."""
        ranks = {mp for _, mp in self.optim} | {mp for _, mp in self.models_by_rank} | set(self.models)
        return max(ranks, default=0) + 1


def looks_like_deepspeed(listing: Listing) -> bool:
    """True if the listing has a file with a name that DeepSpeed gives to a checkpoint's files."""
    for info in listing.files:
        name = _without_part(info.path.rpartition("/")[2])
        if any(p.fullmatch(name) for p in (_OPTIM, _MODEL_Z3, _MODEL, _LAYER)):
            return True
    return False


def replicas_load(name: str) -> bool:
    """True for a file that all ranks of a data-parallel group load, each of them all of it and in the same order.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`_load_checkpoint`), `runtime/pipe/module.py` (`load_state_dir`).
    """
    return any(p.fullmatch(name) for p in (_MODEL, _LAYER))


def _without_part(name: str) -> str:
    part = _PART.fullmatch(name)
    return part["name"] if part else name


def sort_files(store: Store, listing: Listing) -> RankFiles:
    """The files of a tag directory by role.

    Raises:
        SourceError: `checkpoint.ambiguous` if two files claim one role, `checkpoint.incomplete` if parts of a
            split file are missing.
    """
    model: dict[int, SourceFile] = {}
    model_z3: dict[tuple[int, int], SourceFile] = {}
    optim: dict[tuple[int, int], SourceFile] = {}
    prefixes: set[str] = set()
    experts: dict[tuple[int, int, int], SourceFile] = {}
    expert_optim: list[str] = []
    layers: dict[tuple[int, int], SourceFile] = {}
    others: list[str] = []
    for file in _joined(store, listing.files):
        if found := _OPTIM.fullmatch(file.name):
            _claim(optim, (int(found["dp"]), int(found["mp"])), file)
            prefixes.add(found["prefix"] or "")
        elif found := _MODEL_Z3.fullmatch(file.name):
            _claim(model_z3, (int(found["dp"]), int(found["mp"])), file)
        elif found := _MODEL.fullmatch(file.name):
            _claim(model, int(found["mp"]), file)
        elif found := _EXPERT.fullmatch(file.name):
            _claim(experts, (int(found["layer"] or 0), int(found["expert"]), int(found["mp"])), file)
        elif _EXPERT_OPTIM.fullmatch(file.name):
            expert_optim.append(file.name)
        elif found := _LAYER.fullmatch(file.name):
            _claim(layers, (int(found["layer"]), int(found["tp"] or 0)), file)
        elif file.name != MANIFEST_NAME:
            others.append(file.name)
    if len(prefixes) > 1:
        raise SourceError(
            "checkpoint.ambiguous",
            f"optimizer files with and without the prefix {max(prefixes)!r}: two checkpoints in one directory",
            fix="keep one of the two sets of *_optim_states.pt",
        )
    return RankFiles(
        dict(sorted(model.items())),
        dict(sorted(model_z3.items())),
        dict(sorted(optim.items())),
        prefixes.pop() if prefixes else "",
        dict(sorted(experts.items())),
        tuple(expert_optim),
        dict(sorted(layers.items())),
        tuple(sorted(others)),
    )


def _claim(table: dict[_K, SourceFile], key: _K, file: SourceFile) -> None:
    if key in table:
        raise SourceError(
            "checkpoint.ambiguous", f"{printable(file.name)} and {printable(table[key].name)} claim the same rank"
        )
    table[key] = file


def _joined(store: Store, files: Iterable[ObjectInfo]) -> list[SourceFile]:
    """Source files with the parts of split ones put together in writer order."""
    whole: dict[str, SourceFile] = {}
    parts: dict[str, dict[int, ObjectInfo]] = {}
    counts: dict[str, set[int]] = {}
    for info in files:
        name = info.path.rpartition("/")[2]
        part = _PART.fullmatch(name)
        if part is None:
            whole[name] = SourceFile(store, name, (info,))
        else:
            parts.setdefault(part["name"], {})[int(part["rank"])] = info
            counts.setdefault(part["name"], set()).add(int(part["count"]))
    for name, by_rank in parts.items():
        if name in whole or len(counts[name]) != 1:
            raise SourceError(
                "checkpoint.ambiguous", f"{printable(name)} exists whole and in parts, or is split in two ways"
            )
        count = next(iter(counts[name]))
        present = SourceFile(store, name, tuple(by_rank[r] for r in sorted(by_rank)))
        missing = [r for r in range(count) if r not in by_rank] if count <= 1 << 16 else [0]
        if not missing and len(by_rank) == count:
            whole[name] = joined_parts(present)
        elif (copy := whole_copy(present)) is not None:
            # FAST names a rank's own optimizer file with that writer's number; no other writer has a part of the file.
            whole[name] = copy
        else:
            raise SourceError(
                "checkpoint.incomplete",
                f"{printable(name)} is split into {counted(count, 'part')}, missing: {missing[:8]}",
                fix=f"copy the missing parts, such as {printable(name)}-{missing[0] if missing else 0}.{count}",
            )
    return list(whole.values())


def rank_of(name: str, *, tp: int) -> str:
    """The ranks, layer or expert that a file belongs to, in words; empty for other files."""
    if (found := _OPTIM.fullmatch(name) or _MODEL_Z3.fullmatch(name)) is not None:
        return f"dp {int(found['dp'])} {_model_parallel(int(found['mp']), tp)}"
    if (found := _MODEL.fullmatch(name)) is not None:
        return _model_parallel(int(found["mp"]), tp)
    if (found := _LAYER.fullmatch(name)) is not None:
        return f"layer {int(found['layer'])} tp {int(found['tp'] or 0)}"
    if (found := _EXPERT.fullmatch(name)) is not None:
        return f"expert {int(found['expert'])} of MoE layer {int(found['layer'] or 0)}"
    return ""


def _model_parallel(mp: int, tp: int) -> str:
    return f"tp {mp % tp} pp {mp // tp}"
