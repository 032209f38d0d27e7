"""What the command line says: one unit family, one meaning of a path, and no words of libraries."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from house.promises import command
from house.saves import DATA
from reshard.cli.bars import SpeedColumn

SOURCE = str(DATA / "zero2_tiny")


def test_verify_follows_latest_as_inspect_and_diff_do(tmp_path: Path) -> None:
    save = tmp_path / "run2"
    target = str(save / "global_step3")
    assert command("convert", SOURCE, target, "--to", "zero", "--dp", "3", "-q")[0] == 0
    assert command("inspect", str(save))[0] == 0
    assert command("diff", str(save), SOURCE, "-q")[0] == 0
    code, told, said = command("verify", str(save))
    assert code == 0, said
    assert told.startswith("ok: ")
    assert command("verify", target)[0] == 0
    (save / "latest").write_text("global_step4")
    code, _, said = command("verify", str(save))
    assert code == 3
    assert "global_step3" in said  # what is there


def test_a_path_without_anything_is_not_found(tmp_path: Path) -> None:
    code, _, said = command("verify", str(tmp_path / "nothing"))
    assert (code, "source.not_found" in said) == (3, True)


@pytest.mark.parametrize("speed_bytes", [900, 5 << 20, 3 << 30])
def test_a_bar_says_its_speed_in_the_units_of_its_size(speed_bytes: int) -> None:
    clock = iter(range(1000))
    console = Console(record=True, width=100, file=io.StringIO())
    with Progress(SpeedColumn(), console=console, auto_refresh=False, get_time=lambda: float(next(clock))) as bar:
        task = bar.add_task("", total=10 * speed_bytes)
        for _ in range(3):
            bar.advance(task, speed_bytes)
        shown = SpeedColumn().render(bar.tasks[0]).plain
    assert re.fullmatch(r"[\d.e+]+ (B|KiB|MiB|GiB)/s", shown), shown


def test_every_size_is_of_one_family() -> None:
    client = Path(__file__).parents[2] / "client"
    decimal = re.compile(r"TransferSpeedColumn|DownloadColumn|filesize\.decimal|\} ?[kMGT]B\b")
    found = [
        f"{p.name}:{n}"
        for p in client.rglob("*.py")
        for n, t in enumerate(p.read_text().splitlines(), 1)
        if decimal.search(t)
    ]
    assert found == []
