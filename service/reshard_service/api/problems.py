"""Turns every error into `application/problem+json` with a stable code, and documents the problems of each route."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from sqlalchemy.exc import DataError, DBAPIError, TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from reshard.errors import JobError, RequestError, ReshardError, exhaustion_of, printable
from reshard.wire_model import said_of
from reshard_jobs.database import is_away

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


def problem_response(error: ReshardError, *, status: int | None = None) -> JSONResponse:
    """The error as a response; `status` replaces the status of the table of codes."""
    problem = error.to_problem()
    if status is not None:
        problem["status"] = status
    headers: dict[str, str] = {}
    if error.retryable:
        headers["Retry-After"] = "1"
    if isinstance(wait_s := error.details.get("retry_after_s"), int):
        headers["Retry-After"] = str(wait_s)
    if error.code == "request.unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem, status_code=problem["status"], headers=headers, media_type=MEDIA_TYPE)


def install_handlers(
    app: FastAPI,
    on_refusal: Callable[[Request, ReshardError], None],
    routes: Sequence[BaseRoute],
    *,
    as_page: Callable[[Request, ReshardError], Response | None],
) -> None:
    """Map every exception of the application to a problem.

    Args:
        app: The application.
        on_refusal: Called with each typed error of a route.
        routes: All routes that it serves.
        as_page: Makes a page of the error of a path that no route has, if a browser asked for one.
    """

    def on_reshard(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ReshardError)
        on_refusal(request, error)
        return problem_response(error)

    def on_invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return problem_response(of_validation(error))

    def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405):
            unknown = RequestError(
                "request.not_found",
                f"there is no page {printable(request.url.path)}",
                fix="see /openapi.json for the API, / for the dashboard",
            )
            if (page := as_page(request, unknown)) is not None:
                return page
        code = "request.not_found" if error.status_code == 404 else "request.invalid"
        # FastAPI answers 400 to a body that is not UTF-8, and 422 to one that is not JSON.
        status = 422 if error.status_code == 400 else error.status_code
        answer = problem_response(RequestError(code, str(error.detail), fix="see /openapi.json"), status=status)
        if error.status_code == 405:
            answer.headers["Allow"] = ", ".join(_methods_of(routes, request))
        return answer

    def on_database(_request: Request, error: Exception) -> JSONResponse:
        return problem_of_database(error)

    def on_bug(_request: Request, error: Exception) -> JSONResponse:
        logger.error("unexpected error", exc_info=error)
        if (exhausted := exhaustion_of(error)) is not None:
            return problem_response(exhausted)
        return problem_response(JobError("internal.error", "an unexpected error; the service's log has the details"))

    app.add_exception_handler(ReshardError, on_reshard)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(DBAPIError, on_database)
    app.add_exception_handler(PoolTimeout, on_database)
    app.add_exception_handler(Exception, on_bug)


def problem_of_database(error: Exception) -> JSONResponse:
    """The response to a request whose SQL statement failed."""
    return problem_response(of_database(error))


def _methods_of(routes: Sequence[BaseRoute], request: Request) -> list[str]:
    """The methods of all routes that have this path. Starlette names those of the first one only."""
    found = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in found if isinstance(route, Route) for method in route.methods or ()})


def of_database(error: Exception) -> ReshardError:
    """The error for a failed SQL statement, which is logged. A retry helps only if the database is away or too busy."""
    logger.error("the job database failed", exc_info=error)
    if isinstance(error, DataError):
        return RequestError(
            "request.invalid",
            "a value of this request is one that the job database cannot hold or compare",
            fix="check the request for numbers out of range and for NUL characters",
        )
    if is_away(error):
        return JobError("service.unavailable", "the job database does not answer", fix="try again")
    return JobError("internal.error", "the job database refused a statement; the service's log has the details")


def of_validation(error: RequestValidationError | ValidationError) -> RequestError:
    """The error for a request whose fields are not as they must be."""
    problems: Any = error.errors()
    # `input` is left out: it is the caller's own data, which may be large or hostile.
    found: list[dict[str, str]] = []
    for problem in problems[:20]:
        entry: Mapping[str, Any] = problem
        where = ".".join(str(part) for part in entry["loc"])
        found.append({"where": printable(where), "problem": said_of(entry)})
    first = f"{found[0]['where']} {found[0]['problem']}" if found else "the request is not valid"
    return RequestError("request.invalid", first, fix="see /openapi.json", details={"problems": found})


# The problems of each route, as `/openapi.json` shows them.

_MEANINGS = {
    401: "The token is missing or not valid.",
    403: "The token lacks a scope, a URL is outside the roots, or the store refuses the service's credentials.",
    404: "There is no such thing, or it belongs to another tenant.",
    408: "The body did not arrive in time.",
    409: "Something is in the way, such as another request with the same key, or the state of the job.",
    410: "The layout has expired, or was removed.",
    412: "The file is not the one that `If-Match` names.",
    413: "The body is too large.",
    416: "The file has none of the bytes; `Content-Range` says its size.",
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
