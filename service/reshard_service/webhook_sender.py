"""One try of a delivery: sign it, send it, judge the answer. Redirects are not followed, and no body is read."""

from __future__ import annotations

import time
from importlib.metadata import version

import httpcore
import httpx

from reshard.errors import printable
from reshard_jobs.deliveries import DeliveryClaim, Outcome
from reshard_service.settings import ServiceSettings
from reshard_service.webhook_address import ForbiddenAddressError, JudgedConnections
from reshard_service.webhook_secrets import Sealer, UnknownKeyError, signature

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
