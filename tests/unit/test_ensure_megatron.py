"""`reshard.ensure` for runs of Megatron-core: what loads as it is stays, all else is written once for every layout."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from house.expected import raised
from house.megatron_runs import MegatronRun
from house.promises import command
from house.saves import same, wanted
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.ensuring.call import Outcome, ensured, loader_of
from reshard.errors import RequestError, SourceError
from reshard.options import RunLayout, SourceSpec
from reshard_engine.storage.locations import serving
from reshard_engine.testing.stores import MemoryStore

LOCAL = {"transformer_impl": "local", "moe_grouped_gemm": False, "accumulate_allreduce_grads_in_fp32": True}
STEP, TRACKER = "iter_0000007", "latest_checkpointed_iteration.txt"


pytestmark = pytest.mark.usefixtures("no_launcher")


def buckets(root: Path, **options: Any) -> Path:
    """A run that was saved as `dp_reshardable`, at two tensor-parallel ranks and two stages unless told otherwise."""
    said: dict[str, Any] = {"tensor": 2, "pipeline": 2, "said": LOCAL, **options}
    MegatronRun(**said).save_torch_dist(root)
    (root / TRACKER).write_text("7")
    return root


def kind(place: str | Path) -> str:
    return load_engine().inspect(SourceSpec(url=str(place))).format


def asked(src: str | Path, **options: Any) -> Any:
    return ensured(src, wanted(**options, environ={}, loader=loader_of(src, None)))


def results(run: Path) -> list[str]:
    return sorted(p.name for p in (run / ".reshard").iterdir() if p.is_dir())


def test_buckets_stay_at_their_layout(tmp_path: Path) -> None:
    """No number of ranks is needed: buckets load on any number of data-parallel ranks."""
    run = buckets(tmp_path / "run")
    assert kind(run) == "megatron-torch-dist-dp-reshardable"
    sizes: list[dict[str, Any]] = [{}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 8}]
    for asks in sizes:
        assert reshard.ensure(run, **asks) == str(run)
        assert reshard.ensure(run / STEP, **asks) == str(run / STEP)
    assert results(run) == []


def test_another_layout_is_written_once_for_all(tmp_path: Path) -> None:
    run = buckets(tmp_path / "run")
    made = asked(run, tp=4, pp=1)
    assert made.outcome is Outcome.CONVERTED
    assert made.wanted is not None
    assert (made.wanted.to, made.wanted.layout) == (TargetFormat.MEGATRON, RunLayout(tp=4))
    assert made.wanted.asked == RunLayout()
    result = Path(made.path)
    assert result.parent == run / ".reshard"
    assert result.name.startswith(f"{STEP}-megatron-")
    assert {p.name for p in result.iterdir()} == {STEP, TRACKER}
    assert (result / TRACKER).read_text() == "7"
    assert kind(result) == "megatron-torch-dist"
    assert same(run, result)
    others: list[dict[str, Any]] = [{"tp": 4, "pp": 1}, {"tp": 1, "pp": 4, "dp": 2}, {"pp": 1}]
    for asks in others:
        again = asked(run, **asks)
        assert (again.outcome, again.path) == (Outcome.EARLIER, str(result))
        assert reshard.ensure(result, **asks) == str(result), "its files load at any layout"
    assert Path(reshard.ensure(run / STEP, tp=4)) == result / STEP
    assert results(run) == [result.name]


def test_a_newer_iteration_gets_a_result_of_its_own(tmp_path: Path) -> None:
    run = buckets(tmp_path / "run")
    first = reshard.ensure(run, tp=1)
    (run / STEP).rename(run / "iter_0000005")
    MegatronRun(tensor=2, pipeline=2, said=LOCAL, seed=4).save_torch_dist(run)
    second = reshard.ensure(run, tp=1)
    assert second != first
    assert same(run, second)
    older = Path(reshard.ensure(run, tp=1, tag="iter_0000005"))
    assert ((older / TRACKER).read_text(), (run / TRACKER).read_text()) == ("5", "7")
    assert same(first, older / "iter_0000005")


def test_a_result_without_its_tracker_is_not_returned(tmp_path: Path) -> None:
    run = buckets(tmp_path / "run")
    result = Path(reshard.ensure(run, tp=1))
    (result / TRACKER).unlink()
    assert asked(run, tp=1).outcome is Outcome.CONVERTED
    assert (result / TRACKER).read_text() == "7"


def test_directories_of_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    MegatronRun(tensor=2, said=LOCAL).save_legacy(run)
    assert reshard.ensure(run, tp=2, dp=4) == str(run)
    result = reshard.ensure(run, tp=1)
    assert kind(result) == "megatron-torch-dist"
    assert same(run, result)


def test_arguments_that_the_files_do_not_say(tmp_path: Path) -> None:
    """Keys of norms depend on one, which directories of ranks do not show."""
    run, file = tmp_path / "run", tmp_path / "args.json"
    MegatronRun(tensor=2, said=LOCAL | {"transformer_impl": None}).save_legacy(run)
    assert "--megatron-args FILE" in raised(RequestError, reshard.ensure, run, tp=1).fix
    said = '{"transformer_impl": "local"}'
    result = reshard.ensure(run, tp=1, megatron_args=said)
    assert kind(result) == "megatron-torch-dist"
    file.write_text(said)
    assert command("ensure", str(run), "--tp", "1", "--megatron-args", str(file))[1].strip() == result
    error = raised(RequestError, reshard.ensure, run, to="dcp", megatron_args=said)
    assert error.message == "--megatron-args is for runs of Megatron-core"


def test_experts_have_an_optimizer_of_their_own_with_several_ranks(tmp_path: Path) -> None:
    run = buckets(tmp_path / "run", tensor=1, pipeline=1, experts=4, expert_ranks=4, data=4)
    assert reshard.ensure(run) == reshard.ensure(run, ep=4) == str(run)
    two = Path(reshard.ensure(run, ep=2))
    assert two.name.startswith(f"{STEP}-megatron-ep2-")
    assert reshard.ensure(two, ep=4, tp=2) == reshard.ensure(two) == str(two)
    one = reshard.ensure(two, ep=1)
    assert reshard.ensure(one, pp=2) == one != str(two)
    assert reshard.ensure(one, ep=4) != one


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    """Its masters are not those of its weights."""
    run = tmp_path / "run"
    MegatronRun(tensor=2, said=LOCAL).save_legacy(run)
    file = run / STEP / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"]["decoder.layers.1.mlp.linear_fc2.weight"][3, 4] += 1
    torch.save(state, file)
    for _ in range(2):
        assert raised(SourceError, reshard.ensure, run, tp=1).code == "checkpoint.damaged"
    assert not list((run / ".reshard").rglob(TRACKER))


def test_what_is_refused(tmp_path: Path) -> None:
    run = buckets(tmp_path / "run")
    error = raised(RequestError, reshard.ensure, run, tp=1, zero_stage=2)
    assert error.message.startswith("--zero-stage: the source is of Megatron-core")
    assert raised(RequestError, reshard.ensure, run, ep=2).message == "--ep: the model has no experts"
    other = buckets(tmp_path / "other")
    error = raised(RequestError, reshard.ensure, run, tp=1, out=other)
    assert error.code == "request.target_exists"
    (run / STEP / ".metadata").unlink()
    assert raised(SourceError, reshard.ensure, run, tp=1).code in {"source.unknown_kind", "checkpoint.incomplete"}


class Noted(MemoryStore):
    """A store that notes what is written, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def put(self, path: str, data: Any, **options: Any) -> Any:
        self.written.append(path)
        return super().put(path, data, **options)


