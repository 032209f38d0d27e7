"""A training state as readers give it and writers take it: logical tensors with a shard map, the rest as inert trees.

This is the hub between readers and writers: a reader knows no target's format, a writer knows no source's format.
Facts that only one format family understands are in that family's record (`FormatFacts`). No other family reads it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import ClassVar, Self

from reshard.errors import RequestError, SourceError, counted, printable
from reshard.models.jobs import NotCarried
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.pickles.nodes import Node, PList, mapping_of
from reshard_engine.tensors.cuts import Cut
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import ShardMap

FILE_STATE = "file"
"""State of a tensor that is all bytes of a file."""
MAX_AMPLIFICATION = 16
"""The most bytes of tensors for one byte of the files. Views and tied tensors share bytes, but only a few times."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number as its file holds it: a Python number, or a one-element tensor with its bytes."""

    value: int | float
    dtype: Dtype | None = None
    """None for a Python number."""
    raw: bytes = b""
    """Little-endian bytes of the tensor's one element."""
    shape: tuple[int, ...] = ()

    @classmethod
    def of_element(cls, raw: bytes, dtype: Dtype, shape: tuple[int, ...]) -> Scalar | None:
        """The number in the bytes of a tensor of one element; None for element types that hold no plain number."""
        if dtype.name == "bfloat16":
            return cls(struct.unpack("<f", b"\0\0" + raw)[0], dtype, raw, shape)
        form = _FORMATS.get(dtype.name)
        return None if form is None else cls(struct.unpack(form, raw)[0], dtype, raw, shape)


_FORMATS = {
    "float32": "<f",
    "float64": "<d",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
}
"""Formats of `struct` by the name of the element type."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model under its owner's name. Tensor numbers index the shard map."""

    fqn: str
    shape: tuple[int, ...]
    group: int | None
    """Index of its optimizer param group; None for parameters that the optimizer does not own."""
    weight: int | None
    """The weight in the model's dtype, where the source stores it."""
    states: Mapping[str, int] = field(default_factory=dict[str, int])
    """`fp32` and the optimizer's per-element states."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """Optimizer states that are one number per parameter or group, such as `step`."""
    cut: Cut | None = None
    """Its cut for tensor parallelism; None where nothing says how it is cut."""
    layer: int | None = None
    """The number of its pipeline layer; None in a run without a pipeline."""
    padding: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tensor numbers of the padding rows behind a vocabulary, by state and as `weight`. Training changes these rows."""
    never_updated: bool = False
    """True if the optimizer owns it and no gradient ever reached it: it has no states, which is to say zeros."""
    frozen_late: bool = False
    """True if the run froze it after the optimizer was made. DeepSpeed then saves and loads it as frozen, too."""

    @property
    def trained(self) -> bool:
        """True if the optimizer owns it."""
        return self.group is not None

    @property
    def best(self) -> int | None:
        """The tensor with its most exact value: the master where the source stores it, else the weight."""
        return self.states.get("fp32", self.weight)

    def value(self) -> int:
        """Like `best`, but raises when no value is stored.

        Raises:
            RequestError: `request.unsatisfiable` if the checkpoint stores none.
        """
        if self.best is None:
            raise RequestError(
                "request.unsatisfiable",
                f"the checkpoint stores no value for {printable(self.fqn)}",
                fix="resume from an older checkpoint: no file holds this parameter",
            )
        return self.best


@dataclass(frozen=True, slots=True)
class Buffer:
    """A persistent buffer, or another tensor of the state dict that is not a parameter."""

    fqn: str
    tensor: int
    registered: bool = True
    """True if the module registers it as a buffer. Extra states and tensors that hooks of the model add are not."""


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A param group of the optimizer; its members are the parameters with its index, in their order."""

    hyper_parameters: Mapping[str | int, Node]
    """By torch's names, in the source's order, without `params`."""

    @property
    def name(self) -> str | None:
        """The group's name, where it has one."""
        found = self.hyper_parameters.get("name")
        return found if isinstance(found, str) else None


