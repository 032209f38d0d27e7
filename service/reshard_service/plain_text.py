"""Refuses what is no text: NUL characters and halves of surrogate pairs, wherever a request may carry them.

JSON can spell both. PostgreSQL holds neither, UTF-8 has no bytes for the second, and SQLite would take the first: one
wall before every route, so that all databases mean one thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from fastapi import Request

from reshard.errors import RequestError, printable

_NO_TEXT = re.compile("[\0\ud800-\udfff]")


async def require_plain_text(request: Request) -> None:
    """Let the request pass if its path, its query and its JSON body are text.

    Raises:
        RequestError: `request.invalid`.
    """
    places = [("path", value) for value in request.path_params.values()]
    places += [("query", text) for pair in request.query_params.multi_items() for text in pair]
    body = await request.body()
    if body:
        try:
            # The very value that FastAPI has parsed: it is kept with the request.
            places += _texts(await request.json())
        except (ValueError, RecursionError):
            return
    for where, text in places:
        if isinstance(text, str) and (found := _NO_TEXT.search(text)):
            what = "a NUL character" if found[0] == "\0" else "half of a surrogate pair"
            raise RequestError(
                "request.invalid",
                f"{where}: {what} in {printable(text, max_chars=64)!r}, which no job record can hold",
                fix="leave the character out",
            )


def _texts(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and every value of a JSON body, with the path that leads there; without recursion."""
    left = [("body", value)]
    while left:
        where, here = left.pop()
        if isinstance(here, dict):
            for name, part in cast("dict[str, Any]", here).items():
                yield where, name
                left.append((f"{where}.{printable(name, max_chars=64)}", part))
        elif isinstance(here, list):
            left += [(f"{where}.{number}", part) for number, part in enumerate(cast("list[Any]", here))]
        else:
            yield where, here
