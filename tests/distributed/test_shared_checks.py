"""Checks are handed out like units: each worker reads its part, nothing is checked twice, and all say the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_zero_checkpoint

from distributed import many
from distributed.many import Ended, convert_together
from distributed.test_workers import contents, strays
from house.measured import say
from house.sources import zero_source
from reshard.api.wire import convert_request
from reshard.engine import load_engine
from reshard.errors import SourceError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.distributed.checks import AGREEMENTS, FILES, GATHERING, SOURCE, CheckItem
from reshard_engine.distributed.session import SessionMember
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.operations.shared_checks import FullChecks
from servers.stores import ObjectServer

WORKERS = 4
LARGEST = 0.1
"""The largest part of the checks' cost that one check may have: four workers of one pace then divide it evenly."""
PARAMETERS = [(f"layer.{n}.weight", (256, 257)) for n in range(16)] + [("embed.weight", (2048, 256))]
NORMS = [(f"layer.{n}.norm", (512,)) for n in range(12)]
COPIED = "default: column\ntp_replicated_parameter_patterns: ['.*norm.*']\n"
TARGETS: dict[str, dict[str, Any]] = {
    "universal": {},
    "zero": {"dp": 6},
    "safetensors": {"max_shard_bytes": 256 << 10},
}


source = zero_source(PARAMETERS, stage=2, ranks=12)
"""A ZeRO-2 checkpoint of twelve ranks with 18 MB."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two tensor-parallel ranks, which both hold the norms."""
    directory = tmp_path_factory.mktemp("parts")
    write_zero_checkpoint(directory / "run", [*PARAMETERS[:4], *NORMS], stage=2, ranks=2)
    options = {"dp": 1, "tp": 2, "rules": COPIED}
    load_engine().convert(request_for(directory / "run", directory / "parts", "zero", options))
    return directory / "parts"


