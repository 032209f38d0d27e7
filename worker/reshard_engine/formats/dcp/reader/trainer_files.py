"""Files of a trainer beside the shards: schedulers, random states, counters, and objects that the script saves.

Tensors of these files are small (random states), so their bytes are taken into the trees.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from reshard.errors import SourceError, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile, open_all, parse_json
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.formats.carried import named
from reshard_engine.formats.dcp.facts import META, TRAINER_STATE, DcpFacts, facts_of, is_shard
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.pickles.nodes import Node, PLiteral, PTensor, mapping_items, sequence_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import is_packed

# The files of a trainer are read as inert data, and written again only for a target of the same kind.
#
# Source: accelerate 1.15.0 `checkpointing.py` (`save_accelerator_state`), `utils/constants.py`; transformers 5.23.0
# `trainer.py` (`_save_rng_state`, `_save_checkpoint`); pytorch-lightning 2.6.6 `strategies/fsdp.py`
# (`save_checkpoint`).

SCHEDULER = re.compile(r"scheduler(?:_\d{1,4})?\.(?:bin|pt)")
RANK_STATES = re.compile(r"(?:rng_state|random_states)(?:_(\d{1,7}))?\.(?:pth|pkl)")
_OBJECTS = re.compile(
    r"custom_checkpoint_\d{1,4}\.pkl|sampler(?:_\d{1,4})?\.bin|dl_state_dict(?:_\d{1,4})?\.bin|scaler\.pt"
)
_MADE_ANEW = {
    "training_args.bin": "the Trainer writes its arguments anew",
    "checkpoint-is-incomplete.txt": "a mark of the Trainer",
}
_STATE_LIMIT_BYTES = 64 << 20
_BESIDE = "it lies beside the shards, and nothing reads it"
_NO_RANK = "files of lower ranks are missing, and the target numbers ranks without gaps"


@dataclass(slots=True)
class Companions:
    """The contents of a trainer's files."""

    schedulers: list[tuple[TorchFile, Node]] = field(default_factory=list[tuple[TorchFile, Node]])
    rng: list[tuple[TorchFile, Mapping[str | int, Node]]] = field(
        default_factory=list[tuple[TorchFile, Mapping[str | int, Node]]]
    )
    """Random states by rank."""
    ranks: list[int] = field(default_factory=list[int])
    """The rank of each of them, by the name of its file."""
    client_state: list[tuple[TorchFile, str, Node]] = field(default_factory=list[tuple[TorchFile, str, Node]])
    """Other values, by the name of their file or their key in `meta.pt`."""
    texts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files that are texts, which are written again as they are."""
    steps: int | None = None
    not_carried: list[NotCarried] = field(default_factory=list[NotCarried])


def read_companions(location: Location, listing: Listing, ledger: OpaqueLedger) -> Companions:
    """Read the files beside the shards of a directory.

    Raises:
        SourceError: `zip.*`, `pickle.*`, `checkpoint.malformed` for files that are not as trainers write them.
    """
    found = Companions()
    infos_by_name = {f.path.rpartition("/")[2]: f for f in listing.files}
    torch_names = [
        n
        for n in infos_by_name
        if n == META or SCHEDULER.fullmatch(n) or RANK_STATES.fullmatch(n) or _OBJECTS.fullmatch(n)
    ]
    parts = [SourceFile(location.store, n, (infos_by_name[n],)) for n in sorted(torch_names, key=_order)]
    for parsed in open_all(parts, lambda f: open_torch_file(f, ledger)):
        _take(found, parsed)
    if missing := [r for r in range(max(found.ranks, default=0)) if r not in found.ranks]:
        found.not_carried += named([f"random states of rank {rank}" for rank in found.ranks[missing[0] :]], _NO_RANK)
        del found.rng[missing[0] :]
    if (info := infos_by_name.get(TRAINER_STATE)) is not None:
        if info.size_bytes > _STATE_LIMIT_BYTES:
            raise SourceError("checkpoint.too_large", f"{TRAINER_STATE} has {info.size_bytes} bytes")
        found.texts[TRAINER_STATE] = read_bytes(location.store, info)
        found.steps = _steps_of_trainer(found.texts[TRAINER_STATE])
    return found


def beside_shards(listing: Listing, *, companions: bool, folders: Collection[str] = ()) -> list[NotCarried]:
    """The files and directories beside the shards that nothing reads.

    Args:
        listing: The directory.
        companions: True if the files of a trainer are read.
        folders: The directories that are read.
    """
    names = [f.path.rpartition("/")[2] for f in listing.files]
    rest = [n for n in names if n != MANIFEST_NAME and not is_shard(n) and not (companions and _is_read(n))]
    rest += [f"{d}/" for d in listing.directories if d not in folders and not d.startswith(".")]
    return [NotCarried(path=printable(n), file=printable(n), reason=_MADE_ANEW.get(n, _BESIDE)) for n in rest]


def _is_read(name: str) -> bool:
    return name in (TRAINER_STATE, META) or any(p.fullmatch(name) for p in (SCHEDULER, RANK_STATES, _OBJECTS))


def _order(name: str) -> tuple[str, int, str]:
    """Ranks in the order of their numbers."""
    return ("rank", _rank_of(name), name) if RANK_STATES.fullmatch(name) else ("", 0, name)


def _rank_of(name: str) -> int:
    """The rank in the name of a file of random states; 0 in that of a run of one process."""
    match = RANK_STATES.fullmatch(name)
    return int(match[1] or 0) if match else 0


def _take(found: Companions, parsed: TorchFile) -> None:
    name = parsed.file.name
    if name == META:
        _take_meta(found, parsed)
    elif SCHEDULER.fullmatch(name):
        found.schedulers.append((parsed, parsed.root))
    elif RANK_STATES.fullmatch(name):
        found.rng.append((parsed, mapping_items(parsed.root, what=printable(name))))
        found.ranks.append(_rank_of(name))
    else:
        found.client_state.append((parsed, name, parsed.root))


def _take_meta(found: Companions, parsed: TorchFile) -> None:
    """Lightning's `meta.pt`: the checkpoint without weights and optimizers."""
    for key, value in mapping_items(parsed.root, what=META).items():
        if key == "lr_schedulers":
            found.schedulers += [(parsed, node) for node in sequence_items(value, what=f"{META}: {key}")]
        else:
            found.client_state.append((parsed, str(key), value))
        if key == "global_step" and type(value) is int:
            found.steps = value


