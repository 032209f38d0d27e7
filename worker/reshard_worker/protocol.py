"""What the supervisor and its runner say to each other: one JSON object per line.

The supervisor sends one `Command`, and `GO` when a runner that asked may publish. The runner sends
`Progress` as often as it likes, `CommitRequest` before anything becomes readable, and ends with one
`Result` or `Failure`.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from reshard.errors import as_text
from reshard.models import ConvertRequest, ConvertResult, PlanSummary, Problem, Progress

GO = b"go\n"


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def line(self) -> bytes:
        """The message as it travels: what a checkpoint calls things need not be text."""
        return json.dumps(as_text(self.model_dump(mode="json"))).encode() + b"\n"


class Command(_Line):
    """What a runner is to do."""

    op: Literal["convert", "plan", "discard"]
    request: ConvertRequest
    memory_bytes: int = 0
    """Memory that the runner's process may take; 0 is no limit."""


class ProgressMessage(_Line):
    """How far the engine is."""

    event: Literal["progress"] = "progress"
    progress: Progress


class CommitRequest(_Line):
    """The engine is about to publish; it waits for `GO`."""

    event: Literal["commit"] = "commit"


class Result(_Line):
    """The engine is done."""

    event: Literal["result"] = "result"
    converted: ConvertResult | None = None
    planned: PlanSummary | None = None


class Failure(_Line):
    """The engine ended with a typed error."""

    event: Literal["problem"] = "problem"
    problem: Problem


Message = ProgressMessage | CommitRequest | Result | Failure

_messages: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="event")])


def parse_message(line: bytes) -> Message:
    """One line of a runner.

    Raises:
        ValueError: It is not a message.
    """
    return _messages.validate_json(line)
