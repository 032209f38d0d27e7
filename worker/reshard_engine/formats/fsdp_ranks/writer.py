"""Files of FSDP's ranks for any number of ranks, as verl, SkyRL and Accelerate without DCP load them.

Their loaders copy each tensor onto one of the run, which torch does between equal meshes only: shape, names of the
axes and type of the devices must be those of the run. Storages are as long as the shards; FSDP2's own are padded.

FSDP1 is written for verl, from verl's files of FSDP1. Its models are rows on a mesh, as those of FSDP2. Its optimizer
keeps slices of flat parameters, one for each module that FSDP wraps (a unit):

- `use_orig_params=False`: one state for each unit, of one length on all ranks, with zeros behind the last element.
- `use_orig_params=True`: the slices of each parameter that lie on the rank, and nothing for parameters of which it
  holds nothing. Each parameter of a unit begins at a multiple of 16 bytes of the type that the run computes in. No file
  says that type: the cuts of the source's ranks prove it, and where they leave two ways that differ, it is refused.

Source: torch 2.13.0 `distributed/tensor/_dtensor_spec.py`, `distributed/device_mesh.py` (`__eq__`, `__setstate__`),
`distributed/fsdp/_fully_shard/_fsdp_param.py` (rows by `torch.chunk`; no shards of tensors without dimensions),
`distributed/fsdp/_flat_param.py` (`_init_flat_param_and_metadata`: padding; `_get_shard`: equal shares),
`distributed/fsdp/_init_utils.py` (one rank is not sharded); verl
0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py`, `workers/engine/fsdp/utils.py` (`create_device_mesh`),
`workers/config/optimizer.py` (one group of all parameters); accelerate 1.15.0 `utils/fsdp_utils.py`; SkyRL
0.3.0 `backends/skyrl_train/distributed/fsdp_strategy.py`; verified by loading with all three.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from reshard.choices import OpaquePolicy, RankFramework, RngPolicy
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.options import FsdpRanksOptions
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.carried import AS_ASKED, OF_ANOTHER, named, padding_left_out
from reshard_engine.formats.dtensors import Shape, TensorsOfRank
from reshard_engine.formats.fsdp_ranks.files import (
    CLIENT,
    CONFIG,
    FSDP2,
    RNG,
    SCHEDULER,
    STRATEGY,
    VERSION,
    RankFacts,
    SavedRanks,
)
from reshard_engine.formats.model_weights import plain_name
from reshard_engine.formats.rank_states import (
    NO_GROUPS,
    NO_OPTIMIZER,
    VERSIONS,
    TargetRanks,
    device_and_shape,
    model_entries,
    number_entries,
    state_entries,
    steps_rates,
)
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.formats.trainer_files import RANK_STATES
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    PRuns,
    is_mapping,
    mapping_items,
    mapping_of,
    ordered_dict,
)
from reshard_engine.tensors.layout import ZEROS, TargetFile, TargetLayout, literal_template

_NUMBERING = (RankFramework.VERL, RankFramework.SKYRL)
"""Frameworks whose optimizer numbers parameters. They have the same names of files, too."""
_FLATTENING = RankFramework.VERL
"""The framework whose files of FSDP1 are written: SkyRL has FSDP2 alone, and Accelerate does not load its own."""
_AXES: Mapping[int, tuple[str, ...]] = {1: ("fsdp",), 2: ("ddp", "fsdp")}
"""The axes of verl's and SkyRL's meshes, by their number."""
_RANDOM = frozenset({"cpu", "numpy", "random"})
"""The random states that verl and SkyRL look up."""
_NO_PLACE = "files of these ranks have no place for it"
_FOR_FSDP2 = "the files are those of FSDP2 (fully_shard; strategy fsdp2 of verl) in torch 2.13 or newer"


class FsdpRanksWriter:
    """Lays out the files of all ranks."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out model, optimizer and extra state of each rank.

        Raises:
            RequestError: `request.invalid` for options that do not go with it; `request.unsatisfiable` for a source
                whose states have no place in such files, or that does not say what they must.
            SourceError: `checkpoint.ambiguous`, `pickle.forbidden_global`.
        """
        if request.dtype is not None or request.exclude_frozen:
            raise RequestError(
                "request.invalid",
                "files of FSDP's ranks hold all parameters as the optimizer has them: no --dtype, no --exclude-frozen",
                fix="leave --dtype and --exclude-frozen out",
            )
        checkpoint = checkpoint.as_in_the_script()
        target = _Target.of(checkpoint, request)
        files = _Files(target)
        laid = [*files.of_all_ranks()]
        ordered = (*(f for f in laid if not f.commit), *(f for f in laid if f.commit))
        return TargetLayout(ordered, None, tuple(_warnings(target)), not_carried=tuple(_left_out(target)))


# The target's mesh and framework: as the user says, else as the source's files say.


@dataclass(frozen=True)
class _Target(TargetRanks):
    """The ranks that load the files, and what they expect."""

    saved: SavedRanks | None
    """How the source's run saved it, if it saved files of ranks."""
    framework: RankFramework
    fsdp: int
    """The version of FSDP of the run that loads the files."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    @property
    def has_numbers(self) -> bool:
        """True if the optimizer numbers its parameters."""
        return self.framework in _NUMBERING

    @property
    def own(self) -> bool:
        """True if the source was saved by a framework that keeps the same things in the same files."""
        return self.saved is not None and (self.saved.framework in _NUMBERING) is self.has_numbers

    @property
    def versions(self) -> Node:
        """The versions of the model's modules; None where nothing says them under the names of this run."""
        return self.saved.run.versions if self.saved is not None and self.own and self.saved.fsdp == self.fsdp else None

    @property
    def random_states(self) -> Sequence[Mapping[str, Node]]:
        """The random states by source rank; none where these frameworks have no use for them, or if asked so."""
        facts, rng = self.checkpoint.facts, self.request.rng
        if not self.has_numbers or rng is RngPolicy.DROP or not isinstance(facts, RankFacts):
            return ()
        return facts.rank_states if all(states.keys() >= _RANDOM for states in facts.rank_states) else ()

    @property
    def scheduler(self) -> Node:
        """The state dict of the scheduler; None if there is none of torch."""
        found = self.checkpoint.scheduler if self.has_numbers else None
        return found if self.own or steps_rates(found) else None

    @cached_property
    def extra(self) -> Mapping[str | int, Node] | None:
        """The part of the extra state that all ranks have alike; None if there is no such file.

        verl's loader asks for it unless it is told not to; the file is left out where the source of the same kind has
        none.
        """
        if not self.has_numbers or (self.saved is not None and self.own and not self.saved.has_extra):
            return None
        scheduler = self.carried(self.scheduler)
        if self.framework is RankFramework.VERL:
            return {SCHEDULER: scheduler}
        client = mapping_of({k: self.carried(v) for k, v in self.checkpoint.client_state.items()})
        return {SCHEDULER: mapping_of({}) if scheduler is None else scheduler, CLIENT: client, "tag": None}

    @property
    def strategy(self) -> str:
        """SkyRL's word for FSDP2: that of a source of FSDP2."""
        own = self.saved.strategy if self.saved is not None and self.saved.fsdp == self.fsdp else ""
        return own or FSDP2

    @classmethod
    def of(cls, checkpoint: Checkpoint, request: ConvertRequest) -> _Target:
        options = request.options.of(FsdpRanksOptions)
        facts = checkpoint.facts
        saved = facts.saved if isinstance(facts, RankFacts) else None
        framework = options.rank_framework or (None if saved is None else saved.framework)
        if framework is None:
            raise RequestError(
                "request.invalid",
                "files of FSDP's ranks have other names and keys for each framework, and the source is of none",
                fix="say which one loads them: --rank-framework verl, skyrl or accelerate",
            )
        version = _version(options.fsdp_version, framework, saved, optimizer=checkpoint.optimizer is not None)
        run = None if saved is None else saved.run
        device, shape = device_and_shape(request, run)
        if version == 1:
            _require_one_copy(shape)
        names = _names(framework, saved, len(shape))
        return cls(checkpoint, request, run, device, shape, names, saved, framework, version)


