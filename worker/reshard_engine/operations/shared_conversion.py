"""One conversion that several workers run together, without a service: each calls this, in any order.

The workers meet below the journal beside the target. One of them, the coordinator, clears the target and checks
what earlier attempts wrote. All of them execute runs of units. One is elected to verify and commit; the others wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial

from reshard.choices import VerifyLevel
from reshard.errors import IntegrityError, RequestError, ReshardError, SourceError, StorageError
from reshard.models.jobs import ConvertRequest, ConvertResult, Progress, WorkShare
from reshard.shared_work import SharedWork, process_name, repeated
from reshard_engine.distributed.members import Beat, Members, Timing
from reshard_engine.distributed.runs import cut_into_runs
from reshard_engine.distributed.segments import FormerWork
from reshard_engine.distributed.session import AGREEING, SessionLostError
from reshard_engine.distributed.worker import DistributedWorker
from reshard_engine.execute.checks.full import FullVerification
from reshard_engine.execute.checks.source import check_agreements
from reshard_engine.execute.executor import Executor, stop_check
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.operations.conversion import Conversion, Ownership, damage_discarded, sink_for
from reshard_engine.operations.shared_checks import AgreementChecks, CheckHelper, SharedVerification
from reshard_engine.plan.model import RecordPart, Unit
from reshard_engine.spans import begin_span

# The progress of a conversion that several workers run, as one of them reports it.

_OTHERS_S = 1.0
"""Seconds between two looks at the progress of the other workers."""


class JointProgress:
    """The progress of all workers together."""

    def __init__(
        self,
        on_progress: Callable[[Progress], None] | None,
        worker: DistributedWorker,
        least_bytes: int,
        *,
        verifies: bool,
    ) -> None:
        """While more than `least_bytes` are left, other workers are told to join, also to verify if `verifies`."""
        self._least_bytes = least_bytes
        self._verifies = verifies
        self._began_at = time.monotonic()
        self._began_bytes: int | None = None
        self._most_bytes = 0
        self._on_progress = on_progress
        self._worker = worker
        self._others: dict[str, Beat] = {}
        """The last heartbeat of each worker that was seen. What a worker did stays done when it leaves."""
        self._looked_at = time.monotonic()

    @property
    def report(self) -> Callable[[Progress], None] | None:
        """The function that the executor calls with the progress of this worker."""
        return None if self._on_progress is None else self._report

    def _report(self, own: Progress) -> None:
        assert self._on_progress is not None
        now = time.monotonic()
        if now - self._looked_at > _OTHERS_S:
            self._looked_at = now
            with suppress(ReshardError):
                self._others |= self._worker.member.others()
        done_bytes = own.bytes_done + sum(b.done_bytes for b in self._others.values())
        done_units = own.units_done + sum(b.done_units for b in self._others.values())
        if own.phase == "running":
            # Bytes never decrease: a unit counts before it is done, and another worker may run it again.
            self._most_bytes = max(self._most_bytes, min(done_bytes, own.bytes_total))
            done_units = min(done_units, own.units_total)
        else:
            self._most_bytes, done_units = own.bytes_total, own.units_total
        rate = self._rate(own, self._most_bytes, now)
        left = own.bytes_total - self._most_bytes
        self._on_progress(
            own.model_copy(
                update={
                    "bytes_done": self._most_bytes,
                    "units_done": done_units,
                    "rate_bytes_per_s": rate,
                    "eta_s": left / rate if rate > 0 else None,
                    "takes_workers": self._takes_workers(own, left),
                }
            )
        )

    def _takes_workers(self, own: Progress, left: int) -> bool:
        if own.phase == "verifying":
            return self._verifies and own.bytes_total > self._least_bytes
        return own.phase == "running" and left > self._least_bytes

    def _rate(self, own: Progress, done_bytes: int, now: float) -> float:
        """Bytes per second of all workers since this one began; what was done before does not count."""
        if self._began_bytes is None:
            self._began_bytes = done_bytes
        return max(own.rate_bytes_per_s, (done_bytes - self._began_bytes) / max(now - self._began_at, 1e-6))


# What each of the workers runs.

_TICK_S = 0.1
_TRIES = 4
"""Number of times that a worker joins again after the store was away, beside the retries of each call."""


def convert_shared(
    request: ConvertRequest,
    work: SharedWork,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    ownership: Ownership | None = None,
) -> ConvertResult:
    """Run a conversion together with other workers that are given the same request; returns when it is committed.

    Raises:
        ReshardError: The conversion failed, here or in another worker.
    """
    conversion = Conversion.prepare(request, ownership=ownership)
    if conversion.plan.write_bytes < work.least_bytes:
        return conversion.run(on_progress=on_progress, should_stop=should_stop)
    return _SharedConversion(conversion, work, on_progress, should_stop).run()


def help_convert(
    request: ConvertRequest,
    work: SharedWork,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> WorkShare:
    """Run a part of a conversion that other workers coordinate and commit; returns when no part is left.

    Raises:
        ReshardError: The conversion failed, here or in another worker; `job.cancelled` if the caller stopped it, after
            the finished units were left to the others.
    """
    return _SharedConversion(Conversion.prepare(request), work, on_progress, should_stop).help()


@dataclass
class _SharedConversion:
    conversion: Conversion
    work: SharedWork
    on_progress: Callable[[Progress], None] | None
    should_stop: Callable[[], bool] | None

    def run(self) -> ConvertResult:
        """Join, execute, and commit or wait for the commit."""
        conversion = self.conversion
        done = conversion.finished_before(self.on_progress, self.should_stop)
        if done is not None:
            return done
        sink = conversion.sink
        conversion.ownership.take(conversion.plan, sink)
        sink.make_parent()
        worker = self._worker(sink)
        after = tries = 0
        with damage_discarded(conversion.target, conversion.plan), _ticking(worker):
            while True:
                try:
                    return self._attempt(worker, after)
                except SessionLostError:
                    # The conversion is finished, or all workers were taken for dead and another attempt began.
                    after = 0
                except (StorageError, IntegrityError) as error:
                    tries += 1
                    again = error.retryable and tries < _TRIES and not worker.member.failed_for_all
                    hopeless = worker.member.failed_for_all or worker.member.saw_others or after or tries >= _TRIES
                    if not again and hopeless and not self._is_finished:
                        raise
                    # What earlier workers left may not hold any more: their uploads expire. A new session checks it.
                    after = 0 if again else worker.member.session.number
                except RequestError:
                    if not self._is_finished:
                        raise
                finally:
                    worker.member.leave()
                    self.conversion.sink.close()
                if (result := self._finished_meanwhile(tidy=not worker.is_finished_by_another)) is not None:
                    return result
                self._renew()

    def help(self) -> WorkShare:
        """Join, execute, and leave; another worker commits."""
        sink = self.conversion.sink
        sink.make_parent()
        worker = self._worker(sink)
        with _ticking(worker):
            while True:
                try:
                    worker.member.enter(begin=False)
                    self._prepare(worker)
                    executor, _, _ = self._execute(worker)
                    if (helper := self._check_helper(worker)) is not None:
                        executor.progress.report("verifying", force=True)
                        helper.follow(self.work.lease_s)
                    return worker.runs.share
                except SessionLostError:
                    pass
                except (StorageError, RequestError):
                    # A heartbeat may have met the end of the conversion, which removes the place where workers meet.
                    if not self._is_finished:
                        raise
                finally:
                    worker.member.leave()
                    self.conversion.sink.close()
                if self._is_finished:
                    return worker.runs.share
                self._renew()

    def _worker(self, sink: Sink) -> DistributedWorker:
        timing = Timing(
            beat_s=min(5.0, self.work.lease_s / 6),
            lease_s=self.work.lease_s,
            poll_s=sink.look_s,
            slow_poll_s=min(2.0, self.work.lease_s / 6),
            flush_s=min(2.0, self.work.lease_s / 3),
        )
        store = sink.meeting_place(self.conversion.plan)
        return DistributedWorker(
            store,
            time,
            Members(store, time, timing),
            process_name(),
            timing=timing,
            position=(self.work.number, self.work.count),
            sync=sink.sync,
            check=stop_check(self.should_stop),
        )

    def _renew(self) -> None:
        """Begin again with a sink that knows nothing of the last attempt."""
        sink = sink_for(self.conversion.target)
        assert sink is not None
        sink.repairs = self.conversion.sink.repairs
        self.conversion = replace(self.conversion, sink=sink)

    @property
    def _is_finished(self) -> bool:
        return self._finished_meanwhile() is not None

    def _finished_meanwhile(self, *, tidy: bool = True) -> ConvertResult | None:
        with suppress(ReshardError):
            return self.conversion.finished_by_others(tidy=tidy)
        return None

    def _attempt(self, worker: DistributedWorker, after: int) -> ConvertResult:
        conversion, sink = self.conversion, self.conversion.sink
        plan = conversion.plan
        seconds = dict(conversion.planning)
        began = time.monotonic()
        coordinates = worker.member.enter(after=after)
        # The conversion may have ended, and its journal be gone, just before this session began.
        if coordinates and (finished := self._finished_meanwhile()) is not None:
            return finished
        try:
            if coordinates:
                self._make_ready(worker, sink)
            else:
                self._prepare(worker)
            executor, resumed, warnings = self._execute(worker)
            seconds["run"] = time.monotonic() - began
            self._wait_for_commit(worker, executor)
            if (finished := self._finished_meanwhile()) is not None:
                return finished  # the one that was elected before died after its commit
            executor.absorb([r for r in worker.others_records() if r.belongs_to(plan)])
            verifying = partial(SharedVerification, worker=worker, threads=conversion.threads)
            result = conversion.conclude(
                executor, resumed, warnings, seconds, self.should_stop, alone=False, verifying=verifying
            )
            return result.model_copy(update={"share": worker.runs.share})
        except (SourceError, IntegrityError) as error:
            if not error.retryable:
                # The source is wrong, whoever reads it: the other workers need not find out too.
                worker.member.fail(error)
            raise

    def _execute(self, worker: DistributedWorker) -> tuple[Executor, set[int], Sequence[str]]:
        """Run units until all workers have run all of them.

        Returns:
            The executor, the units that earlier attempts ran, and disagreements between the source's replicas.
        """
        conversion = self.conversion
        plan, facts = conversion.plan, worker.ready_facts()
        conversion.sink.join(plan, worker, overwrite=conversion.request.overwrite, uploads=facts.uploads)
        resumed = {r.unit: r for r in worker.resumed() if r.belongs_to(plan)}
        verifies = conversion.request.verify is VerifyLevel.FULL
        progress = JointProgress(self.on_progress, worker, self.work.least_bytes // 4, verifies=verifies)
        executor = conversion.executor(resumed, progress.report, self.should_stop)
        waves = cut_into_runs(plan, conversion.layout.files)

        def absorb(records: Iterable[UnitRecord]) -> None:
            executor.absorb(r for r in records if r.belongs_to(plan))

        units = worker.units(waves, executor.records, absorb, lambda: executor.failed)

        def parts_before(unit: Unit) -> Sequence[RecordPart]:
            return waves.parts_before(unit.index, worker.run_of(unit))

        executor.progress.report("running", force=True)
        executor.run(units, conversion.threads, phase="running", parts_before=parts_before)
        return executor, set(resumed), facts.warnings

    def _call_for_help(self) -> None:
        """Report that other workers may join already."""
        plan = self.conversion.plan
        if self.on_progress is not None:
            facts = Progress(phase="running", bytes_total=plan.write_bytes, units_total=len(plan.units))
            takes_workers = plan.write_bytes > self.work.least_bytes // 4
            self.on_progress(facts.model_copy(update={"takes_workers": takes_workers}))

    def _wait_for_commit(self, worker: DistributedWorker, executor: Executor) -> None:
        """Return when this worker is to commit. Until then, make the checks that the elected worker opens.

        Raises:
            SessionLostError: The elected worker has removed the session.
        """
        helper, turns = self._check_helper(worker), 0
        while not worker.elect():
            worker.member.check()
            if helper is not None and helper.help():
                turns = 0
                continue
            if turns == 0 and helper is not None:
                executor.progress.report("verifying", force=True)
            worker.member.wait(turns)
            turns += 1

    def _check_helper(self, worker: DistributedWorker) -> CheckHelper | None:
        """The part of this worker in `--verify full`."""
        conversion = self.conversion
        if conversion.request.verify is not VerifyLevel.FULL:
            return None
        full = FullVerification(
            conversion.checkpoint, conversion.layout, conversion.plan, conversion.sink, should_stop=worker.member.check
        )
        return CheckHelper(full, worker, conversion.threads)

    def _prepare(self, worker: DistributedWorker) -> None:
        """Help the coordinator of the session to compare what must agree, until the session is ready.

        Raises:
            SessionLostError: The coordinator is dead.
        """
        if worker.member.opened(AGREEING) is not None and not worker.member.view.ready:
            self._agreement_checks(worker).take_part(worker)
        worker.member.wait_until_ready()

    def _agreement_checks(self, worker: DistributedWorker) -> AgreementChecks:
        return AgreementChecks(self.conversion.checkpoint, self.conversion.plan, worker.member.check)

    def _make_ready(self, worker: DistributedWorker, sink: Sink) -> None:
        """Do what the coordinator of a session does before others may write."""
        conversion = self.conversion
        overwrite = conversion.request.overwrite
        conversion.examine()
        checks, policy = self._agreement_checks(worker), conversion.request.replicas
        shared = checks.waves.is_worth_sharing
        if shared:
            self._call_for_help()
        end_span = begin_span("agreements")
        if shared:
            disagreements = checks.spread(worker, policy)
        else:
            disagreements = check_agreements(conversion.checkpoint, policy, worker.member.check)
        end_span()
        former = FormerWork(worker.member.store)
        done = sink.begin(conversion.plan, overwrite=overwrite, earlier=former, shared=True)
        worker.make_ready(done, sink.uploads, disagreements)


def _ticking(worker: DistributedWorker) -> AbstractContextManager[None]:
    """Call the worker's `tick` from a thread until the block ends."""
    return repeated(worker.runs.tick, every_s=_TICK_S, name="reshard-worker-tick")
