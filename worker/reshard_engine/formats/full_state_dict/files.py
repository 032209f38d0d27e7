"""Training files with whole tensors: their names, and what of a model, an optimizer and a run each of them holds.

- One file of `torch.save`, of one process or of DDP: a mapping with the model's state dict under `model`,
  `model_state_dict` or `state_dict`, and beside it optimizers, schedulers and values of the script. Lightning's
  checkpoints are of this form, too.
- `pytorch_model_fsdp.bin` with `optimizer.bin`, as Accelerate and the Trainer save under FULL_STATE_DICT.
- `optimizer.pt` beside the weights of `save_pretrained`, as the Trainer saves without FSDP and DeepSpeed.
- torchtune's output directory: `recipe_state/recipe_state.pt` and the weights of its epoch in `epoch_N`. Older versions
  saved `recipe_state.pt` beside the weights.

Source: torch 2.13.0 `serialization.py`; lightning 2.6.6 `pytorch/trainer/connectors/checkpoint_connector.py`
(`dump_checkpoint`); accelerate 1.15.0 `utils/fsdp_utils.py` (FULL_STATE_DICT), `accelerator.py` (`save_state`:
optimizer number i is of model number i); transformers 5.23.0 `trainer.py` (`_save_optimizer_and_scheduler`); torchtune
0.6.1 `training/checkpointing/_checkpointer.py`, `_utils.py` (`RECIPE_STATE_DIRNAME`); verified by running.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import NotCarried
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Question, Undecided
from reshard_engine.containers.source_file import SourceFile, open_all, parse_json
from reshard_engine.containers.torch_file import TorchFile, open_torch_file, place_of
from reshard_engine.formats.carried import OF_ANOTHER, named
from reshard_engine.formats.model_weights import SHARDED_NAMES
from reshard_engine.formats.numbered import (
    Sections,
    Several,
    entries_of,
    is_model,
    is_optimizer,
    numbers_parameters,
    shape_of,
)
from reshard_engine.formats.trainer_files import (
    ARGUMENTS,
    FULL,
    MADE_ANEW,
    META,
    NUMBERED_OPTIMIZER,
    OPTIMIZERS,
    SCRIPTS_FILE,
    TRAINER_STATE,
    beside,
    chosen_model,
    is_companion,
    is_scheduler,
    read_companions,
)
from reshard_engine.formats.weight_files import (
    METADATA,
    OpenedWeights,
    open_weights,
    parse_safetensors,
    parse_torch_weights,
    safetensors_files,
    torch_weight_files,
)
from reshard_engine.pickles.nodes import (
    Node,
    PObject,
    PTensor,
    is_mapping,
    kind_of,
    mapping_items,
    script_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rebuild import made_of_tensors, refuse_meta
from reshard_engine.pickles.trees import is_extra_state
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes
from reshard_engine.tensors.dtypes import BY_NAME, Dtype
from reshard_engine.tensors.shard_map import is_packed

RECIPE = "recipe_state.pt"
"""The state of a recipe of torchtune."""
RECIPES = "recipe_state"
"""The directory that holds it beside those of epochs."""
_EPOCH, _EPOCHS_RUN = "epoch_{}", "epochs_run"
_OF_ONE_EPOCH = "model-00001-of-00001.bin"
"""The only file of weights under torchtune's own names."""
_SINGLE = (".pt", ".pth", ".ckpt", ".pth.tar")
"""Suffixes of the names that scripts give a file of `torch.save`."""
_MODELS = ("state_dict", "model", "model_state_dict")
_LIGHTNING, _STEP = "pytorch-lightning_version", "global_step"
_OF_MEGATRON = frozenset({"checkpoint_version", "args", "iteration"})
"""Keys of Megatron-LM's files. Source: Megatron-LM `training/checkpointing.py` (`generate_state_dict`)."""
_BESIDE = "it lies beside the model's file, and nothing reads it"
_BESIDE_MODEL = "it lies beside pytorch_model_fsdp.bin, from which the weights are read"
_MODEL_FILES = "configuration and tokenizer: --model-files with this directory copies them beside weights"
_DIRECTORY = "name the directory that holds it"
_SAVE_STATE_DICT = (
    "only the code of its class can load a pickled object: load the file there with torch.load, and save what it "
    "holds: torch.save(model.state_dict(), FILE)"
)
_CONFIG_LIMIT_BYTES = 1 << 20
_LEAST_DIMS = 2
"""The dimensions of a matrix: vectors of different layers are often equal, and none is tied."""


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the model, and where a file holds it."""

    dtype: Dtype
    shape: tuple[int, ...]
    file: SourceFile
    at: int
    """Byte offset of the first element in the file."""
    stride: tuple[int, ...] | None
    """Strides in elements; None if it is packed."""
    place: object = None
    """A key that is equal for two tensors of one memory of the run; None if the file does not tell."""
    sums: object = None
    """A key that is equal for matrices of equal bytes; None if the file has no sum of them."""


@dataclass(frozen=True, slots=True)
class InFile:
    """A value, the file that holds it, and its place in it."""

    node: Node
    parsed: TorchFile
    key: str = ""
    """Its key in the file; empty for the whole value."""

    @property
    def what(self) -> str:
        """Its place for messages."""
        name = printable(self.parsed.file.name)
        return f"{name}: {printable(self.key)}" if self.key else name


@dataclass(slots=True)
class Opened:
    """All that the files hold, by what it is."""

    label: str
    """The format's name for people."""
    tensors: dict[str, WholeTensor]
    """The model's tensors by name, in the order of the files."""
    files: list[SourceFile]
    """Files of the model; those of other values are added where they are carried."""
    others: tuple[str, ...] = ()
    """Entries of the model's state dict that are no tensors, and unknown."""
    extra_states: dict[str, InFile] = field(default_factory=dict[str, InFile])
    shared: dict[str, str] = field(default_factory=dict[str, str])
    """Tied names that are in no file, each with its owner."""
    ordered: bool = True
    """True if the files keep the model's order."""
    counts_model: bool = True
    """True if an optimizer of one group is taken to be made of `model.parameters()`."""
    by_model: bool = False
    """True for Lightning, which may number the model's parameters over all groups."""
    names_alone: bool = False
    """True if an optimizer that numbers parameters, or has other names, is none of these weights'."""
    optimizer: InFile | None = None
    optimizers: int = 0
    """Number of optimizers in the files."""
    of_others: dict[str, InFile] = field(default_factory=dict[str, InFile])
    """Models and optimizers of the file that are not read, by their keys."""
    schedulers: dict[str, InFile] = field(default_factory=dict[str, InFile])
    client_state: dict[str | int, InFile] = field(default_factory=dict[str | int, InFile])
    rng: list[InFile] = field(default_factory=list[InFile])
    """Random states by rank."""
    model_key: str | None = None
    """The key of the model in a script's file; empty if the model is all that the file holds."""
    optimizer_key: str | None = None
    """The key of the optimizer in a script's file, where it is not one of several below a key."""
    texts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    steps: int | None = None
    not_carried: list[NotCarried] = field(default_factory=list[NotCarried])
    undecided: list[Undecided] = field(default_factory=list[Undecided])
    warnings: list[str] = field(default_factory=list[str])

    @property
    def torch_files(self) -> list[TorchFile]:
        """The parsed files of all values that may be carried."""
        held = [*self.extra_states.values(), *self.schedulers.values(), *self.client_state.values(), *self.rng]
        held += self.of_others.values()
        held += [] if self.optimizer is None else [self.optimizer]
        return [*{v.parsed.file: v.parsed for v in held}.values()]