def _version(said: int | None, framework: RankFramework, saved: SavedRanks | None, *, optimizer: bool) -> int:
    """The version of FSDP of the run, as the user says it, else the source.

    Args:
        said: The user's word.
        framework: The one that loads the files.
        saved: How the source's run saved it.
        optimizer: True if there is one, of which FSDP1 keeps flat parameters.

    Raises:
        RequestError: `request.unsatisfiable` for FSDP1 without verl's files of FSDP1, and for a source that does not
            say which one it is of.
    """
    version = said or (2 if saved is None else saved.fsdp)
    if version == 2:
        return version
    origin = None if saved is None else saved.fsdp
    flat = origin == 1 or (origin is None and not optimizer)
    if version == 1 and flat and saved is not None and saved.framework is framework is _FLATTENING:
        return version
    fix = "set the run to FSDP2 (strategy fsdp2 of verl, fsdp_version 2 of Accelerate) and say so: --fsdp-version 2"
    if version is None:
        text = "the source does not say if its run uses FSDP1 or FSDP2, whose files differ"
        fix += "; for verl with FSDP1: --fsdp-version 1"
    else:
        text = "the run uses FSDP1" if said else "the source was saved by FSDP1, and so its run loads files of FSDP1"
        why = f"{framework} loads none" if origin == 1 else "nothing says which modules are its units"
        text = f"{text}; files of FSDP2 are written, and none of FSDP1 but from verl's own for verl: {why}"
    raise RequestError("request.unsatisfiable", text, fix=fix)


