"""Pipeline stages and tensor-parallel ranks: how many, with which layers, and their slices joined to whole tensors.

Stages hold different layers. A name on several stages is one tied parameter, and each of these stages holds a copy.
Tensor-parallel ranks hold parts of a parameter under one name, cut by the rules of the checkpoint or of the user.
Copies are compared before anything is written: `Checkpoint.agreements` lists them.

Source: deepspeed 0.19.8 `runtime/pipe/topology.py` (`mp = pp_rank * TP + tp_rank`), `checkpoint/reshape_3d_utils.py`
(`get_model_3d_descriptor`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from reshard.errors import RequestError, SourceError, counted, printable
from reshard.options import DeepSpeedOptions
from reshard_engine.checkpoint import Agreement, Parameter
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.deepspeed.files import NUMBERED, PARALLEL_DIMENSIONS, TIED
from reshard_engine.formats.deepspeed.native.slices import Slice, counters
from reshard_engine.formats.deepspeed.parallel.rules import is_unused_copy
from reshard_engine.formats.deepspeed.parallel.tensor import AffineMaps, RuleLayers
from reshard_engine.formats.deepspeed.rank_files import ModelStates, module_entries, module_tensors
from reshard_engine.pickles.nodes import Node, PTensor, is_mapping, mapping_items
from reshard_engine.tensors.cuts import Cut, CutError, joined, rows_of, whole_shape
from reshard_engine.tensors.shard_map import ShardMapBuilder
from reshard_engine.tensors.views import Column, Runs, View


def degrees(model: ModelStates, ranks: int, layer_ranks: int) -> tuple[int, int]:
    """(pipeline stages, tensor-parallel ranks) of a run with so many model-parallel ranks.

    Args:
        model: Model states of model-parallel rank 0.
        ranks: Model-parallel ranks that have files.
        layer_ranks: Tensor-parallel ranks in the names of layer files; 0 without any.

    Raises:
        SourceError: `checkpoint.mixed`, `checkpoint.incomplete` if the files that exist contradict what they state.
    """
    stated = model.integer("mp_world_size")
    if stated is not None and stated != ranks:
        code = "checkpoint.incomplete" if ranks < stated else "checkpoint.mixed"
        raise SourceError(
            code,
            f"files of {ranks} model-parallel ranks; the model states say {stated}",
            fix="copy the files of every mp_rank" if ranks < stated else "remove what an older save left behind",
        )
    entry = model.entries.get(PARALLEL_DIMENSIONS)
    facts = mapping_items(entry, what=PARALLEL_DIMENSIONS) if is_mapping(entry) else {}
    pp, tp = facts.get("pp_degree"), facts.get("tp_degree")
    if type(pp) is not int or type(tp) is not int:
        tp = max(layer_ranks, 1) if layer_ranks else ranks
        pp = ranks // tp
    if stated == ranks == 1:
        # Under sequence parallelism (`runtime/sequence_parallel/parallel_state_sp.py` as mpu, 0.19.8) the entry counts
        # the ranks of a sequence as tensor-parallel ones; they share ZeRO's partitions, as data-parallel ranks do.
        return 1, 1
    if pp < 1 or tp < 1 or pp * tp != ranks:
        raise SourceError(
            "checkpoint.mixed",
            f"{pp} pipeline stages of {tp} tensor-parallel ranks, but files of {ranks} model-parallel ranks",
        )
    return pp, tp


class Joiner:
    """Puts the slices of all model-parallel ranks together."""

    def __init__(
        self, builder: ShardMapBuilder, rules: RuleLayers | None, affine: AffineMaps | None, *, tp: int
    ) -> None:
        """Start without slices, for `tp` tensor-parallel ranks."""
        self._builder, self._rules, self._affine, self._tp = builder, rules, affine, tp
        self.agreements: list[Agreement] = []
        self.unexplained: list[str] = []
        self.vocab_rows: int | None = None
        self.rank_numbers: set[str] = set()
        """Names of states that are one number for each rank and differ between ranks."""
        self.averaged: dict[str, None] = {}
        """Parameters whose copies may differ. The target gets the mean of the copies."""
        self.padding: dict[str, dict[str, int]] = {}
        """Tensor numbers of the padding rows behind vocabularies, by parameter and state."""
        self._copies: dict[tuple[str, str], tuple[int, ...]] = {}
        self._cuts: dict[str, Cut | None] = {}

    def trained(self, slices: Sequence[Slice]) -> list[Parameter]:
        """The parameters of all ranks, whole, stage by stage.

        Raises:
            SourceError: `checkpoint.mixed` if ranks hold different parameters, groups or counters, `rules.*`.
        """
        found: dict[str, Parameter] = {}
        for first in range(0, len(slices), self._tp):
            stage = slices[first : first + self._tp]
            by_name = [{p.fqn: p for p in s.trained} for s in stage]
            for rank, table in enumerate(by_name):
                if list(table) != list(by_name[0]):
                    raise SourceError(
                        "checkpoint.mixed",
                        f"tensor-parallel rank {rank} of stage {first // self._tp} has other parameters",
                    )
            for name, parameter in by_name[0].items():
                parts = [table[name] for table in by_name]
                whole = self._parameter(parameter, parts)
                if name in found:
                    self._tied(found[name], whole)
                else:
                    found[name] = whole
        return list(found.values())

    def _parameter(self, first: Parameter, parts: Sequence[Parameter]) -> Parameter:
        for rank, part in enumerate(parts):
            if (part.group, list(part.states)) != (first.group, list(first.states)) or not self._agree(first, part):
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(first.fqn)}: tensor-parallel rank {rank} has another group, other states or counters",
                    fix="the files are of different steps: copy one whole save",
                )
        shape, cut = self.shape_and_cut(first.fqn, [p.shape for p in parts])
        states = {key: self.joined(first.fqn, key, [p.states[key] for p in parts], cut, shape) for key in first.states}
        scalars = {k: s for k, s in first.scalars.items() if all(p.scalars.get(k) == s for p in parts)}
        return replace(
            first, shape=cut.data_shape(shape) if cut is not None else shape, states=states, cut=cut, scalars=scalars
        )

    def _agree(self, first: Parameter, other: Parameter) -> bool:
        """True if the counters of two parts are equal. Other numbers that differ are noted in `rank_numbers`."""
        names = first.scalars.keys() | other.scalars.keys()
        self.rank_numbers |= {k for k in names if first.scalars.get(k) != other.scalars.get(k)}
        return counters(first.scalars) == counters(other.scalars)

    def shape_and_cut(self, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], Cut | None]:
        """The whole shape with padding, and the cut. Without a rule: the first part's shape, None, and a note.

        Raises:
            SourceError: `rules.*`.
        """
        cut = self._cut_of(name, shapes)
        if cut is None:
            return shapes[0], None
        try:
            shape = whole_shape(cut, shapes)
            if cut.vocabulary is not None:
                self.vocab_rows = shape[0]
            return shape, cut
        except CutError as error:
            raise _contradiction(name, error) from None

    def _cut_of(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Cut | None:
        cut = self._rules.cut_of(name, shapes) if self._rules is not None else None
        if cut is None and self._tp > 1 and name not in self.unexplained:
            self.unexplained.append(name)
        return cut

    def joined(self, name: str, state: str, tensors: Sequence[int], cut: Cut | None, shape: tuple[int, ...]) -> int:
        """The number of one state of a parameter as a whole tensor. Copies are noted for comparison.

        Args:
            name: The parameter.
            state: The state.
            tensors: Each tensor-parallel rank's part.
            cut: The cut of the parts. Where nothing says it (None), the first rank's part stands for all.
            shape: The whole shape, with padding.

        Raises:
            SourceError: `rules.contradiction`, `source.unsupported` if the parts cannot be put together so.
        """
        if cut is None:
            return tensors[0]
        whole = tensors[0]
        if cut.averaged and len(tensors) > 1:
            return self._mean(name, state, tensors)
        if cut.dim is None:
            for rank, other in enumerate(tensors[1:], start=1):
                self.agreements.append(Agreement(name, state, tensors[0], other, f"tensor-parallel rank {rank}"))
        elif len(tensors) > 1:
            whole = self._view(name, state, self._layout(name, tensors, cut, shape), shape)
        data = cut.data_shape(shape)
        if data != shape:
            if len(tensors) == 1 and cut.shape_in(shape) != shape:
                raise _contradiction(name, CutError("a vocabulary in another shape than its own"))
            behind = rows_of(shape, whole, data[0], shape[0])
            padding = self._view(f"{name}@padding", state, behind, behind.grid)
            # Several pipeline stages may hold copies: the first one is used.
            self.padding.setdefault(name, {}).setdefault(state, padding)
            whole = self._view(name, state, rows_of(shape, whole, 0, data[0]), data)
        return whole

    def _layout(self, name: str, tensors: Sequence[int], cut: Cut, shape: tuple[int, ...]) -> View:
        try:
            described = self._affine.view_of(name, tensors) if self._affine is not None else None
            by_rule = joined(cut, shape, tensors)
        except (CutError, ValueError) as error:
            raise _contradiction(name, error) from None
        if described is not None and not _same(described, by_rule):
            raise _contradiction(name, CutError("its affine map and its pattern say different things"))
        return by_rule

    def _view(self, name: str, state: str, view: View, shape: tuple[int, ...]) -> int:
        try:
            return self._builder.view(name, state, view, shape)
        except ValueError as error:
            raise SourceError("source.unsupported", f"{printable(state)} of {printable(name)}: {error}") from None

    def _mean(self, name: str, state: str, copies: Sequence[int]) -> int:
        """The mean of a state's copies. Where masters exist, the weight is the rounded mean of the masters."""
        self.averaged[name] = None
        own = tuple(copies)
        self._copies.setdefault((name, state), own)
        masters = self._copies.get((name, "fp32"), own) if state == "weight" else own
        if masters is not own:
            pairs = enumerate(zip(masters, copies, strict=True))
            self.agreements += [
                Agreement(name, "fp32", m, w, f"the weight of tensor-parallel rank {rank}", rounded=True)
                for rank, (m, w) in pairs
            ]
        try:
            return self._builder.mean(name, state, masters, self._builder.tensors[copies[0]].dtype)
        except ValueError as error:
            raise SourceError("source.unsupported", f"{printable(state)} of {printable(name)}: {error}") from None

    def _tied(self, first: Parameter, other: Parameter) -> None:
        if (first.shape, first.group, list(first.states)) != (other.shape, other.group, list(other.states)):
            raise SourceError(
                "checkpoint.mixed", f"{printable(first.fqn)} is on several pipeline stages, with other shapes or states"
            )
        if not self._agree(first, other):
            raise SourceError(
                "checkpoint.mixed", f"{printable(first.fqn)} has other counters on another pipeline stage"
            )
        # Each stage holds a shared module whole, but DeepSpeed keeps only the tied weight of it equal. Of its other
        # weights, such as position embeddings beside tied word embeddings, only the first stage's copy is in use.
        if is_unused_copy(first.fqn):
            return
        unused = self._rules is not None and self._rules.first_stage_counts(first.fqn)
        for key, tensor in first.states.items():
            where = "another pipeline stage"
            self.agreements.append(Agreement(first.fqn, key, tensor, other.states[key], where, advisory=unused))