# Tensors of a model in a file of torch.


def _add_model(found: Opened, node: Node, parsed: TorchFile, what: str) -> None:
    """Add the entries of a model's state dict.

    Raises:
        SourceError: `checkpoint.incomplete` for a shard, `source.unsupported` for other tensors that are no plain ones.
    """
    others: list[str] = []
    for key, value in mapping_items(node, what=what).items():
        name = str(key)
        if isinstance(value, PTensor):
            found.tensors[name] = whole_tensor(value, parsed)
        elif is_extra_state(name):
            found.extra_states[name] = InFile(value, parsed, name)
        elif (made := made_of_tensors(value)) is None:
            others.append(printable(name))
        elif made.kind.dotted in SHARDED_NAMES:
            raise SourceError(
                "checkpoint.incomplete",
                f"{what}: {printable(name)} is a {made.kind.name}, of which one rank's file holds the rank's share; "
                "there are the files of a run of 2 ranks or more, or a mesh of one",
                fix="name the directory with the files of all ranks, or save full tensors (full_tensor())",
            )
        else:
            raise SourceError(
                "source.unsupported",
                f"{what}: {printable(name)} is a {printable(made.kind.dotted)}, a tensor that is made of others",
                fix="save it as a plain tensor (dequantized), or name the directory of an older save",
            )
    found.others = (*found.others, *others)


