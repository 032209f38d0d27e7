"""Routes that read a checkpoint without a job: plans, inspections, and virtual layouts with their files.

A file of a virtual layout is served as RFC 9110 has it: conditions (section 13), and ranges (section 14).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive, Scope, Send

from reshard.choices import JobKind
from reshard.errors import JobError, RequestError, ReshardError, printable
from reshard.models.jobs import (
    ConvertRequest,
    Inspection,
    InspectRequest,
    Job,
    Layout,
    LayoutFiles,
    LayoutList,
    LayoutRequest,
    PlanSummary,
)
from reshard.models.reports import LayoutPair
from reshard.options import SourceSpec
from reshard_jobs.layouts import UsedLayout
from reshard_jobs.tenants.principals import Principal
from reshard_service.api.context import Context, Reader, ServiceContext, Submitter
from reshard_service.api.former_places import FormerPlacesRoute
from reshard_service.api.jobs import accepted
from reshard_service.api.problems import OF_SOURCES, problem_response, problems
from reshard_service.auth import root_of
from reshard_service.probes.prober import ProbeTimeout

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["checkpoints"], route_class=FormerPlacesRoute)


@router.post(
    "/plans",
    response_model=PlanSummary,
    responses={202: {"model": Job, "description": "A planning-only job."}, **OF_SOURCES},
)
async def plan(body: ConvertRequest, context: Context, caller: Submitter, request: Request) -> Response:
    """Plan a conversion. Answers 202 with a planning-only job if planning takes longer than a request may."""
    body = context.settings.maxima.allowed_request(body)
    try:
        summary = await planned(context, caller, body)
    except ProbeTimeout:
        job = await run_in_threadpool(lambda: context.jobs_of(caller).create(body, kind=JobKind.PLAN))
        await run_in_threadpool(context.doorbell.ring)
        return accepted(job, request)
    return JSONResponse(summary.model_dump(mode="json"))


async def planned(context: ServiceContext, caller: Principal, body: ConvertRequest) -> PlanSummary:
    """Plan a conversion for a caller.

    Raises:
        ReshardError: The conversion would be refused.
        ProbeTimeout: Planning takes longer than a request may.
    """
    roots = context.settings.jobs.roots
    limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
    request = await run_in_threadpool(limits.allowed_request, body, roots)
    return await context.prober.plan(
        request, tenant=caller.tenant, roots=limits.roots(roots), limit_s=context.settings.admission_s
    )


@router.post("/inspections", response_model=Inspection, responses={**OF_SOURCES, **problems(504)})
async def inspect(body: InspectRequest, context: Context, caller: Submitter) -> Response:
    """Describe a checkpoint without reading tensor data."""
    found = await inspected(context, caller, body)
    return JSONResponse(found.model_dump(mode="json"))


async def inspected(
    context: ServiceContext, caller: Principal, body: SourceSpec, limit_s: float | None = None
) -> Inspection:
    """Describe a checkpoint for a caller, in `limit_s` seconds or as long as the settings say.

    Raises:
        ReshardError: It cannot be read, or it takes too long (`job.wait_timeout`).
    """
    roots = context.settings.jobs.roots
    limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
    source = await run_in_threadpool(limits.allowed_source, body, roots)
    limit_s = context.settings.inspection_s if limit_s is None else limit_s
    try:
        return await context.prober.inspect(source, tenant=caller.tenant, roots=limits.roots(roots), limit_s=limit_s)
    except ProbeTimeout as error:
        raise JobError(
            "job.wait_timeout",
            f"reading the checkpoint's metadata takes longer than {limit_s:g} s",
            fix="run `reshard inspect` on a machine near the checkpoint",
        ) from error


async def pictured(context: ServiceContext, caller: Principal, body: ConvertRequest, tensor: str | None) -> LayoutPair:
    """The layouts of a conversion's source and planned target for a caller.

    Raises:
        ReshardError: The conversion would be refused, or it takes too long (`job.wait_timeout`).
    """
    roots = context.settings.jobs.roots
    limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
    request = await run_in_threadpool(limits.allowed_request, body, roots)
    limit_s = context.settings.inspection_s
    try:
        return await context.prober.pictures(
            request, tensor, tenant=caller.tenant, roots=limits.roots(roots), limit_s=limit_s
        )
    except ProbeTimeout as error:
        raise JobError(
            "job.wait_timeout",
            f"reading the checkpoint's metadata takes longer than {limit_s:g} s",
            fix="run `reshard inspect SRC --svg FILE` on a machine near the checkpoint",
        ) from error


# Virtual layouts: targets whose files are computed from the source when they are read.

layouts_router = APIRouter(prefix="/v1/layouts", tags=["layouts"], route_class=FormerPlacesRoute)
_OF_LAYOUTS = problems(403, 404, 410)


@layouts_router.post(
    "",
    status_code=201,
    response_model=Layout,
    responses={**OF_SOURCES, **problems(504)},
    summary="Make a virtual layout",
)
async def make_layout(body: LayoutRequest, context: Context, caller: Submitter, request: Request) -> Response:
    """Plan the target of a conversion that nobody runs, and serve its files until it expires.

    The source is pinned: a file whose source has changed since is `source.changed`.
    """
    store, roots = context.layouts_of(caller), context.settings.jobs.roots
    maxima = replace(context.settings.maxima, ranks=context.settings.layout_ranks)
    asked = maxima.allowed_request(body.conversion())
    layout = await run_in_threadpool(store.begin, asked)
    layout = replace(layout, request=await run_in_threadpool(layout.limits.allowed_layout, asked, roots))
    try:
        planned = await context.engines.plan(layout, compare=body.compare)
        made = await run_in_threadpool(store.create, layout, planned)
    except BaseException:
        context.engines.end(layout.id)
        raise
    place = root_of(request.scope) + made.links["self"]
    return JSONResponse(made.model_dump(mode="json"), 201, {"Location": place})


@layouts_router.get("", response_model=LayoutList, summary="List virtual layouts")
def list_layouts(context: Context, caller: Reader) -> LayoutList:
    """List the layouts that have not expired, the newest first."""
    return LayoutList(layouts=context.layouts_of(caller).list())


@layouts_router.get("/{layout_id}", response_model=Layout, responses=_OF_LAYOUTS, summary="Get a virtual layout")
def get_layout(layout_id: str, context: Context, caller: Reader) -> Layout:
    """Get a layout with its files. The time at which it expires stays the same."""
    _judged(context, context.layouts_of(caller).known(layout_id))
    return context.layouts_of(caller).get(layout_id)


@layouts_router.delete("/{layout_id}", status_code=204, responses=_OF_LAYOUTS, summary="Remove a virtual layout")
async def remove_layout(layout_id: str, context: Context, caller: Submitter) -> Response:
    """End a layout before it expires. Responses that send its files are cut."""
    await run_in_threadpool(context.layouts_of(caller).remove, layout_id)
    context.engines.end(layout_id)
    return Response(status_code=204)


@layouts_router.get(
    "/{layout_id}/files", response_model=LayoutFiles, responses=_OF_LAYOUTS, summary="List a layout's files"
)
def list_files(layout_id: str, context: Context, caller: Reader) -> LayoutFiles:
    """List the files of a layout, by their paths below this one."""
    _judged(context, context.layouts_of(caller).known(layout_id))
    return LayoutFiles(files=context.layouts_of(caller).files(layout_id))


_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_UNCHANGED = {"description": "The file is as `If-None-Match` knows it."}
_OF_HEADS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": _BYTES},
    304: _UNCHANGED,
    **problems(403, 404, 410, 412),
}
_OF_FILES: dict[int | str, dict[str, Any]] = {
    **_OF_HEADS,
    206: {
        "description": "The ranges: bytes of the file, or `multipart/byteranges` if there are several.",
        "content": {**_BYTES, "multipart/byteranges": {"schema": {"type": "string", "format": "binary"}}},
    },
    **OF_SOURCES,
    **problems(416),
}


@layouts_router.head(
    "/{layout_id}/files/{path:path}", response_class=Response, responses=_OF_HEADS, summary="Describe a layout's file"
)
async def head_file(
    layout_id: str,
    path: str,
    *,
    context: Context,
    caller: Reader,
    if_match: Annotated[str | None, Header()] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Say the size and the ETag of a file."""
    file = await _found(context, caller, layout_id, path)
    if (early := _by_conditions(file.tag, if_match, if_none_match)) is not None:
        return early
    return Response(headers={**file.headers, "Content-Length": str(file.layout.size_bytes)}, media_type=_MEDIA_TYPE)