_ADAFACTOR_KEYS = frozenset({"clip_threshold", "decay_rate", "relative_step", "scale_parameter", "warmup_init"})


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The part of the optimizer's state that is not stored per parameter."""

    groups: tuple[ParamGroup, ...]
    """The param groups; none where the source keeps no hyper-parameters."""
    decoupled_weight_decay: bool | None = None
    """True for AdamW, False for Adam, as far as something other than the groups says so."""
    rank_numbers: tuple[str, ...] = ()
    """Names of states that are one number per rank's partition and differ. Other partitions have no such number."""
    unread: tuple[str, ...] = ()
    """Names of states that only the source's own format keeps, each with its class: quantized ones."""

    @property
    def is_adafactor(self) -> bool:
        """True if it is Adafactor of transformers, by its hyper-parameters: torch's and timm's have others."""
        return bool(self.groups) and all(_ADAFACTOR_KEYS.issubset(g.hyper_parameters) for g in self.groups)


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts of the run's steps, samples and tokens; None where the source does not say."""

    steps: int | None = None
    """Steps of the optimizer, skipped ones included."""
    skipped_steps: int | None = None
    """Steps that were skipped because gradients overflowed."""
    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two tensors that must hold the same elements: copies, or a master and the weight that is its rounding."""

    fqn: str
    state: str
    first: int
    other: int
    where: str
    """The place of `other`, in words for people."""
    rounded: bool = False
    """True if `other` is `first`, rounded to the element type of `other`."""
    advisory: bool = False
    """True if `first` is used in any case, so that a difference is only reported."""
    fix: str = ""
    """What helps against a difference; empty where nothing but the rules of tensor parallelism decides it."""
    code: str = "checkpoint.disagreement"
    """The code of the error for a difference: a format may know what caused it."""
    every: bool = False
    """True if every element is compared, however large the tensors are; else blocks of large rounded ones are."""


class Question(StrEnum):
    """The questions that the files of a checkpoint may leave open. The user answers them (`SourceChoices`)."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    ORDER = "order"
    """The names of parameters that the optimizer numbers."""
    GROUPS = "groups"
    """The order of the optimizer's param groups."""
    MEMBERS = "members"
    """The parameters of each param group."""
    BUFFERS = "buffers"
    """The tensors that are buffers. All others that no optimizer trains are frozen parameters."""


