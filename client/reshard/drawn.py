"""The subject of a result's picture. It is no part of the result: equal results stay equal, however they were made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.models import ConvertRequest, SourceSpec
    from reshard.pictures import Picture


@dataclass(frozen=True, eq=False)
class Drawn:
    """The checkpoint, or the conversion, whose layout a notebook shows beside a result."""

    subject: SourceSpec | ConvertRequest | None = None
    """None if this process cannot read it: a service may."""

    def __eq__(self, other: object) -> bool:
        """Equal to any other, so that it never tells apart two results."""
        return isinstance(other, Drawn)

    def __hash__(self) -> int:
        """The hash of all of them."""
        return hash(Drawn)

    def picture(self) -> Picture | None:
        """Read the metadata and draw; None if that is not possible here, or not any more."""
        from reshard.errors import ReshardError
        from reshard.local import load_engine
        from reshard.models import SourceSpec
        from reshard.pictures import Picture

        if self.subject is None:
            return None
        try:
            engine = load_engine()
            if isinstance(self.subject, SourceSpec):
                return Picture(engine.picture(self.subject))
            pair = engine.planned_pictures(self.subject)
        except ReshardError:
            # The source may have been removed since. A table without a picture still says what happened.
            return None
        return Picture(pair.source, pair.target)
