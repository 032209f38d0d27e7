"""A native layout over the wire: submitted to `reshard serve`, written by its executor, refused with the reason."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from house.repository import ROOT
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard.choices import JobState, RngPolicy, ZeroStage
from reshard.engine import load_engine
from reshard.errors import RequestError
from reshard.models.reports import DiffOptions
from reshard.options import DeepSpeedOptions, RunLayout, SourceSpec
from servers.process import served

TOKEN = "native"
SOURCE = str(ROOT / "tests" / "data" / "zero2_tiny")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[Client]:
    """A client of a service of its own."""
    with served(tmp_path_factory.mktemp("service"), TOKEN) as url, Client(url, token=TOKEN) as found:
        yield found


def test_a_layout_crosses_the_wire(client: Client, tmp_path: Path) -> None:
    target = tmp_path / "out" / "global_step3"
    layout = RunLayout(dp=3)
    job = client.submit(
        SOURCE, str(target), to="zero", layout=layout, zero_stage=ZeroStage.STAGE_3, rng=RngPolicy.DROP, dtype="fp32"
    )
    assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    request = client.get(job.id).request
    assert (request.layout, request.rng) == (layout, RngPolicy.DROP)
    assert request.options.of(DeepSpeedOptions) == DeepSpeedOptions(zero_stage=ZeroStage.STAGE_3)
    assert (tmp_path / "out" / "latest").read_text() == "global_step3"
    engine, there = load_engine(), SourceSpec(url=str(tmp_path / "out"))
    found = engine.inspect(there)
    assert (found.world["dp"], found.zero_stage) == (3, 3)
    # The weights are of another type, as asked; masters, moments and counters are the same.
    report = engine.diff(SourceSpec(url=SOURCE), there, DiffOptions())
    assert [d for d in report.differences if d.state in ("fp32", "exp_avg", "exp_avg_sq", "step")] == []


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({}, "add --dp N"),
        ({"layout": RunLayout(dp=2, tp=2)}, "--family"),
        ({"layout": RunLayout(dp=2, pp=2)}, "--pp 1"),
        ({"layout": RunLayout(dp=2, ep=2)}, "--ep 1"),
        ({"layout": RunLayout(dp=2), "family": "nobody"}, "gpt-megatron"),
    ],
    ids=["no layout", "never cut", "no pipeline", "no experts", "no family"],
)
def test_what_cannot_be_is_refused_at_once(
    options: dict[str, object], fix: str, client: Client, tmp_path: Path
) -> None:
    before = client.list().jobs
    with pytest.raises(RequestError) as refused:
        client.submit(SOURCE, str(tmp_path / "out" / "tag"), to="zero", **options)  # type: ignore[arg-type]
    assert refused.value.code in {"request.invalid", "request.unsatisfiable"}
    assert fix in refused.value.fix
    assert client.list().jobs == before
