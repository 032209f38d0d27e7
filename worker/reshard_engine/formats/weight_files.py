"""Reads weights in one file or in shards, as safetensors or as `torch.save` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from reshard.errors import ReshardError, SourceError, counted, listed, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.containers.safetensors import open_safetensors_file
from reshard_engine.containers.source_file import SourceFile, open_all, parse_json
from reshard_engine.containers.torch_file import TorchFile, TreeTensors, open_torch_file, place_of
from reshard_engine.formats.carried import NotCarriedKeys
from reshard_engine.formats.format import ReadOptions
from reshard_engine.formats.model_weights import checked_name
from reshard_engine.formats.trainer_files import TRAINER_STATE
from reshard_engine.pickles.nodes import Node, PTensor, kind_of, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rebuild import refuse_meta
from reshard_engine.pickles.trees import is_extra_state
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, Store, parent_and_name, read_bytes
from reshard_engine.tensors.dtypes import BY_NAME, Dtype
from reshard_engine.tensors.layout import MAX_NAME_BYTES
from reshard_engine.tensors.shard_map import ShardMapBuilder

# Finds the weights files of a directory: one file, or shards that an index names.
#
# Source: transformers 5.23.0 `utils/__init__.py` (names), `trainer.py` (`optimizer.pt`, `optimizer.bin`,
# `trainer_state.json`), huggingface_hub 2.4.0 `constants.py` (shard pattern), accelerate 1.15.0 `utils/fsdp_utils.py`
# and torch_checkpointing 0.1.1 (optimizer files by number and rank).

_SHARD = re.compile(r"(?P<stem>.+)-[0-9]{5,6}-of-[0-9]{5,6}")
_INDEX = ".index.json"
_DIFFUSERS = "diffusion_pytorch_model"
"""The stem of a model's weights under diffusers."""
_OPTIMIZER = re.compile(r"optimizer(_[0-9]+)?(_rank[0-9]+)?\.(bin|pt)")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one form in a directory, by their names."""

    suffix: str
    """The suffix, such as `.safetensors`."""
    named: dict[str, ObjectInfo]
    """All files with the suffix."""
    indexes: dict[str, ObjectInfo]
    optimizers: tuple[str, ...] = ()
    """Files of optimizer states beside the weights, which are not read."""
    trainers: bool = False
    """True if the directory is a Trainer's `checkpoint-N`."""

    @property
    def no_optimizer(self) -> str:
        """The reason why the weights come without optimizer states, a part of a sentence."""
        if self.optimizers:
            return unread_optimizers(self.optimizers, "the weights")
        return "the Trainer saved the weights alone, as with save_only_model" if self.trainers else ""

    @property
    def singles(self) -> list[str]:
        """The names of files that are not shards."""
        return [n for n in self.named if _SHARD.fullmatch(n.removesuffix(self.suffix)) is None]

    @property
    def present(self) -> bool:
        """True if a file or an index of this form exists."""
        return bool(self.named or self.indexes)

    def shards_of(self, stem: str) -> set[str]:
        """The names of the shards with this stem."""
        matches = ((n, _SHARD.fullmatch(n.removesuffix(self.suffix))) for n in self.named)
        return {n for n, found in matches if found is not None and found["stem"] == stem}

    def chosen(self, preferred: str) -> str:
        """The weights file, or the index of the shards.

        Args:
            preferred: The stem that takes precedence, such as `model`.

        Raises:
            SourceError: `checkpoint.ambiguous` if several files are possible, `checkpoint.incomplete` for shards
                without an index.
        """
        candidates = [*self.indexes, *self.singles]
        wanted = {f"{preferred}{self.suffix}", f"{preferred}{self.suffix}{_INDEX}"}
        usual = [n for n in candidates if n in wanted]
        if len(usual) == 1 or len(candidates) == 1:
            return (usual or candidates)[0]
        if candidates:
            raise SourceError(
                "checkpoint.ambiguous",
                f"several files could be the weights: {listed(usual or candidates)}",
                fix="move the right one into a directory of its own",
            )
        raise SourceError(
            "checkpoint.incomplete",
            f"{len(self.named)} shards of weights, and no *{self.suffix}{_INDEX} that lists their contents",
            fix=f"copy the *{self.suffix}{_INDEX} too",
        )