def _same(a: View, b: View) -> bool:
    """True if two views take every element from the same place, by their runs cut at each other's boundaries."""
    numel = sum(box.numel for box in a.boxes)
    left, right = a.runs(0, numel), b.runs(0, numel)
    cuts = np.union1d(left.begin, right.begin)

    def places(runs: Runs) -> tuple[Column, Column]:
        row = np.searchsorted(runs.begin, cuts, side="right") - 1
        return runs.tensor[row], runs.source[row] + cuts - runs.begin[row]

    return all(bool((x == y).all()) for x, y in zip(places(left), places(right), strict=True))


def _contradiction(name: str, error: Exception) -> SourceError:
    return SourceError(
        "rules.contradiction",
        f"{printable(name)}: {error}",
        fix="give rules that fit the parameter's parts: --rules FILE, or --family NAME",
    )


# Weights of pipelines: one file per layer and tensor-parallel rank, names without the layer.
#
# Source: deepspeed 0.19.8 `runtime/pipe/module.py` (`save_state_dict`, `ckpt_layer_path`; a tied module's first
# occurrence writes its file), verified by running.

_TIED = re.compile(rf"{re.escape(TIED)}[^.]+\.(?P<inner>.+)")


def layer_tensors(
    files: Mapping[tuple[int, int], TorchFile], trained: Collection[str]
) -> dict[int, dict[str, tuple[TorchFile, PTensor]]]:
    """Per tensor-parallel rank every tensor of the layer files under its full name.

    Args:
        files: Parsed files by layer and tensor-parallel rank.
        trained: Full names of the parameters that the optimizer owns. A tied parameter belongs to no single layer;
            its name is found among these.
    """
    tied: dict[str, list[str]] = {}
    for name in trained:
        if (match := _TIED.fullmatch(name)) is not None:
            tied.setdefault(match["inner"], []).append(name)
    known = set(trained)
    found: dict[int, dict[str, tuple[TorchFile, PTensor]]] = {}
    for (layer, tp), file in sorted(files.items()):
        table = found.setdefault(tp, {})
        for inner, tensor in module_tensors(file.root, file.file.name).items():
            name = f"{layer}.{inner}"
            owners = tied.get(inner, [])
            if name not in known and len(owners) == 1:
                name = owners[0]
            table.setdefault(name, (file, tensor))
    return found


