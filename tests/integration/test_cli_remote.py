"""`reshard submit` and `reshard jobs` as processes against a real service."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import reshard
from house.repository import ROOT
from house.waiting import PATIENCE_S, wait_until
from reshard.choices import JobState
from reshard.models.jobs import Job, JobEvent
from servers.scripted import scripted, units_done
from servers.stack import Stack, client_of

RESHARD = (sys.executable, "-m", "reshard.cli.main")


@dataclass
class Shell:
    url: str
    stack: Stack
    directory: Path

    def env(self) -> dict[str, str]:
        return {**self.stack.env(), "RESHARD_URL": self.url}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [*RESHARD, *arguments]
        return subprocess.run(argv, env=self.env(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def source(self, **script: object) -> str:
        return scripted(**script)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Generator[Shell]:
    directory = tmp_path_factory.mktemp("cli")
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db")
    with stack.api() as url, stack.worker():
        yield Shell(url, stack, directory)


def test_submit_and_wait(shell: Shell) -> None:
    target = str(shell.directory / "out")
    done = shell.run("submit", shell.source(units=3), target, "--to", "universal", "--wait", "--label", "team=x")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{target}\n"
    assert "SUCCEEDED" in done.stderr
    listed = shell.run("jobs", "list", "-q", "--label", "team=x", "--state", "SUCCEEDED")
    job_id = listed.stdout.strip()
    assert job_id.startswith("job_")
    page = json.loads(shell.run("jobs", "list", "--json").stdout)
    assert page["schema_version"] == 1
    assert job_id in {job["id"] for job in page["jobs"]}
    shown = Job.model_validate_json(shell.run("jobs", "show", job_id, "--json").stdout)
    assert shown.state is JobState.SUCCEEDED
    assert shown.labels == {"team": "x"}
    assert f"target    {target} (universal)" in shell.run("jobs", "show", job_id).stdout
    lines = shell.run("jobs", "watch", job_id, "--json").stdout.splitlines()
    events = [JobEvent.model_validate_json(line) for line in lines]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert shell.run("jobs", "watch", job_id, "-q").stdout == f"{target}\n"


def test_the_jobs_end_is_the_exit_code(shell: Shell) -> None:
    target = str(shell.directory / "bad")
    failed = shell.run("submit", shell.source(fail="checkpoint.incomplete"), target, "--to", "universal", "--wait")
    assert failed.returncode == 3
    assert failed.stdout == ""
    assert "checkpoint.incomplete" in failed.stderr
    assert shell.run("submit", shell.source(refuse="storage.denied"), target, "--to", "universal").returncode == 4
    assert shell.run("submit", shell.source(), target, "--to", "cake").returncode == 2
    assert shell.run("jobs", "show", "job_none").returncode == 3


def test_the_list_says_what_a_job_was_how_far_it_is_and_why_it_failed(shell: Shell) -> None:
    with client_of(shell.url) as client:
        failed = client.submit(shell.source(fail="checkpoint.incomplete"), str(shell.directory / "x"), to="universal")
        slow = client.submit(shell.source(units=4000, unit_s=0.05), str(shell.directory / "y"), to="universal")
        # A plan that takes longer than a request may becomes a job that writes nothing.
        body = {"source": {"url": shell.source(plan_s=6, units=5)}, "target": "/planned", "to": "universal"}
        planned = httpx.post(f"{shell.url}/v1/plans", json=body, timeout=PATIENCE_S).json()["id"]
        wait_until(lambda: units_done(shell.directory / "y"), timeout_s=PATIENCE_S)
        client.wait(failed.id, timeout_s=PATIENCE_S)
        header, *lines = shell.run("jobs", "list").stdout.splitlines()
        client.cancel(slow.id)
        assert header.split() == ["ID", "STATE", "DONE", "CREATED", "WHAT"]
        rows = {line.split()[0]: line for line in lines}
        assert "  checkpoint.incomplete: " in rows[failed.id]
        assert re.search(r"  RUNNING +\d+%  ", rows[slow.id])
        assert "  plan only: " in rows[planned]
        assert client.wait(planned, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    shown = shell.run("jobs", "show", planned).stdout
    assert "kind      plan only: it writes nothing" in shown
    assert "result    planned, nothing written: 5 units" in shown
    watched = shell.run("jobs", "watch", planned)
    assert (watched.returncode, watched.stdout) == (0, "")
    assert "planned, nothing written" in watched.stderr


def test_one_key_is_one_job(shell: Shell) -> None:
    arguments = ("submit", shell.source(), str(shell.directory / "key"), "--to", "universal", "--idempotency-key", "k")
    assert shell.run(*arguments).stdout == shell.run(*arguments).stdout
    other = shell.run("submit", shell.source(units=9), str(shell.directory / "key"), *arguments[3:])
    assert other.returncode == 5


def test_timeouts_detach_and_cancel(shell: Shell) -> None:
    target = shell.directory / "long"
    late = shell.run(
        "submit", shell.source(units=4000, unit_s=0.05), str(target), "--to", "universal", "--wait-timeout", "0.7"
    )
    assert late.returncode == 124
    assert "re-attach: reshard jobs watch job_" in late.stderr
    with client_of(shell.url) as client:
        job = client.list(page_size=1).jobs[0]
        wait_until(lambda: units_done(target), timeout_s=PATIENCE_S)
        # Whoever runs the tests in the background may have told all of them to ignore it.
        argv = ["env", "--default-signal=INT", *RESHARD, "jobs", "watch", job.id]
        with subprocess.Popen(argv, env=shell.env(), stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stderr is not None
            assert "QUEUED" in watching.stderr.readline()
            watching.send_signal(signal.SIGINT)
            rest = watching.stderr.read()
        assert watching.returncode == 130
        assert f"detached: job {job.id} goes on" in rest
        assert f"reshard jobs watch {job.id}" in rest
        assert client.get(job.id).state is JobState.RUNNING
        assert shell.run("jobs", "cancel", job.id).stdout == f"{job.id} CANCELLING\n"
        ended = shell.run("jobs", "watch", job.id, "-q")
        assert ended.returncode == 130
        assert "job.cancelled" in ended.stderr
        assert not target.exists()


def test_names_and_short_ids_that_people_type(shell: Shell) -> None:
    source, target = shell.source(units=3), str(shell.directory / "typed")
    dry = shell.run("submit", source, target, "--to", "universal", "--dry-run")
    assert (dry.returncode, "units, peak buffers" in dry.stdout) == (0, True), dry.stderr
    whole = shell.run("submit", source, target, "--to", "universal", "-q").stdout.strip()
    short = whole.removeprefix("job_")[:8]
    waited = shell.run("jobs", "wait", short)
    assert (waited.returncode, waited.stdout) == (0, f"{target}\n"), waited.stderr
    assert "next: " in waited.stderr
    assert whole in shell.run("jobs", "ls", "-q").stdout.split()
    for words in (("inspect", short), ("show", f"job_{short}"), ("status", whole)):
        assert f"id        {whole}" in shell.run("jobs", *words).stdout
    events = [JobEvent.model_validate_json(line) for line in shell.run("jobs", "logs", short, "--json").stdout.split()]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert events[-1].state is JobState.SUCCEEDED
    lines = shell.run("jobs", "logs", "-f", short).stdout.splitlines()
    assert len(lines) == len(events)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  SUCCEEDED.*", lines[-1])
    other = shell.run("submit", source, str(shell.directory / "typed too"), "--to", "universal", "-q")
    assert other.returncode == 0, other.stderr
    several = shell.run("jobs", "show", "job")
    assert (several.returncode, "request.invalid" in several.stderr) == (2, True), several.stderr
    none = shell.run("jobs", "show", "zzzzzzzz")
    assert (none.returncode, "fix: reshard jobs list" in none.stderr) == (3, True)


# The functions of `import reshard` with `url=`: a real service does what they would do here.


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
        assert client.wait(job_id, timeout_s=PATIENCE_S).state is reshard.JobState.SUCCEEDED
    assert target.is_dir()


def test_a_wait_has_a_limit(service: Service) -> None:
    source, target = service.directory / "source", service.directory / "slow"
    with pytest.raises(reshard.JobError) as caught:
        reshard.convert(source, target, to="universal", url=service.url, token=TOKEN, wait_timeout=0)
    assert caught.value.code == "job.wait_timeout"
