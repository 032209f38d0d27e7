"""Conversions of a service: it records which plans its jobs may have begun to write, and gives some of them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.plan.model import Plan


@dataclass(frozen=True)
class Ownership:
    """Facts about the plans that write a target, between a conversion and its caller.

    Attributes:
        on_plan: Called with the digest of the plan and the bytes that it writes, before anything is written. It raises
            to stop the conversion.
        abandoned: Digests of plans whose conversions have ended without a result and will not go on.
    """

    on_plan: Callable[[str, int], None] | None = None
    abandoned: frozenset[str] = frozenset()

    @property
    def is_recorded(self) -> bool:
        """True if the caller keeps a record of the plan, and removes by it what the conversion leaves."""
        return self.on_plan is not None

    def take(self, plan: Plan, sink: Sink) -> None:
        """Have the plan recorded, then remove what abandoned conversions of other plans left."""
        if self.on_plan is not None:
            self.on_plan(plan.digest, plan.write_bytes)
        others = self.abandoned - {plan.digest}
        if others:
            sink.discard(others)
