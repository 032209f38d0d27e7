"""Server-sent events, read line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event."""

    id: str
    kind: str
    data: str


def parse_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """The events of a stream, without comments (pings) and without an event that the end of the stream cuts off.

    Source: WHATWG HTML, 9.2.6 "Interpreting an event stream"; `retry` is not used.
    """
    last_id, kind, data = "", "", list[str]()
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(last_id, kind or "message", "\n".join(data))
            kind, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            kind = value
        elif field == "id":
            last_id = value
