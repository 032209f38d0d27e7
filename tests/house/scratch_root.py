"""The steps of a Dockerfile as plain commands into a scratch root: what a container engine would do, without one.

The base image `python:3.11-slim-bookworm` is stood in for by this host's system folders and Python, both read only and
where they are on this host. Needs root, and the right to mount in a namespace of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from house.images import Stage, environment_of, lineage, stages_of
from house.repository import ROOT

_ETC = (
    *("passwd", "group", "shadow", "gshadow", "login.defs", "default", "ld.so.cache", "nsswitch.conf", "resolv.conf"),
    *("hosts", "ssl", "alternatives", "pip.conf", "host.conf", "subuid", "subgid"),
)
_PYTHON = "/var/python"
"""Where the root has the name `python`, as the base image has it; some hosts call it `python3` only."""
_PASSED_ON = re.compile(r"(PIP_|https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY|SSL_|REQUESTS_CA)")


def can_mount() -> bool:
    """Whether this process may mount, in a namespace that ends with it."""
    test = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(test, capture_output=True).returncode == 0


@dataclass(frozen=True)
class Root:
    """A folder that becomes `/` of a command."""

    path: Path

    def argv(self, command: Sequence[str], *, cwd: str = "/", mounts: Sequence[str] = ()) -> list[str]:
        """A command line that runs a command in this root, as root and with the root writable.

        Args:
            command: What to run.
            cwd: Where.
            mounts: More lines of a shell that mount something; `$ROOT` is the root.
        """
        lines = ["set -e", f"ROOT={shlex.quote(str(self.path))}", *_system_mounts(), *mounts]
        lines.append(f"exec chroot $ROOT /usr/bin/env --chdir={shlex.quote(cwd)} {shlex.join(command)}")
        return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]

    def as_container(self, user: str, command: Sequence[str], *, data: Path, env: dict[str, str]) -> list[str]:
        """A command line like `docker run --read-only --tmpfs /tmp --cap-drop ALL`, with a folder at `/data`.

        Args:
            user: The number of the image's user.
            command: Entry point and arguments.
            data: The folder.
            env: The whole environment.
        """
        (self.path / "data").mkdir(exist_ok=True)
        group = next(line.split(":")[3] for line in self._etc_passwd() if line.split(":")[2] == user)
        mounts = [
            f"mount --bind {shlex.quote(str(data))} $ROOT/data",
            "mount -o remount,bind,ro $ROOT",
            "mount -t tmpfs -o mode=1777 none $ROOT/tmp",
        ]
        drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
        plain = [f"{name}={value}" for name, value in env.items()]
        whole = [*drop, "--bounding-set=-all", "--inh-caps=-all", "/usr/bin/env", "-i", *plain, *command]
        return self.argv(whole, cwd="/tmp", mounts=mounts)

    def _etc_passwd(self) -> list[str]:
        return (self.path / "etc" / "passwd").read_text().splitlines()


def build(dockerfile: Path, target: str, directory: Path) -> Root:
    """Run the steps of a stage and of those that it needs, each in a root of its own below `directory`."""
    path = directory / target
    if path.exists():
        return Root(path)
    stage = stages_of(dockerfile)[target]
    if stage.base in stages_of(dockerfile):
        before = build(dockerfile, stage.base, directory)
        subprocess.run(["cp", "-a", str(before.path), str(path)], check=True)
    else:
        assert stage.base.startswith("python:3.11-slim"), stage.base
        _make_base(path)
    _run_steps(dockerfile, stage, Root(path), directory)
    return Root(path)


def _run_steps(dockerfile: Path, stage: Stage, root: Root, directory: Path) -> None:
    env = {name: value for name, value in os.environ.items() if _PASSED_ON.match(name)}
    env.update(environment_of(dockerfile, stage.name))
    env["PATH"] = f"{_PYTHON}:{env['PATH']}"
    before = [step for earlier in lineage(dockerfile, stage.name)[:-1] for step in earlier.steps]
    cwd = next((value for word, value in reversed(before) if word == "WORKDIR"), "/")
    for word, value in stage.steps:
        if word == "WORKDIR":
            cwd = value
            (root.path / cwd.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            _copy(value, root, cwd, dockerfile, directory)
        elif word == "RUN":
            argv = root.argv(["sh", "-c", value], cwd=cwd, mounts=_pip_mounts())
            done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"RUN {value}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _copy(value: str, root: Root, cwd: str, dockerfile: Path, directory: Path) -> None:
    words = shlex.split(value)
    context = ROOT
    if words[0].startswith("--from="):
        context = build(dockerfile, words.pop(0).removeprefix("--from="), directory).path
    *sources, place = words
    target = root.path / os.path.normpath(f"{cwd}/{place}" if not place.startswith("/") else place).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    for source in sources:
        found = context / source.lstrip("/")
        if found.is_dir():
            leave = shutil.ignore_patterns("__pycache__") if context == ROOT else None
            shutil.copytree(found, target, dirs_exist_ok=True, symlinks=True, ignore=leave)
        else:
            shutil.copy2(found, target)


def _make_base(path: Path) -> None:
    for name in ("usr", "etc", "proc", "dev", "tmp", "opt", "var/tmp", "run", "root"):
        (path / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (path / name).symlink_to(f"usr/{name}")
    (path / _PYTHON.lstrip("/")).mkdir(parents=True)
    (path / _PYTHON.lstrip("/") / "python").symlink_to(f"{sys.base_prefix}/bin/python3.11")
    for name in _ETC:
        found = Path("/etc") / name
        if found.exists():
            subprocess.run(["cp", "-aL" if found.is_file() else "-a", str(found), str(path / "etc")], check=True)


def _system_mounts() -> list[str]:
    lines = ["mount --rbind /usr $ROOT/usr", "mount -o remount,bind,ro $ROOT/usr"]
    if sys.base_prefix != "/usr":
        prefix = shlex.quote(sys.base_prefix)
        lines += [f"mkdir -p $ROOT{prefix}", f"mount --bind {prefix} $ROOT{prefix}"]
        lines.append(f"mount -o remount,bind,ro $ROOT{prefix}")
    # The root itself is a mount, so that it can become read only.
    return [
        *("mount --make-rprivate /", "mount --bind $ROOT $ROOT"),
        *lines,
        *("mount --rbind /proc $ROOT/proc", "mount --rbind /dev $ROOT/dev"),
    ]


def _pip_mounts() -> list[str]:
    """Local places of this host's pip, such as folders of wheels, at the same places of the root."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = sorted({path for path in re.findall(r"(?:file://|['\s])(/[^'\s]+)", told) if Path(path).is_dir()})
    lines: list[str] = []
    for path in found:
        quoted = shlex.quote(path)
        lines += [f"mkdir -p $ROOT{quoted}", f"mount --bind {quoted} $ROOT{quoted}"]
    return lines
