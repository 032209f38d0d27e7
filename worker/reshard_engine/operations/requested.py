"""Reads the checkpoint of a request, with the names that the request asks for and the parts that it adds."""

from __future__ import annotations

import re
from dataclasses import replace

from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.carried import missing_states
from reshard_engine.formats.format import refuse_choices
from reshard_engine.formats.model_weights import refuse_placeholders
from reshard_engine.formats.registry import format_writing, formats, left_out, relabelled, rules_of
from reshard_engine.formats.sources import read_weights, training_state_near
from reshard_engine.operations.runs.steps import named_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger, refusal
from reshard_engine.pickles.trees import foreign_names, foreign_paths
from reshard_engine.storage.locations import Location, open_location, refuse_link_elsewhere
from reshard_engine.storage.protocol import Listing, read_bytes


def requested_checkpoint(request: ConvertRequest, source: Location) -> Checkpoint:
    """Read the source's checkpoint in the form that the request's writer needs.

    Raises:
        SourceError: The source is missing, damaged or not supported.
        RequestError: `request.invalid` and `request.unsatisfiable`: it asks for what does not go together.
    """
    return as_requested(_read(source, request), request)


def as_requested(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """Change a checkpoint that was read into the form that the request's writer needs.

    Raises:
        SourceError: `checkpoint.unexplained`, `checkpoint.ambiguous`, and what can be wrong with a base model or an
            adapter's configuration.
        RequestError: `request.invalid` and `request.unsatisfiable`: it asks for what does not go together.
    """
    refuse_unexplained(checkpoint)
    # The place is opened only for the error: a client of an object store is not made for each conversion.
    refuse_placeholders(
        checkpoint,
        request.empty_weights,
        lambda: training_state_near(open_location(request.source.url, request.source.profile)),
    )
    indifferent = format_writing(request.to).completion.indifferent(checkpoint, request)
    checkpoint.refuse_undecided(*indifferent)
    said = [f"{a.text}: {a.fix}" for a in checkpoint.assumed if a.question not in indifferent]
    checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, *said)) if said else checkpoint
    return _completed(relabelled(_without_objects(checkpoint, request), request), request)


def _without_objects(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with a note on the objects of unlisted classes that the target does not get.

    Under `refuse`, a target that stores the model alone does not get those of the run's state: hyper-parameters, say.

    Raises:
        SourceError: `pickle.forbidden_global` under `refuse` for an object of the model.
    """
    if request.opaque is OpaquePolicy.KEEP or not checkpoint.foreign_globals:
        return checkpoint
    if request.opaque is OpaquePolicy.REFUSE and format_writing(request.to).model_only:
        if of_model := foreign_in_model(checkpoint):
            raise refusal(of_model[0])
        text = (
            f"the state of the run beside the model names {listed(checkpoint.foreign_globals)}, not on the allow-list: "
            f"nothing of it was executed, and {request.to} has no place for that state"
        )
        return replace(checkpoint, warnings=(*checkpoint.warnings, text))
    trees = checkpoint.facts.trees(checkpoint)
    paths = dict.fromkeys(path for node, where in trees for path in foreign_paths(node, where))
    reason = "an object of a class that is not listed: dropped, as asked"
    found = tuple(NotCarried(path=printable(path), reason=reason) for path in paths)
    return replace(checkpoint, not_carried=(*checkpoint.not_carried, *found))


def foreign_in_model(checkpoint: Checkpoint) -> list[str]:
    """The names off the allow-list that lie in the model, or that no value of the run's state accounts for.

    `--opaque` decides about these for every target; those of the run's state do not matter to a target without it.
    """
    if not checkpoint.foreign_globals:
        return []
    model = {name for node in checkpoint.extra_states.values() for name in foreign_names(node)}
    of_model = set(map(id, checkpoint.extra_states.values()))
    trees = (node for node, _ in checkpoint.facts.trees(checkpoint) if id(node) not in of_model)
    of_run = {name for node in trees for name in foreign_names(node)}
    return [name for name in checkpoint.foreign_globals if name in model or name not in of_run]


def refuse_unexplained(checkpoint: Checkpoint) -> None:
    """Refuse tensor-parallel slices if no rule says how they were cut.

    Raises:
        SourceError: `checkpoint.unexplained`.
    """
    names = checkpoint.unexplained
    if not names:
        return
    raise SourceError(
        "checkpoint.unexplained",
        f"no rule says how {len(names)} of {len(checkpoint.parameters)} parameters were cut over "
        f"{checkpoint.world.get('tp', 1)} tensor-parallel ranks: {listed(names)}",
        fix="say how they are cut: --rules FILE (docs/rules.md), or --family gpt-megatron|llama-megatron|bloom",
        details={"parameters": [printable(n) for n in names[:256]]},
    )


def _read(source: Location, request: ConvertRequest) -> Checkpoint:
    written = format_writing(request.to)
    # Objects of the run's state do not matter to targets without it. Where an object lies is known after reading.
    later = written.model_only and request.opaque is OpaquePolicy.REFUSE
    ledger = OpaqueLedger(OpaquePolicy.KEEP if later else request.opaque)
    for_target = written.completion.read_for(request, source, ledger)
    if for_target is not None:
        refuse_choices(request.source, f"{request.to} takes the state dict as it is")
        return for_target
    rules = rules_of(request.options)
    checkpoint = named_checkpoint(source, request.source, ledger, rules, target=request.to)
    if later and (of_model := foreign_in_model(checkpoint)):
        raise ledger.refusal(of_model[0])
    return checkpoint


def _completed(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint, completed from other places that the request names: a base model, an adapter, a model's files."""
    base = None
    if (place := next(filter(None, (known.completion.base_model(request) for known in formats())), None)) is not None:
        location = open_location(place, request.source.profile)
        base = read_base_model(location, OpaqueLedger(request.opaque))
        refuse_placeholders(base, request.empty_weights, lambda: training_state_near(location))
    written = format_writing(request.to)
    if written.whole_models:
        said = [text for known in formats() for text in known.presentation.joined_cautions(checkpoint, request)]
        whole = request.exclude_frozen or any(known.completion.completes(request) for known in formats())
        lost = None if whole else left_out(checkpoint)
        said += [] if lost is None else [lost]
        checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, *said)) if said else checkpoint
    elif written.discovery.of_training and (lacking := missing_states(checkpoint)):
        checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, *lacking))
    taken = written.completion.takes_model_files or any(
        known.completion.reads_model_files(request) for known in formats()
    )
    if request.model_files is not None and not taken:
        raise RequestError(
            "request.invalid",
            f"model files lie beside weights, not in {request.to}",
            fix="leave --model-files out, or write weights: --to safetensors",
        )
    # Adapters are merged before the files beside the weights are read: those say which names are tied.
    for known in reversed(formats()):
        checkpoint = known.completion.completed(checkpoint, request, base)
    return checkpoint


