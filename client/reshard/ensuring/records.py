"""What one process tells the others: small files in the save directory's hidden folder, each whole or not there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Set
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.ensuring.places import RECORDS, writing
from reshard.errors import ReshardError, from_problem


class Record(BaseModel):
    """What one call found, makes or made."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: Literal[1] = 1
    finished: bool
    path: str | None
    """Save directory of the result, relative to the one that holds the record; None where the source fits."""


class _Failure(BaseModel):
    """Why the owner of a claim gave up."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nonce: str
    problem: dict[str, Any]


class Records:
    """The records of one save directory, by key."""

    def __init__(self, home: str) -> None:
        """`home` is the save directory."""
        self._home = home
        self.folder = os.path.join(home, RECORDS)

    def prepare(self) -> None:
        """Create the folder.

        Raises:
            OSError: The save directory cannot be written.
        """
        os.makedirs(self.folder, exist_ok=True)

    def claim(self, key: str) -> str:
        """Path of the claim for a key."""
        return self._path(key, "claim")

    def _path(self, key: str, kind: str) -> str:
        return os.path.join(self.folder, f"{key[:32]}.{kind}")

    def read(self, key: str) -> Record | None:
        """The record of a key; None if there is none that can be read."""
        with suppress(FileNotFoundError, ValidationError), open(self._path(key, "json"), "rb") as file:
            return Record.model_validate_json(file.read())
        return None

    def place(self, record: Record) -> str | None:
        """Where the result of a record is, on this host: it may see the directory under another path than others."""
        return None if record.path is None else os.path.normpath(os.path.join(self._home, record.path))

    def write(self, key: str, place: str | None, *, finished: bool) -> None:
        """Record a result; None is the source itself."""
        path = None if place is None else os.path.relpath(place, self._home)
        _write_whole(self._path(key, "json"), Record(finished=finished, path=path).model_dump_json())

    def tell_failure(self, key: str, nonce: str, error: ReshardError) -> None:
        """Leave an error for those who wait for a claim: they would all try the same in turn."""
        with suppress(ReshardError):
            _write_whole(self._path(key, "failed"), _Failure(nonce=nonce, problem=error.to_problem()).model_dump_json())

    def forget_failure(self, key: str) -> None:
        """It worked."""
        with suppress(OSError):
            os.unlink(self._path(key, "failed"))

    def raise_told(self, key: str, nonces: Set[str]) -> None:
        """Raise the error that ended a claim which this process has waited for.

        Raises:
            ReshardError: That error.
        """
        with suppress(FileNotFoundError, ValidationError), open(self._path(key, "failed"), "rb") as file:
            told = _Failure.model_validate_json(file.read())
            if told.nonce in nonces:
                raise from_problem(told.problem)


def _write_whole(path: str, text: str) -> None:
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.part"
    with writing(path):
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
