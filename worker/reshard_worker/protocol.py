"""The messages between the supervisor and its runner: one JSON object per line.

The supervisor sends one `Command`, `GO` when the runner may begin to write, and `GO` when it may publish its output.
The runner sends `Progress` as often as it likes, `PlanRequest` before it writes anything, `CommitRequest` before any
output becomes readable, and at the end one `Result` or `Failure`. If the command is traced, it sends `SpanBegan` and
`SpanEnded` in between. A runner that stays then sends `Idle` and waits for the next command.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from reshard.errors import as_text
from reshard.models.jobs import ConvertRequest, ConvertResult, PlanSummary, Problem, Progress, WorkShare
from reshard.shared_work import SharedWork

GO = b"go\n"
STAYS_VARIABLE = "RESHARD_RUNNER_STAYS"
"""Set by a supervisor that may give the runner more than one command."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def line(self) -> bytes:
        """The message as bytes. Names from checkpoints may contain lone surrogates, which are escaped."""
        return json.dumps(as_text(self.model_dump(mode="json"))).encode() + b"\n"


class Command(_Line):
    """The work of a runner."""

    op: Literal["convert", "plan", "discard", "help"]
    request: ConvertRequest
    work: SharedWork | None = None
    """The workers among which a conversion is divided; None if one runs it alone."""
    roots: tuple[str, ...] = ()
    """The URLs below which the engine may read; empty for everything."""
    write_roots: tuple[str, ...] = ()
    """The URLs below which the engine may write; empty for everything."""
    memory_bytes: int = 0
    """Bytes of memory that the runner's process may use; 0 means no limit."""
    abandoned: tuple[str, ...] = ()
    """Plans of unfinished conversions into the target that have ended: one of another plan removes their files."""
    plans: tuple[str, ...] | None = None
    """The plans whose files are discarded; None for whatever is unfinished in the target."""
    idle_s: float = 0.0
    """A discard fails if one of the plans was written to in the last `idle_s` seconds."""
    keep_unfinished: bool = False
    """True for a discard that keeps an unfinished conversion which has the claim on the target."""
    log: dict[str, str | int] = {}
    """The fields that the lines of this command's process carry."""
    traced: bool = False
    """True if the supervisor wants to know of spans."""


class ProgressMessage(_Line):
    """The progress of the engine."""

    event: Literal["progress"] = "progress"
    progress: Progress


class PlanRequest(_Line):
    """The engine is ready to begin with this plan, has written nothing, and waits for `GO`."""

    event: Literal["plan"] = "plan"
    digest: str
    write_bytes: int


class CommitRequest(_Line):
    """The engine is ready to publish its output and waits for `GO`."""

    event: Literal["commit"] = "commit"


class Result(_Line):
    """The engine has succeeded."""

    event: Literal["result"] = "result"
    converted: ConvertResult | None = None
    planned: PlanSummary | None = None
    helped: WorkShare | None = None
    peak_memory_bytes: int = 0
    """The most memory that the engine's process took; 0 if it is not known."""


class Failure(_Line):
    """The engine has ended with a typed error."""

    event: Literal["problem"] = "problem"
    problem: Problem
    peak_memory_bytes: int = 0


class Idle(_Line):
    """The process of the command has ended, and the runner waits for the next one."""

    event: Literal["idle"] = "idle"


class SpanBegan(_Line):
    """A piece of the engine's work has begun."""

    event: Literal["span_began"] = "span_began"
    number: int
    parent: int
    """The number of the span that contains it; 0 for that of the command."""
    name: str
    at_ns: int
    """Nanoseconds since the epoch."""
    facts: dict[str, str | int] = {}


class SpanEnded(_Line):
    """A piece of the engine's work has ended."""

    event: Literal["span_ended"] = "span_ended"
    number: int
    at_ns: int
    code: str = ""
    """The code of the error with which it failed."""
    facts: dict[str, str | int] = {}


Message = ProgressMessage | PlanRequest | CommitRequest | Result | Failure | Idle | SpanBegan | SpanEnded

_messages: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="event")])


def parse_message(line: bytes) -> Message:
    """Parse one line of a runner.

    Raises:
        ValueError: The line is not a message.
    """
    return _messages.validate_json(line)