def optimizers_among(names: Iterable[str]) -> tuple[str, ...]:
    """The names of files of optimizer states."""
    return tuple(sorted(n for n in names if _OPTIMIZER.fullmatch(n)))


def unread_optimizers(names: Sequence[str], where: str) -> str:
    """A statement that files of optimizer states are not read; empty if there are none.

    Args:
        names: The files.
        where: What they lie beside.
    """
    are = f"lies beside {where} and is" if len(names) == 1 else f"lie beside {where} and are"
    return f"{listed(names)} {are} not read yet" if names else ""


def weight_files(listing: Listing, suffix: str, stems: re.Pattern[str]) -> WeightFiles:
    """The weights files of a directory that end with `suffix` and whose stem matches."""
    named: dict[str, ObjectInfo] = {}
    indexes: dict[str, ObjectInfo] = {}
    names = listing.by_name
    for name, info in names.items():
        table = indexes if name.endswith(suffix + _INDEX) else named if name.endswith(suffix) else None
        stem = name.removesuffix(_INDEX).removesuffix(suffix)
        shard = _SHARD.fullmatch(stem)
        if table is not None and stems.fullmatch(shard["stem"] if shard else stem):
            table[name] = info
    return WeightFiles(suffix, named, indexes, optimizers_among(names), trainers=TRAINER_STATE in names)


def stem_of_index(name: str, suffix: str) -> str:
    """`model` for `model.safetensors.index.json`."""
    return name.removesuffix(_INDEX).removesuffix(suffix)


# The index of sharded weights: a map from names to files.
#
# Source: transformers 5.23.0 and huggingface_hub 2.4.0 write `{"metadata": {...}, "weight_map": {name: file}}`;
# the metadata hold `total_size` in bytes and, from huggingface_hub, tied aliases with their owners' names.

MAX_INDEX_BYTES = 100_000_000
_CODE = "checkpoint.bad_index"
METADATA = "metadata of a weights file"
"""Why other metadata of weights files are not carried."""
_PLAIN = re.compile(rf"[^/\\.][^/\\]{{0,{MAX_NAME_BYTES - 1}}}")
_FIX = "copy the index and its shards again, all from one save"


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """A parsed index."""

    name: str
    names_by_file: Mapping[str, frozenset[str]]
    texts: Mapping[str, str]
    """The metadata whose values are texts."""
    total_bytes: int | None

    def check_shard(self, file: str, held: set[str], aliases: set[str]) -> None:
        """Compare the names in a shard with the index.

        Raises:
            SourceError: `checkpoint.bad_index` if a name is only in the shard or only in the index.
        """
        wanted = self.names_by_file[file]
        if missing := sorted(wanted - held - aliases):
            raise self.bad(
                f"of the names of {printable(file)}, {counted(len(missing), 'is', 'are')} not in it, "
                f"such as {printable(missing[0])}"
            )
        if extra := sorted(held - wanted):
            raise self.bad(f"{printable(file)} holds {counted(len(extra), 'name')} more, such as {printable(extra[0])}")

    def bad(self, text: str) -> SourceError:
        """The error for a wrong index."""
        return SourceError(_CODE, f"{printable(self.name)}: {text}", fix=_FIX)


def read_index(store: Store, info: ObjectInfo, *, suffix: str) -> WeightIndex:
    """Read an index; every file that it names must be a plain name with the suffix.

    Raises:
        SourceError: `checkpoint.bad_index`.
    """
    name = printable(info.path.rpartition("/")[2])
    if info.size_bytes > MAX_INDEX_BYTES:
        raise SourceError(_CODE, f"{name} has {info.size_bytes} bytes, the limit is {MAX_INDEX_BYTES}", fix=_FIX)
    root = parse_json(read_bytes(store, info), code=_CODE, what=name)
    entries = cast("dict[str, object]", root) if isinstance(root, dict) else {}
    weight_map = entries.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(_CODE, f"{name} has no weight_map", fix=_FIX)
    by_file: dict[str, set[str]] = {}
    for key, file in cast("dict[str, object]", weight_map).items():
        by_file.setdefault(_plain_name(file, suffix, f"{name}: {printable(key)}"), set()).add(key)
    raw = entries.get("metadata")
    metadata = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
    total = metadata.get("total_size")
    return WeightIndex(
        name,
        {f: frozenset(n) for f, n in sorted(by_file.items())},
        {k: v for k, v in metadata.items() if isinstance(v, str)},
        total if type(total) is int else None,
    )


