"""Refuses NUL characters and lone surrogates in the path, the query and the body of a request.

JSON can encode both. PostgreSQL stores neither, UTF-8 cannot encode lone surrogates, and SQLite would store NUL
characters. One check before every route makes all databases behave alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

from fastapi import Request

from reshard.errors import RequestError, printable

_NO_TEXT = re.compile("[\0\ud800-\udfff]")


async def require_plain_text(request: Request) -> None:
    """Let the request pass if its path, query and JSON body contain no such characters.

    Raises:
        RequestError: `request.invalid`.
    """
    places = [("path", value) for value in request.path_params.values()]
    places += [("query", text) for pair in request.query_params.multi_items() for text in pair]
    body = await request.body()
    if body:
        # FastAPI keeps the parsed body with the request, so this is the same value. A form is no JSON.
        with suppress(ValueError, RecursionError):
            places += _texts(await request.json())
    for where, text in places:
        if isinstance(text, str):
            refuse_unstorable(where, text)


def refuse_unstorable(where: str, text: str) -> None:
    """Refuse a text that has such a character.

    Raises:
        RequestError: `request.invalid`.
    """
    if found := _NO_TEXT.search(text):
        what = "a NUL character" if found[0] == "\0" else "half of a surrogate pair"
        raise RequestError(
            "request.invalid",
            f"{where}: {what} in {printable(text, max_chars=64)!r}, which no job record can hold",
            fix="leave the character out",
        )


def _texts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every text of a JSON body, keys and values, with its path. It does not recurse."""
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
