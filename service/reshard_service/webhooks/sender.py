"""Sends webhooks: a thread of an API process, which shares the work through leases in the database."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from importlib.metadata import version

import httpcore
import httpx
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

from reshard.errors import exhaustion_of, printable
from reshard_jobs.database import PeriodicThread
from reshard_jobs.webhooks import Deliveries, DeliveryClaim, Outcome
from reshard_service.settings import ServiceSettings
from reshard_service.webhooks.address import ForbiddenAddressError, JudgedConnections
from reshard_service.webhooks.secrets import Sealer, UnknownKeyError, signature

# One try of a delivery: sign it, send it, judge the answer. Redirects are not followed, and no body is read.

LIMIT_S = 15.0
"""Seconds that a try may take."""
_GONE = 410


class WebhookSender:
    """Sends deliveries.

    Args:
        settings: The settings of the service.
        sealer: Opens the secrets.
    """

    def __init__(self, settings: ServiceSettings, sealer: Sealer) -> None:
        self._settings = settings
        self._sealer = sealer
        self._user_agent = f"reshard/{version('reshard')}"
        self._trusted = httpx.create_ssl_context()

    def send(self, claim: DeliveryClaim) -> Outcome:
        """Make one try."""
        try:
            secrets = [self._sealer.open(sealed) for sealed in claim.secrets]
        except UnknownKeyError:
            return Outcome(error="the secret was sealed with a key that this service does not have")
        payload = claim.payload.encode()
        now = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": self._user_agent,
            "webhook-id": claim.id,
            "webhook-timestamp": str(now),
            "webhook-signature": " ".join(signature(secret, claim.id, now, payload) for secret in secrets),
        }
        try:
            return self._post(claim.url, headers, payload)
        except ForbiddenAddressError:
            text = "the name of the endpoint leads to an address, or it is at a port, to which nothing is sent"
            return Outcome(error=text, forbidden=True)
        except httpcore.TimeoutException:
            return Outcome(error=f"no answer within {LIMIT_S:g} s")
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            return Outcome(error=printable(f"{type(error).__name__}: {error}", max_chars=200))

    def _post(self, url: str, headers: dict[str, str], payload: bytes) -> Outcome:
        settings = self._settings
        # The operator may have changed what is allowed since the endpoint was made.
        if not settings.webhook_http and not url.startswith("https:"):
            return Outcome(error="RESHARD_WEBHOOK_HTTP is not set any more", forbidden=True)
        parsed = httpx.URL(url)
        # No proxy: it would connect to addresses that nobody has judged.
        connections = JudgedConnections(settings.webhook_networks, limit_s=LIMIT_S)
        with httpcore.ConnectionPool(ssl_context=self._trusted, network_backend=connections) as pool:
            target = httpcore.URL(
                scheme=parsed.raw_scheme, host=parsed.raw_host, port=parsed.port, target=parsed.raw_path
            )
            sent = [("host", parsed.netloc.decode("ascii")), *headers.items()]
            with pool.stream("POST", target, headers=sent, content=payload) as response:
                return _judged(response)


def _judged(response: httpcore.Response) -> Outcome:
    status = response.status
    if 200 <= status < 300:
        return Outcome(status)
    if status == _GONE:
        return Outcome(status, "the endpoint is gone (410): it is disabled", gone=True)
    wait = next((value for name, value in response.headers if name.lower() == b"retry-after"), b"")
    return Outcome(status, f"the endpoint answered {status}", retry_after_s=float(wait) if wait.isdigit() else 0.0)


logger = logging.getLogger(__name__)

_POLL_S = 1.0
_AT_ONCE = 16
_OF_TENANT = _AT_ONCE // 2
"""Deliveries of one tenant at once: however slow its endpoints are, the other half of the senders stays free."""
_KEPT_FREE = _AT_ONCE // 4
"""Senders that only tenants without a delivery on its way get: a few tenants with slow endpoints delay no other."""
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
        self._tenants: Counter[str] = Counter()
        """The deliveries on their way, by tenant."""
        self._counting = threading.Lock()
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
                self._count(claim, 1)
                try:
                    thread.start()
                except RuntimeError as error:
                    # The delivery is sent when its lease has ended.
                    self._sending.discard(thread)
                    self._count(claim, -1)
                    self._free.release()
                    logger.warning("delivery %s waits: %s", claim.id, exhaustion_of(error) or error)
                    return
        except (DBAPIError, PoolTimeout) as error:
            logger.warning("the outbox of webhooks cannot be read: %s", error)

    def _claim(self) -> DeliveryClaim | None:
        claim = None
        try:
            with self._counting:
                is_reserve = self._tenants.total() >= _AT_ONCE - _KEPT_FREE
                most = 1 if is_reserve else _OF_TENANT
                full = [tenant for tenant, count in self._tenants.items() if count >= most]
            claim = self._deliveries.claim_next(without=full)
            return claim
        finally:
            if claim is None:
                self._free.release()

    def _count(self, claim: DeliveryClaim, by: int) -> None:
        with self._counting:
            self._tenants[claim.tenant] += by
            if not self._tenants[claim.tenant]:
                del self._tenants[claim.tenant]

    def _send(self, claim: DeliveryClaim) -> None:
        try:
            outcome = self._sender.send(claim)
            if outcome.error is not None:
                logger.info("webhook %s, try %d: %s", claim.id, claim.tries + 1, outcome.error)
            self._deliveries.record(claim, outcome)
        except (DBAPIError, PoolTimeout) as error:
            logger.warning("the end of delivery %s is not recorded, so it is sent again: %s", claim.id, error)
        finally:
            self._count(claim, -1)
            self._free.release()
            self._sending.discard(threading.current_thread())
