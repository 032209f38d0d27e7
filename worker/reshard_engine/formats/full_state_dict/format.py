"""Training files with whole tensors as a format: one file of `torch.save`, Lightning's, and those of the Trainer.

Tensors are whole, so that any number of ranks may have saved them. Nothing in them tells buffers from frozen
parameters, and an optimizer that numbers parameters is read only where shapes, the files or the user tell their order.

Source: as in `files` and `optimizer`; torch 2.13.0 `nn/modules/module.py` (`state_dict`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from reshard.dcp_options import Framework
from reshard.errors import listed, printable
from reshard_engine.checkpoint import (
    Agreement,
    Buffer,
    Checkpoint,
    Counters,
    OptimizerState,
    Parameter,
    ParamGroup,
    Question,
    Undecided,
)
from reshard_engine.containers.torch_file import TreeTensors, add_whole_tensor
from reshard_engine.formats.carried import UNKNOWN, named
from reshard_engine.formats.format import Discovery, Format, Presentation, Reader, ReadOptions, refuse_choices
from reshard_engine.formats.full_state_dict.files import (
    RECIPES,
    InFile,
    Opened,
    holds_weights_with_optimizer,
    open_pair,
    open_single,
    open_torchtune,
    open_weights_with_optimizer,
    single_names,
)
from reshard_engine.formats.full_state_dict.optimizer import (
    ModelOrder,
    ReadOptimizer,
    read_optimizer,
    unread_optimizer,
)
from reshard_engine.formats.model_weights import (
    checked_name,
    compiled_names,
    of_batch_norm,
    plain_names,
    said_buffers,
    which_are_buffers,
)
from reshard_engine.formats.numbered import WEIGHTS_ALONE, is_optimizer, own_scheduler
from reshard_engine.formats.trainer_files import TrainerFacts, full_pair
from reshard_engine.pickles.nodes import Node, mapping_items, mapping_of
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.shard_map import ShardMapBuilder

_SAVED_BY = {
    "fsdp-full-accelerate": Framework.ACCELERATE,
    "fsdp-full-trainer": Framework.TRAINER,
    "full-trainer": Framework.TRAINER,
    "full-lightning": Framework.LIGHTNING,
}
"""The frameworks that save distributed checkpoints, too, by the formats of their full files."""
_FOLLOWED = ("param_order", "buffers", "scheduler_key", "model_key", "optimizer_key")


class FullPairReader:
    """Reads `pytorch_model_fsdp.bin` with `optimizer.bin`, and what lies beside them."""

    family = "full_state_dict"

    def recognises(self, listing: Listing) -> bool:
        """True if full files of a model and of its optimizer are among the names."""
        return full_pair(listing.by_name)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model, its optimizer and a trainer's other files.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `tensor.*`, `source.unsupported`, `name.invalid`.
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        text = f"{printable(location.url)} holds one model, its optimizer and its scheduler"
        refuse_choices(options.choices.model_copy(update=dict.fromkeys(_FOLLOWED)), text)
        return _assembled(open_pair(location, listing, options.ledger, options.choices), location, options)


class WeightsWithOptimizerReader:
    """Reads weights of `save_pretrained` with `optimizer.pt` of the Trainer, or torchtune's state, beside them."""

    family = "full_state_dict"

    def recognises(self, listing: Listing) -> bool:
        """True if weights under Hugging Face's names and one of these files are among the names."""
        return holds_weights_with_optimizer(listing)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights, the optimizer and a trainer's other files.

        Raises:
            SourceError: As `FullPairReader.read`, and `safetensors.*`.
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        opened = open_weights_with_optimizer(location, listing, options.ledger, options.choices)
        return _assembled(opened, location, options)


class TorchtuneReader:
    """Reads torchtune's output directory: the state of its recipe, and the weights of the epoch that it is of."""

    family = "full_state_dict"

    def recognises(self, listing: Listing) -> bool:
        """True if the directory of a recipe's state is among the names."""
        return RECIPES in listing.directories

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights and the state.

        Raises:
            SourceError: As `FullPairReader.read`, and `safetensors.*`.
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        return _assembled(open_torchtune(location, listing, options.ledger, options.choices), location, options)


