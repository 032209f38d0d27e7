"""Reads Megatron's older checkpoints (`--ckpt-format torch`): a directory for each model-parallel rank.

`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` holds the rank's part of the model under local numbers of layers and
experts, and the run's state. The order of its keys is that in which the model registers parameters. The states of a
distributed optimizer are in `distrib_optim.pt` beside it, as vectors without names; those of a plain optimizer are in
`model_optim_rng.pt`, numbered by param groups. The three digits at the end are a pipeline stage, or an expert-parallel
rank: the arguments of the run say which.

Nothing in these files says how tensor parallelism cut a parameter. Its name says it, and copies of parameters that are
not cut must be equal; masters must round to the weights.

Source: Megatron-LM `training/checkpointing.py` (`get_checkpoint_name`, `generate_state_dict`); megatron-core 0.16.1
`optimizer/distrib_optimizer.py` (`get_parameter_state_dp_zero`, `save_parameter_state`), `optimizer/optimizer.py`
(`Float16OptimizerWithFloat16Params.state_dict`), `transformer/moe/experts.py`; verified by running 0.16.1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from reshard.errors import SourceError, counted, listed, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Checkpoint, Question, Undecided
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import (
    SharedPickles,
    TorchFile,
    TreeTensors,
    add_whole_tensor,
    open_torch_file,
)
from reshard_engine.formats.carried import UNKNOWN, named
from reshard_engine.formats.format import ReadOptions
from reshard_engine.formats.megatron.buffers import LayoutError, Member, Slot, slots_in_vector
from reshard_engine.formats.megatron.common import (
    SCALED,
    SCALER,
    SCALER_REASON,
    CommonState,
    members_said,
    read_groups,
    steps_in,
)
from reshard_engine.formats.megatron.model import RANDOM, ModelBuilder, extra_states
from reshard_engine.formats.megatron.names import BUFFERS, EXPERT, KeyRules, entries_of
from reshard_engine.formats.megatron.placement import OUTPUT_LAYER, WORD_EMBEDDINGS, Rank, Run, cut_of, model_order
from reshard_engine.formats.model_weights import checked_state
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PDict,
    PList,
    PTensor,
    PTuple,
    is_mapping,
    mapping_items,
    sequence_items,
)
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo
from reshard_engine.tensors.cuts import Cut
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder, is_packed

MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
LEGACY = "megatron-torch"
"""The name of this form, for people."""
RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")
_LAYER_WISE = re.compile(r"layer_wise_optimizer_\d+\.pt")
_MODEL = re.compile(r"model(\d{0,3})")
_LOCAL_LAYER = re.compile(r"(decoder\.layers\.)(\d{1,6})(\..+)")
_LOCAL_EXPERT = re.compile(r"(.+\.mlp\.experts\.)local_experts\.(\d{1,6})\.(.+)")
_GROUPED_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12])\.(weight|bias)(\d{1,6})")
_EXTRA_STATE = "_extra_state"
_COPY_AGAIN = "copy the directories of all ranks of one save into one place"
_TOOLS = (
    "convert it with Megatron's own tools (Megatron Bridge, or tools/checkpoint/convert.py) to Hugging Face weights, "
    "and name that directory"
)
_WEIGHTS_ALONE = "--to safetensors takes the weights alone; or save once with --ckpt-format torch_dist"

_LISTED_AT_ONCE = 16
_NUMBERS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Held:
    """A weight of one rank."""

    name: str
    """Under the number that its layer and its expert have in the whole model."""
    tensor: PTensor
    shared_copy: bool = False
    """True for the embedding that a last stage uses as its output layer."""


@dataclass(slots=True)
class _File:
    """The file that one rank saved."""

    rank: Rank
    parsed: TorchFile
    common: CommonState
    """All of the file's entries, and the arguments of the run."""
    number: int
    """Number of its file in the shard map."""
    chunks: list[list[_Held]] = field(default_factory=list[list[_Held]])
    """The weights of each model chunk, in the order of their registration."""
    optimizer: TorchFile | None = None

    @property
    def items(self) -> Mapping[str | int, Node]:
        """The file's entries."""
        return self.common.items

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return printable(self.parsed.file.name)


@dataclass(frozen=True, slots=True)
class VectorFile:
    """A file of optimizer states, and its number in the shard map."""

    parsed: TorchFile
    number: int
    begin: int = 0
    """Where it begins, if it is a part of another file."""


