"""Real Megatron-core goes on with our distributed checkpoints, at layouts that its own files do not reach.

What it loaded is compared with what was saved, bit for bit; the losses of the next steps with those of the run that
saved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.megatron_saves import as_bridge_saves
from oracle.dcp_cases import is_here
from oracle.launcher import Worlds
from oracle.megatron_train import Run

megatron_is_needed = pytest.mark.skipif(
    "RESHARD_MEGATRON" not in os.environ and not is_here("megatron"),
    reason="Megatron-core is not here: `make setup` puts it beside the environment",
)
pytestmark = megatron_is_needed
TIMEOUT_S = 240
ENDS = ("embedding", "loss")
STEP = "iter_0000003"


@dataclass(frozen=True)
class Stage:
    """A run: its live state, and the losses of its steps behind the save."""

    out: Path
    losses: list[float]

    def state(self, stem: str) -> dict[str, torch.Tensor]:
        """The tensors of the live state, `NAME/KIND`."""
        return load_file(self.out / f"{stem}.safetensors")

    def meta(self, stem: str) -> dict[str, Any]:
        """Its groups, its scheduler and its iteration."""
        found: dict[str, Any] = json.loads((self.out / f"{stem}.json").read_text())
        return found


def run(worlds: Worlds, case: dict[str, Any], out: Path, **jobs: Any) -> Stage:
    """Train a run, or go on with one."""
    world = Run(**case).world
    ranks = worlds.run("oracle.megatron_train:train", world=world, timeout_s=TIMEOUT_S, run=case, out=str(out), **jobs)
    return Stage(out, ranks[0]["after"])


def differences(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same on both sides."""
    names = sorted(before.keys() ^ after.keys())
    same = before.keys() & after.keys()
    return names + [n for n in same if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])]


def groups(meta: dict[str, Any]) -> list[Any]:
    """The distinct groups, in an order of their own: with experts apart there are more."""
    found = [
        json.dumps({k: v for k, v in g.items() if k != "is_expert_parallel"}, sort_keys=True) for g in meta["groups"]
    ]
    return sorted(set(found))


def goes_on(worlds: Worlds, begun: Stage, case: dict[str, Any], load: list[str], out: Path, *, close: float) -> None:
    """Load, compare everything, and take the next steps; `close` is for their losses, relative."""
    now = run(worlds, case, out, load=load)
    assert differences(begun.state("saved"), now.state("loaded")) == []
    before, after = begun.meta("saved"), now.meta("loaded")
    assert groups(before) == groups(after)
    assert before["scheduler"] == after["scheduler"]
    assert before["iteration"] == after["iteration"] == 3
    assert now.losses == pytest.approx(begun.losses, rel=close, abs=0)


def _close(case: dict[str, Any]) -> float:
    """Sums are in the order of the ranks, which shows in 16 bits, and where a token is between two experts."""
    if case.get("dtype", "fp32") != "fp32":
        return 2e-3
    return 5e-5 if case["model"] == "moe" else 5e-7


GPT, LLAMA, MOE = {"model": "gpt"}, {"model": "llama"}, {"model": "moe"}
SINGLETON = {"singleton_local_shards": True}
CASES: dict[str, tuple[dict[str, Any], str, list[dict[str, Any]]]] = {
    "gpt": (GPT | {"tp": 2, "dp": 2}, "fully_reshardable", [{}, {"pp": 2}, {"tp": 4}]),
    "buckets": (LLAMA | {"tp": 2, "pp": 2}, "dp_reshardable", [{}, {"tp": 4}]),
    "legacy": (LLAMA | {"pp": 2, "vpp": 2, "dtype": "bf16"}, "torch", [{"tp": 2}]),
    "plain": (LLAMA | {"tp": 2, "plain": True, "dtype": "bf16"}, "torch", [{"pp": 2}, {"dp": 2}]),
    "fp16": (GPT | {"tp": 2, "dtype": "fp16"}, "dp_reshardable", [{"pp": 2}]),
    "experts_joined": (MOE | {"ep": 2, "dp": 2}, "fully_reshardable", [{}, {"tp": 2}]),
    "experts_apart": (MOE | {"tp": 2}, "dp_reshardable", [{"ep": 2, "dp": 2}, {"ep": 4, "dp": 4}]),
    "padded": (LLAMA | {"tp": 2, "vocab": 84}, "fully_reshardable", [{"tp": 2, "pp": 2}]),
}
"""Names of cases: the run, the form of its save, and the layouts that go on."""


