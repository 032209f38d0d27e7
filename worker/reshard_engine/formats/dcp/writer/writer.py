"""Distributed checkpoints under the keys, and with the files, that a framework loads.

Source: accelerate 1.15.0 `utils/fsdp_utils.py`, `checkpointing.py`; transformers 5.23.0 `trainer.py`;
pytorch-lightning 2.6.6 `strategies/fsdp.py`; torchtitan 0.3.0 `components/checkpoint.py`; verified by loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reshard.dcp_options import DcpOptions, Grammar
from reshard.errors import RequestError
from reshard.models import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats import not_written
from reshard_engine.formats.dcp.facts import RANK_STATES, facts_of
from reshard_engine.formats.dcp.schedulers import is_scheduler, plain_scheduler
from reshard_engine.formats.dcp.state_tree import StateTree
from reshard_engine.formats.dcp.writer.entries import KeyPath, StateEntry
from reshard_engine.formats.dcp.writer.param_groups import groups_to_write
from reshard_engine.formats.dcp.writer.shards import ShardOptions, Shards
from reshard_engine.formats.dcp.writer.state_dict import Places, StateDict
from reshard_engine.formats.dcp.writer.trainer_files import (
    MADE_STATE,
    left_out,
    lightning_meta,
    makes_trainer_state,
    trainer_files,
)
from reshard_engine.pickles.nodes import Node, PTensorRef, mapping_items, mapping_of
from reshard_engine.tensors.layout import TargetFile, TargetLayout

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
_PLACES: Mapping[Grammar, tuple[KeyPath, KeyPath, bool]] = {
    Grammar.STATE_DICT: (("model",), ("optimizer",), False),
    Grammar.TORCHTITAN: ((), ("optimizer",), True),
    Grammar.ACCELERATE: (("model",), ("optimizer",), False),
    Grammar.TRAINER: (("model",), ("optimizer",), False),
    Grammar.LIGHTNING: (("model",), ("optimizer_0",), False),
}
"""The places of model and optimizer, and True where the optimizer's state dict is flattened."""
_IN_FOLDERS = (Grammar.ACCELERATE, Grammar.TRAINER)
_OTHER_SCHEDULER = "the learning-rate scheduler is none of torch's"
_NO_PLACE = "checkpoints of this kind have no place for it"
_TAKEN = "its place is that of the model or of the optimizer"
_SECOND_SCHEDULER = "checkpoints of this kind keep one scheduler"


@dataclass(frozen=True, slots=True)
class _Target:
    """The places and options of one target."""

    checkpoint: Checkpoint
    request: ConvertRequest
    options: DcpOptions
    grammar: Grammar
    places: Places

    @property
    def own(self) -> bool:
        """True if the source has this grammar, so that its own keys serve."""
        facts = facts_of(self.checkpoint)
        return facts is not None and facts.grammar is self.grammar

    @classmethod
    def of(cls, checkpoint: Checkpoint, request: ConvertRequest) -> _Target:
        options, facts = request.options.of(DcpOptions), facts_of(checkpoint)
        grammar = options.grammar or (facts.grammar if facts is not None else None) or Grammar.ACCELERATE
        model, optimizer, flat = _PLACES[grammar]
        names: Mapping[str, str] = {}
        if facts is not None and facts.grammar is grammar:
            model, flat, names = facts.model_path, facts.flat, facts.wrapped_names
            optimizer = optimizer if facts.optimizer_path is None else facts.optimizer_path
        model = model if options.model_key is None else _path(options.model_key)
        optimizer = optimizer if options.optimizer_key is None else _path(options.optimizer_key)
        return cls(checkpoint, request, options, grammar, Places(model, optimizer, flat, names))


def _path(text: str) -> KeyPath:
    return tuple(p for p in text.split(".") if p)


class DcpWriter:
    """Lays out distributed checkpoints."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out the shards of model and optimizer, and the files of a trainer beside them.

        Raises:
            RequestError: `request.unsatisfiable` for a source whose optimizer keeps no param groups;
                `request.invalid` with `--dtype`.
            SourceError: `checkpoint.ambiguous`, `pickle.forbidden_global`.
        """
        if request.dtype is not None:
            raise RequestError(
                "request.invalid",
                "a distributed checkpoint holds the parameters as the optimizer has them: --dtype is for weights",
                fix="leave --dtype out",
            )
        if isinstance(checkpoint.facts, StateTree):
            return _lay_out_tree(checkpoint, checkpoint.facts.tree, request)
        target = _Target.of(checkpoint, request)
        state_dict = StateDict(checkpoint, target.places)
        model = list(state_dict.model(exclude_frozen=request.exclude_frozen))
        optimizer: list[StateEntry] = []
        warnings: list[str] = []
        if checkpoint.optimizer is not None:
            groups, warnings = groups_to_write(checkpoint, needs_initial_lr=target.grammar is Grammar.TORCHTITAN)
            optimizer = list(state_dict.optimizer(groups, target.options.missing_moments))
        shards = Shards(ShardOptions(checkpoint.shard_map, request.opaque, target.options.files))
        files = list(_files(target, shards, model, optimizer, state_dict))
        warnings += [MADE_STATE] if makes_trainer_state(checkpoint, target.grammar) else []
        warnings += [not_written.padding_left_out(checkpoint)] if checkpoint.padding_rows else []
        # Files without which loaders refuse the directory are published last.
        ordered = [*(f for f in files if not f.commit), *(f for f in files if f.commit)]
        return TargetLayout(tuple(ordered), None, tuple(warnings), not_carried=tuple(_not_carried(target)))


