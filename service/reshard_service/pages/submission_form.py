"""The form of a submission: its fields as a request, a request as its fields, and errors at their fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from reshard.declared import declared_options
from reshard.errors import RequestError, ReshardError
from reshard.models import Inspection, Job, SubmitRequest
from reshard.sizes import parse_size
from reshard_engine.storage.urls import is_within
from reshard_jobs.roots import Roots, normalized_url
from reshard_service.pages.words import label_of, places_in
from reshard_service.problems import of_validation

_PLACES: dict[str, tuple[str, ...]] = {
    "source": ("source", "url"),
    "tag": ("source", "tag"),
    "profile": ("source", "profile"),
    "model_key": ("source", "model_key"),
    "optimizer_key": ("source", "optimizer_key"),
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
    "grammar": ("options", "dcp", "grammar"),
    "dcp_files": ("options", "dcp", "files"),
    "target_model_key": ("options", "dcp", "target_model_key"),
    "target_optimizer_key": ("options", "dcp", "target_optimizer_key"),
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
_OPTIONS = {option.place: option for option in declared_options().values()}
_OPTION_OF = {name: option for name, place in _PLACES.items() if (option := _OPTIONS.get(".".join(place)))}
_KINDS = {name: option.kind for name, option in _OPTION_OF.items()} | {"max_workers": int, "priority": int}
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


_ENDINGS = {"zero": "deepspeed", "safetensors": "weights", "torch": "weights", "peft": "adapter", "dcp": "fsdp"}
_WITH_TAGS = {"zero", "universal"}
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
    ending = f"_{_ENDINGS.get(to, to or 'converted')}"
    last = f"{name}{ending}/{tag}" if tag and to in _WITH_TAGS else f"{name}{tag and '_'}{tag}{ending}"
    writable = tuple(map(normalized_url, roots.writable or roots.urls))
    # `s3:/` and the root of a machine are no places for a checkpoint.
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
    if (option := _OPTION_OF.get(name)) is not None and option.option.parse is parse_size:
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
