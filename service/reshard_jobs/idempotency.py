"""Idempotency keys: two POST requests with the same key create one job.

A key is *held* while its first request is being validated, and *bound* to its job in the transaction
that creates the job. A hold expires, so that the keys of an API process that died become free.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from reshard.errors import RequestError
from reshard_jobs.database import Database
from reshard_jobs.tables import IdempotencyRow, db_now

HOLD_S = 30.0
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Hold:
    """A held key, which its request may bind to a job."""

    key: str
    holder: str


def fingerprint(body: Any) -> str:
    """A digest that is equal for equal request bodies (JSON values)."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class IdempotencyKeys:
    """The keys of a job database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, key: str, body_fingerprint: str) -> Hold | str:
        """Hold a new key, or find the id of the job that it is bound to.

        Raises:
            RequestError: `request.idempotency_mismatch`: the key names another request.
                `request.idempotency_conflict`: its first request is in flight; retry is safe.
        """
        if not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
            raise RequestError(
                "request.invalid",
                f"the idempotency key is not 1 to {MAX_KEY_CHARS} printable characters",
                fix="use a UUID",
            )
        hold = Hold(key, secrets.token_hex(16))
        values = {"fingerprint": body_fingerprint, "holder": hold.holder, "held_until": db_now() + HOLD_S}
        with self._database.write() as session:
            try:
                with session.begin_nested():
                    session.execute(insert(IdempotencyRow).values(key=key, **values))
            except IntegrityError:
                return self._join(session, hold, values)
        return hold

    def _join(self, session: Session, hold: Hold, values: dict[str, Any]) -> Hold | str:
        row = session.scalars(select(IdempotencyRow).where(IdempotencyRow.key == hold.key)).one_or_none()
        if row is not None and row.fingerprint != values["fingerprint"]:
            raise RequestError(
                "request.idempotency_mismatch",
                "the idempotency key was used for another request",
                fix="use a new key for a new request",
            )
        if row is not None and row.job_id is not None:
            return row.job_id
        taken = session.scalars(
            update(IdempotencyRow)
            .where(
                IdempotencyRow.key == hold.key, IdempotencyRow.job_id.is_(None), IdempotencyRow.held_until < db_now()
            )
            .values(**values)
            .returning(IdempotencyRow.key)
            .execution_options(synchronize_session=False)
        ).one_or_none()
        if taken is None:
            raise conflict()
        return hold

    def abandon(self, hold: Hold) -> None:
        """Free a key whose request was refused: a corrected request may use it again."""
        with self._database.write() as session:
            session.execute(
                delete(IdempotencyRow).where(
                    IdempotencyRow.key == hold.key,
                    IdempotencyRow.holder == hold.holder,
                    IdempotencyRow.job_id.is_(None),
                )
            )


def bind(session: Session, hold: Hold, job_id: str) -> None:
    """Bind a held key to the job that this transaction creates.

    Raises:
        RequestError: `request.idempotency_conflict`: the hold expired and another request took the key.
    """
    bound = session.scalars(
        update(IdempotencyRow)
        .where(IdempotencyRow.key == hold.key, IdempotencyRow.holder == hold.holder, IdempotencyRow.job_id.is_(None))
        .values(job_id=job_id)
        .returning(IdempotencyRow.key)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if bound is None:
        raise conflict()


def conflict() -> RequestError:
    """The error for a key whose first request is still being handled."""
    return RequestError(
        "request.idempotency_conflict",
        "a request with this idempotency key is in flight",
        fix="send the same request again in a second",
    )