# The base model of a LoRA run: a directory of weights, or a model's directory in the hub's cache.
#
# Source: huggingface_hub 2.4.0 `file_download.py` (`models--ORG--NAME` with `refs/REVISION` and `snapshots/COMMIT`).

_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_MAX_REF_BYTES = 1_024
_FIX = "--base names the directory with model.safetensors or pytorch_model.bin, one file or shards with their index"


def read_base_model(location: Location, ledger: OpaqueLedger) -> Checkpoint:
    """Read the weights of a base model.

    Raises:
        SourceError: `source.not_found`, `source.unknown_kind` if there are no weights, and all errors of their reader.
    """
    location, listing = _snapshot(location)
    if (weights := read_weights(location, listing, ledger)) is not None:
        return weights
    models = [d for d in listing.directories if d.startswith("models--")]
    raise SourceError(
        "source.unknown_kind",
        f"the base model {printable(location.url)} holds no weights: {len(listing.files)} files, "
        f"directories: {listed(listing.directories) or 'none'}",
        fix=f"--base {printable(location.child(models[0]).url)}" if models else _FIX,
    )


def _snapshot(location: Location) -> tuple[Location, Listing]:
    """The directory itself, or the current snapshot of a model's directory in the hub's cache."""
    listing = location.store.list_directory(location.path)
    if not listing.files and not listing.directories:
        raise SourceError("source.not_found", f"no base model exists at {printable(location.url)}", fix=_FIX)
    if "snapshots" not in listing.directories:
        return location, listing
    snapshots = location.child("snapshots")
    snapshot_names = snapshots.store.list_directory(snapshots.path).directories
    commit = _main(location) or (snapshot_names[0] if len(snapshot_names) == 1 else "")
    if commit not in snapshot_names or _COMMIT.fullmatch(commit) is None:
        raise SourceError(
            "checkpoint.ambiguous" if snapshot_names else "source.not_found",
            f"{printable(location.url)} has {len(snapshot_names)} snapshots, and refs/main names none of them",
            fix=f"--base {printable(snapshots.child(snapshot_names[0]).url)}" if snapshot_names else _FIX,
        )
    chosen = snapshots.child(commit)
    return chosen, chosen.store.list_directory(chosen.path)


def _main(location: Location) -> str:
    """The commit that the cache's `refs/main` names; empty if there is none."""
    refs = location.child("refs")
    for info in refs.store.list_directory(refs.path).files:
        if info.path.rpartition("/")[2] == "main" and info.size_bytes <= _MAX_REF_BYTES:
            refuse_link_elsewhere(location, info.path)
            return read_bytes(location.store, info).decode("utf-8", "replace").strip()
    return ""