@layouts_router.get(
    "/{layout_id}/files/{path:path}", response_class=Response, responses=_OF_FILES, summary="Get a layout's file"
)
async def get_file(
    layout_id: str,
    path: str,
    *,
    context: Context,
    caller: Reader,
    byte_ranges: Annotated[str | None, Header(alias="Range")] = None,
    if_range: Annotated[str | None, Header()] = None,
    if_match: Annotated[str | None, Header()] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Get a file, or ranges of it (`Range: bytes=0-99`). Its bytes are those that a conversion would write.

    A response that is cut has met an error of the source: the same request again says which.
    """
    file = await _found(context, caller, layout_id, path)
    if (early := _by_conditions(file.tag, if_match, if_none_match)) is not None:
        return early
    layout, ranges = file.layout, None
    size_bytes = layout.size_bytes
    if byte_ranges is not None and if_range in (None, file.tag):
        ranges = ranges_in(byte_ranges, size_bytes)
    if ranges is not None and not ranges:
        refused = problem_response(
            RequestError(
                "request.range",
                f"{printable(path)} has {size_bytes} bytes, and serves at most {MOST_RANGES} ranges that are together "
                "no longer than it is",
                fix="ask for bytes that it has",
            )
        )
        refused.headers["Content-Range"] = f"bytes */{size_bytes}"
        return refused
    return _FileResponse(context, caller, file, _Body(size_bytes, ranges))


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a layout of the caller's tenant, and the headers that all answers for it have."""

    layout: UsedLayout
    path: str

    @property
    def tag(self) -> str:
        """The strong `ETag`: equal tags stand for equal bytes, in any layout of any process."""
        # The digest stands for everything that decides the bytes. The word says that CRCs are in them.
        told = f"{self.layout.content_digest}\0{self.path}\0exact"
        return f'"{hashlib.sha256(told.encode()).hexdigest()[:40]}"'

    @property
    def headers(self) -> dict[str, str]:
        """The headers."""
        cached = {"Accept-Ranges": "bytes", "Cache-Control": _CACHE}
        return {"ETag": self.tag, **cached, "X-Content-Type-Options": "nosniff"}


async def _found(context: ServiceContext, caller: Principal, layout_id: str, path: str) -> _File:
    """A file of a layout for a caller.

    Raises:
        RequestError: `request.not_found`, `request.gone`; `request.root_forbidden`: the roots have changed since the
            layout was made. Sizes, tags and conditions are answered as the bytes are.
    """
    layout = await run_in_threadpool(context.layouts_of(caller).use, layout_id, path)
    return _File(await run_in_threadpool(_judged, context, layout), path)


def _judged(context: ServiceContext, layout: UsedLayout) -> UsedLayout:
    """A layout that was made before, judged by the limits of today.

    Raises:
        RequestError: `request.root_forbidden`.
    """
    request = layout.limits.allowed_layout(layout.request, context.settings.jobs.roots)
    return replace(layout, request=request)


# Conditions and ranges of requests.

MOST_RANGES = 100
_MEDIA_TYPE = "application/octet-stream"
_CACHE = "private, no-transform"
_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')
_RANGE = re.compile(r"([0-9]{1,1000})-([0-9]{0,1000})|-([0-9]{1,1000})")


def _by_conditions(tag: str, if_match: str | None, if_none_match: str | None) -> Response | None:
    """The answer of a request whose conditions say that no file is sent, in the order of RFC 9110, section 13.2.2."""
    # `If-Match` compares strongly: a weak tag has its `W/` and is no equal of ours.
    if if_match is not None and if_match.strip() != "*" and tag not in _TAG.findall(if_match):
        return problem_response(
            RequestError(
                "request.precondition",
                "the file is not the one that `If-Match` names",
                fix="get it anew, from its begin: the source was another one, or the layout",
                details={"etag": tag},
            )
        )
    known = [] if if_none_match is None else [found.removeprefix("W/") for found in _TAG.findall(if_none_match)]
    if tag in known or (if_none_match or "").strip() == "*":
        return Response(status_code=304, headers={"ETag": tag, "Cache-Control": _CACHE})
    return None


def ranges_in(text: str, size_bytes: int) -> list[tuple[int, int]] | None:
    """The ranges `[begin, end)` that a header `Range` asks for, in its order.

    Args:
        text: The value of the header.
        size_bytes: The size of the file.

    Returns:
        None for a header that is not well-formed or has another unit: it counts as not there (RFC 9110, section 14.2).
        An empty list if the file has none of the bytes, or if the ranges are too many or overlap too much (15.5.17).
    """
    unit, equals, listed = text.partition("=")
    if not equals or unit.strip().lower() != "bytes":
        return None
    found: list[tuple[int, int]] = []
    for part in filter(None, (part.strip(" \t") for part in listed.split(","))):
        if (match := _RANGE.fullmatch(part)) is None:
            return None
        first, last, suffix = match.groups()
        if suffix is not None:
            begin, end = max(0, size_bytes - int(suffix)), size_bytes
        else:
            begin, end = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
            if last and int(last) < begin:
                return None
        found.append((begin, end))
    if not found:
        return None
    satisfiable = [(begin, end) for begin, end in found if begin < end]
    if len(found) > MOST_RANGES or sum(end - begin for begin, end in satisfiable) > size_bytes:
        return []
    return satisfiable


class _Body:
    """The body of a response: bytes of its own, and ranges of the file."""

    def __init__(self, size_bytes: int, ranges: list[tuple[int, int]] | None) -> None:
        self.status = 200 if ranges is None else 206
        whole = [(0, size_bytes)] if ranges is None else ranges
        self.parts: list[bytes | tuple[int, int]] = [*whole]
        self.headers: dict[str, str] = {}
        kind = _MEDIA_TYPE
        if ranges is not None and len(ranges) == 1:
            begin, end = ranges[0]
            self.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size_bytes}"
        elif ranges is not None:
            boundary = secrets.token_hex(16)
            kind = f"multipart/byteranges; boundary={boundary}"
            self.parts = list(_multipart(whole, size_bytes, boundary))
        length = sum(len(part) if isinstance(part, bytes) else part[1] - part[0] for part in self.parts)
        self.headers |= {"Content-Type": kind, "Content-Length": str(length)}


