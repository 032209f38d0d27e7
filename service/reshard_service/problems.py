"""Turns every error into `application/problem+json` with a stable code and without internals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from sqlalchemy.exc import DataError, DBAPIError, TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from reshard.errors import JobError, RequestError, ReshardError, printable
from reshard.validation import said_of
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
        # FastAPI answers 400 to a body that is no UTF-8, and 422 to one that is no JSON.
        status = 422 if error.status_code == 400 else error.status_code
        answer = problem_response(RequestError(code, str(error.detail), fix="see /openapi.json"), status=status)
        if error.status_code == 405:
            answer.headers["Allow"] = ", ".join(_methods_of(routes, request))
        return answer

    def on_database(_request: Request, error: Exception) -> JSONResponse:
        return problem_of_database(error)

    def on_bug(_request: Request, error: Exception) -> JSONResponse:
        logger.error("unexpected error", exc_info=error)
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
