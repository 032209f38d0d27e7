"""Pickles of one checkpoint, each interpreted once: files of many ranks hold the same skeleton, byte for byte."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from reshard_engine.pickles.limits import PickleLimits
from reshard_engine.pickles.nodes import Node
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import parse_pickle

_KEPT = 16
"""torch writes the device into pickles: on hosts with 8 devices, 8 different ones come by in turn, of two kinds."""


class SharedPickles:
    """The values of the latest pickles of one read. Nobody changes a node once it is parsed, so files may share it.

    Bound to one ledger: what an equal pickle names is in the ledger already, and what the policy refuses is not kept.
    """

    def __init__(self, ledger: OpaqueLedger) -> None:
        """Nothing is known yet."""
        self.ledger = ledger
        self._values: OrderedDict[bytes, Node] = OrderedDict()
        self._lock = threading.Lock()

    def parse(self, data: bytes, limits: PickleLimits) -> Node:
        """The value of a pickle, which may be that of an equal one before it.

        One thread interprets at a time: it is Python's own lock that they would wait for otherwise, and equal
        pickles of files that are opened at once must not be interpreted at once.

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
