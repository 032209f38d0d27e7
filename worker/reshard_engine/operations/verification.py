"""`reshard verify`: reads a target, or a sample of it, and compares it with its manifest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from reshard.errors import IntegrityError, printable
from reshard.models.jobs import VerifyProblem, VerifyReport
from reshard_engine.formats.sources import pointed_tag
from reshard_engine.integrity.file_check import Damage, TargetCheck, crc_of_range, size_problem
from reshard_engine.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, join, parent_and_name, read_bytes, save_directory

_THREADS = 4
_MAX_POINTER_BYTES = 1_024


def verify_target(
    target: Location, *, sample: float | None = None, should_stop: Callable[[], None] = lambda: None
) -> VerifyReport:
    """Compare a target with its manifest.

    Args:
        target: The directory that a conversion created.
        sample: Fraction of the bytes to read, in `(0, 1]`. The presence and size of every file are checked, and a
            random choice of its checksummed ranges, new for each call. None reads everything and compares the digests
            of tensors, too.
        should_stop: Called between reads; it raises to stop.

    Raises:
        IntegrityError: `integrity.no_manifest` without a manifest, `integrity.mismatch` if the manifest is damaged.
    """
    started = time.monotonic()
    manifest = read_manifest(target)
    if manifest is None:
        raise IntegrityError(
            "integrity.no_manifest",
            f"{printable(target.url)} has no {MANIFEST_NAME}",
            fix="name a directory that `reshard convert` wrote",
        )
    listing = target.files()
    check = TargetCheck(manifest, should_stop)
    if sample is None:
        check.read(target.store, listing, range(len(manifest.files)))
        check.conclude()
    else:
        _read_sample(check, target, listing, sample)
    problems = [*check.problems, *_strangers(manifest, listing), *_pointer(manifest, target)]
    return VerifyReport(
        target=target.url,
        files=len(manifest.files),
        tensors=sum(1 for t in manifest.tensors if t.xxh3) if sample is None else 0,
        read_bytes=check.read_bytes,
        sampled=sample,
        ok=not problems,
        problems=tuple(problems),
        seconds=time.monotonic() - started,
    )


def _read_sample(check: TargetCheck, target: Location, listing: Mapping[str, ObjectInfo], fraction: float) -> None:
    """Compare a random choice of the checksummed ranges, at least one, that makes up a fraction of the bytes."""
    files = check.manifest.files
    sound: list[tuple[int, tuple[int, int, int]]] = []
    for number, file in enumerate(files):
        if (problem := size_problem(file, listing.get(file.path))) is not None:
            check.problems.append(problem)
        else:
            sound += [(number, chunk) for chunk in file.chunks if chunk[1]]
    random.SystemRandom().shuffle(sound)
    wanted = fraction * sum(length for _, (_, length, _) in sound)
    chosen: list[tuple[int, tuple[int, int, int]]] = []
    while sound and (not chosen or check.read_bytes < wanted):
        chosen.append(sound.pop())
        check.read_bytes += chosen[-1][1][1]

    def read(choice: tuple[int, tuple[int, int, int]]) -> VerifyProblem | None:
        number, (offset, length, expected) = choice
        path = files[number].path
        crc = crc_of_range(target.store, listing[path], offset, length)
        if crc == expected:
            return None
        damage = Damage(number, offset, offset + length, crc, expected)
        # Only a whole reading finds the damaged tensor. A tensor that has the range to itself is named.
        held = check.ranges_in(damage)
        tensor = printable(check.manifest.tensors[held[0].tensor].fqn) if len(held) == 1 else None
        return VerifyProblem(
            path=printable(path), offset=offset, length_bytes=length, tensor=tensor, problem=damage.problem
        )

    with ThreadPoolExecutor(_THREADS) as pool:
        check.problems += [p for p in pool.map(read, chosen) if p is not None]


def _strangers(manifest: Manifest, listing: Mapping[str, ObjectInfo]) -> list[VerifyProblem]:
    known = {f.path for f in manifest.files} | {MANIFEST_NAME}
    return [
        VerifyProblem(path=printable(path), offset=None, length_bytes=None, problem="not in the manifest")
        for path in sorted(set(listing) - known)
    ]


def _pointer(manifest: Manifest, target: Location) -> list[VerifyProblem]:
    """Check the target's pointer. It may name another directory by now, but that directory must exist."""
    if manifest.pointer is None:
        return []
    tag = manifest.source.get("tag")
    save = save_directory(target.path, tag if isinstance(tag, str) else None)[0]
    info = target.store.stat(join(save, manifest.pointer))
    if info is None:
        return []
    if pointed_tag(Location(target.store, save, save), manifest.pointer) is not None:
        return []
    name = (
        read_bytes(target.store, info, 0, min(info.size_bytes, _MAX_POINTER_BYTES)).decode("utf-8", "replace").strip()
    )
    parent, last = parent_and_name(join(save, name))
    plain = not any(part in ("", ".", "..") for part in name.split("/"))
    if plain and last in target.store.list_directory(parent).directories:
        return []
    text = f"names {printable(name)!r}, which does not exist"
    return [VerifyProblem(path=manifest.pointer, offset=None, length_bytes=None, problem=text)]
