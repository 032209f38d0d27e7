"""Server-sent events, read line by line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event."""

    id: str
    kind: str
    data: str


class EventLines:
    """Makes the events of a stream of its lines, without comments (pings) and without an event that the end cuts off.

    Source: WHATWG HTML, 9.2.6 "Interpreting an event stream"; `retry` is not used.
    """

    def __init__(self) -> None:
        self._last_id, self._kind, self._data = "", "", list[str]()

    def feed(self, line: str) -> ServerEvent | None:
        """The event that this line completes, if it completes one."""
        if not line:
            found = ServerEvent(self._last_id, self._kind or "message", "\n".join(self._data)) if self._data else None
            self._kind, self._data = "", []
            return found
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._kind = value
        elif field == "id":
            self._last_id = value
        return None
