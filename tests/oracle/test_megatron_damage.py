"""Optimizer states that real Megatron-core saved shifted (Megatron-LM#5077): named, repaired, told from others.

The truth is the live optimizer before the save. Runs of 0.16.1 train here; of the frozen case the damage was written
down element by element.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import reshard
from house.rank_cases import rank_case
from house.shared import made_once
from oracle.launcher import Worlds
from oracle.megatron_train import Run
from oracle.test_megatron_out import megatron_is_needed
from oracle.whole_tensors import named, whole
from reshard.cli.main import app
from reshard.errors import RequestError, SourceError

FROZEN = "damaged_v16_td_full_buckets_llama_bf16_dp2"
RUNS: dict[str, dict[str, Any]] = {
    "gpt_dp1": {"model": "gpt", "dtype": "bf16", "dp": 1, "layers": 3, "bucket": 6000},
    "gpt_fp32_dp2": {"model": "gpt", "dtype": "fp32", "dp": 2, "layers": 3, "bucket": 6000},
    "gpt_tp2dp2": {"model": "gpt", "dtype": "bf16", "tp": 2, "dp": 2, "layers": 3, "bucket": 3000, "vocab": 100},
    "llama_dp1": {"dtype": "bf16", "dp": 1, "layers": 3, "bucket": 6000},
    "llama_dp2": {"dtype": "fp16", "dp": 2, "layers": 3, "bucket": 6000},
    "llama_tp2dp2": {"dtype": "bf16", "tp": 2, "dp": 2, "layers": 3, "bucket": 3000, "vocab": 100},
    "gpt_pp2dp2": {"model": "gpt", "dtype": "bf16", "pp": 2, "dp": 2, "bucket": 3000, "vocab": 90},
    "moe_ep2dp2": {
        "model": "moe", "dtype": "bf16", "ep": 2, "dp": 2, "bucket": 100, "layers": 2, "vocab": 41,
        "more": {"moe_ffn_hidden_size": 25},
    },
}  # fmt: skip
_BOX = re.compile(r"\[((?:\d+:\d+(?:, )?)+)\]")


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`saved(name)`: the folder of a run with `saved.safetensors`, and the saves `damaged` and `right`."""

    @cache
    def of(name: str) -> Path:
        run = RUNS[name]

        def train(folder: Path) -> list[object]:
            saves = [["fully_reshardable", str(folder / "damaged")], ["corrected", str(folder / "right")]]
            found = worlds.run(
                "oracle.megatron_train:train", world=Run(**run).world, run=run, out=str(folder), save=saves
            )
            return list(found[0]["after"])

        folder, after = made_once(tmp_path_factory, f"megatron-damage-{name}", train)
        (folder / "after.json").write_text(json.dumps(after))
        return folder

    return of


