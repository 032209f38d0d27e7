"""Opaque page tokens: the last job that a page showed, bound to the filter of its listing."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import RequestError
from reshard.models import JobState

MAX_PAGE_SIZE = 200
_END_OF_TIME = 1e11
_JOB_ID = re.compile(r"job_[a-z2-7]{24}")


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs a listing shows: any of the states, all of the labels."""

    states: tuple[JobState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def digest(self) -> str:
        """What binds a page token to this filter."""
        text = json.dumps([sorted(self.states), sorted(self.labels.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_token(chosen: JobFilter, created_at: float, job_id: str) -> str:
    """The token of the page after this job."""
    return base64.urlsafe_b64encode(json.dumps([chosen.digest(), created_at, job_id]).encode()).decode().rstrip("=")


def read_token(chosen: JobFilter, token: str) -> tuple[float, str]:
    """The job after which a page begins: its time of creation (seconds since the epoch) and id.

    Raises:
        RequestError: `request.invalid`: the token is not one of ours, or of another filter.
    """
    try:
        fields: Any = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise _bad_token() from error
    match fields:
        case [str(digest), float(created_at), str(job_id)] if digest == chosen.digest() and _may_be_ours(
            created_at, job_id
        ):
            return created_at, job_id
        case _:
            raise _bad_token()


def _may_be_ours(created_at: float, job_id: str) -> bool:
    # A database refuses to compare what it cannot hold, and that would look like its own failure.
    return 0 <= created_at < _END_OF_TIME and _JOB_ID.fullmatch(job_id) is not None


def _bad_token() -> RequestError:
    return RequestError(
        "request.invalid",
        "the page token does not belong to this listing",
        fix="repeat the listing without page_token, with the same filters on every page",
    )