@pytest.fixture
def store() -> Iterator[Noted]:
    """An object store behind `mem://`."""
    made = Noted()
    with serving("mem", made):
        yield made


def test_runs_in_object_stores(tmp_path: Path, store: Noted) -> None:
    """The tracker is the last of the result's files; what is there is found again, and not written."""
    run = buckets(tmp_path / "run")
    store.load(run, "lab/run")
    store.written.clear()
    source, out = "mem://lab/run", "mem://lab/out"
    for place in (source, f"{source}/{STEP}"):
        assert reshard.ensure(place, tp=2, pp=2) == place
        assert raised(RequestError, reshard.ensure, place, tp=1).fix.startswith("say where the result goes: --out DIR")
    assert store.written == []
    assert reshard.ensure(source, tp=1, out=out) == out
    files = [p.removeprefix("lab/out/") for p in store.written if not p.startswith("lab/out/.")]
    assert files[-2:] == [f"{STEP}/reshard.json", TRACKER]
    there = store.snapshot("lab/out")
    assert there[f"lab/out/{TRACKER}"] == b"7"
    assert {p.split("/")[2] for p in there} == {STEP, TRACKER}, "no records are left"
    assert kind(out) == "megatron-torch-dist"
    assert same(run, out)
    sizes: list[dict[str, Any]] = [{"tp": 1}, {"tp": 1, "tag": STEP}]
    for asks in sizes:
        assert reshard.ensure(source, out=out, **asks) == out
    assert reshard.ensure(f"{source}/{STEP}", tp=1, out=out) == f"{out}/{STEP}"
    assert reshard.ensure(out, tp=4, pp=2) == out
    assert store.snapshot("lab/out") == there


