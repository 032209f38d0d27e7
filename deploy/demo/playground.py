"""The directory that the demo leaves to play with. The next demo replaces it."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from screen import shown

_LOCK = ".reshard-demo"
"""The file by which a demo knows its own directory, and that no other demo works in it."""


class PlaygroundError(RuntimeError):
    """The directory is not the demo's to use."""


@dataclass(frozen=True)
class Playground:
    """Places in the directory.

    Attributes:
        root: the directory itself.
    """

    root: Path

    @property
    def source(self) -> Path:
        """The checkpoint of the interrupted run."""
        return self.root / "run1"

    @property
    def result(self) -> Path:
        """The directory of the checkpoint for another number of ranks."""
        return self.root / "dp3"

    @property
    def weights(self) -> Path:
        """The weights of it in one file."""
        return self.root / "weights"

    @property
    def logs(self) -> Path:
        """The directory of what the servers and the training said."""
        return self.root / "logs"

    @property
    def servers(self) -> Path:
        """The servers' own data, which go when they stop."""
        return self.root / "servers"

    @property
    def settings(self) -> Path:
        """A file that a shell sources, to use the running servers."""
        return self.root / "env.sh"

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Write the variables by which other programs find the servers. The file holds a token."""
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()]
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n")
        self.settings.touch(mode=0o600)
        self.settings.write_text("".join(lines))


@contextmanager
def playground(root: Path) -> Generator[Playground]:
    """Make the directory anew, and keep other demos out of it.

    Raises:
        PlaygroundError: It is not a demo's, or another demo works in it.
    """
    lock = root / _LOCK
    if root.is_dir() and any(root.iterdir()) and not lock.exists():
        raise PlaygroundError(f"{shown(root)} was not made by a demo; name another with --directory, or remove it")
    root.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            text = f"another demo (process {held.read().strip()}) works in {shown(root)}; stop it with Ctrl-C first"
            raise PlaygroundError(text) from None
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        for entry in root.iterdir():
            if entry.name != _LOCK:
                _remove(entry)
        made = Playground(root)
        made.logs.mkdir()
        made.servers.mkdir()
        try:
            yield made
        finally:
            # A job database and a bucket without their servers are of no use.
            _remove(made.servers)
            made.settings.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