def _multipart(ranges: list[tuple[int, int]], size_bytes: int, boundary: str) -> Generator[bytes | tuple[int, int]]:
    """The parts of a body `multipart/byteranges` (RFC 9110, section 14.6)."""
    for begin, end in ranges:
        head = f"Content-Type: {_MEDIA_TYPE}\r\nContent-Range: bytes {begin}-{end - 1}/{size_bytes}\r\n"
        yield f"\r\n--{boundary}\r\n{head}\r\n".encode()
        yield begin, end
    yield f"\r\n--{boundary}--\r\n".encode()


class _CutError(Exception):
    """The reason why a response ends before its end. Nobody but the log can be told."""


class _FileResponse(Response):
    """Ranges of a file, sent as fast as the client takes them.

    An error before the first byte is an answer of its own. Later ones cut the response, so that no client takes what
    it has for the whole.
    """

    def __init__(self, context: ServiceContext, caller: Principal, file: _File, body: _Body) -> None:
        super().__init__(status_code=body.status, headers={**file.headers, **body.headers})
        self._context, self._caller = context, caller
        self._layout, self._path = file.layout, file.path
        self._parts = body.parts
        self._looked_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file until its end, or until the client goes away."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.wait({sending, leaving})
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        self._looked_at = asyncio.get_running_loop().time()
        begun, why = False, ""
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if not begun:
                        await send(self._start())
                        begun = True
                    await self._pass_on(send, piece)
        except ReshardError as error:
            if not begun:
                raise
            why = f"{error.code}: {error.message}"
        except _CutError as error:
            why = str(error)
        if why:
            # The server closes the connection of a response that does not end.
            logger.warning("a response with %s was cut: %s", printable(self._path), why)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self) -> Message:
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}

    async def _pieces(self) -> AsyncGenerator[bytes]:
        """The bytes of the body. The first ones come when the engine has made the first ones of the file."""
        held = b""
        for part in self._parts:
            if isinstance(part, bytes):
                held += part
                continue
            begin, end = part
            async with self._context.engines.reading(self._layout, self._path, begin, end - begin) as stream:
                yield held
                held = b""
                while data := await stream.read():
                    yield data
                if stream.left:
                    raise _CutError(f"the engine ended {stream.left} bytes early")
        yield held

    async def _pass_on(self, send: Send, data: bytes) -> None:
        """Send bytes when the client has taken those before.

        Raises:
            _CutError: It takes none, or may have no more.
        """
        settings, now = self._context.settings, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(settings.layout_stall_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise _CutError("the client takes no bytes any more") from None
        if now - self._looked_at < settings.recheck_s:
            return
        self._looked_at = now
        if not await self._context.identity.still_valid(self._caller):
            raise _CutError("the token was revoked, or has expired")
        store = self._context.layouts_of(self._caller)
        if not await run_in_threadpool(store.renew, self._layout.id):
            raise _CutError("the layout was removed")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