def _steps_of_trainer(text: bytes) -> int | None:
    state = parse_json(text, code="checkpoint.malformed", what=TRAINER_STATE)
    steps: Any = cast("dict[str, Any]", state).get("global_step") if isinstance(state, dict) else None
    return steps if type(steps) is int else None


# A checkpoint with what a trainer's files hold.

_LIMIT_BYTES = 64 << 20


def with_trainer_files(checkpoint: Checkpoint, location: Location, ledger: OpaqueLedger) -> Checkpoint:
    """The checkpoint with schedulers, random states, counters and objects of a trainer's directory.

    Raises:
        SourceError: `source.not_found` if the directory does not exist, and all errors of reading its files.
    """
    listing = location.store.list_directory(location.path)
    if not listing.files:
        where = printable(location.url)
        raise SourceError("source.not_found", f"no files of a trainer are in {where}", fix="name a checkpoint-N")
    found = read_companions(location, listing, ledger)
    schedulers = tuple(_literal(p, node) for p, node in found.schedulers)
    rng = tuple(
        {str(k): v for k, v in mapping_items(_literal(p, p.root), what=printable(p.file.name)).items()}
        for p, _ in found.rng
    )
    facts = facts_of(checkpoint) or DcpFacts(None)
    counters = checkpoint.counters if found.steps is None else replace(checkpoint.counters, steps=found.steps)
    if schedulers:
        checkpoint = replace(checkpoint, schedulers=schedulers, scheduler_keys=(), own_scheduler=0)
    return replace(
        checkpoint,
        counters=counters,
        client_state={**checkpoint.client_state, **{n: _literal(p, node) for p, n, node in found.client_state}},
        facts=replace(facts, texts={**facts.texts, **found.texts}, rank_states=rng or facts.rank_states),
        foreign_globals=tuple(sorted({*checkpoint.foreign_globals, *ledger.foreign})),
    )


def _literal(parsed: TorchFile, node: Node) -> Node:
    """The tree with its tensors as bytes."""

    def literal(tensor: PTensor) -> PLiteral:
        size = tensor.numel * BY_NAME[tensor.dtype].itemsize_bytes
        if size > _LIMIT_BYTES or not is_packed(tensor.shape, tensor.stride):
            raise SourceError(
                "source.unsupported", f"{printable(parsed.file.name)} holds a tensor that is large or not contiguous"
            )
        data = parsed.file.read(parsed.tensor_offset(tensor), size) if size else b""
        return PLiteral(tensor.dtype, tensor.shape, data)

    return rewrite(node, literal, lambda foreign: foreign)
