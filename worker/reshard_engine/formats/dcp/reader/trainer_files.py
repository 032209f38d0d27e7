"""A checkpoint completed with the files of a trainer that lie beside it: another framework's shards are in between.

Tensors of these files are small (random states), so their bytes are taken into the trees.
"""

from __future__ import annotations

from dataclasses import replace

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.dcp.facts import DcpFacts, facts_of
from reshard_engine.formats.dcp.reader.companions import read_companions
from reshard_engine.pickles.nodes import Node, PLiteral, PTensor, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rewrite import rewrite
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import is_packed

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
