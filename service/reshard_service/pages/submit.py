"""The page on which a job is submitted: inspect a source, choose a target, look at plan and pictures, post it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, cast
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from markupsafe import Markup
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from reshard.choices import TokenScope
from reshard.declared import declared_options
from reshard.draw.layout import render as drawn
from reshard.errors import JobError, RequestError, ReshardError
from reshard.installed_formats import known_targets
from reshard.models.jobs import Inspection, Job, PlanSummary, PossibleTarget, SubmitRequest
from reshard.models.reports import LayoutPair
from reshard.option import parse_size
from reshard_engine.storage.urls import is_within
from reshard_jobs.limits import Roots, normalized_url
from reshard_jobs.tenants.principals import Principal
from reshard_service.api.context import Context, Reader, ServiceContext, Submitter
from reshard_service.api.engine import inspected, pictured, planned
from reshard_service.api.jobs import create_job
from reshard_service.api.problems import of_validation
from reshard_service.pages.rendering import form_of, names_shown, placed, render
from reshard_service.pages.route import PageRoute
from reshard_service.pages.words import label_of, places_in
from reshard_service.probes.prober import ProbeTimeout

# The form of a submission: its fields as a request, a request as its fields, and errors at their fields.

_OPTIONS = {n: option for n, option in declared_options().items() if n in names_shown("submit.html")}
"""The options of a conversion that have a field of their own: those that the form's template shows."""
_PLACES: dict[str, tuple[str, ...]] = {
    "source": ("source", "url"),
    "to": ("to",),
    "target": ("target",),
    **{name: (*option.within, option.field) for name, option in _OPTIONS.items()},
    **{name: (name,) for name in ("max_workers", "priority", "labels")},
}
"""The place of each field in the body of `POST /v1/jobs`."""
_KINDS = {name: option.kind for name, option in _OPTIONS.items()} | {"max_workers": int, "priority": int}
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_REST = "more"
"""The field for whatever else a request may say, as JSON."""
FIELDS = (*_PLACES, _REST)
NAMES = {name: label_of(".".join(place)) for name, place in _PLACES.items()} | {_REST: "Other fields, as JSON"}
"""The label of each field."""
_BY_PLACE = {".".join(place): name for name, place in _PLACES.items()}
_CHANGE = "change the marked field"


def request_of(fields: Mapping[str, str]) -> SubmitRequest:
    """The submission that the fields say. Empty fields are left to the defaults.

    Raises:
        RequestError: `request.invalid`; `details.problems` has what is wrong, each with the place of its field.
    """
    wrong: list[dict[str, str]] = []
    body: dict[str, Any] = {}
    try:
        body = _rest_of(fields.get(_REST, ""))
    except RequestError as error:
        wrong.append({"where": _REST, "problem": error.message, "fix": error.fix})
    for name, place in _PLACES.items():
        text = fields.get(name, "").strip()
        try:
            if text:
                _put(body, place, _value(name, text))
        except RequestError as error:
            wrong.append({"where": ".".join(place), "problem": error.message, "fix": error.fix})
    try:
        made = SubmitRequest.model_validate(body)
    except ValidationError as error:
        said = {problem["where"] for problem in wrong}
        found = of_validation(error).details["problems"]
        wrong += [
            {"where": p["where"], "problem": f"the value {p['problem']}", "fix": _CHANGE}
            for p in found
            if p["where"] not in said
        ]
        made = None
    if wrong or made is None:
        first = f"{label_of(wrong[0]['where'])}: {wrong[0]['problem']}"
        raise RequestError("request.invalid", first, fix=_CHANGE, details={"problems": wrong})
    return made


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """A problem as a field of the form shows it."""

    detail: str
    fix: str
    code: str = ""
    """The code of an error that is not of the form itself."""
    retryable: bool = False

    @classmethod
    def of(cls, error: ReshardError) -> FieldProblem:
        """The whole error."""
        return cls(error.message, error.fix, error.code, error.retryable)