def _require_one_copy(shape: Shape) -> None:
    """Refuse runs of FSDP1 that keep their optimizer in another form.

    Source: torch 2.13.0 `distributed/fsdp/_init_utils.py` (`NO_SHARD` for one rank); verl 0.9.1
    `workers/engine/fsdp/utils.py` (`get_sharding_strategy`: HYBRID_SHARD on a mesh of two axes).
    """
    if len(shape) == 1 and shape[0] > 1:
        return
    text = "keeps whole parameters on one rank (NO_SHARD)" if len(shape) == 1 else "of replicas is HYBRID_SHARD"
    raise RequestError(
        "request.unsatisfiable",
        f"FSDP1 {text}, and only files of FULL_SHARD are written",
        fix="--dp 2 or more, without replicas, or a run of FSDP2: --fsdp-version 2",
    )


def _names(framework: RankFramework, saved: SavedRanks | None, axes: int) -> tuple[str, ...] | None:
    """The names of the mesh's axes: the source's if its framework and the number of axes are the same."""
    mesh = None if saved is None or saved.framework is not framework else saved.run.mesh
    if mesh is not None and len(mesh.shape) == axes:
        return mesh.names
    return _AXES[axes] if framework in _NUMBERING else None


# The optimizer's keys.


@dataclass(frozen=True)
class _Keys:
    """The optimizer's key of each parameter by its name, and those of each param group."""

    keys: Mapping[str, str | int]
    lists: Sequence[Sequence[str | int]]


def _keys_of(target: _Target) -> _Keys:
    """Names for Accelerate. Numbers for verl and SkyRL: the source's own, else in the order of the model.

    Raises:
        RequestError: `request.unsatisfiable` if nothing says the numbers.
    """
    checkpoint = target.checkpoint
    groups = range(len(checkpoint.optimizer.groups if checkpoint.optimizer is not None else ()))
    if not target.has_numbers:
        keys = {p.fqn: p.fqn for p in checkpoint.trained}
        return _Keys(keys, [[p.fqn for p in checkpoint.members(g)] for g in groups])
    if target.run is not None and target.numbers:
        return _Keys(target.numbers, target.run.lists)
    if len(groups) > 1:
        raise RequestError(
            "request.unsatisfiable",
            f"the source has {len(groups)} param groups, and {target.framework} makes one of all parameters",
            fix="--rank-framework accelerate keeps groups, and --to dcp, too",
        )
    names = {p.fqn for p in checkpoint.parameters}
    order = list(dict.fromkeys(checkpoint.shared.get(n, n) for n in checkpoint.module_names))
    order = [n for n in order if n in names]
    if checkpoint.frozen_left_out or len(order) != len(names):
        lacking = listed([printable(n) for n in sorted(names - {*order})])
        text = f"the place of {lacking} in the model's order is not in it"
        if checkpoint.frozen_left_out:
            text = "it was saved without frozen parameters, which have numbers, too"
        raise RequestError(
            "request.unsatisfiable",
            f"{target.framework} numbers all parameters in the model's order, and the source does not say it: {text}",
            fix="name a checkpoint of the whole model; --rank-framework accelerate and --to dcp need no numbers",
        )
    return _Keys({n: i for i, n in enumerate(order)}, [list(range(len(order))) for _ in groups])


# FSDP1: the optimizer's states are slices of flat parameters.

_WRAPPER = "_fsdp_wrapped_module"
"""The last part of the name of each module that FSDP1 wraps, in the versions of a model's modules."""
_ALIGNMENTS = (2, 4, 8, 16)
"""The elements in 16 bytes of each type that a run may compute in: fp64, fp32, bf16 and fp16, and fp8."""
_OTHERWISE = "go on with FSDP2: strategy fsdp2 of verl, and --fsdp-version 2"


