"""The page for language models, by the convention of llmstxt.org: every page of the site with what it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
LLMS = REPOSITORY / "docs" / "llms.txt"
_OPTIONAL = ("adr/", "runbooks/")
"""Pages that a reader in a hurry leaves out."""


def llms_page() -> str:
    """docs/llms.txt as it should be."""
    # Without the one tag of mkdocs: it names a function.
    text = re.sub(r"!!python/\S+", "", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    config: dict[str, Any] = yaml.safe_load(text)
    host = str(config["site_url"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", "", _about("index.md")]
    optional: list[str] = []
    for section in config["nav"]:
        ((name, value),) = section.items()
        entries = [("", name, value)] if isinstance(value, str) else list(_pages(value))
        kept: list[str] = []
        for _, title, page in entries:
            line = f"- [{title}]({host}{_address(page)}): {_about(page)}"
            (optional if page.startswith(_OPTIONAL) else kept).append(line)
        if page_lines := [line for line in kept if "/index.html)" not in line or len(entries) > 1]:
            lines += ["", f"## {name}", "", *page_lines]
    return "\n".join([*lines, "", "## Optional", "", *optional]) + "\n"


def _pages(entries: list[Any], inside: str = "") -> Iterator[tuple[str, str, str]]:
    """Section, title and file of every page of a part of the navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield inside, inside or _title(entry), entry
            continue
        for name, value in _items(entry):
            if isinstance(value, str):
                yield inside, name, value
            else:
                yield from _pages(value, name)


def _items(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from entry.items()


def _address(page: str) -> str:
    return re.sub(r"(^|/)README\.md$", r"\1index.md", page).removesuffix(".md") + ".html"


def _title(page: str) -> str:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    return text.partition("\n")[0].removeprefix("# ")


def _about(page: str) -> str:
    """The first sentence of a page's first paragraph, without links; the title where there is no such sentence."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in text.split("\n\n")[1:]:
        if block.strip() and not re.match(r"\s*([>|#!-]|\*\*Any|\d+\.|Source)", block):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(block.split())).removeprefix("**Context.** ")
            sentence = re.split(r"(?<=\.)\s", plain.removeprefix("**Decision.** "))[0]
            return sentence if len(sentence) > 30 and sentence.endswith(".") else _title(page)
    return _title(page)
