"""Single-bit flips over source, staged parts, target and manifest: found wherever a checksum covers.

Flips are drawn from one printed seed; `RESHARD_SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from house.measured import say
from house.requests import asked, needed_by
from house.seeds import run_seed
from integrity.covered import covered_spans
from reshard.choices import TargetFormat, VerifyLevel
from reshard.engine import load_engine
from reshard.errors import IntegrityError, ReshardError, SourceError
from reshard.models.jobs import ConvertRequest, Progress
from reshard.options import SourceSpec

DATA = Path(__file__).parent.parent / "data"
SEED = run_seed()
NAME = "global_step3_universal"
TARGET_FLIPS, SOURCE_FLIPS = 1_200, 500
BESIDE_FLIPS = [40, pytest.param(150, marks=pytest.mark.full)]
"""Flips of what a conversion has beside its target. Each takes two conversions: the long form, which has 2,000 flips
in all, is for nightly runs.
"""


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Draws of one test; the seed is printed when it fails."""
    print(f"RESHARD_SEED={SEED}")
    return random.Random(f"{SEED}:{request.node.name}")


def request_for(source: Path, target: Path, **options: Any) -> ConvertRequest:
    """A small conversion of several units."""
    options.setdefault("to", TargetFormat.UNIVERSAL)
    return asked(source=SourceSpec(url=str(source)), target=str(target), part_bytes=8 << 10, **options)


def flip(path: Path, at: int, bit: int) -> None:
    """Flip one bit of a file and leave its times as they were."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def draw(rng: random.Random, paths: list[Path]) -> tuple[Path, int, int]:
    """A bit of these files, every bit equally likely."""
    path = rng.choices(paths, weights=[p.stat().st_size for p in paths])[0]
    return path, rng.randrange(path.stat().st_size), rng.randrange(8)


def draw_in(rng: random.Random, spans: list[tuple[Path, int, int]]) -> tuple[Path, int, int]:
    """A bit of these parts of files (path, offset, length), every bit equally likely."""
    path, offset, length = rng.choices(spans, weights=[length for _, _, length in spans])[0]
    return path, offset + rng.randrange(length), rng.randrange(8)


def files_below(directory: Path) -> list[Path]:
    """Every file, in a fixed order."""
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.stat().st_size)


def content(directory: Path) -> dict[str, bytes]:
    """Every file but the manifest, which names the time."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in files_below(directory) if p.name != "reshard.json"}


@pytest.mark.parametrize("to", [t for t in TargetFormat if t is not TargetFormat.PEFT])
@pytest.mark.parametrize("level", list(VerifyLevel))
def test_every_flip_of_a_target_is_found(
    to: TargetFormat,
    level: VerifyLevel,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    rng: random.Random,
) -> None:
    """Target, manifest and pointer: our own output has no uncovered byte."""
    engine, target = load_engine(), tmp_path / NAME
    source = DATA / "zero2_tiny"
    if to is TargetFormat.MEGATRON:
        pytest.importorskip("torch")
        from house.megatron_runs import MegatronRun

        source = MegatronRun(tensor=2).save_torch_dist(tmp_path_factory.mktemp("source") / "run")
    engine.convert(request_for(source, target, to=to, verify=level, **needed_by(to)))
    assert engine.verify(str(target)).ok
    missed: list[tuple[str, int, int]] = []
    count = TARGET_FLIPS // (len(TargetFormat) * len(VerifyLevel))
    for _ in range(count):
        path, at, bit = draw(rng, files_below(tmp_path))
        flip(path, at, bit)
        try:
            report = engine.verify(str(target))
            named = any(p.path in str(path) and (p.offset is None or p.offset <= at) for p in report.problems)
            found = not report.ok and named
        except IntegrityError as error:
            found = error.code == "integrity.mismatch" and path.name == "reshard.json"
        if not found:
            missed.append((str(path), at, bit))
        flip(path, at, bit)
    say(f"flipped bits of a target ({to}, {level}): {count} of {count} found" if not missed else f"missed {missed}")
    assert missed == []
    assert engine.verify(str(target)).ok


def test_a_flip_in_a_tensor_names_file_tensor_and_range(tmp_path: Path) -> None:
    engine, target = load_engine(), tmp_path / "weights"
    engine.convert(request_for(DATA / "zero2_tiny", target, to=TargetFormat.SAFETENSORS))
    flip(target / "model.safetensors", (target / "model.safetensors").stat().st_size - 1, 3)
    (problem,) = [p for p in engine.verify(str(target)).problems if p.tensor == "wpe.weight" or p.tensor]
    assert problem.path == "model.safetensors"
    assert problem.tensor is not None
    assert problem.offset is not None
    assert problem.length_bytes


