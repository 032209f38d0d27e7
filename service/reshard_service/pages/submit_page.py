"""The page on which a job is submitted: inspect a source, choose a target, look at the plan, post it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from reshard.choices import NameScheme, OpaquePolicy, TokenScope, VerifyLevel, WeightDtype, ZeroStage
from reshard.dcp_options import Grammar
from reshard.errors import JobError, ReshardError
from reshard.models import ConvertRequest, Inspection, PlanSummary, PossibleTarget, SubmitRequest
from reshard_jobs.principals import Principal
from reshard_service.callers import Submitter
from reshard_service.context import Context, ServiceContext
from reshard_service.engine_api import inspected, planned
from reshard_service.inspection_pool import ProbeTimeout
from reshard_service.jobs_api import create_job
from reshard_service.pages.forms import form_of
from reshard_service.pages.rendering import placed, render
from reshard_service.pages.route import PageRoute
from reshard_service.pages.submission_form import (
    FIELDS,
    IN_MORE,
    NAMES,
    FieldProblem,
    at_fields,
    fields_of,
    request_of,
    suggested_target,
)

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_MOST_NAMES = 500
_OF_SOURCE = ("source", "tag", "profile", "model_key", "optimizer_key")
"""The fields of the first step."""
_CHOICES: Mapping[str, Any] = {
    "dtypes": list(WeightDtype),
    "stages": list(ZeroStage),
    "schemes": list(NameScheme),
    "policies": list(OpaquePolicy),
    "levels": list(VerifyLevel),
    "grammars": list(Grammar),
    "labels": NAMES,
    "in_more": IN_MORE,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A format that the checkpoint may be converted to."""

    to: str
    possible: bool
    targets: tuple[PossibleTarget, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time that a conversion may take, judged by the speed of the newest ones."""

    seconds: float
    rate: float
    jobs: int


@router.get("/submit")
async def submit_page(request: Request, context: Context, caller: Submitter) -> Response:
    """Show as much of the way to a job as the fields allow: the form, the source, the plan."""
    asked = dict(request.query_params)
    fields = {name: asked.get(name, "") for name in FIELDS}
    if asked.get("clone"):
        # A clone shows what another job was asked to do, which takes the right to read jobs.
        caller.require(TokenScope.READ)
        job = await run_in_threadpool(context.jobs_of(caller).get, asked["clone"])
        fields |= fields_of(job)
    values: dict[str, Any] = {"cloned": asked.get("clone", "")}
    found, problem = await _inspect(context, caller, fields)
    if found is not None and asked.get("plan"):
        try:
            values["plan"] = await _plan(context, caller, request_of(fields))
            values["estimate"] = await _estimate(context, caller, values["plan"])
        except ReshardError as error:
            problem = error
    return await _page(request, context, caller, fields=fields, found=found, problem=problem, **values)


@router.post("/submit")
async def submit(request: Request, context: Context, caller: Submitter) -> Response:
    """Submit a job, and show it. If it is refused, show the form again, with the error."""
    form = await form_of(request)
    fields = {name: form.get(name) for name in FIELDS}
    key = form.get("key")
    try:
        job = await create_job(context, caller, request_of(fields), f"dashboard-{key}" if key else None)
    except ReshardError as error:
        # A service that refuses because it is busy is not made to look for long.
        found, _ = await _inspect(context, caller, fields, limit_s=context.settings.admission_s)
        # A job that may be made already is found by the same key.
        again = key if error.retryable else None
        return await _page(request, context, caller, fields=fields, found=found, problem=error, key=again)
    if TokenScope.READ not in caller.scopes:
        return render(request, "submitted.html", job=job)
    return RedirectResponse(placed(request, f"/jobs/{job.id}"), status_code=303)


async def _inspect(
    context: ServiceContext, caller: Principal, fields: Mapping[str, str], limit_s: float | None = None
) -> tuple[Inspection | None, ReshardError | None]:
    """The source that the fields name, or why it cannot be read; neither if they name none."""
    if not fields["source"].strip():
        return None, None
    own = {name: fields[name] for name in _OF_SOURCE}
    try:
        # The target is not asked for yet.
        source = request_of({**own, "target": "-", "to": "universal"}).source
        return await inspected(context, caller, source, limit_s), None
    except ReshardError as error:
        return None, error


async def _page(  # noqa: PLR0913 - what the page shows
    request: Request,
    context: ServiceContext,
    caller: Principal,
    *,
    fields: dict[str, str],
    found: Inspection | None,
    problem: ReshardError | None,
    plan: PlanSummary | None = None,
    estimate: Estimate | None = None,
    cloned: str = "",
    key: str | None = None,
) -> Response:
    errors = {} if problem is None else at_fields(problem, fields)
    told = None if problem is None else problem.to_problem()
    if problem is not None and found is None and errors.keys().isdisjoint(_OF_SOURCE):
        errors = {"source": FieldProblem.of(problem)}  # the fields of the target are not shown yet
    limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
    choices: Sequence[Choice] = () if found is None else _choices(found)
    roots, to = limits.roots(context.settings.jobs.roots), ["", *(choice.to for choice in choices)]
    suggested = {} if found is None else {name: suggested_target(found, name, roots) for name in to}
    return render(
        request,
        "submit.html",
        status=told["status"] if told and request.method == "POST" else 200,
        fields=fields,
        found=found,
        plan=plan,
        estimate=estimate,
        cloned=cloned,
        errors=errors,
        problem=told,
        suggested=suggested,
        choices=choices,
        layout_query=urlencode({name: value for name, value in fields.items() if value}),
        names=[] if found is None else [t.fqn for t in found.tensors[:_MOST_NAMES]],
        # The same form sent twice makes one job.
        key=key or secrets.token_hex(16),
        **_CHOICES,
    )


async def _plan(context: ServiceContext, caller: Principal, body: SubmitRequest) -> PlanSummary:
    own = SubmitRequest.model_fields.keys() - ConvertRequest.model_fields.keys()
    asked = ConvertRequest.model_validate(body.model_dump(exclude=own))
    try:
        return await planned(context, caller, context.settings.maxima.allowed_request(asked))
    except ProbeTimeout as error:
        raise JobError(
            "job.wait_timeout",
            f"planning takes longer than {context.settings.admission_s:g} s",
            fix="submit it without looking at the plan: the job plans as long as it needs",
        ) from error


async def _estimate(context: ServiceContext, caller: Principal, plan: PlanSummary) -> Estimate | None:
    rates = await run_in_threadpool(context.jobs_of(caller).recent_rates)
    if not rates:
        return None
    rate = median(rates)
    return Estimate(plan.write_bytes / rate, rate, len(rates))


def _choices(found: Inspection) -> Sequence[Choice]:
    """The targets of an inspection by format: `zero --dp` and `zero --tp` are one format."""
    by_format: dict[str, list[PossibleTarget]] = {}
    for target in found.targets:
        by_format.setdefault(target.name.partition(" ")[0], []).append(target)
    return [Choice(to, any(t.possible for t in targets), tuple(targets)) for to, targets in by_format.items()]
