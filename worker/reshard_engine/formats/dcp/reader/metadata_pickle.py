"""Reads `.metadata`: a pickle that is never unpickled, but interpreted as inert data and checked.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`FileSystemWriter.finish` pickles a `Metadata` with
Python's default protocol: 4 up to Python 3.13, 5 from 3.14 on), `distributed/checkpoint/metadata.py`. Up to torch 2.3
`Metadata` has `state_dict_metadata`, `planner_data` and `storage_data`; then came `storage_meta` and `version`.
"""

from __future__ import annotations

from reshard.errors import SourceError, printable
from reshard.models import OpaquePolicy
from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import KeyPath, Metadata
from reshard_engine.formats.dcp.reader.metadata_columns import matched
from reshard_engine.formats.dcp.reader.metadata_names import refuse_foreign_names
from reshard_engine.formats.dcp.reader.metadata_nodes import (
    MAX_DIMS,
    MAX_KEY_CHARS,
    MAX_NUMBER,
    class_of,
    malformed,
    text_items,
)
from reshard_engine.formats.dcp.reader.metadata_places import places_of
from reshard_engine.formats.dcp.reader.metadata_tensors import tensors_of
from reshard_engine.pickles.limits import PickleLimits, configured_limits
from reshard_engine.pickles.nodes import Node, PTuple, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import parse_pickle

_VERSION = "1."


def parse_metadata(data: bytes, name: str, *, limits: PickleLimits | None = None) -> Metadata:
    """The contents of a `.metadata` file.

    Args:
        data: The whole file.
        name: The file's name, for messages.
        limits: Bounds on work and memory; by default those of the environment.

    Raises:
        SourceError: `pickle.*` for a bad pickle or one that names what no writer names; `checkpoint.malformed`,
            `checkpoint.incomplete`, `checkpoint.ambiguous`, `tensor.bad_extent`, `tensor.unsupported`, `name.invalid`,
            `source.unsupported_version`.
    """
    ledger = OpaqueLedger(OpaquePolicy.KEEP)
    root, _ = parse_pickle(data, ledger, limits=limits or configured_limits())
    refuse_foreign_names(ledger, name)
    return metadata_of(root, name)


def metadata_of(root: Node, name: str) -> Metadata:
    """The metadata from the nodes of its pickle.

    Raises:
        SourceError: as `parse_metadata`, but for `pickle.*`.
    """
    if class_of(root) != names.METADATA or not root.has_state:
        raise malformed(name, root, "the Metadata of a distributed checkpoint")
    # Other attributes of the root, such as the plans of all ranks, describe nothing that a reader needs.
    parts = mapping_items(root.state, what=f"the state of {name}")
    _check_version(parts.get("version"), name)
    items = text_items(parts.get("state_dict_metadata"), "state_dict_metadata")
    tensors = tensors_of(items)
    places, files = places_of(parts.get("storage_data"), {key: number for number, key in enumerate(items)})
    paths = _paths(parts.get("planner_data"))
    return matched(tuple(items), tensors, places, files=files, paths=paths)


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
        text = type(part) is str and len(part) <= MAX_KEY_CHARS and part.isprintable()
        if not text and not (type(part) is int and -MAX_NUMBER < part < MAX_NUMBER):
            raise malformed(f"a part of {what}", part, "a printable text or a list index")
    return tuple(node.items)
