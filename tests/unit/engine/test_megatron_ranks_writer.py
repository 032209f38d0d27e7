"""Files for one layout of Megatron-core: those that `MegatronRun` saves in that layout, whatever the source's was."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import reshard
from house.megatron_runs import EMBEDDING, MegatronRun
from reshard.errors import RequestError

SAID = {"accumulate_allreduce_grads_in_fp32": True}
SAVES: dict[str, Callable[[MegatronRun, Path], Path]] = {
    "legacy": MegatronRun.save_legacy,
    "torch_dist": MegatronRun.save_torch_dist,
}
PAIRS = {
    "tensor 2 to one rank": (MegatronRun(tensor=2), MegatronRun(data=1)),
    "to tensor 2, pipeline 2, virtual": (MegatronRun(), MegatronRun(tensor=2, pipeline=2, chunks=2)),
    "virtual to pipeline 4": (MegatronRun(pipeline=2, chunks=2), MegatronRun(pipeline=4, data=3)),
    "tied, to pipeline 2": (MegatronRun(tied=True, tensor=2), MegatronRun(tied=True, pipeline=2, data=4)),
    "tied, small buckets": (
        MegatronRun(tied=True, pipeline=2, tensor=2),
        MegatronRun(tied=True, pipeline=2, chunks=2, bucket=200),
    ),
    "buckets": (MegatronRun(bucket=700), MegatronRun(bucket=300, tensor=2, data=3)),
    "padded vocabulary": (MegatronRun(vocabulary=11, tensor=2), MegatronRun(vocabulary=11)),
    "experts apart": (
        MegatronRun(experts=4, layers=2, tensor=2),
        MegatronRun(experts=4, layers=2, expert_ranks=2, bucket=600, data=4),
    ),
    "experts together": (
        MegatronRun(experts=4, expert_ranks=2, pipeline=2, layers=2),
        MegatronRun(experts=4, layers=2, tensor=2),
    ),
    "experts of four ranks": (
        MegatronRun(experts=4, expert_ranks=2, layers=2),
        MegatronRun(experts=4, expert_ranks=4, layers=2, data=4, pipeline=2),
    ),
}


@pytest.fixture(autouse=True)
def _gaps_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gaps between parameters are written as zeros, whatever memory held there."""
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, _value, **options: full(size, 0.0, **options))


def convert(source: Path, target: Path, run: MegatronRun, said: dict[str, Any] | None = None, **options: Any) -> None:
    layout: dict[str, Any] = {
        "tp": run.tensor, "pp": run.pipeline, "dp": run.data, "ep": run.expert_ranks,
        "vocab_divisor": run.rows // run.tensor,
    }  # fmt: skip
    layout |= {"virtual_pipeline": run.chunks} if run.chunks > 1 else {}
    bucket = {"overlap_grad_reduce": run.bucket is not None, "ddp_bucket_size": run.bucket}
    args = target.parent / f"{target.name}.json"
    args.write_text(json.dumps({**SAID, **bucket, **(said or {})}))
    reshard.convert(source, target, to="megatron", megatron_args=args, progress=False, **{**layout, **options})


