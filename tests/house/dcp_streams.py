"""The `.metadata` of a large sharded run as the bytes that Python's pickler would write, made without its objects.

5,000 tensors on 1,024 ranks have ten million objects: the pickler would need more memory than a test may take.
`tests/unit/engine/test_dcp_metadata.py` compares the bytes with those of the pickler.

Source: CPython 3.11 `Modules/_pickle.c` (`save`, `_Pickler_OpcodeBoundary`, `batch_dict_exact`, `batch_list_exact`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_FRAME = 64 << 10
_BATCH = 1_000
_WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5, 0x68: 2, 0x6A: 5}
_SAVED = frozenset(b"KMJ\x8ahj\x8cX)]}N\x88\x89")


@dataclass(frozen=True)
class Sharded:
    """A tensor that is cut along its first dimension, as fully sharded runs cut it."""

    key: str
    shape: tuple[int, ...]

    def chunk(self, rank: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The offsets and sizes of a rank's chunk."""
        rows = ceil(self.shape[0] / ranks)
        first = min(rank * rows, self.shape[0])
        rest = (0,) * (len(self.shape) - 1)
        return (first, *rest), (min(rows, self.shape[0] - first), *self.shape[1:])


def model(tensors: int) -> list[Sharded]:
    """Parameters and moments of a decoder, so many tensors in all."""
    shapes = {
        "self_attn.q_proj.weight": (8_192, 8_192), "self_attn.k_proj.weight": (1_024, 8_192),
        "self_attn.v_proj.weight": (1_024, 8_192), "self_attn.o_proj.weight": (8_192, 8_192),
        "mlp.gate_proj.weight": (28_672, 8_192), "mlp.up_proj.weight": (28_672, 8_192),
        "mlp.down_proj.weight": (8_192, 28_672), "input_layernorm.weight": (8_192,),
        "post_attention_layernorm.weight": (8_192,),
    }  # fmt: skip
    found: list[Sharded] = []
    layer = 0
    while len(found) < tensors:
        for name, shape in shapes.items():
            fqn = f"model.layers.{layer}.{name}"
            found.append(Sharded(f"app.model.{fqn}", shape))
            found += [Sharded(f"app.optim.state.{fqn}.{state}", shape) for state in ("exp_avg", "exp_avg_sq")]
        layer += 1
    return found[:tensors]


def record_bytes(sizes: tuple[int, ...]) -> int:
    """The length of a chunk's record, as it could be."""
    return 1_520 + 4 * prod(sizes)


class _Stream:
    """Bytes in frames, as the pickler in C cuts them: where a value begins, once a frame is long enough."""

    def __init__(self) -> None:
        self._done: list[bytes] = [b"\x80\x04"]
        self._frame = bytearray()
        self._last = b""
        self.memo = 0
        self.frame_bytes = _FRAME

    def put(self, block: bytes) -> None:
        """Append opcodes."""
        room = self.frame_bytes - len(self._frame)
        if len(block) >= room:
            for at in _saves(self._last + block, len(self._last)):
                if at >= room:
                    self._frame += block[:at]
                    self._close()
                    block = block[at:]
                    break
        self._frame += block
        self._last = (self._last + block)[-2:]

    def _close(self) -> None:
        self._done += [b"\x95" + struct.pack("<Q", len(self._frame)), bytes(self._frame)]
        self._frame.clear()

    def text(self, text: str) -> int:
        """Append a text, and return its number in the memo."""
        self.put(written(text))
        return self.number()

    def number(self) -> int:
        """The next number of the memo."""
        self.memo += 1
        return self.memo - 1

    def finish(self) -> bytes:
        """The whole stream."""
        self.put(b".")
        self._close()
        return b"".join(self._done)


def _saves(data: bytes, start: int) -> Iterator[int]:
    """The positions, from `start` on, at which a value begins: only there the pickler ends a frame."""
    at = start
    while at < len(data):
        opcode = data[at]
        # A mark begins a tuple, or a batch of a dict or list that was just made or grew.
        batch = data[at - 2 : at] in (b"}\x94", b"]\x94") or data[at - 1] in b"ue"
        if opcode in _SAVED or (opcode == 0x28 and not batch):
            yield at - start
        at += _WIDTHS.get(opcode, 1)
        if opcode == 0x8C:
            at += 1 + data[at]
        elif opcode == 0x58:
            at += 4 + int.from_bytes(data[at : at + 4], "little")
        elif opcode == 0x8A:
            at += 1 + data[at]


def get(number: int) -> bytes:
    """The opcode that fetches a value of the memo."""
    return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)


def written(text: str) -> bytes:
    """The opcodes that push a text and memoise it."""
    raw = text.encode()
    return (b"\x8c" + bytes([len(raw)]) if len(raw) < 256 else b"X" + struct.pack("<I", len(raw))) + raw + b"\x94"


def integer(value: int) -> bytes:
    """The opcode that pushes an integer."""
    if value < 256:
        return b"K" + bytes([value])
    if value < 65_536:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


