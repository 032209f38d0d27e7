"""The doorbell: one message in the broker that says "there is work". Which work, only the job database knows.

A message names no job: whoever takes it claims the next one. So one message that waits is enough for any number of
jobs. It is left after the jobs were recorded, and whoever takes it later finds them; a worker that finds more than it
can do rings for the next worker. A lost message is rung again by the reaper.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery import Celery

DOORBELL_TASK = "reshard.work"
DOORBELL_QUEUE = "reshard.jobs"
_IMPATIENT = {"socket_connect_timeout": 2, "socket_timeout": 5}
"""A broker that is away must keep neither a request waiting nor a job from its work."""


def ring(app: Celery) -> None:
    """Leave a message, unless one waits already.

    Two that ring at the same moment may both leave one: as many wait at most as there are processes that ring.

    Args:
        app: The Celery application that knows the broker.

    Raises:
        ConnectionError: The broker does not answer.
    """
    # Imported here: the API and the embedded executor run without a broker, and then without Celery.
    from kombu.exceptions import OperationalError

    # A connection of its own: one of the pool may have ended with a broker that was started again.
    with app.connection_for_write(connect_timeout=2, transport_options=dict(_IMPATIENT)) as connection:
        away = (OperationalError, *connection.connection_errors, *connection.channel_errors)
        try:
            channel = connection.default_channel
            if channel.queue_declare(queue=DOORBELL_QUEUE, durable=True).message_count:
                return
            app.send_task(DOORBELL_TASK, queue=DOORBELL_QUEUE, ignore_result=True, retry=False, connection=connection)
        except away as error:
            raise ConnectionError(str(error)) from error
