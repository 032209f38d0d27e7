"""Every `fix` of the program, read from its source, and the commands in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from house.repository import ROOT
from reshard import errors

FOLDERS = ("client", "worker", "service")
_COMMAND = re.compile(r"(?<![\w'/.$-])(?:reshard (?!service\b)[a-z]|pip install |export [A-Z])[^;,`)]*")


def text_of(node: ast.expr) -> str:
    """What an expression says, with braces for what is only known when it is raised."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(p) if isinstance(p, ast.Constant) else "{}" for p in parts)
        case ast.BinOp(left=left, right=right) | ast.BoolOp(values=[left, right]):
            between = " | " if isinstance(node, ast.BoolOp) else ""
            return f"{text_of(left)}{between}{text_of(right)}"
        case ast.IfExp(body=first, orelse=second):
            return f"{text_of(first)} | {text_of(second)}"
        case _:
            return "{}"


def _fixes(path: Path) -> Iterator[tuple[str, str]]:
    """(code, fix) of every error that a module raises; a fix that is a name stands as what was assigned to it."""
    text = path.read_text()
    if "fix=" not in text:
        return
    nodes = list(ast.walk(ast.parse(text)))
    named: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, []).append(text_of(node.value))
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg != "fix":
                continue
            code = text_of(node.args[0]) if node.args else "{}"
            found = named.get(keyword.value.id, []) if isinstance(keyword.value, ast.Name) else [text_of(keyword.value)]
            yield from ((code, text) for text in found if text.strip("{} |"))


def fixes() -> list[str]:
    """Every fix by its code, those that stand for a whole branch first."""
    found = {f"{branch}.*\t{text}" for branch, text in errors._DEFAULT_FIXES.items()}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "testing" not in path.parts:
                found |= {f"{code}\t{text}" for code, text in _fixes(path)}
    return sorted(found)


def commands_in(text: str) -> list[str]:
    """The commands that a fix says: each ends where the fix, or a part of its sentence, does.

    A name in backticks, such as that of `reshard convert`, is not a command.
    """
    without_names = re.sub(r"`reshard [a-z-]+`", "", text)
    return [found.strip() for part in without_names.split(" | ") for found in _COMMAND.findall(part)]
