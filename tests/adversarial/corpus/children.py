"""Each command in a process of its own, forked from a warm one, under limits and an audit hook.

`Children` starts `python children.py`, which imports the engine, uses it once on a good checkpoint (so that what
is imported late is there), and then forks for every job. A child reports what it ended with and what it did that
a reader of data never does: import, start, connect, evaluate, or touch a file outside of its own directory.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

TESTS = Path(__file__).parents[2]
SPARE_ADDRESS_BYTES = 1 << 30
DEADLINE_S = 60

# Events that end in running something, whatever their arguments.
FORBIDDEN = (
    "import", "exec", "compile", "code.__new__", "function.__new__", "marshal.", "pickle.", "ctypes.", "socket.",
    "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.system", "os.startfile", "os.kill", "pty.",
    "urllib.", "http.", "ftplib.", "smtplib.", "sqlite3.", "webbrowser.", "gc.", "builtins.input",
)  # fmt: skip
# Events whose first argument is a path.
PATHS = (
    "open", "os.open", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "os.mkfifo", "os.mknod", "os.listdir", "os.scandir", "shutil.",
)  # fmt: skip


_READABLE = ("/proc/sys/kernel/random/boot_id",)
"""What our own lock of a target reads."""


@dataclass(frozen=True)
class Job:
    """What a child is to do in a directory that holds `source`."""

    op: str
    """`inspect`, `convert`, or `unpickle` (Python's own, on the file `payload`)."""
    directory: str
    to: str = "universal"
    verify: str = "default"
    opaque: str = "refuse"
    target: str = "out"
    tamper: str = ""
    cpu_s: int = 10


@dataclass
class Outcome:
    """How a child ended."""

    code: str = "?"
    """`ok`, an error's code, or what else happened."""
    message: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_bytes: int = 0
    """Growth of the resident memory at its peak over the warm process."""
    events: list[str] = field(default_factory=list[str])
    """What a reader of data never does."""
    modules: list[str] = field(default_factory=list[str])
    """Modules that were imported."""


class Children:
    """A warm process and the children that it forks."""

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Children:
        # Fewer malloc arenas and BLAS threads: both reserve address space, which the children have little of.
        quiet = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **quiet, "PYTHONPATH": path, **self._environment},
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(30)
        process.stdout.close()

    def run(self, job: Job) -> Outcome:
        """What a fresh child made of the job."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        process.stdin.flush()
        return Outcome(**json.loads(process.stdout.readline()))


@cache
def _engine() -> Any:
    # Once, in the warm process: the entry point is looked up in the files of every installed package.
    from reshard.engine import load_engine

    return load_engine()


def _perform(job: Job) -> None:
    from reshard.errors import ReshardError
    from reshard.models.jobs import ConvertRequest
    from reshard.options import SourceSpec

    source = SourceSpec(url=str(Path(job.directory, "source")))
    if job.op == "unpickle":
        pickle.loads(Path(job.directory, "payload").read_bytes())
        return
    if job.op == "inspect":
        _engine().inspect(source)
        return

    def tamper(progress: Any) -> None:
        if job.tamper and progress.phase == "running":
            path = Path(job.directory, "source", job.tamper)
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(1, 1))

    request = ConvertRequest.model_validate(
        {
            "source": source,
            "target": str(Path(job.directory, job.target)),
            "to": job.to,
            "opaque": job.opaque,
            "verify": job.verify,
        }
    )
    try:
        _engine().convert(request, on_progress=tamper)
    except ReshardError as error:
        if not error.fix:
            raise AssertionError(f"{error.code} says no fix") from error
        raise


class _Watch:
    """An audit hook: it records, and lets everything happen."""

    def __init__(self, directory: str) -> None:
        self.events: list[str] = []
        self.on = True
        self._inside = os.path.realpath(directory)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or len(self.events) > 100:
            return
        if event.startswith(FORBIDDEN) or (event.startswith(PATHS) and self._outside(args)):
            self.events.append(f"{event} {str(args)[:200]}")

    def _outside(self, args: tuple[Any, ...]) -> bool:
        path = args[0] if args else None
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor: it was opened by name before
        full = os.path.realpath(os.fsdecode(path))
        if full in _READABLE:
            return False
        # Parents are looked at to find the checkpoint and to sync the target's name.
        return not (full + "/").startswith(self._inside + "/") and not (self._inside + "/").startswith(full + "/")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(key)


def _limit(job: Job, address_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (job.cpu_s, job.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _child(job: Job) -> Outcome:
    from reshard.errors import ReshardError

    outcome = Outcome()
    os.chdir(job.directory)
    spare = SPARE_ADDRESS_BYTES * (8 if job.cpu_s > 10 or job.op == "unpickle" else 1)
    _limit(job, _status_bytes("VmSize") + spare)
    before, base = set(sys.modules), _status_bytes("VmRSS")
    watch = _Watch(job.directory)
    started = time.monotonic()
    sys.addaudithook(watch)
    try:
        _perform(job)
        outcome.code = "ok"
    except ReshardError as error:
        outcome.code, outcome.message = error.code, str(error) + error.fix
    except BaseException as error:  # noqa: BLE001 - a child's outcome, whatever it is
        outcome.code, outcome.message = type(error).__name__, str(error)[:500]
    watch.on = False
    usage = resource.getrusage(resource.RUSAGE_SELF)
    outcome.cpu_s, outcome.wall_s = usage.ru_utime + usage.ru_stime, time.monotonic() - started
    outcome.rss_bytes = (usage.ru_maxrss << 10) - base
    outcome.events, outcome.modules = watch.events, sorted(set(sys.modules) - before)
    return outcome


def _forked(job: Job) -> Outcome:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.write(writer, json.dumps(asdict(_child(job))).encode())
        os._exit(0)
    os.close(writer)
    text = b""
    deadline = time.monotonic() + DEADLINE_S + job.cpu_s
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (block := os.read(reader, 1 << 16)):
            break
        text += block
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if status == 0 and text:
        return Outcome(**json.loads(text))
    return Outcome(code=f"ended with status {status}")


def _warm() -> None:
    from adversarial.corpus import carriers
    from reshard.errors import printable

    with tempfile.TemporaryDirectory() as directory:
        carriers.plain(Path(directory, "source"))
        carriers.raw(b"\x80\x02.")(Path(directory, "broken", "source"))
        _perform(Job("inspect", directory))
        _perform(Job("convert", directory, verify="full", target="verified"))
        for to in ("universal", "safetensors", "torch"):
            for opaque in ("refuse", "keep", "drop"):
                _perform(Job("convert", directory, to=to, opaque=opaque, target=f"{to}-{opaque}"))
        printable("\0")  # Python looks its codec up when it is first used
        _forked(Job("inspect", str(Path(directory, "broken"))))


def main() -> None:
    """Fork a child for each line of stdin."""
    if os.environ.get("CORPUS_TORCH"):
        pass  # the payloads that name it need it; the engine never does
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a payload prints must not end up among the answers
    _warm()
    gc.collect()
    gc.freeze()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(asdict(_forked(Job(**json.loads(line))))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
