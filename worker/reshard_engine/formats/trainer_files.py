"""Files of a trainer beside the model and its optimizer: schedulers, random states, counters, objects of the script."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from reshard.choices import INCOMPLETE
from reshard.dcp_options import Framework
from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import NotCarried
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Checkpoint, FormatFacts
from reshard_engine.containers.source_file import SourceFile, open_all, parse_json
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.formats.carried import named
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.pickles.nodes import Node, PList, is_mapping, mapping_items, mapping_of, sequence_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes

# The files of a trainer are read as inert data, and written again only for a target of the same kind.
#
# Source: accelerate 1.15.0 `checkpointing.py` (`save_accelerator_state`), `utils/constants.py`; transformers 5.23.0
# `trainer.py` (`_save_rng_state`, `_save_checkpoint`); pytorch-lightning 2.6.6 `strategies/fsdp.py`
# (`save_checkpoint`).

META = "meta.pt"
"""Lightning's file beside the shards: all of its checkpoint but weights and optimizers."""
FULL = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_([1-9]\d{0,3}))?\.bin")
"""Full files of a model and of its optimizer, each with its number."""
FULL_MODEL, OPTIMIZERS = "pytorch_model_fsdp", "optimizer"
WEIGHTS, NUMBERED_OPTIMIZER = "model.safetensors", "optimizer.pt"
"""The Trainer's files without FSDP and DeepSpeed."""
TRAINER_STATE = "trainer_state.json"
"""The Trainer's own state: counters and its log."""
SCHEDULER = re.compile(r"scheduler(?:_\d{1,4})?\.(?:bin|pt)")
_RANK_FILE = re.compile(r"(?:rng_state|random_states)(?:_(\d{1,7}))?\.(?:pth|pkl)")
_OBJECTS = re.compile(
    r"custom_checkpoint_\d{1,4}\.pkl|sampler(?:_\d{1,4})?\.bin|dl_state_dict(?:_\d{1,4})?\.bin|scaler\.pt"
)
ARGUMENTS = "training_args.bin"
"""The Trainer's arguments."""
MADE_ANEW = {
    ARGUMENTS: "the Trainer writes its arguments anew",
    INCOMPLETE: "a mark of the Trainer",
}
"""Files of a trainer that are not read, each with the reason."""
STATE_LIMIT_BYTES = 64 << 20
_BESIDE = "it lies beside the shards, and nothing reads it"
_NO_RANK = "files of lower ranks are missing, and the target numbers ranks without gaps"


