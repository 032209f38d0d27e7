"""Every `fix` is read once, names commands and options that there are, and those that are commands are run.

`make golden` writes the list anew: whoever adds a fix reads it there, beside all others.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import typer

from house.fixes import commands_in, fixes
from house.measured import say
from house.promises import command
from house.repository import ROOT
from house.sources import copied_source
from reshard.cli.main import app

GOLDEN = Path(__file__).with_name("golden") / "fixes.txt"
_OTHERS = frozenset({"--local-dir", "--repo-type"})
"""Options of other programs that a fix names."""


def test_every_fix_was_read() -> None:
    text = "\n".join(fixes()) + "\n"
    if os.environ.get("RESHARD_GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "read the new fix, then: make golden"


def test_fixes_name_commands_and_options_that_there_are() -> None:
    root = typer.main.get_command(app)
    groups = [c.commands.values() for c in root.commands.values() if hasattr(c, "commands")]  # type: ignore[attr-defined]
    commands = [*root.commands.values(), *(command for group in groups for command in group)]  # type: ignore[attr-defined]
    # Some flags are made of the options of formats when a command is asked for them.
    asked = [(c, c.make_context("it", [], resilient_parsing=True)) for c in commands]
    parameters = [p for command, context in asked for p in command.get_params(context)]
    options = {o for p in parameters for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    wrong: list[str] = []
    for line in fixes():
        text = line.partition("\t")[2]
        wrong += [
            f"{o} in {line}" for o in re.findall(r"(?<![\w-])--[a-z][a-z_-]*", text) if o not in options | _OTHERS
        ]
        named = re.findall(r"(?<![\w'/.])(?<!a )(?<!of )reshard ([a-z][a-z-]+)(?: ([a-z]+))?", text)
        wrong += [f"reshard {name} in {line}" for name, _ in named if name not in {*root.commands, "help"}]  # type: ignore[attr-defined]
    assert wrong == []


def test_most_that_can_be_pasted_is() -> None:
    """Fixes in three kinds: with a command, with options or names to write, and prose alone, which only goes down."""
    texts = [line.partition("\t")[2] for line in fixes()]
    commands = [text for text in texts if commands_in(text)]
    pasted = [text for text in texts if text not in commands and re.search(r"--[a-z]|`[^`]+`|\w\(", text)]
    prose = len(texts) - len(commands) - len(pasted)
    say(f"fixes: {len(commands)} with a command, {len(pasted)} with an option or a call, {prose} of prose")
    assert prose <= 410, "a new fix is prose: name the command or the option"


def test_fixes_say_no_library_words_and_nothing_twice() -> None:
    lines = fixes()
    assert not [line for line in lines if re.search(r"\b(see )?`?reshard convert --help", line)]
    assert not [line for line in lines if len(line.partition("\t")[2]) > 400]


def test_no_reader_advises_another_target() -> None:
    """What cannot be read cannot be written as weights either."""
    told = {
        "deepspeed/reader/native/naming.py",  # stage 0 goes on without the optimizer; only writers pass the text on
        "dcp/reader/optimizer.py",
    }
    formats = ROOT / "worker" / "reshard_engine" / "formats"
    wrong = [
        str(path.relative_to(formats))
        for path in sorted(formats.glob("*/reader/**/*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"--to [a-z]", line) and not line.lstrip().startswith("#")
    ]
    assert set(wrong) <= told


def test_the_options_of_ensure_are_those_that_its_fixes_may_name() -> None:
    from reshard.ensuring.converters import OPTIONS

    ensure = typer.main.get_command(app).commands["ensure"]  # type: ignore[attr-defined]
    assert {o for p in ensure.params if not p.hidden for o in p.opts if o[:2] == "--"} | {"--help"} == OPTIONS


source = copied_source("zero2_tiny")


def _fix_of(*words: str) -> str:
    code, _, said = command(*words)
    assert code != 0
    return next(line.removeprefix("fix: ") for line in said.splitlines() if line.startswith("fix: "))


@pytest.mark.parametrize(
    "words",
    [
        ("nope",),
        ("--nope",),
        ("inspect",),
        ("inspect", "SRC", "--nope"),
        ("jobs", "nope"),
        ("jobs", "list", "--limit", "0"),
        ("convert", "SRC", "DST", "--to", "nope"),
        ("convert", "SRC", "DST", "--to", "safetensors", "--part-size", "1"),
        ("inspect", ""),
        ("verify", ""),
        ("help", "nope"),
    ],
    ids=" ".join,
)
def test_help_that_a_fix_names_is_there(words: tuple[str, ...]) -> None:
    fix = shlex.split(_fix_of(*words))
    assert fix[0] == "reshard"
    assert fix[-1] == "--help"
    assert command(*fix[1:])[0] == 0


def test_help_is_a_command() -> None:
    assert command("help")[0] == 0
    code, told, _ = command("help", "convert")
    assert (code, "--zero-stage" in told) == (0, True)


def test_a_tag_that_is_not_there(source: Path) -> None:
    for words in (["inspect", str(source)], ["convert", str(source), str(source.parent / "out"), "--to", "universal"]):
        found = re.search(r"--tag (\S+)", _fix_of(*words, "--tag", "nope"))
        assert found
        assert command(*words, "--tag", found[1])[0] == 0


def test_an_occupied_target(source: Path, tmp_path: Path) -> None:
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "-q"]
    assert command(*words)[0] == 0
    assert "add --overwrite" in _fix_of(*words, "--dtype", "bf16")
    assert command(*words, "--dtype", "bf16", "--overwrite")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    words[2] = str(tmp_path / "mine")
    assert "add --overwrite" not in _fix_of(*words)
    assert "remove it yourself" in _fix_of(*words)
    assert "remove it yourself" in _fix_of(*words, "--overwrite")


def test_a_limit_that_is_too_small(source: Path, tmp_path: Path) -> None:
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "-q"]
    fix = _fix_of(*words, "--memory-limit", "1")
    assert command(*words, *shlex.split(fix))[0] == 0


def test_a_layout_without_ranks(source: Path, tmp_path: Path) -> None:
    words = ["convert", str(source), str(tmp_path / "out" / "global_step3"), "--to", "zero", "-q"]
    assert _fix_of(*words) == "add --dp N"
    assert command(*words, "--dp", "2")[0] == 0


def test_a_tensor_that_is_not_there(source: Path) -> None:
    fix = _fix_of("inspect", str(source), "--tensor", "nope")
    words = shlex.split(fix.removeprefix("to list them: "))
    assert command(*words[1:])[0] == 0


def test_what_is_abandoned(source: Path, tmp_path: Path) -> None:
    """The command in `target_busy` runs as it stands."""
    from reshard_engine.execute.sinks.leftovers import busy

    fix = busy(str(tmp_path / "a place")).fix
    words = shlex.split(fix[fix.index("reshard clean") :])
    assert command(*words[1:]) == (0, f"nothing is left beside {tmp_path / 'a place'}\n", "")
