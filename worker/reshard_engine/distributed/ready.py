"""The text with which a coordinator opens its epoch to the other workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReadyFacts:
    """The facts that the coordinator found out, and that the others need not find out again."""

    uploads: Mapping[int, str] = field(default_factory=dict[int, str])
    """The ids of uploads that earlier attempts began and that still hold, by file number."""
    warnings: tuple[str, ...] = ()
    """Disagreements between the replicas of the source."""

    def to_text(self) -> bytes:
        """The facts as JSON text."""
        return json.dumps({"uploads": dict(self.uploads), "warnings": self.warnings}).encode()

    @staticmethod
    def from_text(text: bytes | None) -> ReadyFacts:
        """The facts in a text; empty if there is none."""
        try:
            facts = json.loads(text or b"{}")
            uploads = {int(file): str(upload) for file, upload in facts.get("uploads", {}).items()}
            return ReadyFacts(uploads, tuple(map(str, facts.get("warnings", ()))))
        except (ValueError, TypeError, AttributeError):
            return ReadyFacts()
