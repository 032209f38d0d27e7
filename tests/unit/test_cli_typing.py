"""Values and names as people type them, colours, progress lines, and the step after a conversion."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from house.promises import command
from house.saves import DATA
from reshard import progress as bars
from reshard.choices import DTYPE_NAMES, WeightDtype
from reshard.cli import help_pages
from reshard.cli.flags import chosen
from reshard.cli.output import next_steps
from reshard.models.jobs import Progress
from reshard.option import format_duration
from reshard.progress import facts_of, line_of

SOURCE = str(DATA / "zero2_tiny")


class Terminal(io.StringIO):
    """A terminal that remembers what was written."""

    def isatty(self) -> bool:
        return True


# -- values and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("--to", "universl"), "universal"),
        (("--to", "safetensor5"), "safetensors"),
        (("--to", "universal", "--dtype", "bf61"), "bf16"),
        (("--to", "universal", "--verify", "ful"), "full"),
        (("--to", "universal", "--opaque", "kep"), "keep"),
    ],
    ids=str,
)
def test_a_value_that_is_almost_right_is_suggested(words: tuple[str, ...], meant: str) -> None:
    code, _, said = command("convert", "SRC", "DST", *words)
    assert code == 2
    assert f"did you mean {meant}?" in said


@pytest.mark.parametrize("name", ["safetensor", "zeroo", "universl"])
def test_a_misspelt_target_is_asked_back_and_nothing_written(name: str, tmp_path: Path) -> None:
    code, told, said = command("convert", SOURCE, str(tmp_path / "out"), "--to", name, "--dp", "2")
    assert (code, told, list(tmp_path.iterdir())) == (2, "", [])
    assert "did you mean " in said


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gguf", "--to safetensors --model-files DIR, then llama.cpp's convert_hf_to_gguf.py"),
        ("torchtitan", "--to dcp --framework torchtitan"),
        ("Accelerate", "--to dcp --framework accelerate (FSDP), or --to zero --dp N (DeepSpeed)"),
        ("zero3", "--to zero --zero-stage 3 --dp N"),
        ("megatron-deepspeed", "--to zero --dp N, or --to universal"),
    ],
)
def test_a_name_with_several_words_for_it_is_answered_with_them(name: str, fix: str, tmp_path: Path) -> None:
    code, told, said = command("convert", SOURCE, str(tmp_path / "out"), "--to", name)
    assert (code, told, list(tmp_path.iterdir())) == (2, "", [])
    assert f"fix: {fix}" in said


def test_a_value_like_no_other_lists_all() -> None:
    code, _, said = command("convert", "SRC", "DST", "--to", "cake")
    assert code == 2
    assert "did you mean" not in said
    assert "universal, safetensors, torch, zero" in said


@pytest.mark.parametrize(
    ("typed", "value"),
    [("float16", "fp16"), ("bfloat16", "bf16"), ("torch.float32", "fp32"), ("BF16", "bf16"), ("half", "fp16")],
)
def test_other_names_of_types(typed: str, value: str, tmp_path: Path) -> None:
    assert chosen(typed, list(WeightDtype), DTYPE_NAMES) == value
    code, told, said = command("plan", SOURCE, str(tmp_path / "out"), "--to", "safetensors", "--dtype", typed, "--json")
    assert code == 0, said
    direct = command("plan", SOURCE, str(tmp_path / "out"), "--to", "safetensors", "--dtype", value, "--json")
    assert json.loads(told)["digest"] == json.loads(direct[1])["digest"]


def test_a_command_that_is_almost_right_is_suggested() -> None:
    code, _, said = command("convrt")
    assert (code, "convert" in said) == (2, True)


def test_help_and_version_are_words() -> None:
    assert command("version") == command("--version")
    assert command("help", "jobs", "list") == command("jobs", "list", "--help")
    assert command("jobs", "ls", "--help") == command("jobs", "list", "--help")
    assert command("jobs", "inspect", "--help") == command("jobs", "show", "--help")
    assert command("webhooks", "rm", "--help") == command("webhooks", "remove", "--help")
    assert command("tokens", "rm", "--help") == command("tokens", "revoke", "--help")


def test_a_dry_run_is_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    words = (SOURCE, str(tmp_path / "out"), "--to", "safetensors")
    assert command("convert", *words, "--dry-run") == command("plan", *words)
    assert list(tmp_path.iterdir()) == []


# -- colours --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm"}, False, False),
    ],
    ids=str,
)
def test_errors_have_colour_where_the_terminal_has_it(
    environment: dict[str, str], terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    help_pages.complain("source.not_found", "nothing is there", "reshard inspect .")
    text = screen.getvalue()
    assert ("\x1b[" in text) is coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain == "error: source.not_found: nothing is there\nfix: reshard inspect .\n"


# -- progress -------------------------------------------------------------------------------------------------------

RUNNING = Progress(
    phase="running",
    bytes_done=3 << 29,
    bytes_total=3 << 30,
    bytes_kept=1 << 30,
    rate_bytes_per_s=300 << 20,
    eta_s=125.4,
)


def test_progress_says_share_rate_time_and_what_was_kept() -> None:
    assert facts_of(RUNNING) == "50%  1.5 GiB of 3 GiB  300 MiB/s  eta 2m05s  1 GiB kept"
    assert line_of("RUNNING", RUNNING).startswith("RUNNING 50%")
    assert line_of("QUEUED", None) == "QUEUED"
    assert [format_duration(s) for s in (0, 59.6, 61, 7620)] == ["0s", "1m00s", "1m01s", "2h07m"]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_bar_shows_every_fact_at_every_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("CI", "NO_COLOR", *bars._OFF_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    with bars.shown(quiet=False) as show:
        show("running", RUNNING)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    squeezed = re.sub(r"[\s━╸╺]", "", text)
    assert Console(file=screen).width == columns
    for fact in ("50%", "1.5GiBof3GiB", "300MiB/s", "eta2m05s", "1GiBkept"):
        assert fact in squeezed, text
    assert "…" not in text


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_a_dumb_terminal_gets_lines(terminal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", terminal)
    for name in ("CI", *bars._OFF_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    with bars.shown(quiet=False) as show:
        show("running", RUNNING)
    assert ("\x1b[" in screen.getvalue()) is (terminal == "xterm")


# -- the next step --------------------------------------------------------------------------------------------------


def test_the_next_step_is_said_on_stderr(tmp_path: Path) -> None:
    target = str(tmp_path / "run2" / "global_step3_universal")
    code, told, said = command("convert", SOURCE, target, "--to", "universal")
    assert (code, told) == (0, f"{target}\n")
    assert 'next: in the DeepSpeed config: "checkpoint": {"load_universal": true}' in said
    assert f"engine.load_checkpoint('{tmp_path}/run2', tag='global_step3_universal')" in said
    assert "next: " not in command("convert", SOURCE, target, "--to", "universal", "-q")[2]


def test_next_steps_by_target() -> None:
    assert next_steps("zero", "/r/step4", ["a.pt"]) == ["in the script: engine.load_checkpoint('/r', tag='step4')"]
    assert "from_pretrained('/w')" in next_steps("safetensors", "/w", ["config.json", "model.safetensors"])[0]
    assert "load_model(model, '/w/model.safetensors')" in next_steps("safetensors", "/w", ["model.safetensors"])[0]
    assert "load_checkpoint_in_model" in next_steps("torch", "/w", ["a.bin", "b.bin"])[0]
    once = iter(["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"])  # a generator, as the commands pass one
    assert next_steps("dcp", "/w", once) == ["in the script: accelerator.load_state('/w')"]
    assert "load_state_dict" in next_steps("torch", "/w", iter(["pytorch_model.bin"]))[0]
    assert next_steps("universal", "s3://b/r/step4", [])[0].startswith("copy s3://b/r/step4")
    assert next_steps("slim", "/x", ["a"]) == next_steps("raw_rows", "/x", ["a"]) == []


def test_what_a_safetensors_next_step_names_is_there(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    code, _, said = command("convert", SOURCE, str(target), "--to", "safetensors")
    assert code == 0
    found = re.search(r"load_model\(model, '([^']+)'\)", said)
    assert found
    assert Path(found[1]).is_file()
    shutil.rmtree(target)
