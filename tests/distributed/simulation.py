"""Many workers over a store in memory: the real protocol, simulated bytes, a virtual clock, and faults by a seed.

Source of the store's rules: Amazon S3 API reference (conditional puts; a part that is sent again replaces the part; an
aborted or completed upload takes no parts). ETags differ at each sending, as under SSE-KMS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from distributed.scheduler import Scheduler
from reshard.errors import ReshardError, SourceError, StorageError
from reshard.models.jobs import WorkShare
from reshard_engine.distributed.checks import (
    AGREEMENTS,
    FILES,
    GATHERING,
    SOURCE,
    CheckItem,
    Checks,
    CheckWaves,
    CheckWork,
    check_records,
    cut_checks,
)
from reshard_engine.distributed.members import Members, Timing
from reshard_engine.distributed.runs import CrcParts, Run, Waves
from reshard_engine.distributed.segments import FormerWork
from reshard_engine.distributed.session import AGREEING, SEALED, Session, SessionLostError, newest_session
from reshard_engine.distributed.worker import DistributedWorker
from reshard_engine.execute.journal import ChunkRecord, NamedUpload, UnitRecord, records_in
from reshard_engine.plan.model import Chunk, RecordPart, Unit

_T = TypeVar("_T")

TIMING = Timing(beat_s=2.0, lease_s=10.0, poll_s=0.2, slow_poll_s=1.0, flush_s=1.5)


class _PartsOfFiles(CrcParts):
    """The last unit of a file in the last wave needs the bytes of all others of the file."""

    def __init__(self, units: Sequence[Unit], last: Sequence[Unit]) -> None:
        super().__init__((), ())
        self._every = units
        self._late = {unit.index for unit in last}

    def parts_of(self, place: int) -> Iterator[tuple[RecordPart, int]]:
        if self._every[place].index not in self._late:
            return
        file = self._every[place].chunks[0].file
        for other, unit in enumerate(self._every[:place]):
            if unit.chunks[0].file == file:
                yield RecordPart(file, 0, unit.chunks[0].offset, unit.chunks[0].length_bytes), other


@dataclass
class _Upload:
    file: int
    by: str
    parts: dict[int, str] = field(default_factory=dict[int, str])
    """ETags by unit."""
    state: str = "open"


class Texts:
    """The coordination store of one worker: every call is a step of the scheduler, and may fail."""

    def __init__(self, world: World, process: str) -> None:
        self._world = world
        self._process = process

    def create(self, name: str, text: bytes) -> bool:
        def act() -> bool:
            if name in self._world.texts:
                return self._world.texts[name][0] == text
            self._world.write(name, text)
            return True

        return self._world.call(self._process, act)

    def put(self, name: str, text: bytes) -> None:
        self._world.call(self._process, lambda: self._world.write(name, text))

    def read(self, name: str) -> bytes | None:
        return self._world.call(self._process, lambda: self._world.texts.get(name, (None, ""))[0])

    def names(self) -> Mapping[str, str]:
        return self._world.call(self._process, lambda: {n: v for n, (_, v) in self._world.texts.items()})

    def delete(self, names: Sequence[str]) -> None:
        def act() -> None:
            for name in names:
                self._world.texts.pop(name, None)

        self._world.call(self._process, act)


class _ClockOf:
    """A worker's own clock, which shows another time than the others'."""

    def __init__(self, world: World, skew_s: float) -> None:
        self._world = world
        self._skew_s = skew_s

    def monotonic(self) -> float:
        return self._world.scheduler.now + self._skew_s

    def sleep(self, seconds: float) -> None:
        self._world.scheduler.sleep(seconds)


class World:
    """One conversion: its plan, its store, and its workers."""

    def __init__(self, seed: int, *, errors: float = 0.01) -> None:
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        self._errors = errors
        self.texts: dict[str, tuple[bytes, str]] = {}
        self._versions = 0
        self._checked: tuple[int, int, list[str]] = (0, 0, [])
        self.uploads: dict[str, _Upload] = {}
        self.target: dict[int, dict[int, str]] | None = None
        self.claimed = False
        """True while the target is claimed: from the first coordinator on until the conversion is finished."""
        self.committed_by: list[str] = []
        self.sent: dict[int, list[str]] = {}
        """The workers that sent each unit."""
        self.counters: list[WorkShare] = []
        self.acknowledged: set[str] = set()
        self.results: dict[str, str] = {}
        self.waves, self.file_of = self._plan()
        self.units = [u for wave in self.waves.units for u in wave]
        self.checks = self._plan_checks()
        self.disagrees = any(self.checks[AGREEING].runs) and self.random.random() < 0.15
        """True if tensors of the source that must agree do not."""
        self.made: dict[tuple[int, int, int], list[str]] = {}
        """The workers that made each check: by session, wave and number."""
        self.judged: dict[int, set[tuple[int, int]]] = {}
        """The checks of which the worker that commits has results, by session."""

    def _plan(self) -> tuple[Waves, dict[int, int]]:
        """A few files of a few units; the last unit of some files is left for the last wave."""
        first: list[Unit] = []
        last: list[Unit] = []
        file_of: dict[int, int] = {}
        for file in range(self.random.randint(1, 4)):
            count = self.random.randint(1, 8)
            for number in range(count):
                unit = Unit(len(file_of), (Chunk(file, number * 8, 8),), commit=False)
                file_of[unit.index] = file
                (last if number and number == count - 1 and self.random.random() < 0.5 else first).append(unit)
        size = self.random.randint(1, 4)
        runs = [
            tuple(Run(wave, at, min(at + size, len(units))) for at in range(0, len(units), size))
            for wave, units in enumerate((first, last))
        ]
        cuts = [tuple(self.random.random() < 0.8 for _ in units) for units in (first, last)]
        parts = _PartsOfFiles(sorted(first + last, key=lambda u: u.index), last)
        return Waves((tuple(first), tuple(last)), (runs[0], runs[1]), (cuts[0], cuts[1]), parts), file_of

    def _plan_checks(self) -> dict[str, CheckWaves]:
        """The checks that are opened under each name: some conversions have none."""
        agreements = self.random.choice([0, 0, self.random.randint(1, 5)])
        planned: dict[str, dict[int, list[tuple[int, int]]]] = {AGREEING: {}, SEALED: {}}
        if agreements:
            planned[AGREEING] = {AGREEMENTS: [(n, 1) for n in range(agreements)]}
        if self.random.random() < 0.4:
            planned[SEALED] = {
                SOURCE: [(n, 10 + n) for n in range(self.random.randint(1, 3))],
                FILES: [(n, 5) for n in sorted(set(self.file_of.values()))],
                GATHERING: [(u.index, 1) for u in self.units[: self.random.randint(1, 6)]],
            }
        size = self.random.randint(1, 3)
        found: dict[str, CheckWaves] = {}
        for name, costs in planned.items():
            waves = cut_checks(costs or {AGREEMENTS: []})
            runs = tuple(
                tuple(Run(wave, at, min(at + size, len(items))) for at in range(0, len(items), size))
                for wave, items in enumerate(waves.units)
            )
            found[name] = replace(waves, runs=runs)
        return found

    # -- the store --------------------------------------------------------------------------------------

    def call(self, process: str, act: Callable[[], _T]) -> _T:
        """Perform one operation of a process, before or after which it may fail."""
        self.scheduler.step()
        drawn = self.random.random()
        if drawn < self._errors / 2:
            raise StorageError("storage.unavailable", "injected before")
        done = act()
        if drawn < self._errors:
            raise StorageError("storage.unavailable", "injected after")
        return done

    def write(self, name: str, text: bytes) -> None:
        """Write a text. A record may be written only after its part was acknowledged."""
        if "/segment-" in name:
            for record in records_in(text):
                assert record.chunks[0].etag in self.acknowledged, (
                    f"the record of unit {record.unit} was written before its data"
                )
            for check in check_records(text):
                made = (int(name.partition("/")[0]), check.wave, check.index)
                assert self.made.get(made), f"check {made} was recorded before it was made"
        self._versions += 1
        self.texts[name] = (text, str(self._versions))

    # -- what must hold after each step -----------------------------------------------------------------

    def check(self) -> None:
        """The invariants of the protocol, if anything changed since they were checked last."""
        now = (self._versions, len(self.texts), [u.state for u in self.uploads.values()])
        if now == self._checked:
            return
        self._checked = now
        names = list(self.texts)
        newest = newest_session(names)
        if not newest:
            return
        session = Session(_Quiet(self), newest)
        view = session.view(names)
        for waves in (self.waves, *self.checks.values()):
            for wave, planned in enumerate(waves.runs):
                if not planned:
                    continue
                runs = sorted(session.runs(planned, view), key=lambda r: r.first)
                places = [p for r in runs for p in range(r.first, r.end)]
                assert places == list(range(planned[0].first, planned[-1].end)), "runs overlap or leave units out"
                starts = {r.first for r in planned}
                assert all(r.first in starts or waves.cuts[wave][r.first] for r in runs), "a run is split at a CRC"
        if self.target is None:
            for name in view.uploads.values():
                named = NamedUpload.from_text(self.texts[name][0])
                assert named is not None, "the text that names an upload was torn"
                upload = self.uploads.get(named.id)
                assert upload is not None, "an upload is named that does not exist"
                assert upload.state != "aborted", "an upload of the newest session was aborted"


class _Quiet:
    """Reads texts without a step."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read(self, name: str) -> bytes | None:
        return self._world.texts.get(name, (None, ""))[0]

    def names(self) -> Mapping[str, str]:
        return {n: v for n, (_, v) in self._world.texts.items()}

    def create(self, name: str, text: bytes) -> bool:
        raise AssertionError(name)

    def put(self, name: str, text: bytes) -> None:
        raise AssertionError(name)

    def delete(self, names: Sequence[str]) -> None:
        raise AssertionError(names)


