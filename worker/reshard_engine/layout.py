"""What a target will look like, byte for byte, before any tensor data is read.

A `FileTemplate` is the shape of a file: literal bytes, bodies to be filled from tensors, and the
places where CRCs of bodies go, which are known only when the bodies have passed. Files of equal
shape share one template: the atoms of a transformer have a dozen distinct ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.dtypes import Dtype

MAX_NAME_BYTES = 255
"""Of one component of a path: what file systems take."""
ZEROS = -1
"""Tensor number of a body that is all zeros."""


@dataclass(frozen=True, slots=True)
class Body:
    """A run of elements of one tensor in a file.

    `slot` indexes the tensors of the `TargetFile`; `begin` and `end` count elements in the row-major
    order of the tensor; `dtype` is the element type in the target.
    """

    offset: int
    slot: int
    begin: int
    end: int
    dtype: Dtype
    record: int | None
    """The record (see `FileTemplate.records`) whose CRC covers this body."""

    @property
    def length_bytes(self) -> int:
        """Bytes in the target file."""
        return (self.end - self.begin) * self.dtype.itemsize_bytes


@dataclass(frozen=True)
class FileTemplate:
    """The shape of a file. Constructing one proves that literals and bodies tile it exactly."""

    size_bytes: int
    literals: tuple[tuple[int, bytes], ...]
    """(offset, bytes); zeros stand where CRCs go."""
    bodies: tuple[Body, ...]
    records: tuple[tuple[int, int], ...] = ()
    """(offset, length) of spans whose CRC-32 is wanted."""
    crc_slots: tuple[tuple[int, int], ...] = ()
    """(offset, record): four little-endian bytes that hold the record's CRC-32."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        """Prove the tiling and derive the digest."""
        spans = [(o, len(b)) for o, b in self.literals] + [(b.offset, b.length_bytes) for b in self.bodies]
        spans = sorted(s for s in spans if s[1])
        at = 0
        for offset, length in spans:
            if offset != at:
                raise AssertionError(f"a layout leaves bytes {at} to {offset} of {self.size_bytes} undefined")
            at += length
        if at != self.size_bytes:
            raise AssertionError(f"a layout defines {at} of {self.size_bytes} bytes")
        digest = hashlib.sha256(f"{self.size_bytes}|{self.records}|{self.crc_slots}".encode())
        for offset, data in self.literals:
            digest.update(offset.to_bytes(8, "little") + data)
        for body in self.bodies:
            digest.update(f"{body.offset},{body.slot},{body.begin},{body.end},{body.dtype.name};".encode())
        object.__setattr__(self, "digest", digest.hexdigest())
        object.__setattr__(self, "_body_offsets", np.array([b.offset for b in self.bodies], dtype=np.int64))
        object.__setattr__(self, "_slot_offsets", np.array([o for o, _ in self.crc_slots], dtype=np.int64))

    def bodies_in(self, begin: int, end: int) -> Sequence[Body]:
        """The bodies that overlap the bytes `[begin, end)`."""
        offsets: np.ndarray = self.__dict__["_body_offsets"]
        first = max(0, int(np.searchsorted(offsets, begin, side="right")) - 1)
        last = int(np.searchsorted(offsets, end, side="left"))
        # Empty bodies share their offset with the next one: step back over them.
        while first > 0 and self.bodies[first - 1].offset + self.bodies[first - 1].length_bytes > begin:
            first -= 1
        return [b for b in self.bodies[first:last] if b.length_bytes and b.offset + b.length_bytes > begin]

    def slots_in(self, begin: int, end: int) -> Sequence[tuple[int, int]]:
        """The CRC slots that overlap the bytes `[begin, end)`."""
        offsets: np.ndarray = self.__dict__["_slot_offsets"]
        first = int(np.searchsorted(offsets, begin - 3, side="left"))
        last = int(np.searchsorted(offsets, end, side="left"))
        return self.crc_slots[first:last]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file of the target: a template and the tensors that fill its bodies."""

    path: str
    """Relative to the target directory."""
    template: FileTemplate
    tensors: tuple[int, ...]
    commit: bool = False
    """Whether the real loader refuses the target without it: published last."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.template.size_bytes


@dataclass(frozen=True, slots=True)
class Pointer:
    """A small file beside the target directory that names it, such as `latest_universal`."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """All files of a target in the order in which they are written, commit files last."""

    files: tuple[TargetFile, ...]
    pointer: Pointer | None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Prove that paths stay below the target and do not collide: names in them come from checkpoints.

        Raises:
            SourceError: `name.invalid`.
        """
        paths = {f.path for f in self.files}
        for file in self.files:
            parts = file.path.split("/")
            clean = all(p not in ("", ".", "..") and len(p.encode("utf-8", "replace")) <= MAX_NAME_BYTES for p in parts)
            taken = any("/".join(parts[:n]) in paths for n in range(1, len(parts)))
            if not clean or taken or not file.path.isprintable() or "\\" in file.path:
                raise SourceError("name.invalid", f"{printable(file.path)!r} cannot be a file of the target")
        if len(paths) != len(self.files):
            raise SourceError("name.invalid", "two files of the target have one name")


def literal_template(data: bytes) -> FileTemplate:
    """The template of a file whose bytes are known."""
    return FileTemplate(len(data), ((0, data),), ())