def _plain_name(file: object, suffix: str, what: str) -> str:
    if (
        not isinstance(file, str)
        or _PLAIN.fullmatch(file) is None
        or not (file.isprintable() and file.endswith(suffix))
    ):
        raise SourceError(
            _CODE, f"{what} is in {printable(file)!r}, which is not a *{suffix} file beside the index", fix=_FIX
        )
    return file


# The weights of a directory as a checkpoint, whatever the form of their files.


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of a file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of the first element in the file, in bytes."""
    stride: tuple[int, ...] | None = None
    """Strides in elements; None if the tensor is packed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One parsed file."""

    file: SourceFile
    tensors: Sequence[HeldTensor]
    aliases: Mapping[str, str]
    """Tied names that the file lists beside their owners."""
    texts: Mapping[str, str]
    """Other metadata of the file."""
    extra_states: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Entries of the state dict that are not tensors, by name."""
    torch_file: TorchFile | None = None
    """The parsed file, if torch wrote it."""


@dataclass(frozen=True, slots=True)
class OpenedWeights:
    """The parsed weights files of a directory, whose names an index has confirmed."""

    shards: Sequence[Shard]
    shared: Mapping[str, str]
    """Tied names, each with its owner."""
    rest: Sequence[str]
    """Keys of metadata that nothing uses."""
    index: WeightIndex | None


def open_weights(
    location: Location, files: WeightFiles, parse: Callable[[SourceFile], Shard], *, preferred: str
) -> OpenedWeights:
    """Open the weights files of a directory.

    Raises:
        SourceError: `checkpoint.*`, `name.invalid`, and all errors of `parse`.
    """
    chosen = files.chosen(preferred)
    index = None
    names = [chosen]
    if chosen in files.indexes:
        index = read_index(location.store, files.indexes[chosen], suffix=files.suffix)
        _check_files(index, files, stem_of_index(chosen, files.suffix))
        names = list(index.names_by_file)
    sources = [SourceFile(location.store, n, (files.named[n],)) for n in names]
    shards = open_all(sources, parse)
    texts = {k: v for s in shards for k, v in s.texts.items()} | (dict(index.texts) if index else {})
    shared, rest = _aliases(texts, {checked_name(t.name) for s in shards for t in s.tensors})
    for shard in shards:
        shared |= {checked_name(a): o for a, o in shard.aliases.items()}
    if index is not None:
        for shard in shards:
            index.check_shard(shard.file.name, {t.name for t in shard.tensors}, {*shared, *shard.extra_states})
    return OpenedWeights(shards, shared, rest, index)


def _optimizers_above(location: Location, files: WeightFiles) -> str:
    """A statement that the optimizer of a diffusers script is not read, which Accelerate saves one directory up.

    Source: accelerate 1.15.0 `accelerator.py` (`register_save_state_pre_hook`), with which the training scripts of
    diffusers save each model into a directory of its own.
    """
    parent = parent_and_name(location.path)[0]
    if files.optimizers or not parent or not any(n.startswith(_DIFFUSERS) for n in (*files.named, *files.indexes)):
        return ""
    with suppress(ReshardError):  # a service may not show the directory around its roots
        names = optimizers_among(location.store.list_directory(parent).by_name)
        return unread_optimizers(names, "the directory of the weights")
    return ""


