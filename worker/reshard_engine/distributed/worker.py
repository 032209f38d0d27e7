"""One worker of a distributed conversion: it makes an epoch ready, executes units, and stands for election.

The worker knows nothing of the bytes. The executor takes units from `units` and gives each record to `put_record`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Generator, Mapping, Sequence

from reshard_engine.distributed.epoch import COMMIT, RESUMED, RunClaim, claim_name, dead_names
from reshard_engine.distributed.epoch_member import EpochLostError
from reshard_engine.distributed.held_run import HeldRun
from reshard_engine.distributed.ready import ReadyFacts
from reshard_engine.distributed.run_member import RunMember, Wanted
from reshard_engine.distributed.runs import Run, Waves
from reshard_engine.distributed.segments import from_segment, to_segment, upload_id_in, upload_text
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.plan.model import Unit


class DistributedWorker(RunMember):
    """The protocol of one worker, as far as units, uploads and the commit are concerned."""

    def _begin(self) -> None:
        """Forget the runs of the last epoch."""
        super()._begin()
        self._of_unit: dict[int, HeldRun[Unit]] = {}
        self._known_segments: set[str] = set()
        """Segments that this worker has read. They never change."""

    # -- the epoch ------------------------------------------------------------------------------------

    def make_ready(
        self, records: Mapping[int, UnitRecord], uploads: Mapping[int, str], warnings: Sequence[str]
    ) -> None:
        """Let the other workers begin.

        Args:
            records: The records of earlier attempts that still hold, by unit.
            uploads: The ids of their uploads that still hold, by file number.
            warnings: Disagreements between the replicas of the source.
        """
        resumed, ready = self.epoch.name(f"segment-{RESUMED}-0001-1-end"), self.epoch.name("ready")
        self._written += [resumed, ready]
        if records:
            self._store.put(resumed, to_segment(records.values()))
        self._store.put(ready, ReadyFacts(uploads, tuple(warnings)).to_text())
        self._ready = True
        self._store.delete(dead_names(self._names, self.epoch.number))
        self.look()

    def ready_facts(self) -> ReadyFacts:
        """The facts that the coordinator found out."""
        return ReadyFacts.from_text(self._store.read(self.epoch.name("ready")))

    def resumed(self) -> list[UnitRecord]:
        """The records that the coordinator took from earlier attempts."""
        return self._read([name for _, name in self._view.segments.get(RESUMED, [])])

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
            EpochLostError: The epoch is not the newest one.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        planned = [run for runs in waves.runs for run in runs]
        wanted = Wanted(waves, planned, lambda names: absorb(self._read(names)), failed)
        while (held := self._next_run(wanted)) is not None:
            needed = waves.needed_by(held.run)
            if needed:
                # The slots of the last wave hold CRCs of bytes that any worker may have written.
                absorb(self._records_at(needed, waves))
                # Those that the records of their runs do not cover are executed again.
                yield from (u for u in (waves.units[0][place] for place in needed) if u.index not in done)
            self._current = held
            while (unit := held.next_unit(done)) is not None:
                self._of_unit[unit.index] = held
                yield unit
            self._end_run(held)

    def run_of(self, unit: Unit) -> Run | None:
        """The run in which this worker began a unit; None if it belongs to no run of this worker."""
        held = self._of_unit.get(unit.index)
        return held.run if held is not None else None

    @property
    def own_units(self) -> Container[int]:
        """The units that this worker has executed in this epoch."""
        return self._of_unit

    def put_record(self, record: UnitRecord) -> None:
        """Take the record of a finished unit. It is written with others, soon after the end of its run at the latest.

        Raises:
            EpochLostError: The epoch is not the newest one.
        """
        if isinstance(self._ended, EpochLostError):
            raise self._ended
        held = self._of_unit.get(record.unit)
        if held is None:
            self._put_committed(record)
            return
        length_bytes = sum(c.chunk.length_bytes for c in record.chunks)
        self._done_bytes += length_bytes
        self._done_units += 1
        if held.add(record.unit, record, length_bytes=length_bytes) and self._sync is None:
            self.flush_soon()

    def _put_committed(self, record: UnitRecord) -> None:
        """Write the record of a unit that belongs to no run: the elected worker writes the commit files."""
        if self._sync is not None:
            self._sync()
        fence = self._view.fences.get(COMMIT, 0)
        name = self.epoch.name(f"segment-{COMMIT}-{fence:04}-{record.unit}")
        self._written.append(name)
        self._store.put(name, to_segment([record]))

    def others_records(self) -> list[UnitRecord]:
        """Records of other workers of this epoch and of earlier attempts that the executor does not have yet."""
        return self._read(self.look().segments_of_units())

    def _records_at(self, places: Sequence[int], waves: Waves) -> list[UnitRecord]:
        """The records of the runs of the first wave that hold these places, as far as the executor lacks them."""
        view = self.look()
        runs = sorted(self.epoch.runs(waves.runs[0], view), key=lambda r: r.first)
        starts = [run.first for run in runs]
        holding = {runs[bisect_right(starts, place) - 1].name for place in places}
        return self._read([name for run in sorted(holding) for _, name in view.segments.get(run, [])])

    def _read(self, names: Sequence[str]) -> list[UnitRecord]:
        new = [name for name in names if name not in self._own and name not in self._known_segments]
        texts = self.texts_of(new)
        self._known_segments.update(new)
        return [record for text in texts for record in from_segment(text)]

    # -- uploads --------------------------------------------------------------------------------------

    def offer_upload(self, file: int, upload_id: str) -> str:
        """Name an upload as that of a file; returns the id of the upload that all workers use."""
        name = self.epoch.name(f"upload-{file}")
        self._written.append(name)
        created = self._store.create(name, upload_text(upload_id))
        return upload_id if created else self.upload(file) or upload_id

    def upload(self, file: int) -> str | None:
        """The id of the upload of a file, if a worker of this epoch has begun it."""
        return upload_id_in(self._store.read(self.epoch.name(f"upload-{file}")))

    def uploads(self) -> dict[int, str]:
        """The uploads that the workers of this epoch began."""
        texts = {file: self._store.read(name) for file, name in self.look().uploads.items()}
        return {file: upload_id for file, text in texts.items() if (upload_id := upload_id_in(text)) is not None}

    # -- the commit -----------------------------------------------------------------------------------

    @property
    def is_finished_by_another(self) -> bool:
        """True if another worker commits or has committed, and is alive: it removes what means nothing any more."""
        claim = self.epoch.known_claim(COMMIT, self._fences.get(COMMIT, 0))
        return claim is not None and claim.worker != self._name and self._members.is_alive(claim.worker)

    def elect(self) -> bool:
        """Stand for the commit; True if this worker is to commit, False if a worker that is alive does it.

        Raises:
            EpochLostError: The conversion is finished, or began again in another epoch.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        if self.is_committed_by_another():
            return False
        fence = self._fences.get(COMMIT, 0)
        self._written.append(self.epoch.name(claim_name(COMMIT, fence + 1)))
        if not self.epoch.take(COMMIT, fence + 1, RunClaim(self._name)):
            return False
        self._know(COMMIT, fence + 1)
        return True

    def is_committed_by_another(self) -> bool:
        """Look, and tell if another worker has the commit and is alive, or may be.

        Raises:
            EpochLostError: The conversion is finished, or began again in another epoch.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        fence = self.look().fences.get(COMMIT, 0)
        if not fence:
            return False
        self._know(COMMIT, fence)
        owner = self._owner(COMMIT, fence)
        return owner != self._name and self._members.is_alive(owner)
