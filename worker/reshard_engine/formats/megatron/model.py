"""The parameters of a checkpoint of Megatron-core as they are put together: weights, states, padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import SourceError, counted, listed, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import (
    Agreement,
    Buffer,
    Checkpoint,
    FormatFacts,
    LossScale,
    Parameter,
    Scalar,
    Undecided,
)
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.format import ReadOptions
from reshard_engine.formats.megatron.common import CommonState, ReadGroups
from reshard_engine.formats.megatron.names import BUFFERS, VOCABULARY, KeyRules
from reshard_engine.pickles.nodes import Node
from reshard_engine.tensors.cuts import Cut, CutError, joined, rows_of, whole_shape
from reshard_engine.tensors.shard_map import ShardMapBuilder

TRACKER = "latest_checkpointed_iteration.txt"
STEP_DIRECTORY = "iter_{:07d}"
RELEASE = "release"
"""The name of a checkpoint that begins a run of others, and the text of the tracker that names it."""
DESCRIPTION = "metadata.json"
COMMON, COMMON_ENTRY = "common.pt", "common_state"
"""The file, and the entry, that may hold the common state."""
RANDOM = "rng_state"
_EXTRA_REASON = "extra states of modules, which only Megatron-core reads: they hold scales of FP8, or nothing"
DAMAGED = "checkpoint.damaged"
NOT_THOSE = (
    "the optimizer states are at other places than Megatron-core puts them, or are those of another save: "
    "--damaged drop-optimizer takes the weights alone"
)
_OTHER_RANKS = "the files are of different saves or runs: copy those of one save"


@dataclass(frozen=True, slots=True)
class MegatronFacts(FormatFacts):
    """The facts that only Megatron-core keeps."""

    common: CommonState
    random_states: Mapping[tuple[int, ...], Node] = field(default_factory=dict[tuple[int, ...], Node])
    """Random states by pipeline and tensor-parallel rank."""
    steps: Sequence[Scalar | None] = ()
    """The count of steps of each param group."""
    scaler: Node = None
    """The state of the loss scaler; None for a run without one."""
    rules: KeyRules = field(default_factory=KeyRules)
    """The facts that decide the keys of parameters in a distributed checkpoint."""
    extra_states: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Extra states of modules by name (`decoder.layers.3.mlp.linear_fc1._extra_state`), read for `--to megatron`."""
    scale: LossScale | None = None
    """The loss scale in `scaler`, where the files and the arguments say all of it; for targets of other formats."""
    any_layout: bool = False
    """True for files that Megatron-core loads at any tensor, pipeline and data parallelism."""
    of_run: bool = True
    """False if there was no run of Megatron-core: its arguments are those that the shapes of a model prove."""

    def own_state(self) -> Mapping[str | int, Node]:
        """The arguments of the run, its random states, and the rest of the common state."""
        known = {"optimizer", "opt_param_scheduler", "iteration"}
        own = {k: v for k, v in self.common.items.items() if k not in known}
        return own | ({RANDOM: f"of {counted(len(self.random_states), 'rank')}"} if self.random_states else {})

    def loss_scale(self) -> LossScale | None:
        """As `scale` has it."""
        return self.scale


def extra_states(count: int) -> NotCarried:
    """So many extra states of modules, which are not carried."""
    return NotCarried(path=f"*._extra_state ({counted(count, 'object')})", reason=_EXTRA_REASON)


