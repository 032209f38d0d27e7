"""Keeps a claim alive: sends heartbeats, polls the cancel flag, and detects a lost lease."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from reshard.models import Progress
from reshard_jobs.database import is_away
from reshard_jobs.leases import JobClaim, Leases, LeaseStatus
from reshard_worker.alive import JOB
from reshard_worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
"""Seconds between two tries while the database does not answer."""


class LeaseHeartbeat:
    """Keeps one claim alive.

    If the database does not answer, the claim counts as held until its lease must have expired by this process's own
    clock. That is a duration; clocks of two machines are never compared. From then on the claim is in doubt: nothing
    may be done in its name, until the database answers (`regain`).
    """

    def __init__(self, leases: Leases, claim: JobClaim, settings: WorkerSettings) -> None:
        self._leases = leases
        self._claim = claim
        self._settings = settings
        self._pulse = LeaseStatus(held=True, cancel_requested=False)
        self._beat_at = self._peek_at = self._progress_at = time.monotonic()
        self._phase = ""
        self._unsent: Progress | None = None
        self._in_doubt = False

    @property
    def pulse(self) -> LeaseStatus:
        """The last known state of the claim."""
        return self._pulse

    @property
    def in_doubt(self) -> bool:
        """True if the lease has expired by this process's clock, and the database has not said who owns the job."""
        return self._in_doubt

    def note(self, progress: Progress) -> None:
        """Keep progress for the next heartbeat."""
        self._unsent = progress

    def tick(self) -> LeaseStatus:
        """Do the work that is due: record progress, renew the lease, read the cancel flag."""
        JOB.give()
        now = time.monotonic()
        if self._unsent is not None:
            entering = self._unsent.phase != self._phase
            if entering or now - self._progress_at >= self._settings.progress_s:
                return self.beat()
        if now - self._beat_at >= self._settings.jobs.heartbeat_s:
            return self.beat()
        if now - self._peek_at >= self._settings.cancel_poll_s:
            self._peek_at = now
            return self._ask(lambda: self._leases.peek(self._claim), now)
        return self._pulse

    def beat(self) -> LeaseStatus:
        """Renew the lease now, and record progress that was not recorded yet."""
        JOB.give()
        now = time.monotonic()
        progress = self._unsent
        pulse = self._ask(lambda: self._leases.heartbeat(self._claim, progress), now, renews=True)
        if progress is not None and self._beat_at == now:
            self._unsent, self._phase, self._progress_at = None, progress.phase, now
        return pulse

    def regain(self) -> LeaseStatus:
        """Wait until the database answers, and renew the lease if the job still belongs to this claim."""
        while self.beat().held is False and self._in_doubt:
            time.sleep(_PAUSE_S)
        return self._pulse

    def persist(self, write: Callable[[], bool], *, waits: bool = True) -> bool:
        """Make a fenced write. Repeat it while the database is away: its answer then says if the lease was lost.

        Args:
            write: The write; False if the lease was lost.
            waits: False to give up when the lease must have expired.
        """
        while True:
            JOB.give()
            try:
                return write()
            except DBAPIError as error:
                expired = time.monotonic() - self._beat_at > self._leases.lease_s
                if expired and not (waits and is_away(error)):
                    logger.warning("job %s: its end could not be recorded: %s", self._claim.job_id, error)
                    return False
                time.sleep(_PAUSE_S)

    def _ask(self, question: Callable[[], LeaseStatus], now: float, *, renews: bool = False) -> LeaseStatus:
        try:
            self._pulse = question()
        except DBAPIError as error:
            logger.warning("job %s: the database does not answer: %s", self._claim.job_id, error)
            if now - self._beat_at > self._leases.lease_s:
                self._pulse = LeaseStatus(held=False, cancel_requested=False)
                self._in_doubt = is_away(error)
        else:
            self._in_doubt = False
            if renews:
                # Take the time before the call: the database counts the lease from a later moment.
                self._beat_at = now
        return self._pulse
