"""What the documents say is so: commands exist, links lead somewhere, generated parts are current."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from house.repository import ROOT, SOURCE_ROOTS, code_blocks, files, modules, pages
from reshard.cli.main import app
from reshard.errors import CODES, ExitCode

VARIABLE = re.compile(r"\bRESHARD_[A-Z_]*[A-Z]\b")


@pytest.mark.full  # CI runs it as `make docs-check`, with the checks
def test_generated_parts_are_current() -> None:
    done = subprocess.run([sys.executable, "scripts/make_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_error_code_is_documented() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in text] == []
    sections = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "errors").glob("*.md"))
    assert [code for code in CODES if f"## `{code}`\n" not in sections] == []


def test_the_module_list_names_every_module() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "modules").glob("*.md"))
    assert [name for name in modules() if f"`{name}`" not in text] == []


def test_every_promise_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| threat")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row) for row in rows]
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    missing = [
        f"{path}::{name}"
        for path, name in sorted({test for tests in named for test in tests})
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_exit_codes_are_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [int(row) for row in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == [int(code) for code in ExitCode]


def test_every_setting_is_documented_and_exists() -> None:
    read: set[str] = set()
    for root in SOURCE_ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            read |= set(re.findall(r'"(RESHARD_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    text = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(RESHARD_[A-Z_]+)` \|", text, re.MULTILINE))
    assert rows == read
    used = {name for path in deployment() for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    assert used - read <= {"RESHARD_PORT"}


def deployment() -> Iterator[Path]:
    """Files that set the service up."""
    yield from (ROOT / "docker-compose.yml", ROOT / ".env.example")
    yield from (path for path in (ROOT / "deploy").rglob("*") if path.suffix in {".yaml", ".sbatch"})


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every `reshard ...` command line of documents and examples."""
    for page in pages():
        for code in code_blocks(page, "sh", "bash"):
            yield from ((str(page.relative_to(ROOT)), words) for words in commands_in(code))
    for script in (ROOT / "deploy" / "slurm" / "train.sbatch", *(ROOT / "deploy").rglob("training/*job*.yaml")):
        found = list(commands_in(script.read_text(encoding="utf-8")))
        assert found, f"{script.name} runs no command of ours"
        yield from ((script.name, words) for words in found)


def commands_in(code: str) -> Iterator[list[str]]:
    for line in code.replace("\\\n", " ").splitlines():
        for found in re.findall(r"(?:^|\$\()\s*(?:srun\s+(?:-\S+\s+)*)?(reshard [^|)#]*)", line):
            words = shlex.split(found)
            end = next((i for i, word in enumerate(words) if word in {"||", "&&", ";"}), len(words))
            yield words[1:end]


@pytest.mark.parametrize(("where", "words"), list(command_lines()), ids=lambda value: str(value)[:60])
def test_documented_commands_exist(where: str, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    if words == ["--version"]:
        return
    assert not getattr(command, "commands", {}), f"{where}: {words}"
    # Some flags are made of the options of formats when the command is asked for them.
    context = command.make_context("it", [], resilient_parsing=True)
    known = {option for parameter in command.get_params(context) for option in parameter.opts} | {"--help"}
    assert [word for word in words if word.startswith("-") and word.split("=")[0] not in known] == []


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        name
        for page in pages()
        for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named - targets == set()


def test_no_file_names_a_place_of_one_machine() -> None:
    # In two halves, so that this file does not name them.
    places = re.compile("|".join(("/ro" + r"ot/", "/wo" + r"rk/", "/opt/py" + "pi", "/ho" + r"me/[a-z]")))
    # Not PyTorch's own index: a user without a GPU needs its address.
    indexes = re.compile("pypi" + r"\.org|pytho" + r"nhosted")
    found = []
    for path in files():
        if path.suffix in {".pt", ".safetensors", ".bin"} or b"\0" in (data := path.read_bytes()):
            continue
        text = data.decode("utf-8")
        if places.search(text) or indexes.search(text):
            found.append(str(path.relative_to(ROOT)))
    assert found == []