def at_fields(error: ReshardError, fields: Mapping[str, str]) -> dict[str, FieldProblem]:
    """The problems of an error by the field of the form where they stand; none if it names no field."""
    problems: Any = error.details.get("problems")
    if isinstance(problems, list):
        found: dict[str, FieldProblem] = {}
        for problem in cast("list[Any]", problems):
            match problem:
                case {"where": str(where), "problem": str(text)}:
                    fix = str(cast("dict[str, Any]", problem).get("fix", _CHANGE))
                    found.setdefault(_field_at(where), FieldProblem(text, fix))
                case _:
                    pass
        if found:
            return found
    name = _field_of(error, fields)
    return {} if name is None else {name: FieldProblem.of(error)}


def _field_of(error: ReshardError, fields: Mapping[str, str]) -> str | None:
    """The field that an error is about: it says so, its code does, or its text names a flag or the field's value."""
    if isinstance(named := error.details.get("field"), str):
        return _field_at(named)
    if error.code.startswith("request.target_") or error.code == "request.overlap":
        return "target"
    if error.code == "request.root_forbidden":
        places = ("source", "target", "model_files")
        return next((n for n in places if fields.get(n) and repr(fields[n])[1:-1] in error.message), None)
    if places := [*places_in(error.message), *places_in(error.fix)]:
        exact = sorted(places, key=lambda place: place == "to")
        return next((n for place in exact if (n := _BY_PLACE.get(place)) is not None), _REST)
    return None


def _field_at(where: str) -> str:
    """The field for a place in the body, or for a part of it; what has no field of its own is among the others."""
    parts = where.removeprefix("body.").split(".")
    for length in range(len(parts), 0, -1):
        if (name := _BY_PLACE.get(".".join(parts[:length]))) is not None:
            return name
    return _REST


_STEP = re.compile(r"(?:global_?step|checkpoint|step|epoch|iter)[-_]?\d+", re.IGNORECASE)
"""Names of the directories that frameworks make for each checkpoint within the directory of a run."""


IN_MORE = ("overwrite", "exclude_frozen", "opaque", "memory_limit", "max_workers", "priority", "labels", _REST)
"""The fields that the form shows under "More options"."""


def suggested_target(found: Inspection, to: str, roots: Roots) -> str:
    """A place outside of the directory of the source's run; empty if there is none.

    DeepSpeed's tags get a directory of their own, so that `latest` in it names them.

    Args:
        found: The source.
        to: The format of the target; empty if it is not chosen yet.
        roots: The places that jobs may write.
    """
    run, tag = found.url.rstrip("/"), ""
    parent, _, name = run.rpartition("/")
    if _STEP.fullmatch(name) or name == found.tag:
        run, tag = parent, name
        parent, _, name = run.rpartition("/")
    target = known_targets().get(to)
    ending = f"_{(target is not None and target.ending) or to or 'converted'}"
    last = (
        f"{name}{ending}/{tag}" if tag and target is not None and target.is_tag else f"{name}{tag and '_'}{tag}{ending}"
    )
    writable = tuple(map(normalized_url, roots.writable or roots.urls))
    # `s3:/` and the root of a machine are not places for a checkpoint.
    places = [parent] if parent and not parent.endswith(":/") else []
    for place in (*places, *(root for root in writable if not is_within(root, run))):
        text = f"{place.rstrip('/')}/{last}"
        if not roots.nothing and (not writable or any(text != root and is_within(text, root) for root in writable)):
            return text
    return ""


def fields_of(job: Job) -> dict[str, str]:
    """The fields that say what a job's request says, for another job like it."""
    body = job.request.model_dump(mode="json", exclude_defaults=True)
    body["options"] = job.request.options.given()
    body.pop("plan", None)  # another job is planned anew: its fields may be changed
    body |= {"labels": dict(job.labels), "max_workers": job.max_workers, "priority": job.priority}
    found: dict[str, str] = {}
    for name, place in _PLACES.items():
        value = _take(body, place)
        if value not in (None, "", False, 0, {}):
            found[name] = _text(name, value)
    rest = _without_empty(body)
    return {**found, **({_REST: json.dumps(rest, indent=1)} if rest else {})}


