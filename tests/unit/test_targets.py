"""A target is declared once: its record makes help, completion, documents, docstrings, pages and errors."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import reshard.installed_formats
from house.promises import command
from reshard.choices import TargetFormat
from reshard.cli.flags import target_name
from reshard.cli.output import next_steps
from reshard.declared import declared_options, refuse_options_of_others
from reshard.errors import RequestError
from reshard.installed_formats import InstalledFormat, installed_formats, known_targets
from reshard.models.jobs import ConvertRequest
from reshard.targets import TARGETS, Load, Target
from reshard_service.pages import words

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from options_tables import cli_page

NEW = Target(
    name="row_files",
    label="Files of rows",
    contains="one file for each row, as row-loader loads them",
    use="Rows",
    also=("rows",),
    options=("dp",),
    needs=("dp",),
    tracker="latest",
    loads=(
        Load("rows.load_one({file})", having="*.rows", alone=True),
        Load("rows.load({dir})", having="*.rows", on_hub=True),
    ),
    before_load="in the shell: export ROWS=1",
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


@pytest.mark.usefixtures("_new_target")
def test_help_for_one_target_shows_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """By any of its names, before or after the flag of the help; options of all targets stay."""
    monkeypatch.setenv("COLUMNS", "120")
    for words_given in (("--help", "--to", "row_files"), ("--to=rows", "--help"), ("a", "b", "--to", "rows", "-h")):
        code, out, _ = command("convert", *words_given)
        assert code == 0
        assert re.search(r"^Format:\n  row_files  one file for each row", out, re.MULTILINE), words_given
        assert re.findall(r"^  (--\w+) ", out.partition("Target layout:\n")[2].partition("\n\n")[0], re.MULTILINE) == [
            "--dp"
        ]
        assert "--names " in out
        assert not re.search(r"--(tp|zero-stage|framework|ckpt-format|merge-adapter|max-shard-size) ", out)
    _, everything, _ = command("convert", "--help", "--to", "no_such_target")
    assert "Formats (--to):" in everything
    assert "--zero-stage" in everything


@pytest.mark.parametrize("name", sorted(known_targets()))
def test_help_shows_what_a_target_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    _, out, _ = command("convert", "--help", "--to", name)
    shown = {*re.findall(r"^  (?:-\w, )?(--[a-z-]+)", out, re.MULTILINE)}
    of_some = {o: declared_options()[o].flag for t in known_targets().values() for o in t.options}
    assert {o for o, flag in of_some.items() if flag in shown} == {*known_targets()[name].options}


@pytest.mark.usefixtures("_new_target")
def test_a_new_target_says_how_it_is_loaded() -> None:
    before = "in the shell: export ROWS=1"
    assert next_steps("row_files", "/r/t", ["a.rows", "x"]) == [before, "in the script: rows.load_one('/r/t/a.rows')"]
    assert next_steps("row_files", "/r/t", ["a.rows", "b.rows"]) == [before, "in the script: rows.load('/r/t')"]
    assert next_steps("row_files", "/r/t", ["x"]) == []
    copied = "copy s3://b/t to DIR/t of each node, for a directory DIR"
    assert next_steps("row_files", "s3://b/t", ["a.rows"]) == [
        copied, before, "in the script: rows.load_one('DIR/a.rows')",
    ]  # fmt: skip
    on_hub = next_steps("row_files", "hf://me/it@main", ["a.rows"])
    assert on_hub == ["in the script: rows.load('me/it', revision='main')"]


@pytest.mark.usefixtures("_new_target")
def test_a_new_target_refuses_what_it_does_not_take() -> None:
    """And nothing that every target takes; what it needs is asked for."""
    fields = {"source": "a", "target": "b", "to": "row_files"}
    for more, says in (
        ({"layout": {"dp": 2, "tp": 2}}, "--to row_files does not take --tp; it is for --to zero, megatron"),
        ({"dtype": "bf16"}, "--to row_files needs --dp: data-parallel ranks"),
    ):
        with pytest.raises(RequestError, match=says):
            refuse_options_of_others(ConvertRequest.model_validate({**fields, **more}))
    refuse_options_of_others(ConvertRequest.model_validate({**fields, "layout": {"dp": 2}, "dtype": "bf16"}))


def test_options_of_two_targets_are_for_none() -> None:
    fields = {"source": "a", "target": "b", "to": "universal", "layout": {"dp": 2}}
    request = ConvertRequest.model_validate({**fields, "options": {"weights": {"max_shard_bytes": 9}}})
    with pytest.raises(RequestError) as caught:
        refuse_options_of_others(request)
    assert caught.value.message == "--to universal does not take --max-shard-size, --dp"
    assert caught.value.fix == "leave out --max-shard-size, --dp, or each with a --to of its own"


def test_records_name_options_that_there_are() -> None:
    for target in known_targets().values():
        assert {*target.needs} <= {*target.options} <= {*declared_options()}, target.name


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
    odd = InstalledFormat("other", "other:Format", {"row_files": replace(NEW, options=("rows",), needs=())})
    assert _problem(odd, []) == "the record of its target names the option rows, which there is not"