def whole_tensor(tensor: PTensor, parsed: TorchFile) -> WholeTensor:
    """The place of a tensor in its file."""
    dtype, stride = BY_NAME[tensor.dtype], None if is_packed(tensor.shape, tensor.stride) else tensor.stride
    if not tensor.numel:
        return WholeTensor(dtype, tensor.shape, parsed.file, 0, None)
    record, at = parsed.storage_extent(tensor.storage), parsed.tensor_offset(tensor)
    begins = stride is None and record.offset == at  # FSDP2 pads storages at their ends
    known = begins and record.crc32 is not None and len(tensor.shape) >= _LEAST_DIMS
    sums = (dtype.name, tensor.shape, record.length_bytes, record.crc32) if known else None
    return WholeTensor(dtype, tensor.shape, parsed.file, at, stride, (parsed.file.name, *place_of(tensor)), sums)


# One file of `torch.save`.


def single_names(listing: Listing) -> list[str]:
    """The names of the files that may each hold a model and its optimizer together."""
    alone = len(listing.files) == 1  # Lightning's file beside shards has a name that scripts use as well
    names = (n for n in listing.by_name if n.endswith(_SINGLE) or n == _OF_ONE_EPOCH)
    names = (n for n in names if not is_companion(n) or (alone and n == META))
    return [n for n in names if n not in (NUMBERED_OPTIMIZER, RECIPE)]


def open_single(location: Location, listing: Listing, ledger: OpaqueLedger, choices: SourceChoices) -> Opened:
    """Read the only such file of a listing, and torchtune's state beside it; all other files are named.

    Raises:
        SourceError: As `_open_single`.
        RequestError: `request.invalid` for keys that are not there.
    """
    infos, (name,) = listing.by_name, single_names(listing)
    found = _open_single(SourceFile(location.store, name, (infos[name],)), ledger, choices)
    read = {name}
    if RECIPE in infos and found.optimizer is None and not found.undecided:
        found.label = "full-torchtune"
        _add_recipe(found, open_torch_file(SourceFile(location.store, RECIPE, (infos[RECIPE],)), ledger))
        read.add(RECIPE)
    found.not_carried += beside(listing, read.__contains__, companions=False, otherwise=_BESIDE)
    return found


