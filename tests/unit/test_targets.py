"""A target is declared once: its record makes help, completion, documents, docstrings, pages and errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import reshard.installed_formats
from house.promises import command
from reshard.choices import TargetFormat
from reshard.cli.flags import target_name
from reshard.installed_formats import InstalledFormat, installed_formats, known_targets
from reshard.targets import TARGETS, Target
from reshard_service.pages import words

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from options_tables import cli_page

NEW = Target(
    name="row_files",
    label="Files of rows",
    contains="one file for each row, as row-loader loads them",
    use="Rows",
    also=("rows",),
    is_tag=True,
    ending="in_rows",
)


@pytest.fixture
def _new_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with one more target."""
    more = (*installed_formats(), InstalledFormat("row_files", "row_files:Format", {"row_files": NEW}))
    monkeypatch.setattr(reshard.installed_formats, "installed_formats", lambda: more)


def test_the_records_are_in_the_order_of_the_enumeration() -> None:
    assert [t.name for t in TARGETS] == [t.value for t in TargetFormat]


def test_no_name_means_two_targets() -> None:
    named = [name for t in known_targets().values() for name in (t.name, *t.also)]
    assert len(named) == len({*named})
    assert all(t.label and t.contains and not t.contains.endswith(".") for t in known_targets().values())


@pytest.mark.usefixtures("_new_target")
def test_a_new_target_is_in_the_help_and_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("convert", "plan", "submit", "mount"):
        code, out, _ = command(name, "--help")
        assert code == 0
        assert "  row_files            one file for each row, as row-loader loads them.\n" in out, name
    from reshard.cli.flags import _complete_target  # pyright: ignore[reportPrivateUsage]

    assert _complete_target("ro") == ["row_files"]


@pytest.mark.usefixtures("_new_target")
def test_a_new_target_is_in_documents_and_docstrings() -> None:
    assert "| `row_files` | one file for each row, as row-loader loads them | `rows` |\n" in cli_page()
    from reshard.functions import _targets  # pyright: ignore[reportPrivateUsage]

    assert _targets().endswith(", `row_files`.")


def test_docstrings_name_every_target() -> None:
    listed = "one of " + ", ".join(f"`{name}`" for name in known_targets())
    assert all(listed in (function.__doc__ or "") for function in (reshard.convert, reshard.plan))


@pytest.mark.usefixtures("_new_target")
def test_a_new_target_is_in_the_dashboard() -> None:
    assert words.target_name("row_files") == "Files of rows"
    assert words.worded("choose --to row_files") == "choose “Files of rows”"


def test_every_target_has_a_name_for_people() -> None:
    assert all(words.target_name(name) == target.label for name, target in known_targets().items())
    assert words.target_name("nobody_knows_it") == "nobody_knows_it"


@pytest.mark.usefixtures("_new_target")
def test_a_new_target_is_in_errors_and_takes_its_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert target_name("rows") == "row_files"
    assert "--to rows: taken as row_files" in capsys.readouterr().err
    with pytest.raises(Exception, match="row_files"):
        target_name("row_file")


def test_two_records_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.installed_formats import _problem  # pyright: ignore[reportPrivateUsage]

    other = InstalledFormat("other", "other:Format", {"not_its_name": NEW})
    assert _problem(other, []) == "the record of its target not_its_name has another name"
    assert (
        _problem(InstalledFormat("other", "other:Format", {"zero": ""}), []) == "another format writes the target zero"
    )