def unequal(one: Any, other: Any, path: str = "") -> list[str]:
    """The places where two values differ. Only in models the order of keys counts."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        ordered = re.fullmatch(r"model\d*", path.rpartition("/")[2])
        if (list(one) if ordered else set(one)) != (list(other) if ordered else set(other)):
            return [f"{path}: {sorted(map(str, {*one} ^ {*other})) or 'order'}"]
        return [place for key in one for place in unequal(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [p for at, pair in enumerate(zip(one, other, strict=True)) for p in unequal(*pair, f"{path}[{at}]")]
    return [] if one == other else [f"{path}: {one} and {other}"]


def rank_file(path: Path) -> Any:
    found = torch.load(path, weights_only=False)
    if path.name == "model_optim_rng.pt":
        args = vars(found.pop("args"))
        found |= {k: args[k] for k in MegatronRun().args().__dict__}
        for key in [k for k in found if k.startswith("model")]:
            found[key] = {k: v for k, v in found[key].items() if not k.endswith("_extra_state")}
    return found


def compared(saved: Path, found: Path) -> bool:
    """True if our own readers find the same state. Param groups of experts are others with expert parallelism."""
    kinds = {(d.kind.value, d.state) for d in reshard.diff(saved, found).differences}
    return kinds <= {("hyper-parameter", "is_expert_parallel")}


@pytest.mark.parametrize(("name", "kind"), [*zip(PAIRS, cycle(SAVES), strict=False)])
def test_directories_are_those_of_the_run(name: str, kind: str, tmp_path: Path) -> None:
    source, run = PAIRS[name]
    saved, wanted = SAVES[kind](source, tmp_path / "source"), run.save_legacy(tmp_path / "wanted")
    found = tmp_path / "iter_0000007"
    convert(saved, found, run, ckpt_format="torch", pointer=True)
    files = sorted(p.relative_to(wanted) for p in wanted.rglob("*.pt"))
    assert sorted(p.relative_to(found) for p in found.rglob("*.pt")) == files
    for file in files:
        assert unequal(rank_file(wanted / file), rank_file(found / file), f"/{file}") == []
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert compared(saved, found)


def chunks_of(folder: Path) -> dict[str, Any]:
    """All tensors' chunks and the optimizer's objects, by key and place."""
    metadata = FileSystemReader(str(folder)).read_metadata()
    found: dict[str, Any] = {}
    for index, place in (metadata.storage_data or {}).items():
        if index.offset is None and ".distributed." not in index.fqn:
            continue
        data = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        where = "" if index.offset is None else str(tuple(index.offset))
        found[f"{index.fqn} {where}"] = torch.load(io.BytesIO(data), weights_only=False)
    sizes = {k: tuple(e.size) for k, e in metadata.state_dict_metadata.items() if hasattr(e, "size")}
    return found | {"sizes": sizes}


@pytest.mark.parametrize(("name", "kind"), [*zip(PAIRS, cycle(reversed(SAVES)), strict=False)])
def test_buckets_are_those_of_the_run(name: str, kind: str, tmp_path: Path) -> None:
    source, run = PAIRS[name]
    saved, wanted = SAVES[kind](source, tmp_path / "source"), run.save_torch_dist(tmp_path / "wanted")
    found = tmp_path / "iter_0000007"
    convert(saved, found, run, optimizer_sharding="dp_reshardable")
    assert unequal(chunks_of(wanted), chunks_of(found)) == []
    common = torch.load(found / "common.pt", weights_only=False)
    kinds = [o["param_state_sharding_type"] for o in nested(common["optimizer"])]
    assert kinds == ["dp_reshardable"] * len(run.groups())
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "dp_reshardable"
    assert compared(saved, found)


def nested(optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
    """The dicts of chained optimizers, or the only one."""
    return [optimizer[k] for k in sorted(optimizer)] if 0 in optimizer else [optimizer]


# What is refused.


@pytest.mark.parametrize(
    ("options", "said", "text"),
    [
        ({"dp": None}, {}, "need the data-parallel ranks"),
        ({"virtual_pipeline": 2}, {}, "there is one pipeline stage"),
        ({}, {"context_parallel_size": 3}, "the arguments say 3 of the latter"),
        ({"pp": 3}, {}, "4 layers do not divide by 3 stages"),
        ({"tp": 3}, {}, "over 3 ranks: 10 does not divide by 3"),
        ({}, {"accumulate_allreduce_grads_in_fp32": None}, "of which type gradients are"),
        ({}, {"overlap_grad_reduce": None, "ddp_bucket_size": 300}, "at how many elements buckets close"),
        ({}, {"transformer_impl": "inference_optimized"}, "transformer_impl is inference_optimized"),
        ({"ep": 2}, {}, "no experts"),
        ({"dtype": "bf16"}, {}, "--dtype"),
    ],
)
@pytest.mark.parametrize("form", [{"ckpt_format": "torch"}, {"optimizer_sharding": "dp_reshardable"}])
def test_what_nothing_says_is_refused(
    form: dict[str, Any], options: dict[str, Any], said: dict[str, Any], text: str, tmp_path: Path
) -> None:
    run = MegatronRun(vocabulary=12, rows=12)
    saved = run.save_legacy(tmp_path / "source")
    with pytest.raises(RequestError, match=text):
        convert(saved, tmp_path / "iter_0000007", run, said, **{**form, "vocab_divisor": 1, **options})
    assert not (tmp_path / "iter_0000007").exists()


def test_states_without_a_place_in_directories_are_refused(tmp_path: Path) -> None:
    """Vectors hold masters and the moments of Adam; buckets of `dp_reshardable` hold whatever there is."""
    run = MegatronRun()
    saved = run.save_torch_dist(tmp_path / "source")
    convert(saved, tmp_path / "buckets", run, optimizer_sharding="dp_reshardable")
    metadata = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(metadata.replace(b".exp_avg_sq", b".exp_avg_ab"))
    convert(saved, tmp_path / "others", run, optimizer_sharding="dp_reshardable")
    with pytest.raises(RequestError, match=r"exp_avg_ab, and distrib_optim.pt has a place for"):
        convert(saved, tmp_path / "iter_0000007", run, ckpt_format="torch")


@pytest.mark.parametrize("form", [{"ckpt_format": "torch"}, {"optimizer_sharding": "dp_reshardable"}])
def test_weights_without_an_optimizer(form: dict[str, Any], tmp_path: Path) -> None:
    run = MegatronRun(tensor=2)
    saved = run.save_legacy(tmp_path / "source")
    for folder in saved.iterdir():
        (folder / "distrib_optim.pt").unlink()
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        torch.save({k: v for k, v in state.items() if k != "optimizer"}, folder / "model_optim_rng.pt")
    found = tmp_path / "iter_0000007"
    convert(saved, found, replace(run, tensor=1, pipeline=2), **form)
    assert not [*found.rglob("distrib_optim.pt")]
    assert reshard.diff(saved, found).equal
    assert reshard.verify(found).ok


@pytest.mark.parametrize(
    "run",
    [
        MegatronRun(tensor=2),
        MegatronRun(pipeline=2, chunks=2, tied=True),
        MegatronRun(experts=4, layers=2, expert_ranks=2),
    ],
)
def test_a_plain_optimizer_is_numbered_by_its_groups(run: MegatronRun, tmp_path: Path) -> None:
    source = replace(run, tensor=1, pipeline=1, chunks=1, expert_ranks=1)
    saved, found = source.save_torch_dist(tmp_path / "source"), tmp_path / "iter_0000007"
    convert(saved, found, run, ckpt_format="torch", optimizer_sharding="none")
    assert not [*found.rglob("distrib_optim.pt")]
    assert compared(saved, found)
    for folder in found.glob("mp_rank_*"):
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        assert state["args"].use_distributed_optimizer is False
        rank, *more = map(int, folder.name.split("_")[2:])
        stage, expert = (*(more if run.pipeline > 1 else [0]), *(more if run.expert_ranks > 1 else [0]))
        optimizers = state["optimizer"] if run.expert_ranks > 1 else [state["optimizer"]]
        for kind, optimizer in enumerate(optimizers):
            names = [n for chunk in range(run.chunks) for n, _ in run.held(stage, chunk, expert)]
            mine = [n for n in names if (run.expert_ranks > 1 and ".experts." in n) == (kind == 1)]
            groups = [[n for n in mine if "layernorm" not in n], [n for n in mine if "layernorm" in n]]
            inner = optimizer["optimizer"]
            assert [g["wd_mult"] for g in inner["param_groups"]] == [1.0, 0.0][: len(inner["param_groups"])]
            at = 0
            for group, held, masters in zip(
                inner["param_groups"], groups, optimizer["fp32_from_fp16_params"], strict=kind == 0
            ):
                assert group["params"] == [*range(at, at + len(held))]
                for name, master in zip(held, masters, strict=True):
                    assert torch.equal(master, run.part(name, "param", rank))
                    assert torch.equal(inner["state"][at]["exp_avg_sq"], run.part(name, "exp_avg_sq", rank))
                    at += 1
            assert len(inner["state"]) == at


def test_the_loss_scale_goes_along(tmp_path: Path) -> None:
    """In directories it is beside the groups, in `dp_reshardable` an object of each rank."""
    run = MegatronRun(tensor=2)
    saved = run.save_legacy(tmp_path / "source")
    scaler = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    for folder in saved.iterdir():
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        state["optimizer"]["grad_scaler"] = scaler
        torch.save(state, folder / "model_optim_rng.pt")
    buckets, found = tmp_path / "buckets", tmp_path / "iter_0000007"
    convert(saved, buckets, replace(run, tensor=1, pipeline=2), optimizer_sharding="dp_reshardable")
    objects = {k: v for k, v in chunks_of(buckets).items() if "grad_scaler" in k}
    assert [*objects] == [f"optimizer.distributed.dp_group_idx_{i}.grad_scaler/shard_0_1 " for i in range(2)]
    assert all(unequal(value, [scaler]) == [] for value in objects.values())
    convert(buckets, found, replace(run, tensor=1, pipeline=2), ckpt_format="torch")
    for folder in found.glob("mp_rank_*"):
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        assert unequal(state["optimizer"]["grad_scaler"], scaler) == []


def test_padding_rows_are_those_of_the_target(tmp_path: Path) -> None:
    """The source's rows of padding stay as far as the target has rows; more begin as zeros."""
    run = MegatronRun(vocabulary=9, rows=12)
    saved = run.save_legacy(tmp_path / "source")
    truth = run.truth[EMBEDDING]["param"]
    for rows in (9, 10, 14):
        found = tmp_path / f"rows{rows}"
        convert(saved, found, replace(run, rows=rows), ckpt_format="torch")
        state = torch.load(found / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
        weight = state["model"][EMBEDDING]
        assert state["args"].padded_vocab_size == rows
        wanted = torch.zeros(rows, run.hidden)
        wanted[: min(rows, 12)] = truth[:rows]
        assert torch.equal(weight, wanted.to(torch.bfloat16))
