"""`reshard.ensure` for files of FSDP's ranks in an object store: a real S3 server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor.placement_types import Shard

import reshard
from house.expected import raised
from house.saves import same
from laws.item_files import Items, save_items
from laws.rank_files import World, save_accelerate, save_verl_run, small_model
from reshard.engine import load_engine
from reshard.ensuring import call, converters
from reshard.errors import RequestError, SourceError, StorageError
from reshard.models.resume import RunLaunch
from reshard.options import SourceSpec
from servers.s3 import S3Server

TRACKER = "latest_checkpointed_iteration.txt"
MODELS = ("actor", "critic")
WORD = "the store is full"


pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_verl_run(tmp_path / "run")


@pytest.fixture
def stored(run: Path, s3: S3Server, bucket: str) -> str:
    s3.upload(run, bucket, "run")
    return f"s3://{bucket}/run"


def ranks_in(url: str | Path) -> int:
    return load_engine().inspect(SourceSpec(url=str(url))).world["dp"]


def versions(s3: S3Server, bucket: str, prefix: str) -> dict[str, Any]:
    """When each object below a prefix was written."""
    found = s3.client().list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]
    return {entry["Key"].removeprefix(f"{prefix}/"): entry["LastModified"] for entry in found}


class Watched:
    """The engine in this process; it notes what is in the place of the results before each of its writes."""

    def __init__(self, s3: S3Server, bucket: str, *, fail_at: str = "") -> None:
        self._s3, self._bucket, self._fail_at = s3, bucket, fail_at
        self.seen: list[tuple[str, set[str]]] = []

    def _note(self, url: str) -> None:
        there = self._s3.read_all(self._bucket, "out")
        self.seen.append((url.rpartition("/")[2], {n for n in there if n.endswith(("reshard.json", ".txt"))}))

    def inspect(self, source: SourceSpec, *, launch: RunLaunch) -> Any:
        return load_engine().inspect(source, launch=launch)

    def convert(self, request: Any, **hooks: Any) -> Any:
        self._note(request.target)
        if self._fail_at and request.target.endswith(self._fail_at):
            raise StorageError("storage.no_space", WORD)
        return load_engine().convert(request, **hooks)

    def put_text(self, url: str, text: str) -> None:
        self._note(url)
        load_engine().put_text(url, text)


def test_the_same_number_of_ranks_is_left_alone(stored: str, s3: S3Server, bucket: str) -> None:
    before = versions(s3, bucket, "run")
    for place in (stored, f"{stored}/global_step_3", f"{stored}/global_step_3/actor", f"{stored}/global_step_3/"):
        assert reshard.ensure(place, dp=2) == place
    assert reshard.ensure(stored, dp=2, tag="global_step_2") == stored
    assert versions(s3, bucket, "run") == before


@pytest.mark.parametrize("save", ["verl", "accelerate", "torch_checkpointing"])
def test_one_model_is_written_once(save: str, tmp_path: Path, s3: S3Server, bucket: str) -> None:
    local, two = tmp_path / "step-3", World((2,), ("fsdp",))
    if save == "verl":
        shutil.copytree(save_verl_run(tmp_path / "run") / "global_step_3" / "actor", local)
    elif save == "accelerate":
        save_accelerate(small_model(), local, World((2,), None))
    else:
        save_items(small_model((Shard(0),)), local, two, Items())
    s3.upload(local, bucket, "step-3")
    source, out = f"s3://{bucket}/step-3", f"s3://{bucket}/out"
    assert reshard.ensure(source, dp=2) == source
    assert raised(RequestError, reshard.ensure, source, dp=3).fix.startswith("say where the result goes: --out DIR")
    assert reshard.ensure(source, dp=3, out=out) == out
    assert (ranks_in(out), same(local, out)) == (3, True)
    first = versions(s3, bucket, "out")
    assert reshard.ensure(source, dp=3, out=out) == out
    assert versions(s3, bucket, "out") == first
    assert reshard.ensure(out, dp=3) == out
    assert raised(RequestError, reshard.ensure, source, dp=4, out=out).code == "request.target_exists"


def test_a_run_has_all_models_of_its_step_and_its_tracker_last(
    run: Path, stored: str, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that the tracker names, though a later one lies beside it."""
    s3.upload(run / "global_step_3", bucket, "run/global_step_7")
    out, watched = f"s3://{bucket}/out", Watched(s3, bucket)
    monkeypatch.setattr(converters, "load_engine", lambda: watched)
    assert reshard.ensure(stored, dp=3, out=out) == out
    whole = {f"global_step_3/{model}/reshard.json" for model in MODELS}
    assert [name for name, _ in watched.seen] == [*MODELS, TRACKER]
    assert watched.seen[-1][1] == whole
    written = s3.read_all(bucket, "out")
    assert {n for n in written if n.endswith(("reshard.json", ".txt"))} == whole | {TRACKER}
    assert written[TRACKER] == b"3"
    for model in MODELS:
        assert ranks_in(f"{out}/global_step_3/{model}") == 3
        assert same(run / "global_step_3" / model, f"{out}/global_step_3/{model}")
    first = versions(s3, bucket, "out")
    assert reshard.ensure(stored, dp=3, out=out) == out
    assert {n: t for n, t in versions(s3, bucket, "out").items() if n != TRACKER} == {
        n: t for n, t in first.items() if n != TRACKER
    }
    assert reshard.ensure(out, dp=3) == out


