"""One of several workers reads what all of them need, and leaves it to the others as a pack of texts.

The worker that claims the reading is the first reader. It shows that it is alive, reads, and publishes the pack. The
others wait for that, and read for themselves if the first reader dies, or takes too long. A pack is only a shortcut:
whoever reads it proves that it fits. So a wrong guess about who is alive costs reads, and does no harm.

A pack lies at `packs/KEY-FENCE` (its number of parts), `parts/KEY-FENCE-N`. The claims are `claim-KEY-FENCE`. The fence
counts the first readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from reshard.errors import ReshardError
from reshard_engine.distributed.coordination import Clock, CoordinationStore
from reshard_engine.distributed.epoch import RunClaim
from reshard_engine.distributed.members import BEATS, Beat, Members, Timing
from reshard_engine.distributed.repeated import repeated

MOST_WAIT_S = 120.0
"""A worker that has waited for others for so long reads for itself."""
MOST_PARTS = 64
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to a worker that needs what others need, too. With neither, it reads and publishes nothing."""

    publishes: int = 0
    """The number of this first reader, which is to publish what it reads."""
    published: int = 0
    """The number of the first reader that has published a pack."""


class FirstReader:
    """The readings of one key, seen by one worker."""

    def __init__(
        self,
        store: CoordinationStore,
        clock: Clock,
        members: Members,
        name: str,
        *,
        key: str,
        timing: Timing,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            store: The place of packs. It need not exist.
            clock: The worker's clock.
            members: The heartbeats in `store`.
            name: The worker's own name (see `new_worker`).
            key: Tells what is read, in hex digits. Workers with equal keys read the same.
            timing: The periods; after `lease_s` without a heartbeat a first reader counts as dead.
            check: Raises if the caller wants the worker to stop.
        """
        self._store = store
        self._clock = clock
        self._members = members
        self._name = name
        self._key = key
        self._timing = timing
        self._check = check
        self._beats = 0
        self._pack = re.compile(f"packs/{key}-([0-9]{{4}})")
        self._claim = re.compile(f"claim-{key}-([0-9]{{4}})")

    def take_turn(self, *, claims: bool = True) -> Turn:
        """A pack, or the turn to be the first reader, or neither. It waits while a first reader is alive.

        Args:
            claims: False for a worker that takes a pack that is there, and does not become the first reader.

        Raises:
            ReshardError: The caller wants to stop, or the store failed.
        """
        began, turns, waited = self._clock.monotonic(), 0, False
        while True:
            self._check()
            names = self._store.names()
            self._members.look(names)
            if fence := _newest(self._pack, names):
                return Turn(published=fence)
            fence = _newest(self._claim, names)
            if not fence and (waited or not claims):
                # The first reader failed, or the conversion has ended: those that waited go on at the same time.
                return Turn()
            if not fence or not self._is_alive(fence):
                if not claims:
                    return Turn()
                text = RunClaim(self._name).to_text()
                if self._store.create(f"claim-{self._key}-{fence + 1:04}", text):
                    return Turn(publishes=fence + 1)
            elif self._clock.monotonic() - began > MOST_WAIT_S:
                return Turn()
            else:
                self._clock.sleep(self._timing.pause_s(turns))
                turns, waited = turns + 1, True

    def _is_alive(self, fence: int) -> bool:
        claim = RunClaim.from_text(self._store.read(f"claim-{self._key}-{fence:04}"))
        return claim is not None and self._members.is_alive(claim.worker)

    def parts(self, turn: Turn) -> Iterator[bytes]:
        """The parts of a published pack. Those that are missing are left out.

        Raises:
            ReshardError: The store failed.
        """
        count = _count_in(self._store.read(f"packs/{self._key}-{turn.published:04}"))
        names = [self._part(turn.published, number) for number in range(count)]
        with ThreadPoolExecutor(_THREADS) as pool:
            for first in range(0, count, _THREADS):
                # Only so many are in memory that have not been looked at yet.
                texts = pool.map(self._store.read, names[first : first + _THREADS])
                yield from (text for text in texts if text is not None)

    def _part(self, fence: int, number: int) -> str:
        return f"parts/{self._key}-{fence:04}-{number}"

    def publish(self, turn: Turn, parts: Sequence[bytes]) -> None:
        """Leave a pack to the others. Without parts, they learn that there will be none.

        Raises:
            ReshardError: The store failed.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._store.put, (self._part(turn.publishes, n) for n in range(len(parts))), parts))
        text = json.dumps({"parts": len(parts), "worker": self._name}).encode()
        self._store.create(f"packs/{self._key}-{turn.publishes:04}", text)

    @contextmanager
    def alive(self, turn: Turn, gave_up: Callable[[], bool]) -> Generator[None]:
        """Show the others that this first reader is alive, until the block ends.

        Args:
            turn: The reader's turn.
            gave_up: True if there will be no pack: the others learn it at once.
        """

        def beat() -> bool:
            with suppress(ReshardError):
                self._beat()
                if gave_up():
                    self.publish(turn, ())
                    return False
            return True

        try:
            with repeated(beat, every_s=self._timing.beat_s, name="reshard-first-reader"):
                yield
        finally:
            with suppress(ReshardError):
                self._store.delete([f"{BEATS}{self._name}"])

    def _beat(self) -> None:
        self._beats += 1
        self._store.put(f"{BEATS}{self._name}", Beat("", self._beats, 0, 0, "").to_text())


def _newest(pattern: re.Pattern[str], names: Mapping[str, str]) -> int:
    return max((int(found[1]) for name in names if (found := pattern.fullmatch(name))), default=0)


def _count_in(text: bytes | None) -> int:
    """The number of parts of a pack; 0 if it has none."""
    try:
        count = json.loads(text or b"")["parts"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0
    return count if isinstance(count, int) and 0 <= count <= MOST_PARTS else 0