@pytest.fixture
def nobody_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a worker may be silent for longer than a short lease: others would make its checks again."""
    monkeypatch.setattr(many, "LEASE_S", 100.0)


def request_for(source: Path | str, target: Path | str, to: str, options: Mapping[str, Any]) -> ConvertRequest:
    wanted = {"part_bytes": 256 << 10, "threads": 2, "verify": "full", "server_copy": "never", **options}
    return convert_request(SourceSpec(url=str(source)), str(target), to, wanted)


def manifest_facts(text: bytes) -> dict[str, Any]:
    """A manifest without its times: local pins have one, and so does its seal."""
    facts = json.loads(text)
    for name in ("created_at", "sha256"):
        facts.pop(name)
    for file in facts["files"]:
        file.pop("pin")
    return facts


def judge_shares(ended: Sequence[Ended], alone: Ended, what: str) -> None:
    """The workers read together what one reads alone, and each makes checks, none of which is a large part of all.

    How the workers divide the rest depends on the pace of the machine: it is printed.
    """
    for place in ("source", "target"):
        read, plain = [e.read_bytes.get(place, 0) for e in ended], alone.read_bytes[place]
        megabytes = [round(r / 1e6, 1) for r in read]
        say(f"--verify full, {what}: MB read of the {place}: alone {plain / 1e6:.1f}, workers {megabytes}")
        # Each worker reads the source's metadata, and a block that ends in another file is read there again.
        assert 0.95 * plain <= sum(read) <= 1.1 * plain + len(ended) * (3 << 20)
    checks = Counter(c for e in ended for c in e.checks)
    assert {wave for wave, _ in checks} >= {SOURCE, FILES, GATHERING}
    assert max(checks.values()) == 1, "something was checked twice"
    costs = [cost for e in ended for cost in e.costs]
    say(f"--verify full, {what}: shares of the checks {[round(sum(e.costs) / sum(costs), 2) for e in ended]}")
    assert all(e.checks for e in ended), "a worker made no checks"
    assert max(costs) <= LARGEST * sum(costs), "a worker that is given one check cannot keep the others waiting"


@pytest.mark.usefixtures("nobody_dies")
@pytest.mark.parametrize(
    "to", ["zero", *(pytest.param(t, marks=pytest.mark.full) for t in ("universal", "safetensors"))]
)
def test_each_worker_reads_its_part_on_a_directory(to: str, source: Path, tmp_path: Path) -> None:
    (plain,) = convert_together(request_for(source, tmp_path / "alone", to, TARGETS[to]), tmp_path / "plain", 0)
    ended = convert_together(
        request_for(source, tmp_path / "together", to, TARGETS[to]), tmp_path / "said", WORKERS, meet=True
    )
    assert [e.status for e in ended] == [0] * WORKERS, [e.result for e in ended]
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")
    alone, together = ((tmp_path / name / MANIFEST_NAME).read_bytes() for name in ("alone", "together"))
    assert manifest_facts(together) == manifest_facts(alone)
    assert strays(tmp_path) == []
    judge_shares(ended, plain, f"{to} on a directory")


@pytest.mark.usefixtures("nobody_dies")
@pytest.mark.parametrize(
    "to", ["universal", *(pytest.param(t, marks=pytest.mark.full) for t in ("zero", "safetensors"))]
)
def test_each_worker_reads_its_part_in_an_object_store(
    to: str, source: Path, tmp_path: Path, store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = store.new_bucket()
    store.upload(source, bucket, "run")
    root = f"{store.scheme}://{bucket}"
    for name, value in store.env().items():
        monkeypatch.setenv(name, value)
    options = {**TARGETS[to], "part_bytes": 5 << 20}
    (plain,) = convert_together(request_for(f"{root}/run", f"{root}/alone", to, options), tmp_path / "plain", 0)
    shared = request_for(f"{root}/run", f"{root}/together", to, options)
    ended = convert_together(shared, tmp_path / "said", WORKERS, meet=True)
    assert [e.status for e in ended] == [0] * WORKERS, [e.result for e in ended]
    alone, together = (store.read_all(bucket, name) for name in ("alone/", "together/"))
    assert manifest_facts(together.pop(MANIFEST_NAME)) == manifest_facts(alone.pop(MANIFEST_NAME))
    assert together == alone
    judge_shares(ended, plain, f"{to} on {store.scheme}")


# -- failures ----------------------------------------------------------------------------------------------


def failed_alike(ended: Sequence[Ended], code: str, target: Path) -> None:
    """All workers ended with one error, and nothing is readable."""
    assert [e.status for e in ended] == [3] * len(ended), [e.result for e in ended]
    assert {e.result["code"] for e in ended} == {code}
    assert len({e.result["detail"] for e in ended}) == 1
    assert not target.exists()


def test_a_damaged_source_byte_is_told_by_all_workers(tmp_path: Path) -> None:
    write_zero_checkpoint(tmp_path / "run", PARAMETERS, stage=2, ranks=4)
    for path in sorted(tmp_path.rglob("*rank_[13]*optim_states.pt")):
        flip(path)
    with pytest.raises(SourceError) as alone:
        load_engine().convert(request_for(tmp_path / "run", tmp_path / "alone", "universal", {}))
    ended = convert_together(
        request_for(tmp_path / "run", tmp_path / "together", "universal", {}), tmp_path / "said", WORKERS
    )
    failed_alike(ended, "zip.crc", tmp_path / "together")
    # The first damage that is met ends a run: it names one of the records, or both.
    for text in (ended[0].result["detail"], alone.value.message):
        assert re.search(r"not match the CRC-32 in the archive: bf16_zero_pp_rank_[13]_", text), text


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def test_a_damaged_target_byte_is_told_by_all_workers(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "together"

    def disturb(_: int) -> None:
        real = SessionMember.open_checks

        def open_checks(self: SessionMember, name: str, text: bytes) -> None:
            (staging,) = tmp_path.glob(f".{target.name}.reshard-" + "?" * 16)
            flip(staging / "zero" / "embed.weight" / "exp_avg.pt")
            real(self, name, text)

        SessionMember.open_checks = open_checks  # type: ignore[method-assign]

    ended = convert_together(request_for(source, target, "universal", {}), tmp_path / "said", WORKERS, disturb=disturb)
    failed_alike(ended, "integrity.mismatch", target)
    assert "embed.weight" in ended[0].result["detail"]


@pytest.mark.usefixtures("nobody_dies")
@pytest.mark.parametrize("replicas", ["error", "first"])
def test_a_disagreement_is_told_by_all_workers(replicas: str, parts: Path, tmp_path: Path) -> None:
    shutil.copytree(parts, tmp_path / "parts")
    (damaged,) = tmp_path.rglob("*mp_rank_01_optim_states.pt")
    damage_norms(damaged)
    options = {"replicas": replicas, "verify": "default"}
    alone = request_for(tmp_path / "parts", tmp_path / "alone", "universal", options)
    ended = convert_together(
        request_for(tmp_path / "parts", tmp_path / "together", "universal", options), tmp_path / "said", WORKERS
    )
    compared = Counter(c for e in ended for c in e.checks)
    assert {wave for wave, _ in compared} == {AGREEMENTS}
    assert max(compared.values()) == 1
    assert sum(1 for e in ended if e.checks) > 1, "one worker compared everything"
    if replicas == "error":
        with pytest.raises(SourceError) as refused:
            load_engine().convert(alone)
        failed_alike(ended, "checkpoint.disagreement", tmp_path / "together")
        assert ended[0].result["detail"] == refused.value.message
        left = [p.as_posix() for p in tmp_path.rglob("*") if p.is_file() and ".reshard-" in p.as_posix()]
        assert left == [], "nothing was written, so nothing is left"
        return
    load_engine().convert(alone)
    facts = [manifest_facts((tmp_path / name / MANIFEST_NAME).read_bytes()) for name in ("alone", "together")]
    assert facts[0] == facts[1]
    assert sum("the first copy was taken" in w for w in facts[1]["warnings"]) > 3


def damage_norms(path: Path) -> None:
    """Change elements of several norms in a file of optimizer states."""
    import torch

    state = torch.load(path, weights_only=False)
    flat = state["optimizer_state_dict"]["base_optimizer_state"]
    flat = flat["state"][0]["exp_avg"] if isinstance(flat, dict) else flat[0]["exp_avg"]
    flat[-6000::512] += 1.0
    torch.save(state, path)


# -- deaths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["elected", pytest.param("other", marks=pytest.mark.full)])
def test_checks_of_a_killed_worker_are_taken_over(victim: str, source: Path, tmp_path: Path) -> None:
    """Checks that the dead worker recorded hold; only those that it had begun are made again."""
    expected = load_engine().convert(request_for(source, tmp_path / "alone", "universal", {}))
    mark = tmp_path / "killed"

    def disturb(number: int) -> None:
        opened: list[str] = []
        real, check = SessionMember.open_checks, FullChecks.perform

        def open_checks(self: SessionMember, name: str, text: bytes) -> None:
            opened.append(name)
            real(self, name, text)

        def perform(self: FullChecks, item: CheckItem) -> Any:
            perform.count += 1  # type: ignore[attr-defined]
            if perform.count > 6 and bool(opened) is (victim == "elected"):  # type: ignore[attr-defined]
                try:
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return check(self, item)
                os.kill(os.getpid(), signal.SIGKILL)
            return check(self, item)

        perform.count = 0  # type: ignore[attr-defined]
        SessionMember.open_checks, FullChecks.perform = open_checks, perform  # type: ignore[method-assign]
        assert number < WORKERS

    ended = convert_together(
        request_for(source, tmp_path / "together", "universal", {}), tmp_path / "said", WORKERS, disturb=disturb
    )
    dead = [e for e in ended if e.status == -signal.SIGKILL]
    assert len(dead) == 1, [e.status for e in ended]
    assert [e.status for e in ended if e not in dead] == [0] * (WORKERS - 1), [e.result for e in ended]
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")
    facts = [manifest_facts((tmp_path / name / MANIFEST_NAME).read_bytes()) for name in ("alone", "together")]
    assert facts[0] == facts[1]
    assert expected.verification == "full"
    checks = Counter(c for e in ended for c in e.checks)
    twice = [c for c, count in checks.items() if count > 1]
    say(f"--verify full, the {victim} worker killed: {len(twice)} of {len(checks)} checks made twice")
    assert set(twice) <= set(dead[0].checks), "a check of a worker that lived was made twice"


@pytest.mark.usefixtures("nobody_dies")
def test_a_worker_that_only_helps_checks_and_leaves(source: Path, tmp_path: Path) -> None:
    request = request_for(source, tmp_path / "together", "universal", {})
    ended = convert_together(request, tmp_path / "said", WORKERS, helpers=(1, 2, 3))
    assert [e.status for e in ended] == [0] * WORKERS, [e.result for e in ended]
    made = [len(e.checks) for e in ended]
    say(f"--verify full, an owner and three helpers: checks made {made}")
    assert min(made) > 0
    assert max(Counter(c for e in ended for c in e.checks).values()) == 1
    assert [e.result.get("runs", 1) > 0 for e in ended] == [True] * WORKERS
