"""Files of Megatron-core for one layout, from there for another one, and so on, hold the same training state."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings, strategies as st
from safetensors.torch import load_file

import reshard
from house.measured import say
from house.megatron_runs import MegatronRun, laid_out
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


def written(source: Path, target: Path, run: MegatronRun, form: dict[str, Any]) -> None:
    args = target.parent / f"{target.parent.name}.json"
    args.parent.mkdir(parents=True)
    args.write_text(json.dumps({"overlap_grad_reduce": run.bucket is not None, "ddp_bucket_size": run.bucket}))
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
