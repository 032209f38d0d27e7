"""What a reader who knows DeepSpeed and not us meets first: each line says one thing that is true, and what to do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from house.launchers import forget_launchers
from house.promises import command
from house.saves import make_save


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_launchers(monkeypatch, "RESHARD_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
    make_save(tmp_path / "run1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _fix(*words: str) -> tuple[str, str]:
    code, _, said = command(*words)
    assert code == 3, said
    return said.partition("\n")[0], said.partition("fix: ")[2].strip()


def test_paths_without_a_checkpoint(place: Path) -> None:
    (place / "empty").mkdir()
    assert command("convert", "run1", "weights", "--to", "safetensors", "-q")[0] == 0
    error, fix = _fix("inspect", "empty")
    assert error.endswith("empty is an empty directory")
    error, fix = _fix("inspect", "run2")
    assert (error.endswith("run2"), fix) == (True, "check the path: run1 is beside it")
    _, fix = _fix("inspect", "elsewhere/nothing")
    assert fix == "check the path"
    _, fix = _fix("inspect", ".")
    assert fix == f"name the checkpoint below it: reshard inspect {place}/run1; there are: run1, weights"


def test_a_tag_that_is_not_there_is_answered_with_the_one_most_like_it(place: Path) -> None:
    shutil.copytree(place / "run1" / "global_step3", place / "run1" / "global_step3_universal")
    _, fix = _fix("inspect", "run1", "--tag", "global_step5")
    assert fix == "name a complete checkpoint: --tag global_step3 (complete: global_step3, global_step3_universal)"
    shutil.copytree(place / "run1", place / "run1" / "zweights")  # a checkpoint, and no tag
    _, fix = _fix("inspect", "run1", "--tag", "zweight")
    assert "zweights" not in fix


def test_inspect_begins_with_what_can_be_done(place: Path) -> None:
    code, told, _ = command("inspect", "run1")
    lines = told.splitlines()
    assert (code, lines[1]) == (0, "  Resume on N GPUs:    reshard ensure run1 --dp N")
    assert "  Weights:             reshard convert run1 DST --to safetensors" in lines[:6]
    _, told, _ = command("inspect", "run1", "--tag", "global_step3")
    assert told.splitlines()[1].endswith("reshard ensure run1 --dp N --tag global_step3")
    for page in ((), ("--help",), ("convert", "--help")):
        code, told, _ = command(*page)
        assert told.find("reshard ensure ") != -1, told
        assert "--to universal" not in told[: told.find("reshard ensure ")]


def test_the_pointer_that_was_followed_is_named_if_it_is_not_latest(place: Path) -> None:
    assert "followed" not in command("inspect", "run1")[2]
    assert command("convert", "run1", "run1/global_step3_universal", "--to", "universal", "-q")[0] == 0
    assert "followed" not in command("inspect", "run1")[2]
    (place / "run1" / "latest").unlink()
    said_so = "followed `latest_universal`: run1 has no `latest`\n"
    assert said_so in command("inspect", "run1")[2]
    code, _, said = command("ensure", "run1", "--dp", "2", "--zero-stage", "2")
    assert (code, said_so in said) == (0, True)


def test_inspect_lists_the_state_weight_and_says_what_cannot_be(place: Path) -> None:
    _, told, _ = command("inspect", "run1")
    assert re.search(r"embed\.weight +\[29, 6\] +bfloat16 +weight, fp32, exp_avg, exp_avg_sq\n", told)
    assert "cannot become" not in told
    assert "  2 targets not possible: --all says why\n" in told
    _, every, _ = command("inspect", "run1", "--all")
    assert "  cannot become zero: --tp above 1: unknown how 10 parameters are split; give --family " in every
    assert "  cannot become zero: --pp above 1: the run was no pipeline; " in every
    reasons = [line.partition(": ")[2] for line in every.splitlines() if " become " in line]
    assert len(reasons) == len(set(reasons))
    assert ", 1 param group\n" in told


def test_drawings_are_named_and_both_tables_shown(place: Path) -> None:
    files = ("--svg", "moves.svg", "--html", "moves.html")
    _, told, said = command("inspect", "run1", *files)
    assert (said, "(deepspeed-zero2)" in told) == ("wrote moves.svg, moves.html\n", False)
    assert command("convert", "run1", "other/global_step3", "--to", "zero", "--dp", "3", "-q")[0] == 0
    _, told, said = command("inspect", "run1", *files, "--beside", "other")
    first, second = f"{place}/run1/global_step3 (deepspeed-zero2)\n", f"{place}/other/global_step3 (deepspeed-zero2)\n"
    assert 0 <= told.find(first) < told.find(second)


def test_another_name_of_a_target_is_said(place: Path) -> None:
    for typed, meant in (("hf", "safetensors"), ("fsdp", "dcp"), ("DCP", "dcp"), ("deepspeed", "zero")):
        said = command("plan", "run1", "w", "--to", typed, *(("--dp", "2") if meant == "zero" else ()))[2]
        assert (f"--to {typed}: taken as {meant}\n" in said) is (typed.lower() != meant), said
    assert "--to fsdp: taken as dcp\n" in command("ensure", "run1", "--to", "fsdp")[2]
    for exact in ("safetensors", "Safetensors"):
        assert "taken as" not in command("plan", "run1", "w", "--to", exact)[2]


def test_progress_and_reads_do_not_contradict_one_another(place: Path) -> None:
    _, told, _ = command("plan", "run1", "w", "--to", "safetensors")
    assert re.search(r"  reads [\d.]+ KiB of tensors, writes [\d.]+ KiB in 1 file\n  1 unit, ", told)
    _, _, said = command("convert", "run1", "w", "--to", "safetensors")
    assert re.search(r"(?m)^committing 0 B of [\d.]+ KiB written$", said)
    assert not re.search(r"(verifying|committing) \d+%", said)
    assert re.search(r"(?m)^read [\d.]+ KiB with gaps, wrote ", said)


def test_diff_with_weights_says_which_side_has_what(place: Path) -> None:
    assert command("convert", "run1", "weights", "--to", "safetensors", "-q")[0] == 0
    code, told, said = command("diff", "run1", "weights")
    assert code == 7
    assert "  only in A: counters and client state\n" in told
    assert "--weights-only" in told
    assert "planning" not in said
    code, told, _ = command("diff", "run1", "weights", "--weights-only")
    assert (code, "--weights-only" in told) == (0, False)