def test_a_result_without_all_its_models_has_no_tracker(
    stored: str, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://{bucket}/out"
    monkeypatch.setattr(converters, "load_engine", lambda: Watched(s3, bucket, fail_at="critic"))
    assert raised(StorageError, reshard.ensure, stored, dp=3, out=out).message == WORD
    assert TRACKER not in s3.read_all(bucket, "out")
    monkeypatch.undo()
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    first = versions(s3, bucket, "out")
    assert reshard.ensure(stored, dp=3, out=out) == out
    now = versions(s3, bucket, "out")
    assert TRACKER in now
    assert first.items() <= now.items(), "what was finished is not done again"


@pytest.mark.parametrize("here", [False, True])
def test_a_step_is_returned_as_a_step(here: bool, run: Path, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    """Into a store or a directory; with one model, and SkyRL's name of the tracker."""
    skyrl = tmp_path / "skyrl"
    shutil.copytree(run, skyrl, ignore=lambda _, names: [n for n in names if n == "critic"])
    (skyrl / TRACKER).rename(skyrl / "latest_ckpt_global_step.txt")
    s3.upload(skyrl, bucket, "run")
    out = str(tmp_path / "out") if here else f"s3://{bucket}/out"
    step = reshard.ensure(f"s3://{bucket}/run/global_step_2", dp=1, out=out)
    assert step == f"{out}/global_step_2"
    assert ranks_in(f"{step}/actor") == 1
    files = {p.name: p.read_bytes() for p in Path(out).glob("*.txt")} if here else s3.read_all(bucket, "out")
    assert {n: data for n, data in files.items() if n.endswith(".txt")} == {"latest_ckpt_global_step.txt": b"2"}
    assert reshard.ensure(f"s3://{bucket}/run", dp=1, tag="global_step_2", out=out) == out


def test_what_a_step_cannot_be_is_refused(stored: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--out" in raised(RequestError, reshard.ensure, stored, dp=3).fix
    error = raised(SourceError, reshard.ensure, stored, to="dcp", out=f"s3://{bucket}/out")
    assert (error.code, error.fix) == (
        "checkpoint.ambiguous",
        "--tag global_step_3/actor, or --tag global_step_3/critic",
    )
    assert raised(SourceError, reshard.ensure, stored, dp=3, tag="global_step_9").code == "source.not_found"

    class Service(converters.ServiceConverter):
        def __init__(self, *_: Any) -> None: ...

        def inspect(self, source: SourceSpec, launch: RunLaunch) -> Any:
            return load_engine().inspect(source, launch=launch)

    monkeypatch.setattr(call, "ServiceConverter", Service)
    options: dict[str, Any] = {"dp": 3, "out": f"s3://{bucket}/out", "url": "http://service"}
    refused = raised(RequestError, reshard.ensure, stored, **options)
    assert refused.fix == "convert here: unset RESHARD_URL; or name one model: --tag global_step_3/actor"
