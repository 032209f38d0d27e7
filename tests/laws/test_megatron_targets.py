"""Files of Megatron-core for one layout, from there for another one, and so on, hold the same training state.

So do those of other formats, made of them directly or by way of a third format.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings, strategies as st
from safetensors.torch import load_file

import reshard
from house.measured import say
from house.megatron_runs import EMBEDDING, OUTPUT, MegatronRun, laid_out
from laws.profiles import laws_profile, laws_seed
from oracle.whole_tensors import named, whole

_SEED = laws_seed()
_EXAMPLES = max(6, laws_profile().max_examples // 4)
_FORMS: tuple[dict[str, Any], ...] = (
    {"ckpt_format": "torch"},
    {"optimizer_sharding": "dp_reshardable"},
    {"optimizer_sharding": "fully_reshardable"},
    {"optimizer_sharding": "dp_reshardable", "common_state": "entry"},
)
_STATE_DICT: dict[str, Any] = {"to": "dcp", "framework": "state-dict"}
_OTHERS: tuple[dict[str, Any], ...] = (
    _STATE_DICT,
    {"to": "dcp", "framework": "accelerate"},
    {"to": "dcp", "framework": "lightning"},
    {"to": "universal"},
    *({"to": "zero", "zero_stage": stage} for stage in ("1", "2", "3", "bf16")),
    {"to": "torch_checkpointing", "device_type": "cpu"},
    {"to": "fsdp_ranks", "rank_framework": "accelerate", "device_type": "cpu"},
)
"""Targets of other formats that keep the optimizer; the number of ranks is drawn where they have one."""
_OF_RANKS = ("zero", "torch_checkpointing", "fsdp_ranks")


@st.composite
def others(draw: st.DrawFn) -> dict[str, Any]:
    """A target of another format."""
    chosen = draw(st.sampled_from(_OTHERS))
    return chosen | ({"dp": draw(st.integers(1, 5))} if chosen["to"] in _OF_RANKS else {})


def said_of(other: dict[str, Any]) -> str:
    """The words of a target for people."""
    return " ".join(str(v) for k, v in other.items() if k not in ("dp", "device_type"))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[MegatronRun, list[tuple[MegatronRun, dict[str, Any]]]]:
    """A run, and other layouts of it, each with a kind of files."""
    experts = draw(st.sampled_from([0, 0, 4]))
    model = MegatronRun(
        layers=4, hidden=draw(st.sampled_from([6, 12])), vocabulary=draw(st.integers(7, 12)), experts=experts,
        tied=draw(st.booleans()), seed=draw(st.integers(0, 99)), said={"accumulate_allreduce_grads_in_fp32": True},
    )  # fmt: skip

    first = draw(laid_out(model))
    return first, [(draw(laid_out(model)), draw(st.sampled_from(_FORMS))) for _ in range(draw(st.integers(1, 3)))]


@pytest.fixture(scope="module")
def met() -> Iterator[Counter[str]]:
    """The outcomes of the examples, counted."""
    found: Counter[str] = Counter()
    yield found
    say(f"drawn with --hypothesis-seed={_SEED}", *(f"{count} {what}" for what, count in found.items()))


def written(
    source: Path, target: Path, run: MegatronRun, form: dict[str, Any], said: Mapping[str, Any] | None = None
) -> None:
    args = target.parent / f"{target.parent.name}.json"
    args.parent.mkdir(parents=True)
    buckets = {"overlap_grad_reduce": run.bucket is not None, "ddp_bucket_size": run.bucket}
    args.write_text(json.dumps({**(said or {}), **buckets}))
    layout: dict[str, Any] = {"ep": run.expert_ranks}
    if form.get("optimizer_sharding") != "fully_reshardable":
        layout |= {"tp": run.tensor, "pp": run.pipeline, "dp": run.data, "vocab_divisor": run.rows // run.tensor}
        layout |= {"virtual_pipeline": run.chunks} if run.chunks > 1 else {}
    reshard.convert(source, target, to="megatron", megatron_args=args, progress=False, **layout, **form)


def state_in(source: Path, place: Path) -> dict[str, torch.Tensor]:
    """All tensors: masters and moments by one conversion, weights by another."""
    reshard.convert(source, place / "dcp", to="dcp", framework="state-dict", progress=False)
    tensors = {k.replace("/model", "/fp32"): v for k, v in named(whole(place / "dcp")).items() if "/step" not in k}
    reshard.convert(source, place / "weights", to="safetensors", dtype="bf16", progress=False)
    return tensors | {f"{k}/weight": v for k, v in load_file(place / "weights" / "model.safetensors").items()}


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(laws_profile(), max_examples=_EXAMPLES)
@given(way=layouts(), legacy=st.booleans())
def test_states_are_the_same_in_every_layout(
    way: tuple[MegatronRun, list[tuple[MegatronRun, dict[str, Any]]]], legacy: bool, met: Counter[str]
) -> None:
    run, steps = way
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        source = run.save_legacy(place / "run") if legacy else run.save_torch_dist(place / "run")
        for number, (layout, form) in enumerate(steps):
            target = place / str(number) / "iter_0000007"
            written(source, target, layout, form)
            met[" ".join(form.values())] += 1
            source = target
        found, wanted = state_in(source, place), run.expected()
        assert found.keys() == wanted.keys()
        assert [k for k, v in wanted.items() if v.dtype != found[k].dtype or not torch.equal(found[k], v)] == []


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(laws_profile(), max_examples=_EXAMPLES)
@given(way=layouts(), legacy=st.booleans(), by=others(), to=others())
def test_states_are_the_same_by_way_of_other_formats(
    way: tuple[MegatronRun, list[tuple[MegatronRun, dict[str, Any]]]],
    legacy: bool,
    by: dict[str, Any],
    to: dict[str, Any],
    met: Counter[str],
) -> None:
    """Megatron-core to B to C holds what the run held, and is the same as Megatron-core to C."""
    run, steps = way
    met.update((f"by {said_of(by)}", f"to {said_of(to)}"))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        source = run.save_legacy(place / "run") if legacy else run.save_torch_dist(place / "run")
        layout, form = steps[0]
        again = place / "again" / "iter_0000007"
        written(source, again, layout, form)
        between, end, straight = (place / name / "iter_0000007" for name in ("between", "end", "straight"))
        # The first leg begins at other files of the run, so that the chain has each kind of Megatron-core's in it.
        reshard.convert(again, between, progress=False, **by)
        # Files of ZeRO-3 hold masters alone: without a ds_config, another run of DeepSpeed needs to be told the type.
        told = {"dtype": "bf16"} if by.get("zero_stage") == "3" and to["to"] == "zero" else {}
        reshard.convert(between, end, progress=False, **to, **told)
        reshard.convert(source, straight, progress=False, **to)
        found, wanted = state_in(end, place), run.expected()
        assert found.keys() == wanted.keys()
        assert [k for k, v in wanted.items() if v.dtype != found[k].dtype or not torch.equal(found[k], v)] == []
        report = reshard.diff(end, straight)
        # Schedulers and counters have a place in some formats only, and a way through others loses them. Other formats
        # keep the mark of experts' groups as it is in the layout that they are made of.
        assert [
            d for d in report.differences if d.kind not in ("missing", "state") and d.state != "is_expert_parallel"
        ] == []


@pytest.mark.timeout(0)
@seed(_SEED)
@settings(laws_profile(), max_examples=_EXAMPLES)
@given(way=layouts(), legacy=st.booleans(), by=others())
def test_weights_come_back_from_other_formats(
    way: tuple[MegatronRun, list[tuple[MegatronRun, dict[str, Any]]]], legacy: bool, by: dict[str, Any]
) -> None:
    """By way of another format, and of weights alone, Megatron-core's files hold the weights of the run."""
    run, steps = way
    layout, form = steps[0]
    said = {**vars(run.args()), "num_attention_heads": 12}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        source = run.save_legacy(place / "run") if legacy else run.save_torch_dist(place / "run")
        reshard.convert(source, place / "by" / "iter_0000007", progress=False, **by)
        for number, begin in enumerate((source, place / "by" / "iter_0000007")):
            weights = place / f"weights_{number}"
            reshard.convert(begin, weights, to="safetensors", dtype="bf16", progress=False)
            written(weights, place / f"back_{number}" / "iter_0000007", layout, form, said)
        straight, back = (place / f"back_{n}" / "iter_0000007" for n in (0, 1))
        report = reshard.diff(straight, back)
        assert report.equal, report.differences
        reshard.convert(back, place / "read", to="safetensors", dtype="bf16", progress=False)
        found = load_file(place / "read" / "model.safetensors")
        for key, value in found.items():
            rows = slice(0, run.vocabulary if key in (EMBEDDING, OUTPUT) else None)
            assert torch.equal(value[rows], run.truth[key]["weight"][rows]), key
        assert found.keys() == run.truth.keys()