class LegacyReader:
    """Reads the directory of one iteration."""

    family = "megatron"

    def recognises(self, listing: Listing) -> bool:
        """True for directories of ranks; `holds_ranks` looks into them."""
        return any(map(RANK_DIRECTORY.fullmatch, listing.directories))

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model, its optimizer and the run's state.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `source.unsupported`, `name.invalid`.
        """
        return _Assembly(location, listing, options).checkpoint()


def _listed(places: Sequence[Location]) -> list[dict[str, ObjectInfo]]:
    """The files of directories by their names."""

    def files(place: Location) -> dict[str, ObjectInfo]:
        return place.store.list_directory(place.path).by_name

    with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
        return list(pool.map(files, places))


def holds_ranks(location: Location, listing: Listing) -> bool:
    """True if the first directory of a rank holds the file of a model."""
    first = min(filter(RANK_DIRECTORY.fullmatch, listing.directories), default=None)
    if first is None:
        return False
    child = location.child(first)
    return MODEL_FILE in child.store.list_directory(child.path).by_name


class _Assembly:
    """One checkpoint being put together."""

    def __init__(self, location: Location, listing: Listing, options: ReadOptions) -> None:
        self._url, self._options = location.url, options
        self._builder = ShardMapBuilder()
        self._carries = options.target == "megatron"
        self._extra: dict[str, tuple[Node, _File]] = {}
        """Extra states of modules, where they are carried."""
        self._keys: dict[str, str] = {}
        """The names of parameters in the whole model as their module has them, and here."""
        self._files: list[SourceFile] = []
        self._kinds: Counter[str] = Counter()
        self._unknown: dict[str, None] = {}
        self._unread: Undecided | None = None
        self._ranks = self._read_files(location, listing)
        first = self._ranks[0]
        self._trees = TreeTensors(self._builder, {f.parsed.file: f.number for f in self._ranks})
        known = {"optimizer": first.items.get("optimizer")}
        self._common = CommonState(
            {
                **{k: self._trees.carried(v, first.parsed) for k, v in first.items.items() if not _is_tensors(k)},
                **{k: v for k, v in known.items() if v is not None},
            },
            first.common.args,
        )
        self._model = ModelBuilder(self._builder, self._common)
        if options.target in SCALED and (scaler := self._model.scaler) is not None:
            self._model.scaler = self._trees.carried(scaler, first.parsed)
        self._parts: dict[tuple[str, str], dict[Rank, int]] = {}
        self._copies: dict[tuple[str, str], dict[Rank, int]] = {}
        """Those of the copy of an embedding that the last stage holds."""

    # Files.

    def _read_files(self, location: Location, listing: Listing) -> list[_File]:
        names = sorted(filter(RANK_DIRECTORY.fullmatch, listing.directories))
        held = dict(zip(names, _listed([location.child(name) for name in names]), strict=True))
        if missing := [name for name in names if MODEL_FILE not in held[name]]:
            raise SourceError("checkpoint.incomplete", f"{listed(missing)} has no `{MODEL_FILE}`", fix=_COPY_AGAIN)
        if other := next((f for n in names for f in held[n] if _LAYER_WISE.fullmatch(f)), None):
            text = f"`{printable(other)}` is of a layer-wise optimizer, which is not read"
            self._unread = Undecided(Question.OPTIMIZER, text, _WEIGHTS_ALONE)
        sources = [SourceFile(location.store, f"{n}/{MODEL_FILE}", (held[n][MODEL_FILE],)) for n in names]
        pickles = SharedPickles(self._options.ledger)

        def parse(source: SourceFile) -> TorchFile:
            return open_torch_file(source, self._options.ledger, pickles=pickles)

        parsed = dict(zip(names, open_all(sources, parse), strict=True))
        first = CommonState.of(parsed[names[0]].root, sources[0].name)
        self._run = self._run_of(first, sources[0].name)
        ranks = self._ranks_of(names)
        found: list[_File] = []
        for rank, name in ranks.items():
            common = CommonState.of(parsed[name].root, printable(f"{name}/{MODEL_FILE}"))
            found.append(_File(rank, parsed[name], common, len(self._files)))
            self._files.append(parsed[name].file)
        self._check_mixed(found)
        with_states = [f for f in found if OPTIMIZER_FILE in held[f.rank.directory(self._run)]]
        files = [
            SourceFile(location.store, f"{d}/{OPTIMIZER_FILE}", (held[d][OPTIMIZER_FILE],))
            for d in (f.rank.directory(self._run) for f in with_states)
        ]
        for file, optimizer in zip(with_states, open_all(files, parse), strict=True):
            file.optimizer = optimizer
        for file in found:
            file.chunks = [*self._weights_of(file)]
        return found

    def _run_of(self, common: CommonState, name: str) -> Run:
        """The run that the arguments describe.

        Raises:
            SourceError: `source.unsupported`.
        """
        try:
            run = Run.of(common)
        except LayoutError as error:
            raise self._unsupported(str(error)) from error
        version = common.items.get("checkpoint_version")
        if isinstance(version, int | float) and version < 2:
            raise self._unsupported(f"{printable(name)} has the version {version}, whose attention has another order")
        return run

    def _unsupported(self, text: str) -> SourceError:
        return SourceError("source.unsupported", f"{printable(self._url)}: {text}", fix=_TOOLS)

    def _ranks_of(self, names: Sequence[str]) -> dict[Rank, str]:
        """The directory of each rank.

        Raises:
            SourceError: `checkpoint.incomplete` for ranks without one, `checkpoint.mixed` for directories of others.
        """
        run = self._run
        try:
            ranks = {rank: rank.directory(run) for rank in run.ranks()}
        except LayoutError as error:
            raise self._unsupported(str(error)) from error
        said = f"the arguments of the run say {run.tensor} tensor-parallel ranks, {counted(run.pipeline, 'stage')}" + (
            f" and {run.experts} expert-parallel ranks" if run.experts > 1 else ""
        )
        held = set(names)
        if missing := [d for d in ranks.values() if d not in held]:
            raise SourceError(
                "checkpoint.incomplete",
                f"{said}, and {counted(len(missing), 'directory is', 'directories are')} missing: {listed(missing)}",
                fix=_COPY_AGAIN,
            )
        if other := sorted(held - {*ranks.values()}):
            raise SourceError("checkpoint.mixed", f"{said}, and {listed(other)} is of another run", fix=_COPY_AGAIN)
        return ranks

    def _check_mixed(self, files: Sequence[_File]) -> None:
        """Refuse files of different iterations or runs.

        Raises:
            SourceError: `checkpoint.mixed`.
        """
        first = self._facts_of(files[0])
        for file in files[1:]:
            for key, value in self._facts_of(file).items():
                if value != first[key]:
                    raise SourceError(
                        "checkpoint.mixed",
                        f"{key} is {printable(first[key])} in {files[0].name}, and {printable(value)} in {file.name}",
                        fix=_COPY_AGAIN,
                    )

    def _facts_of(self, file: _File) -> dict[str, str]:
        """The facts that all ranks of one save have in common, as texts."""
        args = file.common.args
        wanted = ("num_layers", "num_experts", "tensor_model_parallel_size", "pipeline_model_parallel_size")
        found = {key: str(args.get(key)) for key in wanted}
        return {
            "iteration": str(file.items.get("iteration")),
            "the step of its param groups": str(steps_in(file.items.get("optimizer"))),
            **found,
        }

    # Weights.

    def _weights_of(self, file: _File) -> Iterator[list[_Held]]:
        """The weights of each model chunk of a rank, under the names of the whole model."""
        keys = [k for k in file.items if isinstance(k, str) and _MODEL.fullmatch(k)]
        wanted = ["model"] if self._run.chunks == 1 else [f"model{i}" for i in range(self._run.chunks)]
        if sorted(keys) != sorted(wanted):
            raise SourceError(
                "checkpoint.incomplete",
                f"{file.name} holds {listed(keys) or 'no model'}, and the arguments of the run say {listed(wanted)}",
                fix=_COPY_AGAIN,
            )
        for chunk, key in enumerate(wanted):
            items = mapping_items(file.items[key], what=f"{file.name}: {key}")
            if "language_model" in items:
                raise self._unsupported("its model is older than Megatron-core (`language_model`)")
            try:
                layers = self._run.layers_of(file.rank.stage, chunk)
            except LayoutError as error:
                raise self._unsupported(str(error)) from error
            held = [h for name, node in items.items() if (h := self._held(file, chunk, layers, str(name), node))]
            self._check_experts(file, held)
            yield held
            found = {int(m[2]) for name in items if (m := _LOCAL_LAYER.fullmatch(str(name)))}
            if len(found) != len(layers) or max(found, default=-1) != len(layers) - 1:
                raise SourceError(
                    "checkpoint.mixed",
                    f"{file.name}: {key} has {counted(len(found), 'layer')}, and the arguments of the run give its "
                    f"stage {len(layers)}",
                    fix=_COPY_AGAIN,
                )

    def _check_experts(self, file: _File, held: Sequence[_Held]) -> None:
        """Refuse a layer with other experts than those that the arguments give to this rank.

        Raises:
            SourceError: `checkpoint.mixed`.
        """
        share = (file.common.number("num_experts") or 0) // self._run.experts
        first = file.rank.expert * share
        layers: dict[str, set[int]] = {}
        for name in (h.name for h in held):
            if (one := _LOCAL_EXPERT.fullmatch(name)) is not None:
                layers.setdefault(one[1], set()).add(int(one[2]))
        for layer, numbers in layers.items():
            if len(numbers) != share or (min(numbers), max(numbers)) != (first, first + share - 1):
                raise SourceError(
                    "checkpoint.mixed",
                    f"{file.name}: {printable(layer)} has {counted(len(numbers), 'expert')}, and the arguments of the "
                    f"run give its rank {share}",
                    fix=_COPY_AGAIN,
                )

    def _held(self, file: _File, chunk: int, layers: range, key: str, node: Node) -> _Held | None:
        run, rank = self._run, file.rank
        state = key.endswith(_EXTRA_STATE)
        if state and not self._carries:
            self._kinds[_EXTRA_STATE] += 1
            return None
        if not state and not isinstance(node, PTensor):
            self._unknown.setdefault(f"model.{key}")
            return None
        name = key
        if (layer := _LOCAL_LAYER.fullmatch(key)) is not None:
            number = int(layer[2])
            name = f"{layer[1]}{layers[number] if number < len(layers) else _NUMBERS}{layer[3]}"
        elif "layers." in key and run.pipeline > 1:
            raise self._unsupported(f"nothing says which layers of the whole model {printable(key)} has")
        name = self._global_expert(file, name)
        if state:
            # Tensor-parallel ranks keep the same scales; the first one's are taken.
            self._extra.setdefault(name, (node, file))
            return None
        last = rank.stage == run.pipeline - 1 and chunk == run.chunks - 1
        untied = file.common.args.get("untie_embeddings_and_output_weights")
        copy = name == OUTPUT_LAYER and last and run.pipeline > 1 and untied is False
        known = entries_of(name, node.shape)[0].name
        self._keys.setdefault(name, known)
        return _Held(known, node, shared_copy=copy)

    def _global_expert(self, file: _File, name: str) -> str:
        """The name of an expert's parameter under the expert's number in the whole layer.

        Raises:
            SourceError: `source.unsupported` for experts in one transposed matrix.
        """
        if (one := _LOCAL_EXPERT.fullmatch(name)) is not None:
            head, number, rest = one[1], int(one[2]), one[3]
        elif (one := _GROUPED_EXPERT.fullmatch(name)) is not None:
            head, number, rest = one[1], int(one[4]), f"{one[2]}.{one[3]}"
        elif EXPERT.fullmatch(name):
            raise self._unsupported(f"{printable(name)} holds all experts in one matrix, which is not read")
        else:
            return name
        experts = file.common.number("num_experts")
        if experts is None or experts % self._run.experts or number >= experts // self._run.experts:
            raise SourceError(
                "checkpoint.mixed",
                f"{file.name} holds expert {number}, and the arguments of the run say {experts} of "
                f"{self._run.experts} expert-parallel ranks",
                fix=_COPY_AGAIN,
            )
        return f"{head}local_experts.{file.rank.expert * (experts // self._run.experts) + number}.{rest}"

    def _add_weights(self) -> None:
        """Register the weights of all ranks, and join them."""
        for file in self._ranks:
            for held in (h for chunk in file.chunks for h in chunk):
                number = add_whole_tensor(
                    self._builder, held.name, "weight", held.tensor, torch_file=file.parsed, file=file.number
                )
                self._keep(held, "weight", file.rank, number)

    def _keep(self, held: _Held, state: str, rank: Rank, number: int) -> None:
        places = self._copies if held.shared_copy else self._parts
        known = places.setdefault((held.name, state), {})
        if known.setdefault(rank, number) != number:
            raise SourceError("checkpoint.ambiguous", f"{state} of {printable(held.name)} comes twice")

    def _join(self) -> None:
        """Join the parts of ranks; copies on expert-parallel ranks and on the last stage must be equal."""
        shapes: dict[str, tuple[int, ...]] = {
            h.name: h.tensor.shape for f in reversed(self._ranks) for c in f.chunks for h in c if not h.shared_copy
        }
        names = model_order([*dict.fromkeys(name for name, _ in self._in_rank_order())])
        states = [*dict.fromkeys(state for _, state in self._parts)]
        for name in names:
            try:
                cut = cut_of(name, shapes, self._run)
            except LayoutError as error:
                raise self._unsupported(str(error)) from error
            for state in states:
                if (parts := self._parts.get((name, state))) is not None:
                    whole = self._join_one(name, state, cut, parts)
                    if name == WORD_EMBEDDINGS and (copy := self._copies.get((OUTPUT_LAYER, state))) is not None:
                        copies = self._whole_rows(name, state, cut, copy)
                        self._model.agree(name, state, whole, copies[0], "the output layer of the last stage")

    def _in_rank_order(self) -> Iterator[tuple[str, str]]:
        """The keys of `_parts`: those of the first chunks of all stages come first, then those of the second."""
        for chunk in range(self._run.chunks):
            for file in self._ranks:
                yield from ((h.name, "weight") for h in file.chunks[chunk] if not h.shared_copy)

    def _join_one(self, name: str, state: str, cut: Cut, parts: Mapping[Rank, int]) -> int:
        rows = self._rows(name, parts)
        where = [self._where(state, rank) for rank in rows[0]]
        number = self._model.add_parts(name, state, cut, [*rows[0].values()], where)
        for other in rows[1:]:
            for (rank, copy), first in zip(other.items(), rows[0].values(), strict=True):
                self._model.agree(name, state, first, copy, self._where(state, rank))
        return number

    def _whole_rows(self, name: str, state: str, cut: Cut, parts: Mapping[Rank, int]) -> list[int]:
        """A copy as one tensor for each expert-parallel rank that holds it."""
        return [
            self._model.whole(name, state, cut, [*row.values()], [self._where(state, rank) for rank in row])
            for row in self._rows(name, parts)
        ]

    def _where(self, state: str, rank: Rank) -> str:
        return f"{rank.directory(self._run)}/{MODEL_FILE if state == 'weight' else OPTIMIZER_FILE}"

    def _rows(self, name: str, parts: Mapping[Rank, int]) -> list[dict[Rank, int]]:
        """The parts of each copy, each of all tensor-parallel ranks.

        Raises:
            SourceError: `checkpoint.mixed` for a parameter that some of them lack.
        """
        run, expert = self._run, EXPERT.fullmatch(name) is not None
        rows: dict[tuple[int, int], dict[Rank, int]] = {}
        for rank in sorted(parts):
            rows.setdefault((rank.stage, rank.expert if expert else run.replica(rank)), {})[rank] = parts[rank]
        ranks = run.expert_tensor if expert else run.tensor
        lacking = next((row for row in rows.values() if len(row) != ranks), None)
        if lacking is not None or len({stage for stage, _ in rows}) > 1:
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(name)} is held by {counted(len(parts), 'rank')}, which are not the {ranks} "
                "tensor-parallel ones of one stage",
                fix=_COPY_AGAIN,
            )
        return [*rows.values()]

    # The optimizer.

    def _add_states(self) -> bool:
        """Register all states of the optimizer; False without an optimizer, or if its states are not read."""
        if self._unread is not None or not any("optimizer" in f.items for f in self._ranks):
            return False
        found: list[tuple[_Held, str, Rank, int]] = []
        try:
            for file in self._ranks:
                found += self._states_of(file)
        except LayoutError as error:
            text = f"the places of the optimizer's states are not proven: {error}"
            self._unread = Undecided(Question.OPTIMIZER, text, _WEIGHTS_ALONE)
            return False
        for held, state, rank, number in found:
            self._keep(held, state, rank, number)
        return True

    def _states_of(self, file: _File) -> list[tuple[_Held, str, Rank, int]]:
        chained = _optimizers(file.items.get("optimizer"))
        plain = any(_has_states(node) for node in chained)
        if plain and file.optimizer is None:
            return self._plain_states(file, chained)
        if file.optimizer is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"{file.rank.directory(self._run)} has no `{OPTIMIZER_FILE}`, and its optimizer is distributed",
                fix=_COPY_AGAIN,
            )
        return self._vectors(file, file.optimizer)

    # A distributed optimizer: vectors of buffers.

    def _vectors(self, file: _File, optimizer: TorchFile) -> list[tuple[_Held, str, Rank, int]]:
        name, root = printable(optimizer.file.name), optimizer.root
        chained = _optimizers(root)
        if len(chained) > (1 if self._run.experts == 1 else 2):
            raise LayoutError(f"{name} holds {len(chained)} optimizers")
        number = len(self._files)
        self._files.append(optimizer.file)
        found: list[tuple[_Held, str, Rank, int]] = []
        for kind, node in enumerate(chained):
            if node is None:
                # Experts' ranks share the data-parallel ranks of all else, and the first one saves that.
                if kind or not self._run.replica(file.rank):
                    raise SourceError("checkpoint.incomplete", f"{name} holds no states of optimizer {kind}")
                continue
            if kind == 0 and self._run.replica(file.rank):
                raise LayoutError(f"{name} holds states that the first expert-parallel rank holds as well")
            found += self._buffers(file, VectorFile(optimizer, number), node, of_experts=kind == 1)
        return found

    def _buffers(
        self, file: _File, source: VectorFile, node: Node, *, of_experts: bool
    ) -> list[tuple[_Held, str, Rank, int]]:
        """The states in the vectors of one optimizer, registered under the names that the layout of buffers gives."""
        name = printable(source.parsed.file.name)
        buffers = buffers_of(node, name)
        wanted = [
            (chunk, dtype, held)
            for chunk, weights in enumerate(file.chunks)
            for dtype, held in self._by_type(weights, of_experts=of_experts).items()
        ]
        if len(buffers) != len(wanted):
            raise LayoutError(f"{name} holds {len(buffers)} buffers, and the model makes {len(wanted)}")
        every = sum(h.tensor.numel for chunk in file.chunks for h in chunk)
        found: list[tuple[_Held, str, Rank, int]] = []
        for (chunk, dtype, weights), buffer in zip(wanted, buffers, strict=True):
            if buffer.dtype != dtype:
                raise LayoutError(f"{name} has a buffer of {buffer.dtype or 'another type'} for parameters of {dtype}")
            members = [Member(_label(h), h.tensor.numel, self._is_alone(file, h)) for h in weights]
            try:
                slots = slots_in_vector(members, self._run.bucket_sizes(file.rank.stage, chunk, every), buffer.numel)
            except LayoutError as error:
                raise LayoutError(f"{name}, buffer of {dtype} of chunk {chunk}: {error}") from error
            labelled = {_label(h): h for h in weights}
            for state, vector in buffer.vectors.items():
                for slot in slots:
                    held = labelled[slot.name]
                    place = replace(slot, name=held.name)
                    number = add_from_vector(
                        self._builder, place, state, held.tensor.shape, vector=vector, source=source
                    )
                    found.append((held, state, file.rank, number))
        return found

    def _by_type(self, weights: Sequence[_Held], *, of_experts: bool) -> dict[str, list[_Held]]:
        """The trained weights of one optimizer by element type, in the order of their registration."""
        found: dict[str, list[_Held]] = {}
        for held in weights:
            if BUFFERS.fullmatch(held.name) is None and self._run.is_shared(held.name) != of_experts:
                found.setdefault(held.tensor.dtype, []).append(held)
        return found

    def _is_alone(self, file: _File, held: _Held) -> bool:
        tied = self._run.pipeline > 1 and file.common.args.get("untie_embeddings_and_output_weights") is False
        return tied and (held.shared_copy or held.name == WORD_EMBEDDINGS)

    # A plain optimizer: states by numbers, masters by param groups.

    def _plain_states(self, file: _File, chained: Sequence[Node]) -> list[tuple[_Held, str, Rank, int]]:
        """The states of an optimizer that is not distributed.

        Raises:
            LayoutError: Its numbers do not fit the parameters of the model.
        """
        found: list[tuple[_Held, str, Rank, int]] = []
        for kind, node in enumerate(chained):
            items = mapping_items(node, what=f"{file.name}: optimizer")
            inner = mapping_items(items["optimizer"], what="optimizer") if "optimizer" in items else items
            groups = self._members_by_group(file, node, of_experts=kind == 1)
            masters = items.get("fp32_from_fp16_params")
            numbered = _numbered(inner.get("state"), file.name)
            at = 0
            for number, members in enumerate(groups):
                found += self._masters(file, members, masters, number)
                for held in members:
                    for state, tensor in numbered.get(at, {}).items():
                        found.append((held, checked_state(state), file.rank, self._tensor(file, held, state, tensor)))
                    at += 1
            if at != len(numbered):
                raise LayoutError(f"{file.name} has {len(numbered)} numbered states, and {at} parameters")
        return found

    def _members_by_group(self, file: _File, node: Node, *, of_experts: bool) -> list[list[_Held]]:
        """The parameters of each param group in the order in which the optimizer numbers them."""
        weights = [
            h
            for chunk in file.chunks
            for h in chunk
            if BUFFERS.fullmatch(h.name) is None and self._run.is_shared(h.name) != of_experts
        ]
        said = members_said(node)
        found = read_groups(
            replace(self._common, items={"optimizer": node}), {_label(h): len(h.tensor.shape) for h in weights}
        )
        groups = [[h for h in weights if found.group.get(_label(h)) == number] for number in range(len(said))]
        if found.undecided or [len(g) for g in groups] != said:
            raise LayoutError(
                f"{file.name} has param groups of {listed(list(map(str, said)))} parameters, and by the rule of "
                f"Megatron-core they have {listed([str(len(g)) for g in groups])}"
            )
        return groups

    def _masters(
        self, file: _File, members: Sequence[_Held], masters: Node, group: int
    ) -> Iterator[tuple[_Held, str, Rank, int]]:
        """The masters of the members of a group that are not in fp32 themselves."""
        if masters is None:
            return
        lists = sequence_items(masters, what="fp32_from_fp16_params")
        tensors = sequence_items(lists[group], what="fp32_from_fp16_params") if group < len(lists) else []
        narrow = [h for h in members if h.tensor.dtype != "float32"]
        if len(tensors) != len(narrow):
            raise LayoutError(
                f"{file.name} has {len(tensors)} masters in param group {group}, which has {len(narrow)} parameters"
            )
        for held, tensor in zip(narrow, tensors, strict=True):
            yield held, "fp32", file.rank, self._tensor(file, held, "fp32", tensor)

    def _tensor(self, file: _File, held: _Held, state: str, node: Node) -> int:
        if not isinstance(node, PTensor) or node.shape != held.tensor.shape:
            said = node.shape if isinstance(node, PTensor) else "no tensor"
            raise LayoutError(
                f"{file.name}: {printable(state)} of {printable(held.name)} is {said}, and the weight "
                f"{held.tensor.shape}"
            )
        return add_whole_tensor(self._builder, held.name, state, node, torch_file=file.parsed, file=file.number)

    # The whole.

    def checkpoint(self) -> Checkpoint:
        """The checkpoint of everything that was read."""
        self._add_weights()
        has_states = self._add_states()
        self._join()
        groups = read_groups(self._common, self._model.dims()) if has_states else None
        random_states = {
            (f.rank.stage, f.rank.tensor): self._trees.carried(f.items[RANDOM], f.parsed)
            for f in self._ranks
            if RANDOM in f.items and not self._run.replica(f.rank)
        }
        self._model.rules = self._key_rules()
        self._model.extra_states = {n: self._trees.carried(s, f.parsed) for n, (s, f) in self._extra.items()}
        return self._model.checkpoint(
            self._url,
            LEGACY,
            self._files,
            self._options,
            groups,
            unread=self._unread,
            random_states=random_states,
            not_carried=self._not_carried(),
        )

    def _key_rules(self) -> KeyRules:
        """The keys of parameters in a distributed checkpoint of this run.

        Source: megatron-core 0.16.1 `models/gpt/gpt_layer_specs.py` (local layers have `sharded_state_dict_keys_map`),
        `transformer/transformer_block.py` (`sharded_state_dict`: layers that differ have keys of their own).
        """
        args = self._common.args
        local = args.get("transformer_impl") == "local"
        rules = KeyRules.for_model([*self._keys.values()], local=True) if local else KeyRules.of(self._keys.items())
        return replace(rules, numbered=frozenset({"decoder.layers"} if self._common.layers_differ else ()))

    def _not_carried(self) -> Iterator[NotCarried]:
        if count := self._kinds[_EXTRA_STATE]:
            yield extra_states(count)
        if self._options.target not in SCALED and self._common.scaler() is not None:
            yield NotCarried(path=f"optimizer.{SCALER}", reason=SCALER_REASON)
        yield from named(self._unknown, UNKNOWN)


def _is_tensors(key: str | int) -> bool:
    """True for the keys of a rank's file that hold its tensors; everything else is of the run."""
    return key in ("optimizer", RANDOM) or (isinstance(key, str) and _MODEL.fullmatch(key) is not None)