def truth_of(stem: Path) -> dict[str, torch.Tensor]:
    """Masters and moments of the live run."""
    return {k: v for k, v in load_file(stem).items() if not k.endswith("/weight")}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Masters and moments of a distributed checkpoint that reshard wrote."""
    found = named(whole(folder))
    return {k.replace("/model", "/fp32"): v for k, v in found.items() if not k.endswith("/step")}


def repaired(source: Path, target: Path) -> Any:
    chosen: dict[str, Any] = {"damaged": "repair-with-zeros"}
    return reshard.convert(source, target, to="dcp", framework="state-dict", progress=False, **chosen)


def told(source: Path, tmp_path: Path) -> SourceError:
    with pytest.raises(SourceError) as caught:
        reshard.convert(source, tmp_path / "refused", to="dcp", progress=False)
    assert not (tmp_path / "refused").exists()
    return caught.value


def lost_of(result: Any) -> dict[str, list[tuple[slice, ...]]]:
    """The reported boxes of each `NAME/STATE`, and that their counts are those of the report."""
    found: dict[str, list[tuple[slice, ...]]] = {}
    for one in result.not_carried:
        if "nowhere in the files" not in one.reason:
            continue
        key, _, said = one.path.partition(" (")
        boxes = [tuple(slice(*map(int, part.split(":"))) for part in box.split(", ")) for box in _BOX.findall(said)]
        numbers = [torch.Size([s.stop - s.start for s in box]).numel() for box in boxes]
        assert sum(numbers) == (int(said.split()[0].replace(",", "")) if "element" in said else 0)
        found[key] = boxes
    return found


def judged(result: Any, found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> tuple[int, int]:
    """(elements, lost ones) of each state, after every other element was found equal to the truth bit for bit."""
    assert found.keys() == truth.keys()
    lost = lost_of(result)
    for key, value in truth.items():
        held = torch.ones(value.shape, dtype=torch.bool)
        for box in lost.get(key, []):
            held[box] = False
        assert torch.equal(found[key][held].view(torch.int32), value[held].view(torch.int32)), key
        if not key.endswith("/fp32"):
            assert not found[key][~held].any(), key
    totals = [
        (
            sum(v.numel() for k, v in truth.items() if k.endswith(kind)),
            sum(torch.zeros(truth[k].shape)[b].numel() for k in lost if k.endswith(kind) for b in lost[k]),
        )
        for kind in ("/fp32", "/exp_avg", "/exp_avg_sq")
    ]
    assert len({*totals}) == 1
    return totals[0]


@megatron_is_needed
@pytest.mark.parametrize("name", RUNS)
def test_every_damaged_parameter_of_a_real_run_is_named_and_repaired(name: str, saved: Any, tmp_path: Path) -> None:
    folder = saved(name)
    truth, source = truth_of(folder / "saved.safetensors"), folder / "damaged"
    (files,) = source.glob("iter_*")
    wrong = damaged_in(files, truth, tmp_path)
    assert wrong
    error = told(source, tmp_path)
    assert error.code == "checkpoint.damaged"
    assert set(error.details["parameters"]) == wrong
    assert "Megatron-LM#5077" in error.message
    assert "--damaged repair" in (error.fix or "")
    result = repaired(source, tmp_path / "dcp")
    elements, lost = judged(result, read(tmp_path / "dcp"), truth)
    print(f"{name}: {len(wrong)} parameters, {lost} of {elements} elements of each state lost")
    assert lost < elements / 10
    assert any(f"put back the optimizer states of {len(wrong)} parameters" in w for w in result.warnings)


def damaged_in(files: Path, truth: dict[str, torch.Tensor], tmp_path: Path) -> set[str]:
    """The parameters whose masters in the files are not the live ones, read without reshard's judgement."""
    from reshard_engine.formats.megatron import model

    kept = model.ModelBuilder.roundings
    model.ModelBuilder.roundings = lambda _: iter(())  # type: ignore[method-assign]
    try:
        reshard.convert(files, tmp_path / "as-it-is", to="dcp", framework="state-dict", progress=False)
    finally:
        model.ModelBuilder.roundings = kept  # type: ignore[method-assign]
    found = read(tmp_path / "as-it-is")
    return {
        key.rpartition("/")[0]
        for key, value in truth.items()
        if key.endswith("/fp32") and not torch.equal(found[key], value)
    }


@megatron_is_needed
@pytest.mark.parametrize("name", RUNS)
def test_the_same_training_saved_by_a_corrected_megatron_is_taken_as_it_is(
    name: str, saved: Any, tmp_path: Path
) -> None:
    folder = saved(name)
    truth = truth_of(folder / "saved.safetensors")
    taken = reshard.convert(folder / "right", tmp_path / "taken", to="dcp", framework="state-dict", progress=False)
    asked = repaired(folder / "right", tmp_path / "repaired")
    for result, target in ((taken, tmp_path / "taken"), (asked, tmp_path / "repaired")):
        assert judged(result, read(target), truth)[1] == 0
    assert any("no states are shifted" in w for w in asked.warnings)
    assert not any("shifted" in w for w in taken.warnings)


