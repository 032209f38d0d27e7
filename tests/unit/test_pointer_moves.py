"""A target in the directory of a run: `latest` never leaves a newer checkpoint unsaid or unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from house.promises import command
from house.saves import DATA, make_save
from reshard_engine.storage.local import LocalStore
from reshard_engine.storage.protocol import Listing


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_save(tmp_path / "run")


def _add(run: Path, tag: str) -> None:
    """Another save of the run, which `latest` names."""
    shutil.copytree(run / "global_step3", run / tag)
    (run / "latest").write_text(tag)


def _to_zero(run: Path, name: str, *more: str) -> tuple[int, str, str]:
    return command("convert", str(run), str(run / name), "--to", "zero", "--dp", "3", "-q", *more)


def test_a_target_in_the_run_says_that_latest_moves_to_it(run: Path) -> None:
    words = (str(run), str(run / "global_step3_dp3"), "--to", "zero", "--dp", "3")
    move = "latest: global_step3 -> global_step3_dp3"
    code, _, said = command("plan", *words)
    assert code == 0
    assert f"warning: {move} " in said
    code, told, said = command("convert", *words, "--json")
    assert code == 0
    assert f"warning: {move} " in said
    assert any(w.startswith(move) for w in json.loads(told)["warnings"])
    assert (run / "latest").read_text() == "global_step3_dp3"
    manifest = json.loads((run / "global_step3_dp3" / "reshard.json").read_text())
    assert not any(move in w for w in manifest["warnings"])  # it says nothing about the target
    code, _, said = command("convert", *words, "--tag", "global_step3")
    assert (code, "already done" in said) == (0, True)


def test_latest_does_not_move_to_an_earlier_step(run: Path) -> None:
    _add(run, "global_step9")
    code, told, said = _to_zero(run, "global_step3_dp3", "--tag", "global_step3")
    assert (code, told) == (5, "")
    assert "request.target_exists" in said
    assert "global_step9" in said
    assert (run / "latest").read_text() == "global_step9"
    assert not [p.name for p in run.iterdir() if "dp3" in p.name]
    code, _, said = command("plan", str(run), str(run / "old"), "--to", "zero", "--dp", "3", "--tag", "global_step3")
    assert (code, "latest: global_step9 -> old, an earlier step" in said) == (0, True)
    code, _, said = _to_zero(run, "global_step3_dp3", "--tag", "global_step3", "--overwrite")
    assert code == 0
    assert "warning: latest: global_step9 -> global_step3_dp3, an earlier step" in said
    assert (run / "latest").read_text() == "global_step3_dp3"


@pytest.mark.parametrize(
    ("latest", "name", "refused"),
    [
        ("global_step10", "global_step9", True),
        ("global_step10", "global_step11", False),
        ("step-000010", "step-9_dp3", True),
        ("checkpoint-10", "global_step9", False),
    ],
)
def test_steps_are_numbers_of_tags_that_count_the_same(run: Path, latest: str, name: str, refused: bool) -> None:
    _add(run, latest)
    assert _to_zero(run, name, "--tag", "global_step3")[0] == (5 if refused else 0)
    assert (run / "latest").read_text() == (latest if refused else name)


def test_the_same_command_is_still_already_done_after_a_newer_save(run: Path) -> None:
    assert _to_zero(run, "global_step3_dp3")[0] == 0
    _add(run, "global_step9")
    assert _to_zero(run, "global_step3_dp3", "--tag", "global_step3")[0] == 0
    assert (run / "latest").read_text() == "global_step9"


def test_workers_that_convert_together_do_not_move_it_back_either(run: Path) -> None:
    _add(run, "global_step9")
    code, _, said = _to_zero(run, "global_step3_dp3", "--tag", "global_step3", "--workers", "1", "--worker", "0")
    assert (code, "request.target_exists" in said) == (5, True)
    assert (run / "latest").read_text() == "global_step9"


@pytest.mark.parametrize("before", ["best", "dp8", "global_step3_dp8"])
def test_names_without_an_order_only_warn(run: Path, before: str) -> None:
    _add(run, before)
    code, _, said = _to_zero(run, "dp3", "--tag", "global_step3")
    assert (code, f"warning: latest: {before} -> dp3 (" in said) == (0, True)


@pytest.mark.parametrize("content", ["gone", "../x", "x\ny", "a" * 2_000])
def test_a_pointer_to_nothing_is_replaced_as_before(run: Path, content: str) -> None:
    (run / "latest").write_text(content)
    code, _, said = _to_zero(run, "global_step3_dp3", "--tag", "global_step3")
    assert (code, "warning: latest:" in said) == (0, False)
    assert (run / "latest").read_text() == "global_step3_dp3"


def test_a_universal_target_in_the_run_has_its_own_pointer(run: Path) -> None:
    words = ("--to", "universal", "-q")
    code, _, said = command("convert", str(run), str(run / "global_step3_universal"), *words)
    assert (code, "warning: latest" in said) == (0, False)
    assert (run / "latest").read_text() == "global_step3"
    code, _, said = command("convert", str(run), str(run / "other_universal"), *words, "--tag", "global_step3")
    assert (code, "warning: latest_universal: global_step3_universal -> other_universal" in said) == (0, True)


def test_weights_have_no_pointer(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    code, _, said = command("convert", str(DATA / "zero2_tiny"), str(tmp_path / "w"), "--to", "safetensors", "-q")
    assert (code, "warning" in said) == (0, False)


@pytest.fixture
def desk(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: it holds a run and a note."""
    (run.parent / "note.txt").write_text("")
    monkeypatch.chdir(run.parent)
    return run.parent