def _optimizers(node: Node) -> list[Node]:
    """The dicts of chained optimizers, or the only one."""
    return sequence_items(node, what="optimizer") if isinstance(node, PList | PTuple) else [node]


def _label(held: _Held) -> str:
    """A name that tells the copy of an embedding from an output layer."""
    return f"{held.name} (a copy of the embedding)" if held.shared_copy else held.name


def _has_states(node: Node) -> bool:
    """True for the dict of an optimizer that holds states by number."""
    if not is_mapping(node):
        return False
    items = mapping_items(node, what="optimizer")
    return "state" in items or ("optimizer" in items and _has_states(items["optimizer"]))


def _numbered(node: Node, name: str) -> dict[int, dict[str, PTensor]]:
    """The states of each number that are tensors of more than one number."""
    found: dict[int, dict[str, PTensor]] = {}
    for number, states in mapping_items(node, what=f"{name}: state").items() if is_mapping(node) else ():
        items = mapping_items(states, what=f"{name}: state")
        if not isinstance(number, int):
            raise LayoutError(f"{name} has states of {printable(number)}, which is no number")
        found[number] = {
            str(k): v for k, v in items.items() if isinstance(v, PTensor) and not (k == "step" and v.numel == 1)
        }
    return found


@dataclass(frozen=True, slots=True)
class BufferVectors:
    """The states of one buffer, as vectors over all of its buckets."""

    dtype: str
    """Element type of its parameters; empty for another one than torch's."""
    vectors: Mapping[str, PTensor]
    """By state."""
    numel: int
    """Elements of each vector."""


