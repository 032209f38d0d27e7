"""What the product knows in one place: whose options these are, and what a label is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.repository import ROOT
from reshard.options import FormatOptions, Options

OF_DEEPSPEED = "worker/reshard_engine/formats/deepspeed"
MACHINERY = {"client/reshard/options.py", "client/reshard/installed_formats.py", "client/reshard/models/keywords.py"}
"""Where options are declared, and where requests get them."""
LABELS = {"format", "source_format"}
"""Attributes whose values are words for people."""


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def names_in(tree: ast.AST) -> set[str]:
    """Every name that a module reads: of variables, of attributes, and of what it imports."""
    found = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    found |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names}
    return found | {f".{n.attr}" for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_options(n.value)}


def is_options(node: ast.AST) -> bool:
    """True for `options` and `….options`, whose attributes are formats."""
    return (isinstance(node, ast.Attribute) and node.attr == "options") or (
        isinstance(node, ast.Name) and node.id == "options"
    )


@pytest.mark.parametrize("name", Options.model_fields)
def test_options_of_a_format_are_read_by_that_format(name: str) -> None:
    """Files of ranks are two formats; weights, adapters and their cards are one family."""
    model = Options.model_fields[name].annotation
    assert isinstance(model, type)
    assert issubclass(model, FormatOptions)
    may = {
        "deepspeed": (OF_DEEPSPEED,),
        "fsdp_ranks": ("formats/fsdp_ranks", "formats/torch_checkpointing", "formats/rank_states.py"),
        "megatron": ("formats/megatron",),
        "weights": ("formats/weights", "formats/model_card.py", "formats/peft", "client/reshard/models/jobs.py"),
        "peft": ("formats/peft", "formats/weights", "formats/model_card.py"),
    }[name]
    readers = [
        path
        for path, tree in modules("client", "service", "worker")
        if {model.__name__, f".{name}"} & names_in(tree) and path not in MACHINERY
    ]
    assert readers, "the test finds who reads options"
    assert [path for path in readers if not any(place in path for place in may)] == []


def test_the_client_compares_no_label() -> None:
    """`Inspection.family` is for programs; `format` may be shown, and nothing else."""
    wrong: list[str] = []
    for path, tree in modules("client"):
        for node in ast.walk(tree):
            compared = (
                [node.left, *node.comparators]
                if isinstance(node, ast.Compare)
                else [node.func.value]
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                else [node.subject]
                if isinstance(node, ast.Match)
                else []
            )
            wrong += [
                f"{path}:{part.lineno}" for part in compared if isinstance(part, ast.Attribute) and part.attr in LABELS
            ]
    assert wrong == []


def test_the_test_sees_a_comparison() -> None:
    tree = ast.parse('found.format.startswith("dcp-")')
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call))
    assert isinstance(call.func, ast.Attribute)
    assert isinstance(call.func.value, ast.Attribute)
    assert call.func.value.attr in LABELS
    assert {".deepspeed", "DeepSpeedOptions"} <= names_in(ast.parse("a.options.deepspeed.dp, of(DeepSpeedOptions)"))


def test_the_places_exist() -> None:
    assert all((ROOT / path).is_file() for path in MACHINERY)
    assert Path(ROOT / OF_DEEPSPEED).is_dir()