class _SimulatedChecks(Checks):
    """Checks that take time and find nothing."""

    def __init__(self, process: Process, waves: CheckWaves) -> None:
        self._process = process
        self.waves = waves

    def tie_of(self, wave: int) -> str:
        return "plan"

    def perform(self, item: CheckItem) -> Any:
        return self._process.make(item)

    def understood(self, wave: int, index: int, result: Any) -> str:
        return result["by"]


def _aborted(state: str) -> str:
    return "aborted" if state == "open" else state


class Process:
    """One simulated worker: what `operations.shared_conversion` does, with simulated bytes."""

    def __init__(self, world: World, number: int, count: int) -> None:
        self.name = f"abc{number}-{number}-{number:012x}"
        self._world = world
        self._store = Texts(world, self.name)
        clock = _ClockOf(world, world.random.uniform(-7200, 7200))
        members = Members(self._store, clock, TIMING, ended=lambda _: False)
        self.worker = DistributedWorker(
            self._store,
            clock,
            members,
            self.name,
            timing=TIMING,
            position=(number, count),
        )
        self.worker.runs.reading_threads = 1  # a step of the scheduler is one call of one thread
        self._uploads: dict[int, str] = {}
        self._created: list[str] = []
        self._records: dict[int, UnitRecord] = {}
        self.result = ""

    def tick(self) -> None:
        """The thread that calls `tick`."""
        while not self.result:
            self._world.scheduler.sleep(self._world.random.uniform(0.1, 1.0))
            if not self.result:
                self.worker.runs.tick()

    def run(self) -> None:
        """The main thread."""
        after = tries = 0
        while not self.result:
            try:
                self._attempt(after)
                self.result = "done"
            except SessionLostError:
                after = 0
            except SourceError as error:
                self.result = error.code
            except ReshardError as error:
                tries += 1
                again = error.retryable and tries < 8
                if self._world.target is None and not again and (self.worker.member.saw_others or tries >= 8):
                    self.result = error.code
                after = 0 if again or self.worker.member.saw_others else self.worker.member.session.number
            self.worker.member.leave()
            self._close()
            if self._world.target is not None:
                # As `Conversion.finished_by_others` does: the committer may have died before it had finished.
                if not self.worker.is_finished_by_another and self._again(lambda: self._world.claimed):
                    self._finish()
                self.result = "done"
        self._world.counters.append(self.worker.runs.share)

    def _again(self, act: Callable[[], _T]) -> _T:
        """Perform an operation that the real store repeats until it succeeds."""
        while True:
            with suppress(StorageError):
                return self._world.call(self.name, act)

    def _finish(self) -> None:
        """As `Leftovers.release`: remove the texts, until none is listed, then abort all uploads, then the claim."""
        while names := self._again(lambda: list(self._world.texts)):
            for name in names:
                self._again(lambda n=name: self._world.texts.pop(n, None))
        self._again(self._abort_all)
        self._again(lambda: setattr(self._world, "claimed", False))
        self._created.clear()

    def _close(self) -> None:
        """As `ObjectSink.close`: remove the uploads that this worker created after the conversion had ended."""
        claimed = bool(self._created) and self._again(lambda: self._world.claimed)
        if not self._created or (claimed and not self.worker.member.is_over):
            return
        for upload_id in self._created:
            self._again(lambda u=self._world.uploads[upload_id]: setattr(u, "state", _aborted(u.state)))
        if not claimed:
            self._again(self._world.texts.clear)

    def _abort_all(self) -> None:
        for upload in self._world.uploads.values():
            upload.state = _aborted(upload.state)

    def _attempt(self, after: int) -> None:
        world, worker = self._world, self.worker
        if world.target is not None:
            return
        if worker.member.enter(after=after):
            if world.target is not None:
                return
            self._make_ready()
        else:
            if worker.member.opened(AGREEING) is not None and not worker.member.view.ready:
                self._check(AGREEING, opens=False)
            worker.member.wait_until_ready()
        self._uploads = dict(worker.ready_facts().uploads)
        self._records = {r.unit: r for r in worker.resumed()}
        for unit in worker.units(world.waves, self._records, self._absorb):
            if unit in world.waves.units[1]:
                same_file = [u.index for u in world.waves.units[0] if u.chunks[0].file == unit.chunks[0].file]
                missing = [index for index in same_file if index not in self._records]
                assert not missing, f"the last wave began without the CRCs of units {missing}"
            self._write(unit)
        self._wait_for_commit()
        if world.target is not None:
            return
        self._absorb(worker.others_records())
        for unit in world.units:
            if unit.index not in self._records:
                self._write(unit)
        found = self._check(SEALED, opens=True)
        world.judged[worker.member.session.number] = {(wave, index) for wave, of in found.items() for index in of}
        self._commit()

    def _wait_for_commit(self) -> None:
        turns, helped, worker = 0, False, self.worker
        while not worker.elect():
            worker.member.check()
            if not helped and worker.member.opened(SEALED) is not None:
                helped = True
                self._check(SEALED, opens=False)
            worker.member.wait(turns := turns + 1)

    def _check(self, name: str, *, opens: bool) -> Mapping[int, Mapping[int, Any]]:
        """As `AgreementChecks.spread` and `SharedVerification`, or as a worker that helps these."""
        waves = self._world.checks[name]
        if not any(waves.runs):
            return {}
        checks = _SimulatedChecks(self, waves)
        work = CheckWork(self.worker, checks)
        if opens:
            self.worker.member.open_checks(name, b"{}")
        groups = [((AGREEMENTS,), 1)] if name == AGREEING else [((SOURCE, FILES), 1), ((GATHERING,), 1)]
        work.take_part(groups)
        return work.results() if opens else {}

    def make(self, item: CheckItem) -> Mapping[str, str]:
        """Make a check, which takes time."""
        self._world.scheduler.sleep(self._world.random.uniform(0.1, 2))
        made = (self.worker.member.session.number, item.wave, item.index)
        self._world.call(self.name, lambda: self._world.made.setdefault(made, []).append(self.name))
        return {"by": self.name}

    def _make_ready(self) -> None:
        world = self._world
        if self._check(AGREEING, opens=True) and world.disagrees:
            error = SourceError("checkpoint.disagreement", "tensors differ")
            self.worker.member.fail(error)
            raise error
        world.call(self.name, self._claim)
        former = FormerWork(self._store, threads=1)
        known = dict(former.uploads())
        held = world.call(self.name, lambda: self._sweep(set(known.values())))
        known = {f: u for f, u in known.items() if world.uploads[u].state == "open"}
        records = {
            r.unit: r for r in former.records() if held.get(r.unit, {}).get(known.get(world.file_of[r.unit], ""))
        }
        self.worker.make_ready(records, known, ())

    def _claim(self) -> None:
        if self._world.target is not None:
            raise StorageError("request.target_exists", "another worker has committed meanwhile")
        self._world.claimed = True

    def _sweep(self, keep: set[str]) -> dict[int, dict[str, str]]:
        """Abort unknown uploads, and list the parts of the others: by unit, the ETag in each upload."""
        newest = newest_session(self._world.texts)
        if newest != self.worker.member.session.number:
            return {}  # as in the real sink, a coordinator that was paused looks again before it removes anything
        held: dict[int, dict[str, str]] = {}
        for name, upload in self._world.uploads.items():
            if upload.state == "open" and name not in keep:
                upload.state = "aborted"
            elif upload.state == "open":
                for unit, etag in upload.parts.items():
                    held.setdefault(unit, {})[name] = etag
        return held

    def _absorb(self, records: Iterable[UnitRecord]) -> None:
        self._records |= {r.unit: r for r in records}

    def _write(self, unit: Unit) -> None:
        world, file = self._world, self._world.file_of[unit.index]
        if file not in self._uploads:
            self._uploads[file] = self.worker.upload(file) or self._new_upload(file)
        upload = world.uploads[self._uploads[file]]
        etag = f"{unit.index}-{world.random.getrandbits(40):x}"

        def send() -> None:
            if upload.state != "open":
                raise StorageError("storage.protocol", f"NoSuchUpload: {upload.state}")
            upload.parts[unit.index] = etag
            world.acknowledged.add(etag)
            world.sent.setdefault(unit.index, []).append(self.name)

        world.scheduler.sleep(world.random.uniform(0.1, 3))
        for last in (False, False, True):
            try:
                world.call(self.name, send)
                break
            except StorageError as error:
                if last or not error.retryable:
                    raise
        record = UnitRecord(unit.index, (ChunkRecord(unit.chunks[0], unit.index, etag),))
        self._records[unit.index] = record
        self.worker.put_record(record)

    def _new_upload(self, file: int) -> str:
        world = self._world
        upload_id = f"u{len(world.uploads)}"
        world.uploads[upload_id] = _Upload(file, self.name)
        self._created.append(upload_id)
        world.scheduler.step()
        chosen = self.worker.offer_upload(file, upload_id)
        if chosen != upload_id:
            world.uploads[upload_id].state = "aborted"
        return chosen

    def _commit(self) -> None:
        world = self._world
        names = self.worker.uploads() | dict(self.worker.ready_facts().uploads)

        def complete() -> None:
            if newest_session(world.texts) != self.worker.member.session.number:
                raise StorageError("storage.conflict", "the claim is gone")
            self._prove_checked()
            found: dict[int, dict[int, str]] = {}
            for unit in world.units:
                upload = world.uploads[names[world.file_of[unit.index]]]
                if unit.index not in upload.parts or upload.state == "aborted":
                    raise StorageError("storage.protocol", f"unit {unit.index} is not in the store")
                found.setdefault(upload.file, {})[unit.index] = upload.parts[unit.index]
            for upload_id in names.values():
                world.uploads[upload_id].state = "completed"
            world.committed_by.append(self.name)
            if world.target is None:
                world.target = found

        world.call(self.name, complete)
        self._finish()

    def _prove_checked(self) -> None:
        """Each check of this session was made before the commit, and the committer knows its result."""
        session = self.worker.member.session.number
        for name in (AGREEING, SEALED):
            for wave, index in ((i.wave, i.index) for items in self._world.checks[name].units for i in items):
                assert self._world.made.get((session, wave, index)), f"committed before check {wave}.{index} was made"
                known = self._world.judged.get(session, set())
                assert name == AGREEING or (wave, index) in known, f"the result of check {wave}.{index} is unknown"


def simulate(seed: int, *, workers: int = 4, errors: float = 0.01, chaos: bool = True) -> World:
    """Run one conversion with faults that the seed draws; returns the world after all ended.

    Raises:
        AssertionError: An invariant does not hold.
    """
    world = World(seed, errors=errors if chaos else 0.0)
    processes = [Process(world, n, workers) for n in range(workers)]
    scheduler, random = world.scheduler, world.random
    for process in processes:
        task = scheduler.start(process.name, process.run)
        task.wake_at = random.uniform(0, 8) if chaos else 0.0
        scheduler.start(process.name, process.tick).wake_at = task.wake_at
    spared = processes[random.randrange(workers)]

    def disturb() -> None:
        world.check()
        if chaos and random.random() < 0.004:
            victim = random.choice(processes)
            if random.random() < 0.5:
                scheduler.paused[victim.name] = scheduler.now + random.uniform(0, 3 * TIMING.lease_s)
            elif victim is not spared:
                scheduler.dead.add(victim.name)

    scheduler.before_step = disturb
    scheduler.run()
    for process in processes:
        for task in scheduler.tasks_of(process.name):
            if task.error is not None:
                raise task.error
    world.results = {p.name: p.result or "killed" for p in processes}
    return world