@pytest.mark.parametrize(
    ("case", "forms", "layouts"),
    [
        # `--expert-tensor-parallel-size`: tensor-parallel ranks hold whole experts, each other ones.
        (
            MOE | {"tp": 2, "ep": 2, "etp": 1},
            ("torch", "dp_reshardable", "dp_zero_gather_scatter"),
            [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}],
        ),
        # `--num-distributed-optimizer-instances`: each two of four data-parallel ranks share all states.
        (LLAMA | {"dp": 4, "instances": 2}, ("dp_reshardable", "torch", "fully_reshardable"), [{"tp": 2}]),
        # Stages with other counts of layers, and such that count the embedding and the loss as layers.
        (
            LLAMA | {"layers": 5, "pp": 2, "more": {"num_layers_in_first_pipeline_stage": 2}},
            ("torch", "dp_reshardable"),
            [{"layers": 5}],
        ),
        (
            GPT | {"layers": 6, "pp": 2, "vpp": 2, "more": {f"account_for_{e}_in_pipeline_split": True for e in ENDS}},
            ("dp_reshardable", "torch"),
            [{"layers": 6}],
        ),
    ],
    ids=["experts_cut_otherwise", "instances", "uneven_stages", "stages_with_ends"],
)
def test_runs_whose_ranks_share_otherwise_go_on(
    case: dict[str, Any], forms: Sequence[str], layouts: list[dict[str, Any]], tmp_path: Path, worlds: Worlds
) -> None:
    begun = run(worlds, case, tmp_path / "begun", save=[[form, str(tmp_path / form)] for form in forms])
    assert all(reshard.diff(tmp_path / forms[0], tmp_path / form).equal for form in forms[1:])
    for number, layout in enumerate(layouts):
        target = tmp_path / f"to_{number}" / STEP
        reshard.convert(tmp_path / forms[number], target, to="megatron", ep=layout.get("ep", 1), progress=False)
        now = {"model": case["model"]} | layout
        close = _close(case)
        goes_on(worlds, begun, now, ["torch_dist", str(target.parent)], tmp_path / f"now_{number}", close=close)


@pytest.mark.parametrize("name", CASES)
def test_megatron_goes_on_at_other_layouts(name: str, tmp_path: Path, worlds: Worlds) -> None:
    case, form, layouts = CASES[name]
    begun = run(worlds, case, tmp_path / "begun", save=[[form, str(tmp_path / "saved")]])
    own = {"tp", "pp", "dp", "vpp", "ep"}
    for number, layout in enumerate(layouts):
        target = tmp_path / f"to_{number}" / STEP
        ep = {"ep": layout["ep"]} if "ep" in layout else {}
        result = reshard.convert(tmp_path / "saved", target, to="megatron", progress=False, verify="full", **ep)
        assert not [n.path for n in result.not_carried]
        assert reshard.verify(target).ok
        now = {k: v for k, v in case.items() if k not in own} | layout
        goes_on(worlds, begun, now, ["torch_dist", str(target.parent)], tmp_path / f"now_{number}", close=_close(case))


NUMBERED: dict[str, tuple[dict[str, Any], str, dict[str, bool], list[tuple[dict[str, Any], dict[str, Any]]]]] = {
    "gpt": (GPT | {"tp": 2, "dp": 2}, "fully_reshardable", SINGLETON, [({"pp": 2}, {}), ({"tp": 4}, {})]),
    "llama": (
        LLAMA | {"tp": 2, "pp": 2, "dtype": "bf16"},
        "dp_reshardable",
        SINGLETON,
        [({"tp": 4}, {}), ({"dp": 2, "pp": 2}, {"optimizer_sharding": "dp_reshardable"})],
    ),
    "plain": (LLAMA | {"tp": 2, "plain": True, "dtype": "bf16"}, "fully_reshardable", SINGLETON, [({"pp": 2}, {})]),
    "experts": (
        MOE | {"ep": 2, "dp": 2},
        "fully_reshardable",
        SINGLETON,
        [({"tp": 2}, {}), ({"dp": 4, "ep": 4}, {}), ({"pp": 2}, {"ckpt_format": "torch"})],
    ),
    # The run itself asks for such keys, and directories of ranks have no keys that show it.
    "arguments": (LLAMA | {"more": {"hetereogenous_dist_checkpoint": True}}, "torch", {}, [({"tp": 2}, {})]),
    "layers_alone": (LLAMA | {"dp": 2}, "fully_reshardable", {"non_homogeneous_layers": True}, [({"tp": 2}, {})]),
}
"""Names of cases: the run, the form of its save, entries of its content metadata that give each layer keys of its own,
and the layouts that go on, each with the options that say what is written."""


