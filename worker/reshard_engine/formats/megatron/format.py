"""Checkpoints of Megatron-core as a format, and the reader of `torch_dist`, its distributed checkpoints.

The tensors are those of a distributed checkpoint of torch under names of Megatron's own: `decoder.layers.mlp.…` has an
axis of layers in front, `optimizer.state.exp_avg.decoder.…` is a moment of it. The chunks of all ranks are boxes of
these tensors, so that nothing here asks for the layout of the run.

States of the kind `fully_sharded_model_space` (0.14 and older) have the same keys, and a shape of their own: each part
of a parameter is one row, whose elements data-parallel ranks share.

Source: megatron-core 0.16.1 and 0.19.2 `dist_checkpointing/strategies/torch.py` (`mcore_to_pyt_state_dict`: keys, and
`KEY/shard_OFFSETS_SHAPE` for objects), `optimizer/distrib_optimizer.py` (`sharded_param_state_fully_reshardable`),
`optimizer/optimizer.py` (`fp32_param` of a plain optimizer; `ChainedOptimizer.sharded_state_dict`: the prefix
`chained_N.` of older saves); 0.12.3 to 0.14.0 `dist_checkpointing/strategies/resharding.py`
(`nd_flattened_tensor_reformulated_global_shape`); verified by running 0.13.1, 0.14.0, 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, cast

import numpy as np

from reshard.choices import DamagedPolicy, NameScheme, OpaquePolicy, TargetFormat
from reshard.errors import RequestError, ReshardError, SourceError, printable
from reshard.models.jobs import ConvertRequest, NotCarried, PossibleTarget
from reshard.models.resume import ResumeLayout, RunLaunch, identity_of
from reshard.options import MegatronOptions, RunLayout
from reshard_engine.checkpoint import Checkpoint, ParamGroup, Question, Undecided
from reshard_engine.containers.source_file import SourceFile, parse_json
from reshard_engine.containers.torch_file import TreeTensors, open_torch_file
from reshard_engine.formats.carried import named
from reshard_engine.formats.dcp_files.metadata.model import METADATA_FILE
from reshard_engine.formats.dcp_files.saved_state import (
    CarriedValues,
    SavedTensor,
    SavedValue,
    open_values,
    read_state,
)
from reshard_engine.formats.dcp_files.tensors import ChunkTensors, restored_boxes
from reshard_engine.formats.format import (
    Completion,
    Discovery,
    DryRun,
    Format,
    Presentation,
    Reader,
    ReadOptions,
    Writer,
)
from reshard_engine.formats.megatron.across import (
    BACK,
    ORDERS,
    goes_on_in_deepspeed,
    is_megatron_deepspeed,
    renamed_from_deepspeed,
    renamed_to_deepspeed,
    with_loss_scale,
)
from reshard_engine.formats.megatron.buckets import SavedBuckets, SavedWeight, is_of_buckets
from reshard_engine.formats.megatron.buffers import LayoutError
from reshard_engine.formats.megatron.common import (
    LATEST_STATE,
    OF_EXPERTS,
    RUN_CONFIG,
    SCALED,
    SCALER,
    TRAIN_STATE,
    CommonState,
    ReadGroups,
    args_of_run_config,
    only_one,
    read_groups,
)
from reshard_engine.formats.megatron.damage import SHARDING, Shifts, SuspectFacts, possible_shifts, repaired
from reshard_engine.formats.megatron.huggingface.renaming import renamed
from reshard_engine.formats.megatron.huggingface.rules import requested_family
from reshard_engine.formats.megatron.legacy import MODEL_FILE, LegacyReader, holds_ranks
from reshard_engine.formats.megatron.model import (
    COMMON,
    COMMON_ENTRY,
    DAMAGED,
    DESCRIPTION,
    RANDOM,
    STEP_DIRECTORY,
    TRACKER,
    MegatronFacts,
    ModelBuilder,
    extra_states,
)
from reshard_engine.formats.megatron.names import MAX_LAYERS, Entry, KeyRules, entries_of, half_of, name_at
from reshard_engine.formats.megatron.ranks_writer import MegatronWriter
from reshard_engine.formats.model_weights import checked_state
from reshard_engine.pickles.nodes import Node, PTensor, is_mapping, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, read_bytes
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.layout import KnownFiles
from reshard_engine.tensors.shard_map import Boxes, LogicalTensor, ShardMapBuilder, add_boxes

_MOST_BYTES = 1 << 16
_KEY, _BACKEND = "sharded_backend", "torch_dist"
"""The entry of the description that names the backend, and its value for distributed checkpoints of torch."""
_STATE = re.compile(r"(?:chained_\d{1,3}\.)?optimizer\.state\.(.+?)\.(.+)")
"""The key of a state of one parameter: the state's name, and the parameter's key."""
_MASTERS = ("param", "fp32_param")
_OBJECT = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)")
"""The key of one object of several: the object's place among them, and how many there are along each axis."""
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)")
"""The begin of a key that stands for all layers; others have a number there, and may have an axis of experts."""
_EXTRA_STATE = "._extra_state"
_MOST_CONFIG_BYTES = 1 << 22
_BRIDGE_REASON = "a file of Megatron-Bridge: copy it into the iteration's directory, if Megatron-Bridge is to go on"
_OBJECT_REASON = "an object that only Megatron-core reads"
_NAMES = (NameScheme.HUGGING_FACE, NameScheme.MEGATRON_CORE)
_MODEL_SPACE = "fully_sharded_model_space"
_WEIGHTS_ALONE = (
    "--to safetensors takes the weights alone; or save once with --dist-ckpt-optim-fully-reshardable, which keeps names"
)
_OF_SHARDS = f"{COMMON_ENTRY}/"
"""The first part of keys of the common state, where it is in the shards (from 0.19 on)."""
_OF_FSDP = "optimizer.param_to_group_meta."
"""The first part of keys that Megatron-FSDP alone has (`fsdp_dtensor`)."""
_COPY_AGAIN = "copy the checkpoint again: `.metadata` is written last, when all files are there"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of one parameter, as boxes of files."""

    entry: Entry
    state: str
    boxes: Boxes
    dtype: Dtype
    shape: tuple[int, ...]

    def rows(self, begin: int, end: int) -> _Stored:
        """The indices `[begin, end)` of the first axis, in coordinates that begin there."""
        boxes = self.boxes.boxes
        offset, size = boxes[:, 0, 0], boxes[:, 1, 0]
        first, last = np.maximum(offset, begin), np.minimum(offset + size, end)
        kept = last > first
        inner = boxes[kept].copy()
        skipped = (first - offset)[kept] * inner[:, 1, 1:].prod(axis=1)
        inner[:, 0, 0], inner[:, 1, 0] = (first - begin)[kept], (last - first)[kept]
        place = self.boxes.offset[kept] + skipped * self.dtype.itemsize_bytes
        return replace(self, boxes=Boxes(inner, self.boxes.file[kept], place), shape=(end - begin, *self.shape[1:]))

    def of(self, entries: Sequence[Entry]) -> Iterator[_Stored]:
        """The tensors of layers, or of experts, of an entry that has axes for them."""
        # A layer is cut out once for all of its experts, as each cut goes through all boxes.
        held: dict[tuple[int, ...], _Stored] = {}
        for entry in entries:
            found = self
            for depth, at in enumerate(entry.index, start=1):
                place = entry.index[:depth]
                if place not in held:
                    one = found.rows(at, at + 1)
                    boxes = Boxes(one.boxes.boxes[:, :, 1:], one.boxes.file, one.boxes.offset)
                    held[place] = replace(one, boxes=boxes, shape=one.shape[1:])
                found = held[place]
            yield replace(found, entry=entry)

    def added(self, builder: ShardMapBuilder) -> int:
        """Register the tensor; returns its number."""
        return add_boxes(builder, LogicalTensor(self.entry.name, self.state, self.dtype, self.shape), self.boxes)


def _description(location: Location, info: ObjectInfo) -> dict[str, Any] | None:
    """The object in a `metadata.json`; None for a file that holds none."""
    if info.size_bytes > _MOST_BYTES:
        return None
    try:
        said = parse_json(read_bytes(location.store, info), code="checkpoint.malformed", what=DESCRIPTION)
    except ReshardError:
        return None
    return cast("dict[str, Any]", said) if isinstance(said, dict) else None


class TorchDistReader:
    """Reads a directory that `dist_checkpointing.save` wrote with the backend `torch_dist`."""

    family = "megatron"

    def recognises(self, listing: Listing) -> bool:
        """True if the directory has Megatron's description, or its common file, beside torch's metadata."""
        names = listing.by_name.keys()
        return METADATA_FILE in names and not names.isdisjoint((DESCRIPTION, COMMON))

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model, its optimizer and the run's state.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `source.unsupported`, `name.invalid`.
        """
        info = listing.by_name.get(DESCRIPTION)
        said = None if info is None else _description(location, info)
        if said is None or said.get(_KEY) != _BACKEND:
            raise SourceError(
                "checkpoint.incomplete",
                f"{printable(location.url)} has {COMMON} of Megatron-core, and no {DESCRIPTION} that says {_BACKEND}: "
                "it is written last, and no run loads the files without it",
                fix="copy the checkpoint again, or take an earlier one",
            )
        return _Assembly(location, listing, options).checkpoint()