class ModelBuilder:
    """Collects tensors by the name of their parameter and by state; `weight` is the model's own tensor."""

    def __init__(self, builder: ShardMapBuilder, common: CommonState) -> None:
        """Begin without parameters."""
        self._builder, self._common = builder, common
        self.order: dict[str, None] = {}
        """The names in the order in which they came."""
        self.weights: dict[str, int] = {}
        self.states: dict[str, dict[str, int]] = {}
        self.padding: dict[str, dict[str, int]] = {}
        self.agreements: list[Agreement] = []
        self.rules = KeyRules()
        self.extra_states: dict[str, Node] = {}
        self.scaler: Node = common.scaler()

    def data_rows(self, name: str, shape: Sequence[int]) -> int | None:
        """The rows of a padded vocabulary that hold data; None for every other tensor."""
        rows = self._common.number("vocab_size")
        return rows if name in VOCABULARY and rows is not None and shape and rows < shape[0] else None

    def add(self, name: str, state: str, number: int) -> None:
        """Add a tensor of a parameter, without padding.

        Raises:
            SourceError: `checkpoint.ambiguous` for a tensor that came before.
        """
        self.order.setdefault(name)
        held, key = (self.weights, name) if state == "weight" else (self.states.setdefault(name, {}), state)
        if held.setdefault(key, number) != number:
            raise SourceError("checkpoint.ambiguous", f"{printable(state)} of {printable(name)} comes twice")

    def add_parts(self, name: str, state: str, cut: Cut, parts: Sequence[int], where: Sequence[str]) -> int:
        """Add a tensor that tensor-parallel ranks hold parts of; returns its number, padding included.

        Args:
            name: The parameter.
            state: The state.
            cut: How it is cut.
            parts: The tensors of the ranks, in their order.
            where: The place of each part, in words for people.

        Raises:
            SourceError: `checkpoint.mixed` for parts that do not fit together.
        """
        number = self.whole(name, state, cut, parts, where)
        shape = self._builder.tensors[number].shape
        rows = self.data_rows(name, shape)
        if rows is None:
            self.add(name, state, number)
            return number
        view = self._builder.view
        self.padding.setdefault(name, {})[state] = view(
            name, state, rows_of(shape, number, rows, shape[0]), (shape[0] - rows, *shape[1:])
        )
        self.add(name, state, view(name, state, rows_of(shape, number, 0, rows), (rows, *shape[1:])))
        return number

    def whole(self, name: str, state: str, cut: Cut, parts: Sequence[int], where: Sequence[str]) -> int:
        """Join the parts of a tensor, or compare its copies; returns its number.

        Raises:
            SourceError: As `add_parts`.
        """
        tensors = self._builder.tensors
        if len({tensors[p].dtype for p in parts}) > 1:
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(state)} of {printable(name)} has another type in {where[0]} than in others",
                fix=_OTHER_RANKS,
            )
        try:
            shape = whole_shape(cut, [tensors[p].shape for p in parts])
            if len(parts) > 1 and cut.dim is not None:
                return self._builder.view(name, state, joined(cut, shape, parts), shape)
        except (CutError, ValueError) as error:
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(state)} of {printable(name)} does not fit together: {error}",
                fix=_OTHER_RANKS,
            ) from error
        for other, place in zip(parts[1:], where[1:], strict=True):
            self.agree(name, state, parts[0], other, place)
        return parts[0]

    def agree(self, name: str, state: str, first: int, other: int, where: str) -> None:
        """Note two copies that must be equal."""
        self.agreements.append(Agreement(name, state, first, other, where, fix=_OTHER_RANKS))

    def dims(self) -> dict[str, int]:
        """The parameters with optimizer states, each with its number of dimensions."""
        tensors = self._builder.tensors
        return {name: len(tensors[next(iter(s.values()))].shape) for name, s in self.states.items()}

    def checkpoint(
        self,
        url: str,
        kind: str,
        files: Sequence[SourceFile],
        options: ReadOptions,
        groups: ReadGroups | None,
        *,
        unread: Undecided | None,
        random_states: Mapping[tuple[int, ...], Node],
        not_carried: Iterable[NotCarried],
    ) -> Checkpoint:
        """The checkpoint of everything that was added.

        Args:
            url: Its directory.
            kind: Name of the form of its files, for people.
            files: The files of the shard map.
            options: Those of reading.
            groups: The param groups; None for a checkpoint without optimizer, or if it was not read.
            unread: The reason why the optimizer was not read; None if it was, or there is none.
            random_states: By pipeline and tensor-parallel rank.
            not_carried: What the files hold and the checkpoint does not.

        Raises:
            SourceError: `checkpoint.coverage`, `checkpoint.incomplete` for states without a weight.
        """
        parameters, buffers, unproven = self.parameters(groups)
        common, undecided = self._common, () if unread is None else (unread,)
        scheduler, version = common.items.get("opt_param_scheduler"), common.args.get("megatron_version")
        return Checkpoint(
            url=url,
            tag=options.tag,
            format=kind,
            framework_version=version if isinstance(version, str) else None,
            world=common.world(),
            files=tuple(files),
            shard_map=self._builder.build(),
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            shared={},
            optimizer=None if groups is None else groups.state,
            foreign_globals=tuple(sorted(options.ledger.foreign)),
            warnings=tuple(self.warnings()),
            agreements=(*self.agreements, *self.roundings()),
            counters=common.counters(),
            schedulers=() if scheduler is None else (scheduler,),
            module_names=tuple(n for n in self.order if n in self.weights),
            not_carried=tuple(not_carried),
            facts=MegatronFacts(
                common,
                random_states,
                () if groups is None else groups.steps,
                self.scaler,
                self.rules,
                self.extra_states,
            ),
            undecided=undecided if groups is None else groups.undecided,
            assumed=() if groups is None else groups.assumed,
            unproven=frozenset(unproven),
            no_optimizer="" if unread is None else unread.text,
        )

    def parameters(self, groups: ReadGroups | None) -> tuple[list[Parameter], list[Buffer], list[str]]:
        """The parameters, the buffers, and the names of which nothing proves what they are.

        Args:
            groups: The param groups; None for a checkpoint without optimizer, or if it was not read.
        """
        if groups is not None and (alone := sorted(self.states.keys() - self.weights.keys())):
            raise SourceError(
                "checkpoint.incomplete",
                f"{counted(len(alone), 'parameter has', 'parameters have')} states and no weight: {listed(alone)}",
                fix=_OTHER_RANKS,
            )
        parameters, buffers, unproven = list[Parameter](), list[Buffer](), list[str]()
        for name in self.order:
            weight, states = self.weights.get(name), self.states.get(name, {})
            if BUFFERS.fullmatch(name) and weight is not None and not states:
                buffers.append(Buffer(name, weight))
                continue
            number = weight if weight is not None else next(iter(states.values()))
            group = None if groups is None or not states else groups.group.get(name)
            if groups is not None and not states:
                unproven.append(name)
            step = None if groups is None or group is None or not groups.steps else groups.steps[group]
            parameters.append(
                Parameter(
                    name,
                    self._builder.tensors[number].shape,
                    group,
                    weight,
                    states=states if groups is not None else {},
                    scalars={} if step is None else {"step": step},
                    padding=self.padding.get(name, {}),
                )
            )
        return parameters, buffers, unproven

    def roundings(self) -> Iterable[Agreement]:
        """Agreements that find states of other weights: each weight in the model's dtype is its rounded master."""
        for name, states in self.states.items():
            if "fp32" in states and name in self.weights:
                yield Agreement(
                    name, "fp32", states["fp32"], self.weights[name], "the weight of that name", rounded=True,
                    fix=NOT_THOSE, code=DAMAGED,
                )  # fmt: skip

    def warnings(self) -> Iterable[str]:
        """Warnings about the parameters."""
        padded = any(n in VOCABULARY for n in self.order) and self._common.number("padded_vocab_size") is not None
        if padded and self._common.number("vocab_size") is None:
            yield "the files do not say how many rows of the vocabulary are padding: all of them are kept"
