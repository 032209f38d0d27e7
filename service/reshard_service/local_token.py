"""The token that `reshard serve` makes for itself on a loopback address, where every user of the machine can knock."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard.errors import RequestError, printable
from reshard.service_token import token_path
from reshard_service.settings import NEW_TOKEN


@contextmanager
def local_token(port: int) -> Generator[tuple[str, Path]]:
    """Write a new token to the file where this user's clients look for it; the file goes when the block ends.

    Raises:
        RequestError: `request.invalid`: the file cannot be written.
    """
    token, path = secrets.token_urlsafe(32), token_path(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        # A new file of this user replaces whatever has the name: a file of somebody else, or one that others can read.
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
        os.replace(name, path)
    except OSError as error:
        raise RequestError(
            "request.invalid",
            f"the service's token cannot be written to {printable(str(path))}: {error.strerror}",
            fix=f"export {NEW_TOKEN}; or set XDG_STATE_HOME to a directory of your own",
        ) from None
    try:
        yield token, path
    finally:
        with suppress(OSError):
            if path.read_text(encoding="ascii").strip() == token:  # a later start on this port has another one
                path.unlink()
