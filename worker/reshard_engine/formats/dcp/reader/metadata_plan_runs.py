"""Reads runs of plan items, which Megatron stores in the attribute `all_local_plans`, and of which nothing is kept.

The plans of all ranks are half of such a file or more. No reader needs them, but the memo goes on behind them.

Source: megatron-core 0.16.1 `dist_checkpointing/strategies/state_dict_saver.py` (`all_local_plans`); torch 2.13.0
`distributed/checkpoint/planner.py` (`WriteItem`: index, type, bytes_io_data, tensor_data; `TensorWriteData`: chunk,
properties, size), verified by running both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.formats.dcp.reader.metadata_cursor import Cursor, Flags, Window
from reshard_engine.formats.dcp.reader.metadata_runs import OPENED, record_count, record_starts

_NEEDED = frozenset(
    {names.ITEM, names.ITEM_DATA, names.INDEX, names.SIZE, "fqn", "index", "offset", "type", "tensor_data", "chunk"}
    | {"properties", "size"}
)


@dataclass(frozen=True, slots=True)
class PlanRun:
    """Items that follow one another in a list. They are checked as opcodes, and not kept."""

    end: int
    memoised: int
    count: int

    def __len__(self) -> int:
        return self.count

    def text(self, number: int) -> str | None:
        """No text of an item is fetched by anything that a reader needs."""
        return None


def plan_run(window: Window, base: int, gets: Mapping[str, bytes], is_shallow: Callable[[int], bool]) -> PlanRun | None:
    """The regular items with which a window begins; None if there is none.

    Args:
        window: A part of the stream from the position of a record on.
        base: The number of the next value in the memo.
        gets: The opcodes that fetch classes and names of attributes from the memo.
        is_shallow: True for the number of a value in the memo that can be fetched without a look at its depth.
    """
    if not gets.keys() >= _NEEDED:
        return None
    head = gets[names.ITEM] + OPENED + gets["index"] + gets[names.INDEX] + OPENED + gets["fqn"]
    starts = record_starts(window, head)
    if starts is None:
        return None
    cursor = Cursor(window, starts + len(head))
    memoised, fetched = _items(cursor, gets)
    count = record_count(cursor, starts, window, b"e(")
    before = base + np.cumsum(memoised) - memoised
    for numbers, where in fetched:
        count = min(count, _known(numbers[:count], where[:count], before[:count], is_shallow))
    if count == 0:
        return None
    return PlanRun(int(cursor.at[count - 1]), int(memoised[:count].sum()), count)


def _known(numbers: Column, where: Flags, before: Column, is_shallow: Callable[[int], bool]) -> int:
    """The number of first records that fetch only values that are in the memo before them, and not deep."""
    if not len(numbers):
        return 0
    each, inverse = np.unique(numbers, return_inverse=True)
    base = int(before[0])
    # Values of this run are no deeper than those of any other.
    shallow = np.array([n >= base or is_shallow(n) for n in each.tolist()], np.bool_)[inverse]
    good = ~where | (shallow & (numbers < before))
    return len(good) if good.all() else int(np.argmin(good))


def _items(cursor: Cursor, gets: Mapping[str, bytes]) -> tuple[Column, list[tuple[Column, Flags]]]:
    """Move over the items, from the name on: how many values each puts into the memo, and what it fetches."""
    everywhere = cursor.regular.copy()
    fqn = cursor.text()
    cursor.skip(gets["index"])
    cursor.skip_number_or_none()
    opened = gets["offset"] + gets[names.SIZE]
    sharded = cursor.meets(opened)
    cursor.skip(opened, sharded)
    corner = cursor.size(sharded)
    cursor.skip(b"ub" + gets["type"])
    fetched = [(fqn.memo, ~fqn.written), (cursor.fetched(everywhere), everywhere)]
    if "bytes_io_data" in gets:
        nothing = gets["bytes_io_data"] + b"N"
        cursor.skip(nothing, cursor.meets(nothing))
    cursor.skip(gets["tensor_data"] + gets[names.ITEM_DATA] + OPENED + gets["chunk"])
    fetched.append((cursor.fetched(everywhere), everywhere))
    cursor.skip(gets["properties"])
    made = _properties(cursor, gets.get(names.PROPERTY), fetched)
    cursor.skip(gets["size"])
    written = cursor.meets(gets[names.SIZE])
    cursor.skip(gets[names.SIZE], written)
    shape = cursor.size(written)
    fetched.append((cursor.fetched(~written), ~written))
    cursor.skip(b"ubub")
    memoised = 6 + fqn.written + 2 * made
    for size, where in ((corner, sharded), (shape, written)):
        memoised += where * np.where(size.dims > 0, 3, 2)
    return memoised, fetched


def _properties(cursor: Cursor, cls: bytes | None, fetched: list[tuple[Column, Flags]]) -> Flags:
    """Move over the properties of a tensor, which are fetched or made: true where they are made."""
    made = np.zeros(len(cursor.at), np.bool_)
    if cls is not None:
        opened = cls + b")\x81\x94("
        made = cursor.meets(opened)
        cursor.skip(opened, made)
    # Element type and layout, or the properties themselves.
    fetched.append((cursor.fetched(np.ones(len(made), np.bool_)), np.ones(len(made), np.bool_)))
    fetched.append((cursor.fetched(made), made))
    cursor.flag(made)
    fetched.append((cursor.fetched(made), made))
    cursor.flag(made)
    cursor.skip(b"t\x94b", made)
    return made
