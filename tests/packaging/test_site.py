"""The documents as a site, built strictly and without a network: every link leads somewhere, all that loads is ours."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from house.repository import ROOT

REPOSITORY = "https://github.com/reshard/reshard/blob/main/"
LOADS = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("link", "href"),
    ("object", "data"),
    ("embed", "src"),
    ("use", "href"),
    ("image", "href"),
}
"""Attributes whose address a browser opens by itself."""


class Page(HTMLParser):
    """Addresses, names and the text of one built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        if tag == "link" and values.get("rel") in {"canonical", "prev", "next"}:
            return
        for name, value in values.items():
            if (tag, name) in LOADS:
                self.loads.append(value)
            elif name == "href":
                self.links.append(value)
            elif name in {"style", "srcset"} and re.search(r"url\(|//", value):
                self.loads.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make site` builds it; proxies that answer nothing stand for the network."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    # Not --quiet: it drops the warnings that --strict counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def built(site: Path) -> dict[str, Page]:
    """Every page, by its path in the site."""
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


def test_every_document_is_a_page(site: Path, built: dict[str, Page]) -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    wanted = {re.sub(r"(^|/)README\.html$", r"\1index.html", page[:-3] + ".html") for page in pages}
    assert wanted - set(built) == set()
    assert len(wanted) > 50


def test_every_link_and_anchor_leads_somewhere(site: Path, built: dict[str, Page]) -> None:
    broken: list[str] = []
    for name, page in built.items():
        # 404.html is served at any address, and its links begin with the site's root.
        for link in page.links if name != "404.html" else []:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(address.path)))
                if address.path
                else name
            )
            if target == "." or (site / target).is_dir():
                target = posixpath.normpath(f"{target}/index.html")
            exists = (site / target).is_file()
            if exists and address.fragment and target in built:
                exists = unquote(address.fragment) in built[target].names
            if not exists:
                broken.append(f"{name}: {link}")
    assert broken == []


def test_links_into_the_repository_name_files_that_are_there(built: dict[str, Page]) -> None:
    links = {link for page in built.values() for link in page.links if link.startswith(REPOSITORY)}
    assert len(links) > 5
    assert [link for link in links if not (ROOT / urlsplit(link.removeprefix(REPOSITORY)).path).exists()] == []


def test_nothing_is_loaded_from_elsewhere(site: Path, built: dict[str, Page]) -> None:
    pages = {f"{name}: {address}" for name, page in built.items() for address in page.loads if "//" in address}
    assert pages == set()
    sheets = [
        sheet for sheet in site.rglob("*.css") if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text())
    ]
    assert sheets == []


def test_no_page_has_a_part_that_asks_another_host(built: dict[str, Page], site: Path) -> None:
    """The theme's script asks GitHub for stars, and loads the program of diagrams, where a page has a part for them."""
    for name in built:
        text = (site / name).read_text(encoding="utf-8")
        assert 'data-md-component="source"' not in text, name
        assert 'class="mermaid"' not in text, name
