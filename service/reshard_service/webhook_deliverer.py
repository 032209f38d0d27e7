"""The thread of an API process that sends webhooks. Several processes share the work through leases in the database."""

from __future__ import annotations

import logging
import threading
import time

from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

from reshard_jobs.deliveries import Deliveries, DeliveryClaim
from reshard_jobs.periodic import PeriodicThread
from reshard_service.webhook_sender import WebhookSender

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_AT_ONCE = 8
_FORGET_S = 60.0
_STOP_S = 3.0


class WebhookDeliverer:
    """Sends what is due, a few deliveries at a time, until stopped.

    Args:
        deliveries: The outbox.
        sender: Sends one delivery.
        keep_s: Seconds for which ended deliveries are kept.
    """

    def __init__(self, deliveries: Deliveries, sender: WebhookSender, *, keep_s: float) -> None:
        self._deliveries = deliveries
        self._sender = sender
        self._keep_s = keep_s
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._sending: set[threading.Thread] = set()
        self._forget_at = 0.0
        self._thread = PeriodicThread(self._poll, interval_s=_POLL_S, name="webhooks")

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no further delivery, and wait for a moment for those that are sent now; others are sent again later."""
        self._thread.stop()
        deadline = time.monotonic() + _STOP_S
        for thread in tuple(self._sending):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _poll(self) -> None:
        try:
            if time.monotonic() >= self._forget_at:
                self._deliveries.forget(keep_s=self._keep_s)
                self._forget_at = time.monotonic() + _FORGET_S
            while self._free.acquire(blocking=False):
                claim = self._claim()
                if claim is None:
                    return
                # Threads of a pool would hold up the end of the process.
                thread = threading.Thread(target=self._send, args=(claim,), name="webhook", daemon=True)
                self._sending.add(thread)
                thread.start()
        except (DBAPIError, PoolTimeout) as error:
            logger.warning("the outbox of webhooks cannot be read: %s", error)

    def _claim(self) -> DeliveryClaim | None:
        claim = None
        try:
            claim = self._deliveries.claim_next()
            return claim
        finally:
            if claim is None:
                self._free.release()

    def _send(self, claim: DeliveryClaim) -> None:
        try:
            outcome = self._sender.send(claim)
            if outcome.error is not None:
                logger.info("webhook %s, try %d: %s", claim.id, claim.tries + 1, outcome.error)
            self._deliveries.record(claim, outcome)
        except (DBAPIError, PoolTimeout) as error:
            logger.warning("the end of delivery %s is not recorded, so it is sent again: %s", claim.id, error)
        finally:
            self._free.release()
            self._sending.discard(threading.current_thread())
