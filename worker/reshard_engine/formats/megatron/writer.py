"""Lays out distributed checkpoints of Megatron-core (`torch_dist`), with the optimizer by parameters.

Tensors are whole, so that a run of any tensor, pipeline and data parallelism loads them. Equal layers and experts are
one entry; each lies in records of its own. Only the number of optimizers depends on the run: with expert parallelism,
experts have one of their own.

Source: megatron-core 0.16.1 `dist_checkpointing/serialization.py` (`save`), `dist_checkpointing/strategies/torch.py`,
`optimizer/distrib_optimizer.py` (`sharded_param_state_fully_reshardable`), `optimizer/optimizer.py`
(`ChainedOptimizer.sharded_state_dict`, `Float16OptimizerWithFloat16Params`, `FP32Optimizer`),
`tensor_parallel/layers.py` (`get_extra_state` gives None); 0.19.2 `dist_checkpointing/serialization.py`
(`common_state`); Megatron-LM `training/checkpointing.py` (`generate_state_dict`, `load_checkpoint`: random states are
taken where tensor and pipeline parallelism are those of the arguments); verified by loading with megatron-core.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

from reshard.choices import CommonStatePlace, OptimizerSharding, RngPolicy
from reshard.errors import RequestError, counted, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.options import MegatronOptions
from reshard_engine.checkpoint import Checkpoint, Parameter, Scalar
from reshard_engine.formats.carried import AS_ASKED, frozen_parameters, named
from reshard_engine.formats.dcp_files.shards import AnyEntry, JoinedEntry, Part, ShardOptions, Shards, ValueEntry
from reshard_engine.formats.megatron.common import CommonState, optimizers_for, written_items
from reshard_engine.formats.megatron.legacy import LEGACY
from reshard_engine.formats.megatron.model import (
    COMMON,
    COMMON_ENTRY,
    DESCRIPTION,
    RANDOM,
    RELEASE,
    STEP_DIRECTORY,
    TRACKER,
    MegatronFacts,
)
from reshard_engine.formats.megatron.names import EXPERT, LOCAL_EXPERT, KeyRules
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PList, mapping_of, node_of
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.layout import ZEROS, Pointer, TargetFile, TargetLayout, literal_template
from reshard_engine.tensors.shard_map import LogicalTensor
from reshard_engine.tensors.views import View

_STATES = "optimizer.state."
_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_SHARDING = "distrib_optim_sharding_type"
_PLACE = 2
"""Numbers of a random state's place: those of its pipeline stage and its tensor-parallel rank."""
NO_OPTIMIZER = "there is no optimizer: load it with --no-load-optim, or with --finetune"
NO_RANDOM = "there are no random states: load it with --no-load-rng"
_MODULE = re.compile(r"(.+\.linear_(?:qkv|proj|fc1|fc2|q_proj|(?:q|kv)_(?:down|up)_proj))\.weight")
"""Modules whose extra states every run loads."""
_ATTENTION = re.compile(r"(.+\.self_attention\.)linear_(?:qkv|kv_up_proj)\.weight")
_OF_MEGATRON = re.compile(r"embedding\.word_embeddings\.weight|decoder\.layers\.\d+\..+")
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "transformer_impl")
"""Arguments that loading compares, and the one that decides the keys of norms."""
_SCHEDULE = "opt_param_scheduler"
_NO_SCHEDULE = (
    "the source has no schedule of Megatron-core: Megatron-LM's loader ends without `opt_param_scheduler` where it "
    "loads an optimizer"
)
_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr")
"""Fields by which Megatron-core finds the param group of a checkpoint for one of its own."""
_HOW = "--to dcp and --to safetensors take every model; --names megatron-core renames one of Hugging Face"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of one parameter: its number in the shard map, and that of the padding behind its rows."""

    number: int
    dtype: Dtype
    shape: tuple[int, ...]
    padding: int | None = None
    padded_rows: int = 0


def facts_for(checkpoint: Checkpoint, options: MegatronOptions) -> MegatronFacts:
    """The facts of Megatron-core about a source, with the arguments that the user says.

    Raises:
        RequestError: `request.unsatisfiable` for a source that is not Megatron-core's, without arguments.
    """
    facts, said = checkpoint.facts, said_args(options.megatron_args)
    if isinstance(facts, MegatronFacts):
        said = {**facts.common.args, **said}
        if facts.of_run:
            return _of_run(checkpoint, facts, said)
    where = f"{printable(checkpoint.url)} is {checkpoint.format}"
    if not any(_OF_MEGATRON.fullmatch(p.fqn) for p in checkpoint.parameters):
        raise RequestError("request.unsatisfiable", f"{where}, and its names are not Megatron-core's", fix=_HOW)
    if lost := [name for name in _NEEDED if name not in said]:
        raise RequestError(
            "request.unsatisfiable",
            f"{where}, and nothing says the arguments of the run: {listed(lost)}",
            fix="--megatron-args FILE, a JSON object with them",
        )
    known = facts if isinstance(facts, MegatronFacts) else MegatronFacts(CommonState({}, {}))
    steps = known.steps or _steps_of_groups(checkpoint)
    if checkpoint.optimizer is not None and not steps:
        raise RequestError(
            "request.unsatisfiable",
            f"{where}, whose param groups are not those of Megatron-core (wd_mult, lr_mult, max_lr, min_lr)",
            fix="--to dcp keeps the optimizer; --to safetensors takes the weights, which --to megatron takes then",
        )
    common, names = replace(known.common, args=said), [p.fqn for p in checkpoint.parameters]
    rules = KeyRules.for_model(names, local=said["transformer_impl"] == "local")
    numbered = {*rules.numbered, *(("decoder.layers",) if common.layers_differ else ())}
    numbered_rules = replace(rules, numbered=frozenset(numbered))
    return MegatronFacts(common, steps=steps, scaler=known.scaler, rules=numbered_rules)


def _steps_of_groups(checkpoint: Checkpoint) -> list[Scalar | None]:
    """The steps of each param group of a source of another format; none if the groups are not Megatron-core's.

    They are if they have the fields by which it finds a group, and the members that its rule gives them.
    """
    groups = () if checkpoint.optimizer is None else checkpoint.optimizer.groups
    fields, found = [g.hyper_parameters for g in groups], list[Scalar | None]()
    apart = any(f.get("is_expert_parallel") is True for f in fields)
    for index, held in enumerate(fields):
        if any(name not in held for name in _IDENTITY):
            return []
        counts: set[float | None] = set()
        for p in checkpoint.members(index):
            decays = not (p.fqn.endswith(".bias") or len(p.shape) == 1)
            of_experts = apart and EXPERT.fullmatch(p.fqn) is not None
            if held["wd_mult"] != float(decays) or (held.get("is_expert_parallel") is True) is not of_experts:
                return []
            counts.add(p.scalars["step"].value if "step" in p.scalars else None)
        step = counts.pop() if len(counts) == 1 else None
        if step is None or not float(step).is_integer():
            return []
        found.append(Scalar(int(step)))
    return found


def _of_run(checkpoint: Checkpoint, facts: MegatronFacts, args: Mapping[str | int, Node]) -> MegatronFacts:
    """The facts of a run's own checkpoint with some arguments changed."""
    facts = replace(facts, common=replace(facts.common, args=args))
    if checkpoint.format != LEGACY or not facts.rules.norms_apart:
        return facts
    # Directories of ranks name these norms alike for local layers, which save them as joined, and for others.
    if (layers := args.get("transformer_impl")) is None:
        raise RequestError(
            "request.unsatisfiable",
            f"the arguments of {printable(checkpoint.url)} do not say transformer_impl, which decides the keys of "
            "norms",
            fix='--megatron-args FILE with {"transformer_impl": "local"} or "transformer_engine"',
        )
    if layers != "local":
        return facts
    rules = KeyRules.for_model([p.fqn for p in checkpoint.parameters], local=True)
    return replace(facts, rules=replace(rules, numbered=facts.rules.numbered))


