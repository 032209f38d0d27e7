"""The image, made by the Dockerfile's own steps in a scratch root: as its user it converts, serves and works."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from house import scratch_root
from house.images import DOCKERFILE, command_of, compose, environment_of, example_settings, lineage
from house.repository import ROOT
from house.waiting import PATIENCE_S
from servers.process import ServerProcess, free_port
from servers.stack import end_tree

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
CHECKPOINT = ROOT / "tests" / "data" / "zero2_tiny"
TOKEN = "token-of-the-image-tests"


@dataclass
class Image:
    """A root with what a stage of the Dockerfile put there, and a folder that containers share as `/data`."""

    target: str
    root: scratch_root.Root
    data: Path

    def argv(self, *command: str, **settings: str) -> list[str]:
        """A container's command line: the image's entry point with these arguments."""
        env = {**environment_of(DOCKERFILE, self.target), **settings}
        user = next(stage.last("USER") for stage in reversed(lineage(DOCKERFILE, self.target)) if stage.last("USER"))
        return self.root.as_container(user, command_of(DOCKERFILE, self.target, list(command)), data=self.data, env=env)

    def run(self, *command: str, **settings: str) -> str:
        """The stdout of a command that must succeed."""
        done = subprocess.run(self.argv(*command, **settings), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    if os.geteuid() != 0 or not scratch_root.can_mount():
        pytest.skip("needs root, and mounts in a namespace")
    directory = tmp_path_factory.mktemp("roots")
    yield directory
    # Gigabytes, which pytest would keep for three runs.
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(params=["cpu", "gpu"])
def image(request: pytest.FixtureRequest, built: Path, tmp_path: Path) -> Image:
    if request.param == "gpu" and not os.environ.get("RESHARD_TRY_GPU_IMAGE"):
        pytest.skip("fetches 5.6 GB of CUDA libraries, by their digests: set RESHARD_TRY_GPU_IMAGE=1")
    root = scratch_root.build(DOCKERFILE, request.param, built)
    # Folders on the way that only root may enter would stop the image's user; a container's are its own.
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    data = tmp_path / "data"
    data.mkdir()
    shutil.copytree(CHECKPOINT, data / "run1")
    data.chmod(0o777)
    return Image(request.param, root, data)


def test_it_converts_as_its_user(image: Image) -> None:
    assert image.run("--version").startswith("reshard ")
    for number, options in enumerate((["--to", "universal"], ["--to", "safetensors", "--dtype", "bf16"])):
        target = f"/data/out{number}"
        assert image.run("convert", "/data/run1", target, *options) == target
        image.run("verify", target)
        (made,) = {path.stat().st_uid for path in (image.data / f"out{number}").rglob("*")}
        assert made == 10001
    # As compose and Kubernetes run it: nothing but /tmp and volumes can be written to.
    done = subprocess.run(image.argv("convert", "/data/run1", "/opt/out", "--to", "universal"), capture_output=True)
    assert done.returncode != 0
    assert not (image.root.path / "opt" / "out").exists()


@pytest.fixture
def service(image: Image, redis: str) -> Generator[tuple[Image, dict[str, str]]]:
    """The API and the worker of the compose file, each in a container of its own."""
    services = compose(example_settings())["services"]
    port = free_port()
    settings = {
        "RESHARD_DATABASE_URL": "sqlite:////data/jobs.db",
        "RESHARD_BROKER_URL": f"{redis[:-2]}/9",
        "RESHARD_ROOTS": "/data",
        "RESHARD_TOKEN": TOKEN,
    }
    at = {"RESHARD_URL": f"http://127.0.0.1:{port}", "RESHARD_TOKEN": TOKEN}
    commands = {"api": list(services["api"]["command"]), "worker": list(services["worker"]["command"])}
    commands["api"][commands["api"].index("--port") + 1] = str(port)
    with ExitStack() as stack:
        for name, command in commands.items():
            log = image.data.parent / f"{name}.log"
            process = ServerProcess(image.argv(*command, **settings), env=os.environ, log=log)
            stack.callback(end_tree, process)
            word = "startup complete" if name == "api" else " ready."
            process.wait_until(lambda log=log, word=word: word in log.read_text(errors="replace"), timeout_s=PATIENCE_S)
        yield image, at


def test_it_serves_and_works_as_its_user(service: tuple[Image, dict[str, str]]) -> None:
    image, at = service
    began = time.monotonic()
    options = ("--to", "safetensors", "--dtype", "bf16", "--wait")
    assert image.run("submit", "/data/run1", "/data/by_job", *options, **at) == "/data/by_job"
    assert time.monotonic() - began < 120
    image.run("verify", "/data/by_job")
    assert {path.stat().st_uid for path in (image.data / "by_job").rglob("*")} == {10001}
