"""Digests of plans, layouts and outputs: a change of the code that should change none of them is held to that.

    python tests/laws/output_digests.py            # compares this checkout with the record in tests/data
    python tests/laws/output_digests.py --record   # writes the record

The sources are those of the laws (`laws.drawing`), drawn with a fixed seed, and the real checkpoints beside the
project, where they are. Each is converted to every target. A line of the record has five texts: the source and the
target, a digest of the source's files, and the digests of the plan, of the layout and of the content, or the code of
the error that refuses the conversion. Pins (times of change, ETags) and places are left out of plans. The content is
every file and the pointer, without the manifest, which has times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from hypothesis.internal.conjecture import providers

from house.repository import DATA, REAL_CHECKPOINTS
from house.requests import asked, needed_by
from laws.drawing import SOURCES, TARGETS, trials
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.options import SourceSpec
from reshard_engine.operations.conversion import Conversion
from reshard_engine.plan.model import Plan

# Hypothesis 6.170 also draws the constants of the modules that are tested. A change of the code would draw other cases,
# and nothing would be compared.
providers._get_local_constants = lambda: providers._local_constants

RECORD = DATA / "output_digests.json"
SEED = 20_261_129
EXAMPLES = 2
"""Of each source format and target."""

Line = tuple[str, str, str, str, str]
"""Name, digest of the source, of the plan, of the layout and of the content."""


def of_files(files: Mapping[str, bytes]) -> str:
    """One digest over files by name."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    return digest.hexdigest()[:16]


def of_plan(plan: Plan) -> tuple[str, str]:
    """The digest of a plan without the pins of its source, and that of its layout."""
    objects = [[name, number, size] for name, number, size, _pin in plan.source["objects"]]
    return replace(plan, source={**plan.source, "objects": objects}).digest[:16], plan.layout_digest[:16]


def of_laws(source: int, target: int) -> list[Line]:
    """The lines of generated checkpoints of one source format, converted to one target."""
    source_format, oracle = SOURCES[source], TARGETS[target]
    if oracle.wants_full_state and not source_format.full:
        return []
    lines: list[Line] = []

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        trial = data.draw(trials(source_format, (oracle,)))
        name, files = f"{source_format.name} to {oracle.name}, {len(lines)}", of_files(trial.source_files)
        try:
            run = trial.reference
        except ReshardError as error:
            lines.append((name, files, error.code, "", ""))
        else:
            content = of_files({**run.files, **{f"../{n}": d for n, d in run.beside.items()}})
            lines.append((name, files, *of_plan(run.conversion.plan), content))

    draw()
    return lines


def of_checkpoint(name: str) -> list[Line]:
    """The lines of one real checkpoint: a directory, or an archive of directories."""
    place = REAL_CHECKPOINTS / name
    if place.is_dir():
        return [line for to in TargetFormat for line in _converted(name, place, to)]
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(place) as archive:
            archive.extractall(scratch, filter="data")
        places = sorted(Path(scratch).glob("*/ckpt")) or sorted(p for p in Path(scratch).glob("*/*") if p.is_dir())
        named = [(f"{name} {p.relative_to(scratch)}", p) for place in places for p in _readable(place)]
        return [line for n, p in named for to in TargetFormat for line in _converted(n, p, to)]


def _readable(place: Path) -> list[Path]:
    """The directory, or those of its steps and roles that are checkpoints, if it is a run."""
    try:
        load_engine().inspect(SourceSpec(url=str(place)))
    except ReshardError as error:
        if error.code in {"source.unknown_kind", "request.run_directory", "source.ambiguous"}:
            return [found for below in sorted(place.iterdir()) if below.is_dir() for found in _readable(below)]
    return [place]


def checkpoints() -> Iterator[str]:
    """The names of the real checkpoints."""
    for place in sorted(REAL_CHECKPOINTS.rglob("*")):
        name = place.relative_to(REAL_CHECKPOINTS).as_posix()
        if place.name in {"src", "mcore_tp2pp2dp2"} or (place.suffix == ".xz" and "scripts" not in name):
            yield name


def _converted(name: str, place: Path, to: TargetFormat) -> Iterator[Line]:
    source = of_files({p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()})
    name = f"{name} to {to}"
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "out" / "global_step7"
        target.parent.mkdir()
        fields = {"source": {"url": str(place)}, "target": str(target), "to": to, "opaque": "drop", **needed_by(to)}
        try:
            conversion = Conversion.prepare(asked(**fields))
            conversion.run(on_progress=None, should_stop=None)
        except ReshardError as error:
            yield name, source, error.code, "", ""
            return
        files = {p.relative_to(scratch).as_posix(): p.read_bytes() for p in Path(scratch).rglob("*") if p.is_file()}
        content = of_files({n: data for n, data in files.items() if not n.endswith("reshard.json")})
        yield name, source, *of_plan(conversion.plan), content


def every_line() -> list[Line]:
    """The lines of this checkout."""
    with ProcessPoolExecutor() as pool:
        calls: list[Any] = [pool.submit(of_checkpoint, name) for name in checkpoints()]
        calls += [pool.submit(of_laws, s, t) for s in range(len(SOURCES)) for t in range(len(TARGETS))]
        return [line for call in calls for line in call.result()]


def compared(before: list[Line], after: list[Line], say: Callable[[str], object]) -> bool:
    """Tell what differs; true if nothing does. Sources that differ are counted, not compared.

    A legacy stream of torch lists storages by their addresses in memory: it is the same checkpoint in other bytes.
    """
    there = {line[0]: line for line in after}
    missing = [line[0] for line in before if line[0] not in there]
    pairs = [(line, there[line[0]]) for line in before if line[0] in there]
    same_source = [(a, b) for a, b in pairs if a[1] == b[1]]
    differ = [(a, b) for a, b in same_source if a[2:] != b[2:]]
    for a, b in differ:
        parts = [what for what, x, y in zip(("plan", "layout", "content"), a[2:], b[2:], strict=True) if x != y]
        say(f"{a[0]}: {', '.join(parts)}: {' '.join(a[2:])} became {' '.join(b[2:])}")
    refused = sum(not a[4] for a, _ in same_source)
    say(f"{len(same_source)} conversions compared, {refused} of them refused: {len(differ)} differ")
    say(f"{len(pairs) - len(same_source)} have other sources, {len(missing)} of the record were not made here")
    return not differ


def main() -> int:
    """Compare with the record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record")
    chosen = parser.parse_args()
    lines = every_line()
    if chosen.record:
        RECORD.write_text("[\n" + ",\n".join(json.dumps(line, ensure_ascii=True) for line in lines) + "\n]\n")
        sys.stdout.write(f"{len(lines)} conversions recorded in {RECORD.name}\n")
        return 0
    before: list[Line] = [tuple(line) for line in json.loads(RECORD.read_text())]
    return 0 if compared(before, lines, lambda text: sys.stdout.write(f"{text}\n")) else 1


if __name__ == "__main__":
    sys.exit(main())