@dataclass(slots=True)
class Companions:
    """The contents of a trainer's files."""

    schedulers: list[tuple[TorchFile, Node]] = field(default_factory=list[tuple[TorchFile, Node]])
    rng: list[tuple[TorchFile, Mapping[str | int, Node]]] = field(
        default_factory=list[tuple[TorchFile, Mapping[str | int, Node]]]
    )
    """Random states by rank."""
    ranks: list[int] = field(default_factory=list[int])
    """The rank of each of them, by the name of its file."""
    client_state: list[tuple[TorchFile, str, Node]] = field(default_factory=list[tuple[TorchFile, str, Node]])
    """Other values, by the name of their file or their key in `meta.pt`."""
    texts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files that are texts, which are written again as they are."""
    steps: int | None = None
    not_carried: list[NotCarried] = field(default_factory=list[NotCarried])


RANK_STATES = "random_states"
"""The name of the ranks' random states among the run's state."""


SCRIPTS_FILE = "full-torch"
"""The format of a checkpoint in one file of `torch.save` whose keys are a script's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts(FormatFacts):
    """The part of a trainer's files that no field of a checkpoint holds, alike beside shards and beside full files."""

    texts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Text files of a trainer, by name."""
    rank_states: tuple[Mapping[str, Node], ...] = ()
    """Random states by rank, by the keys of the framework that saved them. Other frameworks have no use for them."""
    other_models: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Models and optimizers of the same file that were not read, by their keys. A state dict has a place for them."""
    numbers: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of each parameter in a file whose optimizer does not count those of the groups one after another."""
    model_key: str | None = None
    """The key of the model in a script's file; empty if the model is all that the file holds."""
    optimizer_key: str | None = None
    """The key of the optimizer in a script's file."""
    saved_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names that a script's file has for tensors of the model, by name, where wrapping modules made them longer."""
    saved_by: Framework | None = None
    """The framework that saved the files, whose keys a distributed target gets by default; None if they name none."""

    def run_state(self, checkpoint: Checkpoint) -> Mapping[str | int, Node]:
        """The state that every format has, and a trainer's."""
        return {**FormatFacts.run_state(self, checkpoint), **self.own_state()}

    def own_state(self) -> Mapping[str | int, Node]:
        """Text files of a trainer, random states by rank, and models and optimizers that were not read."""
        own: dict[str | int, Node] = {name: text.decode("utf-8", "replace") for name, text in self.texts.items()}
        if self.rank_states:
            own[RANK_STATES] = PList([mapping_of({**states}) for states in self.rank_states])
        return {**own, **self.other_models}

    def of_others(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The keys of the models and optimizers that were not read."""
        return tuple(self.other_models)


def trainer_facts(checkpoint: Checkpoint) -> TrainerFacts:
    """The state in a trainer's files, whatever the format of the model beside them."""
    return checkpoint.facts if isinstance(checkpoint.facts, TrainerFacts) else TrainerFacts()


def read_companions(location: Location, listing: Listing, ledger: OpaqueLedger) -> Companions:
    """Read the files of a trainer in a directory.

    Raises:
        SourceError: `zip.*`, `pickle.*`, `checkpoint.malformed` for files that are not as trainers write them.
    """
    found = Companions()
    infos_by_name = listing.by_name
    torch_names = [
        n
        for n in infos_by_name
        if n == META or SCHEDULER.fullmatch(n) or _RANK_FILE.fullmatch(n) or _OBJECTS.fullmatch(n)
    ]
    parts = [SourceFile(location.store, n, (infos_by_name[n],)) for n in sorted(torch_names, key=_order)]
    for parsed in open_all(parts, lambda f: open_torch_file(f, ledger)):
        _take(found, parsed)
    if missing := [r for r in range(max(found.ranks, default=0)) if r not in found.ranks]:
        found.not_carried += named([f"random states of rank {rank}" for rank in found.ranks[missing[0] :]], _NO_RANK)
        del found.rng[missing[0] :]
    if (info := infos_by_name.get(TRAINER_STATE)) is not None:
        if info.size_bytes > STATE_LIMIT_BYTES:
            raise SourceError("checkpoint.too_large", f"{TRAINER_STATE} has {info.size_bytes} bytes")
        found.texts[TRAINER_STATE] = read_bytes(location.store, info)
        found.steps = _steps_of_trainer(found.texts[TRAINER_STATE])
    return found


def framework_of(names: Collection[str]) -> Framework | None:
    """The framework whose files these are, by their names; None if no name is a trainer's.

    Source: as above. Accelerate saves `scheduler.bin` and `random_states_0.pkl`, the Trainer `scheduler.pt` and
    `rng_state.pth`.
    """
    if META in names:
        return Framework.LIGHTNING
    theirs = [n for n in names if is_companion(n)]
    of_ranks = [n for n in theirs if _RANK_FILE.fullmatch(n) and not n.startswith("random_states")]
    if of_ranks or TRAINER_STATE in theirs or "scheduler.pt" in theirs:
        return Framework.TRAINER
    return Framework.ACCELERATE if theirs else None


def full_pair(names: Iterable[str]) -> bool:
    """True if full files of a model and of the optimizer with its number are among the names.

    Source: accelerate 1.15.0 `utils/fsdp_utils.py` (FULL_STATE_DICT), `accelerator.py` (`save_state`).
    """
    found = {(m[1], int(m[2] or 0)) for m in map(FULL.fullmatch, names) if m is not None}
    return any((OPTIMIZERS, number) in found for kind, number in found if kind != OPTIMIZERS)


def chosen_model(where: str, models: Sequence[str], optimizers: Sequence[str], choices: SourceChoices) -> str:
    """The only model of Accelerate in a directory, or that of the user's choice: optimizer number i trains model i.

    Args:
        where: The directory, for messages.
        models: What its files name models, such as `pytorch_model_fsdp_1`, by number.
        optimizers: What they name optimizers.
        choices: The user's choices.

    Raises:
        SourceError: `checkpoint.ambiguous` for several models and no choice.
        RequestError: `request.invalid` for a choice that is not there, and for an optimizer of another model.

    Source: accelerate 1.15.0 `checkpointing.py`, `accelerator.py` (`save_state`).
    """
    trains = {m: m.replace(FULL_MODEL, OPTIMIZERS) for m in models}
    fix = ", or ".join(f"--model-key {m}" for m in models)
    said, optimizer = choices.model_key, choices.optimizer_key
    own = "".join(f"; {o} is that of {m}" for m, o in trains.items() if o in optimizers and len(models) > 1)
    if optimizer is not None and (optimizer not in optimizers or trains.get(said or "", optimizer) != optimizer):
        text = f"no optimizer{' of that model' if said else ''} is called {printable(optimizer)!r} here; there is "
        raise RequestError("request.invalid", f"{text}{listed(optimizers) or 'none'}{own}", fix=fix)
    if optimizer is not None and said is None:
        said = next((m for m, o in trains.items() if o == optimizer), None)
    if said is None and len(models) > 1:
        raise SourceError("checkpoint.ambiguous", f"{where} holds {len(models)} models: {listed(models)}{own}", fix=fix)
    chosen = models[0] if said is None else said
    if chosen not in models:
        text = f"no model is called {printable(chosen)!r} here; there is {listed(models)}"
        raise RequestError("request.invalid", text, fix=fix)
    return chosen


def beside(
    listing: Listing,
    is_read: Callable[[str], bool],
    *,
    companions: bool,
    folders: Collection[str] = (),
    reasons: Mapping[str, str] = MADE_ANEW,
    otherwise: str = _BESIDE,
) -> list[NotCarried]:
    """The files and directories of a checkpoint that nothing reads.

    Args:
        listing: The directory.
        is_read: True for the name of a file of the model or of an optimizer, which is read.
        companions: True if the files of a trainer are read.
        folders: The directories that are read.
        reasons: Why files of these names are not read.
        otherwise: The reason for all others.
    """
    names = listing.by_name
    rest = [n for n in names if n != MANIFEST_NAME and not is_read(n) and not (companions and is_companion(n))]
    rest += [f"{d}/" for d in listing.directories if d not in folders and not d.startswith(".")]
    return [NotCarried(path=printable(n), file=printable(n), reason=reasons.get(n, otherwise)) for n in rest]


def is_companion(name: str) -> bool:
    """True for the name of a file that `read_companions` reads."""
    return name in (TRAINER_STATE, META) or any(p.fullmatch(name) for p in (SCHEDULER, _RANK_FILE, _OBJECTS))


def _order(name: str) -> tuple[str, int, str]:
    """Ranks in the order of their numbers."""
    return ("rank", _rank_of(name), name) if _RANK_FILE.fullmatch(name) else ("", 0, name)


def _rank_of(name: str) -> int:
    """The rank in the name of a file of random states; 0 in that of a run of one process."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1] or 0) if match else 0


def _take(found: Companions, parsed: TorchFile) -> None:
    name = parsed.file.name
    if name == META:
        _take_meta(found, parsed)
    elif SCHEDULER.fullmatch(name):
        if not is_made(parsed.root):
            found.schedulers.append((parsed, parsed.root))
    elif _RANK_FILE.fullmatch(name):
        found.rng.append((parsed, mapping_items(parsed.root, what=printable(name))))
        found.ranks.append(_rank_of(name))
    else:
        found.client_state.append((parsed, name, parsed.root))


def _take_meta(found: Companions, parsed: TorchFile) -> None:
    """Lightning's `meta.pt`: the checkpoint without weights and optimizers."""
    for key, value in mapping_items(parsed.root, what=META).items():
        if key == "lr_schedulers":
            found.schedulers += [(parsed, node) for node in sequence_items(value, what=f"{META}: {key}")]
        else:
            found.client_state.append((parsed, str(key), value))
        if key == "global_step" and type(value) is int:
            found.steps = value


def _steps_of_trainer(text: bytes) -> int | None:
    state = parse_json(text, code="checkpoint.malformed", what=TRAINER_STATE)
    steps: Any = cast("dict[str, Any]", state).get("global_step") if isinstance(state, dict) else None
    return steps if type(steps) is int else None


def best_checkpoint_in(text: bytes) -> str:
    """The path in the `best_model_checkpoint` of a `trainer_state.json`; empty without a path.

    The parser accepts NaN, which the Trainer logs as the loss of a diverged step: a state that cannot be parsed would
    leave its best checkpoint unprotected.

    Source: transformers 5.23.0 `trainer_callback.py` (`TrainerState`), `trainer_utils.py` (`sort_checkpoints`).
    """
    try:
        state: Any = json.loads(text)
    except RecursionError:
        return ""
    except ValueError:
        # The beginning of a long state, or one that is being written.
        path = _BEST.search(text)
        state = {} if path is None else {"best_model_checkpoint": _json_text(path[1])}
    best: Any = cast("dict[str, Any]", state).get("best_model_checkpoint") if isinstance(state, dict) else None
    return best if isinstance(best, str) else ""


_BEST = re.compile(rb'"best_model_checkpoint": ("(?:[^"\\\x00-\x1f]|\\.){0,4096}")')


def _json_text(text: bytes) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def best_of_callbacks(client_state: Mapping[str | int, Node]) -> list[str]:
    """The paths that Lightning's `ModelCheckpoint` callbacks record as the best checkpoint.

    Source: pytorch-lightning 2.6.6 `callbacks/model_checkpoint.py` (`state_dict`), `trainer/connectors/
    checkpoint_connector.py` (`dump_checkpoint`).
    """
    best: list[str] = []
    with suppress(SourceError):
        callbacks = client_state.get("callbacks")
        for callback in mapping_items(callbacks, what="callbacks").values() if is_mapping(callbacks) else ():
            state = mapping_items(callback, what="a callback") if is_mapping(callback) else {}
            if isinstance(path := state.get("best_model_path"), str) and path:
                best.append(path)
    return best


# State dicts of torch's learning-rate schedulers, recognised by their content.

_EPOCH = "last_epoch"
_OF_CHAINED = frozenset({"_schedulers", "_last_lr"})
"""Attributes of `ChainedScheduler`, which counts nothing itself."""
_BESIDE_EPOCH = frozenset({"_step_count", "_last_lr", "base_lrs", "num_bad_epochs"})
"""Attributes of which every scheduler of torch has some: `ReduceLROnPlateau` the last one."""


def is_scheduler(node: Node) -> bool:
    """True for the state dict of one of torch's schedulers.

    A script's own counters may have a `last_epoch`, too. One that is alone is what is left of another framework's
    scheduler: the count of its steps.

    Source: torch 2.13.0 `optim/lr_scheduler.py` (`LRScheduler.state_dict`: every attribute but the optimizer).
    """
    keys = mapping_items(node, what="a scheduler").keys() if is_mapping(node) else ()
    if _EPOCH not in keys:
        return _OF_CHAINED.issubset(keys)
    return len(keys) == 1 or not _BESIDE_EPOCH.isdisjoint(map(str, keys))


def made_scheduler(updates: int) -> Node:
    """A state that schedulers of DeepSpeed and of torch load, and from which they go on as after so many updates.

    DeepSpeed's five load `last_batch_iteration`. Torch's update their attributes with the whole state: most compute
    their next rates from `last_epoch` and the rates in the param groups. `lr_lambdas` and `_scale_fn_custom` are keys
    without which three of them refuse a state. Verified by running each against an uninterrupted run.

    Source: deepspeed 0.19.8 `runtime/lr_schedules.py`, torch 2.13.0 `optim/lr_scheduler.py` (`load_state_dict`).
    """
    return mapping_of({
        "last_batch_iteration": updates - 1, _EPOCH: updates, "_step_count": updates + 1,
        "lr_lambdas": PList([]), "_scale_fn_custom": None,
    })  # fmt: skip


def is_made(scheduler: Node) -> bool:
    """True for a state that `made_scheduler` made. No scheduler saves just these keys."""
    items = mapping_items(scheduler, what="a scheduler") if is_mapping(scheduler) else {}
    counted = items.get(_EPOCH)
    return type(counted) is int and items.keys() == mapping_items(made_scheduler(counted), what="a scheduler").keys()


def steps_and_updates(checkpoint: Checkpoint) -> tuple[int | None, int | None]:
    """The run's steps, and its updates: steps without those that fp16 skipped. None where the source counts nothing.

    DeepSpeed's engine steps a scheduler with each update, and so does the Trainer.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`_take_model_step`), transformers 5.23.0 `trainer.py`
    (`optimizer_step_was_skipped`).
    """
    counters = checkpoint.counters
    own = max((int(p.scalars["step"].value) for p in checkpoint.trained if "step" in p.scalars), default=None)
    steps = own if counters.steps is None else counters.steps
    if counters.steps is not None and counters.skipped_steps is not None:
        return steps, counters.steps - counters.skipped_steps
    return steps, steps if own is None else own
