"""Full files of Accelerate as a target, read by torch's safe loader: the contents are those of the shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from laws.dcp_files import flattened
from laws.dcp_target import DcpTarget, Path, _companions, _Reading, with_neutral_options
from laws.targets import MANIFEST
from laws.torch_values import load, tree_of
from reshard.choices import MissingMoments
from reshard.dcp_options import Framework
from reshard_engine.testing.logical import Bits, Content

_FILES = {"pytorch_model_fsdp.bin": "model", "optimizer.bin": "optimizer"}


@dataclass(frozen=True)
class WholeTarget(DcpTarget):
    """`pytorch_model_fsdp.bin` with `optimizer.bin`, and the files that a script's other values go into."""

    name: str = "torch_save"

    def options(self) -> st.SearchStrategy[Mapping[str, Any]]:
        """States of idle parameters."""
        moments = st.sampled_from([MissingMoments.ZERO, MissingMoments.OMIT])
        chosen = moments.map(lambda m: {"dcp": {"framework": Framework.ACCELERATE}, "missing_moments": m})
        fields = {"to": st.just(self.name), "exclude_frozen": st.just(False), "options": chosen}
        return st.fixed_dictionaries(fields).map(with_neutral_options)

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Every value of both files by its role."""
        rest = {name: data for name, data in files.items() if name != MANIFEST}
        found = {key: load(rest.pop(name)) for name, key in _FILES.items() if name in rest}
        assert "model" in found
        flat, paths = flattened(found)
        entries: dict[Path, Any] = {paths[key]: tree_of(value) for key, value in flat.items()}
        values = dict(_companions(rest))
        tensors: dict[str, Bits] = {}
        for key, value in _Reading(entries).named():
            if isinstance(value, Bits) and not key.startswith("hyper/"):
                tensors[key] = value
            else:
                values[key] = value
        return Content(tensors, values=values)
