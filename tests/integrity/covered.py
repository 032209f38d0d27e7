"""What a source's own checksums cover."""

from __future__ import annotations

from pathlib import Path

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import checksummed_spans
from reshard_engine.storage.local import LocalStore


def covered_spans(path: Path) -> list[tuple[int, int]]:
    """(offset, length) of what the container's own CRC-32s cover."""
    store = LocalStore()
    info = store.stat(str(path))
    assert info is not None
    return [(o, n) for o, n, _ in checksummed_spans(SourceFile(store, path.name, (info,)))]
