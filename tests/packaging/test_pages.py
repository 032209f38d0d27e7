"""Pages for readers: their commands run on a real checkpoint, and their claims name tests that there are."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from importlib.metadata import Distribution, version
from importlib.util import find_spec
from pathlib import Path

import pytest

import reshard
from house.fixes import fixes
from house.repository import ROOT, code_blocks
from reshard import extras
from reshard.cli.main import run
from reshard.extras import install_line

DOCS = ROOT / "docs"
RUN = (
    *("index.md", "faq.md", "concepts/conversion.md", "export-weights.md", "migrate.md", "resume.md"),
    "troubleshooting.md",
)
"""Pages whose commands are run: those that run Reshard, in order, in one directory."""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A directory with `ckpts/run1`, as the pages have it: a save of real DeepSpeed at step 100, and a model."""
    shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny" / "global_step3", tmp_path / "ckpts/run1/global_step100")
    (tmp_path / "ckpts/run1/latest").write_text("global_step100")
    (tmp_path / "models/start").mkdir(parents=True)
    (tmp_path / "models/start/config.json").write_text('{"model_type": "llama"}')
    # The home page names a checkpoint of the clone.
    shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", tmp_path / "tests/data/zero2_tiny")
    return tmp_path


@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_run(
    name: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    for variable in [key for key in os.environ if key.startswith("RESHARD_")]:
        monkeypatch.delenv(variable)
    commands = [
        shlex.split(found, comments=True)[1:]
        for code in code_blocks(DOCS / name, "sh")
        for found in re.findall(r"^(?:\w+=\$\()?(reshard [^)\n]*)", code, re.MULTILINE)
    ]
    assert commands
    # In this process: a new one for each command would import the engine each time.
    for words in commands:
        assert run(words) == 0, f"{words}: {capfd.readouterr().err}"


def source_texts(path: Path) -> list[str]:
    """Every text of a module, with `...` for what is put in; and its lines, for those that are shown as code."""
    texts: list[str] = []
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
            texts.append("".join(map(str, parts)))
    return [*texts, *(line.strip() for line in source.splitlines())]


def test_messages_are_those_of_the_installed_packages() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert f"DeepSpeed {version('deepspeed')}" in page
    sections = re.findall(r"^```text\n(.*?)\n```\n\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert len(sections) > 7
    for message, rest in sections:
        ((package, file),) = re.findall(r"`(deepspeed|torch|transformers)/([\w/]+\.py)`", rest)
        found = find_spec(package)
        assert found
        assert found.origin
        # The one name that the page writes out.
        told = message.replace("Required universal_checkpoint_info state", "Required ... state")
        texts = source_texts(Path(found.origin).parent / file)
        # A page may leave out the end of a long message.
        assert any(text == told or (told.endswith(". ...") and text.startswith(told[:-3])) for text in texts), message


def test_exceptions_that_recipes_quote_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "recipes").glob("*.md")))
    quoted = re.findall(r"(?m)^> (?:(deepspeed[\w.]*)\.)?(\w+): The checkpoint being loaded", text)
    assert quoted
    for module, name in quoted:
        assert module, name
        found = find_spec("deepspeed")
        assert found
        assert found.origin
        source = Path(found.origin).parents[1].joinpath(*module.split(".")).with_suffix(".py")
        assert f"class {name}(" in source.read_text(encoding="utf-8")


def test_every_claim_of_the_comparison_names_its_evidence() -> None:
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    table, evidence = text.split("## Evidence")
    rows = dict(re.findall(r"^\| (\d+) \| (.*)$", evidence, re.MULTILINE))
    assert set(re.findall(r"\[(\d+)\](?!\()", table)) == set(rows)
    for number, row in rows.items():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert tests or re.search(r"\]\((https://|performance\.md)", row), number
        for path, name in tests:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_the_numbers_of_the_comparison_are_those_that_were_measured() -> None:
    speed, memory = (
        re.search(rf"^\| {name} \|.*$", (DOCS / "comparison.md").read_text("utf-8"), re.MULTILINE)
        for name in (r"time \(lower is faster\)", "memory")
    )
    assert speed
    assert memory
    measured = (DOCS / "performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ZeRO-[23] to \w+(?: safetensors)? \|.*$", measured, re.MULTILINE)
    for peer, cell in zip(("ds_to_universal", "zero_to_fp32"), speed[0].split("|")[3:5], strict=True):
        found = sorted(float(ratio) for row in rows for ratio in re.findall(rf"`{peer}` ([\d.]+)", row))
        assert [float(number) for number in re.findall(r"\d\.\d", cell)] == [found[0], found[-1]]
    for peer, cell in zip(("ds_to_universal", "zero_to_fp32"), memory[0].split("|")[3:5], strict=True):
        (wanted,) = re.findall(r"([\d.]+) GB", cell)
        most = max(int(row.split("|")[7].replace(",", "").split()[0]) for row in rows if f"`{peer}`" in row)
        assert round(most / 1000, 1) == float(wanted)


