"""Digests of what conversions write, to hold two versions of the code side by side.

    python tests/laws/output_digests.py --out before.json      # in a checkout of the one
    python tests/laws/output_digests.py --out after.json       # in a checkout of the other
    python tests/laws/output_digests.py --compare before.json after.json

The sources are those of the laws (`tests/laws`), drawn with a fixed seed, and the checkpoints of directories that are
named, each converted to every target that takes it. A digest covers every file, the pointer, warnings, and what was
not carried; a refusal counts with its code and its text. Manifests are left out: they hold times and plan digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from house.requests import asked

TESTS = Path(__file__).resolve().parents[1]
SEED = 20_261_122


def digest(files: Mapping[str, bytes], *texts: str) -> str:
    """One digest over files by name, and texts."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()[:32]


def texts_of(result: Any) -> list[str]:
    """The warnings of a result, and the paths that the target does not carry."""
    return [*result.warnings, *(f"{n.path}: {n.reason}" for n in result.not_carried)]


def of_laws(examples: int, *, texts: bool) -> list[list[str]]:
    """[format, digest of the source, digest of the target] of generated checkpoints."""
    sys.path[:0] = [str(TESTS)]
    from laws.drawing import SOURCES

    return [line for source in SOURCES for line in _of_source(source, examples, texts=texts)]


def _of_source(source: Any, examples: int, *, texts: bool) -> list[list[str]]:
    from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

    from laws.drawing import trials
    from reshard.errors import ReshardError

    found: list[list[str]] = []

    @seed(SEED)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        trial = data.draw(trials(source))
        try:
            run = trial.reference
            said = texts_of(run.result) if texts else []
            made = digest({**run.files, **{f"../{n}": d for n, d in run.beside.items()}}, *said)
        except ReshardError as error:
            made = f"{error.code}: {error.message if texts else ''}"
        found.append([source.name, digest(trial.source_files), made])

    draw()
    return found


def of_directories(places: Iterable[Path], *, texts: bool) -> list[list[str]]:
    """The same of checkpoints on disk: universal, weights of both kinds, and ZeRO on one rank and on three."""
    from reshard.errors import ReshardError
    from reshard.local import load_engine

    wanted: list[dict[str, Any]] = [
        {"to": "universal"},
        {"to": "safetensors"},
        {"to": "torch", "dtype": "bf16"},
        {"to": "zero", "layout": {"dp": 1}},
        {"to": "zero", "layout": {"dp": 3, "zero_stage": "3"}},
    ]
    found: list[list[str]] = []
    for place in places:
        for options in wanted:
            scratch = Path(tempfile.mkdtemp())
            request = {"source": {"url": str(place)}, "target": str(scratch / "out" / "step"), "opaque": "drop"}
            try:
                result = load_engine().convert(asked(**{**request, **options}))
                files = {
                    p.relative_to(scratch).as_posix(): p.read_bytes()
                    for p in scratch.rglob("*")
                    if p.is_file() and p.name != "reshard.json"
                }
                made = digest(files, *(texts_of(result) if texts else [])).replace(str(scratch), "")
            except ReshardError as error:
                made = f"{error.code}: {error.message.replace(str(scratch), '') if texts else ''}"
            found.append([f"{place.name} {json.dumps(options)}", "", made])
            shutil.rmtree(scratch)
    return found


def compare(before: Path, after: Path) -> int:
    """Print what differs; the exit code says whether anything does."""
    left, right = (json.loads(p.read_text(encoding="utf-8")) for p in (before, after))
    if [a[0] for a in left] != [b[0] for b in right]:
        sys.stdout.write(f"other conversions: {len(left)} and {len(right)}\n")
        return 2
    pairs = list(zip(left, right, strict=True))
    # A legacy stream of torch lists storages by their addresses in memory: it is the same checkpoint in other bytes.
    other = sum(a[1] != b[1] for a, b in pairs)
    differ = [(a, b) for a, b in pairs if a[1] == b[1] and a[2] != b[2]]
    for a, b in differ[:20]:
        sys.stdout.write(f"{a[0]}: {a[2]}\n{' ' * len(a[0])}  {b[2]}\n")
    refused = sum(":" in a[2] for a in left)
    sys.stdout.write(f"{len(pairs)} conversions, {refused} of them refused; {other} left out, their sources differ\n")
    sys.stdout.write(f"{len(differ)} differ\n")
    return 1 if differ else 0


def main() -> int:
    """Digests of this checkout's outputs, or a comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=45, help="of each source format")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--bytes-only", action="store_true", help="leave texts out: warnings, reasons, messages")
    parser.add_argument("places", type=Path, nargs="*", help="checkpoints to convert too")
    asked = parser.parse_args()
    if asked.compare:
        return compare(*asked.compare)
    texts = not asked.bytes_only
    found = of_laws(asked.examples, texts=texts) + of_directories(asked.places, texts=texts)
    asked.out.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.write(f"{len(found)} conversions\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
