"""Every module and symbol that ARCHITECTURE.md and the ADRs name in code spans exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache

import pytest

from house.repository import ROOT
from reshard.errors import CODES

SOURCE_ROOTS = ("client", "service", "worker")
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in [*(ROOT / "docs" / "adr").glob("0*.md"), ROOT / "ARCHITECTURE.md"]
)
OF_OTHERS = {
    "Linux": ("renameat2", "copy_file_range", "posix_fallocate", "sync_file_range", "O_DIRECT", "SCM_RIGHTS"),
    "FUSE": ("INIT", "LOOKUP", "OPEN", "READDIR", "STATFS", "fusermount3", "include/uapi/linux/fuse.h"),
    "HTTP": ("ETag", "HttpOnly", "POST", "Warning"),
    "Python": ("bytes", "find_class", "pyproject.toml", "DeprecationWarning"),
    "pydantic": ("validation_alias",),
    "torch": ("torch", "torch.load", "optimizer.state_dict()", "TensorProperties", "affine_map"),
    "numbers": ("xxh3", "isal", "crc32_combine"),
    "PEFT": ("merge_and_unload",),
    "Starlette": ("FileResponse",),
    "SQLAlchemy": ("create_all",),
    "fsspec and s3fs": ("cat_ranges", "s3fs.ls", "s3fs.find"),
    "S3": ("UploadPartCopy", "get_object"),
    "obstore": ("get_range_async", "open_writer"),
    "Azure": ("get_block_list",),
    "Google Cloud Storage": ("compose", "transfer_manager"),
    "MPI": ("mpirun",),
    "DeepSpeed": ("zero/optimizer_state.pt",),
    "pytest": ("nightly",),
}
"""Names that are not ours, by whose they are."""

Symbols = dict[str, set[str]]
_SPAN = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
_FILE = re.compile(r"[\w./-]+/[\w.-]+\.\w+")


@cache
def _symbols() -> tuple[Symbols, set[str]]:
    """The members of each module, package and class by its name, and every name that the code gives or quotes."""
    members: defaultdict[str, set[str]] = defaultdict(set)
    names: set[str] = set()
    for path in (p for root in SOURCE_ROOTS for p in (ROOT / root).rglob("*.py")):
        stem = path.parent.name if path.stem == "__init__" else path.stem
        members[path.parent.name].add(path.stem)
        members[path.parent.parent.name].add(path.parent.name)
        names.update(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(tree := ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef(name=name):
                    members[name] |= _stored(node)
                    names.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Constant(value=str(name)):
                    names.add(name)
                case _:
                    pass
        members[stem] |= _stored(tree)
    return members, names


def _stored(node: ast.Module | ast.ClassDef) -> set[str]:
    """The names that the body of a module or a class gives."""
    found: set[str] = set()
    for child in ast.walk(node):
        match child:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.ImportFrom(names=aliases):
                found.update(alias.asname or alias.name for alias in aliases)
            case _:
                pass
    return found


def missing(text: str) -> list[str]:
    """The code spans of a page that look like the name of a module, a symbol or a file, and that name nothing."""
    return [span for span in dict.fromkeys(_SPAN.findall(text)) if not _exists(span)]


def _exists(span: str) -> bool:
    members, names = _symbols()
    if any(span in group for group in OF_OTHERS.values()):
        return True
    if _FILE.fullmatch(span):
        return any((ROOT / root / span).exists() for root in ("", *SOURCE_ROOTS, "worker/reshard_engine"))
    if span in CODES or span in names or not _NAME.fullmatch(span):
        return True
    first, *rest = span.removesuffix("()").split(".")
    if not rest:
        return first in names or first in members or _is_test(first)
    return all(after in members[before] for before, after in zip((first, *rest), rest, strict=False))


@cache
def _is_test(name: str) -> bool:
    return any(f"def {name}(" in p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("page", PAGES)
def test_the_named_modules_and_symbols_exist(page: str) -> None:
    assert missing((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("`plan.server_copy` cuts", ["plan.server_copy"]),
        ("`Checkpoint.no_such_member`", ["Checkpoint.no_such_member"]),
        ("`reshard_service/identity.py`", ["reshard_service/identity.py"]),
        ("`NoSuchClass` and `no_such_function()`", ["NoSuchClass", "no_such_function()"]),
        ("`Checkpoint.client_state`, `formats.registry`, `torch.load`, `reshard verify --cert`, `source.changed`", []),
    ],
)
def test_a_name_that_is_gone_is_told(text: str, gone: list[str]) -> None:
    assert missing(text) == gone


def test_no_name_of_others_is_ours() -> None:
    members, names = _symbols()
    listed = [name for group in OF_OTHERS.values() for name in group]
    assert [n for n in listed if n in members and n not in names] == []
    texts = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert [n for n in listed if f"`{n}`" not in texts] == []
