"""The functions of `import reshard` with `url=`: a real service does what they would do here."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

import reshard
from house.repository import ROOT
from servers.stack import Stack

DATA = ROOT / "tests" / "data" / "zero2_tiny"
TOKEN = "a-token-of-this-test"


@dataclass
class Service:
    url: str
    directory: Path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    directory = tmp_path_factory.mktemp("functions")
    shutil.copytree(DATA, directory / "source")
    extra = {"RESHARD_ANONYMOUS": "false", "RESHARD_TOKEN": TOKEN, "RESHARD_ROOTS": str(directory)}
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", scripted=False, extra=extra)
    with stack.api() as url, stack.worker():
        yield Service(url, directory)


def test_a_service_says_what_this_process_says(service: Service) -> None:
    source = service.directory / "source"
    remote = reshard.inspect(source, url=service.url, token=TOKEN)
    assert remote == reshard.inspect(source)
    # This process may not see what the service sees, so it draws nothing.
    assert "<svg" not in remote._repr_html_()
    plan = reshard.plan(source, service.directory / "planned", to="zero", dp=3, url=service.url, token=TOKEN)
    assert plan == reshard.plan(source, service.directory / "planned", to="zero", dp=3)


def test_a_service_converts_and_the_call_waits(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[reshard.Progress] = []
    monkeypatch.chdir(service.directory)
    # A relative path is one of this process; the service has another working directory.
    result = reshard.convert("source", "out", to="zero", dp=3, url=service.url, token=TOKEN, on_progress=seen.append)
    assert Path(result.target) == service.directory / "out"
    assert seen[-1].bytes_done == seen[-1].bytes_total > 0
    assert reshard.verify("out").ok
    assert reshard.diff("source", "out").equal
    with reshard.Client(service.url, TOKEN) as client:
        (job,) = client.list(states=(reshard.JobState.SUCCEEDED,)).jobs
    assert "out" in job._repr_html_()


def test_an_error_of_a_service_is_the_error(service: Service, tmp_path: Path) -> None:
    with pytest.raises(reshard.RequestError) as caught:
        reshard.convert(DATA, tmp_path / "out", to="universal", url=service.url, token=TOKEN)
    assert caught.value.code == "request.root_forbidden"
    with pytest.raises(reshard.RequestError) as caught:
        reshard.inspect(service.directory / "source", url=service.url, token="another")
    assert caught.value.code == "request.unauthorized"


def test_the_job_goes_on_when_its_caller_is_interrupted(service: Service) -> None:
    def interrupt(progress: reshard.Progress) -> None:
        raise KeyboardInterrupt

    source, target = service.directory / "source", service.directory / "left"
    with pytest.raises(KeyboardInterrupt) as caught:
        reshard.convert(source, target, to="universal", url=service.url, token=TOKEN, on_progress=interrupt)
    (note,) = caught.value.__notes__
    job_id = note.split(" ")[1]
    with reshard.Client(service.url, TOKEN) as client:
        assert client.wait(job_id, timeout_s=30).state is reshard.JobState.SUCCEEDED
    assert target.is_dir()


def test_a_wait_has_a_limit(service: Service) -> None:
    source, target = service.directory / "source", service.directory / "slow"
    with pytest.raises(reshard.JobError) as caught:
        reshard.convert(source, target, to="universal", url=service.url, token=TOKEN, wait_timeout=0)
    assert caught.value.code == "job.wait_timeout"