def test_results_on_the_other_side(tmp_path: Path, store: Noted) -> None:
    """From a local directory into an object store, and the other way."""
    run = buckets(tmp_path / "run")
    assert reshard.ensure(run, tp=2, pp=2, out="mem://lab/up") == str(run)
    assert reshard.ensure(run, tp=1, out="mem://lab/up") == "mem://lab/up"
    assert same(run, "mem://lab/up")
    store.load(run, "lab/run")
    down = tmp_path / "down"
    for _ in range(2):
        assert reshard.ensure("mem://lab/run", tp=1, out=down) == str(down)
    assert ((down / TRACKER).read_text(), same(run, down)) == ("7", True)
    assert reshard.ensure(down, tp=4) == str(down)
    other = buckets(tmp_path / "other", seed=9)
    assert raised(RequestError, reshard.ensure, other, tp=1, out="mem://lab/up").code == "request.target_exists"


def test_an_iteration_that_no_tracker_names(tmp_path: Path, store: Noted) -> None:
    """The command of the error writes it under a name that one does."""
    store.load(buckets(tmp_path / "run") / STEP, "lab/mine")
    error = raised(RequestError, reshard.ensure, "mem://lab/mine", tp=1, out="mem://lab/out")
    assert error.fix == "reshard convert mem://lab/mine DST/iter_NNNNNNN --to megatron"
    line = error.fix.replace("DST/iter_NNNNNNN", str(tmp_path / "now" / STEP))
    assert command(*shlex.split(line)[1:])[0] == 0
    assert same(tmp_path / "run", tmp_path / "now")


def test_a_release(tmp_path: Path, store: Noted) -> None:
    """A tracker may say `release`, which is the directory's name, too."""
    run = tmp_path / "run"
    buckets(run)
    (run / STEP).rename(run / "release")
    (run / TRACKER).write_text("release")
    assert load_engine().inspect(SourceSpec(url=str(run))).tag == "release"
    for place in (run, run / "release"):
        assert reshard.ensure(place, tp=2, pp=2) == str(place)
    result = Path(reshard.ensure(run, tp=1))
    assert result.name.startswith("release-megatron-")
    assert ({p.name for p in result.iterdir()}, (result / TRACKER).read_text()) == ({"release", TRACKER}, "release")
    assert same(run, result)
    assert asked(run, tp=1, pp=2).outcome is Outcome.EARLIER
    assert Path(reshard.ensure(run / "release", tp=1)) == result / "release"
    store.load(run, "lab/run")
    assert reshard.ensure("mem://lab/run", tp=1, out="mem://lab/out") == "mem://lab/out"
    assert store.snapshot("lab/out")[f"lab/out/{TRACKER}"] == b"release"
    reshard.convert(run, tmp_path / "own" / "release", to="megatron", progress=False)
    assert (tmp_path / "own" / TRACKER).read_text() == "release"


def test_another_kind_of_run_gets_its_own_files(tmp_path: Path) -> None:
    run = buckets(tmp_path / "run")
    for place in (run, run / STEP):
        found = reshard.diff(run, reshard.ensure(place, to="dcp"), progress=False)
        assert [d.name for d in found.differences] == ["schedulers"], "which is Megatron-core's own"


def test_the_command_prints_the_path(tmp_path: Path) -> None:
    run = buckets(tmp_path / "run")
    code, said, told = command("ensure", str(run), "--tp", "4", "--pp", "1")
    assert (code, Path(said.strip()).parent) == (0, run / ".reshard"), told
    assert "ranks, from" not in told
    again = json.loads(command("ensure", str(run), "--tp", "4", "--pp", "1", "--json")[1])
    assert (again["outcome"], again["path"]) == ("earlier", said.strip())
