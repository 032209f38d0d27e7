"""The checkpoint that a request means: read, under the names that it asks for, with what it adds to the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models import ConvertRequest, NotCarried, OpaquePolicy, TargetFormat, WeightDtype
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.rules.request import requested_rules
from reshard_engine.formats.peft.left_out import left_out
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.formats.torch_files.reader import read_torch_files
from reshard_engine.operations.relabel import relabelled
from reshard_engine.pickles.nodes import Node, mapping_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rewrite import foreign_paths
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import parent_and_name

_WEIGHTS = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)


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
    return _with_model_files(relabelled(_dropped(checkpoint, request), request), request)


def _dropped(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with the names of the objects that `--opaque drop` leaves out."""
    if request.opaque is not OpaquePolicy.DROP or not checkpoint.foreign_globals:
        return checkpoint
    optimizer = checkpoint.optimizer
    trees: list[tuple[Node, str]] = [(checkpoint.model_state, ""), *((r, "") for r in map(_tree, checkpoint.rng))]
    trees += [(node, f"module.{name}") for name, node in checkpoint.extra_states.items()]
    if optimizer is not None:
        trees += [(node, f"param_groups[{index}]") for index, node in enumerate(optimizer.param_groups)]
        trees += [(_tree(optimizer.extras), "optimizer_state_dict")]
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
    if request.to is not TargetFormat.SLIM:
        return read_checkpoint(source, request.source.tag, OpaqueLedger(request.opaque), requested_rules(request))
    if request.source.tag is not None:
        raise RequestError(
            "request.invalid", "--to slim takes files as they are: no tag", fix="name the tag's directory"
        )
    return read_torch_files(source, OpaqueLedger(request.opaque))


def _with_model_files(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with the files that are to lie beside its weights, its adapter merged if that is asked."""
    weights = request.to in _WEIGHTS
    _refuse_contradictions(request)
    if request.to is TargetFormat.PEFT or request.merge_adapter:
        checkpoint = replace(checkpoint, model_files=_adapter_files(checkpoint, request))
    unties = False
    if request.merge_adapter:
        checkpoint, unties = _merged(checkpoint, request)
    elif weights and not request.exclude_frozen and (lost := left_out(checkpoint)) is not None:
        checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, lost))
    if request.model_files is None or request.to is TargetFormat.PEFT:
        return checkpoint
    if not weights:
        raise RequestError("request.invalid", f"model files lie beside weights, not in {request.to.value}")
    from reshard_engine.formats.model_files import read_model_files

    location = open_location(request.model_files, request.source.profile)
    dtype = request.dtype or (WeightDtype.FP32 if checkpoint.trained else None)
    try:
        return replace(checkpoint, model_files=read_model_files(location, dtype, unties=unties))
    except SourceError as error:
        if request.merge_adapter and error.code == "source.not_found":
            return checkpoint  # it was named for the adapter's configuration alone
        raise


def _refuse_contradictions(request: ConvertRequest) -> None:
    """Refuse options of adapters where none is written or merged."""
    adapts = request.to is TargetFormat.PEFT or request.merge_adapter
    if request.merge_adapter and request.to not in _WEIGHTS:
        raise RequestError("request.invalid", "an adapter is merged into consolidated weights", fix="--to safetensors")
    if not adapts and (request.adapter is not None or request.lora_alpha is not None):
        raise RequestError(
            "request.invalid", "adapter and lora_alpha are for adapters", fix="--to peft, or --merge-adapter"
        )
    if request.base is not None and not request.merge_adapter:
        raise RequestError(
            "request.invalid", "--base is of --merge-adapter: what it is merged into", fix="leave it out"
        )
    if request.exclude_frozen and request.merge_adapter:
        raise RequestError(
            "request.invalid", "--exclude-frozen and --merge-adapter: a merged model is whole", fix="leave out one"
        )


def _merged(checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Checkpoint, bool]:
    """The model that a LoRA run trained, and whether names that were tied are not any more."""
    from reshard_engine.formats.peft.adapters import merged
    from reshard_engine.operations.base_model import read_base_model

    base = None
    if request.base is not None:
        location = open_location(request.base, request.source.profile)
        base = read_base_model(location, OpaqueLedger(request.opaque))
    model = merged(checkpoint, request, base)
    return replace(model.checkpoint, model_files={}), model.unties


def _adapter_files(checkpoint: Checkpoint, request: ConvertRequest) -> Mapping[str, bytes]:
    from reshard_engine.formats.model_files import read_adapter_config

    profile = request.source.profile
    if request.lora_alpha is not None:
        return {}
    # Trainers leave it in their own directory, above the tag's.
    named = [] if request.model_files is None else [request.model_files]
    places = dict.fromkeys((*named, request.source.url, parent_and_name(checkpoint.url)[0]))
    return read_adapter_config([open_location(url, profile) for url in places], required=bool(named))