def _lay_out_tree(checkpoint: Checkpoint, tree: Node, request: ConvertRequest) -> TargetLayout:
    """A state dict that was saved as one file, under its own keys."""
    state_dict = StateDict(checkpoint, Places((), (), flat=False, names={}))
    items = mapping_items(tree, what="the state dict").items()
    entries = [entry for key, node in items for entry in state_dict.values((str(key),), node)]
    options = request.options.of(DcpOptions)
    shards = Shards(ShardOptions(checkpoint.shard_map, request.opaque, options.files))
    return TargetLayout(tuple(shards.lay_out(entries)), None)


def _files(
    target: _Target, shards: Shards, model: list[StateEntry], optimizer: list[StateEntry], state_dict: StateDict
) -> Iterator[TargetFile]:
    if target.grammar in _IN_FOLDERS:
        yield from shards.lay_out(model, folder=MODEL_FOLDER)
        if optimizer:
            yield from shards.lay_out(optimizer, folder=OPTIMIZER_FOLDER)
        yield from trainer_files(target.checkpoint, target.request, target.grammar, list(_schedulers(target)))
        return
    beside: list[StateEntry] = []
    if target.grammar is Grammar.LIGHTNING:
        yield lightning_meta(target.checkpoint, target.request, list(_schedulers(target)))
    else:
        for key, node in _beside(target):
            beside += state_dict.values(key, node)
    yield from shards.lay_out([*model, *optimizer, *beside])


def _schedulers(target: _Target) -> Iterator[Node]:
    """The state dicts of torch's schedulers."""
    yield from (plain_scheduler(s) for s in target.checkpoint.schedulers if is_scheduler(s))


def _beside(target: _Target) -> Iterator[tuple[KeyPath, Node]]:
    """Schedulers and everything else that the script saved, each with its place beside the model."""
    checkpoint, facts = target.checkpoint, facts_of(target.checkpoint)
    at_root = facts.at_root if facts is not None and target.own else frozenset[str]()
    paths = facts.scheduler_paths if facts is not None and target.own else ()
    for number, node in enumerate(_schedulers(target)):
        default: KeyPath = ("lr_scheduler",) if not number else (f"lr_scheduler_{number}",)
        path = paths[number] if number < len(paths) else default
        yield (*_home(target, path[0], at_root), *path), node
    state = dict(checkpoint.client_state)
    if target.grammar is Grammar.TORCHTITAN and "train_state" not in state:
        state["train_state"] = mapping_of({
            "step": checkpoint.counters.steps or _steps(checkpoint), "ntokens_seen": checkpoint.counters.tokens or 0,
        })  # fmt: skip
    for key, node in state.items():
        path = (*_home(target, key, at_root), key)
        if _is_free(target.places, path, node):
            yield path, node


def _is_free(places: Places, path: KeyPath, node: Node) -> bool:
    """True if readers cannot take what lies there for a part of the model or of the optimizer."""
    if any(place[: len(path)] == path for place in (places.model, places.optimizer)):
        return False
    return bool(places.model) or not isinstance(node, PTensorRef)


def _home(target: _Target, key: str | int, at_root: frozenset[str]) -> KeyPath:
    return () if str(key) in at_root else target.places.model[:-1]


def _steps(checkpoint: Checkpoint) -> int:
    return max((int(p.scalars["step"].value) for p in checkpoint.trained if "step" in p.scalars), default=0)


def _not_carried(target: _Target) -> Iterator[NotCarried]:
    checkpoint = target.checkpoint
    one = len(checkpoint.schedulers) == 1
    others = [
        "lr_scheduler" if one else f"lr_scheduler[{i}]"
        for i, s in enumerate(checkpoint.schedulers)
        if not is_scheduler(s)
    ]
    yield from not_written.named(others, _OTHER_SCHEDULER)
    counted = [n for n in ("skipped_steps", "samples", "tokens") if getattr(checkpoint.counters, n)]
    if target.grammar is Grammar.TORCHTITAN:
        counted = [n for n in counted if n != "tokens"]
    yield from not_written.named(counted, _NO_PLACE)
    if target.grammar not in _IN_FOLDERS:
        yield from not_written.named(dict.fromkeys(k for r in checkpoint.rng for k in r), _NO_PLACE)
        if target.grammar is not Grammar.LIGHTNING:
            home = target.places.model[:-1]
            taken = (k for k, n in checkpoint.client_state.items() if not _is_free(target.places, (*home, k), n))
            yield from not_written.named(map(str, taken), _TAKEN)
        facts = facts_of(checkpoint)
        yield from not_written.named([RANK_STATES] if facts is not None and facts.rank_states else [], _NO_PLACE)
    else:
        yield from left_out(checkpoint)
        extra = [f"lr_scheduler[{i}]" for i in range(1, len(list(_schedulers(target))))]
        yield from not_written.named(extra if target.grammar is Grammar.TRAINER else [], _SECOND_SCHEDULER)
    if facts_of(checkpoint) is None:
        yield from not_written.of_the_format(checkpoint, "only the source's framework has it")
    if target.request.exclude_frozen:
        yield from not_written.frozen_parameters(checkpoint)