class _Assembly:
    """One checkpoint being put together."""

    def __init__(self, location: Location, listing: Listing, options: ReadOptions) -> None:
        self._url, self._options = location.url, options
        self._state = read_state(location, listing)
        self._builder = ShardMapBuilder()
        self._files: list[SourceFile] = list(self._state.files)
        self._values = {v.entry.key: v for v in self._state.values}
        self._carried = CarriedValues(self._builder)
        self._common = CommonState.of(self._common_node(location, listing), COMMON)
        self._buckets = SavedBuckets(self._builder, self._state, options.ledger)
        self._beside: list[NotCarried] = []
        if not self._common.args:
            self._common = replace(self._common, args=self._args_of_bridge(location, listing))
        self._chunks = ChunkTensors(self._builder, self._state.files, self._wanted(), options.ledger)
        self._model = ModelBuilder(self._builder, self._common)
        self._whole: dict[str, SavedWeight] = {}
        self._keys: list[tuple[str, str]] = []
        """The key of each weight."""
        self._unread: Undecided | None = None

    @property
    def _kind(self) -> str:
        """The name of these files for people. It ends with how the optimizer was saved, if not for every layout."""
        return "-".join(["megatron-torch-dist", *([self._sharding.replace("_", "-")] if self._sharding else [])])

    @property
    def _sharding(self) -> str:
        """How the optimizer was saved, where not every layout loads it; empty where every layout does.

        Some files ask for the same tensor and pipeline parallelism, others for a version up to 0.15.
        """
        flattened = any(t.part.metadata.original_shapes for t in self._state.tensors)
        return self._buckets.kind or (_MODEL_SPACE if flattened else "")

    def _wanted(self) -> list[SavedTensor]:
        return [t for t in self._state.tensors if not is_of_buckets(t.entry.key)]

    def _common_node(self, location: Location, listing: Listing) -> Node:
        """The common state: a file up to 0.18, an object of the distributed checkpoint from 0.19 on.

        Source: megatron-core 0.19.2 `dist_checkpointing/serialization.py` (`load_common_state_dict` asks for the file
        first).
        """
        if (info := listing.by_name.get(COMMON)) is not None:
            parsed = open_torch_file(SourceFile(location.store, COMMON, (info,)), self._options.ledger)
            self._files.append(parsed.file)
            return TreeTensors(self._builder, {parsed.file: len(self._files) - 1}).carried(parsed.root, parsed)
        value = self._values.get(f"{COMMON_ENTRY}/shard_0_1")
        if value is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"{printable(self._url)} has neither `{COMMON}` nor the entry {COMMON_ENTRY}: one of them holds the "
                "param groups and counters of the run",
                fix=_COPY_AGAIN,
            )
        return only_one(self._opened([value])[0], COMMON_ENTRY)

    def _args_of_bridge(self, location: Location, listing: Listing) -> dict[str | int, Node]:
        """The arguments that files of Megatron-Bridge beside the checkpoint stand for; empty without such files."""
        store, found = location.store, listing.by_name
        self._beside += named([name for name in (RUN_CONFIG, TRAIN_STATE) if name in found], _BRIDGE_REASON)
        config, state = found.get(RUN_CONFIG), found.get(TRAIN_STATE)
        if config is None or config.size_bytes > _MOST_CONFIG_BYTES:
            return {}
        try:
            args = args_of_run_config(read_bytes(store, config).decode("utf-8"))
        except ValueError as error:
            self._beside.append(NotCarried(path=RUN_CONFIG, reason=f"its arguments are not read: {error}"))
            return {}
        if (
            state is not None
            and (samples := _count(SourceFile(store, TRAIN_STATE, (state,)), "consumed_train_samples")) is not None
        ):
            args["consumed_train_samples"] = samples
        shared = [args.get(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")]
        if all(isinstance(n, int) and n > 0 for n in shared) and (ranks := self._buckets.saving_ranks()):
            # Every rank saves its part of each bucket, so that the ranks of files are all ranks of the run.
            data, rest = divmod(ranks, prod(cast("list[int]", shared)))
            args |= {} if rest else {"data_parallel_size": data}
        return args

    def _opened(self, values: Sequence[SavedValue]) -> list[Node]:
        parsed = open_values(self._files, values, self._options.ledger)
        files = [v.part.first_file + v.entry.file for v in values]
        return [self._carried.carried(one, file) for one, file in zip(parsed, files, strict=True)]

    def checkpoint(self) -> Checkpoint:
        """The checkpoint of everything that was read."""
        self._read_tensors()
        self._model.rules = KeyRules.of(self._keys)
        groups = self._read_groups()
        random_states, not_carried = self._objects()
        built = self._model.checkpoint(
            self._url,
            self._kind,
            self._files,
            self._options,
            groups,
            unread=self._unread,
            random_states=random_states,
            not_carried=not_carried,
        )
        built = replace(built, agreements=(*self._chunks.agreements, *self._buckets.agreements, *built.agreements))
        if isinstance(built.facts, MegatronFacts):
            built = replace(built, facts=replace(built.facts, any_layout=not self._sharding))
        shifts = self._shifts() if groups is not None else None
        if shifts is None or not isinstance(built.facts, MegatronFacts):
            return built
        return replace(built, facts=SuspectFacts.of(built.facts, shifts, built.parameters))

    def _shifts(self) -> Shifts | str | None:
        """The shifts that the states may have; the reason where nothing says it; None if they have none."""
        if self._common.sharding_type != SHARDING or self._buckets.found:
            return None
        weights = {name: one for name, one in self._whole.items() if name in self._model.states}
        try:
            return possible_shifts(self._common, weights, self._buckets.is_in_order)
        except LayoutError as error:
            return str(error)

    # Tensors.

    def _read_tensors(self) -> None:
        """Register every tensor of the model and of the optimizer, layer by layer."""
        halves: dict[tuple[str, str], list[SavedTensor | None]] = {}
        found: list[_Stored] = []
        for tensor in self._wanted():
            key, state = _key_and_state(tensor.entry.key)
            if (half := half_of(key)) is None:
                found += self._taken(key, self._stored(key, state, tensor))
            else:
                halves.setdefault((half[0], state), [None, None])[half[1]] = tensor
        for (key, state), pair in halves.items():
            found += self._taken(key, self._joined(key, state, pair))
        # The model's order: what is before the layers, the layers, and what is behind them.
        begin = next((at for at, one in enumerate(found) if one.entry.layer is not None), 0)
        outside = [-1 if at < begin else MAX_LAYERS for at in range(len(found))]
        layers = [one.entry.layer if one.entry.layer is not None else outside[at] for at, one in enumerate(found)]
        for at in sorted(range(len(found)), key=layers.__getitem__):
            self._register(found[at])

    def _stored(self, key: str, state: str, tensor: SavedTensor) -> _Stored:
        """A tensor as boxes, in the shape that the parameter has."""
        boxes, entry = self._chunks.boxes(key, state, [tensor]), tensor.entry
        original = tensor.part.metadata.original_shapes.get(entry.key)
        if original is None:
            return _Stored(Entry(key), state, boxes, entry.dtype, entry.shape)
        return _Stored(Entry(key), state, restored_boxes(boxes, entry, original), entry.dtype, original)

    def _joined(self, key: str, state: str, pair: Sequence[SavedTensor | None]) -> _Stored:
        """A gated unit whose halves were saved apart: the gate's rows, and then those of the other half."""
        first, second = (None if half is None else self._stored(key, state, half) for half in pair)
        kinds = {None if half is None else (half.shape, half.dtype) for half in (first, second)}
        if len(kinds) > 1 or first is None or second is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"of {printable(key)} the halves _w and _v are not both there, or differ in shape or type",
                fix=_COPY_AGAIN,
            )
        one, other = first.boxes, second.boxes
        shape, moved = first.shape, other.boxes.copy()
        # Axes of layers and experts are in front of the rows.
        dim = len(shape) - (1 if key.endswith(".bias") else 2)
        moved[:, 0, dim] += shape[dim]
        boxes, file, offset = (
            np.concatenate(columns)
            for columns in ((one.boxes, moved), (one.file, other.file), (one.offset, other.offset))
        )
        whole = tuple(2 * n if d == dim else n for d, n in enumerate(shape))
        return _Stored(Entry(key), state, Boxes(boxes, file, offset), first.dtype, whole)

    def _taken(self, key: str, stored: _Stored) -> list[_Stored]:
        """The parameters of one entry."""
        layers, shape = self._common.number("num_layers"), stored.shape
        entries = entries_of(key, shape)
        if _STACKED.match(key) and entries[0].index and layers not in (None, shape[0]):
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(key)} has {shape[0]} layers, and the run's arguments say {layers}",
                fix="the files are of different saves: copy those of one save",
            )
        self._keys += [(key, entry.name) for entry in entries] if stored.state == "weight" else []
        return list(stored.of(entries))

    def _register(self, stored: _Stored) -> None:
        name, state, model = stored.entry.name, stored.state, self._model
        if state == "weight":
            self._whole[name] = SavedWeight(stored.dtype, stored.shape, stored.boxes)
        if (rows := model.data_rows(name, stored.shape)) is not None:
            padding = stored.rows(rows, stored.shape[0])
            model.padding.setdefault(name, {})[state] = padding.added(self._builder)
            stored = stored.rows(0, rows)
        model.add(name, state, stored.added(self._builder))

    # Parameters.

    def _read_groups(self) -> ReadGroups | None:
        if self._buckets.found:
            try:
                more = self._buckets.read(self._opened, self._whole, self._common, self._model)
            except LayoutError as error:
                reason = (
                    f"its optimizer is in {self._buckets.what} ({self._buckets.kind}), which hold no names of "
                    f"parameters, and their places in it are not proven: {error}"
                )
                self._unread = Undecided(Question.OPTIMIZER, reason, _WEIGHTS_ALONE)
                return None
            return read_groups(self._common, self._model.dims(), more)
        return read_groups(self._common, self._model.dims()) if self._model.states else None

    # Objects.

    def _objects(self) -> tuple[dict[tuple[int, ...], Node], list[NotCarried]]:
        """Random states by rank, and what is left of the objects."""
        kinds: Counter[str] = Counter()
        carries, scales = self._options.target == Megatron.targets[0], self._options.target in SCALED
        random: dict[tuple[int, ...], SavedValue] = {}
        extra: dict[str, SavedValue] = {}
        not_carried: list[NotCarried] = [*self._beside]
        for key, value in self._values.items():
            match = _OBJECT.fullmatch(key)
            name = key if match is None else match[1]
            if name == COMMON_ENTRY or self._buckets.has_read(key):
                continue
            if name == RANDOM and match is not None:
                random[tuple(map(int, match[2].split(".")))] = value
            elif name.endswith(_EXTRA_STATE) and match is not None and carries:
                extra[name_at(name, [*map(int, match[2].split("."))])] = value
            elif name.endswith(f".{SCALER}") and scales:
                self._model.scaler = only_one(self._opened([value])[0], name)
            elif name.endswith(_EXTRA_STATE):
                kinds[name] += 1
            else:
                not_carried += named([key], _OBJECT_REASON)
        if kinds:
            not_carried.append(extra_states(kinds.total()))
        states = self._opened([*extra.values()])
        self._model.extra_states = {n: only_one(s, n) for n, s in zip(extra, states, strict=True)}
        opened = self._opened([*random.values()])
        return {place: only_one(node, RANDOM) for place, node in zip(random, opened, strict=True)}, not_carried


