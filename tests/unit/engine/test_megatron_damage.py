"""Shifted optimizer states of Megatron-core, of runs of many shapes: repaired, or refused by name; and other damage.

The saves are made element by element (`house.megatron_damage`). Moments are numbers of their own, so that each lost
element is known without a rule.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import reshard
from house.conversions import refused_conversion
from house.megatron_damage import ShiftedRun, lost_elements
from house.megatron_runs import MegatronRun
from oracle.whole_tensors import named, whole
from reshard.errors import RequestError, SourceError

REPAIR: dict[str, Any] = {"damaged": "repair-with-zeros"}
RUN = ShiftedRun(bucket=300, tensor=2)
_BOX = re.compile(r"\[((?:\d+:\d+(?:, )?)+)\]")


def convert(source: Path, target: Path, **options: Any) -> Any:
    return reshard.convert(source, target, to="dcp", framework="state-dict", progress=False, **options)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {k.replace("/model", "/fp32"): v for k, v in named(whole(folder)).items() if not k.endswith("/step")}


refused = partial(refused_conversion, convert)


def marked(result: Any, shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """True for each element that the report calls lost, by `NAME/STATE`."""
    found = {key: torch.zeros(value.shape, dtype=torch.bool) for key, value in shapes.items()}
    for one in result.not_carried:
        if "nowhere in the files" in one.reason:
            key, _, said = one.path.partition(" (")
            for box in _BOX.findall(said):
                found[key][tuple(slice(*map(int, part.split(":"))) for part in box.split(", "))] = True
            data = said.split()[0].replace(",", "") if "element" in said else 0
            assert int(found[key].sum()) == int(data)
    return found


def judge(run: ShiftedRun, place: Path) -> None:
    """The save is refused with its damaged parameters, and repaired but for exactly what it lost."""
    source = run.save(place / "run")
    wanted = {k: v for k, v in run.expected().items() if not k.endswith("/weight")}
    shifted = run.cut_out("param", right=False)
    wrong = {
        name
        for name, parts in shifted.items()
        if any(not torch.equal(part.to(run.dtype), run.part(name, "weight", rank)) for rank, part in parts.items())
    }
    if not wrong:
        convert(source, place / "taken")
        assert all(torch.equal(value, wanted[key]) for key, value in read(place / "taken").items())
        return
    error = refused(source, place / "refused")
    assert isinstance(error, SourceError)
    assert (error.code, set(error.details["parameters"])) == ("checkpoint.damaged", wrong)
    assert "--damaged repair" in (error.fix or "")
    result = convert(source, place / "dcp", **REPAIR)
    found, truly = read(place / "dcp"), lost_elements(run)
    lost = marked(result, wanted)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        name, _, kind = key.rpartition("/")
        assert torch.equal(lost[key], truly[name]), key
        assert torch.equal(found[key][~lost[key]], value[~lost[key]]), key
        weight = run.truth[name]["weight"][: len(value)].float()
        instead = weight if kind == "fp32" else torch.zeros(value.shape)
        assert torch.equal(found[key][lost[key]], instead[lost[key]]), key


@pytest.mark.parametrize(
    "run",
    [
        ShiftedRun(bucket=300, data=1),
        ShiftedRun(bucket=20, tensor=2, data=3, dtype=torch.float32),
        ShiftedRun(bucket=400, tensor=2, pipeline=2, chunks=2, data=12, vocabulary=11, dtype=torch.float16),
        ShiftedRun(bucket=50, experts=4, expert_ranks=2, layers=2, data=4, tensor=2),
        ShiftedRun(bucket=300, tied=True, pipeline=2, tensor=2),
        ShiftedRun(bucket=900, unit=1 << 16, said={"ddp_pad_buckets_for_high_nccl_busbw": True}),
        ShiftedRun(bucket=300, said={"transformer_impl": None, "data_parallel_size": None}),
    ],
    ids=["one rank", "each alone", "virtual pipeline", "experts", "tied", "bus", "unsaid"],
)
def test_shifted_states_are_repaired(run: ShiftedRun, tmp_path: Path) -> None:
    judge(run, tmp_path)


def test_buckets_whose_number_the_arguments_say(tmp_path: Path) -> None:
    run = ShiftedRun(tensor=2, pipeline=2, chunks=2, said={"ddp_num_buckets": 4})
    first = [run.part(name, "param", 0) for chunk in range(2) for name, _ in run.held(0, chunk, 0)]
    judge(replace(run, bucket=sum(part.numel() for part in first) // 4), tmp_path)
    assert (tmp_path / "dcp").exists()


def test_layouts_that_differ_in_padding_alone_are_one(tmp_path: Path) -> None:
    """Buckets at multiples of 128 or of 65,536, unsaid: of the experts behind the first bucket nothing is left."""
    run = ShiftedRun(
        tensor=2, expert_ranks=2, layers=2, experts=2, hidden=4, vocabulary=8, rows=8, bucket=17, seed=0
    )  # fmt: skip
    judge(run, tmp_path)


@st.composite
def runs(draw: st.DrawFn) -> ShiftedRun:
    pipeline = draw(st.sampled_from([1, 1, 2]))
    experts = draw(st.sampled_from([0, 0, 2, 4]))
    tensor = draw(st.sampled_from([1, 2]))
    rows = 4 * draw(st.integers(2, 5))
    return ShiftedRun(
        tensor=tensor,
        pipeline=pipeline,
        chunks=draw(st.sampled_from([1, 2])) if pipeline == 2 else 1,
        expert_ranks=draw(st.sampled_from([1, 2])) if experts else 1,
        data=draw(st.sampled_from([2, 4, 6, 12])),
        layers=4 if pipeline == 2 else draw(st.integers(1, 3)),
        experts=experts,
        tied=draw(st.booleans()),
        hidden=2 * draw(st.integers(2, 9)),
        rows=rows,
        vocabulary=rows - draw(st.integers(0, 2)),
        bucket=draw(st.integers(1, 4000)),
        seed=draw(st.integers(0, 99)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
    )


@given(run=runs())
@settings(max_examples=20, deadline=None)
def test_any_layout_is_repaired_but_for_what_it_lost(run: ShiftedRun) -> None:
    with tempfile.TemporaryDirectory() as place:
        judge(run, Path(place))


def test_states_that_are_right_are_taken(tmp_path: Path) -> None:
    source = RUN.save(tmp_path / "run", right=True)
    wanted = {k: v for k, v in RUN.expected().items() if not k.endswith("/weight")}
    for options in ({}, {"damaged": "repair"}):
        result = convert(source, tmp_path / f"dcp{len(options)}", **options)
        assert all(torch.equal(v, wanted[k]) for k, v in read(tmp_path / f"dcp{len(options)}").items())
        assert any("no states are shifted" in w for w in result.warnings) is bool(options)
    assert reshard.inspect(source, compare=True).compared == 27
    assert any("may be shifted" in w for w in reshard.inspect(source).warnings)
    one_bucket = replace(RUN, bucket=None).save(tmp_path / "one")
    assert not any("shifted" in w for w in reshard.inspect(one_bucket).warnings)


# Damage of other kinds is told apart, and nothing is repaired by a guess.

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def noise(name: str) -> torch.Tensor:
    return torch.randn(RUN.truth[name]["param"].shape, generator=torch.Generator().manual_seed(77))


def other_masters(place: Path) -> Path:
    return RUN.save(place, change={f"{n}/param": noise(n) for n in RUN.shapes()})


def one_other_master(place: Path) -> Path:
    """Shifted states, and the masters of one parameter of another save."""
    return RUN.save(place, change={f"{FC1}/param": noise(FC1)})


def wrong_bucket_size(place: Path) -> Path:
    return replace(RUN, said={"ddp_bucket_size": 1700}).save(place)


@pytest.mark.parametrize("make", [other_masters, one_other_master, wrong_bucket_size])
def test_masters_that_no_shift_explains_are_not_repaired(make: Any, tmp_path: Path) -> None:
    source = make(tmp_path / "run")
    for options in ({}, REPAIR):
        error = refused(source, tmp_path / "refused", **options)
        assert error.code == "checkpoint.damaged"
        assert "not the states that Megatron-core shifts" in error.message
        assert "--damaged drop-optimizer" in (error.fix or "")
        assert "--damaged repair" not in (error.fix or "")
    result = reshard.convert(source, tmp_path / "w", to="safetensors", progress=False, damaged="drop-optimizer")
    assert not any("nowhere" in one.reason for one in result.not_carried)


def test_one_wrong_element_of_a_repaired_master_is_found(tmp_path: Path) -> None:
    """A few elements choose the layout; every master is compared before anything is written."""
    parts = RUN.cut_out("param", right=False)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    slices = torch.cat([parts[name][0], parts[name][1]], dim=1)
    moments = torch.cat([RUN.cut_out("exp_avg", right=False)[name][rank] for rank in (0, 1)], dim=1)
    where = tuple((moments.reshape(-1) > 0).reshape(moments.shape).nonzero()[-1].tolist())
    slices[where] += 1.0
    error = refused(RUN.save(tmp_path / "run", change={f"{name}/param": slices}), tmp_path / "refused", **REPAIR)
    assert error.code == "checkpoint.damaged"
    assert len(error.details["parameters"]) == 1
    assert "1 differs" in error.message
    assert "not the states that Megatron-core shifts" in error.message


def test_masters_that_fit_every_layout_choose_none(tmp_path: Path) -> None:
    """Norms before or behind the matrix that follows: all masters are ones, and either order explains the file."""
    run = ShiftedRun(hidden=64, layers=1, bucket=64, flat=True, said={"transformer_impl": None})
    source = run.save(tmp_path / "run")
    error = refused(source, tmp_path / "refused", **REPAIR)
    assert error.code == "checkpoint.damaged"
    assert "2 layouts of the buffer" in error.message


def test_arguments_that_say_no_layout_are_refused(tmp_path: Path) -> None:
    source = replace(RUN, said={"tensor_model_parallel_size": None}).save(tmp_path / "run")
    error = refused(source, tmp_path / "refused", **REPAIR)
    assert "do not say its tensor and pipeline parallelism" in error.message
    error = refused(source, tmp_path / "refused")
    assert "the buffers of the run are not known" in error.message
    assert "--damaged drop-optimizer" in (error.fix or "")


def test_lost_moments_are_zeros_only_if_the_request_says_so(tmp_path: Path) -> None:
    source = RUN.save(tmp_path / "run")
    error = refused(source, tmp_path / "refused", damaged="repair")
    assert isinstance(error, RequestError)
    assert (error.code, "--damaged repair-with-zeros" in (error.fix or "")) == ("request.unsatisfiable", True)


def test_renamed_checkpoints_are_told_the_same(tmp_path: Path) -> None:
    source = replace(RUN, said={"num_attention_heads": 10, "num_query_groups": 10}).save(tmp_path / "run")
    with pytest.raises(SourceError) as caught:
        reshard.convert(source, tmp_path / "hf", to="safetensors", names="hf", hf_rules="llama", progress=False)
    assert "--damaged repair" in (caught.value.fix or "")


def test_states_that_were_saved_in_buckets_are_not_touched(tmp_path: Path) -> None:
    run = MegatronRun(bucket=300)
    source = run.save_torch_dist(tmp_path / "run")
    convert(source, tmp_path / "dcp", **REPAIR)
    wanted = run.expected()
    assert all(torch.equal(v, wanted[k]) for k, v in read(tmp_path / "dcp").items())