def said_args(text: str | None) -> dict[str | int, Node]:
    """The arguments that a user says as JSON.

    Raises:
        RequestError: `request.invalid` for a text that is not a JSON object of arguments.
    """
    if text is None:
        return {}
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("request.invalid", f"--megatron-args: {error}", fix='{"num_layers": 32}') from error
    if not isinstance(found, dict):
        raise RequestError("request.invalid", "--megatron-args is no JSON object", fix='{"num_layers": 32}')
    return {str(name): node_of(value) for name, value in cast("dict[str, Any]", found).items()}


class TorchDistWriter:
    """Writes a directory that `dist_checkpointing.load` loads."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out every file.

        Raises:
            RequestError: `request.unsatisfiable` for a model that is not Megatron-core's, or for states that its
                optimizers do not have; `request.invalid` for a layout that the model does not have.
        """
        return Layout(checkpoint, request).target(name)


class Layout:
    """One target being laid out."""

    def __init__(self, checkpoint: Checkpoint, request: ConvertRequest) -> None:
        self._options = request.options.of(MegatronOptions)
        self._checkpoint, self._request = checkpoint, request
        self._facts = facts = facts_for(checkpoint, self._options)
        self._layout = request.layout
        self._warnings: list[str] = []
        self._left: list[NotCarried] = []
        sharding = self._options.optimizer_sharding
        if sharding is None:
            plain = facts.common.args.get("use_distributed_optimizer") is False
            sharding = OptimizerSharding.NONE if plain else OptimizerSharding.FULLY_RESHARDABLE
        self._sharding = sharding

    def target(self, name: str) -> TargetLayout:
        """All files, with the tracker of the run beside them."""
        opaque = self._request.opaque
        entries: list[AnyEntry] = [*self._model(), *self._optimizer()]
        entries += [*self._extra_states(), *self._random_states()]
        common = self._common()
        as_file = self._options.common_state is CommonStatePlace.FILE
        if not as_file:
            entries.append(ValueEntry((f"{COMMON_ENTRY}/shard_0_1",), PList([common])))
        parts = tuple(self._parts())
        shard_map = TargetLayout((), None, parts=parts).map_over(self._checkpoint.shard_map)
        *files, metadata = Shards(ShardOptions(shard_map, opaque)).lay_out(entries)
        described: dict[str, str | int] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        if as_file:
            described |= {"common_backend": "torch", "common_backend_version": 1}
            template, slots = tree_template(COMMON.removesuffix(".pt"), common, shard_map, opaque=opaque)
            files.append(TargetFile(COMMON, template, slots))
        # Without the description no loader takes the directory for a distributed checkpoint.
        last = TargetFile(DESCRIPTION, literal_template(json.dumps(described).encode()), (), commit=True)
        pointer = self._pointer(name)
        warnings, left = tuple(self._warnings), tuple(self._left)
        return TargetLayout((*files, metadata, last), pointer, warnings, parts, left)

    def _parts(self) -> Sequence[tuple[LogicalTensor, View]]:
        """Tensors that are views of the source's, when all entries are known."""
        return ()

    def _pointer(self, name: str) -> Pointer | None:
        steps = self._checkpoint.counters.steps
        wanted = None if steps is None else STEP_DIRECTORY.format(steps)
        if name == RELEASE:
            return Pointer(TRACKER, RELEASE.encode())
        if wanted == name:
            return Pointer(TRACKER, str(steps).encode(), says=name)
        known = "the source counts no steps" if wanted is None else f"Megatron-LM looks for {wanted}"
        self._warnings.append(f"{known}: no `{TRACKER}` names {printable(name)}")
        return None

    # The common state.

    def _common(self) -> Node:
        """Arguments, param groups, scheduler and counters."""
        kind = self._sharding
        optimizers = [self._optimizer_dict(one) for one in self._optimizers()]
        # From this the loader derives the keys that it asks for, so that each entry must describe the written keys:
        # halves of gated units and experts are joined, and no optimizer's keys have a prefix but those of buckets, for
        # which the loader ignores the entry.
        metadata: dict[str | int, Node] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self._facts.rules.numbers_every_layer(p.fqn for p in self._checkpoint.parameters):
            metadata["non_homogeneous_layers"] = True
        if kind is not OptimizerSharding.NONE:
            metadata |= {_SHARDING: kind.value, "distrib_optim_fully_reshardable_mem_efficient": False}
        changes: dict[str, Node] = {"ckpt_format": self._options.ckpt_format.value}
        if optimizers:
            changes["use_distributed_optimizer"] = kind is not OptimizerSharding.NONE
        items = written_items(self._facts.common, changes | self._parallel_sizes(), self._checkpoint.counters.steps)
        if optimizers:
            one = len(optimizers) == 1
            items["optimizer"] = optimizers[0] if one else mapping_of(dict(enumerate(optimizers)))
            if _SCHEDULE not in items:
                self._warnings.append(_NO_SCHEDULE)
        else:
            self._warnings.append(NO_OPTIMIZER)
        return mapping_of({**items, "content_metadata": mapping_of(metadata)})

    def _optimizers(self) -> list[dict[str | int, Node]]:
        """The dict of each of a rank's optimizers; none without states."""
        if self._checkpoint.optimizer is None:
            return []
        facts, apart = self._facts, self._layout.ep > 1
        return optimizers_for(self._checkpoint, facts.steps, facts.scaler, experts_apart=apart)

    def _optimizer_dict(self, held: Mapping[str | int, Node]) -> Node:
        """The dict of one optimizer by the class that saves it."""
        if self._sharding is not OptimizerSharding.NONE:
            return mapping_of({**held, "param_state_sharding_type": self._sharding.value})
        # The optimizer of a model of fp32 is torch's own.
        return held["optimizer"] if self._of_fp32 else mapping_of({**held})

    @property
    def _of_fp32(self) -> bool:
        return all(self._weight(p).dtype == FLOAT32 for p in self._checkpoint.trained)

    def _parallel_sizes(self) -> dict[str, Node]:
        """The arguments of the layout that the request names; without one, those of the source stay."""
        layout, ranks = self._layout, {"tensor": self._layout.tp, "pipeline": self._layout.pp}
        found: dict[str, Node] = {}
        if max(ranks.values()) > 1:
            found |= {f"{kind}_model_parallel_size": size for kind, size in ranks.items()}
        if layout.dp is not None:
            sizes = [found.get(n) or self._facts.common.number(n) or 1 for n in _MODEL_PARALLEL]
            ranks_of_model = prod(size for size in sizes if isinstance(size, int))
            found |= {"data_parallel_size": layout.dp, "world_size": layout.dp * ranks_of_model}
        if (experts := self._experts) and (experts % layout.ep or layout.ep > experts):
            raise RequestError(
                "request.invalid", f"{experts} experts do not divide by {layout.ep} ranks", fix="choose another --ep"
            )
        if layout.ep > 1 and not experts:
            raise RequestError("request.invalid", "--ep: the model has no experts", fix="leave it out")
        before = self._facts.common.number("expert_model_parallel_size") or 1
        if experts and layout.ep == 1 and before > 1:
            self._warnings.append(
                f"the source has {before} expert-parallel ranks, and the target is for one: --ep for more, as a run "
                "with several has an optimizer of experts apart"
            )
        if experts:
            found["expert_model_parallel_size"] = layout.ep
        return found

    @property
    def _experts(self) -> int:
        found = (LOCAL_EXPERT.fullmatch(p.fqn) for p in self._checkpoint.parameters)
        return max((int(m[2]) + 1 for m in found if m is not None), default=0)

    # Tensors.

    def _model(self) -> Iterator[AnyEntry]:
        """The model's own tensors."""
        exclude = self._request.exclude_frozen and self._checkpoint.optimizer is not None
        if exclude:
            self._left += frozen_parameters(self._checkpoint)
        kept = [p for p in self._checkpoint.parameters if p.trained or not exclude]
        found = {p.fqn: self._weight(p) for p in kept}
        found |= {b.fqn: self._plain(b.tensor) for b in self._checkpoint.buffers}
        yield from self._entries("", found)

    def _optimizer(self) -> Iterator[AnyEntry]:
        """Masters and moments.

        Raises:
            RequestError: `request.unsatisfiable` for a parameter without some of the states of others.
        """
        trained = self._checkpoint.trained if self._checkpoint.optimizer is not None else ()
        distributed = self._sharding is not OptimizerSharding.NONE
        masters = {p.fqn: self._master(p) for p in trained if distributed or self._weight(p).dtype != FLOAT32}
        yield from self._entries(f"{_STATES}{'param' if distributed else 'fp32_param'}.", masters)
        for state in dict.fromkeys(s for p in trained for s in p.states if s != "fp32"):
            lost = [p.fqn for p in trained if state not in p.states and not p.never_updated]
            if lost:
                raise RequestError(
                    "request.unsatisfiable",
                    f"{listed(lost)} {'has' if len(lost) == 1 else 'have'} no {printable(state)}, and others have one",
                    fix="--to dcp keeps states as they are; --to safetensors takes the weights alone",
                )
            yield from self._entries(f"{_STATES}{state}.", {p.fqn: self._state(p, state) for p in trained})

    def _weight(self, parameter: Parameter) -> _Tensor:
        number = parameter.value() if parameter.weight is None else parameter.weight
        return self._plain(number, parameter.padding.get("weight"))

    def _master(self, parameter: Parameter) -> _Tensor:
        if "fp32" in parameter.states:
            return self._state(parameter, "fp32")
        weight = self._weight(parameter)
        if weight.dtype != FLOAT32:
            raise RequestError(
                "request.unsatisfiable",
                f"the optimizer has no master of {printable(parameter.fqn)}",
                fix="--to safetensors takes the weights alone",
            )
        return weight

    def _state(self, parameter: Parameter, state: str) -> _Tensor:
        weight = self._weight(parameter)
        if state in parameter.states:
            found = self._plain(parameter.states[state], parameter.padding.get(state))
        else:
            # No gradient ever reached it, and these are the states that its optimizer begins with.
            found = _Tensor(ZEROS, FLOAT32, parameter.shape)
        if weight.padding is None or found.padding is not None:
            return found
        return replace(found, padding=ZEROS, padded_rows=weight.padded_rows)

    def _plain(self, number: int, padding: int | None = None) -> _Tensor:
        tensors = self._checkpoint.shard_map.tensors
        one = tensors[number]
        return _Tensor(number, one.dtype, one.shape, padding, 0 if padding is None else tensors[padding].shape[0])

    def _entries(self, prefix: str, tensors: Mapping[str, _Tensor]) -> Iterator[JoinedEntry]:
        """The entries of tensors by parameter: one for each kind of parameter within layers."""
        found: dict[str, dict[tuple[int, ...], str]] = defaultdict(dict)
        for name in tensors:
            entry = self._facts.rules.entry_of(name)
            if found[entry.name].setdefault(entry.index, name) != name:
                raise self._others(f"{printable(name)} and another parameter are both {printable(entry.name)}")
        for key, members in found.items():
            yield self._joined(prefix, key, {at: tensors[name] for at, name in members.items()})

    def _joined(self, prefix: str, key: str, members: Mapping[tuple[int, ...], _Tensor]) -> JoinedEntry:
        try:
            front = tuple(max(at) + 1 for at in zip(*members, strict=True))
        except ValueError:
            raise self._others(f"{printable(key)} is of layers in some names, and not in others") from None
        kinds = {(t.shape, t.dtype, t.padded_rows) for t in members.values()}
        if len(members) != prod(front) or len(kinds) > 1:
            differs = "differ in shape or type" if len(members) == prod(front) else "leave some out"
            raise self._others(
                f"{printable(key)} is one tensor of {' x '.join(map(str, front))} layers and experts, and "
                f"{counted(len(members), 'parameter')} {differs}"
            )
        lead, parts = len(front), list[Part]()
        for index in sorted(members):
            one = members[index]
            sizes = (*(1,) * lead, *one.shape)
            parts.append(Part(one.number, (*index, *(0,) * len(one.shape)), sizes, lead if one.shape else 0))
            if one.padding is not None:
                behind = (one.shape[0], *(0,) * (len(one.shape) - 1))
                parts.append(Part(one.padding, behind, (one.padded_rows, *one.shape[1:])))
        ((shape, dtype, rows),) = kinds
        whole = (*front, *((shape[0] + rows, *shape[1:]) if shape else ()))
        return JoinedEntry((prefix + key,), dtype, whole, tuple(parts))

    def _others(self, text: str) -> RequestError:
        return RequestError("request.unsatisfiable", text, fix=_HOW)

    # Objects.

    def _extra_states(self) -> Iterator[ValueEntry]:
        """The extra states of modules; where the source has none, None, as modules without FP8 have it."""
        states = self._facts.extra_states
        if not states:
            matches = [m for p in self._checkpoint.parameters if (m := _MODULE.fullmatch(p.fqn)) is not None]
            states = {f"{m[1]}._extra_state": None for m in matches}
            if self._facts.common.args.get("transformer_impl") == "transformer_engine":
                layers = [m for p in self._checkpoint.parameters if (m := _ATTENTION.fullmatch(p.fqn)) is not None]
                states |= {f"{m[1]}core_attention._extra_state": None for m in layers}
        found: dict[str, dict[tuple[int, ...], Node]] = defaultdict(dict)
        for name, state in states.items():
            entry = self._facts.rules.entry_of(name)
            found[entry.name][entry.index or (0,)] = state
        nothing = PList([None])
        for key, members in found.items():
            shape = [max(at) + 1 for at in zip(*members, strict=True)]
            for index, state in members.items():
                yield ValueEntry(_object_key(key, index, shape), nothing if state is None else PList([state]))

    def _random_states(self) -> Iterator[ValueEntry]:
        """The random states of ranks, by pipeline stage and tensor-parallel rank."""
        held = self._kept_random_states()
        if any(len(place) != _PLACE for place in held):
            self._left += named([RANDOM], "it is not by pipeline and tensor-parallel rank")
            return
        if not held:
            return
        states = [held[place] for place in sorted(held)]
        stages, ranks = self._stages_and_ranks(held)
        for number in range(stages * ranks):
            key = _object_key(RANDOM, divmod(number, ranks), (stages, ranks))
            yield ValueEntry(key, PList([states[number % len(states)]]))

    def _kept_random_states(self) -> Mapping[tuple[int, ...], Node]:
        """The random states of the source that the target holds; none, with words about it, if none are to be kept."""
        held = self._facts.random_states
        if held and self._request.rng is not RngPolicy.DROP:
            return held
        self._left += named([RANDOM] if held else [], AS_ASKED)
        self._warnings.append(NO_RANDOM)
        return {}

    def _stages_and_ranks(self, held: Iterable[tuple[int, ...]]) -> tuple[int, int]:
        """The stages and tensor-parallel ranks that random states are for: without a layout, those of the source."""
        if max(self._layout.pp, self._layout.tp) > 1:
            return self._layout.pp, self._layout.tp
        stages, ranks = (max(at) + 1 for at in zip(*held, strict=True))
        return stages, ranks


def _object_key(key: str, index: Sequence[int], shape: Sequence[int]) -> tuple[str]:
    """The key of one object of several, as `ShardedObject.unique_key` makes it."""
    return (f"{key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, shape))}",)
