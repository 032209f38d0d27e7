"""`reshard.deepspeed.load_checkpoint` from an object store: what all ranks load comes once over the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from house.measured import say
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.truth import Resumed, differences, meta_differences
from servers.s3 import S3Server


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("z2_bf16", 3),
        pytest.param("z0_fp32", 2, marks=pytest.mark.full),
        pytest.param("z3_bf16", 2, marks=pytest.mark.full),
    ],
)
def test_a_run_is_loaded_from_a_store(
    name: str, world: int, trained: TrainedFactory, oracle: Oracle, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    run = trained(name)
    s3.upload(run.dir, bucket, "run")
    case = replace(run.case, elastic=False, zip_files=True, writer=None)
    results = oracle.worlds.run(
        "oracle.direct_stores:resume",
        world=world,
        case=case.to_json(),
        url=f"s3://{bucket}/run",
        env=s3.env(),
        out=str(tmp_path),
    )
    loaded = Resumed.of(tmp_path, ()).state
    assert differences(run.truth, loaded) == []
    assert meta_differences(run.truth, loaded) == []
    # At ZeRO-3 no file is of several ranks.
    assert {r["windows"] > 3 for r in results} == {case.stage != 3}


def test_traffic_does_not_grow_with_the_ranks(oracle: Oracle, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    oracle.worlds.run("oracle.direct_stores:save", world=2, folder=str(tmp_path / "run"))
    s3.upload(tmp_path / "run", bucket, "run")
    target = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*.pt"))
    for world in (2, 4, 8):
        results = oracle.worlds.run("oracle.direct_stores:load", world=world, url=f"s3://{bucket}/run", env=s3.env())
        read = sum(r["read"] for r in results)
        say(f"direct load from a store on {world} ranks: {read / target:.3f} times the bytes of the target")
        assert target * 0.9 < read < target * 1.1
