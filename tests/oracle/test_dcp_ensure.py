"""The Trainer goes on with FSDP where DeepSpeed stopped, or the other way round, by one call: ``reshard.ensure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_driver import TIMEOUT_S, problems
from oracle.launcher import Worlds
from oracle.truth import Truth

STEPS = ("1", "2", "3", "4", "5", "6")
OLD, NEW = 2, 3


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    rest_full(
        [
            (kind, before, after)
            for kind in ("gpt2", "llama")
            for before, after in ((2, None), (3, None), (None, 2), (None, 3))
        ],
        ("gpt2", 3, None),
        ("gpt2", None, 2),
    ),
)
def test_the_trainer_changes_frameworks(
    kind: str, before: int | None, after: int | None, worlds: Worlds, tmp_path: Path
) -> None:
    """Stages of ZeRO; None is FSDP2."""
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    shared: dict[str, Any] = {"kind": kind, "timeout_s": TIMEOUT_S}
    function = "oracle.dcp_trainer:trainer"
    uninterrupted = worlds.run(function, world=OLD, folder=str(through), stage=before, **shared)[0]["losses"]
    checkpoint = through / "output" / "checkpoint-3"
    to = "dcp" if after is None else "zero"

    ranks = worlds.run(function, world=NEW, folder=str(resumed), stage=after, resume=str(checkpoint), to=to, **shared)

    assert len({rank["path"] for rank in ranks}) == 1
    assert Path(ranks[0]["path"]).parent == checkpoint / ".reshard"
    losses = ranks[0]["losses"]
    assert list(losses) == list(STEPS[3:])
    assert agree(tuple(losses.values()), tuple(uninterrupted[step] for step in STEPS[3:]), significant=6)
    assert len(set(uninterrupted.values())) == len(STEPS)
    truth, found = (
        Truth(folder / f"{stem}.safetensors", folder / f"{stem}.json")
        for folder, stem in ((through, "truth"), (resumed, "resumed"))
    )
    assert problems(truth, found, across=True) == []
