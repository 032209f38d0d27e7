"""The doorbell: tells the workers that there is work. It may be lost; the reaper rings again."""

from __future__ import annotations

from typing import Protocol


class Doorbell(Protocol):
    """What the API needs of a broker."""

    def ring(self) -> None:
        """Say that there is work; failures are logged, not raised."""
        ...

    def ping(self) -> bool:
        """Whether the broker answers."""
        ...


class NoDoorbell:
    """The embedded executor polls the job table: nothing to ring."""

    def ring(self) -> None:
        """Nothing."""

    def ping(self) -> bool:
        """There is no broker that could be away."""
        return True


def make_doorbell(broker_url: str) -> Doorbell:
    """The doorbell of this broker, or one that rings nothing."""
    if not broker_url:
        return NoDoorbell()
    # Imported here: `reshard serve` without a broker starts without Celery.
    from reshard_service.celery_doorbell import CeleryDoorbell

    return CeleryDoorbell(broker_url)
