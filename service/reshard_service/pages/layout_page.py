"""The pictures of a conversion: which rank holds what in its source and in its target, and how one tensor moves.

They are pages of their own, because they take a look at the checkpoint. The page of a job, and that of a plan, load
them when they are shown themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from reshard.layout_svg import render as drawn
from reshard.models import ConvertRequest, SubmitRequest
from reshard.pictures import LayoutPair
from reshard_service.callers import Reader, Submitter
from reshard_service.context import Context
from reshard_service.engine_api import pictured
from reshard_service.pages.rendering import render
from reshard_service.pages.route import PageRoute
from reshard_service.pages.submission_form import FIELDS, request_of

router = APIRouter(include_in_schema=False, route_class=PageRoute)

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
    return _page(request, pair, {"tensor": tensor}, readers=later, job_id=job.id)


@router.get("/submit/layout")
async def layout_of_plan(request: Request, context: Context, caller: Submitter, tensor: _Tensor = "") -> Response:
    """Draw the layouts of a conversion that is not submitted yet."""
    fields = {name: request.query_params.get(name, "") for name in FIELDS}
    own = SubmitRequest.model_fields.keys() - ConvertRequest.model_fields.keys()
    asked = ConvertRequest.model_validate(request_of(fields).model_dump(exclude=own))
    return _page(request, await pictured(context, caller, asked, tensor or None), {**fields, "tensor": tensor})


def _page(
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
