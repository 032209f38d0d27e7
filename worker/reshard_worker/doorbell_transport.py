"""The Redis transport of a worker: of an entry of the queue it takes the doorbell's name and nothing else.

kombu 5.7 and Celery 5.7 expect that whoever writes to the queue is Celery. Another entry raises in the event loop of
the worker, and the worker ends. Headers such as `eta`, `expires` and `timelimit` would put a message off, drop it, or
kill the process of the running job. The doorbell's messages carry nothing that is needed, so nothing is lost with them.
"""
# ruff: noqa: SLF001 - kombu has no public place between the entry and its consumer
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import logging
from queue import Empty
from typing import Any
from uuid import uuid4

from kombu.transport import TRANSPORT_ALIASES, redis
from redis.exceptions import DataError

from reshard.errors import printable
from reshard_jobs.doorbell import DOORBELL_QUEUE, DOORBELL_TASK

logger = logging.getLogger(__name__)

_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, DataError)
"""Errors that an entry causes where it is not what Celery writes. Those of a connection are none of these."""


class Channel(redis.Channel):
    """A channel that outlives any entry of its queues."""

    def basic_consume(self, queue: str, *arguments: Any, **options: Any) -> None:
        """Consume from a queue; messages at which the consumer fails are dropped."""
        super().basic_consume(queue, *arguments, **options)
        deliver = self.connection._callbacks[queue]

        def deliver_or_drop(raw: Any) -> None:
            held = set(self.qos._delivered or ())
            try:
                deliver(_bell_of(raw) if queue == DOORBELL_QUEUE else raw)
            except _DAMAGE as error:
                _dropped(queue, error)
                # A message that is not acknowledged would keep the worker from taking another one.
                for tag in set(self.qos._delivered or ()) - held:
                    self.basic_ack(tag)

        self.connection._callbacks[queue] = deliver_or_drop

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except _DAMAGE as error:
            _dropped("the broker", error)
            raise Empty from None


class Transport(redis.Transport):
    """The Redis transport with such channels."""

    Channel = Channel


def install() -> None:
    """Use this transport for all Redis connections of this process."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:Transport"


def _bell_of(raw: Any) -> dict[str, Any]:
    """The message that Celery writes for the doorbell's task, in the place of one that somebody wrote.

    Raises:
        LookupError: It is not for this task. Entries that are no messages raise other errors of `_DAMAGE`.
    """
    if raw["headers"]["task"] != DOORBELL_TASK:
        raise LookupError(DOORBELL_TASK)
    name = str(uuid4())
    return {
        "body": "[[], {}, {}]",
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"lang": "py", "task": DOORBELL_TASK, "id": name, "root_id": name, "retries": 0},
        "properties": {
            "delivery_tag": name,
            "delivery_info": {"exchange": "", "routing_key": DOORBELL_QUEUE},
            "priority": 0,
        },
    }


def _dropped(queue: str, error: Exception) -> None:
    logger.warning("an entry of %s was dropped, it is no message: %s", queue, printable(f"{error!r}"))
