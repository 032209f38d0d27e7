"""Reads `.metadata`: a pickle that is never unpickled, but interpreted as inert data and checked.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`FileSystemWriter.finish` pickles a `Metadata` with
Python's default protocol: 4 up to Python 3.13, 5 from 3.14 on), `distributed/checkpoint/metadata.py`. Up to torch 2.3
`Metadata` has `state_dict_metadata`, `planner_data` and `storage_data`; then came `storage_meta` and `version`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reshard.errors import SourceError, printable
from reshard.models import OpaquePolicy
from reshard_engine.formats.dcp.names import BUFFERS, OWN_STATE
from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import KeyPath, Metadata
from reshard_engine.formats.dcp.reader.metadata_columns import Chunks, Places, matched
from reshard_engine.formats.dcp.reader.metadata_machine import RunMachine
from reshard_engine.formats.dcp.reader.metadata_names import refuse_foreign_names
from reshard_engine.formats.dcp.reader.metadata_nodes import (
    MAX_DIMS,
    MAX_KEY_CHARS,
    MAX_NUMBER,
    class_of,
    key_of,
    malformed,
    size_of,
    text_items,
)
from reshard_engine.formats.dcp.reader.metadata_places import places_of
from reshard_engine.formats.dcp.reader.metadata_tensors import tensors_of
from reshard_engine.pickles.collector import collector_paused
from reshard_engine.pickles.limits import PickleLimits, configured_limits
from reshard_engine.pickles.nodes import Node, PTuple, mapping_items, sequence_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import parse_pickle

_VERSION = "1."
_STREAM_BYTES = "RESHARD_PICKLE_STREAM_BYTES"
_FIXES = {
    "pickle.too_large": _STREAM_BYTES,
    "pickle.too_much_work": "RESHARD_PICKLE_OPCODES",
    "pickle.too_much_memory": "RESHARD_PICKLE_NODE_BYTES",
}
"""The environment's variables that set the limits, by the code of the error."""
METADATA_BYTES = 2 << 30
"""Largest `.metadata` by default: twice that of 5,000 tensors on 1,024 ranks. Reading takes twice its size in memory.

Other pickles have a smaller limit, because each of their bytes may become sixty of nodes; runs of records become
columns that are smaller than the stream, and all that is not a run is bounded as in any pickle."""


def metadata_limits(environ: Mapping[str, str] = os.environ) -> PickleLimits:
    """The bounds for `.metadata`: those of all pickles, but for its size.

    Raises:
        RequestError: `request.invalid` for a value in the environment that is not a positive number.
    """
    limits = configured_limits(environ)
    return limits if _STREAM_BYTES in environ else replace(limits, stream_bytes=METADATA_BYTES)


