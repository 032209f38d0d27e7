"""Interprets equal pickles of one checkpoint only once: files of many ranks hold the same pickle, byte for byte."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from reshard_engine.pickles.limits import PickleLimits
from reshard_engine.pickles.nodes import Node
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import parse_pickle

_KEPT = 16
"""Number of pickles that are kept. torch writes the device into pickles, so hosts with 8 devices have 8 different
ones of each of two kinds."""


class SharedPickles:
    """The values of the latest pickles of one read. Nodes are never changed after parsing, so files may share them.

    All pickles use one ledger: the names of an equal pickle are in it already, and refused pickles are not kept.
    """

    def __init__(self, ledger: OpaqueLedger) -> None:
        """Start with no pickles."""
        self.ledger = ledger
        self._values: OrderedDict[bytes, Node] = OrderedDict()
        self._lock = threading.Lock()

    def parse(self, data: bytes, limits: PickleLimits) -> Node:
        """The value of a pickle, or of an equal pickle before it.

        One thread interprets at a time. Threads would wait for Python's own lock anyway, and equal pickles of
        files that are opened in parallel must not be interpreted twice.

        Raises:
            SourceError: As `parse_pickle`.
        """
        key = hashlib.sha256(data).digest()
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            else:
                self._values[key], _ = parse_pickle(data, self.ledger, limits=limits)
                if len(self._values) > _KEPT:
                    self._values.popitem(last=False)
            return self._values[key]
