"""All entries of the corpus."""

from __future__ import annotations

from adversarial.corpus import (
    checkpoints,
    containers,
    distributed,
    megatron,
    pickle_code,
    pickle_exhaustion,
    pickle_structure,
    safetensors_files,
    tensors,
    zips,
)
from adversarial.corpus.entry import Entry

THEMES = (
    pickle_code,
    pickle_structure,
    pickle_exhaustion,
    tensors,
    zips,
    containers,
    safetensors_files,
    checkpoints,
    distributed,
    megatron,
)
ENTRIES: tuple[Entry, ...] = tuple(sorted((e for t in THEMES for e in t.ENTRIES), key=lambda e: e.number))
NUMBERS_ELSEWHERE = {
    119: "storage.protocol: a listing without end is a store's, no directory of files can show it",
    120: "storage.protocol: as above",
}
"""What no checkpoint on disk can be: the store itself is hostile."""
