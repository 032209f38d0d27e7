"""Job ids as people type them: whole, or a beginning that only one job has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import RequestError, ReshardError, listed, printable

if TYPE_CHECKING:
    from reshard.client import Client

_WHOLE = re.compile("job_[a-z2-7]{24}")
_LEAST_CHARS = 3
_MOST_JOBS = 1000
_PAGE = 200


def whole_id(client: Client, text: str) -> str:
    """The id of the job that a text names: its id, or a beginning of it, with or without `job_`.

    Only the newest jobs are looked through for a beginning.

    Raises:
        RequestError: `request.not_found`: none; `request.invalid`: several.
    """
    if _WHOLE.fullmatch(text):
        return text
    try:
        return client.get(text).id
    except ReshardError as error:
        if error.code != "request.not_found" or len(text.removeprefix("job_")) < _LEAST_CHARS:
            raise
    found = _beginning_with(client, text)
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(
            "request.invalid",
            f"{len(found)} jobs have an id that begins with {printable(text, max_chars=64)}: {listed(found, 4)}",
            fix="write more of the id; to see all: reshard jobs list",
        )
    raise RequestError(
        "request.not_found",
        f"no job has this id, and none of the newest {_MOST_JOBS} one that begins with {printable(text, max_chars=64)}",
        fix="reshard jobs list",
    )


def _beginning_with(client: Client, text: str) -> list[str]:
    found: list[str] = []
    seen, token = 0, ""
    while seen < _MOST_JOBS:
        page = client.list(page_size=_PAGE, page_token=token)
        found += [job.id for job in page.jobs if job.id.startswith((text, f"job_{text}"))]
        seen, token = seen + len(page.jobs), page.next_page_token
        if not token:
            break
    return found
