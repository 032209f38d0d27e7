"""`reshard verify`: every byte of a target read again and compared with its manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from reshard.errors import IntegrityError, printable
from reshard.models import VerifyProblem, VerifyReport
from reshard_engine.execute.readback import crc_of_range
from reshard_engine.manifest import MANIFEST_NAME, ManifestFile, read_manifest
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo

_THREADS = 4


def verify_target(target: Location) -> VerifyReport:
    """Whether the target is what its manifest says.

    Raises:
        IntegrityError: `integrity.no_manifest` if there is none.
    """
    started = time.monotonic()
    manifest = read_manifest(target)
    if manifest is None:
        raise IntegrityError(
            "integrity.no_manifest",
            f"{printable(target.url)} has no {MANIFEST_NAME}",
            fix="name a directory that `reshard convert` wrote",
        )
    there = target.files()
    problems: list[VerifyProblem] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(partial(_check_file, target, there), manifest.files):
            problems += found
    known = {f.path for f in manifest.files} | {MANIFEST_NAME}
    for path in sorted(set(there) - known):
        problems.append(
            VerifyProblem(path=printable(path), offset=None, length_bytes=None, problem="not in the manifest")
        )
    return VerifyReport(
        target=target.url,
        files=len(manifest.files),
        read_bytes=sum(f.size_bytes for f in manifest.files),
        ok=not problems,
        problems=tuple(problems),
        seconds=time.monotonic() - started,
    )


def _check_file(target: Location, there: Mapping[str, ObjectInfo], file: ManifestFile) -> Sequence[VerifyProblem]:
    info = there.get(file.path)

    def problem(text: str, offset: int | None = None, length: int | None = None) -> VerifyProblem:
        return VerifyProblem(path=file.path, offset=offset, length_bytes=length, problem=text)

    if info is None:
        return [problem("missing")]
    if info.size_bytes != file.size_bytes:
        return [problem(f"{info.size_bytes} bytes, the manifest says {file.size_bytes}")]
    found: list[VerifyProblem] = []
    covered = 0
    for offset, length, expected in file.chunks:
        if offset != covered:
            return [problem("the manifest does not cover the file", covered, offset - covered)]
        crc = crc_of_range(target.store, info, offset, length)
        if crc != expected:
            found.append(problem(f"CRC-32 {crc:08x}, the manifest says {expected:08x}", offset, length))
        covered += length
    if covered != file.size_bytes:
        found.append(problem("the manifest does not cover the file", covered, file.size_bytes - covered))
    return found