def buffers_of(node: Node, name: str) -> list[BufferVectors]:
    """The buffers of one distributed optimizer, in their order.

    Args:
        node: The dict that `get_parameter_state_dp_zero` makes.
        name: Where it is, for messages.

    Raises:
        LayoutError: The vectors are of another form, or not floating.
        SourceError: `checkpoint.malformed` for vectors of other lengths than the file says.
    """
    items = mapping_items(node, what=name)
    if items.pop("buckets_coalesced", None) is not True:
        raise LayoutError(f"{name} holds a list for each bucket, as Megatron-LM wrote before February 2024")
    numbered = [items[number] for number in range(len(items)) if number in items]
    if len(numbered) != len(items):
        wanted = max((n for n in items if isinstance(n, int)), default=0) + 1
        raise LayoutError(f"{name} holds {len(items)} buffers, and the model makes {wanted}")
    return [_vectors_of(one, name) for one in numbered]


def _vectors_of(buffer: Node, name: str) -> BufferVectors:
    pairs = list(zip(buffer.pairs[::2], buffer.pairs[1::2], strict=True)) if isinstance(buffer, PDict) else []
    kinds = [k.items[0] if isinstance(k, PTuple) and k.items else k for k, _ in pairs]
    if len(pairs) != 1:
        raise LayoutError(f"{name} has a buffer of {len(pairs)} element types")
    said = kinds[0].name if isinstance(kinds[0], Global) and kinds[0].module == "torch" else ""
    items = mapping_items(pairs[0][1], what=name)
    stored = items.pop("numel_unpadded", None)
    vectors: dict[str, PTensor] = {}
    for state, node in items.items():
        if isinstance(node, PTensor) and not BY_NAME[node.dtype].floating:
            raise LayoutError(f"{name}: {printable(str(state))} is of {node.dtype}")
        if not isinstance(node, PTensor) or node.shape != (stored,) or not is_packed(node.shape, node.stride):
            length = node.shape if isinstance(node, PTensor) else "no tensor"
            raise SourceError(
                "checkpoint.malformed",
                f"{name}: {printable(str(state))} is {length}, and numel_unpadded is {printable(str(stored))}",
                fix="the file is damaged: copy it again",
            )
        vectors["fp32" if state == "param" else checked_state(str(state))] = node
    if type(stored) is not int or "fp32" not in vectors:
        raise SourceError(
            "checkpoint.malformed", f"{name} has a buffer without masters", fix="the file is damaged: copy it again"
        )
    return BufferVectors(said, vectors, stored)


def add_from_vector(
    builder: ShardMapBuilder, slot: Slot, state: str, shape: tuple[int, ...], *, vector: PTensor, source: VectorFile
) -> int:
    """Register one parameter's part of a vector; returns the tensor's number.

    Args:
        builder: The tensors of the checkpoint.
        slot: The place in the vector, under the parameter's name.
        state: The state.
        shape: The shape of the part.
        vector: The vector.
        source: The file that holds it.
    """
    dtype = BY_NAME[vector.dtype]
    number = builder.tensor(slot.name, state, dtype, shape)
    offset = source.begin + source.parsed.tensor_offset(vector) + slot.begin * dtype.itemsize_bytes
    one = [np.array([v], dtype=np.int64) for v in (number, 0, slot.end - slot.begin, source.number, offset)]
    builder.pieces(one[0], one[1], one[2], file=one[3], offset=one[4])
    return number
