"""Help as people see it: frozen at 80 columns, at 120 in `make full`, never cut off; its examples are commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from house.promises import command
from house.saves import DATA
from house.tiers import rest_full
from reshard.cli.help_pages import EXAMPLES
from reshard.cli.main import app

GOLDEN = Path(__file__).with_name("golden")
WIDTHS = (80, 120)
ROOT: Any = typer.main.get_command(app)
LOCAL = (
    "inspect",
    "plan",
    "convert",
    "verify",
    "diff",
    "fingerprint",
    "slim",
    "clean",
    "zero-to-fp32",
    "zero-to-torch",
)


def commands() -> dict[str, Any]:
    """Every command that help shows, by the words after `reshard`."""

    def below(words: str, found: Any) -> Iterator[tuple[str, Any]]:
        yield words, found
        for name, child in getattr(found, "commands", {}).items():
            if not child.hidden:
                yield from below(f"{words} {name}".strip(), child)

    return dict(below("", ROOT))


COMMANDS = commands()


@cache
def help_of(words: str, columns: int) -> str:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COLUMNS", str(columns))
        code, out, err = command(*words.split(), "--help")
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("columns", rest_full(WIDTHS, 80))
def test_help_is_as_frozen(columns: int) -> None:
    pages = [f"$ reshard {words} --help".replace("  ", " ") + f"\n{help_of(words, columns)}" for words in COMMANDS]
    text = "\n".join(pages)
    path = GOLDEN / f"help-{columns}.txt"
    if os.environ.get("RESHARD_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "if this change is meant: make golden"


@pytest.mark.parametrize("columns", rest_full(WIDTHS, 80))
def test_nothing_is_cut_off(columns: int) -> None:
    for words, found in COMMANDS.items():
        page = help_of(words, columns)
        assert "…" not in page, words
        for parameter in found.params:
            if not getattr(parameter, "hidden", False):
                for name in (*parameter.opts, *parameter.secondary_opts):
                    shown = parameter.metavar if parameter.param_type_name == "argument" else name
                    assert re.search(rf"(?m)^  .*{re.escape(shown)}(?=[ ,\n]|$)", page), (words, shown)
        wide = [line for line in page.splitlines() if len(line) > columns]
        assert not wide, words


def test_help_has_one_style() -> None:
    for words in COMMANDS:
        page = help_of(words, 80)
        assert page.startswith(f"Usage: reshard {words}".strip()), words
        assert not re.search("[╭│╰]", page), words
        assert page.rstrip().endswith("-h, --help") or "-h, --help" in page.splitlines()[-1], words


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_two_examples(words: str) -> None:
    assert len(EXAMPLES[words]) >= 2
    for remark, line in EXAMPLES[words]:
        assert len(line) <= 78, line
        assert len(remark) <= 74
        assert words in line


def test_no_example_is_of_a_command_that_is_gone() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


def words_of(line: str) -> list[str]:
    """The words of the command line of ours in an example."""
    found = re.search(r"reshard [^|)]*", line)
    assert found
    return shlex.split(found[0])[1:]


@pytest.mark.parametrize("line", [line for found in EXAMPLES.values() for _, line in found])
def test_examples_are_command_lines(line: str) -> None:
    words, found, context = words_of(line), ROOT, None
    while words and words[0] in getattr(found, "commands", {}):
        name = words.pop(0)
        context = found.make_context(name, [], parent=context, resilient_parsing=True)
        found = found.commands[name]
    found.make_context("it", words, parent=context)


def test_local_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the help, each in a directory with a run, its weights and a torch file."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "zero2_tiny" / "global_step3", tmp_path / "run1" / "global_step100")
    (tmp_path / "run1" / "latest").write_text("global_step100")
    for words in (("weights", "--to", "safetensors"), ("run2/global_step100", "--to", "zero", "--dp", "3")):
        assert command("convert", "run1", *words)[0] == 0
    assert command("zero-to-fp32", "run1", "torch")[0] == 0
    shutil.copy("torch/pytorch_model.bin", "pytorch_model.bin")
    for name in LOCAL:
        for _, line in EXAMPLES[name]:
            if "://" in line:
                continue
            words = words_of(line)
            if name in {"convert", "slim"}:
                words.append("--overwrite")
            code, _, err = command(*words)
            # `diff` ends with 7 if anything differs; weights that are other types than the masters do.
            assert code in ({0, 7} if name == "diff" else {0}), (line, err)
