"""Errors of the file system have one code each, whoever writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from reshard.ensuring import local_checkpoints
from reshard.errors import StorageError
from reshard_engine.execute.sinks import local
from reshard_engine.storage.local import translated


@pytest.mark.parametrize("door", [local_checkpoints.writing, local.writing, translated])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, "storage.denied"),
        (errno.EPERM, "storage.denied"),
        (errno.EROFS, "storage.denied"),
        (errno.ENOSPC, "storage.no_space"),
        (errno.EDQUOT, "storage.no_space"),
        (errno.EIO, "storage.unavailable"),
    ],
)
def test_codes(door: Callable[[str], AbstractContextManager[None]], number: int, code: str) -> None:
    with pytest.raises(StorageError) as caught, door("/mnt/run"):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == code
    assert "/mnt/run" in str(caught.value)
