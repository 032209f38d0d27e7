"""Plan files: a request, and what its plan was made from. A run by such a file converts exactly that, or is refused.

A plan file is the request as JSON, with the plan in its field `plan`: it is also a body of `POST /v1/jobs`. It may come
from somebody else, so it is read within bounds, and it never replaces a target by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reshard.declared import declared_options
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest, PlanSummary, SavedPlan
from reshard.wire_model import invalid

if TYPE_CHECKING:
    from reshard.option import PathLike

_MOST_BYTES = 64 << 20
_FIX = "name a file that `reshard plan` wrote with --out"


def save_plan(path: PathLike, request: ConvertRequest, summary: PlanSummary) -> ConvertRequest:
    """Write a plan to a file, whole or not at all; a plan file of this name is replaced.

    Local places become absolute, and the tag that `latest` named is written down: the file means the same checkpoint
    wherever and whenever it is used.

    Args:
        path: The file.
        request: The request that was planned.
        summary: Its plan.

    Returns:
        The request as it was written.

    Raises:
        RequestError: `request.invalid`: the plan is of a service of an earlier release, or the file cannot be written.
    """
    if not summary.content_digest:
        raise RequestError(
            "request.invalid",
            "the plan has no digests of its source: the service that made it is of an earlier release",
            fix="leave --out away, or plan on a machine with the `worker` extra",
        )
    plan = SavedPlan(files=summary.source_files, **{n: getattr(summary, n) for n in _SHARED})
    made = _absolute(request)
    source = made.source.model_copy(update={"tag": made.source.tag or summary.tag})
    made = made.model_copy(update={"source": source, "plan": plan, "overwrite": False})
    _write(Path(path), made.model_dump_json(indent=1) + "\n")
    return made


_SHARED = tuple(SavedPlan.model_fields.keys() - {"files"})


def read_plan(path: PathLike) -> ConvertRequest:
    """Read a plan file.

    Args:
        path: A file that `save_plan` wrote: `reshard plan --out`, `reshard.plan(out=...)`.

    Returns:
        The request, with the plan that it must lead to. `convert(plan=...)` and `Client.submit_request` take it.

    Raises:
        RequestError: `request.invalid`: the file cannot be read, or is no plan.
    """
    said = printable(str(path))
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise RequestError("request.invalid", f"{said}: {error.strerror}", fix=_FIX) from None
    if len(data) > _MOST_BYTES:
        raise RequestError("request.invalid", f"{said} has more than {_MOST_BYTES} bytes", fix=_FIX)
    try:
        request = ConvertRequest.model_validate_json(data)
    except ValidationError as error:
        raise RequestError(
            "request.invalid", f"{said} is no plan: {invalid(error).message.strip()}", fix=_FIX
        ) from None
    if request.plan is None:
        raise RequestError("request.invalid", f"{said} is a request without a plan", fix=_FIX)
    if request.overwrite:
        raise RequestError(
            "request.invalid",
            f"{said} asks to replace a target, which a plan file may not",
            fix="take `overwrite` out of it, and give --overwrite with the command",
        )
    return request


def run_as_planned(request: ConvertRequest, given: Mapping[str, Any], names: Mapping[str, str]) -> ConvertRequest:
    """A planned request with options of the run, such as threads.

    Args:
        request: The request of a plan file.
        given: Options beside it, by the names of their keyword arguments.
        names: The name of each option as its user writes it, such as `--threads`; its own by default.

    Raises:
        RequestError: `request.invalid`: one of the options would change the plan, or names another place.
    """
    known = declared_options()
    allowed = {n for n, o in known.items() if o.option.of_run and o.field != "target_profile"}
    if wrong := [names.get(name, name) for name in given if name not in allowed]:
        may = ", ".join(names.get(n, n) for n in known if n in allowed)
        raise RequestError(
            "request.invalid",
            f"{listed(wrong)}: the plan says that already",
            fix=f"leave it out, or plan again with it; beside a plan may stand: {may}",
        )
    values = {known[name].field: known[name].value(value) for name, value in given.items()}
    try:
        checked = ConvertRequest.model_validate({**request.model_dump(exclude={"plan"}), **values})
    except ValidationError as error:
        raise invalid(error, {known[n].field: names.get(n, n) for n in given}) from None
    return checked.model_copy(update={"plan": request.plan})


def _absolute(request: ConvertRequest) -> ConvertRequest:
    """The request with absolute paths in place of relative ones, whatever option they are in."""
    said = request.model_dump(exclude={"plan"})
    places: Iterable[tuple[tuple[str, ...], str]] = (
        (("source",), "url"),
        ((), "target"),
        *((o.within, o.field) for o in declared_options().values() if o.names_place),
    )
    for within, field in places:
        inner: Any = said
        for name in within:
            inner = inner.get(name, {})
        value = inner.get(field)
        if isinstance(value, str) and "://" not in value:
            inner[field] = os.path.abspath(os.path.expanduser(value))
    return ConvertRequest.model_validate(said)


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        said = f"{printable(str(path))}: {error.strerror}"
        raise RequestError(
            "request.invalid", said, fix="name a file in a directory that exists and that you may write to"
        ) from None
