"""Installs this project into an environment, and shows that it goes on: `make` runs it before everything else.

    python scripts/install.py .venv '.[all,dev]'
    python scripts/install.py .venv-newest --newest '.[worker,quick]' torch transformers

The versions are those of constraints.txt; with `--newest` they are the newest that pip finds, of all that is named.
A line says each phase with the seconds since the start. On a terminal, a last line moves: the phase, its seconds, and
how many packages are unpacked. All that pip says is in DIRECTORY/install.log. Python's own library is enough.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

_LARGE_MB = 20
_EVERY = 50
"""After so many packages are found, a line says so."""
_LAST_LINES = 20
_BAR_CHARS = 24
_FILE = re.compile(r"(?:Downloading|Using cached) (\S+).* \(([\d.]+) ([MG]B)\)")


class Progress:
    """Phases of pip, read from its output."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._began = time.monotonic()
        self._moves = sys.stdout.isatty()
        self._found = 0
        self._phase = "asking for packages"
        self._unpacked_since = 0.0
        self._to_unpack = 0
        self._lock = threading.Lock()

    def read(self, line: str) -> None:
        """Take a line of pip."""
        if line.startswith("Collecting "):
            self._found += 1
            self._phase = f"asking for packages, {self._found} found"
            if self._found % _EVERY == 0:
                self._say(f"{self._found} packages found")
        elif file := _FILE.search(line):
            # The name before the version's tags: torch-2.9.0, without cp311-manylinux_2_28_x86_64.whl.
            name = re.sub(r"-(cp|py|pp|manylinux).*|\.tar\.gz$", "", file[1].rpartition("/")[2])
            megabytes = float(file[2]) * (1000 if file[3] == "GB" else 1)
            self._phase = f"fetching {name} ({file[2]} {file[3]})"
            if megabytes >= _LARGE_MB:
                self._say(self._phase)
        elif line.startswith("Installing collected packages: "):
            self._to_unpack = line.count(",") + 1
            self._unpacked_since = time.time() - 1  # clocks of file systems are coarse
            self._phase = "unpacking"
            self._say(f"unpacking {self._to_unpack} packages")
        elif line.startswith("Successfully installed"):
            self._phase = "done"

    def tick(self) -> None:
        """Draw the line that moves."""
        if self._moves:
            with self._lock:
                columns = shutil.get_terminal_size().columns
                sys.stdout.write(f"\r\033[K{self._seconds()}  {self._now()}"[: columns + 3])
                sys.stdout.flush()

    def end(self, text: str) -> None:
        """Say how it ended."""
        self._say(text)

    def _now(self) -> str:
        if self._phase != "unpacking":
            return self._phase
        count = min(self._unpacked(), self._to_unpack)
        filled = _BAR_CHARS * count // self._to_unpack
        return f"unpacking [{'#' * filled}{'.' * (_BAR_CHARS - filled)}] {count} of {self._to_unpack}"

    def _unpacked(self) -> int:
        """Packages whose metadata are there, which pip writes when the package is."""
        places = self._directory.glob("lib/python*/site-packages/*.dist-info")
        return sum(1 for place in places if _changed(place) >= self._unpacked_since)

    def _seconds(self) -> str:
        return f"  {time.monotonic() - self._began:3.0f} s"

    def _say(self, text: str) -> None:
        with self._lock:
            sys.stdout.write(f"{chr(13) + chr(27) + '[K' if self._moves else ''}{self._seconds()}  {text}\n")
            sys.stdout.flush()


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # pip renames and removes such directories meanwhile
        return 0.0


def install(directory: Path, project: str, others: tuple[str, ...] = (), *, newest: bool = False) -> int:
    """Run pip to its end; returns its exit status."""
    log = directory / "install.log"
    progress = Progress(directory)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", *([] if newest else ["-c", "constraints.txt"]), "-e", project, *others]
    ended = threading.Event()

    def keep_moving() -> None:
        while not ended.wait(0.5):
            progress.tick()

    mover = threading.Thread(target=keep_moving, daemon=True)
    with log.open("w", encoding="utf-8") as kept:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        )
        mover.start()
        try:
            for line in process.stdout or ():
                kept.write(line)
                kept.flush()
                progress.read(line.strip())
            status = process.wait()
        except KeyboardInterrupt:  # the terminal sends it to pip as well
            process.wait()
            status = 130
        finally:
            ended.set()
            mover.join()
    if status == 130:
        progress.end("interrupted; the same command goes on")
    elif status:
        progress.end(f"pip failed; the end of {log}:")
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    else:
        progress.end("installed")
    return status


if __name__ == "__main__":
    place, *wanted = [argument for argument in sys.argv[1:] if argument != "--newest"]
    sys.exit(install(Path(place), wanted[0], tuple(wanted[1:]), newest="--newest" in sys.argv))
