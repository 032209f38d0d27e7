"""The questions of tests to a real server of any object store, by the store's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class ObjectServer(Protocol):
    """A running server. It is looked at with a client of the field, independent of our storage code."""

    scheme: str
    """The scheme of its URLs."""
    endpoint: str

    def env(self, endpoint: str | None = None) -> dict[str, str]:
        """Environment variables with which any client finds the server (or a proxy before it)."""
        ...

    def new_bucket(self) -> str:
        """Create a bucket that no other test has; its name."""
        ...

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object."""
        ...

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        ...

    def upload(self, directory: Path, bucket: str, prefix: str) -> None:
        """Put every file of a directory under a prefix."""
        ...

    def read_all(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Every object under a prefix, by its key relative to it."""
        ...

    def part_of(self, method: str, target: str) -> tuple[str, str, str] | None:
        """(path, upload id, part number) if a request uploads a part, from its method and target (path and query)."""
        ...

    def unfinished(self, bucket: str) -> list[str]:
        """The keys for which parts wait for the end of an upload, once for each upload that was not aborted."""
        ...


def upload(server: ObjectServer, directory: Path, bucket: str, prefix: str) -> None:
    """Put every file of a directory under a prefix."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            server.put(bucket, f"{prefix}/{path.relative_to(directory)}", path.read_bytes())
