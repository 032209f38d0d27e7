"""Installs the wheels of a directory and this project into a directory, without a network and without pip.

    python bench/gpu_install.py .whl DIRECTORY

The wheels are those of `make gpu-wheels`. A wheel is a zip file, and unpacking is enough for a directory on PYTHONPATH:
entry points are read from the metadata, and programs of packages are started as `python -m`. pip takes several times as
long. The project is built by hatchling, which is one of the wheels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 12)
_BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
_DATA = re.compile(r"^[^/]+\.data/([^/]+)/")


def unpack(wheel: Path, site: Path) -> None:
    """Unpack a wheel with the permissions of its files. Scripts and headers are left out.

    Raises:
        ValueError: The wheel names a file outside the directory.
    """
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            data = _DATA.match(entry.filename)
            if entry.is_dir() or (data and data[1] not in {"purelib", "platlib"}):
                continue
            path = (site / _DATA.sub("", entry.filename)).resolve()
            if not path.is_relative_to(site.resolve()):
                raise ValueError(f"{wheel.name} names {entry.filename}, which is outside the directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(entry))
            if mode := entry.external_attr >> 16 & 0o777:
                path.chmod(mode | 0o600)


def build(site: Path, directory: Path) -> Path:
    """Build the wheel of this project with the hatchling of `site`; returns its path."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", _BUILD, str(directory)], cwd=ROOT, env=environment, check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def main() -> int:
    """Install; returns the exit status."""
    began, directory, site = time.monotonic(), Path(sys.argv[1]), Path(sys.argv[2])
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        print(
            f"{directory} has no wheels: run `make gpu-wheels` where there is a network, and bring the directory here"
        )
        return 1
    if sys.version_info[:2] != PYTHON:
        print(
            f"this is Python {sys.version.split()[0]}, and the wheels are for {'.'.join(map(str, PYTHON))}: set PYTHON"
        )
        return 1
    site.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        unpack(wheel, site)
    print(f"{len(wheels)} wheels unpacked after {time.monotonic() - began:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        unpack(build(site, Path(scratch)), site)
    print(f"this project installed after {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
