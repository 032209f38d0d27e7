"""The problems of each route, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Any

from reshard_service.problems import MEDIA_TYPE

_MEANINGS = {
    401: "The token is missing or not valid.",
    403: "A URL is outside the service's roots, or the store refuses the service's credentials.",
    404: "There is no such job.",
    408: "The body did not arrive in time.",
    409: "Something is in the way, such as another request with the same key, or the state of the job.",
    413: "The body is too large.",
    421: "The service is not served under the name in `Host`.",
    422: "The request or its source is wrong; `code` and `details` say what.",
    429: "Too many wrong tokens came from this address.",
    500: "A bug; the service's log has the details.",
    502: "The store violates its protocol.",
    503: "The job database or the store is away: try again after `Retry-After`.",
    504: "It takes longer than a request may.",
    507: "The target's store is full.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of answers with a problem, by status."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


OF_ALL = problems(408, 413, 421)
"""Answers to any request: they are given before its route is known."""
OF_MEMBERS = {**OF_ALL, **problems(401, 422, 429, 500, 503)}
"""Answers of every route that needs the token."""
OF_SOURCES = problems(403, 409, 502, 507)
"""Answers of routes that wait for a look at a source or a target."""
