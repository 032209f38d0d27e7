"""Files for one layout of Megatron-core, loaded by Megatron-core itself: directories of ranks, and `dp_reshardable`.

A real run trains and saves. Its checkpoint is written for another layout, whose run loads it with Megatron's own
loader: weights, masters, moments, groups and scheduler must be those of the run bit for bit, and so must the next
losses, as far as floating point adds in another order. Files for a run's own layout must be the files that it saves.
"""

from __future__ import annotations

import enum
import json
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.rank_cases import rank_case
from oracle.launcher import Worlds
from oracle.megatron_train import Run
from oracle.test_megatron_out import megatron_is_needed

TRAIN = "oracle.megatron_train:train"
RUNS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", "tp": 2, "pp": 2},
    "llama": {"dtype": "bf16", "tp": 2, "dp": 2},
    "odd": {"vocab": 93, "dp": 2},
    "buckets": {"dtype": "bf16", "dp": 2, "bucket": 5000},
    "experts": {"model": "moe", "dp": 2, "ep": 2},
    "moe": {"model": "moe", "dtype": "bf16"},
    "plain": {"dtype": "bf16", "tp": 2, "plain": True},
    "scaled": {"model": "gpt", "dtype": "fp16", "tp": 2},
}
_MODEL = re.compile(r"/model\d*$")
LAYOUT = ("tp", "pp", "dp", "ep", "vpp")
FORMS = ("torch", "dp_reshardable", "fully_reshardable")
ROUNDING = {"fp32": 2e-6, "bf16": 5e-3, "fp16": 5e-3}
"""The largest differences of losses near 4.6 when partial sums are added in another order."""


@dataclass(frozen=True)
class Trained:
    """A run that trained and saved in all forms."""

    run: dict[str, Any]
    place: Path
    losses: list[float]
    """Those of the steps behind the save."""