def _count(file: SourceFile, name: str) -> int | None:
    """A count that a state of Megatron-Bridge has as a tensor of one integer; None if it has none of this name.

    Source: Megatron-Bridge 0.1 to 0.3 `training/state.py` (`TrainState.state_dict`).
    """
    parsed = open_torch_file(file, OpaqueLedger(OpaquePolicy.KEEP))
    value = mapping_items(parsed.root, what=file.name).get(name) if is_mapping(parsed.root) else None
    if not isinstance(value, PTensor) or value.numel != 1 or value.dtype not in ("int32", "int64"):
        return None
    count = int.from_bytes(parsed.read_scalar_bytes(value), "little", signed=True)
    return count if count >= 0 else None


def _key_and_state(key: str) -> tuple[str, str]:
    """The model's key of an entry, and the state: `weight` for the model's own tensor."""
    if (match := _STATE.fullmatch(key)) is None:
        return key, "weight"
    return match[2], "fp32" if match[1] in _MASTERS else checked_state(match[1])


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (TorchDistReader(), LegacyReader())
    of_training = True
    files = KnownFiles(entries=(COMMON,), needed=(DESCRIPTION, MODEL_FILE), numbered=((TRACKER, STEP_DIRECTORY),))

    def owns(self, location: Location, listing: Listing) -> bool:
        """True if the description names Megatron's backend: other programs write a `metadata.json` as well.

        With `common.pt` beside `.metadata`, one that is missing or cut off belongs to a save that did not end, which
        must not be taken for a distributed checkpoint of another program.
        """
        info, common = listing.by_name.get(DESCRIPTION), {COMMON, METADATA_FILE} <= listing.by_name.keys()
        if info is None:
            return common or holds_ranks(location, listing)
        said = _description(location, info)
        if common:
            return said is None or _KEY in said
        return said is not None and said.get(_KEY) == _BACKEND

    def refuse_keys(self, location: Location, keys: Iterable[str]) -> None:
        """Refuse a save of 0.19 without its description, and a save of Megatron-FSDP.

        Raises:
            SourceError: `checkpoint.incomplete`, `source.unsupported`.

        Source: megatron-core 0.19.2 `dist_checkpointing/serialization.py` (`save`: `metadata.json` is written last, and
        `common_state` is an entry of the shards), Megatron-LM `training/checkpointing.py` (`fsdp_dtensor` is saved by
        `torch.distributed.checkpoint.save` alone).
        """
        for key in keys:
            if key.startswith(_OF_SHARDS):
                raise SourceError(
                    "checkpoint.incomplete",
                    f"{printable(location.url)} holds {printable(key)} of a save of Megatron-core, and no valid "
                    f"{DESCRIPTION}, which the save writes last",
                    fix="copy the checkpoint again if it is complete where it was saved; else name an older iteration: "
                    f"reshard ls {shlex.quote(location.url.rpartition('/')[0])}",
                )
            if key.startswith(_OF_FSDP):
                raise SourceError(
                    "source.unsupported",
                    f"{printable(location.url)} is a save of Megatron-FSDP ({printable(key)}), which is not read yet",
                    fix="save the run as torch_dist, without Megatron-FSDP",
                )

    def pointed_directory(self, name: str, text: str) -> str | None:
        """The directory of the iteration that the tracker names by its number."""
        numbered = name == TRACKER and re.fullmatch(r"\d{1,18}", text) is not None
        return STEP_DIRECTORY.format(int(text)) if numbered else None

    def tracked_tag(self, location: Location, listing: Listing) -> str | None:
        """The directory of the iteration in `latest_checkpointed_iteration.txt`, or `release`.

        Source: Megatron-LM `training/checkpointing.py` (`read_metadata`, `get_checkpoint_name`).
        """
        info, state = listing.by_name.get(TRACKER), listing.by_name.get(LATEST_STATE)
        if info is None and state is not None:
            # Of Megatron-Bridge, whose first versions wrote no other tracker.
            step = _count(SourceFile(location.store, LATEST_STATE, (state,)), "step")
            tag = None if step is None else STEP_DIRECTORY.format(step)
            return tag if tag in listing.directories else None
        if info is None or info.size_bytes > _MOST_BYTES:
            return None
        text = read_bytes(location.store, info).decode("ascii", "replace").strip()
        tag = self.pointed_directory(TRACKER, text) or text
        return tag if tag in listing.directories else None


