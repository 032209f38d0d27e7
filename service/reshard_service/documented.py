"""The problems of each route, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI

from reshard_service.problems import MEDIA_TYPE

_MEANINGS = {
    401: "The token is missing or not valid.",
    403: "The token lacks a scope, a URL is outside the roots, or the store refuses the service's credentials.",
    404: "There is no such thing, or it belongs to another tenant.",
    408: "The body did not arrive in time.",
    409: "Something is in the way, such as another request with the same key, or the state of the job.",
    413: "The body is too large.",
    421: "The service is not served under the name in `Host`.",
    422: "The request or its source is wrong; `code` and `details` say what.",
    429: "A quota of the tenant is used up, or too many wrong tokens came from this address.",
    500: "A bug; the service's log has the details.",
    502: "The store violates its protocol.",
    503: "The job database or the store is away: try again after `Retry-After`.",
    504: "It takes longer than a request may.",
    507: "The target's store is full.",
}


_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
EVENTS = {
    "text/event-stream": {
        # OpenAPI 3.2's word for the schema of each event; FastAPI uses it in documents of version 3.1, too.
        "itemSchema": {
            "type": "object",
            "required": ["data", "event", "id"],
            "properties": {
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": {"$ref": "#/components/schemas/JobEvent"},
                },
                "event": {"type": "string", "enum": ["state", "progress", "worker"]},
                "id": {"type": "string", "pattern": "^[0-9]+$"},
            },
        }
    }
}
"""The content of an event stream: events with a JSON object as data, and pings, which are comments."""


def document_exactly(app: FastAPI) -> None:
    """Let `/openapi.json` state bounds of integers as integers.

    FastAPI makes floats of them, and `4.611686018427388e+18` is above the bound that is enforced.
    """
    as_made = app.openapi

    def exact() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _exact(as_made())
        return cast("dict[str, Any]", app.openapi_schema)

    app.openapi = exact


def _exact(value: Any) -> Any:
    if isinstance(value, list):
        return [_exact(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    return {
        name: int(item) if name in _BOUNDS and isinstance(item, float) and item.is_integer() else _exact(item)
        for name, item in found.items()
    }


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of answers with a problem, by status."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


OF_ALL = problems(408, 413, 421)
"""Answers to any request: they are given before its route is known."""
OF_MEMBERS = {**OF_ALL, **problems(401, 403, 422, 429, 500, 503)}
"""Answers of every route that needs the token."""
OF_SOURCES = problems(403, 409, 502, 507)
"""Answers of routes that wait for a look at a source or a target."""