def test_the_reference_has_every_public_function() -> None:
    page = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    functions = [name for name in reshard.__all__ if name.islower() and name != "__version__"]
    assert len(functions) > 5
    assert [name for name in (*functions, "Client") if f"::: reshard.{name}\n" not in page] == []


def test_the_readme_names_the_versions_that_the_tests_run_with() -> None:
    pinned = dict(
        re.findall(r"^(deepspeed|torch)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"DeepSpeed {pinned['deepspeed']} and PyTorch {pinned['torch']}" in readme


# Pages that tell how to install: the package is on no index yet, so every command installs a directory.


PAGES = sorted(p for p in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")))
_COMMAND = re.compile(r"pip install [^\n`#]+")


def commands(page: Path) -> list[list[str]]:
    """The words behind `pip install` of each such command on a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    # Into an environment that trains: there, the exact versions would replace those that train.
    text = re.sub(r"pip install '[.]\[worker\]' +# without -c.*", "", text)
    return [shlex.split(found)[2:] for found in _COMMAND.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_installs_what_is_not_published(page: Path) -> None:
    for words in commands(page):
        assert not [w for w in words if re.match(r"reshard(?!.* @ git\+)(\W|$)", w)], words
        if any("[" in w for w in words):
            # A newer torch is untested, and brings gigabytes of CUDA.
            assert words[0] == "-c", words


def test_the_readme_names_extras_that_there_are() -> None:
    """And it says how the command gets onto the PATH, and how to take PyTorch's CPU build."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    installed = [w for words in commands(ROOT / "README.md") for w in words]
    named = {e for w in installed if "[" in w for e in re.sub(r".*\[|\]", "", w).split(",")}
    assert named
    assert named <= extras
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "source .venv/bin/activate" in text
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in text


def test_no_fix_installs_what_is_not_published() -> None:
    """Nor a torch without its version: that is 5.6 GB of CUDA libraries, and untested."""
    assert not [fix for fix in fixes() if re.search(r"pip install '?(reshard|torch)\b", fix)]


class Installed(Distribution):
    """A package with a note of where it came from."""

    def __init__(self, note: object) -> None:
        self._note = note if isinstance(note, str) else json.dumps(note)

    def read_text(self, filename: str) -> str | None:
        return self._note if filename == "direct_url.json" else None

    def locate_file(self, path: object) -> Path:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


def line_of(note: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def installed(name: str) -> Distribution:
        assert name == "reshard"
        return Installed(note)

    monkeypatch.setattr("importlib.metadata.distribution", installed)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    return shlex.split(install_line("worker"))


@pytest.mark.parametrize("editable", [False, True])
def test_the_line_names_the_clone_that_was_installed(
    editable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "constraints.txt").touch()
    words = line_of({"url": clone.as_uri(), "dir_info": {"editable": editable} if editable else {}}, monkeypatch)
    flag = ["-e"] if editable else []
    assert words == ["pip", "install", "-c", f"{clone}/constraints.txt", *flag, f"{clone}[worker]"]


@pytest.mark.parametrize(
    "note",
    [
        "null",
        "{",
        "[]",
        {"url": "file:///gone", "dir_info": {}},
        {"url": "https://x/y.whl", "archive_info": {}},
        {"url": 1},
        {"url": "file:///tmp", "dir_info": 3},
    ],
)
def test_without_the_clone_the_line_makes_one(note: object, monkeypatch: pytest.MonkeyPatch) -> None:
    words = line_of(note, monkeypatch)
    assert words[:3] == ["git", "clone", extras.REPOSITORY]
    assert words[3:] == ["&&", "pip", "install", "-c", "reshard/constraints.txt", "./reshard[worker]"]


def test_another_pip_on_the_path_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line_of("null", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(install_line("worker"))[4:8] == [sys.executable, "-m", "pip", "install"]


def test_the_repository_is_that_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"] == extras.REPOSITORY
