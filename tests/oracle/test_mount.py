"""DeepSpeed loads a mounted target as it loads a converted one: with `load_checkpoint`, and with `ds_to_universal`."""

from __future__ import annotations

from pathlib import Path

import pytest

from house.mounts import files_below, mounted
from oracle.cases import CASES
from oracle.conversions import agree
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert
from oracle.truth import differences
from reshard.options import RunLayout


@pytest.mark.parametrize(("name", "world"), [("z2_fp32", 3), ("z3_fp32", 1), ("z1_fp32", 4)])
def test_runs_go_on_from_a_mount(
    oracle: Oracle, trained: TrainedFactory, tmp_path: Path, name: str, world: int
) -> None:
    run = trained(name)
    # The CRC fields are zero: torch does not read them.
    with mounted(run.dir, tmp_path.resolve() / "mnt", "--to", "zero", "--dp", str(world)) as found:
        resumed = oracle.resume_native(CASES[name], found.place, tmp_path / "resumed", world=world)
        assert "error" not in found.said
    assert differences(run.truth, resumed.state) == []
    assert resumed.wrong_weights == []
    assert agree(resumed.losses, run.losses_after, significant=6)


def test_ds_to_universal_reads_a_mount(oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained("z2_fp32")
    # It copies the file of the model as it is, with the CRC fields.
    words = ("--to", "zero", "--dp", "3", "--exact-crcs")
    with mounted(run.dir, tmp_path.resolve() / "mnt", *words) as found:
        assert oracle.peer_universal(found.target, tmp_path / "of-mount" / "universal") is None
    convert(run.dir, tmp_path / "run2" / run.tag, "zero", layout=RunLayout(dp=3))
    assert oracle.peer_universal(tmp_path / "run2" / run.tag, tmp_path / "of-files" / "universal") is None
    assert files_below(tmp_path / "of-mount") == files_below(tmp_path / "of-files")
