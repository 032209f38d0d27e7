"""The names of one epoch: claims, splits, segments and uploads, and how they are read from a listing.

An epoch is one attempt at a conversion. Its coordinator makes room in the target and checks what earlier attempts
wrote; then it is ready, and workers claim its runs. A new epoch begins when all workers of the last one are dead. A
worker that sees a newer epoch stops. So whatever a worker of a dead epoch still writes is read by nobody.

A claim on a run carries a fence: the number of owners that the run has had in this epoch. A takeover creates the claim
with the next fence, and only one worker can create it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from reshard_engine.distributed.runs import Run
from reshard_engine.storage.texts import TextStore

COMMIT = "commit"
"""The name under which the commit is claimed, as if it were a run."""
RESUMED = "resumed"
"""The name of the segments with the records that the coordinator took from earlier attempts."""
AGREEING = "agreeing"
"""The name of the text with which a coordinator that is not ready lets others compare tensors that must agree."""
SEALED = "sealed"
"""The name of the text with which the elected worker opens the checks before the commit files are written."""
PUBLISHED = "published"
"""The name of the text with which the elected worker opens the checks of the commit files."""
FIRST_CHECKS = 2
"""Waves from this number on hold checks and no units."""

_EPOCH = re.compile("epoch-([0-9]{6})")
_INSIDE = re.compile(
    "([0-9]{6})/(?:(?P<flag>ready|failed|agreeing|sealed|published)"
    "|idle-(?P<idle>[0-9a-f-]+)"
    "|upload-(?P<upload>[0-9]+)"
    "|claim-(?P<claim>[0-9.]+|commit)-(?P<claim_fence>[0-9]+)"
    "|split-(?P<split>[0-9.]+)-(?P<split_fence>[0-9]+)-(?P<at>[0-9]+)"
    "|segment-(?P<segment>[0-9.]+|resumed|commit)-(?P<segment_fence>[0-9]+)-[0-9]+(?P<last>-end)?)"
)


def epoch_name(number: int) -> str:
    """The name of the text that begins an epoch."""
    return f"epoch-{number:06}"


def claim_name(run: str, fence: int) -> str:
    """The name of a claim within its epoch."""
    return f"claim-{run}-{fence:04}"


def is_of_checks(run: str) -> bool:
    """True if the run with this name holds checks."""
    wave = run.partition(".")[0]
    return wave.isdecimal() and int(wave) >= FIRST_CHECKS


def newest_epoch(names: Iterable[str]) -> int:
    """The number of the newest epoch in a listing; 0 if there is none."""
    return max((int(found[1]) for name in names if (found := _EPOCH.fullmatch(name))), default=0)


def last_number(names: Iterable[str]) -> int:
    """The highest number of an epoch of which a text is left; 0 if there is none.

    The text that begins an epoch is removed first, so a removal that was cut short leaves others.
    """
    found = (_EPOCH.fullmatch(name) or _INSIDE.fullmatch(name) for name in names)
    return max((int(match[1]) for match in found if match), default=0)


@dataclass(frozen=True, slots=True)
class RunClaim:
    """The text of a claim on a run, or on the commit."""

    worker: str
    splits: tuple[int, ...] = ()
    """The units at which owners with lower fences split the run, as this owner found them. Later splits by them do not
    count: a paused owner may go on after its run was taken over."""

    def to_text(self) -> bytes:
        """The claim as JSON text."""
        return json.dumps({"worker": self.worker, "splits": self.splits}).encode()

    @staticmethod
    def from_text(text: bytes | None) -> RunClaim | None:
        """The claim in a text; None if there is none."""
        try:
            facts = json.loads(text or b"")
            return RunClaim(str(facts["worker"]), tuple(map(int, facts["splits"])))
        except (ValueError, TypeError, KeyError):
            return None


@dataclass
class EpochView:
    """The names of one epoch, as one listing shows them."""

    ready: bool = False
    failed: bool = False
    opened: set[str] = field(default_factory=set[str])
    """The checks that are open: `AGREEING`, `SEALED`, `PUBLISHED`."""
    idle: set[str] = field(default_factory=set[str])
    """Workers that wait for a run."""
    uploads: dict[int, str] = field(default_factory=dict[int, str])
    """Names of the texts that hold upload ids, by file number."""
    fences: dict[str, int] = field(default_factory=dict[str, int])
    """The highest fence of each claimed run."""
    splits: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    """(fence, first unit of the part that was split off), by run."""
    segments: dict[str, list[tuple[int, str]]] = field(default_factory=dict[str, list[tuple[int, str]]])
    """(fence, name), by run."""
    ended: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(run, fence) of the runs whose owner wrote its last segment."""

    def segments_of_units(self) -> list[str]:
        """The names of all segments but those of checks."""
        return [name for run, of in self.segments.items() if not is_of_checks(run) for _, name in of]

    def is_done(self, run: str) -> bool:
        """True if the owner with the highest fence has written the records of the whole run."""
        return (run, self.fences.get(run, 0)) in self.ended


