"""`reshard ensure` on several nodes: real processes with a launcher's variables, on a directory and on an S3 server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import write_zero_checkpoint

import reshard
from house.launchers import without_launchers
from house.waiting import wait_until
from reshard.engine import load_engine
from reshard_engine.integrity.manifest import MANIFEST_NAME
from servers.s3 import S3Server

PARAMETERS = [(f"layer.{n}.weight", (64, 257)) for n in range(24)]
UNITS_BYTES = 64 << 10
RANK = """
import json, os, sys, time
from reshard.cli.main import main
from reshard.ensuring import call, converters, together
from reshard.engine import load_engine

log, pause_s = os.environ["TEST_LOG"], float(os.environ["TEST_PAUSE_S"])
together.LATE_S = float(os.environ.get("TEST_LATE_S", together.LATE_S))
engine = load_engine()

def tell(**facts):
    with open(log, "a") as file:
        file.write(json.dumps({"rank": os.environ.get("RANK"), **facts}) + "\\n")

class Slow:
    inspect = staticmethod(engine.inspect)

    def convert(self, request, *, work=None, on_progress=None, should_stop=None):
        def slowly():
            tell(works=True)
            time.sleep(pause_s)
            return should_stop()
        request = request.model_copy(update={"part_bytes": UNITS_BYTES, "threads": 1})
        tell(begins=True, together=work is not None)
        result = engine.convert(request, work=work, on_progress=on_progress, should_stop=slowly)
        tell(already_done=result.already_done)
        return result

class Told(call.Election):
    def claim(self):
        tell(waits=True)
        return super().claim()

converters.load_engine, call.Election = Slow, Told
sys.argv[1:1] = ["ensure"]
sys.exit(main())
""".replace("UNITS_BYTES", str(UNITS_BYTES))


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def none_left() -> Generator[None]:
    yield
    for process in STARTED:
        process.kill()
        process.communicate()
    STARTED.clear()


@dataclass
class Launch:
    """Two nodes of two processes each, as torchrun tells them."""

    directory: Path
    words: tuple[str, ...]
    more: Mapping[str, str]

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def start(self, rank: int, pause_s: float = 0.05) -> subprocess.Popen[str]:
        told = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
        told |= {"GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 2}
        inherited = without_launchers()
        test = {"TEST_LOG": str(self.log), "TEST_PAUSE_S": f"{pause_s}", "RESHARD_LEASE_S": "2"}
        env = {**inherited, **test, **{n: str(v) for n, v in told.items()}, **self.more}
        argv = [sys.executable, "-c", RANK, *self.words, "--json", "--quiet"]
        process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        STARTED.append(process)
        return process

    def told(self) -> list[dict[str, object]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]

    def those(self, fact: str) -> set[str]:
        """The ranks that told a fact."""
        return {str(t["rank"]) for t in self.told() if fact in t}

    def begun(self) -> set[str]:
        """The ranks that convert together."""
        return {str(t["rank"]) for t in self.told() if t.get("together")}


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Outcome and path of a rank that ended well."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = json.loads(out)
    return found["outcome"], found["path"]


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but records, and manifests, which hold times."""
    files = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    other = (MANIFEST_NAME, ".json")
    return {name: path.read_bytes() for name, path in files.items() if not name.endswith(other)}


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """A ZeRO-2 checkpoint of two ranks with 5 MB."""
    write_zero_checkpoint(tmp_path / "run", PARAMETERS, stage=2, ranks=2)
    return tmp_path / "run"


@pytest.fixture
def launch(save: Path, tmp_path: Path) -> Launch:
    return Launch(tmp_path, (str(save), "--workers", "nodes"), {})


@pytest.fixture
def expected(save: Path, tmp_path: Path, launch: Launch) -> dict[str, bytes]:
    """The result of one process."""
    del launch
    return contents(Path(reshard.ensure(save, dp=4, out=tmp_path / "alone", workers="1")))


def left_over(save: Path) -> list[str]:
    folder = save / ".reshard"
    return [p.name for p in folder.rglob("*") if p.suffix in {".claim", ".helper", ".shared"} or ".reshard-" in p.name]


def test_one_process_of_each_node_converts(launch: Launch, expected: dict[str, bytes], save: Path) -> None:
    found = [ended(process) for process in [launch.start(rank) for rank in range(4)]]
    outcomes, paths = zip(*found, strict=True)
    assert sorted(outcomes) == ["converted", "earlier", "earlier", "earlier"]
    assert len(set(paths)) == 1
    nodes = {int(rank) // 2 for rank in launch.begun()}
    assert nodes == {0, 1}
    assert len(launch.begun()) == 2
    assert contents(Path(paths[0])) == expected
    assert load_engine().verify(str(Path(paths[0]) / "global_step7")).ok
    assert left_over(save) == []


@pytest.mark.parametrize("killed", ["owner", pytest.param("helper", marks=pytest.mark.full)])
def test_a_killed_process_costs_nothing(killed: str, launch: Launch, expected: dict[str, bytes], save: Path) -> None:
    # Whoever is killed still has work to do then, however slow this machine is.
    first = launch.start(0, 60.0 if killed == "owner" else 0.05)
    wait_until(lambda: launch.begun() == {"0"})
    others = {rank: launch.start(rank, 60.0 if killed == "helper" and rank == 2 else 0.05) for rank in (1, 2)}
    wait_until(lambda: launch.begun() == {"0", "2"})
    time.sleep(0.3)
    victim = first if killed == "owner" else others[2]
    assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    left = [p for p in (first, *others.values()) if p is not victim]
    # One process of the other node comes late, while the rest work.
    found = [ended(process) for process in [*left, launch.start(3)]]
    assert len({path for _, path in found}) == 1
    assert contents(Path(found[0][1])) == expected
    assert left_over(save) == []


def test_every_rank_tells_why_the_conversion_failed(launch: Launch, save: Path) -> None:
    largest = max(save.rglob("*optim_states.pt"), key=lambda p: p.stat().st_size)
    processes = [launch.start(rank, 1.5) for rank in (0, 2, 3)]
    wait_until(lambda: launch.those("waits") == {"0", "2", "3"} and len(launch.those("works")) == 2)
    # The source changes under those that read it, and all have seen it as it was.
    os.utime(largest, (1, 1))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode for process in processes), (errors, launch.told())
    assert all("source.changed" in error for error in errors), errors
    # What was written is kept for a later call; no claim and no invitation is.
    assert [name for name in left_over(save) if ".reshard-" not in name] == []


def test_nodes_share_a_target_in_an_object_store(
    launch: Launch, expected: dict[str, bytes], save: Path, tmp_path: Path, s3: S3Server
) -> None:
    bucket = f"ensure-{os.getpid()}"
    s3.make_bucket(bucket)
    s3.upload(save, bucket, "run")
    words = (f"s3://{bucket}/run", "--out", f"s3://{bucket}/out", "--workers", "nodes")
    stored = Launch(tmp_path, words, {**s3.env(), "TEST_LATE_S": "3"})
    ranks = [stored.start(rank, 0.02) for rank in range(4)]
    wait_until(lambda: stored.begun() >= {"0", "2"})
    # The other process of its node goes on where the first one stopped.
    ranks[0].kill()
    ranks[0].communicate()
    assert {path for _, path in map(ended, ranks[1:])} == {f"s3://{bucket}/out"}
    written = s3.read_all(bucket, "out")
    assert {n: d for n, d in written.items() if not n.endswith(MANIFEST_NAME)} == expected
