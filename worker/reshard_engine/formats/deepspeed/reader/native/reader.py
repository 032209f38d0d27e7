"""The reader of native checkpoints: it sorts the files, refuses what it cannot read, and chooses the partitioning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.formats.deepspeed.names import RNG_KEYS
from reshard_engine.formats.deepspeed.reader.native.assembly import ParsedRun, assemble
from reshard_engine.formats.deepspeed.reader.native.files import RankFiles, looks_like_deepspeed, sort_files
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, parse_model_states
from reshard_engine.formats.deepspeed.reader.native.optim_states import MAX_WORLD, RankStates, parse_rank_states
from reshard_engine.formats.deepspeed.reader.native.parallel import degrees
from reshard_engine.formats.deepspeed.reader.native.rank_opener import RankOpener, States
from reshard_engine.formats.deepspeed.reader.native.ranks import note_copies
from reshard_engine.formats.deepspeed.reader.native.run_config import zero_options
from reshard_engine.formats.deepspeed.reader.native.stage0 import assemble_stage0
from reshard_engine.formats.deepspeed.reader.native.swapped import FOLDER, with_swapped
from reshard_engine.formats.not_carried import NotCarriedKeys
from reshard_engine.formats.reader import ReadOptions, refuse_choices
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing

_K = TypeVar("_K")


class DeepSpeedReader:
    """ZeRO-1, ZeRO-2, ZeRO-3 and BF16_Optimizer under data, tensor, pipeline and expert parallelism; stage 0."""

    family = "deepspeed"

    def recognises(self, listing: Listing) -> bool:
        """True if a file of the directory has a name that DeepSpeed gives."""
        return looks_like_deepspeed(listing)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """The checkpoint in a tag directory.

        Raises:
            SourceError: As the modules of this package say.
        """
        files = sort_files(location.store, listing)
        if not files.optim:
            return self._read_stage0(location, files, options)
        refuse_choices(options.choices, f"{printable(location.url)} holds one model, and names its parameters")
        opener = RankOpener(options.ledger)
        noted = NotCarriedKeys()
        states, models = _read_ranks(files, opener, noted)
        if states[0][0].stage == 3 and FOLDER in listing.directories:
            states = with_swapped(states, models[0][0], location)
        pp, tp = degrees(models[0][0], files.model_parallel, 1 + max((t for _, t in files.layers), default=-1))
        run = ParsedRun(
            states,
            models,
            pp,
            tp,
            _open_table(files.layers, opener),
            _open_table(files.experts, opener),
            files.others,
            noted,
        )
        return assemble(run, url=location.url, tag=options.tag, ledger=options.ledger, rules=options.rules)

    def _read_stage0(self, location: Location, files: RankFiles, options: ReadOptions) -> Checkpoint:
        model_file = files.models.get(0)
        if files.models_by_rank and model_file is None:
            raise SourceError(
                "checkpoint.incomplete",
                "ZeRO-3 model states without any *_optim_states.pt",
                fix="copy the optimizer files too: ZeRO-3 weights are in them",
            )
        if model_file is None:
            raise SourceError("checkpoint.incomplete", "no mp_rank_00_model_states.pt", fix="copy it from the same tag")
        if files.model_parallel > 1 or files.layers or files.experts or files.expert_optim:
            raise SourceError(
                "source.unsupported",
                "a run without ZeRO under tensor, pipeline or expert parallelism, which this version does not read",
                fix="save with ZeRO stage 1, 2 or 3",
            )
        others = options.choices.model_copy(update={"param_order": None})
        refuse_choices(others, f"{printable(location.url)} holds one model")
        model = parse_model_states(open_torch_file(model_file, options.ledger))
        refuse_by_config(model)
        if model.param_shapes is not None and model.entries.get("optimizer") is None:
            raise SourceError(
                "checkpoint.incomplete",
                "the model states are of a ZeRO run, and every *_optim_states.pt is missing",
                fix="copy the optimizer files of the same tag",
            )
        return assemble_stage0(
            model,
            files.others,
            url=location.url,
            tag=options.tag,
            ledger=options.ledger,
            rules=options.rules,
            order=options.choices.param_order,
        )


def _read_ranks(
    files: RankFiles, opener: RankOpener, noted: NotCarriedKeys
) -> tuple[list[list[RankStates]], list[list[ModelStates]]]:
    """Optimizer states and model states of all ranks, by model-parallel rank."""
    states: list[list[RankStates]] = []
    models: list[list[ModelStates]] = []
    for mp in range(files.model_parallel):
        optim = {dp: f for (dp, m), f in files.optim.items() if m == mp}
        ranks = _complete_ranks(optim, "optim_states", files, mp, count=len(states[0]) if states else None)
        states.append(_open_all(optim, ranks, opener, parse_rank_states))
        _check_world(states[-1])
        if (states[-1][0].stage, len(states[-1])) != (states[0][0].stage, len(states[0])):
            raise SourceError("checkpoint.mixed", f"model-parallel rank {mp} is of another run than rank 0")
        models.append(_read_models(files, mp, len(states[-1]), opener, noted, sharded=states[-1][0].stage == 3))
    return states, models


def _read_models(
    files: RankFiles, mp: int, world: int, opener: RankOpener, noted: NotCarriedKeys, *, sharded: bool
) -> list[ModelStates]:
    """Model states of one model-parallel rank: data-parallel rank 0's, or all ranks' if each holds shares."""
    table = {dp: f for (dp, m), f in files.models_by_rank.items() if m == mp}
    if not sharded:
        table = {0: files.models[mp]} if mp in files.models else {}
    if 0 not in table:
        name = f"mp_rank_{mp:02d}_model_states.pt"
        name = f"zero_pp_rank_0_{name}" if sharded else name
        raise SourceError(
            "checkpoint.incomplete",
            f"{name} is missing: it names the parameters",
            fix=f"copy {name} of the same tag",
        )
    first = opener.states(table[0], parse_model_states)
    refuse_by_config(first)
    if not sharded:
        return [first]
    wanted = _complete_ranks(table, "model_states", files, mp, count=world)
    # Each rank has its own shares of frozen parameters and its own random states. All else should be equal.
    differ = bool(first.frozen_shapes) or any(first.entries.get(k) is not None for k in RNG_KEYS)
    if differ:
        return [first, *_open_all(table, wanted[1:], opener, parse_model_states)]
    note_copies(first, [table[rank] for rank in wanted[1:]], opener, noted)
    return [first]


def _open_table(files: Mapping[_K, SourceFile], opener: RankOpener) -> dict[_K, TorchFile]:
    return dict(zip(files, open_all(list(files.values()), opener.open), strict=True))


def refuse_by_config(model: ModelStates) -> None:
    """Refuse runs whose config says that the optimizer states are of a kind that this reader cannot read.

    Raises:
        SourceError: `source.unsupported`.
    """
    if (zero_options(model) or {}).get("zenflow") is not None:
        raise SourceError(
            "source.unsupported",
            "the run used ZenFlow, which stores matrices transposed without saying so",
            fix="save again without zero_optimization.zenflow",
        )


def _complete_ranks(
    table: Mapping[int, SourceFile], kind: str, files: RankFiles, mp: int, *, count: int | None = None
) -> list[int]:
    present = sorted(table)
    world = (present[-1] + 1 if present else 0) if count is None else count
    if world > MAX_WORLD:
        raise SourceError("checkpoint.too_large", f"a file of rank {present[-1]}; the limit is {MAX_WORLD} ranks")
    missing = [r for r in range(world) if r not in table]
    if missing:
        prefix = files.prefix if kind == "optim_states" else ""
        name = f"{prefix}zero_pp_rank_{missing[0]}_mp_rank_{mp:02d}_{kind}.pt"
        raise missing_rank(missing, world, name)
    return list(range(world))


def missing_rank(missing: Sequence[int], world: int, name: str) -> SourceError:
    """The error for ranks whose files are not there."""
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return SourceError(
        "checkpoint.incomplete",
        f"{len(missing)} of {world} ranks have no file (rank {listed}); a missing rank is not a smaller world",
        fix=f"copy {name} (and its like) from the machine that wrote it",
        details={"missing_ranks": list(missing[:64]), "world_size": world},
    )


def _open_all(
    table: Mapping[int, SourceFile], ranks: Sequence[int], opener: RankOpener, parse: Callable[[TorchFile], States]
) -> list[States]:
    return open_all([table[rank] for rank in ranks], lambda file: opener.states(file, parse))


def _check_world(states: Sequence[RankStates]) -> None:
    first = states[0]
    stated = first.partition_count
    if stated is not None and stated > len(states):
        missing = list(range(len(states), stated))
        raise missing_rank(missing, stated, first.torch_file.file.name.replace("rank_0_", f"rank_{missing[0]}_", 1))
    if stated is not None and stated < len(states):
        raise SourceError(
            "checkpoint.mixed",
            f"{len(states)} optimizer files, but rank 0 says that the world had {stated} ranks",
            fix="remove the files that an older save with more ranks left behind",
        )
    for rank, other in enumerate(states):
        if (other.stage, len(other.fp32), len(other.param_groups)) != (
            first.stage,
            len(first.fp32),
            len(first.param_groups),
        ):
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(other.torch_file.file.name)} (rank {rank}) is of another run than rank 0",
            )
