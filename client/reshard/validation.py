"""What pydantic finds wrong with a request, worded for users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from reshard.errors import RequestError

_LIMITS = {
    "string_too_short": ("is shorter than {} characters", "min_length"),
    "string_too_long": ("is longer than {} characters", "max_length"),
    "greater_than": ("is not above {}", "gt"),
    "greater_than_equal": ("is below {}", "ge"),
    "less_than": ("is not below {}", "lt"),
    "less_than_equal": ("is above {}", "le"),
}
_KINDS = {
    "missing": "is missing",
    "extra_forbidden": "is no field that is known",
    "enum": "is not one of the choices",
    "literal_error": "is not one of the choices",
    "finite_number": "is no finite number",
    "json_invalid": "is no JSON",
}


def said_of(problem: Mapping[str, Any]) -> str:
    """One problem of a pydantic error, worded for users."""
    kind = str(problem["type"])
    context: Mapping[str, Any] = problem.get("ctx") or {}
    if kind == "string_too_short" and context.get("min_length") == 1:
        return "is empty"
    if kind in _LIMITS:
        text, key = _LIMITS[kind]
        return text.format(context.get(key))
    if kind in ("enum", "literal_error"):
        return f"is none of {context.get('expected')}"
    wanted = kind.removesuffix("_parsing").removesuffix("_type").removesuffix("_from_float")
    nouns = {"int": "whole number", "float": "number", "bool": "true or false", "string": "text", "dict": "object"}
    nouns |= {"model": "object", "model_attributes": "object", "list": "list", "tuple": "list"}
    return _KINDS.get(kind) or f"is no {nouns.get(wanted, 'value that is taken')}"


def invalid(error: ValidationError, flags: Mapping[str, str] | None = None, *, keywords: bool = False) -> RequestError:
    """The `RequestError` for a pydantic validation error, worded for users.

    Args:
        error: What pydantic found.
        flags: Flags whose names differ from their fields'; None if the caller names fields, not flags.
        keywords: True if the flags are keyword arguments of a function.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if flags is not None:
        last = str(first["loc"][-1]) if first["loc"] else ""
        where = flags.get(where) or flags.get(last) or (last if keywords else f"--{last.replace('_', '-')}")
    return RequestError("request.invalid", f"{where} {said_of(first)}")