class SingleFileReader:
    """Reads one file of `torch.save` that holds a model, and perhaps its optimizer."""

    family = "full_state_dict"

    def recognises(self, listing: Listing) -> bool:
        """True if one file has a name that scripts give such a file."""
        return len(single_names(listing)) == 1

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the only such file of a listing, and torchtune's state beside it.

        Raises:
            SourceError: As `FullPairReader.read`, and `source.unknown_kind` for a file without a model.
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        return _assembled(open_single(location, listing, options.ledger, options.choices), location, options)


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (FullPairReader(), WeightsWithOptimizerReader(), TorchtuneReader())
    file_readers: ClassVar[tuple[Reader, ...]] = (SingleFileReader(),)
    of_training = True
    takes_choices = True


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    def cautions(self, checkpoint: Checkpoint) -> list[str]:
        """A word on the models and optimizers that were not read."""
        if not isinstance(checkpoint.facts, TrainerFacts) or not (others := [*checkpoint.facts.other_models]):
            return []
        which = [key for key in others if is_optimizer(checkpoint.facts.other_models[key])]
        models = [key for key in others if key not in which]
        flags = [f"--model-key {shlex.quote(printable(k))}" for k in models]
        flags += [f"--optimizer-key {shlex.quote(printable(k))}" for k in which]
        return [f"it also holds {listed(others)}, not of the model that was read: {', '.join(flags)} reads them"]


class FullStateDict(Format):
    """Files with whole tensors of a model and its optimizer."""

    name = "full_state_dict"
    discovery = _Discovery()
    presentation = _Presentation()


# The checkpoint of everything that was opened.


@dataclass(slots=True)
class _Kinds:
    """Parameters and buffers, and what is open about them."""

    parameters: list[Parameter]
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    unproven: list[str] = field(default_factory=list[str])
    undecided: tuple[Undecided, ...] = ()


def _assembled(opened: Opened, location: Location, options: ReadOptions) -> Checkpoint:
    return _Assembly(opened, options).checkpoint(location.url)