def read_weights(
    location: Location,
    files: WeightFiles,
    parse: Callable[[SourceFile], Shard],
    *,
    preferred: str,
    form: str,
    options: ReadOptions,
) -> Checkpoint:
    """Read the weights of a directory as a checkpoint without optimizer.

    Raises:
        SourceError: `checkpoint.*`, `name.invalid`, and all errors of `parse`.
    """
    opened = open_weights(location, files, parse, preferred=preferred)
    shards = opened.shards
    builder = ShardMapBuilder()
    parameters: list[Parameter] = []
    for number, shard in enumerate(shards):
        for held in shard.tensors:
            tensor = builder.tensor(held.name, "weight", held.dtype, held.shape)
            builder.whole(tensor, file=number, offset=held.offset, stride=held.stride)
            parameters.append(Parameter(held.name, held.shape, None, tensor))
    trees = TreeTensors(builder, {s.file: i for i, s in enumerate(shards)})
    extra_states = {
        n: trees.carried(node, s.torch_file)
        for s in shards
        if s.torch_file is not None
        for n, node in s.extra_states.items()
    }
    shard_map = builder.build()
    noted = NotCarriedKeys()
    noted.add_all((f"__metadata__.{k}" for k in opened.rest), METADATA)
    above = _optimizers_above(location, files)
    for name in files.optimizers:
        noted.add(name, "a file of optimizer states, which is not read yet", file=name)
    return Checkpoint(
        url=location.url,
        tag=options.tag,
        format=form,
        framework_version=None,
        world={},
        files=tuple(s.file for s in shards),
        shard_map=shard_map,
        parameters=tuple(parameters),
        buffers=(),
        shared=opened.shared,
        optimizer=None,
        no_optimizer=files.no_optimizer or above,
        extra_states=extra_states,
        not_carried=noted.found(),
        foreign_globals=tuple(sorted(options.ledger.foreign)),
        warnings=(
            *([above] if above else []),
            *_warnings(opened.rest, opened.index, shard_map.read_bytes_of(range(len(parameters)))),
        ),
    )


def _check_files(index: WeightIndex, files: WeightFiles, stem: str) -> None:
    if missing := [n for n in index.names_by_file if n not in files.named]:
        raise index.bad(
            f"of {counted(len(index.names_by_file), 'shard')}, {counted(len(missing), 'is', 'are')} missing: "
            f"{printable(missing[0])}"
        )
    if unnamed := sorted(files.shards_of(stem) - index.names_by_file.keys()):
        raise index.bad(f"{printable(unnamed[0])} exists, but the index does not name it")


def _aliases(texts: Mapping[str, str], names: set[str]) -> tuple[dict[str, str], list[str]]:
    """The metadata texts that name the owner of a tied name, and the keys of the other texts."""
    shared = {checked_name(k): v for k, v in texts.items() if v in names and k not in names}
    return shared, [k for k in texts if k not in shared and k != "format"]


def _warnings(rest: Sequence[str], index: WeightIndex | None, total_bytes: int) -> list[str]:
    found: list[str] = []
    if rest:
        listed = ", ".join(printable(k, max_chars=64) for k in rest[:8])
        found.append(f"metadata of the weights files are not carried over: {listed}")
    if index is not None and index.total_bytes not in (None, total_bytes):
        found.append(f"{index.name} says {counted(index.total_bytes, 'byte')}, the tensors have {total_bytes}")
    return found


# Weights as safetensors: `model.safetensors`, or shards with an index.
#
# Source: huggingface_hub 2.4.0 `serialization/_torch.py` (tied aliases in the metadata), torch 2.13.0
# `distributed/checkpoint/hf_storage.py` (`DCP_SHARDING_INFO`: the file's tensors are parts of larger ones).

_ANY_STEM = re.compile(r".+")


