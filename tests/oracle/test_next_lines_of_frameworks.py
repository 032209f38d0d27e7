"""The `next:` lines of `reshard convert --to dcp --framework ...` are run as printed, by the frameworks' own trainers.

The state that each of them begins with is the source's, bit for bit, and its next three losses are those of the
uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from house.printed_lines import PLACES, converted
from house.promises import command
from house.saves import DATA
from house.shared import made_once
from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_cases import RUNS, FsdpRun, Mesh
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle, Job, Saved, problems, zero_run
from oracle.fixtures import SavedFactory
from oracle.launcher import Worlds
from oracle.truth import Resumed, Truth
from reshard.dcp_options import Framework

RANKS = Mesh(3)
"""Those that go on; sources have two or four."""
LINES = {
    Framework.STATE_DICT: "dcp.load(state_dict, checkpoint_id={})",
    Framework.TORCHTITAN: "dcp.load(state_dict, checkpoint_id={})",
    Framework.ACCELERATE: "accelerator.load_state({})",
    Framework.TRAINER: "trainer.train(resume_from_checkpoint={})",
    Framework.LIGHTNING: "trainer.fit(model, ckpt_path={})",
}
"""The lines that are run here."""


@pytest.fixture
def line(target: str, tmp_path: Path) -> Callable[..., str]:
    """`line(source, framework, *flags)`: what a conversion prints for a script, with its files copied if it says so."""

    def convert(source: Path, framework: Framework, *flags: str) -> str:
        printed = converted(source, target, tmp_path, "--to", "dcp", "--framework", framework, *flags)
        place = target if target == str(tmp_path / "out") else str(printed.directory)
        assert printed.call == LINES[framework].format(repr(place))
        return printed.call

    return convert


def assert_goes_on(truth: Truth, losses: tuple[float, ...], resumed: Resumed | str, *, across: bool = False) -> None:
    """The state that was loaded is the truth, optimizer and counters with it; the next losses are these."""
    assert isinstance(resumed, Resumed), resumed
    assert problems(truth, resumed.state, across=across) == []
    assert {"fp32", "exp_avg", "exp_avg_sq"} <= resumed.state.kinds
    assert set(resumed.state.step.values()) == {3.0}
    assert agree(resumed.losses, losses, significant=6)
    assert len(set(losses)) == 3


def through(source: Saved, framework: Framework, folder: Path) -> Path:
    """The source under the keys of another framework, so that nothing of its own directory comes along."""
    words = ("--to", "dcp", "--framework", framework)
    code, _, err = command("convert", str(source.path()), str(folder / "between"), *words)
    assert code == 0, err
    return folder / "between"


_TORCH = [
    (framework, grammar, kind, place)
    for framework, grammar, kind in (
        (Framework.STATE_DICT, "nested", "titan"),
        (Framework.TORCHTITAN, "flat", "nested"),
    )
    for place in PLACES
]


@pytest.mark.parametrize(
    ("framework", "grammar", "kind", "target"), rest_full(_TORCH, _TORCH[0], _TORCH[3]), indirect=["target"]
)
def test_torch_resumes_by_the_line(
    framework: Framework,
    grammar: str,
    kind: str,
    saved: SavedFactory,
    fsdp: FsdpOracle,
    line: Callable[..., str],
    tmp_path: Path,
) -> None:
    source = saved("fsdp2")
    call = line(source.path(kind), framework)
    job = Job(source.run.on(RANKS), grammar, tmp_path / "not read", tmp_path / "resumed", line=call)
    (resumed,) = fsdp.resume_all([job])
    assert_goes_on(source.truth, source.losses_after, resumed)


@pytest.mark.parametrize("target", rest_full(PLACES, "s3"), indirect=True)
def test_accelerate_resumes_by_the_line(
    saved: SavedFactory, fsdp: FsdpOracle, line: Callable[..., str], tmp_path: Path
) -> None:
    """With FSDP2, where it stopped with DeepSpeed's ZeRO-2."""
    source = saved(zero_run(2, RUNS["fsdp2"], 4), "zero")
    call = line(source.path(), Framework.ACCELERATE)
    resumed = fsdp.resume_by_line("accelerate", RUNS["fsdp2"].on(RANKS), call, tmp_path / "resumed")
    assert_goes_on(source.truth, source.losses_after, resumed, across=True)


