"""Idempotency keys: two POST requests with the same key create one job, and so do two PUT requests with one job id.

A key is *held* while its first request is being validated, and *bound* to its job in the transaction
that creates the job. A hold expires, so that the keys of an API process that died become free.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, delete, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from reshard.errors import RequestError, printable
from reshard_jobs.database import Database
from reshard_jobs.queue.leased_rows import change_row
from reshard_jobs.tables import DEFAULT_TENANT, JOB_ID, PUBLIC_ID, IdempotencyRow, JobRow, db_now

HOLD_S = 30.0
_OWN_ID = re.compile(f"(?!job_){JOB_ID}")
JOB_KEY = "\x1fjob/"
"""The beginning of the keys that stand for job ids. A key that a caller sends has only printable characters."""
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Hold:
    """A held key of a tenant, which its request may bind to a job."""

    tenant: str
    key: str
    holder: str


def fingerprint(body: Any) -> str:
    """A digest that is equal for equal request bodies (JSON values)."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class IdempotencyKeys:
    """The keys of one tenant of a job database."""

    def __init__(self, database: Database, tenant: str = DEFAULT_TENANT) -> None:
        self._database = database
        self._tenant = tenant

    def begin(self, key: str, body_fingerprint: str) -> Hold | str:
        """Hold a new key, or find the id of the job that it is bound to.

        Raises:
            RequestError: `request.idempotency_mismatch`: the key names another request.
                `request.idempotency_conflict`: its first request is in flight; retry is safe.
                `request.invalid`: the key is too long, or not printable.
        """
        if not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
            raise RequestError(
                "request.invalid",
                f"the idempotency key is not 1 to {MAX_KEY_CHARS} printable characters",
                fix="use a UUID",
            )
        return self._begin(key, body_fingerprint)

    def begin_job(self, job_id: str, body_fingerprint: str) -> Hold | str:
        """Hold the id that a caller gives to a new job, or find that the job exists.

        Raises:
            RequestError: `request.job_exists`: another request made the job.
                `request.idempotency_conflict`: its first request is in flight; retry is safe.
                `request.invalid`: it is not an id that callers may give.
        """
        if _OWN_ID.fullmatch(job_id) is None:
            raise RequestError(
                "request.invalid",
                f"{printable(job_id, max_chars=64)!r} cannot be the id of a job",
                fix="use 1 to 40 ASCII letters, digits, '.', '_' and '-', with a letter or digit first, and not `job_`",
            )
        try:
            return self._begin(JOB_KEY + job_id, body_fingerprint)
        except RequestError as error:
            if error.code == "request.idempotency_mismatch":
                raise job_exists(job_id) from error
            raise

    def _begin(self, key: str, body_fingerprint: str) -> Hold | str:
        hold = Hold(self._tenant, key, secrets.token_hex(16))
        values = {"fingerprint": body_fingerprint, "holder": hold.holder, "held_until": db_now() + HOLD_S}
        with self._database.write() as session:
            try:
                with session.begin_nested():
                    session.execute(insert(IdempotencyRow).values(tenant=self._tenant, key=key, **values))
            except IntegrityError:
                return self._join(session, hold, values)
        return hold

    def _join(self, session: Session, hold: Hold, values: dict[str, Any]) -> Hold | str:
        row = session.scalars(select(IdempotencyRow).where(*_of(hold))).one_or_none()
        if row is not None and row.fingerprint != values["fingerprint"]:
            raise RequestError(
                "request.idempotency_mismatch",
                "the idempotency key was used for another request",
                fix="use another key for this request, or send the first request again",
            )
        if row is not None and row.job_id is not None:
            return session.scalars(select(PUBLIC_ID).where(JobRow.id == row.job_id)).one()
        free = (IdempotencyRow.job_id.is_(None), IdempotencyRow.held_until < db_now())
        if change_row(session, IdempotencyRow, *_of(hold), *free, **values) is None:
            raise conflict()
        return hold

    def abandon(self, hold: Hold) -> None:
        """Free a key whose request was refused: a corrected request may use it again."""
        with self._database.write() as session:
            session.execute(
                delete(IdempotencyRow).where(
                    *_of(hold), IdempotencyRow.holder == hold.holder, IdempotencyRow.job_id.is_(None)
                )
            )


def bind(session: Session, hold: Hold, job_key: str) -> None:
    """Bind a held key to the job that this transaction creates.

    Raises:
        RequestError: `request.idempotency_conflict`: the hold expired and another request took the key.
    """
    held = (IdempotencyRow.holder == hold.holder, IdempotencyRow.job_id.is_(None))
    if change_row(session, IdempotencyRow, *_of(hold), *held, job_id=job_key) is None:
        raise conflict()


def _of(hold: Hold) -> tuple[ColumnElement[bool], ...]:
    return (IdempotencyRow.tenant == hold.tenant, IdempotencyRow.key == hold.key)


def job_exists(job_id: str) -> RequestError:
    """The error for the id of a job that another request made."""
    return RequestError(
        "request.job_exists",
        f"the job {job_id!r} exists, and was made by another request",
        fix="send the same request as the first time, or choose another id",
        details={"job_id": job_id},
    )


def conflict() -> RequestError:
    """The error for a key whose first request is still being handled."""
    return RequestError(
        "request.idempotency_conflict",
        "the first request with this idempotency key, or job id, is still looked at",
        fix="send the same request again in a second; it finds the job of the first one",
    )
