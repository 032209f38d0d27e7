"""Live workers: each process that runs jobs says that it is there, and if it trusts its own host."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from reshard.errors import ReshardError
from reshard.models.jobs import Problem, WorkerNode
from reshard_jobs.database import Database
from reshard_jobs.queue.leases import problem_json
from reshard_jobs.queue.refusals import begin_quarantine, refuse, streak
from reshard_jobs.records import time_of
from reshard_jobs.tables import PUBLIC_ID, JobRow, NodeRow, WorkerRow, db_now

_STREAK = 3
"""Number of different jobs in a row that a worker must fail before it doubts its host."""
_MOST_DOUBLINGS = 5


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A quarantine that begins: the worker claims nothing for `pause_s`, and then tries one job."""

    jobs: int
    pause_s: float


class Nodes:
    """The workers of a job database.

    Args:
        database: The job database.
        lease_s: Seconds for which a worker that says nothing counts as alive.
    """

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self.lease_s = lease_s

    def seen(self, worker: str) -> None:
        """Record that a worker is alive."""
        name = worker[:200]
        with self._database.write() as session:
            renewed = update(NodeRow).where(NodeRow.name == name).values(seen_at=db_now()).returning(NodeRow.name)
            if session.scalars(renewed).one_or_none() is not None:
                return
            try:
                with session.begin_nested():
                    session.execute(insert(NodeRow).values(name=name, started_at=db_now(), seen_at=db_now()))
            except IntegrityError:
                return  # another thread of the worker was faster

    def leave(self, worker: str) -> None:
        """Record that a worker has ended. Its record stays for a while: jobs wait for a worker that restarts."""
        with self._database.write() as session:
            gone = {"seen_at": db_now() - self.lease_s - 1.0}
            session.execute(update(NodeRow).where(NodeRow.name == worker[:200]).values(**gone))

    def engine_ended(self, worker: str, peak_bytes: int) -> None:
        """Record the most memory that a worker's engine took."""
        with self._database.write() as session:
            values = {"engine_peak_bytes": peak_bytes}
            session.execute(update(NodeRow).where(NodeRow.name == worker[:200]).values(**values))

    def good(self, worker: str) -> None:
        """Record that a job ended on a worker in a way that speaks for its host. A quarantine is over."""
        values = {"good_at": db_now(), "quarantined_until": 0.0, "quarantines": 0, "problem": None}
        with self._database.write() as session:
            session.execute(update(NodeRow).where(NodeRow.name == worker[:200]).values(**values))

    def refused(
        self, worker: str, job_id: str, problem: ReshardError, *, pause_s: float, record: bool = False
    ) -> Quarantine | None:
        """Judge a worker after a job failed there with what may be its host's fault.

        Args:
            worker: The worker.
            job_id: The job.
            problem: The error.
            pause_s: Seconds of the first quarantine; each that follows takes twice as long, up to 32 times.
            record: True to record the refusal, too.

        Returns:
            The quarantine that begins now, if there is one.
        """
        with self._database.write() as session:
            if record:
                refuse(session, job_id, worker, problem.code)
            jobs = streak(session, worker)
            before = session.scalars(select(NodeRow.quarantines).where(NodeRow.name == worker[:200])).one_or_none()
            if jobs < _STREAK or before is None:
                return None
            found = Quarantine(jobs, pause_s * 2 ** min(before, _MOST_DOUBLINGS))
            begin_quarantine(session, worker, found.pause_s, problem_json(problem))
            return found

    def quarantine_left_s(self, worker: str) -> float:
        """Seconds for which a worker claims nothing."""
        query = select(NodeRow.quarantined_until - db_now()).where(NodeRow.name == worker[:200])
        with self._database.read() as session:
            return max(0.0, session.execute(query).scalar_one_or_none() or 0.0)

    def live(self, tenant: str | None = None) -> list[WorkerNode]:
        """The workers that were seen lately, by name, each with the job that it runs or helps.

        With a tenant, only those that work for it, and nothing that other tenants' jobs have told of them.
        """
        query = select(NodeRow, NodeRow.quarantined_until > db_now()).where(NodeRow.seen_at >= db_now() - self.lease_s)
        with self._database.read() as session:
            rows = session.execute(query.order_by(NodeRow.name)).all()
            at_work = select(WorkerRow.worker, PUBLIC_ID).join(JobRow, JobRow.id == WorkerRow.job_id)
            at_work = at_work.where(
                WorkerRow.left_at.is_(None), *(() if tenant is None else (JobRow.tenant == tenant,))
            )
            jobs: dict[str, str] = {row[0]: row[1] for row in session.execute(at_work)}
        if tenant is None:
            return [_node_of(row, jobs.get(row.name), quarantined=bool(held)) for row, held in rows]
        mine = (_node_of(row, jobs[row.name], quarantined=False) for row, _ in rows if row.name in jobs)
        return [node.model_copy(update={"problem": None}) for node in mine]


def _node_of(row: NodeRow, job_id: str | None, *, quarantined: bool) -> WorkerNode:
    return WorkerNode(
        name=row.name,
        state="quarantined" if quarantined else "idle" if job_id is None else "working",
        job_id=job_id,
        started_at=time_of(row.started_at),
        seen_at=time_of(row.seen_at),
        quarantined_until=time_of(row.quarantined_until) if quarantined else None,
        problem=Problem.model_validate_json(row.problem) if row.problem else None,
    )