@pytest.mark.parametrize(
    ("name", "flags", "target"),
    rest_full(
        [
            ("fsdp1", (), "local"),
            ("fsdp1", (), "s3"),
            ("fsdp2_tp", ("--target-model-key", "state_dict"), "local"),
            ("fsdp2_tp", ("--target-model-key", "state_dict"), "s3"),
        ],
        ("fsdp1", (), "local"),
        ("fsdp2_tp", ("--target-model-key", "state_dict"), "s3"),
    ),
    indirect=["target"],
    ids=["FSDPStrategy-local", "FSDPStrategy-s3", "ModelParallelStrategy-local", "ModelParallelStrategy-s3"],
)
def test_lightning_resumes_by_the_line(
    name: str,
    flags: tuple[str, ...],
    saved: SavedFactory,
    fsdp: FsdpOracle,
    line: Callable[..., str],
    tmp_path: Path,
) -> None:
    source = saved(name, "lightning")
    call = line(through(source, Framework.ACCELERATE, tmp_path), Framework.LIGHTNING, *flags)
    resumed = fsdp.resume_by_line("lightning", source.run.on(RANKS), call, tmp_path / "resumed")
    assert_goes_on(source.truth, source.losses_after, resumed)


@pytest.mark.parametrize(
    ("takes_files", "target"),
    rest_full([(takes, place) for takes in (False, True) for place in PLACES], (False, "local"), (True, "s3")),
    indirect=["target"],
)
def test_the_trainer_resumes_by_the_line(
    takes_files: bool,
    worlds: Worlds,
    fsdp: FsdpOracle,
    line: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    """With FSDP2, where it stopped with DeepSpeed's ZeRO-3; with `--trainer-files`, its own scheduler comes along."""

    def train(folder: Path) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"folder": str(folder), "kind": "gpt2", "stage": 3, "timeout_s": TIMEOUT_S}
        losses: dict[str, Any] = worlds.run("oracle.dcp_trainer:trainer", world=2, **kwargs)[0]["losses"]
        return losses

    folder, losses = made_once(tmp_path_factory, "trainer-gpt2-zero3", train)
    source = folder / "output" / "checkpoint-3"
    call = line(source, Framework.TRAINER, *(("--trainer-files", str(source)) if takes_files else ()))
    resumed = fsdp.resume_by_line("trainer", FsdpRun("gpt2", mesh=RANKS), call, tmp_path / "resumed")
    truth = Truth(folder / "truth.safetensors", folder / "truth.json")
    if not takes_files:
        scheduler = resumed.state.meta["lr_scheduler"]
        assert scheduler.pop("last_batch_iteration") == 2  # a count of DeepSpeed's schedulers
        assert scheduler.pop("_scale_fn_custom") is None  # an entry that CyclicLR asks for
        scheduler["_last_lr"] = truth.meta["lr_scheduler"]["_last_lr"]  # the next step sets it
    assert_goes_on(truth, tuple(losses[step] for step in ("4", "5", "6")), resumed, across=True)


def test_no_other_framework_has_a_line(tmp_path: Path) -> None:
    """torchtune loads no distributed checkpoint."""
    assert set(Framework) - set(LINES) == {Framework.TORCHTUNE}
    words = ("--to", "dcp", "--framework", Framework.TORCHTUNE)
    code, _, err = command("convert", str(DATA / "zero2_tiny"), str(tmp_path / "out"), *words)
    assert code != 0
    assert "next:" not in err