def parse_metadata(data: bytes, name: str, *, limits: PickleLimits | None = None) -> Metadata:
    """The contents of a `.metadata` file.

    Args:
        data: The whole file.
        name: The file's name, for messages.
        limits: Bounds on work and memory; by default `metadata_limits`.

    Raises:
        SourceError: `pickle.*` for a bad pickle or one that names what no writer names; `checkpoint.malformed`,
            `checkpoint.incomplete`, `checkpoint.ambiguous`, `tensor.bad_extent`, `tensor.unsupported`, `name.invalid`,
            `source.unsupported_version`.
    """
    chosen = limits or metadata_limits()
    if len(data) > chosen.stream_bytes:
        message = f"{name} has {len(data)} bytes, the limit is {chosen.stream_bytes}"
        raise SourceError("pickle.too_large", message, fix=f"set {_STREAM_BYTES} to {len(data)} or more")
    try:
        parts = parts_with_runs(data, name, chosen)
    except SourceError as problem:
        # Runs are an abridgement: what is wrong, if anything is, the interpreter of all pickles says.
        try:
            parts = parts_of_nodes(data, name, chosen)
        except SourceError as error:
            if error.code not in _FIXES:
                raise error from None
            if not problem.code.startswith("pickle."):
                raise problem from None
            fix = f"if you trust its origin, set {_FIXES[error.code]} to more"
            raise SourceError(error.code, f"{name}: {error.message}", fix=fix) from None
    return metadata_of(parts)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a `.metadata`, checked each for itself."""

    keys: tuple[str, ...]
    tensors: list[Chunks]
    places: Places
    paths: dict[str, KeyPath] | None
    original_shapes: dict[str, tuple[int, ...]]
    counters: dict[str, int]
    buffers: frozenset[str] | None


def metadata_of(parts: Parts) -> Metadata:
    """The metadata from its parts.

    Raises:
        SourceError: as `matched`.
    """
    found = matched(parts.keys, parts.tensors, parts.places, paths=parts.paths, original_shapes=parts.original_shapes)
    return replace(found, counters=parts.counters, buffers=parts.buffers)


def parts_with_runs(data: bytes, name: str, limits: PickleLimits) -> Parts:
    """The parts, with runs of equal records read at once.

    Raises:
        SourceError: as `parts_of_nodes`, and for anything that is merely irregular.
    """
    ledger = OpaqueLedger(OpaquePolicy.KEEP)
    with collector_paused():
        root = RunMachine(data, ledger, limits).result()
    refuse_foreign_names(ledger, name)
    return _parts(root, name)


def parts_of_nodes(data: bytes, name: str, limits: PickleLimits) -> Parts:
    """The parts, from one node for every object.

    Raises:
        SourceError: as `parse_metadata`.
    """
    ledger = OpaqueLedger(OpaquePolicy.KEEP)
    root, _ = parse_pickle(data, ledger, limits=limits)
    refuse_foreign_names(ledger, name)
    return _parts(root, name)


def _parts(root: Node, name: str) -> Parts:
    if class_of(root) != names.METADATA or not root.has_state:
        raise malformed(name, root, "the Metadata of a distributed checkpoint")
    # Other attributes of the root, such as the plans of all ranks, describe nothing that a reader needs.
    state = mapping_items(root.state, what=f"the state of {name}")
    _check_version(state.get("version"), name)
    items = text_items(state.get("state_dict_metadata"), "state_dict_metadata")
    tensors = tensors_of(items)
    places = places_of(state.get("storage_data"), {key: number for number, key in enumerate(items)})
    paths, shapes = _paths(state.get("planner_data")), _original_shapes(state.get("mcore_data"))
    return Parts(tuple(items), tensors, places, paths, shapes, *_own(state.get(OWN_STATE)))


def _own(node: Node) -> tuple[dict[str, int], frozenset[str] | None]:
    """The counters and the keys of buffers in the attribute of our own writer."""
    found = {} if node is None else dict(text_items(node, OWN_STATE))
    listed = found.pop(BUFFERS, None)
    for key, value in found.items():
        if type(value) is not int or not 0 <= value < MAX_NUMBER:
            raise malformed(f"{printable(key)} of {OWN_STATE}", value, "a count")
    counters = {key: value for key, value in found.items() if isinstance(value, int)}
    if listed is None:
        return counters, None
    keys = sequence_items(listed, what=f"{BUFFERS} of {OWN_STATE}")
    return counters, frozenset(key_of(key, f"{BUFFERS} of {OWN_STATE}") for key in keys)


def _check_version(node: Node, name: str) -> None:
    if node is None:
        return
    if type(node) is not str:
        raise malformed(f"the version of {name}", node, "a text")
    if not node.startswith(_VERSION):
        raise SourceError(
            "source.unsupported_version",
            f"{name} has the version {printable(node, max_chars=60)}; versions 1.x are known",
        )


def _paths(node: Node) -> dict[str, KeyPath] | None:
    """The key paths of `planner_data`.

    Source: torch 2.13.0 `distributed/checkpoint/_nested_dict.py` (`flatten_state_dict`).
    """
    if node is None:
        return None
    return {key: _path(value, key) for key, value in text_items(node, "planner_data").items()}


def _path(node: Node, key: str) -> KeyPath:
    what = f"the path of {printable(key)} in planner_data"
    if not isinstance(node, PTuple) or not 0 < len(node.items) <= MAX_DIMS:
        raise malformed(what, node, "a tuple of keys")
    for part in node.items:
        text = type(part) is str and len(part) <= MAX_KEY_CHARS
        if not text and not (type(part) is int and -MAX_NUMBER < part < MAX_NUMBER):
            raise malformed(f"a part of {what}", part, "a printable text or a list index")
    return tuple(node.items)


def _original_shapes(node: Node) -> dict[str, tuple[int, ...]]:
    """The shapes in `mcore_data`, an attribute that Megatron adds.

    Source: megatron-core 0.5 to 0.14 `dist_checkpointing/strategies/torch.py` (`MCoreSavePlanner.create_global_plan`:
    a dict of dicts by key, each with `nd_reformulated_orig_global_shape` or empty).
    """
    found: dict[str, tuple[int, ...]] = {}
    for key, value in ({} if node is None else text_items(node, "mcore_data")).items():
        shape = mapping_items(value, what=f"mcore_data of {printable(key)}").get("nd_reformulated_orig_global_shape")
        if shape is not None:
            found[key] = size_of(shape, f"the original shape of {printable(key)}")
    return found