OF_TRAINING = (
    Question.OPTIMIZER,
    Question.SCHEDULER,
    Question.ORDER,
    Question.GROUPS,
    Question.MEMBERS,
    Question.BUFFERS,
)
"""The questions that do not matter to targets which hold all weights."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """A question that the files leave open. The checkpoint goes on with one of the answers, which nothing may rely on.

    A target that depends on the answer is refused until the user chooses.
    """

    question: Question
    text: str
    fix: str

    def error(self) -> SourceError:
        """The refusal of a target that depends on the answer."""
        return SourceError("checkpoint.ambiguous", self.text, fix=self.fix)


@dataclass(frozen=True, slots=True)
class LossScale:
    """A loss scale of fp16 that doubles after enough steps without overflow, and is halved where gradients overflow."""

    scale: float
    good_steps: int
    """Steps without overflow that count: it doubles with the one that makes them `window`. -1 where one more is due."""
    overflows: int
    """The number of the overflow from now on that halves it: 1 for the next one."""
    window: int
    hysteresis: int
    """`overflows` after the scale has doubled."""
    least: float | None
    """The scale below which it does not fall; None where nothing says it."""
    entries: tuple[str, ...] = ()
    """The names in the facts' `own_state` that hold it."""


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """The base class of the records of facts; each format family has its own, which no other family reads.

    A family overrides `run_state`, `own_state` and `trees` if its files have names of their own for the run's state.
    """

    engine_names: ClassVar[bool] = False
    """True if only the engine that saved the files loads `Checkpoint.run_names`; a script loads the model's own."""
    lists_shapes: ClassVar[bool] = False
    """True if the files list the shapes of parameters apart from their tensors."""

    def run_state(self, checkpoint: Checkpoint) -> Mapping[str | int, Node]:
        """Counters, schedulers, one rank's random states and client state, by the names of the source's files."""
        counted = {f.name: getattr(checkpoint.counters, f.name) for f in fields(checkpoint.counters)}
        found: dict[str | int, Node] = {name: value for name, value in counted.items() if value is not None}
        found |= {"schedulers": PList([*checkpoint.schedulers])} if checkpoint.schedulers else {}
        for states in checkpoint.rng[:1]:
            found |= {**states}
        return {**found, **checkpoint.client_state}

    def own_state(self) -> Mapping[str | int, Node]:
        """The parts of the run's state that no field of a checkpoint holds: only this format has a place for them."""
        return {}

    def loss_scale(self) -> LossScale | None:
        """The loss scale of an fp16 run; None for other runs, and where not all of it is known."""
        return None

    def cause(self, checkpoint: Checkpoint, differing: Sequence[Agreement]) -> tuple[str, str] | None:
        """The cause of tensors that differ and must not, as the end of a sentence, and a fix; None if nothing is known.

        It may read a few elements of the checkpoint.
        """
        return None

    def of_others(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The names in `run_state` of what belongs to models and optimizers that were not read."""
        return ()

    def group_states(self, checkpoint: Checkpoint) -> Iterator[tuple[Mapping[str | int, Node], dict[str, set[str]]]]:
        """The hyper-parameters of each param group, and the names of the states of its parameters that have states."""
        for number, group in enumerate(() if checkpoint.optimizer is None else checkpoint.optimizer.groups):
            begun = {p.fqn: {*p.states} - {"fp32"} for p in checkpoint.members(number)}
            yield group.hyper_parameters, {name: states for name, states in begun.items() if states}

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """All inert trees, each with the path at which the source's files hold it."""
        yield from ((node, f"module.{name}") for name, node in checkpoint.extra_states.items())
        yield mapping_of({**self.run_state(checkpoint)}), ""
        yield from ((mapping_of({**states}), "") for states in checkpoint.rng)
        groups = checkpoint.optimizer.groups if checkpoint.optimizer is not None else ()
        yield from ((mapping_of({**g.hyper_parameters}), f"param_groups[{i}]") for i, g in enumerate(groups))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A training state as data: metadata and extents, no tensor bytes."""

    url: str
    tag: str | None
    format: str
    """Name of the reader's format, for people."""
    framework_version: str | None
    world: Mapping[str, int]
    files: tuple[SourceFile, ...]
    shard_map: ShardMap
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    shared: Mapping[str, str]
    """Alias name to owner name of tied parameters."""
    optimizer: OptimizerState | None
    """None for a source without optimizer states, or if they were not read."""
    foreign_globals: tuple[str, ...]
    warnings: tuple[str, ...]
    agreements: tuple[Agreement, ...] = ()
    """Pairs of tensors that are equal if the parts were joined rightly. They are compared before writing."""
    counters: Counters = Counters()
    schedulers: tuple[Node, ...] = ()
    """The state dicts of learning-rate schedulers. In every tree of a checkpoint a `PTensorRef` stands for a tensor."""
    scheduler_keys: tuple[str, ...] = ()
    """The names of the schedulers in the source, where they have any."""
    own_scheduler: int | None = 0
    """Index of the scheduler that changes this optimizer's learning rates; None if it has none."""
    rng: tuple[Mapping[str, Node], ...] = ()
    """Random states by rank, for each rank whose random states the source keeps."""
    client_state: Mapping[str | int, Node] = field(default_factory=dict[str | int, Node])
    """Everything else that the training script saved with the checkpoint, by its own keys."""
    model_files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Contents of configuration, tokenizer and similar files by file name, for targets that hold them too."""
    run_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names of the run that saved it, by name, where wrapping modules made them longer. That run loads those."""
    module_names: tuple[str, ...] = ()
    """Names of the model's state dict, in its order (param groups have another); empty where nothing shows it."""
    extra_states: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Entries of the model's state dict that are not tensors, by name, such as torch's extra states of modules."""
    not_carried: tuple[NotCarried, ...] = ()
    """Everything that the source holds and this checkpoint does not."""
    unexplained: tuple[str, ...] = ()
    """Parameters that tensor parallelism cut in a way that nothing describes; the map holds their first part only."""
    facts: FormatFacts = FormatFacts()
    """The format's own record of facts."""
    unties: bool = False
    """True if names that the source ties are separate here. A configuration that calls them tied would be wrong."""
    family: str = ""
    """Name of the format whose reader read it; empty for a checkpoint that no reader made."""
    undecided: tuple[Undecided, ...] = ()
    """The questions that the files and the user leave open."""
    assumed: tuple[Undecided, ...] = ()
    """The questions that nobody answered, and nothing proves, with the answer that was taken as the likely one.

    A target that depends on one says so in a warning.
    """
    unproven: frozenset[str] = frozenset()
    """Names of tensors of which nothing proves whether they are buffers or frozen parameters."""
    copies: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tensors of the aliases in `shared` that are tied because they are equal, where nothing else says so."""
    no_optimizer: str = ""
    """The reason why there is no optimizer, a part of a sentence; empty where the files hold none."""
    frozen_left_out: bool = False
    """True if the save left out frozen weights, or may have left them out (`exclude_frozen_parameters`)."""

    def __post_init__(self) -> None:
        """Prove that names are distinct, states have their parameter's shape, and tensors share bytes within reason.

        Raises:
            SourceError: `checkpoint.ambiguous`, `checkpoint.malformed`, `tensor.amplification`.
        """
        owners = Counter((*(p.fqn for p in self.parameters), *(b.fqn for b in self.buffers)))
        if twice := next((name for name, count in owners.items() if count > 1), None):
            raise SourceError(
                "checkpoint.ambiguous", f"the checkpoint has two tensors that are called {printable(twice)}"
            )
        tensors = self.shard_map.tensors
        stored = (t for i, t in enumerate(tensors) if i not in self.shard_map.derived)
        wanted, held_bytes = sum(t.size_bytes for t in stored), sum(f.size_bytes for f in self.files)
        if wanted > MAX_AMPLIFICATION * held_bytes:
            raise SourceError(
                "tensor.amplification", f"its tensors have {wanted} bytes, and its files only {held_bytes} bytes"
            )
        for parameter in self.parameters:
            numbers = [*parameter.states.values(), *([] if parameter.weight is None else [parameter.weight])]
            for stored in (tensors[n] for n in numbers):
                if stored.shape != parameter.shape:
                    raise SourceError(
                        "checkpoint.malformed",
                        f"{printable(stored.state)} of {printable(parameter.fqn)} is {stored.shape}, "
                        f"the parameter is {parameter.shape}",
                    )

    @classmethod
    def of_trees(
        cls,
        facts: FormatFacts,
        *,
        url: str,
        kind: str,
        files: Sequence[SourceFile],
        shard_map: ShardMap,
        foreign: Iterable[str],
    ) -> Self:
        """Files of which nothing is known but their trees, which `facts` hold: no parameters, and no training state.

        `kind` names the format for people; `foreign` has the globals of the pickles that are not on the allow-list.
        """
        return cls(
            url=url,
            tag=None,
            format=kind,
            framework_version=None,
            world={},
            files=tuple(files),
            shard_map=shard_map,
            parameters=(),
            buffers=(),
            shared={},
            optimizer=None,
            facts=facts,
            foreign_globals=tuple(sorted(foreign)),
            warnings=(),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and buffers by name."""
        buffers = {b.fqn: self.shard_map.tensors[b.tensor].shape for b in self.buffers}
        return buffers | {p.fqn: p.shape for p in self.parameters}

    def as_in_the_run(self) -> Checkpoint:
        """The checkpoint under the names that its run loads."""
        return replace(self.renamed(self.run_names), run_names={}) if self.run_names else self

    def as_in_the_script(self) -> Checkpoint:
        """The checkpoint under the names that a script of its run loads without an engine such as DeepSpeed's."""
        return self.as_in_the_run() if self.script_names else self

    @property
    def script_names(self) -> Mapping[str, str]:
        """The names, by name, that a script of its run loads where wrapping modules made them longer."""
        return {} if self.facts.engine_names else self.run_names

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """The checkpoint with other names of parameters, buffers, aliases and extra states; others stay."""
        tensors = tuple(replace(t, fqn=names.get(t.fqn, t.fqn)) for t in self.shard_map.tensors)
        return replace(
            self,
            parameters=tuple(replace(p, fqn=names.get(p.fqn, p.fqn)) for p in self.parameters),
            buffers=tuple(replace(b, fqn=names.get(b.fqn, b.fqn)) for b in self.buffers),
            shared={names.get(a, a): names.get(o, o) for a, o in self.shared.items()},
            copies={names.get(a, a): number for a, number in self.copies.items()},
            shard_map=replace(self.shard_map, tensors=tensors),
            module_names=tuple(names.get(n, n) for n in self.module_names),
            extra_states={names.get(n, n): node for n, node in self.extra_states.items()},
            agreements=tuple(replace(a, fqn=names.get(a.fqn, a.fqn)) for a in self.agreements),
            unexplained=tuple(names.get(n, n) for n in self.unexplained),
            unproven=frozenset(names.get(n, n) for n in self.unproven),
        )

    @property
    def padding_rows(self) -> int:
        """Rows of padding that the source holds behind a vocabulary."""
        tensors = self.shard_map.tensors
        return max((tensors[n].shape[0] for p in self.parameters for n in p.padding.values()), default=0)

    @property
    def scheduler(self) -> Node | None:
        """The scheduler of the optimizer, for targets that keep one; None if there is none."""
        number = self.own_scheduler
        return self.schedulers[number] if self.schedulers and number is not None else None

    def refuse_undecided(self, *indifferent: Question) -> None:
        """Refuse a use of this checkpoint that depends on a question which nobody has answered.

        Args:
            *indifferent: The questions that it does not depend on.

        Raises:
            SourceError: `checkpoint.ambiguous`.
        """
        for undecided in self.undecided:
            if undecided.question not in indifferent:
                raise undecided.error()

    @property
    def is_local(self) -> bool:
        """True if all its files are on this machine, so that no read waits for a network."""
        return all(f.store.scheme == "file" for f in self.files)

    @property
    def pin_warnings(self) -> tuple[str, ...]:
        """A warning if the store reports neither versions nor times of files, so that some changes go unnoticed."""
        count = sum(not i.pin for f in self.files for i in f.objects)
        if not count:
            return ()
        files = counted(count, "file has", "files have")
        text = (
            f"{files} neither a version nor a time in {self.files[0].store.scheme}://: if another file of the same "
            "size replaces one of them while it is read, that goes unnoticed"
        )
        return (text,)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that the optimizer owns, in its order."""
        return tuple(p for p in self.parameters if p.trained)

    def members(self, group: int) -> tuple[Parameter, ...]:
        """The parameters of a param group, in its order."""
        return tuple(p for p in self.parameters if p.group == group)

    @property
    def frozen(self) -> tuple[Parameter, ...]:
        """The parameters that the optimizer does not own."""
        return tuple(p for p in self.parameters if not p.trained)
