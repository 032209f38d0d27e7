"""The `next:` lines that `reshard convert` prints, to be run as they stand."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from house.promises import command
from servers.s3 import S3Server

PLACES = "local", "s3"
"""What the fixture `target` takes."""


@dataclass(frozen=True)
class Printed:
    """The `next:` lines of a conversion, and where its files lie on this machine after the copy that they ask for."""

    lines: list[str]
    directory: Path
    """What stands for DIR."""

    @property
    def call(self) -> str:
        """The line of a script."""
        (line,) = [text.removeprefix("in the script: ") for text in self.lines if text.startswith("in the script: ")]
        return line

    def run(self, **names: Any) -> Any:
        """Run the line of a script, with the names that a script has."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of other libraries do not matter to a user's script
            return eval(self.call, names)


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory of a bucket or of this machine."""
    if request.param == "local":
        return str(tmp_path / "out")
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return f"s3://{request.getfixturevalue('bucket')}/out"


def converted(source: Path, target: str, place: Path, *words: str) -> Printed:
    """Convert by the command line, and copy where a line says so."""
    code, _, err = command("convert", str(source), target, *words)
    assert code == 0, err
    lines = re.findall(r"^next: (.+)$", err, re.MULTILINE)
    directory = place / "node"
    copies = [line for line in lines if line.startswith("copy ")]
    assert bool(copies) is target.startswith("s3://")
    for line in copies:
        copy = re.fullmatch(r"copy (\S+) to (\S+) of each node, for a directory DIR", line)
        assert copy is not None, line
        destination = copy[2].replace("DIR", str(directory))
        fsspec.filesystem("s3").get(f"{copy[1]}/", f"{destination}/", recursive=True)
    return Printed([line.replace("DIR", str(directory)) for line in lines if line not in copies], directory)