@pytest.mark.parametrize("name", NUMBERED)
def test_megatron_goes_on_from_layers_with_keys_of_their_own(name: str, tmp_path: Path, worlds: Worlds) -> None:
    """The loader asks for the keys that the content metadata describes: these must be the keys that are written."""
    case, form, content, layouts = NUMBERED[name]
    begun = run(worlds, case, tmp_path / "begun", save=[[form, str(tmp_path / "saved")]], content=content)
    own = {"tp", "pp", "dp", "ep"}
    for number, (layout, options) in enumerate(layouts):
        target = tmp_path / f"to_{number}" / STEP
        sizes = {axis: layout.get(axis, 1) for axis in own} if options else {"ep": layout.get("ep", 1)}
        result = reshard.convert(tmp_path / "saved", target, to="megatron", progress=False, **sizes, **options)
        assert not [n.path for n in result.not_carried]
        now = {k: v for k, v in case.items() if k not in own} | layout
        kind = "torch" if "ckpt_format" in options else "torch_dist"
        goes_on(worlds, begun, now, [kind, str(target.parent)], tmp_path / f"now_{number}", close=_close(case))


def test_megatron_goes_on_from_files_of_megatron_bridge(tmp_path: Path, worlds: Worlds) -> None:
    """A real save of Megatron-core, and beside it what Megatron-Bridge's source writes: the tool itself needs a GPU."""
    case = LLAMA | {"tp": 2, "pp": 2, "dtype": "bf16"}
    begun = run(worlds, case, tmp_path / "begun", save=[["dp_reshardable", str(tmp_path / "saved")]])
    source, target = as_bridge_saves(tmp_path / "saved" / STEP), tmp_path / "to" / STEP
    assert reshard.inspect(str(source)).world == {"tp": 2, "pp": 2, "dp": 1}
    reshard.convert(source, target, to="megatron", progress=False)
    now = {k: v for k, v in case.items() if k not in ("tp", "pp")}
    goes_on(worlds, begun, now, ["torch_dist", str(target.parent)], tmp_path / "now", close=_close(case))


@pytest.mark.parametrize(
    ("case", "form", "layout", "stays"),
    [
        (LLAMA | {"tp": 2}, "dp_reshardable", {"tp": 4}, False),
        (LLAMA | {"tp": 2}, "dp_reshardable", {"tp": 2, "dp": 2}, True),
        (LLAMA | {"tp": 2}, "torch", {"tp": 2, "dp": 2}, True),
        (LLAMA | {"tp": 2}, "fully_reshardable", {"pp": 2}, True),
        (LLAMA | {"tp": 2, "plain": True}, "torch", {"tp": 2, "dp": 2}, True),
        (LLAMA | {"tp": 2, "plain": True}, "fully_reshardable", {"tp": 1, "pp": 2}, True),
        (MOE | {"ep": 2, "dp": 2}, "torch", {"ep": 2, "dp": 4}, True),
        (MOE | {"ep": 2, "dp": 2}, "dp_reshardable", {"ep": 2, "dp": 4}, True),
        (MOE | {"ep": 2, "dp": 2}, "fully_reshardable", {"ep": 4, "dp": 4, "tp": 1}, True),
        (MOE | {"ep": 2, "dp": 2}, "fully_reshardable", {"ep": 1, "tp": 2}, False),
    ],
)
def test_megatron_goes_on_with_what_ensure_returns(
    case: dict[str, Any], form: str, layout: dict[str, int], stays: bool, tmp_path: Path, worlds: Worlds
) -> None:
    """Megatron-core loads a run that fits as it was saved, also on another number of data-parallel ranks."""
    begun = run(worlds, case, tmp_path / "begun", save=[[form, str(tmp_path / "saved")]])
    sizes: dict[str, Any] = {"tp": 1, "pp": 1} | {axis: size for axis, size in layout.items() if axis != "dp"}
    load = reshard.ensure(tmp_path / "saved", **sizes)
    assert (load == str(tmp_path / "saved")) is stays
    kind = "torch" if form == "torch" else "torch_dist"
    now = {k: v for k, v in case.items() if k in ("model", "plain")} | layout
    goes_on(worlds, begun, now, [kind, load], tmp_path / "now", close=_close(case))
