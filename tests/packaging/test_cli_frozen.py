"""The command line is a promise: commands, options and exit codes change only on purpose (`make golden`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer

from house.repository import ROOT
from reshard.cli.main import app
from reshard.errors import CODES, ExitCode

GOLDEN = Path(__file__).with_name("golden") / "cli.txt"


def commands() -> dict[str, Any]:
    """Every command by the words that name it."""

    def below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name, child in getattr(command, "commands", {}).items():
            yield from below(f"{words} {name}", child)

    return dict(below("reshard", typer.main.get_command(app)))


def kind_of(annotation: Any) -> str:
    """The values that a parameter takes."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(member.value) for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def frozen() -> str:
    """Commands and their parameters, as text that does not depend on a terminal or on the version of typer."""
    lines: list[str] = []
    for words, command in sorted(commands().items()):
        summary = (command.help or "").strip().split("\n")[0]
        lines += [words, f"    {summary}"]
        for parameter in command.params:
            if parameter.name in {"install_completion", "show_completion", "help"}:
                continue
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            if parameter.param_type_name == "argument":
                names = parameter.metavar or parameter.name.upper()
            kind = "flag" if getattr(parameter, "is_flag", False) else kind_of(parameter.type_descriptor.annotation)
            facts = [kind]
            if parameter.required:
                facts.append("required")
            if getattr(parameter, "multiple", False):
                facts.append("repeatable")
            if parameter.default not in (None, False, ()) and not parameter.required:
                facts.append(f"default {getattr(parameter.default, 'value', parameter.default)}")
            lines.append(f"    {names} <{', '.join(facts)}> {getattr(parameter, 'help', '') or ''}".rstrip())
        lines.append("")
    return "\n".join(lines)


def test_the_command_line_is_as_frozen() -> None:
    if os.environ.get("RESHARD_GOLDEN") == "write":
        GOLDEN.write_text(frozen(), encoding="utf-8")
    assert frozen() == GOLDEN.read_text(encoding="utf-8"), "if this change is meant: make golden"


@pytest.mark.parametrize("words", ["reshard", "reshard convert", "reshard jobs list"])
def test_a_process_shows_help(words: str) -> None:
    command = [sys.executable, "-m", "reshard.cli.main", *words.split()[1:], "--help"]
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_exit_codes_are_frozen() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "SOURCE": 3,
        "AUTH": 4,
        "CONFLICT": 5,
        "RETRYABLE": 6,
        "MISMATCH": 7,
        "REFUSED": 8,
        "WAIT_TIMEOUT": 124,
        "INTERRUPTED": 130,
    }


def test_codes_keep_their_meaning() -> None:
    frozen_codes = dict(
        line.split("\t") for line in (GOLDEN.parent / "codes.tsv").read_text(encoding="utf-8").splitlines()
    )
    if os.environ.get("RESHARD_GOLDEN") == "write":
        text = "".join(f"{code}\t{e.http_status} {int(e.exit_code)} {e.retryable}\n" for code, e in CODES.items())
        (GOLDEN.parent / "codes.tsv").write_text(text, encoding="utf-8")
        return
    now = {code: f"{e.http_status} {int(e.exit_code)} {e.retryable}" for code, e in CODES.items()}
    # New codes may come; what there is stays.
    assert {code: now.get(code) for code in frozen_codes} == frozen_codes
    assert set(now) == set(frozen_codes), "new codes: make golden"


def test_the_cli_starts_without_torch_and_without_the_engine() -> None:
    code = "import sys, reshard.cli.main; print([m for m in ('torch', 'numpy', 'reshard_engine') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
