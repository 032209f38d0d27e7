"""The doorbell: a message tells the workers that there is work. If the message is lost, the reaper sends it again."""

from __future__ import annotations

from typing import Protocol


class Doorbell(Protocol):
    """The operations that the API needs of a broker."""

    def ring(self) -> None:
        """Say that there is work; failures are logged, not raised."""
        ...

    def ping(self) -> bool:
        """True if the broker answers."""
        ...


class NoDoorbell:
    """A doorbell that does nothing, because the embedded executor polls the job table."""

    def ring(self) -> None:
        """Do nothing."""

    def ping(self) -> bool:
        """Return True: there is no broker that could fail to answer."""
        return True


def make_doorbell(broker_url: str) -> Doorbell:
    """The doorbell of this broker; without a URL, a `NoDoorbell`."""
    if not broker_url:
        return NoDoorbell()
    # Celery is imported here, so that `reshard serve` without a broker starts without Celery.
    from reshard_service.celery_doorbell import CeleryDoorbell

    return CeleryDoorbell(broker_url)