class SafetensorsReader:
    """Reads safetensors weights."""

    family = "safetensors"

    def recognises(self, listing: Listing) -> bool:
        """True if there are safetensors files, or an index of such files."""
        return safetensors_files(listing).present

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights of a directory; the stem `model` takes precedence over other names.

        Raises:
            SourceError: `safetensors.*`, `checkpoint.*`, `tensor.unsupported`, `source.unsupported`, `name.invalid`.
        """
        return read_weights(
            location,
            safetensors_files(listing),
            parse_safetensors,
            preferred="model",
            form="safetensors",
            options=options,
        )


def safetensors_files(listing: Listing) -> WeightFiles:
    """The safetensors files of a directory."""
    return weight_files(listing, ".safetensors", _ANY_STEM)


def parse_safetensors(file: SourceFile) -> Shard:
    """The tensors of a safetensors file."""
    parsed = open_safetensors_file(file)
    if "DCP_SHARDING_INFO" in parsed.metadata:
        raise SourceError(
            "source.unsupported",
            f"{printable(file.name)} holds parts of tensors, as PyTorch DCP writes them",
            fix="consolidate it with torch.distributed.checkpoint first",
        )
    tensors = [HeldTensor(t.name, t.dtype, t.shape, t.offset) for t in parsed.tensors]
    return Shard(file, tensors, {}, parsed.metadata)


# Weights as `torch.save` writes them: `pytorch_model.bin`, or shards with an index.
#
# Source: transformers 5.23.0 `utils/__init__.py`, peft `adapter_model.bin`, accelerate 1.15.0 `utils/fsdp_utils.py`
# (names; `pytorch_model_fsdp.bin` holds whole tensors by name: FULL_STATE_DICT).


# Other .bin files beside weights are not weights: training_args.bin, optimizer.bin, scheduler.bin, ...
_STEMS = re.compile(r"pytorch_model|pytorch_model_fsdp|adapter_model|diffusion_pytorch_model")
_STEMS_OF_INDEX = re.compile(rf"{_STEMS.pattern}|model")
"""torchtune writes `pytorch_model.bin.index.json` for shards of another stem, `model-00001-of-00002.bin`.

Source: torchtune 0.6.1 `training/checkpointing/_checkpointer.py` (`FullModelHFCheckpointer`, `SHARD_FNAME`)."""


class TorchWeightsReader:
    """Reads `pytorch_model.bin` weights."""

    family = "torch-weights"

    def recognises(self, listing: Listing) -> bool:
        """True if there are files with Hugging Face's names for such weights."""
        return torch_weight_files(listing).present

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights of a directory. Names that share their elements are tied; the first one is the owner.

        Raises:
            SourceError: `zip.*`, `pickle.*`, `tensor.*`, `checkpoint.*`, `source.unsupported`, `name.invalid`.
        """

        def parse(file: SourceFile) -> Shard:
            return parse_torch_weights(file, options.ledger)

        return read_weights(
            location,
            torch_weight_files(listing),
            parse,
            preferred="pytorch_model",
            form="torch-weights",
            options=options,
        )


def torch_weight_files(listing: Listing) -> WeightFiles:
    """The weights files of a directory that torch saved under Hugging Face's names."""
    indexed = f"pytorch_model.bin{_INDEX}" in listing.by_name
    return weight_files(listing, ".bin", _STEMS_OF_INDEX if indexed else _STEMS)


def parse_torch_weights(file: SourceFile, ledger: OpaqueLedger) -> Shard:
    """The tensors of a flat state dict that torch saved."""
    parsed = open_torch_file(file, ledger)
    owners: dict[tuple[object, ...], str] = {}
    tensors: list[HeldTensor] = []
    aliases: dict[str, str] = {}
    extra_states: dict[str, Node] = {}
    entries = mapping_items(parsed.root, what=printable(file.name))
    refuse_meta(entries, printable(file.name))
    for key, value in entries.items():
        if isinstance(key, str) and is_extra_state(key) and not isinstance(value, PTensor):
            extra_states[checked_name(key)] = value
            continue
        if not isinstance(key, str) or not isinstance(value, PTensor):
            raise SourceError(
                "source.unsupported",
                f"{printable(file.name)}: {printable(key)} is not the name of a tensor (its value is {kind_of(value)})",
                fix="only a flat mapping of names to tensors is read: save `model.state_dict()` alone",
            )
        name = checked_name(key)
        owner = owners.setdefault(place_of(value), name) if value.numel else name
        if owner != name:
            aliases[name] = owner
            continue
        offset = parsed.tensor_offset(value) if value.numel else 0
        tensors.append(HeldTensor(name, BY_NAME[value.dtype], value.shape, offset, value.stride))
    return Shard(parsed.file, tensors, aliases, {}, extra_states, parsed)