def _open_single(file: SourceFile, ledger: OpaqueLedger, choices: SourceChoices) -> Opened:
    """Read one file of `torch.save`.

    Raises:
        SourceError: `source.unknown_kind` for a file without a model, `checkpoint.ambiguous` for a model under another
            key than the usual ones, `source.unsupported` for a rank's file of Megatron-LM.
        RequestError: `request.invalid` for keys that are not there.
    """
    parsed = open_torch_file(file, ledger)
    name = printable(file.name)
    if not is_mapping(parsed.root):
        raise _no_mapping(name, parsed.root)
    root = script_items(parsed.root, what=name)
    if is_model(parsed.root):
        found = Opened(SCRIPTS_FILE, {}, [parsed.file], model_key="")
        _add_model(found, parsed.root, parsed, name)
        _refuse_keys(choices, {"model_key", "optimizer_key", "scheduler_key"}, f"{name} is a state dict alone")
        return found
    if root.keys() >= _OF_MEGATRON:
        raise SourceError(
            "source.unsupported",
            f"{name} is a file of Megatron-LM, of one rank of its model parallelism",
            fix="name the directory of its iteration, such as iter_0000010, which holds the files of all ranks",
        )
    for key, node in {"": parsed.root, **root}.items():
        refuse_meta(entries_of(node), f"{name}: {printable(str(key))}" if key else name)
    sections = Sections.of(root)
    lightning = _LIGHTNING in root
    found = Opened("full-lightning" if lightning else SCRIPTS_FILE, {}, [parsed.file], by_model=lightning)
    chosen = _several(sections, choices.model_key, name).chosen(choices)
    found.model_key, found.optimizer_key = (key if key in root else None for key in (chosen.model, chosen.optimizer))
    _add_model(found, sections.models[chosen.model], parsed, f"{name}: {printable(chosen.model)}")
    found.undecided += chosen.undecided
    found.optimizers = len(sections.optimizers)
    unread = any(u.question is Question.OPTIMIZER for u in chosen.undecided)
    if chosen.optimizer is not None and not unread:
        found.optimizer = InFile(sections.optimizers[chosen.optimizer], parsed, chosen.optimizer)
    read = {chosen.model, None if unread else chosen.optimizer}
    rest = {**sections.models, **sections.optimizers}
    found.of_others = {key: InFile(node, parsed, key) for key, node in rest.items() if key not in read}
    found.schedulers = {key: InFile(node, parsed, key) for key, node in sections.schedulers.items()}
    found.client_state = {key: InFile(node, parsed, str(key)) for key, node in sections.rest.items()}
    steps = root.get(_STEP)
    found.steps = steps if lightning and type(steps) is int else None
    return found


def _no_mapping(name: str, root: Node) -> SourceError:
    """The error for a file that holds no mapping."""
    fix = _SAVE_STATE_DICT if isinstance(root, PObject) else _DIRECTORY
    return SourceError("source.unknown_kind", f"{name} holds {kind_of(root)}, no mapping", fix=fix)


def _several(sections: Sections, asked: str | None, name: str) -> Several:
    """The models and optimizers of a file, of which one pair is to be read.

    Raises:
        SourceError: `checkpoint.ambiguous` for a model under another key than the usual ones, which is the only one;
            `source.unknown_kind` if there is none.
    """
    models = sections.models
    if not models:
        rest = [printable(str(k)) for k in (*sections.optimizers, *sections.schedulers, *sections.rest)]
        text = f"{name} has the keys {listed(rest) or 'none'}, and no state dict of a model is among them"
        objects = {key: node for key, node in sections.rest.items() if isinstance(node, PObject)}
        usual = [key for key in objects if key in _MODELS] or list(objects)
        if usual:
            text += f": {printable(str(usual[0]))} is {kind_of(objects[usual[0]])}"
        fix = _SAVE_STATE_DICT if usual else f"{_DIRECTORY}, or a file that holds the model, too"
        raise SourceError("source.unknown_kind", text, fix=fix)
    usual = [key for key in _MODELS if key in models]
    if not usual and len(models) == 1 and asked is None:
        (only,) = map(printable, models)
        text = f"{name} holds no `model`, and {only} may be it"
        raise SourceError("checkpoint.ambiguous", text, fix=f"--model-key {shlex.quote(only)}")
    shapes = {
        key: {str(n): shape for n, t in entries_of(models[key]).items() if (shape := shape_of(t)) is not None}
        for key in (*usual, *(k for k in models if k not in usual))
    }
    return Several(name, shapes, sections.optimizers, bool(usual))


def _refuse_keys(choices: SourceChoices, names: set[str], why: str) -> None:
    if given := [f"--{n.replace('_', '-')}" for n in choices.given() if n in names]:
        raise RequestError("request.invalid", f"{why}, and {listed(given)} chooses", fix="leave it out")


# Two files, with those of a trainer beside them.


def holds_weights_with_optimizer(listing: Listing) -> bool:
    """True for weights of `save_pretrained` with the Trainer's optimizer, or the state of torchtune, beside them."""
    names = listing.by_name
    if NUMBERED_OPTIMIZER not in names and RECIPE not in names:
        return False
    return any(n in names for n in (*_usual("model", ".safetensors"), *_usual("pytorch_model", ".bin")))


