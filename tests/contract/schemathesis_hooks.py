"""Hooks of schemathesis: a part of the submissions names a checkpoint that is there, and nobody waits for long.

schemathesis loads this file in a process of its own.
"""

from __future__ import annotations

import os
import re
from typing import Any

import schemathesis

ROOT = os.environ["CONTRACT_ROOT"]
"""The root that the service under test allows."""
LONGEST_WAIT_S = 0.2
SOURCES = ("", "units=1", "units=2,fail=storage.denied", "refuse=source.not_found", "units=1,unit_s=0.05")


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """Change what a random value would never be: the URL of a checkpoint, and a wait that ends soon."""
    if isinstance(case.query, dict) and _is_long(case.query.get("wait")):
        case.query["wait"] = LONGEST_WAIT_S
    for name, value in (case.headers or {}).items():
        if name.lower() == "prefer" and isinstance(value, str):
            case.headers[name] = re.sub(r"wait=\d+", "wait=0", value)
    body = case.body
    if isinstance(body, dict) and isinstance(source := body.get("source", body), dict) and "url" in source:
        # A choice by the body's own text can be repeated with the run's seed.
        number = sum(map(ord, repr(body)))
        if isinstance(source["url"], str) and number % 4:
            source["url"] = f"{ROOT}/scripted/{SOURCES[number % len(SOURCES)]}"
        if isinstance(body.get("target"), str) and number % 4:
            body["target"] = f"{ROOT}/out{number % 97}"


@schemathesis.hook
def filter_failure(context: schemathesis.HookContext, failure: Any, case: Any, response: Any) -> bool:
    """Drop refusals of valid bodies for what no schema can say: a URL without a checkpoint, options that do not fit.

    A refusal by the schema's own checks lists the fields, and is a failure: the schema promised more.
    """
    if type(failure).__name__ != "RejectedPositiveData" or response.status_code != 422:
        return True
    return "problems" in response.json().get("details", {})


def _is_long(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and LONGEST_WAIT_S < value <= 3600
