"""The doorbell: a message tells the workers that there is work. If the message is lost, the reaper sends it again."""

from __future__ import annotations

import logging
from typing import Protocol

from celery import Celery
from kombu.exceptions import OperationalError

from reshard_jobs.queue.doorbell import ring


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

    return CeleryDoorbell(broker_url)


# The doorbell that sends its messages through Celery.


# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false


logger = logging.getLogger(__name__)


class CeleryDoorbell:
    """Sends the message through Celery.

    Args:
        broker_url: The broker, `redis://host:port/db`.
    """

    def __init__(self, broker_url: str) -> None:
        self._app = Celery("reshard", broker=broker_url)
        self._app.conf.update(
            task_serializer="json",
            accept_content=["json"],
            # The timeouts of `ping`, in seconds.
            broker_connection_timeout=2,
            broker_transport_options={"socket_connect_timeout": 2, "socket_timeout": 5},
        )

    def ring(self) -> None:
        """Say that there is work."""
        try:
            ring(self._app)
        except ConnectionError as error:
            logger.warning("the doorbell could not be rung: %s", error)

    def ping(self) -> bool:
        """True if the broker answers within a few seconds."""
        try:
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, timeout=2)
                connection.default_channel.close()
        except (OperationalError, OSError):
            return False
        return True
