"""The site of the documents in a real browser: all that it loads is ours, it fits, and everybody can read it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Generator
from http.server import SimpleHTTPRequestHandler
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

from house.repository import ROOT
from house.waiting import PATIENCE_S
from servers.answering import answering

PAGES = ("tutorial.html", "comparison.html")
MORE = ("index.html", "cli.html", "concepts/layouts.html", "reference/rest.html", "reference/python-api.html")
LOOKS = [
    *((PAGES, width, scheme) for width, scheme in ((1280, "light"), (390, "dark"))),
    *(
        pytest.param((*PAGES, *MORE), width, scheme, marks=pytest.mark.full)
        for width in (390, 1280)
        for scheme in ("light", "dark")
    ),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The address of the built site."""
    folder = tmp_path_factory.mktemp("documents")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, capture_output=True)
    with answering(functools.partial(_Quiet, directory=str(folder))) as url:
        yield f"{url}/"


@pytest.mark.parametrize(("names", "width", "scheme"), LOOKS)
def test_pages(documents: str, chromium: str, names: tuple[str, ...], width: int, scheme: Any) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        wrong = [problem for name in names for problem in problems(page, documents, name)]
        browser.close()
    assert wrong == []
    assert len(requested) > 10
    assert [url for url in requested if not url.startswith((documents, "data:", "blob:"))] == []


def problems(page: Page, documents: str, name: str) -> list[str]:
    """Faults of a page: too wide, or serious to axe-core."""
    page.goto(documents + name)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    found = [f"{name} is {wide} pixels too wide"] if wide > 0 else []
    for violation in Axe().run(page).response["violations"]:
        if violation["impact"] in {"serious", "critical"}:
            found.append(f"{name}: {violation['id']}: {violation['nodes'][0]['html'][:200]}")
    return found


def test_the_search_finds_the_literal_message(documents: str, chromium: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(documents, wait_until="networkidle")
        page.keyboard.press("/")
        page.keyboard.type("DP world size", delay=20)
        found = page.locator(".md-search-result__item", has_text="DeepSpeed's messages").first
        found.wait_for(timeout=PATIENCE_S * 1_000)
        browser.close()