@dataclass(frozen=True)
class _Unit:
    """A flat parameter of FSDP1: the parameters of a module, one after another."""

    members: tuple[Parameter, ...]
    begins: tuple[int, ...]
    """The first element of each parameter in it."""
    length: int
    """The elements up to the end of the last parameter."""

    @classmethod
    def of(cls, members: Sequence[Parameter], aligned: int) -> _Unit:
        """Lay parameters out so that each begins at a multiple of `aligned` elements."""
        begins, at = list[int](), 0
        for parameter in members:
            begins.append(-(-at // aligned) * aligned)
            at = begins[-1] + prod(parameter.shape)
        return cls(tuple(members), tuple(begins), at)

    def share(self, world: int) -> int:
        """The elements of it on each rank. Those behind its end are padding."""
        return -(-self.length // world)

    def on(self, rank: int, world: int) -> Iterator[tuple[Parameter, int, int]]:
        """The parameters that lie on a rank, each with its first and last element there, the latter excluded."""
        share = self.share(world)
        for parameter, begin in zip(self.members, self.begins, strict=True):
            first = max(rank * share - begin, 0)
            last = min((rank + 1) * share - begin, prod(parameter.shape))
            if first < last:
                yield parameter, first, last


def _cuts(units: Sequence[_Unit], world: int) -> dict[int | None, dict[int, int]]:
    """The elements of each weight's parameter by rank, without ranks that hold none."""
    found: dict[int | None, dict[int, int]] = {}
    for unit in units:
        share = unit.share(world)
        for parameter, begin in zip(unit.members, unit.begins, strict=True):
            end = begin + prod(parameter.shape)
            found[parameter.weight] = {
                rank: min(end, (rank + 1) * share) - max(begin, rank * share)
                for rank in (range(begin // share, -(-end // share)) if begin < end else ())
            }
    return found


class _Flat:
    """The units of a run of FSDP1, and what a rank's optimizer holds of them."""

    def __init__(self, target: _Target, saved: SavedRanks) -> None:
        """Find the units as the source has them.

        Raises:
            RequestError: `request.unsatisfiable` where the source does not prove them.
        """
        self._target = target
        self.whole = bool(saved.units)
        """True for `use_orig_params=False`: each unit has one state."""
        self.units = self._of_lengths(saved) if self.whole else self._proven(saved)

    def _of_lengths(self, saved: SavedRanks) -> list[_Unit]:
        """The units of `use_orig_params=False`, whose lengths the reader found to fit.

        Lengths are rounded up to the ranks. Where the model's file names the wrapped modules, they must be the same.
        """
        by_weight = {p.weight: p for p in self._target.checkpoint.parameters}
        named = {tuple(p.weight for p in members) for members in self._members(saved)}
        if named and named != {*saved.units}:
            raise RequestError(
                "request.unsatisfiable",
                f"the model's file names {len(named)} modules that FSDP1 wrapped, and they are others than those whose "
                "flat parameters have the lengths of the optimizer's states",
                fix=_OTHERWISE,
            )
        return [_Unit.of([by_weight[w] for w in unit], 1) for unit in saved.units]

    def _proven(self, saved: SavedRanks) -> list[_Unit]:
        """The units of `use_orig_params=True`, by the names of wrapped modules and the cuts of the source's ranks."""
        world = self._target.checkpoint.world["dp"]
        states = any(p.states.keys() - {"fp32"} for p in self._target.checkpoint.trained)
        if not states:
            return []
        members = self._members(saved)
        if not saved.cuts or not members:
            text = (
                "which modules FSDP1 wrapped" if saved.cuts else "how FSDP1 cuts the states: one rank saved them whole"
            )
            raise RequestError("request.unsatisfiable", f"the source does not say {text}", fix=_OTHERWISE)
        tried = {aligned: [_Unit.of(m, aligned) for m in members] for aligned in _ALIGNMENTS}
        fitting: dict[int, list[_Unit]] = {}
        for aligned, units in tried.items():
            cuts = _cuts(units, world)
            if all([cuts.get(weight)] == [*held] for weight, held in saved.cuts.items()):
                fitting[aligned] = units
        if not fitting:
            raise RequestError(
                "request.unsatisfiable",
                f"the states of the source's {world} ranks are not cut as FSDP1 cuts the {len(members)} modules that "
                "it wrapped, with any padding between parameters",
                fix=_OTHERWISE,
            )
        ways = {aligned: self._of_states(units, saved) for aligned, units in fitting.items()}
        if any(way != ways[next(iter(ways))] for way in ways.values()):
            said = listed([f"{aligned} elements" for aligned in fitting])
            raise RequestError(
                "request.unsatisfiable",
                f"the cuts of the source's {world} ranks fit several paddings between parameters ({said}: 16 bytes of "
                f"the type that the run computes in), which cut {self._target.world} ranks in different ways",
                fix=f"choose another --dp, or {_OTHERWISE}",
            )
        return next(iter(fitting.values()))

    def _of_states(self, units: Sequence[_Unit], saved: SavedRanks) -> dict[int | None, dict[int, int]]:
        """The cuts for the target's ranks of those parameters that have states."""
        return {w: lengths for w, lengths in _cuts(units, self._target.world).items() if w in saved.cuts}

    def _members(self, saved: SavedRanks) -> list[list[Parameter]]:
        """The parameters of each module that FSDP1 wrapped, in the order of the model; none if nothing says them.

        A module's parameters are of the innermost module around them that is wrapped.
        """
        checkpoint = self._target.checkpoint
        versions = saved.run.versions
        names = list(mapping_items(versions, what=VERSIONS)) if is_mapping(versions) else []
        split = (str(name).split(".") for name in names)
        wrapped = {plain_name(".".join(parts)) for parts in split if parts[-1] == _WRAPPER}
        by_name = {p.fqn: p for p in checkpoint.parameters}
        found: dict[str, list[Parameter]] = {}
        for name in dict.fromkeys(checkpoint.shared.get(n, n) for n in checkpoint.module_names):
            if name not in by_name or by_name[name].weight in saved.run.plain:
                continue
            parts = plain_name(name).split(".")
            around = (".".join(parts[:length]) for length in reversed(range(len(parts))))
            unit = next((module for module in around if module in wrapped), None)
            if unit is None:
                return []
            found.setdefault(unit, []).append(by_name[name])
        return list(found.values())

    def states(self, rank: int, keys: Mapping[str, str | int]) -> dict[str | int, dict[str | int, Node]]:
        """The states of a rank by number."""
        world, found = self._target.world, dict[str | int, dict[str | int, Node]]()
        for number, unit in enumerate(self.units):
            held = list(unit.on(rank, world))
            if self.whole:
                found[number] = self._slices(held, unit.members[0], unit.share(world))
                continue
            for parameter, first, last in held:
                if parameter.trained:
                    entries = self._slices([(parameter, first, last)], parameter, last - first)
                    found[keys[parameter.fqn]] = entries
        return found

    def _slices(
        self, held: Sequence[tuple[Parameter, int, int]], first: Parameter, length: int
    ) -> dict[str | int, Node]:
        """The numbers and the states of a flat parameter or of a slice, with zeros behind the last element."""
        tensors = self._target.checkpoint.shard_map.tensors
        found = number_entries(first)
        for state, number in first.states.items():
            if state == "fp32":
                continue
            runs = [(p.states[state], begin, end) for p, begin, end in held]
            if padding := length - sum(end - begin for _, begin, end in runs):
                runs.append((ZEROS, 0, padding))
            found[state] = PRuns(tensors[number].dtype.name, (length,), tuple(runs))
        return found


# The files.


class _Files:
    """Lays out the files of each rank."""

    def __init__(self, target: _Target) -> None:
        """Refuse what these files have no place for.

        Raises:
            RequestError: `request.unsatisfiable`.
        """
        self._target, self._checkpoint = target, target.checkpoint
        target.refuse_unwritable()
        optimizer = target.checkpoint.optimizer
        self._flat: _Flat | None = None
        if target.fsdp == 1 and target.saved is not None and optimizer is not None:
            self._flat = _Flat(target, target.saved)
        self._keys: _Keys | None = None
        if self._flat is not None and self._flat.whole:
            self._keys = _Keys({}, [list(range(len(self._flat.units)))])
        elif optimizer is not None:
            self._keys = _keys_of(target)
        self._extra = target.extra

    def of_all_ranks(self) -> Iterator[TargetFile]:
        """All files. The models' are commit files: without its own no rank's loader goes on."""
        target = self._target
        for number in range(target.world):
            rank = TensorsOfRank(target.mesh, number, target.checkpoint.shard_map.tensors, target.plain)
            if self._keys is not None:
                yield self._file("optim", number, self._optimizer(rank, number, self._keys))
            if self._extra is not None:
                yield self._file("extra_state", number, self._extra_state(number, self._extra))
            yield self._file("model", number, self._model(rank))
        if target.has_numbers:
            said = {VERSION: target.fsdp} if target.framework is RankFramework.VERL else {STRATEGY: target.strategy}
            text = json.dumps({**said, "world_size": target.world}, indent=4)
            yield TargetFile(CONFIG, literal_template(text.encode()), ())
            for path, data in target.saved.beside.items() if target.saved is not None else ():
                yield TargetFile(path, literal_template(data), ())

    def _file(self, item: str, rank: int, node: Node) -> TargetFile:
        target = self._target
        name = f"{item}_world_size_{target.world}_rank_{rank}.pt"
        if not target.has_numbers:
            head = "pytorch_model_fsdp" if item == "model" else "optimizer"
            number = target.saved.number if target.saved is not None else 0
            name = f"{head}_{number}_rank{rank}.bin"
        # The names of DTensors' parts are written, too. Those of the source's own trees were checked by `_carried`.
        shard_map, keep = self._checkpoint.shard_map, OpaquePolicy.KEEP
        template, slots = tree_template(name.rpartition(".")[0], node, shard_map, opaque=keep)
        return TargetFile(name, template, slots, commit=item == "model")

    def _model(self, rank: TensorsOfRank) -> Node:
        found = model_entries(self._checkpoint, rank, self._target.carried)
        if not self._target.has_numbers:
            return mapping_of({**found})
        node = ordered_dict(found)
        if (versions := self._target.versions) is not None:
            node.state, node.has_state = mapping_of({VERSIONS: versions}), True
        return node

    def _optimizer(self, rank: TensorsOfRank, number: int, keys: _Keys) -> Node:
        if self._flat is None:
            held = {keys.keys[p.fqn]: state_entries(p, rank) for p in self._checkpoint.trained}
        else:
            held = self._flat.states(number, keys.keys)
        states = {k: mapping_of(s) for k, s in held.items() if s}
        if self._target.has_numbers:
            states = dict(sorted(states.items(), key=lambda item: int(item[0])))
        groups = self._checkpoint.optimizer.groups if self._checkpoint.optimizer is not None else ()
        made: list[Node] = []
        for group, own in zip(groups, keys.lists, strict=True):
            values = {key: self._target.carried(value) for key, value in group.hyper_parameters.items()}
            made.append(mapping_of({**values, "params": PList([*own])}))
        return mapping_of({"state": mapping_of({**states}), "param_groups": PList(made)})

    def _extra_state(self, rank: int, extra: Mapping[str | int, Node]) -> Node:
        target, states = self._target, self._target.random_states
        own: dict[str | int, Node] = {**extra}
        if target.framework is RankFramework.SKYRL:
            own |= {STRATEGY: target.strategy, "world_size": target.world, "rank": rank}
        if states:
            own[RNG] = mapping_of({k: target.carried(v) for k, v in states[rank % len(states)].items()})
        return mapping_of(own)


# What the user is told.


def _warnings(target: _Target) -> Iterator[str]:
    checkpoint, states = target.checkpoint, target.random_states
    if not target.own:
        yield _FOR_FSDP2
    if checkpoint.optimizer is None:
        yield NO_OPTIMIZER
    if len(target.shape) == 2 and target.groups.first is None:
        yield NO_GROUPS
    if checkpoint.padding_rows:
        yield padding_left_out(checkpoint)
    if states and len(states) != target.world:
        text = f"random states ({', '.join(states[0])}) do not fit other worlds"
        yield f"{text}: rank r gets those of source rank r mod {len(states)}"
    if target.framework is RankFramework.SKYRL and target.scheduler is None:
        yield "the source has no learning-rate scheduler, and SkyRL loads an empty state into the run's if it has one"


def _left_out(target: _Target) -> Iterator[NotCarried]:
    """Yield what the source holds and these files do not."""
    checkpoint, kept = target.checkpoint, set[str]()
    if target.scheduler is not None:
        kept.add("schedulers")
    if target.framework is RankFramework.SKYRL and target.extra is not None:
        kept |= {*map(str, checkpoint.client_state)}
    kept |= {RANK_STATES} if target.random_states else set()
    dropped = target.request.rng is RngPolicy.DROP
    others = checkpoint.facts.of_others(checkpoint)
    yield from named(others, OF_ANOTHER)
    for key in map(str, checkpoint.facts.run_state(checkpoint)):
        if key not in kept and key not in others:
            yield from named([key], AS_ASKED if dropped and key == RANK_STATES else _NO_PLACE)
    yield from target.numbers_left_out()
