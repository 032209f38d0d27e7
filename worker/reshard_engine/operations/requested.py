"""The checkpoint that a request means: read, under the names that it asks for, with what it adds to the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models import ConvertRequest, NotCarried, OpaquePolicy
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import FORMATS, format_writing, left_out, relabelled, rules_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.nodes import Node, mapping_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rewrite import foreign_paths
from reshard_engine.storage.locations import Location, open_location


def requested_checkpoint(request: ConvertRequest, source: Location) -> Checkpoint:
    """The source's checkpoint as a writer is to see it.

    Raises:
        SourceError: Everything that can be wrong with the source.
        RequestError: `request.invalid` and `request.unsatisfiable`: it asks for what does not go together.
    """
    return as_requested(_read(source, request), request)


def as_requested(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """A checkpoint that was read as the writer of this request is to see it.

    Raises:
        SourceError: `checkpoint.unexplained`, and what can be wrong with a base model or an adapter's configuration.
        RequestError: `request.invalid` and `request.unsatisfiable`: it asks for what does not go together.
    """
    refuse_unexplained(checkpoint)
    return _completed(relabelled(_dropped(checkpoint, request), request), request)


def _dropped(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with the names of the objects that `--opaque drop` leaves out."""
    if request.opaque is not OpaquePolicy.DROP or not checkpoint.foreign_globals:
        return checkpoint
    optimizer = checkpoint.optimizer
    trees: list[tuple[Node, str]] = [(checkpoint.model_state, ""), *((r, "") for r in map(_tree, checkpoint.rng))]
    trees += [(node, f"module.{name}") for name, node in checkpoint.extra_states.items()]
    if optimizer is not None:
        trees += [(node, f"param_groups[{index}]") for index, node in enumerate(optimizer.param_groups)]
        trees += [(_tree(optimizer.extras), optimizer.place)]
    paths = dict.fromkeys(path for node, where in trees for path in foreign_paths(node, where))
    reason = "an object of a class that is not listed: dropped, as asked"
    found = tuple(NotCarried(path=printable(path), reason=reason) for path in paths)
    return replace(checkpoint, not_carried=(*checkpoint.not_carried, *found))


def _tree(entries: Mapping[str, Node]) -> Node:
    return mapping_of({**entries})


def refuse_unexplained(checkpoint: Checkpoint) -> None:
    """Refuse slices of tensor parallelism of which nothing says how they were cut.

    Raises:
        SourceError: `checkpoint.unexplained`.
    """
    names = checkpoint.unexplained
    if not names:
        return
    raise SourceError(
        "checkpoint.unexplained",
        f"nothing says how {len(names)} of {len(checkpoint.parameters)} parameters were cut over "
        f"{checkpoint.world.get('tp', 1)} tensor-parallel ranks: {listed(names)}",
        fix="say it: --rules FILE (docs/rules.md), or --family gpt-megatron|llama-megatron|bloom",
        details={"parameters": [printable(n) for n in names[:256]]},
    )


def _read(source: Location, request: ConvertRequest) -> Checkpoint:
    ledger = OpaqueLedger(request.opaque)
    for_target = format_writing(request.to).read_for(request, source, ledger)
    if for_target is not None:
        return for_target
    return read_checkpoint(source, request.source.tag, ledger, rules_of(request))


def _completed(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with what the request takes from elsewhere: a base model, an adapter, a model's files."""
    for known in FORMATS:
        known.check_request(request)
    base = None
    if request.base is not None:
        from reshard_engine.operations.base_model import read_base_model

        base = read_base_model(open_location(request.base, request.source.profile), OpaqueLedger(request.opaque))
    written = format_writing(request.to)
    if written.whole_models:
        said = [text for known in FORMATS for text in known.joined_cautions(checkpoint, request)]
        lost = left_out(checkpoint) if not request.merge_adapter and not request.exclude_frozen else None
        said += [] if lost is None else [lost]
        checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, *said)) if said else checkpoint
    if request.model_files is not None and not written.takes_model_files:
        raise RequestError("request.invalid", f"model files lie beside weights, not in {request.to.value}")
    # Adapters are merged before the files beside the weights are read: those say which names are tied.
    for known in reversed(FORMATS):
        checkpoint = known.completed(checkpoint, request, base)
    return checkpoint