@pytest.mark.parametrize("name", ["zero2_tiny", "zero3_tiny"])
def test_flips_of_a_source_are_found_or_harmless(name: str, tmp_path: Path, rng: random.Random) -> None:
    """Under `--verify full` a covered flip ends in a typed error; an uncovered one changes no byte of the output."""
    engine = load_engine()
    source = shutil.copytree(DATA / name, tmp_path / "source")
    clean = tmp_path / "clean" / NAME
    engine.convert(request_for(source, clean, verify=VerifyLevel.FULL))
    expected = content(clean)
    paths = [p for p in files_below(source) if p.suffix == ".pt"]
    covered = {p: covered_spans(p) for p in paths}
    read = names_read(clean)
    checked = [(path, *span) for path in paths if path.name in read for span in covered[path]]
    outcomes = {"found": 0, "harmless": 0}
    for number in range(SOURCE_FLIPS // 2):
        # Every other flip is in a byte that a checksum covers, so that it must be found. The others are anywhere.
        path, at, bit = draw_in(rng, checked) if number % 2 else draw(rng, paths)
        flip(path, at, bit)
        target = tmp_path / f"t{number}" / NAME
        try:
            engine.convert(request_for(source, target, verify=VerifyLevel.FULL))
        except SourceError:
            outcomes["found"] += 1
        else:
            must = path.name in read and any(o <= at < o + n for o, n in covered[path])
            assert not must, f"bit {bit} of byte {at} of {path.name} was not found"
            assert content(target) == expected, f"bit {bit} of byte {at} of {path.name} changed the output"
            outcomes["harmless"] += 1
        shutil.rmtree(tmp_path / f"t{number}", ignore_errors=True)
        flip(path, at, bit)
    say(f"flipped bits of a source under --verify full ({name}): {outcomes}")


def names_read(target: Path) -> set[str]:
    """The source files that the manifest of a conversion names."""
    from reshard_engine.integrity.manifest import parse_manifest

    return {s.path for s in parse_manifest((target / "reshard.json").read_bytes()).sources}


@pytest.mark.parametrize("count", BESIDE_FLIPS)
def test_flips_of_staged_parts_are_found_before_the_commit(count: int, tmp_path: Path, rng: random.Random) -> None:
    """A bit that flips after it was written: `full` refuses to publish, and the next run writes it anew."""
    engine = load_engine()
    expected = _undisturbed(tmp_path)
    for number in range(count):
        target = tmp_path / f"t{number}" / NAME
        request = request_for(DATA / "zero2_tiny", target, verify=VerifyLevel.FULL)
        with pytest.raises(ReshardError) as caught:
            engine.convert(request, on_progress=once_in("verifying", lambda t=target: flip_staged(rng, t, "/zero/")))
        assert caught.value.code == "integrity.mismatch"
        assert not target.exists()
        engine.convert(request)
        assert content(target) == expected
        shutil.rmtree(tmp_path / f"t{number}")


@pytest.mark.parametrize("count", BESIDE_FLIPS)
def test_flips_between_two_attempts_do_no_harm(count: int, tmp_path: Path, rng: random.Random) -> None:
    """A bit that flips in staging or in the journal while nobody runs: the resumed run does not trust it."""
    engine = load_engine()
    expected = _undisturbed(tmp_path)
    for number in range(count):
        target = tmp_path / f"t{number}" / NAME
        request = request_for(DATA / "zero2_tiny", target, threads=1)
        looks = iter(range(rng.randrange(3, 9)))
        with pytest.raises(ReshardError, match="stopped"):
            engine.convert(request, should_stop=lambda looks=looks: next(looks, None) is None)
        flip_staged(rng, target)
        engine.convert(request)
        assert content(target) == expected
        assert engine.verify(str(target)).ok
        shutil.rmtree(tmp_path / f"t{number}")


def _undisturbed(tmp_path: Path) -> Mapping[str, bytes]:
    target = tmp_path / "undisturbed" / NAME
    load_engine().convert(request_for(DATA / "zero2_tiny", target))
    return content(target)


def flip_staged(rng: random.Random, target: Path, which: str = ".reshard-") -> None:
    """Flip a bit of what a running or stopped conversion has beside its target."""
    flip(*draw(rng, [p for p in files_below(target.parent) if ".reshard-" in str(p) and which in str(p)]))


def once_in(phase: str, act: Callable[[], None]) -> Callable[[Progress], None]:
    """A progress callback that does something when a phase begins."""
    done: list[bool] = []

    def on_progress(progress: Progress) -> None:
        if progress.phase == phase and not done:
            done.append(True)
            act()

    return on_progress
