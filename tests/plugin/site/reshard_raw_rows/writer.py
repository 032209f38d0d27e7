"""Writes raw rows."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from reshard.models.jobs import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats import carried
from reshard_engine.formats.model_weights import weights_of
from reshard_engine.tensors.layout import Body, FileTemplate, TargetFile, TargetLayout, literal_template
from reshard_raw_rows import RawRowsOptions
from reshard_raw_rows.reader import INDEX


class RawRowsWriter:
    """Lays out one file for so many rows of each tensor, and the index."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Raw files, then the index, without which no reader takes them."""
        options = request.options.of(RawRowsOptions)
        files, entries = list[TargetFile](), list[dict[str, Any]]()
        buffers = {b.fqn for b in checkpoint.buffers}
        for number, weight in enumerate(weights_of(checkpoint, request)):
            rows, row = (weight.shape[0] if weight.shape else 1), prod(weight.shape[1:])
            step, shards = options.rows_per_file or max(rows, 1), list[dict[str, Any]]()
            for at in range(0, rows if weight.numel else 0, step):
                stop = min(at + step, rows)
                body = Body(0, 0, at * row, stop * row, weight.dtype, None)
                path = f"{number:05d}-{len(shards):05d}.raw"
                files.append(TargetFile(path, FileTemplate(body.length_bytes, (), (body,)), (weight.tensor,)))
                shards.append({"name": path, "rows": [at, stop]})
            entries.append({
                "name": weight.fqn, "dtype": weight.dtype.name, "shape": list(weight.shape),
                "buffer": weight.fqn in buffers, "files": shards,
            })  # fmt: skip
        written = {e["name"] for e in entries}
        ties = {a: o for a, o in sorted(checkpoint.shared.items()) if o in written and a not in written}
        index = {"title": options.title, "tensors": entries, "ties": ties if options.keep_ties else {}}
        files.append(TargetFile(INDEX, literal_template(json.dumps(index).encode()), (), commit=True))
        left_out = carried.frozen_parameters(checkpoint) if request.exclude_frozen else ()
        not_carried = (*carried.training_state(checkpoint), *carried.extra_states(checkpoint), *left_out)
        return TargetLayout(tuple(files), None, not_carried=not_carried)
