"""The index of sharded weights: a map from names to files.

Source: transformers 5.23.0 and huggingface_hub 2.4.0 write `{"metadata": {...}, "weight_map": {name: file}}`;
the metadata hold `total_size` in bytes and, from huggingface_hub, tied aliases with their owners' names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from reshard.errors import SourceError, counted, printable
from reshard_engine.containers.bounded_json import parse_json
from reshard_engine.storage.protocol import ObjectInfo, Store, read_bytes
from reshard_engine.tensors.layout import MAX_NAME_BYTES

MAX_INDEX_BYTES = 100_000_000
_CODE = "checkpoint.bad_index"
_PLAIN = re.compile(rf"[^/\\.][^/\\]{{0,{MAX_NAME_BYTES - 1}}}")
_FIX = "copy the index and its shards again, all from one save"


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """A parsed index."""

    name: str
    names_by_file: Mapping[str, frozenset[str]]
    texts: Mapping[str, str]
    """The metadata whose values are texts."""
    total_bytes: int | None

    def check_shard(self, file: str, held: set[str], aliases: set[str]) -> None:
        """Compare the names in a shard with the index.

        Raises:
            SourceError: `checkpoint.bad_index` if a name is only in the shard or only in the index.
        """
        wanted = self.names_by_file[file]
        if missing := sorted(wanted - held - aliases):
            raise self.bad(
                f"of the names of {printable(file)}, {counted(len(missing), 'is', 'are')} not in it, "
                f"such as {printable(missing[0])}"
            )
        if extra := sorted(held - wanted):
            raise self.bad(f"{printable(file)} holds {counted(len(extra), 'name')} more, such as {printable(extra[0])}")

    def bad(self, text: str) -> SourceError:
        """The error for a wrong index."""
        return SourceError(_CODE, f"{printable(self.name)}: {text}", fix=_FIX)


def read_index(store: Store, info: ObjectInfo, *, suffix: str) -> WeightIndex:
    """Read an index; every file that it names must be a plain name with the suffix.

    Raises:
        SourceError: `checkpoint.bad_index`.
    """
    name = printable(info.path.rpartition("/")[2])
    if info.size_bytes > MAX_INDEX_BYTES:
        raise SourceError(_CODE, f"{name} has {info.size_bytes} bytes, the limit is {MAX_INDEX_BYTES}", fix=_FIX)
    root = parse_json(read_bytes(store, info), code=_CODE, what=name)
    entries = cast("dict[str, object]", root) if isinstance(root, dict) else {}
    weight_map = entries.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(_CODE, f"{name} has no weight_map", fix=_FIX)
    by_file: dict[str, set[str]] = {}
    for key, file in cast("dict[str, object]", weight_map).items():
        by_file.setdefault(_plain_name(file, suffix, f"{name}: {printable(key)}"), set()).add(key)
    raw = entries.get("metadata")
    metadata = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
    total = metadata.get("total_size")
    return WeightIndex(
        name,
        {f: frozenset(n) for f, n in sorted(by_file.items())},
        {k: v for k, v in metadata.items() if isinstance(v, str)},
        total if type(total) is int else None,
    )


def _plain_name(file: object, suffix: str, what: str) -> str:
    if (
        not isinstance(file, str)
        or _PLAIN.fullmatch(file) is None
        or not (file.isprintable() and file.endswith(suffix))
    ):
        raise SourceError(
            _CODE, f"{what} is in {printable(file)!r}, which is not a *{suffix} file beside the index", fix=_FIX
        )
    return file
