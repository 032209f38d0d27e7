"""The DeepSpeed reader: which files there are, what is refused, and which partitioning applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.pickles.nodes import is_mapping, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.readers.deepspeed.assembly import assemble
from reshard_engine.readers.deepspeed.files import RankFiles, looks_like_deepspeed, sort_files
from reshard_engine.readers.deepspeed.model_states import ModelStates, parse_model_states
from reshard_engine.readers.deepspeed.optim_states import MAX_WORLD, RankStates, parse_rank_states
from reshard_engine.readers.deepspeed.stage0 import assemble_stage0
from reshard_engine.readers.opening import parse_all
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing

_T = TypeVar("_T")


class DeepSpeedReader:
    """ZeRO-1, ZeRO-2, ZeRO-3, BF16_Optimizer and stage 0 under data parallelism."""

    family = "deepspeed"

    def recognises(self, listing: Listing) -> bool:
        """Whether a file of the directory has a name that DeepSpeed gives."""
        return looks_like_deepspeed(listing)

    def read(self, location: Location, listing: Listing, *, tag: str | None, ledger: OpaqueLedger) -> Checkpoint:
        """The checkpoint in a tag directory.

        Raises:
            SourceError: As the modules of this package say.
        """
        files = sort_files(location.store, listing)
        refuse_unsupported(files)
        if not files.optim:
            return self._read_stage0(location, files, tag=tag, ledger=ledger)
        ranks = _complete_ranks(files.optim, "optim_states", files)
        states = _open_all(files.optim, ranks, ledger, parse_rank_states)
        _check_world(states)
        model_files = files.model_by_rank if states[0].stage == 3 else {} if files.model is None else {0: files.model}
        if 0 not in model_files:
            name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if states[0].stage == 3 else "mp_rank_00_model_states.pt"
            raise SourceError(
                "checkpoint.incomplete",
                f"{name} is missing: it names the parameters",
                fix=f"copy {name} of the same tag",
            )
        first = parse_model_states(open_torch_file(model_files[0], ledger))
        refuse_by_config(first)
        models = [first]
        if states[0].stage == 3:
            wanted = _complete_ranks(model_files, "model_states", files, count=len(states))
            if first.frozen_shapes:
                models += _open_all(model_files, wanted[1:], ledger, parse_model_states)
        used = [f.torch_file.file for f in (*states, *models)]
        return assemble(
            states,
            models,
            url=location.url,
            tag=tag,
            files=tuple(dict.fromkeys(used)),
            ledger=ledger,
        )

    def _read_stage0(
        self, location: Location, files: RankFiles, *, tag: str | None, ledger: OpaqueLedger
    ) -> Checkpoint:
        if files.model_by_rank and files.model is None:
            raise SourceError(
                "checkpoint.incomplete",
                "ZeRO-3 model states without any *_optim_states.pt",
                fix="copy the optimizer files too: ZeRO-3 weights are in them",
            )
        if files.model is None:
            raise SourceError("checkpoint.incomplete", "no mp_rank_00_model_states.pt", fix="copy it from the same tag")
        model = parse_model_states(open_torch_file(files.model, ledger))
        refuse_by_config(model)
        if model.param_shapes is not None and model.entries.get("optimizer") is None:
            raise SourceError(
                "checkpoint.incomplete",
                "the model states are of a ZeRO run, and every *_optim_states.pt is missing",
                fix="copy the optimizer files of the same tag",
            )
        return assemble_stage0(model, url=location.url, tag=tag, ledger=ledger)


def refuse_unsupported(files: RankFiles) -> None:
    """Refuse what file names show that this package does not read.

    Raises:
        SourceError: `source.unsupported`.
    """
    reason = ""
    if files.model_parallel > 1:
        reason = f"{files.model_parallel} model-parallel ranks (tensor or pipeline parallelism)"
    elif files.layers:
        reason = "pipeline layer files"
    elif files.experts:
        reason = "expert files (mixture of experts)"
    elif files.swapped:
        reason = "optimizer states offloaded to NVMe (offloaded_tensors/)"
    if reason:
        raise SourceError(
            "source.unsupported",
            f"this checkpoint has {reason}, which this version does not read",
            fix="data-parallel checkpoints (ZeRO-1/2/3, BF16_Optimizer, stage 0) are supported",
        )


def refuse_by_config(model: ModelStates) -> None:
    """Refuse runs whose model states say that the optimizer states are of a kind that is not read.

    Raises:
        SourceError: `source.unsupported`.
    """
    experts = model.entries.get("num_experts")
    if experts is not None and not (hasattr(experts, "items") and not experts.items):
        raise SourceError("source.unsupported", "mixture-of-experts checkpoints are not supported yet")
    config = model.entries.get("ds_config")
    if not is_mapping(config):
        return
    zero = mapping_items(config, what="ds_config").get("zero_optimization")
    if is_mapping(zero) and mapping_items(zero, what="zero_optimization").get("zenflow") is not None:
        raise SourceError(
            "source.unsupported",
            "the run used ZenFlow, which stores matrices transposed without saying so",
            fix="save again without zero_optimization.zenflow",
        )


def _complete_ranks(
    table: Mapping[int, SourceFile], kind: str, files: RankFiles, *, count: int | None = None
) -> list[int]:
    present = sorted(table)
    world = (present[-1] + 1 if present else 0) if count is None else count
    if world > MAX_WORLD:
        raise SourceError("checkpoint.too_large", f"a file of rank {present[-1]}; the limit is {MAX_WORLD} ranks")
    missing = [r for r in range(world) if r not in table]
    if missing:
        prefix = files.prefix if kind == "optim_states" else ""
        name = f"{prefix}zero_pp_rank_{missing[0]}_mp_rank_00_{kind}.pt"
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
    table: Mapping[int, SourceFile], ranks: Sequence[int], ledger: OpaqueLedger, parse: Callable[[TorchFile], _T]
) -> list[_T]:
    return list(parse_all(ranks, lambda rank: parse(open_torch_file(table[rank], ledger))))


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
