"""One worker of a distributed conversion: it makes a session ready, executes units, and stands for election.

The worker knows nothing of the bytes. The executor takes units from `units` and gives each record to `put_record`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Generator, Mapping, Sequence

from reshard_engine.distributed.claimed_runs import HeldRun, RunTaker, Wanted
from reshard_engine.distributed.members import Clock, Members, Timing
from reshard_engine.distributed.runs import Run, Waves
from reshard_engine.distributed.segments import ReadyFacts, to_segment
from reshard_engine.distributed.session import (
    COMMIT,
    RESUMED,
    RunClaim,
    SessionLostError,
    SessionMember,
    claim_name,
    dead_names,
)
from reshard_engine.execute.journal import NamedUpload, UnitRecord, records_in
from reshard_engine.plan.model import Unit
from reshard_engine.storage.texts import TextStore, agreed_text


class DistributedWorker:
    """The protocol of one worker, as far as units, uploads and the commit are concerned.

    Attributes:
        member: The worker as a member of a session.
        runs: What it claims there.
    """

    def __init__(
        self,
        store: TextStore,
        clock: Clock,
        members: Members,
        name: str,
        *,
        timing: Timing,
        position: tuple[int, int] = (0, 1),
        sync: Callable[[], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a worker; nothing is read or written yet.

        Args:
            store: Where the workers of this plan meet.
            clock: The worker's clock.
            members: The heartbeats that this worker watches.
            name: The worker's own name (see `process_name`).
            timing: The periods of the protocol.
            position: Its number and the number of workers, so that workers begin at different runs.
            sync: Makes the data of finished units durable. It is called before their records are written.
            check: Raises if the caller wants the worker to stop.
        """
        self._forget()
        self.member = SessionMember(store, clock, members, name, timing=timing, check=check)
        self.runs = RunTaker(self.member, position=position, sync=sync, on_forget=self._forget)

    @property
    def is_over(self) -> bool:
        """See `SessionMember`."""
        return self.member.is_over

    def _forget(self) -> None:
        """Forget the runs of the last session."""
        self._of_unit: dict[int, HeldRun[Unit]] = {}
        self._known_segments: set[str] = set()
        """Segments that this worker has read. They never change."""

    # -- the session ------------------------------------------------------------------------------------

    def make_ready(
        self, records: Mapping[int, UnitRecord], uploads: Mapping[int, str], warnings: Sequence[str]
    ) -> None:
        """Let the other workers begin.

        Args:
            records: The records of earlier attempts that still hold, by unit.
            uploads: The ids of their uploads that still hold, by file number.
            warnings: Disagreements between the replicas of the source.
        """
        resumed, ready = self.member.session.name(f"segment-{RESUMED}-0001-1-end"), self.member.session.name("ready")
        self.member.written += [resumed, ready]
        if records:
            self.member.store.put(resumed, to_segment(records.values()))
        self.member.store.put(ready, ReadyFacts(uploads, tuple(warnings)).to_text())
        self.member.made_ready = True
        self.member.store.delete(dead_names(self.member.names, self.member.session.number))
        self.member.look()

    def ready_facts(self) -> ReadyFacts:
        """The facts that the coordinator found out."""
        return ReadyFacts.from_text(self.member.store.read(self.member.session.name("ready"))) or ReadyFacts()

    def resumed(self) -> list[UnitRecord]:
        """The records that the coordinator took from earlier attempts."""
        return self._read([name for _, name in self.member.view.segments.get(RESUMED, [])])

    # -- units ----------------------------------------------------------------------------------------

    def units(
        self,
        waves: Waves,
        done: Container[int],
        absorb: Callable[[Sequence[UnitRecord]], None],
        failed: Callable[[], bool] = lambda: False,
    ) -> Generator[Unit]:
        """The units that this worker executes, one run after another, until all workers have finished both waves.

        Args:
            waves: The runs of the plan.
            done: Indices of the units that have records.
            absorb: Takes the records of units that others finished.
            failed: True if a unit of this worker failed, after which no more are made.

        Raises:
            SessionLostError: The session is not the newest one.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        planned = [run for runs in waves.runs for run in runs]
        wanted = Wanted(waves, planned, lambda names: absorb(self._read(names)), failed)
        while (held := self.runs.next_run(wanted)) is not None:
            needed = waves.needed_by(held.run)
            if needed:
                # The slots of the last wave hold CRCs of bytes that any worker may have written.
                absorb(self._records_at(needed, waves))
                # Those that the records of their runs do not cover are executed again.
                yield from (u for u in (waves.units[0][place] for place in needed) if u.index not in done)
            for unit in self.runs.items(held, done):
                self._of_unit[unit.index] = held
                yield unit

    def run_of(self, unit: Unit) -> Run | None:
        """The run in which this worker began a unit; None if it belongs to no run of this worker."""
        held = self._of_unit.get(unit.index)
        return held.run if held is not None else None

    @property
    def own_units(self) -> Container[int]:
        """The units that this worker has executed in this session."""
        return self._of_unit

    def put_record(self, record: UnitRecord) -> None:
        """Take the record of a finished unit. It is written with others, soon after the end of its run at the latest.

        Raises:
            SessionLostError: The session is not the newest one.
        """
        if isinstance(self.member.ended, SessionLostError):
            raise self.member.ended
        held = self._of_unit.get(record.unit)
        if held is None:
            self._put_committed(record)
            return
        length_bytes = sum(c.chunk.length_bytes for c in record.chunks)
        self.runs.done_bytes += length_bytes
        self.runs.done_units += 1
        if held.add(record.unit, record, length_bytes=length_bytes) and self.runs.sync is None:
            self.runs.flush_soon()

    def _put_committed(self, record: UnitRecord) -> None:
        """Write the record of a unit that belongs to no run: the elected worker writes the commit files."""
        if self.runs.sync is not None:
            self.runs.sync()
        fence = self.member.view.fences.get(COMMIT, 0)
        name = self.member.session.name(f"segment-{COMMIT}-{fence:04}-{record.unit}")
        self.member.written.append(name)
        self.member.store.put(name, to_segment([record]))

    def others_records(self) -> list[UnitRecord]:
        """Records of other workers of this session and of earlier attempts that the executor does not have yet."""
        return self._read(self.member.look().segments_of_units())

    def _records_at(self, places: Sequence[int], waves: Waves) -> list[UnitRecord]:
        """The records of the runs of the first wave that hold these places, as far as the executor lacks them."""
        view = self.member.look()
        runs = sorted(self.member.session.runs(waves.runs[0], view), key=lambda r: r.first)
        starts = [run.first for run in runs]
        holding = {runs[bisect_right(starts, place) - 1].name for place in places}
        return self._read([name for run in sorted(holding) for _, name in view.segments.get(run, [])])

    def _read(self, names: Sequence[str]) -> list[UnitRecord]:
        new = [name for name in names if name not in self.runs.own and name not in self._known_segments]
        texts = self.runs.texts_of(new)
        self._known_segments.update(new)
        return [record for text in texts for record in records_in(text)]

    # -- uploads --------------------------------------------------------------------------------------

    def offer_upload(self, file: int, upload_id: str) -> str:
        """Name an upload as that of a file; returns the id of the upload that all workers use."""
        name = self.member.session.name(f"upload-{file}")
        self.member.written.append(name)
        agreed = NamedUpload.from_text(agreed_text(self.member.store, name, NamedUpload(upload_id).to_text()))
        return upload_id if agreed is None else agreed.id

    def upload(self, file: int) -> str | None:
        """The id of the upload of a file, if a worker of this session has begun it."""
        return self.member.session.upload(self.member.session.name(f"upload-{file}"))

    def uploads(self) -> dict[int, str]:
        """The uploads that the workers of this session began."""
        return self.member.session.uploads(self.member.look())

    # -- the commit -----------------------------------------------------------------------------------

    @property
    def is_finished_by_another(self) -> bool:
        """True if another worker commits or has committed, and is alive: it removes what means nothing any more."""
        claim = self.member.session.known_claim(COMMIT, self.member.fences.get(COMMIT, 0))
        return claim is not None and claim.worker != self.member.name and self.member.members.is_alive(claim.worker)

    def elect(self) -> bool:
        """Stand for the commit; True if this worker is to commit, False if a worker that is alive does it.

        Raises:
            SessionLostError: The conversion is finished, or began again in another session.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        if self.is_committed_by_another():
            return False
        fence = self.member.fences.get(COMMIT, 0)
        self.member.written.append(self.member.session.name(claim_name(COMMIT, fence + 1)))
        if not self.member.session.take(COMMIT, fence + 1, RunClaim(self.member.name)):
            return False
        self.member.know(COMMIT, fence + 1)
        return True

    def is_committed_by_another(self) -> bool:
        """Look, and tell if another worker has the commit and is alive, or may be.

        Raises:
            SessionLostError: The conversion is finished, or began again in another session.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        fence = self.member.look().fences.get(COMMIT, 0)
        if not fence:
            return False
        self.member.know(COMMIT, fence)
        owner = self.member.owner_of(COMMIT, fence)
        return owner != self.member.name and self.member.members.is_alive(owner)
