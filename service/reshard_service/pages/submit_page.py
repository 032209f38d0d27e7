"""The page on which a job is submitted: inspect a source, choose a target, look at the plan, post it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from reshard.choices import NameScheme, OpaquePolicy, TokenScope, VerifyLevel, WeightDtype, ZeroStage
from reshard.errors import JobError, ReshardError
from reshard.models import ConvertRequest, Inspection, PlanSummary, PossibleTarget, SourceSpec, SubmitRequest
from reshard_jobs.principals import Principal
from reshard_service.callers import Submitter
from reshard_service.context import Context, ServiceContext
from reshard_service.engine_api import inspected, planned
from reshard_service.inspection_pool import ProbeTimeout
from reshard_service.jobs_api import create_job
from reshard_service.pages.forms import form_of
from reshard_service.pages.rendering import placed, render
from reshard_service.pages.route import PageRoute
from reshard_service.pages.submission_form import FIELDS, fields_of, request_of

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_MOST_NAMES = 500
_CHOICES = {
    "dtypes": list(WeightDtype),
    "stages": list(ZeroStage),
    "schemes": list(NameScheme),
    "policies": list(OpaquePolicy),
    "levels": list(VerifyLevel),
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
    values: dict[str, Any] = {"found": None, "problem": None, "plan": None, "plan_problem": None, "estimate": None}
    if fields["source"].strip():
        try:
            values["found"] = await inspected(context, caller, _source_of(fields))
        except ReshardError as error:
            values["problem"] = error.to_problem()
    if values["found"] is not None and asked.get("plan"):
        try:
            values["plan"] = await _plan(context, caller, request_of(fields))
            values["estimate"] = await _estimate(context, caller, values["plan"])
        except ReshardError as error:
            values["plan_problem"] = error.to_problem()
    found = values["found"]
    return render(
        request,
        "submit.html",
        fields=fields,
        cloned=asked.get("clone", ""),
        choices=[] if found is None else _choices(found),
        layout_query=urlencode({name: value for name, value in fields.items() if value}),
        names=[] if found is None else [t.fqn for t in found.tensors[:_MOST_NAMES]],
        # The same form sent twice makes one job.
        key=secrets.token_hex(16),
        **_CHOICES,
        **values,
    )


@router.post("/submit")
async def submit(request: Request, context: Context, caller: Submitter) -> Response:
    """Submit a job, and show it."""
    form = await form_of(request)
    body = request_of({name: form.get(name) for name in FIELDS})
    key = form.get("key")
    job = await create_job(context, caller, body, f"dashboard-{key}" if key else None)
    if TokenScope.READ not in caller.scopes:
        return render(request, "submitted.html", job=job)
    return RedirectResponse(placed(request, f"/jobs/{job.id}"), status_code=303)


def _source_of(fields: dict[str, str]) -> SourceSpec:
    minimal = {name: fields[name] for name in ("source", "tag", "profile")}
    return request_of({**minimal, "target": "-", "to": "universal"}).source


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
