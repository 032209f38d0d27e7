"""Groups the files of a layout into few rows: one for each rank while there are few, else one for a range of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.pictures import FileShare, LayoutPicture

MAX_ROWS = 16
"""The most rows of one kind of ranks. The two sides of a picture then fit on a screen."""
MANY_ROWS, FEW_ROWS = 20, 4
"""Where a side has more rows than the first number, each kind but the largest has at most the second."""
REST = "other bytes"
"""The name of the bytes of a file that belong to no tensor: metadata, names, counters."""
_NUMBER = re.compile(r"(\d+)")
_AXIS = re.compile(r"([a-z]+) (\d+)")


@dataclass(frozen=True, slots=True)
class Row:
    """Some files of a layout: those of one rank, of a range of ranks, or files that belong to no single rank."""

    label: str
    owners: int
    """Number of ranks; of files, if they belong to no single rank."""
    ranked: bool
    files: int
    bytes_by_state: Mapping[str, int]
    """Bytes by tensor state, and the rest of the files as `REST`."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts of the row."""
        return sum(self.bytes_by_state.values())


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts `rank 2` before `rank 10`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(text))


def rows_of(picture: LayoutPicture, *, most: int = MAX_ROWS) -> tuple[Row, ...]:
    """The rows of a layout: ranks first, in their order, then files that belong to no single rank.

    Args:
        picture: The layout.
        most: The most rows of ranks, and also of other files.
    """
    by_rank: dict[str, list[FileShare]] = {}
    loose: list[FileShare] = []
    for share in picture.files:
        by_rank.setdefault(share.rank, []).append(share) if share.rank else loose.append(share)
    by_place = _places(loose, most)
    kinds = [*_kinds(by_rank), *([sorted(by_place, key=natural)] if by_place else [])]
    files = by_rank | by_place
    limits = _limits([sum(f.size_bytes for name in kind for f in files[name]) for kind in kinds], kinds, most)
    shown = shown_axes(picture)
    return tuple(
        _row(names, [f for name in names for f in files[name]], shown)
        for kind, limit in zip(kinds, limits, strict=True)
        for names in bucketed(kind, limit)
    )


def _places(loose: Sequence[FileShare], most: int) -> dict[str, list[FileShare]]:
    """Files that belong to no single rank: each by itself while they are few, else by directory."""
    if len(loose) <= most:
        return {f.file: [f] for f in loose}
    found: dict[str, list[FileShare]] = {}
    for share in loose:
        # A universal checkpoint has a directory for each parameter.
        folder = share.file.rpartition("/")[0]
        found.setdefault(f"{folder}/" if folder else share.file, []).append(share)
    return found


def _limits(sizes: Sequence[int], kinds: Sequence[Sequence[str]], most: int) -> list[int]:
    """The most rows of each kind: few for the smaller kinds if there were too many rows else."""
    if sum(min(len(kind), most) for kind in kinds) <= MANY_ROWS:
        return [most] * len(kinds)
    return [most if size == max(sizes) else min(most, FEW_ROWS) for size in sizes]


def rank_count(picture: LayoutPicture) -> int:
    """Number of different ranks that own files: of the kind of which there are most."""
    return max((len(kind) for kind in _kinds({f.rank for f in picture.files if f.rank})), default=0)


def bucketed(names: Sequence[str], most: int) -> list[Sequence[str]]:
    """Consecutive names in at most `most` groups of equal size; the last one may be smaller."""
    size = max(1, -(-len(names) // most))
    return [names[at : at + size] for at in range(0, len(names), size)]


def range_label(names: Sequence[str]) -> str:
    """One label for several: `dp 0-127 tp 0` if they differ in numbers only, else the first and how many more."""
    if len(names) == 1:
        return names[0]
    parts = [_NUMBER.split(name) for name in names]
    if any(part[::2] != parts[0][::2] for part in parts):
        return f"{names[0]} and {len(names) - 1:,} more"
    words = list(parts[0])
    for at in range(1, len(words), 2):
        # Their texts, because a file may be called model-00001-of-00004.
        found = sorted({part[at] for part in parts}, key=int)
        words[at] = found[0] if len(found) == 1 else f"{found[0]}-{found[-1]}"
    return "".join(words)


def _row(names: Sequence[str], files: Sequence[FileShare], shown: frozenset[str]) -> Row:
    held: dict[str, int] = {}
    for share in files:
        # Bytes that tensors share count for each of them, so a file may hold less than its parts.
        rest = max(0, share.size_bytes - sum(share.bytes_by_state.values()))
        for state, size in (*share.bytes_by_state.items(), (REST, rest)):
            held[state] = held.get(state, 0) + size
    ordered = {state: held[state] for state in sorted(held, key=lambda s: (s == REST, s)) if held[state]}
    ranked = bool(files[0].rank)
    label = range_label([short_label(name, shown) for name in names] if ranked else names)
    return Row(label, len(names), ranked, len(files), ordered)


def _kinds(labels: Iterable[str]) -> list[list[str]]:
    """Ranks by the axes that their labels name, each kind in its order: `dp 0 tp 0` is another kind than `layer 3`."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for label in sorted(labels, key=natural):
        kinds.setdefault(tuple(axis for axis, _ in _AXIS.findall(label)), []).append(label)
    return list(kinds.values())


def shown_axes(picture: LayoutPicture) -> frozenset[str]:
    """The axes along which a layout has more than one rank."""
    seen: dict[str, set[str]] = {}
    for label in {share.rank for share in picture.files}:
        for axis, number in _AXIS.findall(label):
            seen.setdefault(axis, set()).add(number)
    return frozenset(axis for axis, numbers in seen.items() if len(numbers) > 1)


def short_label(label: str, shown: frozenset[str]) -> str:
    """The label of a rank without axes of one rank; the whole label if nothing else is left of it."""
    axes = _AXIS.findall(label)
    if " ".join(f"{axis} {number}" for axis, number in axes) != label:
        return label
    return " ".join(f"{axis} {number}" for axis, number in axes if axis in shown) or label
