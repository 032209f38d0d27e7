"""Reads raw rows: the index alone; data is mapped, never read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Buffer, Checkpoint, Parameter
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.format import ReadOptions
from reshard_engine.formats.model_weights import checked_name
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder

INDEX = "raw_rows.json"
_MAX_INDEX_BYTES = 1 << 24


class RawRowsReader:
    """Understands `raw_rows.json`."""

    family = "raw_rows"

    def recognises(self, listing: Listing) -> bool:
        """True if the index is there."""
        return any(f.path.rpartition("/")[2] == INDEX for f in listing.files)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """The weights of a directory.

        Raises:
            SourceError: `checkpoint.malformed`, `checkpoint.incomplete`, `checkpoint.coverage`, `name.invalid`.
        """
        by_name = {f.path.rpartition("/")[2]: f for f in listing.files}
        if by_name[INDEX].size_bytes > _MAX_INDEX_BYTES:
            raise SourceError("checkpoint.too_large", f"{INDEX} has {by_name[INDEX].size_bytes} bytes")
        try:
            return self._checkpoint(
                location, by_name, json.loads(read_bytes(location.store, by_name[INDEX])), options.tag
            )
        except (KeyError, TypeError, ValueError) as error:
            text = f"{INDEX} is not as this format writes it: {printable(str(error))}"
            raise SourceError("checkpoint.malformed", text, fix="write the checkpoint again") from error

    def _checkpoint(self, location: Location, by_name: Mapping[str, Any], index: Any, tag: str | None) -> Checkpoint:
        builder, files = ShardMapBuilder(), list[SourceFile]()
        parameters, buffers = list[Parameter](), list[Buffer]()
        for entry in index["tensors"]:
            name, shape = checked_name(entry["name"]), tuple(int(n) for n in entry["shape"])
            tensor = builder.tensor(name, "weight", BY_NAME[entry["dtype"]], shape)
            row = prod(shape[1:])
            for shard in entry["files"]:
                if shard["name"] not in by_name:
                    raise SourceError(
                        "checkpoint.incomplete",
                        f"{printable(shard['name'])} is not there, and {INDEX} names it",
                        fix="copy the checkpoint again",
                    )
                files.append(SourceFile(location.store, shard["name"], (by_name[shard["name"]],)))
                columns = (tensor, shard["rows"][0] * row, shard["rows"][1] * row, len(files) - 1, 0)
                number, begin, end, file, offset = (np.array([v], dtype=np.int64) for v in columns)
                builder.pieces(number, begin, end, file=file, offset=offset)
            if entry["buffer"]:
                buffers.append(Buffer(name, tensor))
            else:
                parameters.append(Parameter(name, shape, None, tensor))
        return Checkpoint(
            url=location.url,
            tag=tag,
            format="raw-rows",
            framework_version=None,
            world={"dp": max((len(entry["files"]) for entry in index["tensors"]), default=1)},
            files=tuple(files),
            shard_map=builder.build(),
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            shared={checked_name(alias): owner for alias, owner in index["ties"].items()},
            optimizer=None,
            foreign_globals=(),
            warnings=(),
        )
