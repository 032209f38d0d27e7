"""A protocol of uvicorn that closes connections whose client does not send the head of a request in time.

uvicorn 0.54 waits for the head as long as the client likes (`protocols/http/h11_impl.py`), so a few hundred slow
clients would hold all connections. The middleware limits the time of the body.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


def impatient(head_s: float) -> type[asyncio.Protocol]:
    """A protocol that waits for the head of a request for so many seconds."""
    return type("ImpatientProtocol", (_ImpatientProtocol,), {"head_s": head_s})


class _ImpatientProtocol(H11Protocol):
    head_s: float
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Stop waiting when a head is complete, and begin again with the first byte of the next one."""
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._forget()
        super().connection_lost(exc)

    @property
    def _waits_for_head(self) -> bool:
        # uvicorn declares the cycle without None, which it is until the first request.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete

    def _expect_head(self) -> None:
        if not self._waits_for_head:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self._close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if self._waits_for_head:
            self.transport.close()