def _usual(stem: str, suffix: str) -> tuple[str, str]:
    return f"{stem}{suffix}", f"{stem}{suffix}.index.json"


def open_pair(location: Location, listing: Listing, ledger: OpaqueLedger, choices: SourceChoices) -> Opened:
    """Read the full files of one model, of the optimizer with its number, and those beside them.

    Raises:
        SourceError: `checkpoint.ambiguous` for several models; as `read_companions`.
        RequestError: `request.invalid` for a model that is not there.
    """
    infos = listing.by_name
    held = {(m[1], int(m[2] or 0)): n for n in infos if (m := FULL.fullmatch(n)) is not None}
    models = {name.removesuffix(".bin"): number for (kind, number), name in held.items() if kind != OPTIMIZERS}
    optimizers = [name.removesuffix(".bin") for (kind, _), name in sorted(held.items()) if kind == OPTIMIZERS]
    chosen = chosen_model(printable(location.url), sorted(models, key=models.__getitem__), optimizers, choices)
    optimizer = held.get((OPTIMIZERS, models[chosen]))
    names = [f"{chosen}.bin", *([] if optimizer is None else [optimizer])]
    known = OpaqueLedger(ledger.policy, ledger.foreign, SHARDED_NAMES)
    parsed = open_all(
        [SourceFile(location.store, n, (infos[n],)) for n in names], lambda file: open_torch_file(file, known)
    )
    trainer = not infos.keys().isdisjoint((TRAINER_STATE, ARGUMENTS))
    found = Opened(f"fsdp-full-{'trainer' if trainer else 'accelerate'}", {}, [parsed[0].file], counts_model=False)
    _add_model(found, parsed[0].root, parsed[0], printable(names[0]))
    found.optimizer = InFile(parsed[1].root, parsed[1]) if optimizer is not None else None
    found.optimizers = sum(kind == OPTIMIZERS for kind, _ in held)
    reasons = {n: OF_ANOTHER for n in held.values() if n not in names}
    reasons |= {n: _BESIDE_MODEL for n in infos if n.startswith(("model", "adapter_model")) and ".safetensors" in n}
    _add_companions(found, location, listing, ledger, reasons, read={*names})
    return found


def open_weights_with_optimizer(
    location: Location, listing: Listing, ledger: OpaqueLedger, choices: SourceChoices
) -> Opened:
    """Read weights of `save_pretrained`, the optimizer beside them and a trainer's other files.

    Raises:
        SourceError: As `open_weights` and `read_companions`.
        RequestError: `request.invalid` for a choice of a model or an optimizer: there is one.
    """
    infos = listing.by_name
    _refuse_keys(choices, {"model_key", "optimizer_key"}, f"{printable(location.url)} holds one model")
    recipe = NUMBERED_OPTIMIZER not in infos
    safe = any(n in infos for n in _usual("model", ".safetensors"))
    if safe:
        weights = open_weights(location, safetensors_files(listing), parse_safetensors, preferred="model")
    else:
        weights = open_weights(
            location, torch_weight_files(listing), lambda f: parse_torch_weights(f, ledger), preferred="pytorch_model"
        )
    found = _of_weights(weights, ordered=not safe)
    trainer = not infos.keys().isdisjoint((TRAINER_STATE, ARGUMENTS))
    found.label = "full-torchtune" if recipe else "full-trainer" if trainer else "full-weights"
    name = RECIPE if recipe else NUMBERED_OPTIMIZER
    parsed = open_torch_file(SourceFile(location.store, name, (infos[name],)), ledger)
    if recipe:
        _add_recipe(found, parsed)
    else:
        found.optimizer, found.optimizers = InFile(parsed.root, parsed), 1
    if safe and not found.shared and _ties_embeddings(location, listing):
        found.warnings.append(_TIED)
    read = {name, *(s.file.name for s in weights.shards)}
    read |= set() if weights.index is None else {weights.index.name}
    _add_companions(found, location, listing, ledger, {}, read=read)
    return found


