"""An entry of the corpus: a checkpoint, and what each command must say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adversarial.corpus.carriers import Build

OK = "ok"
"""In place of a code: the checkpoint loads."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint of the corpus."""

    number: int
    """In the list that the corpus was built from; several entries may share one."""
    name: str
    code: str
    """What `convert --to universal` (or `to`) ends with, under the bounds that `scaled` says."""
    build: Build
    inspect: str | None = None
    """What `inspect` ends with, where that is something else: it lists foreign names, and refuses none."""
    runs: bytes | None = None
    """A pickle that runs its code when Python's own unpickler loads it: the proof that the entry bites."""
    scaled: bool = False
    """Whether it exhausts a bound, and so runs with bounds of a million opcodes."""
    by_default: str | None = None
    """What a scaled entry ends with under the default bounds, where that is something else."""
    to: str = "universal"
    verify: str = "default"
    target: str = "out"
    """Where it is converted to, from the directory that holds `source`."""
    tamper: str = ""
    """A file of the source that is replaced while the conversion runs."""
    why: str = ""
    """Why the code is not the one that the list has."""

    @property
    def inspect_code(self) -> str:
        """What `inspect` must end with."""
        return self.code if self.inspect is None else self.inspect

    def row(self) -> str:
        """The entry's row of the table."""
        columns: Sequence[str] = (
            f"{self.number:03}",
            self.name,
            self.code,
            self.inspect_code,
            self.by_default or "",
            "runs code" if self.runs is not None else "",
            self.why,
        )
        return "\t".join(columns)


HEADINGS = "number\tname\tconvert\tinspect\tunder default bounds\tpayload\twhy not the code of the list"
