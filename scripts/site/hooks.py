"""Hooks of mkdocs, so that the same Markdown reads well on GitHub and on the site.

Links that leave docs/ lead to the repository on its host. A link whose text is the name of a page shows the title of
that page. Pictures of layouts become part of the page: they follow its colours, and show names on hover and focus.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^]\[]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r'<img alt="([^"]*)" src="[^"]*images/layouts/([\w-]+)\.svg" */?>')
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with links for the site."""
    host = f"{str(config.repo_url).rstrip('/')}/blob/main/"
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        text, address, anchor = found[1], found[2], found[3] or ""
        inside = posixpath.normpath(posixpath.join(folder, address))
        file = files.get_file_from_path(inside)
        if file is not None:
            return f"[{_title(file.content_string) if text.endswith('.md') else text}]({address}{anchor})"
        if inside.endswith(".md") and not inside.startswith("../"):
            return found[0]  # a page that is not there: mkdocs says so
        return f"[{text}]({host}{posixpath.normpath(posixpath.join('docs', inside))}{anchor})"

    return _outside_fences(markdown, link)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - as mkdocs calls it
    """The content of a page, with pictures of layouts in it, for wide and for narrow windows."""

    def picture(found: re.Match[str]) -> str:
        drawn: list[str] = []
        for name, width in ((found[2], "wide"), (f"{found[2]}-narrow", "narrow")):
            file = files.get_file_from_path(f"images/layouts/{name}.svg")
            drawn.append(f'<span class="layout-{width}">{file.content_string}</span>' if file else "")
        return "".join(drawn)

    return _PICTURE.sub(picture, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001 - as mkdocs calls it
    """The page with a name for the theme's search dialog, which readers of screens are told."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def _title(markdown: str) -> str:
    """The name of a page where another one points to it: its heading as far as a colon."""
    found = _TITLE.search(markdown)
    return found[1].partition(":")[0] if found else ""


def _outside_fences(markdown: str, replace: Callable[[re.Match[str]], str]) -> str:
    parts: list[str] = []
    at = 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replace, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(replace, markdown[at:])])
