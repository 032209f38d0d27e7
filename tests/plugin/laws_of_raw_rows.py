"""The laws over raw rows as a source and as a target; run by `test_plugin.py`, in a process that has the plug-in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings, strategies as st

from laws.deepspeed_source import STAGES
from laws.drawing import trials
from laws.profiles import laws_profile, laws_seed
from laws.targets import WeightsTarget
from laws.weights_source import kept
from reshard.choices import TargetFormat
from reshard_engine.testing.laws import check
from reshard_engine.testing.logical import Bits, Case, Content, Saved, SourceFormat, TargetOracle
from reshard_engine.testing.strategies import Rules, evenly, logical_states

INDEX = "raw_rows.json"


@dataclass(frozen=True)
class RawRowsSource:
    """Raw rows as numpy writes them."""

    name: str = "raw rows"
    full: bool = False

    @property
    def zoo(self) -> Mapping[str, float]:
        """Nothing beyond what every source must meet."""
        return {}

    def cases(self) -> st.SearchStrategy[Case]:
        """Any model, cut after any number of rows."""
        return st.tuples(logical_states(Rules(max_groups=1)), evenly(1, 2, 7, None)).map(lambda p: Case(*p))

    def write(self, case: Case, directory: Path) -> Saved:
        """Files of whole rows, and the index."""
        state, entries = kept(case.state), list[dict[str, Any]]()
        weights = [(p.fqn, p.weight) for p in state.parameters] + list(state.buffers.items())
        for number, (name, bits) in enumerate(weights):
            assert bits is not None
            rows = bits.shape[0] if bits.shape else 1
            data = np.frombuffer(bits.data, dtype=np.uint8).reshape(rows, -1) if bits.numel else np.zeros((0, 0))
            files = list[dict[str, Any]]()
            for at in range(0, rows if bits.numel else 0, case.layout or max(rows, 1)):
                stop = min(at + (case.layout or rows), rows)
                path = f"{number}-{len(files)}.raw"
                (directory / path).write_bytes(data[at:stop].tobytes())
                files.append({"name": path, "rows": [at, stop]})
            entry = {"name": name, "dtype": bits.dtype, "shape": list(bits.shape), "buffer": name in state.buffers}
            entries.append({**entry, "files": files})
        index = {"title": None, "tensors": entries, "ties": dict(state.aliases)}
        (directory / INDEX).write_text(json.dumps(index))
        return Saved(state)

    def checks_metadata(self, case: Case) -> bool:
        """An index has no checksum."""
        return False


@dataclass(frozen=True)
class RawRowsTarget(WeightsTarget):
    """Raw rows as numpy reads them."""

    to: TargetFormat = "raw_rows"  # type: ignore[assignment]

    @property
    def name(self) -> str:
        """For reports."""
        return "raw rows"

    def options(self) -> st.SearchStrategy[Mapping[str, Any]]:
        """Element type, frozen or not, rows of a file."""
        rows = st.sampled_from([None, 16, 50]).map(lambda n: {"raw_rows": {"rows_per_file": n}})
        return st.fixed_dictionaries(
            {
                "to": st.just(self.to),
                "dtype": st.sampled_from([None, "fp32", "bf16", "fp16"]),
                "exclude_frozen": st.booleans(),
                "options": rows,
            }
        )

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Every file once, in the order of its rows."""
        rest = {name: data for name, data in files.items() if name != "reshard.json"}
        index = json.loads(rest.pop(INDEX))
        tensors: dict[str, Bits] = {}
        for entry in index["tensors"]:
            data, at = b"", 0
            for shard in entry["files"]:
                assert shard["rows"][0] == at, "rows are left out"
                data, at = data + rest.pop(shard["name"]), shard["rows"][1]
            tensors[entry["name"]] = Bits(entry["dtype"], tuple(entry["shape"]), data)
        assert not rest, f"files that no index names: {sorted(rest)}"
        return Content(tensors, values={"aliases": index["ties"]})


SAFETENSORS = WeightsTarget(TargetFormat.SAFETENSORS)
WAYS: tuple[tuple[SourceFormat, TargetOracle], ...] = (
    (RawRowsSource(), SAFETENSORS),
    (RawRowsSource(), RawRowsTarget()),
    (STAGES[2], RawRowsTarget()),
)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0].name}-{way[1].name}")
@seed(laws_seed())
@settings(laws_profile(), max_examples=8, print_blob=False)  # blobs hide what failed; the seed is enough
@given(data=st.data())
def test_laws(way: tuple[SourceFormat, TargetOracle], data: st.DataObject) -> None:
    source, target = way
    check(data.draw(trials(source, (target,))))
