"""Opaque page tokens. A token holds the last job of a page and a digest of the listing's tenant and filter."""

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
from reshard_jobs.tables import JOB_ID

MAX_PAGE_SIZE = 200
_END_OF_TIME = 1e11
_JOB_ID = re.compile(JOB_ID)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The filter of a listing: a job must be in one of the states and have all of the labels."""

    states: tuple[JobState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def digest(self, tenant: str) -> str:
        """The digest of this filter of a tenant's jobs, which a page token contains."""
        text = json.dumps([tenant, sorted(self.states), sorted(self.labels.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_token(chosen: JobFilter, tenant: str, created_at: float, key: str) -> str:
    """Make the token of the page after this job."""
    fields = [chosen.digest(tenant), created_at, key]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")


def read_token(chosen: JobFilter, tenant: str, token: str) -> tuple[float, str]:
    """Read the creation time (seconds since the epoch) and the key of the job after which a page begins.

    Raises:
        RequestError: `request.invalid`: the token is malformed, or belongs to another filter or tenant.
    """
    try:
        fields: Any = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise _bad_token() from error
    match fields:
        case [str(digest), float(created_at), str(key)] if digest == chosen.digest(tenant) and _may_be_ours(
            created_at, key
        ):
            return created_at, key
        case _:
            raise _bad_token()


def _may_be_ours(created_at: float, key: str) -> bool:
    # A database refuses to compare values that it cannot store. That error would look like a failure of the database.
    return 0 <= created_at < _END_OF_TIME and _JOB_ID.fullmatch(key) is not None


def _bad_token() -> RequestError:
    return RequestError(
        "request.invalid",
        "the page token does not belong to this listing",
        fix="repeat the listing without page_token, with the same filters on every page",
    )