@pytest.fixture(scope="module")
def trained(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    known: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        if name not in known:
            run, place = RUNS[name], tmp_path_factory.mktemp(name)
            # Megatron-core saves shifted states of several padded buckets by parameters (Megatron-LM#5077).
            forms = [form for form in FORMS if form != "fully_reshardable" or "bucket" not in run]
            saves = [[form, str(place / form)] for form in forms]
            found = worlds.run(TRAIN, world=Run(**run).world, run=run, out=str(place), save=saves)
            known[name] = Trained(run, place, found[0]["after"])
        return known[name]

    return train


def written(source: Path, target: Path, run: dict[str, Any], form: str) -> None:
    """Write a checkpoint for the layout of a run."""
    options: dict[str, Any] = {name: run.get(name, 1) for name in ("tp", "pp", "dp", "ep")}
    options |= {"ckpt_format": "torch"} if form == "torch" else {"optimizer_sharding": form}
    options |= {"virtual_pipeline": run["vpp"]} if "vpp" in run else {}
    bucket = run.get("bucket")
    target.parent.mkdir(parents=True, exist_ok=True)
    said = target.parent / "args.json"
    said.write_text(json.dumps({"overlap_grad_reduce": bucket is not None, "ddp_bucket_size": bucket}))
    reshard.convert(source, target, to="megatron", megatron_args=said, progress=False, **options)


def differing(one: Path, other: Path) -> list[str]:
    found, wanted = load_file(one), load_file(other)
    assert found.keys() == wanted.keys()
    return [k for k, v in wanted.items() if v.dtype != found[k].dtype or not torch.equal(found[k], v)]


def goes_on(worlds: Worlds, before: Trained, form: str, layout: dict[str, Any], target: str, place: Path) -> None:
    """Write for a layout, load there, and compare."""
    run = {k: v for k, v in before.run.items() if k not in (*LAYOUT, "bucket")} | layout
    step = place / "iter_0000003"
    written(before.place / form, step, run, target)
    kind = "torch" if target == "torch" else "torch_dist"
    found = worlds.run(TRAIN, world=Run(**run).world, run=run, out=str(place), load=[kind, str(step)])
    assert differing(place / "loaded.safetensors", before.place / "saved.safetensors") == []
    state, wanted = (json.loads(p.read_text()) for p in (place / "loaded.json", before.place / "saved.json"))
    assert (state["scheduler"], state["iteration"]) == (wanted["scheduler"], wanted["iteration"])
    dense, kept = ([g for g in s["groups"] if not g["is_expert_parallel"]] for s in (state, wanted))
    assert dense == kept
    assert len(state["groups"]) == len(dense) + (run.get("ep", 1) > 1)
    assert found[0]["after"] == pytest.approx(before.losses, abs=ROUNDING[run.get("dtype", "fp32")])
    # Our own reader finds the same state.
    kinds = {(d.kind.value, d.state) for d in reshard.diff(before.place / form, step).differences}
    assert kinds <= {("hyper-parameter", "is_expert_parallel")}


@megatron_is_needed
@pytest.mark.parametrize(
    ("name", "form", "layout"),
    [
        ("gpt", "torch", {}),
        ("gpt", "fully_reshardable", {"pp": 2, "dp": 2}),
        ("gpt", "dp_reshardable", {"tp": 2, "pp": 2, "vpp": 2}),
        ("gpt", "torch", {"tp": 4}),
        ("llama", "torch", {"pp": 4}),
        ("llama", "fully_reshardable", {"dp": 2, "bucket": 5000}),
        ("odd", "dp_reshardable", {"tp": 2}),
        ("buckets", "torch", {"tp": 2, "pp": 2, "bucket": 3000}),
        ("experts", "dp_reshardable", {}),
        ("experts", "fully_reshardable", {"pp": 2, "dp": 2, "ep": 2}),
        ("moe", "torch", {"dp": 2, "ep": 2}),
        ("plain", "torch", {"pp": 2}),
        ("scaled", "dp_reshardable", {"pp": 2}),
    ],
)
def test_directories_of_ranks_go_on(
    name: str, form: str, layout: dict[str, Any], trained: Callable[[str], Trained], worlds: Worlds, tmp_path: Path
) -> None:
    goes_on(worlds, trained(name), form, layout, "torch", tmp_path)


@megatron_is_needed
@pytest.mark.parametrize(
    ("name", "form", "layout"),
    [
        ("llama", "dp_reshardable", {}),
        ("llama", "dp_reshardable", {"tp": 4}),
        ("llama", "torch", {"pp": 2}),
        ("gpt", "fully_reshardable", {"pp": 2, "vpp": 2, "dp": 2}),
        ("gpt", "dp_reshardable", {"tp": 4}),
        ("odd", "dp_reshardable", {"tp": 2, "dp": 2}),
        ("buckets", "dp_reshardable", {"pp": 2, "dp": 2, "bucket": 3000}),
        ("experts", "dp_reshardable", {}),
        ("experts", "torch", {"pp": 2, "dp": 2, "ep": 2}),
        ("moe", "fully_reshardable", {"dp": 2, "ep": 2}),
        ("scaled", "torch", {"dp": 2}),
    ],
)
def test_buckets_of_another_layout_go_on(
    name: str, form: str, layout: dict[str, Any], trained: Callable[[str], Trained], worlds: Worlds, tmp_path: Path
) -> None:
    """Megatron-core itself changes nothing but data parallelism of such a save."""
    goes_on(worlds, trained(name), form, layout, "dp_reshardable", tmp_path)


# The layout of the run itself: its own files.


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one class of Megatron-core that its arguments name."""

    class AttnBackend(enum.Enum):
        auto = 5

    *packages, name = "megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.enums"
    AttnBackend.__module__, AttnBackend.__qualname__ = name, "AttnBackend"
    for one in (*packages, name):
        monkeypatch.setitem(sys.modules, one, types.ModuleType(one))
    monkeypatch.setattr(sys.modules[name], "AttnBackend", AttnBackend, raising=False)


def plain(value: Any) -> Any:
    """A value with lists and tensors in place of tuples and arrays."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64) if value.dtype == np.uint32 else value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def unequal(one: Any, other: Any, path: str = "") -> list[str]:
    """The places where two values differ; the order of a dict's keys counts in models alone."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        if (list(one) if _MODEL.search(path) else set(one)) != (list(other) if _MODEL.search(path) else set(other)):
            return [f"{path}: {sorted(map(str, {*one} ^ {*other})) or 'order'}"]
        return [place for key in one for place in unequal(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [p for at, pair in enumerate(zip(one, other, strict=True)) for p in unequal(*pair, f"{path}[{at}]")]
    return [] if type(one) is type(other) and one == other else [path]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("legacy_gpt_bf16_tp2pp1dp2_dist", {"tp": 2, "dp": 2}),
        ("legacy_llama_bf16_tp1pp2vpp2dp2_dist", {"pp": 2, "vpp": 2, "dp": 2}),
        ("legacy_moe_bf16_tp1ep2dp2_dist", {"ep": 2, "dp": 2}),
    ],
)
def test_directories_of_the_same_ranks_are_the_files_of_the_run(
    name: str, run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors, keys and arguments; expert-parallel ranks share the random states of the first one."""
    saved = rank_case(name, tmp_path, folder="mcore").folder / "ckpt" / "iter_0000003"
    target = tmp_path / "target" / "iter_0000003"
    written(saved, target, run, "torch")
    stand_in(monkeypatch)
    files = sorted(path.relative_to(saved) for path in saved.rglob("*.pt"))
    assert sorted(path.relative_to(target) for path in target.rglob("*.pt")) == files
    for file in files:
        one, other = (torch.load(root / file, weights_only=False) for root in (saved, target))
        if file.name == "model_optim_rng.pt":
            one["args"], other["args"] = vars(one["args"]), vars(other["args"])
            if "moe" in name:
                del one["rng_state"], other["rng_state"]
        assert unequal(plain(one), plain(other), f"/{file.stem}") == []