def _rest_of(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(
            "request.invalid",
            "the other fields are not a JSON object",
            fix='write them as in POST /v1/jobs, such as {"threads": 4}',
        )
    return cast("dict[str, Any]", found)


def _value(name: str, text: str) -> Any:
    if (option := _OPTIONS.get(name)) is not None and option.option.parse is parse_size:
        return parse_size(text)
    if _KINDS.get(name) is int and _WHOLE.fullmatch(text):
        return int(text)  # anything else is left to the model, which says what is wrong
    if _KINDS.get(name) is bool:
        return text not in ("", "false")
    if name == "labels":
        pairs = [part.partition("=") for part in text.replace("\n", ",").split(",") if part.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise RequestError("request.invalid", "a label has no `=`", fix="write name=value, name=value")
        return {key.strip(): value.strip() for key, _, value in pairs}
    return text


def _text(name: str, value: Any) -> str:
    if name == "labels":
        return ", ".join(f"{key}={part}" for key, part in value.items())
    return "true" if value is True else str(value)


def _put(body: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    for name in place[:-1]:
        inner = body.setdefault(name, {})
        if not isinstance(inner, dict):
            raise RequestError("request.invalid", f"{name} of the other fields is not a JSON object", fix="change it")
        body = cast("dict[str, Any]", inner)
    body[place[-1]] = value


def _take(body: dict[str, Any], place: tuple[str, ...]) -> Any:
    for name in place[:-1]:
        body = body.get(name, {})
    return body.pop(place[-1], None)


def _without_empty(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in body.items():
        part: Any = _without_empty(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        if part not in (None, {}):
            found[name] = part
    return found


router = APIRouter(include_in_schema=False, route_class=PageRoute)

_MOST_NAMES = 500
_OF_SOURCE = ("source", "tag", "profile", "model_key", "optimizer_key")
"""The fields of the first step."""
_SHOWN: Mapping[str, Any] = {
    "options": _OPTIONS,
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
    if found is not None and found.newest is not None:
        # A job needs one checkpoint: the field names the one that is described, and a warning says so.
        fields["source"] = found.newest
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
        **_SHOWN,
    )


async def _plan(context: ServiceContext, caller: Principal, body: SubmitRequest) -> PlanSummary:
    try:
        return await planned(context, caller, context.settings.maxima.allowed_request(body.conversion()))
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


# The pictures of a conversion: which rank holds what in its source and in its target, and how one tensor moves.
#
# They are pages of their own, because they take a look at the checkpoint. The page of a job, and that of a plan, load
# them when they are shown themselves.

_WIDE, _NARROW = 1080, 360
_Tensor = Annotated[str, Query(max_length=2048)]


@router.get("/jobs/{job_id}/layout")
async def layout_of_job(
    *, job_id: str, request: Request, context: Context, caller: Submitter, reader: Reader, tensor: _Tensor = ""
) -> Response:
    """Draw the layouts of a job. It reads the source's metadata, as an inspection does."""
    store = context.jobs_of(reader)
    job = await run_in_threadpool(store.get, job_id)
    later = await run_in_threadpool(store.readers_of, job)
    pair = await pictured(context, caller, job.request, tensor or None)
    return _layout_page(request, pair, {"tensor": tensor}, readers=later, job_id=job.id)


@router.get("/submit/layout")
async def layout_of_plan(request: Request, context: Context, caller: Submitter, tensor: _Tensor = "") -> Response:
    """Draw the layouts of a conversion that is not submitted yet."""
    fields = {name: request.query_params.get(name, "") for name in FIELDS}
    pair = await pictured(context, caller, request_of(fields).conversion(), tensor or None)
    return _layout_page(request, pair, {**fields, "tensor": tensor})


def _layout_page(
    request: Request, pair: LayoutPair, fields: dict[str, str], *, readers: Sequence[str] = (), job_id: str = ""
) -> Response:
    # The renderer escapes every name. The policy of our pages lets nothing in it run.
    wide, narrow = (
        Markup(drawn(pair.source, pair.target, width=width, styled=False))  # noqa: S704
        for width in (_WIDE, _NARROW)
    )
    shown = pair.source.tensors[0] if pair.source.tensors else None
    return render(
        request,
        "layout.html",
        wide=wide,
        narrow=narrow,
        fields={name: value for name, value in fields.items() if value and name != "tensor"},
        tensor=f"{shown.fqn}/{shown.state}" if shown else "",
        readers=readers,
        job_id=job_id,
    )
