"""The bounded state of a run of the pickle interpreter: position, stack, memo and costs."""

from __future__ import annotations

from typing import Any

from reshard.errors import SourceError
from reshard_engine.pickles.limits import PickleLimits
from reshard_engine.pickles.nodes import Global, Node, PDict, PList, PObject, PSet, PTuple
from reshard_engine.pickles.policy import OpaqueLedger

MARK = object()
COST_BYTES = 64
"""Bytes that every value counts, in addition to its content."""
CONTAINERS = frozenset((PList, PTuple, PDict, PSet, PObject))


def bad(code: str, message: str) -> SourceError:
    """The error `pickle.<code>`."""
    return SourceError(f"pickle.{code}", message)


class PickleMachine:
    """The state of one run over one stream: reading position, stack, memo, and the costs so far."""

    __slots__ = (
        "_extra_work", "at", "boundary", "cost_bytes", "cost_limit", "data", "end", "in_frame", "ledger", "limits",
        "marks", "memo", "names_getattr", "stack", "storages", "unlisted",
    )  # fmt: skip

    def __init__(self, data: bytes | memoryview, ledger: OpaqueLedger, limits: PickleLimits) -> None:
        if len(data) > limits.stream_bytes:
            raise bad("too_large", f"the pickle has {len(data)} bytes, the limit is {limits.stream_bytes}")
        self.data = bytes(data)
        self.end = len(data)
        self.at = 0
        self.boundary = self.end
        """The end of the frame, or of the stream if there is no frame. An opcode beyond it needs a check."""
        self.in_frame = False
        self.ledger = ledger
        self.limits = limits
        self.stack: list[Any] = []
        self.marks: list[int] = []
        """The positions of the marks in the stack. No opcode takes values from below an open mark."""
        self.memo: dict[int, Any] = {}
        self.cost_bytes = 0
        self.cost_limit = limits.node_bytes
        self.unlisted: dict[str, Global] = {}
        self.names_getattr = False
        self.storages: dict[str, tuple[str, int]] = {}
        self._extra_work = 0

    def take(self, count: int) -> bytes:
        """The next bytes, exactly so many."""
        at = self.at
        if count > self.end - at:
            raise bad("truncated", f"{count} bytes wanted at byte {at}, {self.end - at} left")
        self.at = at + count
        return self.data[at : at + count]

    def text(self, count: int) -> bytes:
        """The bytes of a text whose length the stream states."""
        if count > self.end - self.at:
            raise bad("truncated", f"a text of {count} bytes at byte {self.at}, {self.end - self.at} left")
        if count > self.limits.text_bytes:
            raise bad("too_large", f"a text of {count} bytes, the limit is {self.limits.text_bytes}")
        self.charge(count)
        at = self.at
        self.at = at + count
        return self.data[at : at + count]

    def line(self) -> bytes:
        """The bytes up to the next newline."""
        stop = self.data.find(b"\n", self.at, self.at + self.limits.line_bytes)
        if stop < 0:
            raise bad("truncated", f"a line at byte {self.at} does not end within {self.limits.line_bytes} bytes")
        line = self.data[self.at : stop]
        self.at = stop + 1
        return line

    def charge(self, count: int) -> None:
        """Count the memory that a value takes."""
        self.cost_bytes += COST_BYTES + count
        if self.cost_bytes > self.cost_limit:
            raise self._overspent()

    def _overspent(self) -> SourceError:
        return bad("too_much_memory", f"the values take more than {self.cost_limit} bytes")

    def work(self, count: int) -> None:
        """Count additional steps of an opcode, such as a check of every argument."""
        self._extra_work += count
        if self._extra_work > self.limits.opcodes:
            raise bad("too_much_work", f"more than {self.limits.opcodes} steps inside opcodes")

    def pop(self) -> Node:
        """The value on top, removed."""
        if not self.stack:
            raise bad("malformed", f"stack underflow at byte {self.at}")
        value = self.stack.pop()
        if value is MARK:
            raise bad("malformed", f"a mark where a value was wanted at byte {self.at}")
        return value

    def top(self) -> Node:
        """The value on top."""
        if not self.stack or self.stack[-1] is MARK:
            raise bad("malformed", f"no value on the stack at byte {self.at}")
        return self.stack[-1]

    def since_mark(self) -> list[Node]:
        """The values above the last mark, removed with it."""
        if not self.marks:
            raise bad("malformed", f"no mark on the stack at byte {self.at}")
        mark = self.marks.pop()
        items = self.stack[mark + 1 :]
        del self.stack[mark:]
        return items

    def push(self, value: Node, cost: int = 0) -> None:
        """Put a value on the stack."""
        self.cost_bytes += COST_BYTES + cost
        if self.cost_bytes > self.cost_limit:
            raise self._overspent()
        self.stack.append(value)

    def depth(self, children: list[Node] | tuple[Node, ...]) -> int:
        """The depth of a container with these children."""
        depth = 1
        for child in children:
            if type(child) in CONTAINERS and child.depth >= depth:
                depth = child.depth + 1
        if depth > self.limits.value_depth:
            raise bad("too_deep", f"values nested deeper than {self.limits.value_depth}")
        return depth

    def deepen(self, parent: Any, children: list[Node]) -> None:
        """Update the depth of a container that got more children."""
        depth = self.depth(children)
        parent.depth = max(parent.depth, depth)
