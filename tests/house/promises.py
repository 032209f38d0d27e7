"""What `reshard inspect` promises, kept: every target that it calls possible is converted to, by the command line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from reshard.cli.main import run

_SIZES = 4
"""So many of the sizes of tensor, pipeline and expert parallelism are tried."""
_RANKS = (3,)
"""Beside the two of the example."""


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(words))
    return code, out.getvalue(), err.getvalue()


def broken_promises(
    source: Path | str, place: Path | str, *, tag: str | None = None, known: dict[str, str] | None = None
) -> list[str]:
    """Every command that `inspect` promises and that fails, and every one that it denies and that works.

    Args:
        source: The checkpoint: a directory, or an address in a store.
        place: Where conversions may write; in a store, what they have written stays there.
        tag: The tag, where the user has to name one.
        known: What stands for the words in upper case that only the user knows, such as `DIR`.
    """
    named = ("--tag", tag) if tag else ()
    code, out, err = command("inspect", str(source), "--json", *named)
    assert code == 0, err
    _, told, _ = command("inspect", str(source), *named)
    lines = re.findall(r"^  [A-Z][^:]*: +(reshard .+)$", told, re.MULTILINE)
    targets = json.loads(out)["targets"]
    wanted = dict.fromkeys(lines, True)
    base = f"reshard convert {shlex.quote(str(source))} DST"
    end = f" --tag {tag}" if tag else ""
    for target in targets:
        for flags in _flags_of(target):
            wanted[f"{base} {flags}{end}"] = bool(target["possible"])
    if not lines and any(t["possible"] for t in targets):
        return [f"inspect says what {source} can become and no command"]
    return [
        line
        for number, (line, works) in enumerate(wanted.items())
        if _works(line, f"{place}/promised-{number}", known or {}) is not works
    ]


def _flags_of(target: dict[str, Any]) -> list[str]:
    """The flags of the conversions that one line of `inspect` speaks of."""
    name, detail, example = target["name"], target["detail"], target.get("example", "")
    opaque = " --opaque drop" if "--opaque drop" in example or "--opaque drop" in detail else ""
    if not target["possible"]:
        return [f"--to {name}"] if name in ("universal", "safetensors", "torch") else []
    found = [example] if example else []
    if name == "zero --dp":
        stages = re.search(r"stages ([\w, ]+)", detail)
        assert stages, detail
        found += [f"--to zero --dp {n} --zero-stage {s}{opaque}" for s in stages[1].strip().split(", ") for n in _RANKS]
    elif name in ("zero --tp", "zero --pp", "zero --ep"):
        sizes = [int(n) for n in re.findall(r"\d+", re.split(r"[(;]|, if", detail)[0])][:_SIZES]
        axis = name.removeprefix("zero --")
        found += [f"--to zero --dp {n if axis == 'ep' else 1} --{axis} {n} --zero-stage 1{opaque}" for n in sizes]
    elif name in ("universal", "safetensors", "torch"):
        found.append(f"--to {name}{opaque}")
        found += [f"--to {name} --dtype bf16{opaque}"] if detail.startswith("any type") else []
    return found


def _works(line: str, place: str, known: dict[str, str]) -> bool:
    known = {"DST": f"{place}/global_step9", "N": "2", **known}
    words = [known.get(w, w) for w in shlex.split(line)]
    assert words.pop(0) == "reshard"
    words += ["--out", place] if words[0] == "ensure" else []
    code, _, err = command(*words, "--quiet")
    if "://" not in place:
        shutil.rmtree(place, ignore_errors=True)
    assert "internal.error" not in err, err
    return code == 0
