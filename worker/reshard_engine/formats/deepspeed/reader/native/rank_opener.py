"""Opens the files of one checkpoint's ranks, and parses equal pickles once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from reshard_engine.containers.shared_pickles import SharedPickles
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates
from reshard_engine.pickles.nodes import Node
from reshard_engine.pickles.policy import OpaqueLedger

States = TypeVar("States", ModelStates, RankStates)
_KEPT = 16


class RankOpener:
    """Opens files during one read of one checkpoint."""

    def __init__(self, ledger: OpaqueLedger) -> None:
        """Start without open files."""
        self._pickles = SharedPickles(ledger)
        self._parsed: OrderedDict[tuple[int, str], tuple[Node, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, file: SourceFile) -> TorchFile:
        """The file's metadata.

        Raises:
            SourceError: As `open_torch_file`.
        """
        return open_torch_file(file, self._pickles.ledger, pickles=self._pickles)

    def states(self, file: SourceFile, parse: Callable[[TorchFile], States]) -> States:
        """The result of `parse` for the file. `parse` reads only the pickle, so equal pickles share the result.

        Raises:
            SourceError: As `open_torch_file` and `parse`.
        """
        opened = self.open(file)
        key = (id(opened.root), parse.__qualname__)
        with self._lock:
            if key in self._parsed:
                known: States = self._parsed[key][1]
                self._parsed.move_to_end(key)
                return replace(known, torch_file=opened)
            states = parse(opened)
            # The key is the root's address. The root is kept too, so that no other object gets this address.
            self._parsed[key] = (opened.root, states)
            if len(self._parsed) > _KEPT:
                self._parsed.popitem(last=False)
            return states
