"""The form of a submission: its fields as a request, and a request as its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from reshard.cli.sizes import parse_size
from reshard.errors import RequestError
from reshard.models import Job, SubmitRequest
from reshard_service.problems import of_validation

_PLACES: dict[str, tuple[str, ...]] = {
    "source": ("source", "url"),
    "tag": ("source", "tag"),
    "profile": ("source", "profile"),
    "to": ("to",),
    "target": ("target",),
    "target_profile": ("target_profile",),
    "dtype": ("dtype",),
    "zero_stage": ("options", "deepspeed", "zero_stage"),
    "dp": ("options", "deepspeed", "dp"),
    "tp": ("options", "deepspeed", "tp"),
    "pp": ("options", "deepspeed", "pp"),
    "ep": ("options", "deepspeed", "ep"),
    "family": ("options", "deepspeed", "family"),
    "names": ("options", "deepspeed", "names"),
    "max_shard": ("options", "weights", "max_shard_bytes"),
    "merge_adapter": ("options", "peft", "merge_adapter"),
    "adapter": ("options", "peft", "adapter"),
    "model_files": ("model_files",),
    "opaque": ("opaque",),
    "verify": ("verify",),
    "overwrite": ("overwrite",),
    "exclude_frozen": ("exclude_frozen",),
    "memory_limit": ("memory_limit_bytes",),
    "max_workers": ("max_workers",),
    "priority": ("priority",),
    "labels": ("labels",),
}
"""The place of each field in the body of `POST /v1/jobs`."""
_SIZES = {"max_shard", "memory_limit"}
_NUMBERS = {"dp", "tp", "pp", "ep", "max_workers", "priority"}
_SWITCHES = {"overwrite", "exclude_frozen", "merge_adapter"}
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_REST = "more"
"""The field for whatever else a request may say, as JSON."""
FIELDS = (*_PLACES, _REST)


def request_of(fields: Mapping[str, str]) -> SubmitRequest:
    """The submission that the fields say. Empty fields are left to the defaults.

    Raises:
        RequestError: `request.invalid`.
    """
    body = _rest_of(fields.get(_REST, ""))
    for name, place in _PLACES.items():
        text = fields.get(name, "").strip()
        if text:
            _put(body, place, _value(name, text))
    try:
        return SubmitRequest.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from error


def fields_of(job: Job) -> dict[str, str]:
    """The fields that say what a job's request says, for another job like it."""
    body = job.request.model_dump(mode="json", exclude_defaults=True)
    body["options"] = job.request.options.given()
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
    if name in _SIZES:
        return parse_size(text)
    if name in _NUMBERS and _WHOLE.fullmatch(text):
        return int(text)  # anything else is left to the model, which says what is wrong
    if name in _SWITCHES:
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
            raise RequestError("request.invalid", f"{name} of the other fields is no JSON object", fix="change it")
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