def layer_extra_states(files: Mapping[tuple[int, int], TorchFile]) -> dict[int, dict[str, tuple[TorchFile, Node]]]:
    """Per tensor-parallel rank every entry of the layer files that is not a tensor, under its full name."""
    found: dict[int, dict[str, tuple[TorchFile, Node]]] = {}
    for (layer, tp), file in sorted(files.items()):
        table = found.setdefault(tp, {})
        for entry in module_entries(file.root, file.file.name):
            if not isinstance(entry.value, PTensor):
                table[f"{layer}.{entry.name}"] = (file, entry.value)
    return found


def layer_of(name: str, files: Mapping[tuple[int, int], TorchFile]) -> int | None:
    """The layer of a parameter: the number in its name; for a tied one, the first layer whose file has its name."""
    if (match := NUMBERED.fullmatch(name)) is not None:
        return int(match["layer"])
    if (match := _TIED.fullmatch(name)) is None:
        return None
    holding = [
        layer for (layer, tp), file in files.items() if tp == 0 and match["inner"] in module_tensors(file.root, "")
    ]
    return min(holding, default=None)


# The layers of each pipeline stage, chosen as DeepSpeed's `PipelineModule` chooses them.
#
# Names give the layer of each parameter, but not the number of all layers: layers without parameters have no names. The
# balanced methods do not depend on trailing layers. `uniform` does, so the user must give the number.
#
# Source: deepspeed 0.19.8 `runtime/pipe/module.py` (`_partition_layers`, `_count_layer_params`), `runtime/utils.py`
# (`partition_uniform`, `partition_balanced`: the same dynamic program, ties broken towards later cuts).

