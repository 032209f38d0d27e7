"""The big checkpoints of the memory tests and the benchmark have the shape of those that real DeepSpeed wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_zero_checkpoint

DATA = Path(__file__).parent.parent / "data"
OF_THE_RUN = re.compile(
    r"/ds_config/.*|/lr_scheduler.*|/epoch|/note|/nested.*|/buffer_names/\d+|/optimizer_state_dict/param_alignment.*/\d+"
    r"|/(module|frozen_param_\w+|shared_params)/(adapter\.weight|head\.weight|seen|wave)"
)
"""What only the real run had: configuration, scheduler, client state, buffers, frozen and tied parameters."""


def skeleton(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and kind of everything in a file; tensors by type and number of dimensions."""
    if isinstance(value, torch.Tensor):
        yield path, f"{value.dtype}, {value.dim()} dimensions"
        return
    yield path, type(value).__name__
    if isinstance(value, dict):
        for key, item in value.items():
            yield from skeleton(item, f"{path}/{key}")
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from skeleton(item, f"{path}/{index}")


@pytest.mark.parametrize(("name", "stage"), [("zero2_tiny", 2), ("zero3_tiny", 3)])
def test_generated_files_have_the_keys_and_types_of_real_ones(name: str, stage: int, tmp_path: Path) -> None:
    real = DATA / name / "global_step3"
    first = torch.load(min(real.glob("*_model_states.pt")), weights_only=False)
    parameters = [(fqn, tuple(shape)) for fqn, shape in first["param_shapes"][0].items()]
    made = write_zero_checkpoint(tmp_path, parameters, stage=stage, ranks=2)
    assert {p.name for p in made.iterdir()} == {p.name for p in real.iterdir()}
    for path in made.iterdir():
        ours, theirs = (
            {k: v for k, v in skeleton(torch.load(p, weights_only=False)) if not OF_THE_RUN.fullmatch(k)}
            for p in (path, real / path.name)
        )
        assert ours == theirs, path.name
