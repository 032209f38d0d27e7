"""Secrets of webhooks: made, sealed for the job database, opened to sign.

A signature needs the secret itself, so a digest would not do. With `RESHARD_WEBHOOK_KEYS` the database holds it
encrypted (Fernet). Without, whoever reads the database can forge calls.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

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
        ValueError: One of them is no key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None

    def seal(self, secret: str) -> str:
        """The form for the database."""
        if self._fernet is None:
            return _PLAIN + secret
        return _SEALED + self._fernet.encrypt(secret.encode()).decode()

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
