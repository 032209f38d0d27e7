"""What a format gives to inherit the laws: a writer of logical states, or a reader of what the engine wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hypothesis.strategies import SearchStrategy

from reshard.models import ConvertRequest
from reshard_engine.testing.logical import Bits, LogicalState, Tree


@dataclass(frozen=True)
class Case:
    """A run and how its framework would cut it up.

    Attributes:
        state: what the run holds.
        layout: the format's own description of the cut; printed when a law is broken.
    """

    state: LogicalState
    layout: Any


@dataclass(frozen=True)
class Saved:
    """A case in files.

    Attributes:
        state: what the files keep of the logical state; a format may keep less than a run holds.
        labels: items of the zoo that only the format can see (see `zoo.py`).
        frozen_late: parameters that the optimizer owns and that were frozen since: some targets hold them as both.
    """

    state: LogicalState
    labels: frozenset[str] = frozenset()
    frozen_late: frozenset[str] = frozenset()


class SourceFormat(Protocol):
    """A way of saving training state, written the way the real framework writes it.

    Attributes:
        name: for reports.
        full: whether the files hold everything that a resumable target needs; else they hold weights.
        zoo: the items that must be met, each with the least share of examples that meet it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    full: bool

    @property
    def zoo(self) -> Mapping[str, float]: ...  # noqa: D102

    def cases(self) -> SearchStrategy[Case]:
        """Runs that can be saved this way."""
        ...

    def write(self, case: Case, directory: Path) -> Saved:
        """Write the files that the framework would write into an empty directory: what the user then names."""
        ...

    def checks_metadata(self, case: Case) -> bool:
        """Whether the files hold checksums of everything but tensor data, so that no flipped bit of it passes."""
        ...


@dataclass(frozen=True)
class Content:
    """What a target holds, as an independent reader finds it.

    Attributes:
        tensors: by a name that says role and fqn.
        cast: names of the tensors that were cast; NaN payloads in them are nobody's promise.
        values: non-tensor state by name.
        overflows: by fqn, how many finite elements became infinite; only of expected contents.
    """

    tensors: Mapping[str, Bits]
    cast: frozenset[str] = frozenset()
    values: Mapping[str, Tree] = field(default_factory=dict[str, Tree])
    overflows: Mapping[str, int] = field(default_factory=dict[str, int])


class TargetOracle(Protocol):
    """A target format as a reader that shares nothing with the engine sees it."""

    name: str
    wants_full_state: bool
    """Whether only sources with optimizer states can become this target."""

    def options(self) -> SearchStrategy[Mapping[str, Any]]:
        """Fields of `ConvertRequest` that choose this target and its options."""
        ...

    def expected(self, saved: Saved, request: ConvertRequest) -> Content:
        """What the target must hold of a source."""
        ...

    def read(self, files: Mapping[str, bytes]) -> Content:
        """What a target's files hold; an assertion fails for any file that has no business there."""
        ...
