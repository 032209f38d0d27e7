"""The tutorial: its commands run in order where only the wheel is installed, and say what the page shows.

In its short form everything but Reshard itself comes from the environment of the tests. In its long form (`full`) the
environment is as empty as a reader's, and pip installs what the page says, with the wheel in the place of the clone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from house.repository import ROOT, code_blocks
from servers.process import free_port

PAGE = ROOT / "docs" / "tutorial.md"
PICTURE = ROOT / "docs" / "images" / "layouts" / "tutorial.svg"
INSTALLS = "pip install -c constraints.txt '.[worker,service]' deepspeed"
MARK = "@@ tutorial "


@dataclass(frozen=True)
class Step:
    """A block of commands, and what the page shows below it."""

    code: str
    shown: tuple[str, ...]


def steps() -> list[Step]:
    """The blocks of the page."""
    found: list[Step] = []
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if language == "sh":
            found.append(Step(text, ()))
        else:
            assert language == "text", language
            found[-1] = Step(found[-1].code, tuple(text.splitlines()))
    return found


def as_lines_show(shown: tuple[str, ...], said: str) -> list[str]:
    """The first shown line that the output lacks, in order; `...` is any text, alone on a line any lines."""
    lines = iter(said.splitlines())
    missing: list[str] = []
    for line in shown:
        if line.strip() == "...":
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.split("...")))
        if not any(pattern.fullmatch(found.rstrip()) for found in lines):
            missing.append(line)
            break
    return missing


def clone(directory: Path) -> None:
    """Copy what the commands of the page take from a clone."""
    (directory / "reshard").mkdir()
    shutil.copy(ROOT / "constraints.txt", directory / "reshard")
    shutil.copytree(ROOT / "docs" / "tutorial", directory / "reshard" / "docs" / "tutorial")


def borrowed(wheel: Path) -> str:
    """Commands that put the wheel into the reader's environment, and let it see the packages of this one."""
    folder = ".venv-tutorial"
    pip = shlex.join(
        [sys.executable, "-m", "pip", "--python", f"{folder}/bin/python", "install", "--no-deps", str(wheel)]
    )
    packages = shlex.quote(sysconfig.get_path("purelib"))
    return f"""{pip} --quiet
echo {packages} > {folder}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/borrowed.pth
printf '#!/bin/sh\\nexec python {Path(__file__).with_name("forked_torchrun.py")} "$@"\\n' > {folder}/bin/torchrun
chmod +x {folder}/bin/torchrun"""


def run(directory: Path, replaced: dict[str, str], timeout_s: float) -> list[str]:
    """Outputs of the steps of the page, typed into one shell."""
    clone(directory)
    port = str(free_port())
    parts: list[str] = []
    for step in steps():
        code = step.code.replace("8000", port)
        for words, instead in replaced.items():
            code = code.replace(words, instead)
        parts += [f"echo; echo '{MARK}'", code]
    log = directory / "log"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RESHARD_", "PYTHON", "DS_"))}
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(directory / "state"),
    }
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-eu", "-c", "\n".join(parts)],
            cwd=directory,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = shell.wait(timeout_s)
        finally:
            # A step that failed leaves the service behind.
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
            shell.wait()
    said = log.read_text(errors="replace")
    assert status == 0, said[-6000:]
    return said.split(f"\n{MARK}\n")[1:]


def check(directory: Path, said: list[str]) -> None:
    """Outputs and picture are those of the page, and the program was that of the wheel."""
    wrong = [
        (step.code, missing, out)
        for step, out in zip(steps(), said, strict=True)
        if (missing := as_lines_show(step.shown, out))
    ]
    assert wrong == []
    clone_of_reader = directory / "reshard"
    ours = clone_of_reader / ".venv-tutorial" / "bin" / "python"
    where = subprocess.run(
        [ours, "-c", "import reshard; print(reshard.__file__)"], capture_output=True, text=True, cwd=directory
    )
    assert where.stdout.startswith(str(clone_of_reader)), where.stdout + where.stderr
    # The picture of the page is drawn from a checkpoint that this run once wrote: sizes, ranks and names are the same.
    drawn = (clone_of_reader / "tutorial" / "moves.svg").read_text()
    shown = {text for text in labels(PICTURE.read_text()) if "\N{HORIZONTAL ELLIPSIS}" not in text and "/" not in text}
    assert len(shown) > 10
    assert shown - labels(drawn) == set()


def labels(picture: str) -> set[str]:
    """The texts in a picture."""
    return set(re.findall(r">([^<]+)</text>", picture))


def test_the_page_has_steps() -> None:
    found = steps()
    assert len(found) > 10
    assert sum(INSTALLS in step.code for step in found) == 1


@pytest.mark.timeout(660)
def test_the_commands_of_the_tutorial_do_what_the_page_shows(wheel: Path, tmp_path: Path) -> None:
    replaced = {
        "git clone https://github.com/reshard/reshard.git": ":",
        "python3 -m venv": "python3 -m venv --without-pip",
        INSTALLS: borrowed(wheel),
    }
    check(tmp_path, run(tmp_path, replaced, 600))


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_same_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    replaced = {
        "git clone https://github.com/reshard/reshard.git": ":",
        "'.[worker,service]'": shlex.quote(f"reshard[worker,service] @ {wheel.as_uri()}"),
    }
    check(tmp_path, run(tmp_path, replaced, 1400))
    shutil.rmtree(tmp_path / "reshard" / ".venv-tutorial", ignore_errors=True)


def test_the_home_page_shows_a_first_result(tmp_path: Path) -> None:
    home = ROOT / "docs" / "index.md"
    (commands,) = [code for code in code_blocks(home, "sh") if "tests/data" in code]
    (shown,) = code_blocks(home, "text")
    (tmp_path / "tests").mkdir()
    shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", tmp_path / "tests" / "data" / "zero2_tiny")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    argv = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert as_lines_show(tuple(shown.splitlines()), done.stdout) == []
    assert INSTALLS.partition("'")[0] in home.read_text("utf-8")