MAX_LAYERS = 4_096
_INFINITY = float("inf")


def boundaries(
    pp: int, options: DeepSpeedOptions, weights: Mapping[int, int], shapes: Mapping[int, object], *, tied: bool
) -> list[int]:
    """The first layer of each stage, and one past the last: `pp + 1` numbers.

    Args:
        pp: Number of stages.
        options: `partition_method` and `pipeline_layers`.
        weights: Trainable elements of each layer that has parameters, on one tensor-parallel rank.
        shapes: The kind of each layer: names and shapes of its parameters.
        tied: True if a module of the first layers comes again behind the last layer.

    Raises:
        RequestError: `request.invalid` for boundaries that do not cover the layers, or a method that lacks options.
    """
    method = (options.partition_method or "").lower()
    last = max(weights, default=0) + (2 if tied else 1)
    count = options.pipeline_layers or last
    if count < last or count > MAX_LAYERS:
        raise RequestError(
            "request.invalid",
            f"{count} pipeline layers, and parameters are in layers up to {last - 1}",
            fix=f"at least {last}",
        )
    if method[:1].isdigit():
        return _explicit(method, pp, last)
    if pp > count:
        raise RequestError(
            "request.unsatisfiable",
            f"{pp} pipeline stages for {counted(count, 'layer')}",
            fix=f"--pp {count} or less",
        )
    if method == "uniform":
        if options.pipeline_layers is None:
            raise RequestError(
                "request.invalid",
                "`uniform` depends on the number of layers, those without parameters included: no checkpoint states it",
                fix=f"--pipeline-layers N (at least {last}), or each stage's first layer: --partition-method 0,3,6",
            )
        return _uniform(count, pp)
    if method == "parameters":
        sizes = [weights.get(i, 0) for i in range(count)]
        if tied:
            sizes[last - 1] += weights[min(weights)]
        return _balanced(sizes, pp)
    if method.startswith("type:"):
        kinds = Counter(shapes.values())
        block, repeats = kinds.most_common(1)[0] if kinds else (None, 0)
        if repeats < 2:
            raise RequestError(
                "request.invalid",
                "no two layers are of one kind: `type:` would match one layer at most",
                fix="--partition-method parameters, or each stage's first layer: 0,3,6",
            )
        return _balanced([1 if shapes.get(i) == block else 0 for i in range(count)], pp)
    raise RequestError(
        "request.invalid",
        f"partition_method {printable(method)!r} is not known",
        fix="uniform, parameters, type:REGEX (uniform with --pipeline-layers N), or each stage's first layer: 0,3,6",
    )


