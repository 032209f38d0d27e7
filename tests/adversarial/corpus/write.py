"""Writes the corpus: `python tests/adversarial/corpus/write.py DIR`.

`DIR/<number>-<name>/source` is what the commands are pointed at, `DIR/expected.tsv` says what each must end with.
Entries that have a `payload` beside `source` run code in Python's own unpickler: it creates a file in the working
directory. Never load anything of this directory with anything but reshard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from adversarial.corpus.entry import HEADINGS, Entry
from adversarial.corpus.table import ENTRIES


def write_entry(entry: Entry, directory: Path) -> Path:
    """Write an entry; returns its directory."""
    place = directory / f"{entry.number:03}-{entry.name}"
    entry.build(place / "source")
    if entry.runs is not None:
        (place / "payload").write_bytes(entry.runs)
    return place


def write_table(entries: Iterable[Entry], directory: Path) -> None:
    """Write `expected.tsv`."""
    (directory / "expected.tsv").write_text("\n".join([HEADINGS, *(e.row() for e in entries), ""]))


def main(directory: Path) -> None:
    """Write everything."""
    directory.mkdir(parents=True)
    for entry in ENTRIES:
        write_entry(entry, directory)
    write_table(ENTRIES, directory)
    files = sum(1 for p in directory.rglob("*") if p.is_file())
    print(f"{len(ENTRIES)} checkpoints, {files} files, in {directory}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
