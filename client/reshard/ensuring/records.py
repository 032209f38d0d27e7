"""Records that processes leave for one another: small files in the save directory's hidden folder."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Set
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.ensuring.local_checkpoints import writing
from reshard.ensuring.world import Layout
from reshard.errors import ReshardError, from_problem
from reshard.names_on_disk import RECORDS


class Record(BaseModel):
    """The state of one call: the source fits, a conversion runs, or its result exists."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: Literal[1] = 1
    finished: bool
    path: str | None
    """Save directory of the result, relative to the one that holds the record; None where the source fits."""


class Invitation(BaseModel):
    """The conversion that the owner of a claim runs, for those who wait and may help."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nonce: str
    """The owner's claim."""
    node: str
    """The owner's node."""
    path: str
    """Save directory of the result, relative to the one that holds the invitation."""
    layout: Layout

    def same_work(self, other: Invitation | None) -> bool:
        """True if another owner goes on with the same conversion."""
        return other is not None and (other.path, other.layout) == (self.path, self.layout)


class _Failure(BaseModel):
    """The error with which the owner of a claim gave up."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nonce: str
    problem: dict[str, Any]


class Records:
    """The records of one save directory, by key."""

    def __init__(self, home: str) -> None:
        """Open the records of the save directory `home`."""
        self._home = home
        self.folder = os.path.join(home, RECORDS)

    def prepare(self) -> None:
        """Create the folder.

        Raises:
            OSError: The save directory cannot be written.
        """
        os.makedirs(self.folder, exist_ok=True)

    def claim(self, key: str) -> str:
        """The path of the claim file for a key."""
        return self._path(key, "claim")

    def _path(self, key: str, kind: str) -> str:
        return os.path.join(self.folder, f"{key[:32]}.{kind}")

    def read(self, key: str) -> Record | None:
        """Read the record of a key; None if it does not exist or cannot be read."""
        with suppress(FileNotFoundError, ValidationError), open(self._path(key, "json"), "rb") as file:
            return Record.model_validate_json(file.read())
        return None

    def place(self, record: Record) -> str | None:
        """The path of a record's result on this host; other hosts may see the directory under another path."""
        return None if record.path is None else self.absolute(record.path)

    def absolute(self, path: str) -> str:
        """The path on this host of one that `relative` returned."""
        return os.path.normpath(os.path.join(self._home, path))

    def write(self, key: str, place: str | None, *, finished: bool) -> None:
        """Record a result; `place` is None if the result is the source itself."""
        path = None if place is None else self.relative(place)
        _write_whole(self._path(key, "json"), Record(finished=finished, path=path).model_dump_json())

    def helper_claim(self, key: str, node: str) -> str:
        """The path of the claim file of the one process of a node that helps."""
        return self._path(key, f"{hashlib.sha256(node.encode()).hexdigest()[:8]}.helper")

    def invite(self, key: str, invitation: Invitation) -> None:
        """Ask those who wait for this key to help."""
        _write_whole(self._path(key, "shared"), invitation.model_dump_json())

    def invitation(self, key: str) -> Invitation | None:
        """The invitation to help, if there is one."""
        with suppress(FileNotFoundError, ValidationError), open(self._path(key, "shared"), "rb") as file:
            return Invitation.model_validate_json(file.read())
        return None

    def withdraw(self, key: str) -> None:
        """Remove the invitation, and the claims of helpers that were killed: the conversion has ended."""
        with suppress(OSError):
            os.unlink(self._path(key, "shared"))
            for name in os.listdir(self.folder):
                if name.startswith(f"{key[:32]}.") and name.endswith(".helper"):
                    os.unlink(os.path.join(self.folder, name))

    def relative(self, place: str) -> str:
        """A path as others find it, who may see the save directory elsewhere."""
        return os.path.relpath(place, self._home)

    def tell_failure(self, key: str, nonce: str, error: ReshardError) -> None:
        """Record an error for the processes that wait for a claim, so that they do not all try the same in turn."""
        with suppress(ReshardError):
            _write_whole(self._path(key, "failed"), _Failure(nonce=nonce, problem=error.to_problem()).model_dump_json())

    def forget_failure(self, key: str) -> None:
        """Remove the recorded error after a success."""
        with suppress(OSError):
            os.unlink(self._path(key, "failed"))

    def raise_told(self, key: str, nonces: Set[str]) -> None:
        """Raise the recorded error of a claim that this process has waited for.

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