def _explicit(text: str, stages: int, last: int) -> list[int]:
    parts = text.split(",")
    if not all(p.strip().isdecimal() and len(p.strip()) < 9 for p in parts):
        raise RequestError("request.invalid", f"boundaries {printable(text)!r}", fix="such as 0,3,6")
    found = [int(p) for p in parts]
    if len(found) == stages:
        found.append(max(last, found[-1] + 1))
    rising = all(a < b for a, b in pairwise(found))
    if len(found) != stages + 1 or found[0] != 0 or found[-1] < last or not rising:
        raise RequestError(
            "request.invalid",
            f"boundaries {found} do not cut layers 0 to {last - 1} into {stages} stages",
            fix=f"{stages} rising numbers, each stage's first layer, from 0 on",
        )
    return found


def _uniform(count: int, stages: int) -> list[int]:
    size, rest = divmod(count, stages)
    return [i * size + min(i, rest) for i in range(stages + 1)]


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """DeepSpeed's linear partition, with DeepSpeed's way of breaking ties."""
    n = len(weights)
    if n <= stages:
        return [min(p, n) for p in range(stages + 1)]
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    most = [[_INFINITY] * (stages + 1) for _ in range(n + 1)]
    least = [[_INFINITY] * (stages + 1) for _ in range(n + 1)]
    cost = [[_INFINITY] * (stages + 1) for _ in range(n + 1)]
    place = [[0] * (stages + 1) for _ in range(n + 1)]
    most[0][0] = cost[0][0] = 0
    for i in range(1, n + 1):
        for j in range(1, min(i, stages) + 1):
            for k in range(i):
                high = max(most[k][j - 1], prefix[i] - prefix[k])
                low = min(least[k][j - 1], prefix[i] - prefix[k])
                # Where no such partition exists, both are infinite: the difference is nan, and the test is False.
                if cost[i][j] >= high - low:
                    cost[i][j], most[i][j], least[i][j], place[i][j] = high - low, high, low, k
    parts = [n]
    for j in range(stages, 0, -1):
        parts.append(place[parts[-1]][j])
    return parts[::-1]