class _Writer:
    """Writes one stream. Whatever comes once is written by its methods, in the order of the pickler."""

    def __init__(self, tensors: list[Sharded], ranks: int) -> None:
        self._s = _Stream()
        self._tensors, self._ranks = tensors, ranks
        self._known: dict[str, int] = {}

    def stream(self) -> bytes:
        """The whole `.metadata`."""
        self._object("Metadata")
        self._word("state_dict_metadata")
        self._dict(len(self._tensors), self._tensor)
        self._word("planner_data")
        self._dict(len(self._tensors), self._path)
        self._word("storage_data")
        self._places()
        self._word("version")
        self._s.text("1.0.0")
        self._s.put(b"ub")
        return self._s.finish()

    def _places(self) -> None:
        self._dict(len(self._tensors) * self._ranks, self._place)

    def _word(self, text: str, key: str = "") -> None:
        """A text that is one object wherever it comes: written once, then fetched."""
        known = self._known.get(key or text)
        if known is None:
            self._known[key or text] = self._s.text(text)
        else:
            self._s.put(get(known))

    def _class(self, name: str, module: str = METADATA) -> None:
        known = self._known.get(f"{module}.{name}")
        if known is not None:
            self._s.put(get(known))
            return
        # Classes of torch that are written in C make the text of their module anew.
        self._word(module) if module.startswith("torch.distributed") else self._s.text(module)
        self._s.text(name)
        self._s.put(b"\x93\x94")
        self._known[f"{module}.{name}"] = self._s.number()

    def _put(self, opcodes: bytes, memoised: int) -> None:
        self._s.put(opcodes)
        self._s.memo += memoised

    def _object(self, name: str, module: str = METADATA) -> None:
        self._class(name, module)
        self._put(b")\x81\x94}\x94(", 2)

    def _dict(self, count: int, entry: Callable[[int], None]) -> None:
        self._put(b"}\x94", 1)
        if count == 1:
            entry(0)
            self._s.put(b"s")
            return
        for number in range(count):
            if number % _BATCH == 0:
                self._s.put(b"u(" if number else b"(")
            entry(number)
        # The pickler sees that a dict has ended only at the next entry.
        self._s.put(b"u" if count % _BATCH else b"u(u")

    def _size(self, numbers: tuple[int, ...]) -> None:
        self._class("Size", "torch")
        self._put(size(numbers), _memoised(numbers))

    def _properties(self) -> None:
        self._word("properties")
        self._class("TensorProperties")
        self._put(b")\x81\x94", 1)
        self._s.put(b"(")
        self._class("float32", "torch")
        self._once("layout", lambda: self._class("_get_layout", "torch.serialization"), "torch.strided")
        self._s.put(b"\x89")
        self._once("format", lambda: self._class("_MEM_FORMAT_ENCODING"), 0)
        self._put(b"\x89t\x94b", 1)

    def _once(self, key: str, name: Callable[[], None], argument: str | int) -> None:
        """A call whose result is one object wherever it comes."""
        if key in self._known:
            self._s.put(get(self._known[key]))
            return
        name()
        self._s.text(argument) if isinstance(argument, str) else self._s.put(integer(argument))
        self._put(b"\x85\x94R", 1)
        self._s.put(b"\x94")
        self._known[key] = self._s.number()

    def _tensor(self, number: int) -> None:
        tensor = self._tensors[number]
        self._s.text(tensor.key)
        self._object("TensorStorageMetadata")
        self._properties()
        self._word("size")
        self._size(tensor.shape)
        self._word("chunks")
        self._put(b"]\x94", 1)
        self._chunks(tensor)

    def _chunks(self, tensor: Sharded) -> None:
        """The chunks of a tensor, and the end of its object."""
        for rank in range(self._ranks):
            if self._ranks > 1 and rank % _BATCH == 0:
                self._s.put(b"e(" if rank else b"(")
            self._chunk(*tensor.chunk(rank, self._ranks))
        self._s.put(b"eub" if self._ranks > 1 else b"aub")

    def _chunk(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        if "sizes" not in self._known:
            self._object("ChunkStorageMetadata")
            self._word("offsets")
            self._size(offsets)
            self._word("sizes")
            self._size(sizes)
            self._s.put(b"ub")
            return
        cls, first, second, call = self._gets(f"{METADATA}.ChunkStorageMetadata", "offsets", "sizes", "torch.Size")
        self._put(
            b"".join((cls, b")\x81\x94}\x94(", first, call, size(offsets), second, call, size(sizes), b"ub")),
            2 + _memoised(offsets) + _memoised(sizes),
        )

    def _gets(self, *keys: str) -> list[bytes]:
        return [get(self._known[key]) for key in keys]

    def _path(self, number: int) -> None:
        key = self._tensors[number].key
        self._s.text(key)
        first, second, rest = key.split(".", 2)
        self._word(first, f"part {first}")
        self._word(second, f"part {second}")
        self._s.text(rest)
        self._put(b"\x87\x94", 1)

    def _place(self, number: int) -> None:
        rank, at = divmod(number, len(self._tensors))
        tensor = self._tensors[at]
        offsets, sizes = tensor.chunk(rank, self._ranks)
        offset = self._end if at else 0
        length = record_bytes(sizes)
        self._end = offset + length
        path = f"__{rank}_0.distcp"
        if "length" in self._known and path in self._known:
            self._short_place(tensor.key, rank, offsets, path, offset, length)
            return
        self._object("MetadataIndex")
        self._word("fqn")
        self._s.text(tensor.key)
        self._word("index")
        self._s.put(integer(rank))
        self._word("offset")
        self._size(offsets)
        self._s.put(b"ub")
        self._object("_StorageInfo", FILESYSTEM)
        self._word("relative_path")
        self._word(path)
        self._word("offset")
        self._s.put(integer(offset))
        self._word("length")
        self._s.put(integer(length) + b"ub")

    def _short_place(self, key: str, rank: int, offsets: tuple[int, ...], path: str, offset: int, length: int) -> None:
        """An entry all of whose names were written before."""
        index, fqn, hint, start, call = self._gets(f"{METADATA}.MetadataIndex", "fqn", "index", "offset", "torch.Size")
        place, file, end = self._gets(f"{FILESYSTEM}._StorageInfo", "relative_path", "length")
        opened = b")\x81\x94}\x94("
        self._put(
            b"".join(
                (
                    *(index, opened, fqn, written(key), hint, integer(rank)),
                    *(start, call, size(offsets), b"ub", place, opened, file, get(self._known[path]), start),
                    *(integer(offset), end, integer(length), b"ub"),
                )
            ),
            5 + _memoised(offsets),
        )


def size(numbers: tuple[int, ...]) -> bytes:
    """The opcodes that call the class on the stack with these numbers."""
    body = b"".join(map(integer, numbers))
    if not numbers:
        return b")\x85\x94R\x94"
    inner = b"(" + body + b"t" if len(numbers) > 3 else body + (b"\x85", b"\x86", b"\x87")[len(numbers) - 1]
    return inner + b"\x94\x85\x94R\x94"


def _memoised(numbers: tuple[int, ...]) -> int:
    """How many values of such a size go into the memo: all tuples but the empty one, and the size."""
    return 3 if numbers else 2


class _Crowd(_Writer):
    """Writes one tensor of very many chunks, in one frame and one batch; also small numbers take four bytes."""

    def __init__(self, chunks: int, step: int) -> None:
        super().__init__([Sharded("app.model.w", (chunks,))], 2)
        self._s.frame_bytes = 1 << 62
        self._rows = step * np.arange(chunks, dtype="<i4")

    def _chunks(self, tensor: Sharded) -> None:
        self._s.put(b"(")
        self._chunk((0,), (1,))
        cls, first, second, call = self._gets(f"{METADATA}.ChunkStorageMetadata", "offsets", "sizes", "torch.Size")
        head = cls + b")\x81\x94}\x94(" + first + call + b"J"
        self._table(head, b"\x85\x94\x85\x94R\x94" + second + call + size((1,)) + b"ub", 8)
        self._s.put(b"eub")

    def _places(self) -> None:
        self._put(b"}\x94", 1)
        self._s.put(b"(")
        self._place(0)
        index, fqn, hint, start, call = self._gets(f"{METADATA}.MetadataIndex", "fqn", "index", "offset", "torch.Size")
        place, file, end, path = self._gets(f"{FILESYSTEM}._StorageInfo", "relative_path", "length", "__0_0.distcp")
        opened = b")\x81\x94}\x94("
        head = b"".join((index, opened, fqn, written("app.model.w"), hint, b"N", start, call, b"J"))
        tail = b"".join((b"\x85\x94\x85\x94R\x94ub", place, opened, file, path, start, b"K\x00", end, b"M\x00\x05ub"))
        self._table(head, tail, 8)
        self._s.put(b"u")

    def _table(self, head: bytes, tail: bytes, memoised: int) -> None:
        """Append a record for each row but the first one."""
        rows = self._rows[1:]
        table = np.empty((len(rows), len(head) + 4 + len(tail)), np.uint8)
        table[:, : len(head)] = np.frombuffer(head, np.uint8)
        table[:, len(head) : len(head) + 4] = rows.view(np.uint8).reshape(-1, 4)
        table[:, len(head) + 4 :] = np.frombuffer(tail, np.uint8)
        self._put(table.tobytes(), memoised * len(rows))


def crowd(chunks: int, *, step: int = 1) -> bytes:
    """The `.metadata` of one tensor of so many chunks of a row; a `step` of zero puts them all at the first row."""
    return _Crowd(chunks, step).stream()


def stream(tensors: list[Sharded], ranks: int) -> bytes:
    """The `.metadata` that a run of so many ranks writes."""
    return _Writer(tensors, ranks).stream()
