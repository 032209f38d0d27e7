"""Tokens: random secrets of callers. The job database has only their hashes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from contextlib import suppress

from sqlalchemy import ColumnElement, insert, or_, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from reshard.choices import TokenScope
from reshard.errors import RequestError, printable
from reshard.models.access import NewToken, Token
from reshard_jobs.database import Database
from reshard_jobs.records import time_of
from reshard_jobs.tables import TenantRow, TokenRow, db_now
from reshard_jobs.tenants.principals import Principal, record

_SECRET = re.compile(r"reshard_([a-z2-7]{16})_([a-z2-7]{52})")
"""The form of a token: scanners of secrets look for it. The second part has 256 random bits."""
_SESSION = re.compile(r"([a-z2-7]{16})\.([0-9a-f]{64})")
_NOBODY = hashlib.sha256(b"").hexdigest()
_COARSE_S = 60.0
_MOST_LISTED = 1000


def looks_like_token(text: str) -> bool:
    """True if a text has the form of a token."""
    return _SECRET.fullmatch(text) is not None


def session_of(token: str) -> str:
    """A digest of a token that does not tell the token; it is the value of a browser's cookie, or a part of it."""
    return hmac.digest(token.encode(), b"reshard dashboard session", "sha256").hex()


def cookie_of(token: str) -> str:
    """The value of a browser's cookie for a token of the job database."""
    return f"{token.split('_')[1]}.{session_of(token)}"


class Tokens:
    """The tokens of a job database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, secret: str) -> Principal | None:
        """The caller with a token; None if there is no such token, or if it has expired or was revoked."""
        if (match := _SECRET.fullmatch(secret)) is None:
            return None
        return self._find(match[1], _digest(secret), session=False)

    def find_session(self, cookie: str) -> Principal | None:
        """The caller whose browser has the cookie of a token."""
        if (match := _SESSION.fullmatch(cookie)) is None:
            return None
        return self._find(match[1], _digest(match[2]), session=True)

    def _find(self, token_id: str, given: str, *, session: bool) -> Principal | None:
        stored = TokenRow.session_hash if session else TokenRow.token_hash
        old = or_(TokenRow.last_used_at.is_(None), TokenRow.last_used_at < db_now() - _COARSE_S)
        query = select(TokenRow, stored, old).where(TokenRow.id == token_id, *_alive())
        with self._database.read() as read:
            found = read.execute(query).one_or_none()
        # A token that does not exist is compared as well, so that the time does not tell if it does.
        right = hmac.compare_digest(found[1] if found is not None else _NOBODY, given)
        if found is None or not right:
            return None
        row = found[0]
        if found[2]:
            # The time of the last use is worth no refused request.
            with suppress(DBAPIError):
                self._used(row.id)
        scopes = frozenset(TokenScope(name) for name in row.scopes.split() if name in list(TokenScope))
        return Principal(row.tenant, scopes, row.id, row.name, row.id)

    def _used(self, token_id: str) -> None:
        old = or_(TokenRow.last_used_at.is_(None), TokenRow.last_used_at < db_now() - _COARSE_S)
        with self._database.write() as session:
            session.execute(update(TokenRow).where(TokenRow.id == token_id, old).values(last_used_at=db_now()))

    def is_alive(self, token_id: str) -> bool:
        """True if a token has neither expired nor been revoked."""
        with self._database.read() as session:
            query = select(TokenRow.id).where(TokenRow.id == token_id, *_alive())
            return session.scalars(query).one_or_none() is not None

    def create(self, asked: NewToken, *, by: Principal) -> tuple[Token, str]:
        """Make a token; returns it and its secret, which is shown to nobody afterwards.

        Raises:
            RequestError: `request.not_found`: there is no such tenant.
        """
        token_id = _random(10)
        secret = f"reshard_{token_id}_{_random(32)}"
        with self._database.write() as session:
            require_tenant(session, asked.tenant or by.tenant)
            row = session.scalars(
                insert(TokenRow)
                .values(
                    id=token_id,
                    tenant=asked.tenant or by.tenant,
                    name=asked.name,
                    scopes=" ".join(sorted(set(asked.scopes))),
                    token_hash=_digest(secret),
                    session_hash=_digest(session_of(secret)),
                    created_at=db_now(),
                    created_by=by.actor,
                    expires_at=None if asked.expires_in_s is None else db_now() + asked.expires_in_s,
                )
                .returning(TokenRow)
            ).one()
            record(session, by, "token.create", token_id, tenant=row.tenant)
            return _token_of(row), secret

    def list(self, tenant: str) -> list[Token]:
        """The tokens of a tenant, newest first, also those that have expired or were revoked."""
        query = select(TokenRow).where(TokenRow.tenant == tenant)
        with self._database.read() as session:
            rows = session.scalars(query.order_by(TokenRow.created_at.desc(), TokenRow.id).limit(_MOST_LISTED)).all()
        return [_token_of(row) for row in rows]

    def revoke(self, token_id: str, *, by: Principal) -> Token:
        """Revoke a token; to revoke it twice is harmless.

        Raises:
            RequestError: `request.not_found`: there is no such token, or it belongs to a tenant that is not the
                caller's to manage.
        """
        mine = () if by.is_operator else (TokenRow.tenant == by.tenant,)
        with self._database.write() as session:
            row = session.scalars(select(TokenRow).where(TokenRow.id == token_id, *mine)).one_or_none()
            if row is None:
                raise RequestError(
                    "request.not_found",
                    f"there is no token {printable(token_id, max_chars=64)!r}",
                    fix="reshard tokens list",
                )
            if row.revoked_at is None:
                row.revoked_at = session.execute(select(db_now())).scalar_one()
                record(session, by, "token.revoke", row.id, tenant=row.tenant)
            return _token_of(row)


def require_tenant(session: Session, name: str) -> TenantRow:
    """The row of a tenant.

    Raises:
        RequestError: `request.not_found`.
    """
    row = session.get(TenantRow, name)
    if row is None:
        raise RequestError(
            "request.not_found", f"there is no tenant {printable(name, max_chars=64)!r}", fix="reshard tenants list"
        )
    return row


def _alive() -> tuple[ColumnElement[bool], ...]:
    return (TokenRow.revoked_at.is_(None), or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > db_now()))


def _random(size_bytes: int) -> str:
    return base64.b32encode(secrets.token_bytes(size_bytes)).decode().lower().rstrip("=")


def _digest(text: str) -> str:
    # A random secret of 256 bits needs no slow hash: nobody can try them all.
    return hashlib.sha256(text.encode()).hexdigest()


def _token_of(row: TokenRow) -> Token:
    return Token(
        id=row.id,
        tenant=row.tenant,
        name=row.name,
        scopes=tuple(TokenScope(name) for name in row.scopes.split()),
        created_at=time_of(row.created_at),
        created_by=row.created_by,
        expires_at=None if row.expires_at is None else time_of(row.expires_at),
        revoked_at=None if row.revoked_at is None else time_of(row.revoked_at),
        last_used_at=None if row.last_used_at is None else time_of(row.last_used_at),
    )