_TIED = (
    "config.json ties the word embeddings, and safetensors hold a tied tensor under its first name alone: no target "
    "has the second name, which get_state_dict asks for; load with DefaultLoadPlanner(allow_partial_load=True), as the "
    "model ties it itself"
)


def _ties_embeddings(location: Location, listing: Listing) -> bool:
    """True if the model's configuration says so.

    Raises:
        SourceError: `checkpoint.malformed` for a file that is no JSON.
    """
    info = listing.by_name.get("config.json")
    if info is None or info.size_bytes > _CONFIG_LIMIT_BYTES:
        return False
    config = parse_json(read_bytes(location.store, info), code="checkpoint.malformed", what="config.json")
    return isinstance(config, dict) and cast("dict[str, Any]", config).get("tie_word_embeddings") is True


def _of_weights(weights: OpenedWeights, *, ordered: bool) -> Opened:
    found = Opened("", {}, [s.file for s in weights.shards], ordered=ordered, counts_model=False)
    for shard in weights.shards:
        for held in shard.tensors:
            stride = held.stride if held.stride is not None and not is_packed(held.shape, held.stride) else None
            found.tensors[held.name] = WholeTensor(held.dtype, held.shape, shard.file, held.offset, stride)
        if (parsed := shard.torch_file) is not None:
            found.extra_states |= {n: InFile(node, parsed, n) for n, node in shard.extra_states.items()}
    found.shared = dict(weights.shared)
    found.not_carried += named((f"__metadata__.{key}" for key in weights.rest), METADATA)
    return found


def _add_recipe(found: Opened, parsed: TorchFile) -> None:
    """The state of a recipe of torchtune: its optimizer is of these weights if it names the same parameters.

    torchtune trains under names of its own, and turns the rows of query and key for Hugging Face's weights. So numbers,
    and names that the weights do not have, say nothing about these tensors.

    Source: torchtune 0.6 `training/checkpointing/_checkpointer.py`, `models/convert_weights.py` (`tune_to_hf`).
    """
    for key, node in mapping_items(parsed.root, what=RECIPE).items():
        if is_optimizer(node):
            found.optimizer, found.optimizers = InFile(node, parsed, str(key)), found.optimizers + 1
        elif is_scheduler(node):
            found.schedulers[str(key)] = InFile(node, parsed, str(key))
        else:
            found.client_state[key] = InFile(node, parsed, str(key))
    found.names_alone = True


def open_torchtune(location: Location, listing: Listing, ledger: OpaqueLedger, choices: SourceChoices) -> Opened:
    """What torchtune's output directory holds: the state of the recipe, and the weights of the epoch that it is of.

    The state is overwritten after each epoch but the last, and counts those that are done: with N it is of `epoch_N-1`.
    Weights under torchtune's own names have the optimizer's, and numbers count them: recipes make one group of
    `model.parameters()`.

    Raises:
        SourceError: `checkpoint.incomplete` without the state or the weights of its epoch, `checkpoint.malformed` for
            a count that is none; as `open_weights`.
        RequestError: `request.invalid` for a choice of a model or an optimizer: there is one.

    Source: torchtune 0.6.1 `training/checkpointing/_checkpointer.py` (`save_checkpoint` of
    `FullModelTorchTuneCheckpointer` and `FullModelHFCheckpointer`), `recipes/full_finetune_distributed.py`,
    `recipes/full_finetune_single_device.py`; verified by running.
    """
    where = printable(location.url)
    _refuse_keys(choices, {"model_key", "optimizer_key"}, f"{where} holds one model")
    infos = location.store.list_directory(location.child(RECIPES).path).by_name
    if RECIPE not in infos:
        raise SourceError("checkpoint.incomplete", f"{where}/{RECIPES} holds no {RECIPE}", fix=_NAME_EPOCH)
    state = open_torch_file(SourceFile(location.store, RECIPE, (infos[RECIPE],)), ledger)
    epochs = mapping_items(state.root, what=RECIPE).get(_EPOCHS_RUN)
    if type(epochs) is not int or epochs < 1:
        text = f"{RECIPE} holds no number of epochs that are done ({_EPOCHS_RUN}), which says whose state it is"
        raise SourceError("checkpoint.malformed", text, fix=_NAME_EPOCH)
    epoch = _EPOCH.format(epochs - 1)
    if epoch not in listing.directories:
        text = f"{RECIPE} is the state after {epoch}, and {where} holds no such directory"
        raise SourceError("checkpoint.incomplete", text, fix=f"copy {epoch}, too, or {_NAME_EPOCH}")
    found, own = _of_epoch(location.child(epoch), epoch, ledger)
    found.label = "full-torchtune"
    _add_recipe(found, state)
    found.names_alone = not own or found.optimizer is None or not numbers_parameters(found.optimizer.node)
    others = {f"{d}/": _OTHER_EPOCH for d in listing.directories if d.startswith(_EPOCH.format(""))}
    found.not_carried += beside(
        listing, lambda _: False, companions=False, folders=(RECIPES, epoch), reasons=others, otherwise=_BESIDE
    )
    return found


