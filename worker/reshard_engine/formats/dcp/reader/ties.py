"""Tied weights: torch saves both names with all elements, and the optimizer knows only the first one.

Two weights are taken for tied if the second has no place in the optimizer, both have the same chunks, and the CRC-32s
of their records are equal. They are compared element by element before anything is written.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`_get_model_state_dict`: the state dict has both names),
`nn/modules/module.py` (`named_parameters` yields a parameter once); verified by running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.zip_reader import read_zip_directory
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.formats.dcp.reader.saved_state import SavedTensor

_LEAST_DIMS = 2
"""Vectors of different layers are often equal: all ones or all zeros. Only matrices are tied."""


def tied_names(
    files: Sequence[SourceFile],
    weights: Mapping[str, Sequence[SavedTensor]],
    trained: Callable[[str], bool | None],
) -> dict[str, str]:
    """The owner of each name whose weight is another name's.

    Args:
        files: The files of the state.
        weights: The model's tensors by name, in its order.
        trained: True for a name that the optimizer knows, None if it does not tell.

    Raises:
        SourceError: `zip.*`.
    """
    same: dict[object, list[str]] = {}
    for name, saved in weights.items():
        entry = saved[0].entry
        if len(entry.shape) >= _LEAST_DIMS and any(s.entry.count for s in saved):
            same.setdefault((entry.dtype.name, entry.shape, _in_order(saved)[0].tobytes()), []).append(name)
    found: dict[str, str] = {}
    for names in same.values():
        if len(names) > 1 and any(not trained(n) for n in names) and any(trained(n) is not False for n in names):
            found |= _tied(files, {n: weights[n] for n in names}, trained)
    return found


def _tied(
    files: Sequence[SourceFile], weights: Mapping[str, Sequence[SavedTensor]], trained: Callable[[str], bool | None]
) -> dict[str, str]:
    sums = {name: _sums(files, saved) for name, saved in weights.items()}
    found: dict[str, str] = {}
    for name, own in sums.items():
        if trained(name) or own is None:
            continue
        owner = next((o for o, s in sums.items() if s == own and o != name and o not in found and trained(o)), None)
        if owner is None and trained(name) is None:
            owner = next((o for o, s in sums.items() if s == own), name)
        if owner is not None and owner != name:
            found[name] = owner
    return found


def _sums(files: Sequence[SourceFile], saved: Sequence[SavedTensor]) -> tuple[int, ...] | None:
    """The CRC-32s of a tensor's chunks; None if the writer did not compute one."""
    parts: list[SourceFile] = []
    for one, row in _in_order(saved)[1]:
        metadata = one.part.metadata
        file = files[one.part.first_file + int(metadata.file[row])]
        parts.append(file.part(int(metadata.offset[row]), int(metadata.length[row])))
    sums = tuple(open_all(parts, _sum))
    return None if 0 in sums else sums


def _in_order(saved: Sequence[SavedTensor]) -> tuple[Column, list[tuple[SavedTensor, int]]]:
    """The boxes of a tensor's chunks by offset, each once, and the row of each in its metadata.

    Of copies, any rank may be the one that writes: the order in which chunks come is another one for each tensor.
    """
    boxes = np.concatenate([s.entry.boxes for s in saved])
    rows = [(s, row) for s in saved for row in range(s.entry.first, s.entry.first + s.entry.count)]
    distinct, first = np.unique(boxes.reshape(len(boxes), -1), axis=0, return_index=True)
    return distinct, [rows[i] for i in first.tolist()]


def _sum(part: SourceFile) -> int:
    entries = read_zip_directory(CachedFile(part)).entries
    data = [e.crc32 for n, e in entries.items() if n.startswith("data/")]
    return data[0] if len(data) == 1 else 0
