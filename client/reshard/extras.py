"""The command that installs this package again with another extra: what a `fix` names where an extra is missing.

The package is on no index, so the command names the clone from which it was installed, and the exact versions of that
clone's `constraints.txt`: without them, pip takes a torch that no test has seen, with gigabytes of CUDA libraries.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "https://github.com/reshard/reshard"


def install_line(extra: str) -> str:
    """Say how to install `extra` into the environment of this process, in one line for a POSIX shell.

    It names the directory from which pip installed this package, if that is still there, and else a new clone. pip
    notes the directory in `direct_url.json` (PEP 610; its specification as of November 2025).
    """
    found = shutil.which("pip")
    ours = found is not None and Path(found).parent == Path(sys.executable).parent
    pip = "pip" if ours else f"{shlex.quote(sys.executable)} -m pip"
    source = _directory()
    if source is None:
        return f"git clone {REPOSITORY} && {pip} install -c reshard/constraints.txt './reshard[{extra}]'"
    directory, editable = source
    what = shlex.quote(f"{directory}[{extra}]")
    return f"{pip} install -c {shlex.quote(f'{directory}/constraints.txt')} {'-e ' if editable else ''}{what}"


def _directory() -> tuple[Path, bool] | None:
    """The clone that this package was installed from, and whether its files are used where they are."""
    # Every command imports this module, and reading the metadata of packages takes longer than the start of one.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        noted = json.loads(distribution("reshard").read_text("direct_url.json") or "null")
        directory = Path(unquote(urlsplit(str(noted["url"])).path))
        editable = bool(noted["dir_info"].get("editable"))
    except (PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return (directory, editable) if (directory / "constraints.txt").is_file() else None
