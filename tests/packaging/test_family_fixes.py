"""Every error that is raised without a `fix` of its own was read beside the text of its family, and that text fits.

`make golden` writes the list anew: whoever raises such an error reads its line there, or gives the error a fix.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

from house.fixes import FOLDERS, text_of
from house.repository import ROOT
from reshard.errors import CODES, class_of

GOLDEN = Path(__file__).with_name("golden") / "family_fixes.txt"
KINDS = {class_of(code).__name__ for code in CODES}


def _without_fix(path: Path) -> list[str]:
    """The code, the family's text and the message of each error that a module makes without a fix."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    found: list[str] = []
    for call in calls:
        if not (isinstance(call.func, ast.Name) and call.func.id in KINDS and len(call.args) == 2):
            continue
        code = text_of(call.args[0])
        if code in CODES and not any(keyword.arg in ("fix", None) for keyword in call.keywords):
            found.append(f"{code}\t{class_of(code)(code, '').fix}\t{text_of(call.args[1])}")
    return found


def without_fix() -> list[str]:
    """Those of the whole product, in order."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "testing" not in path.parts]
    return sorted(line for path in files for line in _without_fix(path))


def test_the_family_text_of_every_error_without_a_fix_was_read() -> None:
    text = "\n".join(without_fix()) + "\n"
    if os.environ.get("RESHARD_GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "give the error a fix, or read its family's text beside its message: make golden"


def test_no_request_falls_back_but_to_the_help_of_its_command() -> None:
    """A request is the caller's to mend. Only a value that the model refuses has no fix but the help."""
    assert [line.split("\t")[2] for line in without_fix() if line.startswith("request.")] == ["{} {}"]


def test_an_error_without_a_fix_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'raise JobError("job.failed", f"it {x}")\nraise JobError("job.failed", "it", fix="wait")\n'
        'raise JobError("job.failed", "it", **more)\nraise KeyError("job.failed", "it")\n'
    )
    assert _without_fix(tmp_path / "a.py") == ["job.failed\treshard jobs list\tit {}"]