class _Completion(Completion):
    """The checkpoint that a request means, in the terms of this format."""

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """The members of param groups, unless experts get groups of their own: a run makes its groups anew."""
        return () if request.layout.ep > 1 else (Question.MEMBERS,)

    def reads_model_files(self, request: ConvertRequest) -> bool:
        """True if heads are to be counted: `--names` takes their number from `config.json`."""
        return request.names in _NAMES

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint with a damaged optimizer left out or repaired, and under the names that the request says.

        Raises:
            RequestError: `request.invalid` for a source of another format, `request.unsatisfiable` for names that no
                rule explains; as `repaired`.
            SourceError: As `repaired`.
        """
        if is_megatron_deepspeed(checkpoint, request):
            return renamed_from_deepspeed(checkpoint, request)
        checkpoint = with_loss_scale(self._without_damage(checkpoint, request), request)
        if goes_on_in_deepspeed(checkpoint, request):
            return renamed_to_deepspeed(checkpoint, request)
        return renamed(checkpoint, request)

    @staticmethod
    def _without_damage(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        policy = request.options.of(MegatronOptions).damaged
        if policy in (None, DamagedPolicy.REFUSE):
            return checkpoint
        if not isinstance(checkpoint.facts, MegatronFacts):
            raise RequestError(
                "request.invalid",
                f"--damaged: for checkpoints of Megatron-core, and {printable(checkpoint.url)} is {checkpoint.format}",
                fix="leave it out",
            )
        if policy is not DamagedPolicy.DROP_OPTIMIZER:
            facts = checkpoint.facts
            return repaired(checkpoint, facts, request) if isinstance(facts, SuspectFacts) else checkpoint
        bare = (replace(p, states={}, scalars={}, group=None) for p in checkpoint.parameters)
        return replace(
            checkpoint,
            parameters=tuple(bare),
            optimizer=None,
            agreements=tuple(a for a in checkpoint.agreements if a.code != DAMAGED),
            undecided=(),
            assumed=(),
            no_optimizer="it is left out (--damaged drop-optimizer)",
        )


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    def layout_fields(self, group: ParamGroup) -> Set[str]:
        """The flag of groups of experts: a run without expert parallelism has the same groups without it."""
        return frozenset({OF_EXPERTS})

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """A distributed checkpoint for any layout, of a checkpoint of Megatron-core."""
        if not isinstance(tried.checkpoint.facts, MegatronFacts):
            return []
        to, refusal = TargetFormat.MEGATRON, tried.refusal(TargetFormat.MEGATRON)
        if refusal is not None:
            return [tried.impossible(to, refusal)]
        return [tried.possible(to, "any number of ranks", f"--to {to}")]

    def cautions(self, checkpoint: Checkpoint) -> list[str]:
        """A note if the arguments of the run say that the optimizer states may be shifted."""
        said = checkpoint.facts.caution() if isinstance(checkpoint.facts, SuspectFacts) else None
        return [] if said is None else [said]


class Megatron(Format):
    """`torch_dist`, and the older directories of ranks."""

    name = "megatron"
    discovery = _Discovery()
    completion = _Completion()
    presentation = _Presentation()
    targets = ("megatron",)

    def writer(self, target: str) -> Writer:
        """The writer of distributed checkpoints, and of files for one layout."""
        return MegatronWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse arguments of Megatron-LM that nothing takes, and rules for names that no name asks for.

        Raises:
            RequestError: `request.invalid`.
        """
        names = request.names
        args = request.options.of(MegatronOptions).megatron_args
        if args is not None and request.to not in self.targets and names not in BACK:
            text = f"--megatron-args: for --to megatron, and for --names {' or '.join(BACK)}"
            raise RequestError("request.invalid", text, fix="leave --megatron-args out")
        said = request.options.of(MegatronOptions).hf_rules
        if names is NameScheme.HUGGING_FACE and request.to in self.targets:
            text = f"--to {request.to} writes the names of Megatron-core, not those of Hugging Face"
            raise RequestError("request.invalid", text, fix="leave --names out, or --names megatron-core")
        if said is None:
            return
        if names in BACK and said not in ORDERS:
            text = f"--hf-rules for --names {names} is {' or '.join(ORDERS)}"
            raise RequestError("request.invalid", text, fix="leave --hf-rules out, or name one of these")
        if names not in (*_NAMES, *BACK):
            text = "--hf-rules says how --names hf and --names megatron-core rename"
            raise RequestError("request.invalid", text, fix="add --names hf")
        if said not in ORDERS:
            requested_family(said)

    def layout_for(self, checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
        """A distributed checkpoint for any tensor, pipeline and data parallelism, of the launch's groups of experts."""
        if launch.zero_stage is not None:
            raise RequestError(
                "request.invalid",
                "--zero-stage: the source is of Megatron-core, and its run loads nothing else",
                fix="for a run of DeepSpeed: --to zero; else leave it out",
            )
        sizes = launch.sizes(checkpoint.world, ("tp", "pp"))
        ep = launch.ep or checkpoint.world.get("ep", 1)
        args = launch.megatron_args
        return ResumeLayout(
            to=TargetFormat.MEGATRON,
            layout=RunLayout.model_validate({**sizes, "ep": ep}),
            free=("dp", "tp", "pp"),
            options={} if args is None else {self.name: {"megatron_args": args}},
            dtype=launch.dtype,
            identity=identity_of({"to": TargetFormat.MEGATRON, "ep": ep}),
            label="-".join([TargetFormat.MEGATRON, *([f"ep{ep}"] if ep > 1 else [])]),
        )

    def fits(self, checkpoint: Checkpoint, wanted: ResumeLayout) -> bool:
        """True if Megatron-core loads these files itself at the layout.

        Buckets and directories of ranks are for the tensor, pipeline and expert parallelism that saved them. Otherwise
        only the number of optimizers counts: with several expert-parallel ranks, experts have one of their own.
        """
        layout, ep = wanted.layout, checkpoint.world.get("ep", 1)
        if wanted.dtype is not None:
            return False
        if isinstance(checkpoint.facts, MegatronFacts) and checkpoint.facts.any_layout:
            return (ep > 1) is (layout.ep > 1)
        known = layout.model_dump(include={"tp", "pp"}, exclude_unset=True)
        return ep == layout.ep and all(known.get(axis) == checkpoint.world.get(axis) for axis in ("tp", "pp"))