class _Assembly:
    """One checkpoint being put together."""

    def __init__(self, opened: Opened, options: ReadOptions) -> None:
        self._opened, self._options, self._builder = opened, options, ShardMapBuilder()
        self._names = {name: checked_name(plain) for name, plain in plain_names(list(opened.tensors)).items()}
        self._files = [*opened.files]
        self._files += [p.file for p in opened.torch_files if p.file not in opened.files]
        self._numbers = {file: number for number, file in enumerate(self._files)}
        self._trees = TreeTensors(self._builder, self._numbers)
        self._twins = self._first_of_equal(lambda name: opened.tensors[name].place)
        self._equal = self._first_of_equal(lambda name: opened.tensors[name].sums)
        self._said = said_buffers(options.choices.buffers, self._names)
        self._statistics = {name for name in opened.tensors if of_batch_norm(name, opened.tensors)}
        self._optimizer = self._read_optimizer()
        self._tie()
        self._weights = {name: self._add_weight(name) for name in opened.tensors if name not in self._twins}

    def checkpoint(self, url: str) -> Checkpoint:
        """The checkpoint.

        Raises:
            SourceError: `checkpoint.*`, `tensor.*`.
            RequestError: `request.invalid` for a scheduler that is not there.
        """
        opened, optimizer, plain = self._opened, self._optimizer, self._names
        kinds, agreements = self._kinds(), self._agreements()
        read = None if optimizer is None or optimizer.unread else OptimizerState(self._groups(optimizer))
        own, undecided = own_scheduler([*opened.schedulers], opened.optimizers, self._options.choices.scheduler_key)
        schedulers = {key: self._carried(value) for key, value in opened.schedulers.items()}
        rng = tuple(
            {str(k): v for k, v in mapping_items(self._carried(value), what=value.what).items()} for value in opened.rng
        )
        client_state = {key: self._carried(value) for key, value in opened.client_state.items()}
        others = {key: self._carried(value) for key, value in opened.of_others.items()}
        extra_states = {checked_name(name): self._carried(value) for name, value in opened.extra_states.items()}
        longer = {short: name for name, short in plain.items() if name != short}
        unread = "" if optimizer is None else optimizer.unread
        if not unread and any(u.question is Question.OPTIMIZER for u in opened.undecided):
            unread = opened.undecided[-1].text
        numbers = {} if optimizer is None else {plain[name]: number for name, number in optimizer.numbers.items()}
        shared = {plain[a]: plain[o] for a, o in {**self._twins, **self._copies}.items()}
        return Checkpoint(
            url=url,
            tag=self._options.tag,
            format=opened.label,
            framework_version=None,
            world={},
            files=tuple(self._files),
            shard_map=self._builder.build(),
            parameters=tuple(kinds.parameters),
            buffers=tuple(kinds.buffers),
            shared={**{a: plain.get(o, o) for a, o in opened.shared.items()}, **shared},
            optimizer=read,
            foreign_globals=tuple(sorted(self._options.ledger.foreign)),
            warnings=(*opened.warnings, *(() if optimizer is None else optimizer.warnings)),
            agreements=agreements,
            counters=Counters(steps=opened.steps),
            schedulers=tuple(schedulers.values()),
            scheduler_keys=tuple(schedulers),
            own_scheduler=own,
            client_state=client_state,
            run_names=compiled_names(longer),
            module_names=tuple(plain.values()) if opened.ordered else (),
            extra_states=extra_states,
            not_carried=(*named(opened.others, UNKNOWN), *opened.not_carried),
            facts=TrainerFacts(
                rank_states=rng,
                texts=opened.texts,
                other_models=others,
                numbers=numbers,
                model_key=opened.model_key,
                optimizer_key=opened.optimizer_key,
                saved_names=longer if opened.model_key is not None else {},
                saved_by=_SAVED_BY.get(opened.label),
            ),
            undecided=(
                *opened.undecided,
                *(() if optimizer is None else optimizer.undecided),
                *kinds.undecided,
                *undecided,
            ),
            assumed=() if optimizer is None else optimizer.assumed,
            unproven=frozenset(kinds.unproven),
            copies={plain[a]: self._weights[a] for a in self._copies},
            no_optimizer=unread,
        )

    def _carried(self, value: InFile) -> Node:
        return self._trees.carried(value.node, value.parsed)

    # The model.

    def _first_of_equal(self, token: Callable[[str], object]) -> dict[str, str]:
        """For each tensor that equals an earlier one by its token the name of that one."""
        first: dict[object, str] = {}
        found: dict[str, str] = {}
        for name in self._opened.tensors:
            key = token(name)
            if key is not None and first.setdefault(key, name) != name:
                found[name] = first[key]
        return found

    def _add_weight(self, name: str) -> int:
        held = self._opened.tensors[name]
        number = self._builder.tensor(self._names[name], "weight", held.dtype, held.shape)
        self._builder.whole(number, file=self._numbers[held.file], offset=held.at, stride=held.stride)
        return number

    def _read_optimizer(self) -> ReadOptimizer | None:
        opened = self._opened
        if opened.optimizer is None:
            return None
        buffers = (self._said or set[str]()) | self._statistics
        shapes = {
            name: held.shape
            for name, held in opened.tensors.items()
            if held.dtype.trainable and name not in self._twins and name not in buffers
        }
        equal = {a: o for a, o in self._equal.items() if a in shapes and o in shapes}
        model = ModelOrder(
            shapes,
            self._names,
            {name for name in shapes if opened.tensors[name].dtype.complex},
            equal,
            known=opened.ordered,
            counts_model=opened.counts_model,
            by_model=opened.by_model,
        )
        if opened.names_alone and (text := _of_other_names(opened.optimizer, shapes)):
            return unread_optimizer(text, f"{_TUNE_NAMES}; {WEIGHTS_ALONE}", Question.OPTIMIZER)
        held = opened.optimizer
        return read_optimizer(held.node, held.parsed, held.what, model, self._options.choices.param_order)

    def _tie(self) -> None:
        """Decide which names are second ones: of one memory, or of equal elements of which the optimizer trains one."""
        members = {} if self._optimizer is None else self._optimizer.members
        twins = self._twins
        for alias, owner in {**twins}.items():
            if alias in members and owner not in members:
                del twins[alias]
                twins[owner] = alias
        updated = {n for n in members if self._optimizer is not None and self._optimizer.states.get(n)}
        pairs = {a: o for a, o in self._equal.items() if a not in twins and o not in twins}
        self._copies = {a: o for a, o in pairs.items() if a not in members and o in updated}

    def _agreements(self) -> tuple[Agreement, ...]:
        """Second names with equal elements, which are compared before anything is written."""
        plain, weights = self._names, self._weights
        return tuple(
            Agreement(plain[o], "weight", weights[o], weights[a], f"its other name {printable(plain[a])}")
            for a, o in self._copies.items()
        )

    def _kinds(self) -> _Kinds:
        """Parameters in the optimizer's order, then frozen ones, and buffers."""
        plain, optimizer = self._names, self._optimizer
        members = {} if optimizer is None else optimizer.members
        found = _Kinds([self._trained(name, group) for name, group in members.items()])
        if all(p.never_updated for p in found.parameters):  # before the first step no parameter has states
            found.parameters = [replace(p, never_updated=False) for p in found.parameters]
        frozen = () if optimizer is None else optimizer.frozen
        for name, number in self._weights.items():
            if name in members or name in self._copies:
                continue
            held = self._opened.tensors[name]
            is_buffer = name in self._statistics or (name not in frozen and not held.dtype.trainable)
            if held.dtype.trainable and name not in frozen and not is_buffer:
                is_buffer = self._said is not None and name in self._said
                found.unproven += [] if self._said is not None else [plain[name]]
            if is_buffer:
                found.buffers.append(Buffer(plain[name], number))
            else:
                found.parameters.append(Parameter(plain[name], held.shape, None, number))
        # Where the order of parameters is open, it is asked for first: it tells which are trained.
        if found.unproven and members:
            found.undecided = (which_are_buffers(found.unproven),)
        return found

    def _trained(self, name: str, group: int) -> Parameter:
        optimizer, fqn = self._optimizer, self._names[name]
        held, weight = self._opened.tensors[name], self._weights[name]
        states: dict[str, int] = {"fp32": weight} if held.dtype is FLOAT32 else {}
        scalars = {} if optimizer is None else optimizer.scalars.get(name, {})
        of_file = self._opened.optimizer
        if optimizer is not None and of_file is not None:
            parsed, file = of_file.parsed, self._numbers[of_file.parsed.file]
            for state, tensor in optimizer.states.get(name, {}).items():
                states[state] = add_whole_tensor(self._builder, fqn, state, tensor, torch_file=parsed, file=file)
        never = not scalars and states.keys() <= {"fp32"}
        return Parameter(fqn, held.shape, group, weight, states, scalars, never_updated=never)

    def _groups(self, optimizer: ReadOptimizer) -> tuple[ParamGroup, ...]:
        """The param groups with references in place of tensors."""
        if self._opened.optimizer is None:
            return optimizer.groups
        parsed = self._opened.optimizer.parsed
        carried = (self._trees.carried(mapping_of({**g.hyper_parameters}), parsed) for g in optimizer.groups)
        return tuple(ParamGroup(mapping_items(node, what="a param group")) for node in carried)


_TUNE_NAMES = "save with FullModelTorchTuneCheckpointer, whose weights have the optimizer's names"


def _of_other_names(optimizer: InFile, shapes: Mapping[str, Sequence[int]]) -> str:
    """The reason why an optimizer is none of these weights', a part of a sentence; empty if it names them."""
    root = mapping_items(optimizer.node, what=optimizer.what)
    keys = list(mapping_items(root["state"], what=optimizer.what))
    strangers = [printable(str(key)) for key in keys if key not in shapes]
    if not strangers:
        return ""
    return (
        f"{optimizer.what} is of parameters under other names ({listed(strangers)}) than the weights beside it; "
        "torchtune turns rows of query and key between the two"
    )