@pytest.mark.parametrize(("to", "pointer"), [("zero", "latest"), ("universal", "latest_universal")])
def test_a_directory_of_other_things_gets_no_pointer(desk: Path, to: str, pointer: str) -> None:
    words = ("convert", "run", "o3", "--to", to, *(("--dp", "3") if to == "zero" else ()))
    code, _, said = command(*words)
    assert (code, pointer in {p.name for p in desk.iterdir()}) == (0, False)
    assert "tag='o3')" in said  # it loads without a pointer
    assert json.loads((desk / "o3" / "reshard.json").read_text())["pointer"] is None
    assert command("verify", "o3")[0] == 0
    assert "already done" in command(*words)[2]
    assert pointer not in {p.name for p in desk.iterdir()}
    code, _, said = command(*words, "--pointer")
    assert (code, "already done" in said, (desk / pointer).read_text()) == (0, True, "o3")


def test_an_empty_working_directory_gets_none_and_another_one_does(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (run.parent / name).mkdir()
    monkeypatch.chdir(run.parent / "here")
    for target in ("dp3", "../there/dp3", "../new/dp3"):
        assert command("convert", str(run), target, "--to", "zero", "--dp", "3", "-q")[0] == 0
    found = {p.parent.name for p in run.parent.glob("*/latest")}
    assert found == {"run", "there", "new"}


def test_other_tag_directories_make_a_save_directory(run: Path) -> None:
    (run / "latest").unlink()
    assert _to_zero(run, "dp3", "--tag", "global_step3")[0] == 0
    assert (run / "latest").read_text() == "dp3"


@pytest.mark.parametrize("name", ["o2", "checkpoint-5"])
def test_neither_earlier_outputs_nor_trainers_directories_are_tags(desk: Path, name: str) -> None:
    made = desk / name / "global_step5" if name.endswith("5") else desk / name
    for target in (made, desk / "o3"):
        assert command("convert", "run", str(target), "--to", "zero", "--dp", "3", "-q")[0] == 0
    assert not (desk / "latest").exists()


def test_a_pointer_is_written_or_left_out_when_asked(desk: Path) -> None:
    for flag, name in (("--pointer", "o3"), ("--no-pointer", "o4")):
        assert command("convert", "run", name, "--to", "zero", "--dp", "3", "-q", flag)[0] == 0
        assert (desk / "latest").read_text() == "o3"
    (desk / "run" / "latest").write_text("global_step3")
    assert _to_zero(desk / "run", "global_step9", "--no-pointer")[0] == 0
    assert (desk / "run" / "latest").read_text() == "global_step3"


def test_the_names_beside_a_target_are_listed_up_to_a_bound(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    listed = LocalStore.list_directory

    def counted(store: LocalStore, path: str, *, most: int | None = None) -> Listing:
        found = listed(store, path, most=most)
        if path == str(desk):
            asked.append(most)
            assert len(found.files) + len(found.directories) <= (most or 0)
        return found

    for number in range(1_100):
        (desk / f"n{number}").touch()
    monkeypatch.setattr(LocalStore, "list_directory", counted)
    assert command("convert", "run", "o3", "--to", "zero", "--dp", "3", "-q")[0] == 0
    assert asked
    (desk / "latest").write_text("o3")
    assert command("convert", "run", "o4", "--to", "zero", "--dp", "3", "-q")[0] == 0
    assert (desk / "latest").read_text() == "o4"
