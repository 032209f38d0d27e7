"""A target in the directory of a run: `latest` never leaves a newer checkpoint unsaid or unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from house.promises import command
from house.saves import DATA, make_save


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


def test_a_target_that_looks_like_a_save_directory_says_where_its_pointer_lands(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    words = ("--to", "zero", "--dp", "3")
    said_so = "run7 is the tag directory, and `latest` is written beside it: load_checkpoint("
    code, _, said = command("plan", "run", "run7", *words)
    assert (code, said_so in said) == (0, True)
    code, _, said = command("convert", "run", "run7", *words, "-q")
    assert (code, said_so in said) == (0, True)
    for usual in ("run8/global_step3", "run9/any", "global_step3_dp3"):
        code, _, said = command("convert", "run", usual, *words, "-q")
        assert (code, "tag directory" in said) == (0, False)


def test_weights_have_no_pointer(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    code, _, said = command("convert", str(DATA / "zero2_tiny"), str(tmp_path / "w"), "--to", "safetensors", "-q")
    assert (code, "warning" in said) == (0, False)
