"""The doorbell over Celery."""
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false

from __future__ import annotations

import logging

from celery import Celery
from kombu.exceptions import OperationalError

from reshard_jobs.settings import DOORBELL_QUEUE, DOORBELL_TASK

logger = logging.getLogger(__name__)


class CeleryDoorbell:
    """Rings through Celery: JSON, the job's id and nothing else.

    Args:
        broker_url: The broker, `redis://host:port/db`.
    """

    def __init__(self, broker_url: str) -> None:
        self._app = Celery("reshard", broker=broker_url)
        self._app.conf.update(
            task_serializer="json",
            accept_content=["json"],
            broker_connection_timeout=2,
            broker_transport_options={"socket_connect_timeout": 2, "socket_timeout": 5},
        )

    def ring(self, job_id: str) -> None:
        """Say that the job has work."""
        try:
            self._app.send_task(DOORBELL_TASK, args=[job_id], queue=DOORBELL_QUEUE, ignore_result=True, retry=False)
        except OperationalError as error:
            logger.warning("the doorbell of job %s could not be rung: %s", job_id, error)

    def ping(self) -> bool:
        """Whether the broker answers within seconds."""
        try:
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, timeout=2)
                connection.default_channel.close()
        except (OperationalError, OSError):
            return False
        return True