@megatron_is_needed
def test_a_run_goes_on_from_repaired_states(saved: Any, worlds: Worlds, tmp_path: Path) -> None:
    """Real Megatron-core loads them as they were but for what was lost; from the damaged save its losses drift."""
    name = "llama_dp2"
    folder, run = saved(name), RUNS[name]
    target = tmp_path / "run" / "iter_0000003"
    chosen: dict[str, Any] = {"damaged": "repair-with-zeros"}
    result = reshard.convert(folder / "damaged", target, to="megatron", progress=False, **chosen)
    losses: dict[str, list[float]] = {}
    for kind, place in (("repaired", target), ("damaged", folder / "damaged" / "iter_0000003")):
        out = tmp_path / kind
        load = ["torch_dist", str(place)]
        losses[kind] = worlds.run("oracle.megatron_train:train", world=2, run=run, out=str(out), load=load)[0]["after"]
    loaded = load_file(tmp_path / "repaired" / "loaded.safetensors")
    truth = load_file(folder / "saved.safetensors")
    differing = sum(int((loaded[k] != v).sum()) for k, v in truth.items())
    assert differing <= 3 * judged(result, truth_of(tmp_path / "repaired" / "loaded.safetensors"),
                                   truth_of(folder / "saved.safetensors"))[1]  # fmt: skip
    wanted = json.loads((folder / "after.json").read_text())
    drift = {kind: abs(found[1] - wanted[1]) for kind, found in losses.items()}
    assert losses["repaired"][0] == losses["damaged"][0] == wanted[0]
    assert drift["repaired"] < drift["damaged"] / 10, (losses, wanted)


# The frozen case, whose damage was written down element by element.


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rank_case(FROZEN, tmp_path_factory.mktemp("frozen"), folder="mcore").folder


def test_the_frozen_case_is_repaired(frozen: Path, tmp_path: Path) -> None:
    said = json.loads((frozen / "damaged.json").read_text())["tensors"]
    wrong = {key.rpartition("/")[0] for key in said}
    assert set(told(frozen / "ckpt", tmp_path).details["parameters"]) == wrong
    result = repaired(frozen / "ckpt", tmp_path / "dcp")
    truth = truth_of(frozen / "expected.safetensors")
    assert judged(result, read(tmp_path / "dcp"), truth) == (21_664, 160)


def test_lost_moments_need_a_choice_and_weights_none(frozen: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        reshard.convert(frozen / "ckpt", tmp_path / "dcp", to="dcp", progress=False, damaged="repair")
    assert caught.value.code == "request.unsatisfiable"
    assert "160 elements" in caught.value.message
    assert "--damaged repair-with-zeros" in (caught.value.fix or "")
    assert not (tmp_path / "dcp").exists()
    reshard.convert(frozen / "ckpt", tmp_path / "out", to="safetensors", progress=False, damaged="repair")
    found, truth = load_file(tmp_path / "out" / "model.safetensors"), load_file(frozen / "expected.safetensors")
    differing = sum(int((found[k[:-5]] != v).sum()) for k, v in truth.items() if k.endswith("/fp32"))
    assert differing == 160


@pytest.mark.parametrize("to", ["universal", "zero"])
def test_every_target_takes_repaired_states(to: str, frozen: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"damaged": "repair-with-zeros"}
    options: dict[str, Any] = {"zero": {"dp": 3, "zero_stage": 1}}.get(to, {})
    reshard.convert(frozen / "ckpt", tmp_path / "one", to="dcp", framework="state-dict", progress=False, **chosen)
    target = tmp_path / "run" / "global_step3"
    reshard.convert(frozen / "ckpt", target, to=to, progress=False, verify="full", **chosen, **options)
    report = reshard.diff(target, tmp_path / "one")
    assert not [d for d in report.differences if d.kind == "elements"], report


def test_inspect_says_what_may_be_and_compares_if_asked(frozen: Path) -> None:
    found = reshard.inspect(frozen / "ckpt")
    assert found.compared is None
    assert any("11 parameters may be shifted" in w and "--compare" in w for w in found.warnings)
    with pytest.raises(SourceError) as caught:
        reshard.inspect(frozen / "ckpt", compare=True)
    assert caught.value.code == "checkpoint.damaged"
    result = CliRunner().invoke(app, ["inspect", str(frozen / "ckpt"), "--compare"])
    assert isinstance(result.exception, SourceError)
    assert result.stdout.split() == sorted(caught.value.details["parameters"])