_NAME_EPOCH = "name the directory of an epoch, for its weights alone"
_OTHER_EPOCH = "weights of an epoch that the state of the recipe is not of"


def _of_epoch(place: Location, epoch: str, ledger: OpaqueLedger) -> tuple[Opened, bool]:
    """The weights of an epoch; True for one file under torchtune's names, which Hugging Face's have an index."""
    own, listing = False, place.store.list_directory(place.path)
    names = listing.by_name
    if any(n in names for n in _usual("model", ".safetensors")):
        weights = open_weights(place, safetensors_files(listing), parse_safetensors, preferred="model")
        found = _of_weights(weights, ordered=False)
    elif any(n in names for n in _usual("pytorch_model", ".bin")):
        files = torch_weight_files(listing)
        weights = open_weights(place, files, lambda f: parse_torch_weights(f, ledger), preferred="pytorch_model")
        found = _of_weights(weights, ordered=True)
    elif _OF_ONE_EPOCH in names:
        parsed = open_torch_file(SourceFile(place.store, _OF_ONE_EPOCH, (names[_OF_ONE_EPOCH],)), ledger)
        own, found = True, Opened("", {}, [parsed.file])
        _add_model(found, parsed.root, parsed, f"{epoch}/{_OF_ONE_EPOCH}")
    else:
        text = f"{printable(place.url)} holds no weights: neither {_OF_ONE_EPOCH} nor an index of several files"
        raise SourceError("checkpoint.incomplete", text, fix="copy all files of that directory")
    read = {f.name for f in found.files} | {n for n in names if n.endswith(".index.json")}
    reasons = dict.fromkeys((n for n in names if n.endswith(".json")), _MODEL_FILES)
    for one in beside(listing, read.__contains__, companions=False, reasons=reasons, otherwise=_BESIDE):
        here = {"path": f"{epoch}/{one.path}", "file": f"{epoch}/{one.file}"}
        found.not_carried.append(one.model_copy(update=here))
    return found, own


def _add_companions(
    found: Opened,
    location: Location,
    listing: Listing,
    ledger: OpaqueLedger,
    reasons: Mapping[str, str],
    *,
    read: set[str],
) -> None:
    """A trainer's files beside those of the model and the optimizer, and the names of all others."""
    companions = read_companions(location, listing, ledger)
    found.schedulers |= {p.file.name: InFile(node, p) for p, node in companions.schedulers}
    found.rng = [InFile(p.root, p) for p, _ in companions.rng]
    found.client_state |= {name: InFile(node, p, name) for p, name, node in companions.client_state}
    found.texts, found.steps = companions.texts, companions.steps
    said = {
        n: _MODEL_FILES for n in listing.by_name if n.endswith(".json") and (n == "config.json" or "tokenizer" in n)
    }
    said |= {**reasons, **MADE_ANEW}
    rest = beside(listing, read.__contains__, companions=True, reasons=said, otherwise=_BESIDE)
    found.not_carried += [*companions.not_carried, *rest]
