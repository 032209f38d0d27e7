"""Secrets of webhooks: made, sealed for the job database, opened to sign.

A signature needs the secret itself, so a digest would not do. The database holds it encrypted (Fernet): with the keys
of `RESHARD_WEBHOOK_KEYS`, or for a SQLite file with a key in a file beside it. In PostgreSQL without keys it is in the
clear, and whoever reads the database can forge calls.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import secrets
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import select
from sqlalchemy.orm import Session

from reshard.errors import RequestError, printable
from reshard_jobs.database import Database, make_private
from reshard_jobs.tables import WebhookRow

logger = logging.getLogger(__name__)

PREFIX = "whsec_"
_PLAIN, _SEALED = "plain:", "fernet:"


class UnknownKeyError(Exception):
    """The secret was sealed with a key that is not among the service's."""


def new_secret() -> str:
    """A new secret: 256 random bits."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def signature(secret: str, message_id: str, timestamp: int, payload: bytes) -> str:
    """One signature of Standard Webhooks."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + payload, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


class Sealer:
    """Seals and opens secrets.

    Args:
        keys: Keys of Fernet, the newest first. All of them open, the first one seals. Without keys nothing is sealed.

    Raises:
        ValueError: One of them is not a key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None

    def seal(self, secret: str) -> str:
        """The form for the database."""
        if self._fernet is None:
            return _PLAIN + secret
        return _SEALED + self._fernet.encrypt(secret.encode()).decode()

    def sealed(self, kept: str) -> str:
        """The form for the database of a secret as the database has it: sealed, if it was in the clear."""
        return self.seal(kept.removeprefix(_PLAIN)) if kept.startswith(_PLAIN) else kept

    def open(self, sealed: str) -> str:
        """The secret.

        Raises:
            UnknownKeyError: It was sealed with another key.
        """
        if sealed.startswith(_PLAIN):
            return sealed.removeprefix(_PLAIN)
        if self._fernet is None:
            raise UnknownKeyError
        try:
            return self._fernet.decrypt(sealed.removeprefix(_SEALED)).decode()
        except InvalidToken as error:
            raise UnknownKeyError from error


def sealer_for(database: Database, keys: Sequence[str]) -> Sealer:
    """The sealer for the secrets of a job database; those that lie in a SQLite file in the clear are sealed now.

    Args:
        database: The job database.
        keys: The keys that the operator has chosen, the newest first. Without any, a SQLite database has a key in the
            file `…-webhook-key` beside it, which is made now if need be. Its key goes on opening after the operator
            has chosen others.

    Raises:
        RequestError: `request.invalid`: the file holds no key.
    """
    if database.file is None:
        return Sealer(keys)
    path = database.file.with_name(f"{database.file.name}-webhook-key")
    # SQLite has one writer at a time, so that two processes which start at once make one key.
    with database.write() as session:
        if not keys and not path.exists():
            _write_key(path)
        if path.exists():
            make_private(path)
        try:
            own = (path.read_text(encoding="ascii").strip(),) if path.exists() else ()
            sealer = Sealer((*keys, *own))
        except (ValueError, OSError):
            raise RequestError(
                "request.invalid",
                f"{printable(str(path))} holds no key for the secrets of webhooks",
                fix="restore it from a backup; or remove it, and then for each webhook: reshard webhooks rotate ID",
            ) from None
        sealed = _seal_all(session, sealer)
    if sealed:
        try:
            database.scrub()
        except sqlite3.Error as error:
            logger.warning("parts of the job database's file that are free may hold old secrets of webhooks: %s", error)
    return sealer


def _seal_all(session: Session, sealer: Sealer) -> bool:
    """Seal the secrets that are in the clear; returns whether there were any."""
    rows = session.scalars(select(WebhookRow)).all()
    for row in rows:
        row.secret = sealer.sealed(row.secret)
        if row.previous_secret:
            row.previous_secret = " ".join(map(sealer.sealed, row.previous_secret.split()))
    return any(session.is_modified(row) for row in rows)


def _write_key(path: Path) -> None:
    """Write a new key, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        unfinished.unlink()
    with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(Fernet.generate_key() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
