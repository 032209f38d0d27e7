"""Optimizer states of older kinds, which Megatron-core 0.14 saves, are read as the live run had them, and go on.

`fully_sharded_model_space` and `dp_zero_gather_scatter` lie in `torch_dist`; directories of ranks do so as they do
today. A run of 0.14 trains and saves; what is read is compared with its live model and optimizer, bit for bit. Then the
Megatron-core of all other tests (0.16.1; 0.19.2 with `RESHARD_MEGATRON`) goes on at another layout from what was
written, which it cannot from the older files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from oracle.dcp_cases import TITAN_FOLDER
from oracle.launcher import WorldError, Worlds
from oracle.test_megatron_out import GPT, LLAMA, MOE, STEP, Stage, differences, goes_on, megatron_is_needed, run
from oracle.whole_tensors import named, whole

OLD = Path(
    os.environ.get("RESHARD_MEGATRON_OLD") or Path(os.environ.get(TITAN_FOLDER, os.devnull)).parent / "megatron-old"
)
pytestmark = [
    megatron_is_needed,
    pytest.mark.skipif(
        not OLD.is_dir(), reason="Megatron-core 0.14 is not here: `make setup` puts it beside the other"
    ),
]
SPACE, ZERO, RANKS = "fully_sharded_model_space", "dp_zero_gather_scatter", "torch"
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"tp": 2, "dp": 2, "vocab": 84},
    "tied": GPT | {"pp": 2, "dp": 2, "bucket": 3000},
    "experts": MOE | {"ep": 2, "dp": 2, "dtype": "bf16"},
}
Trained = Callable[[str], tuple[Stage, Path]]


@pytest.fixture(scope="module")
def trained(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of 0.14 that saved in all forms."""
    known: dict[str, tuple[Stage, Path]] = {}

    def train(name: str) -> tuple[Stage, Path]:
        if name not in known:
            place = tmp_path_factory.mktemp(name)
            saves = [[form, str(place / form)] for form in (SPACE, ZERO, RANKS)]
            known[name] = run(worlds, CASES[name], place, save=saves, megatron=str(OLD)), place
        return known[name]

    return train


def read(source: Path, place: Path) -> dict[str, torch.Tensor]:
    reshard.convert(source, place / "dcp", to="dcp", framework="state-dict", progress=False)
    state = whole(place / "dcp")
    assert {s["step"] for s in state["optimizer"]["state"].values()} == {3}
    return {k.replace("/model", "/fp32"): v for k, v in named(state).items() if not k.endswith("/step")}


@pytest.mark.parametrize("form", [SPACE, ZERO, RANKS])
@pytest.mark.parametrize("name", CASES)
def test_states_are_those_of_the_run(name: str, form: str, trained: Trained, tmp_path: Path) -> None:
    begun, place = trained(name)
    truth = begun.state("saved")
    fp32 = {k.replace("/weight", "/fp32"): v for k, v in truth.items() if k.endswith("/weight")}
    wanted = fp32 | {k: v for k, v in truth.items() if not k.endswith("/weight")}
    assert differences(read(place / form, tmp_path), wanted) == []
    found = reshard.inspect(str(place / form))
    assert found.format.removeprefix("megatron-").removeprefix("torch-dist-") == form.replace("_", "-")


@pytest.mark.parametrize(
    ("name", "form", "layout"),
    [
        # Rows behind the vocabulary take part in losses, and their number follows from tensor parallelism.
        ("llama", SPACE, {"tp": 2, "pp": 2}),
        ("llama", RANKS, {"tp": 2}),
        ("tied", ZERO, {"tp": 2}),
        ("experts", SPACE, {}),
        ("experts", ZERO, {"ep": 4, "dp": 4}),
    ],
)
def test_a_newer_version_goes_on(
    name: str, form: str, layout: dict[str, int], trained: Trained, tmp_path: Path, worlds: Worlds
) -> None:
    begun, place = trained(name)
    case = {k: v for k, v in CASES[name].items() if k not in ("tp", "pp", "dp", "ep", "bucket")} | layout
    target = tmp_path / "to" / STEP
    ep = {"ep": layout["ep"]} if "ep" in layout else {}
    reshard.convert(place / form, target, to="megatron", progress=False, **ep)
    close = 2e-3 if "dtype" in case else 2e-6
    goes_on(worlds, begun, case, ["torch_dist", str(target.parent)], tmp_path / "now", close=close)


def test_a_newer_version_cannot_read_the_older_files(trained: Trained, tmp_path: Path, worlds: Worlds) -> None:
    """At the layout of the run itself, too."""
    _, place = trained("llama")
    with pytest.raises(WorldError, match="flattened_range"):
        run(worlds, CASES["llama"], tmp_path / "now", load=["torch_dist", str(place / SPACE)])
