"""Making items of target files in memory: literals, and bodies from source extents. CRC slots stay zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.execute.gather.read_item import ReadItem
from reshard_engine.execute.gather.tensor_reader import TensorReader
from reshard_engine.plan.write_items import WriteItem
from reshard_engine.tensors.layout import ZEROS, Body


def fill(reader: TensorReader, items: Sequence[WriteItem], memory: ByteArray) -> None:
    """Make items of target files; their sources are read together. CRC slots are left zero.

    Raises:
        SourceError: `source.changed`, or an error of the storage.
    """
    wanted: list[ReadItem] = []
    view = memory.data
    for item in items:
        image = item.file.template.image
        if image is not None and item.length_bytes == len(image):
            view[item.at : item.at + len(image)] = image
            wanted += _all_bodies(item)
        else:
            _put_literals(item, image, memory)
            wanted += _bodies(item, reader, memory)
    reader.read(wanted, memory)


def _put_literals(item: WriteItem, image: bytes | None, memory: ByteArray) -> None:
    begin, end = item.begin, item.begin + item.length_bytes
    shift = item.at - begin
    for offset, data in [(0, image)] if image is not None else item.file.template.literals_in(begin, end):
        low, high = max(offset, begin), min(offset + len(data), end)
        memory[low + shift : high + shift] = np.frombuffer(data, dtype=np.uint8)[low - offset : high - offset]


def _all_bodies(item: WriteItem) -> list[ReadItem]:
    """The bodies of a whole file, except bodies of zeros, which the file's image already holds."""
    at, tensors = item.at, item.file.tensors
    return [
        ReadItem(tensors[b.slot], b.dtype, b.begin, b.end, at + b.offset)
        for b in item.file.template.filled_bodies
        if tensors[b.slot] != ZEROS
    ]


def _bodies(item: WriteItem, reader: TensorReader, memory: ByteArray) -> Iterator[ReadItem]:
    """The elements of bodies that lie wholly in an item. Zeros, and elements that it cuts, are written at once."""
    begin, end = item.begin, item.begin + item.length_bytes
    for body in item.file.template.bodies_in(begin, end):
        tensor, size = item.file.tensors[body.slot], body.dtype.itemsize_bytes
        low, high = max(body.offset, begin) - body.offset, min(body.offset + body.length_bytes, end) - body.offset
        at = item.at + body.offset - begin  # place of the body's first byte, which may lie before the item
        if tensor == ZEROS:
            memory[at + low : at + high] = 0
            continue
        whole = range(-(-low // size), high // size)
        for number in {low // size, (high - 1) // size}:
            if number not in whole:
                _put_cut_element(reader, (tensor, body, number), (low, high), memory, at)
        if whole:
            yield ReadItem(
                tensor, body.dtype, body.begin + whole.start, body.begin + whole.stop, at + whole.start * size
            )


def _put_cut_element(
    reader: TensorReader, element: tuple[int, Body, int], inside: tuple[int, int], memory: ByteArray, at: int
) -> None:
    """Put a part of one element in place. Its losses are counted only in the item where the element begins."""
    (tensor, body, number), (low, high), size = element, inside, element[1].dtype.itemsize_bytes
    first, start = body.begin + number, number * size
    data = reader.elements(tensor, body.dtype, first, first + 1, counted=start >= low)
    part = slice(max(low - start, 0), min(high - start, size))
    memory[at + start + part.start : at + start + part.stop] = data[part]