class Epoch:
    """One epoch of a conversion, seen by one worker."""

    def __init__(self, store: TextStore, number: int) -> None:
        """Give access to the epoch with this number."""
        self.number = number
        self._store = store
        self._claims: dict[tuple[str, int], RunClaim] = {}

    def name(self, rest: str) -> str:
        """The whole name of a text of the epoch."""
        return f"{self.number:06}/{rest}"

    def view(self, names: Iterable[str]) -> EpochView:
        """The epoch in a listing. Names that mean nothing are ignored."""
        view = EpochView()
        for name in names:
            found = _INSIDE.fullmatch(name)
            if found is None or int(found[1]) != self.number:
                continue
            if found["flag"]:
                view.ready |= found["flag"] == "ready"
                view.failed |= found["flag"] == "failed"
                view.opened |= {found["flag"]} - {"ready", "failed"}
            elif found["idle"]:
                view.idle.add(found["idle"])
            elif found["upload"]:
                view.uploads[int(found["upload"])] = name
            elif found["claim"]:
                run, fence = found["claim"], int(found["claim_fence"])
                view.fences[run] = max(fence, view.fences.get(run, 0))
            elif found["split"]:
                view.splits.setdefault(found["split"], []).append((int(found["split_fence"]), int(found["at"])))
            else:
                run, fence = found["segment"], int(found["segment_fence"])
                view.segments.setdefault(run, []).append((fence, name))
                if found["last"]:
                    view.ended.add((run, fence))
        return view

    def claim_on(self, run: str, fence: int) -> RunClaim | None:
        """The claim on a run with this fence. It never changes, so it is read once."""
        if fence and (run, fence) not in self._claims:
            claim = RunClaim.from_text(self._store.read(self.name(claim_name(run, fence))))
            if claim is None:
                return None
            self._claims[run, fence] = claim
        return self._claims.get((run, fence))

    def read_claims(self, claims: Iterable[tuple[str, int]], *, threads: int) -> None:
        """Read claims, given as (run, fence), that are not known yet, several at once."""
        wanted = [claim for claim in claims if claim not in self._claims]
        if threads == 1 or len(wanted) < 2:
            for run, fence in wanted:
                self.claim_on(run, fence)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self.claim_on, *zip(*wanted, strict=True)))

    def known_claim(self, run: str, fence: int) -> RunClaim | None:
        """The claim on a run with this fence, if this worker has read or written it."""
        return self._claims.get((run, fence))

    def take(self, run: str, fence: int, claim: RunClaim) -> bool:
        """Claim a run with a fence; False if another worker was faster."""
        taken = self._store.create(self.name(claim_name(run, fence)), claim.to_text())
        if taken:
            self._claims[run, fence] = claim
        return taken

    def splits_of(self, run: str, view: EpochView) -> tuple[int, ...]:
        """The units at which a run is split: as its owner found it, and by this owner."""
        fence = view.fences.get(run, 0)
        # The first owner finds no splits, so its claim need not be read. One that has not written its claim has split
        # nothing, so the run is as the owner before it left it.
        while (claim := self.claim_on(run, fence) if fence > 1 else RunClaim("")) is None:
            fence -= 1
        return tuple(sorted({*claim.splits, *(at for of, at in view.splits.get(run, ()) if of == fence)}))

    def runs(self, planned: Sequence[Run], view: EpochView) -> list[Run]:
        """The runs as they are now: the planned ones, and the parts that were split off."""
        found: list[Run] = []
        pending = list(reversed(planned))
        while pending:
            run = pending.pop()
            inside = [at for at in self.splits_of(run.name, view) if run.first < at < run.end]
            bounds = [run.first, *inside, run.end]
            found.append(Run(run.wave, run.first, bounds[1]))
            pending.extend(Run(run.wave, low, high) for low, high in pairwise(bounds[1:]))
        return found


def dead_names(names: Mapping[str, str], number: int) -> list[str]:
    """The names of all epochs before this one. The texts that begin the epochs come last."""
    inside = [name for name in names if (found := _INSIDE.fullmatch(name)) and int(found[1]) < number]
    return inside + [name for name in names if (found := _EPOCH.fullmatch(name)) and int(found[1]) < number]
