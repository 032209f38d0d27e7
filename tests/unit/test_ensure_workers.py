"""The processes that convert for `reshard.ensure`: by nodes, size and wish."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

import reshard
from house.saves import make_save
from reshard.choices import EnsureWorkers
from reshard.ensuring.converters import LocalConverter
from reshard.ensuring.election import Election, Invitation, Records
from reshard.ensuring.together import SHARED_BYTES, Launch, Sharing
from reshard.errors import RequestError, StorageError
from reshard.models.jobs import ConvertRequest
from reshard.options import NativeLayout

TORCHRUN = {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
TORCHRUN |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
DEEPSPEED = {"WORLD_SIZE": "16", "RANK": "8", "LOCAL_RANK": "0", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
SLURM = {"SLURM_NTASKS": "32", "SLURM_PROCID": "17", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NNODES": "4"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "12", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "nodes", "number", "first"),
    [
        (TORCHRUN, 2, 1, False),
        (DEEPSPEED, 2, 1, True),
        (SLURM, 4, 2, False),
        # A step has fewer nodes than its job.
        ({**SLURM, "SLURM_STEP_NUM_NODES": "3"}, 3, 2, False),
        # `srun -n1 reshard ensure` in a job of four nodes.
        ({**SLURM, "SLURM_NTASKS": "1"}, 1, 2, False),
        # torchrun inside an allocation of Slurm.
        ({**SLURM, **TORCHRUN}, 2, 1, False),
        (MPIRUN, 3, 0, True),
        ({"WORLD_SIZE": "8", "RANK": "3"}, 1, 0, True),
        ({}, 1, 0, True),
    ],
    ids=["torchrun", "deepspeed", "slurm", "step", "one task", "torchrun in slurm", "mpirun", "bare", "none"],
)
def test_the_launcher_tells_of_nodes(environ: dict[str, str], nodes: int, number: int, first: bool) -> None:
    found = Launch.of(environ)
    assert (found.nodes, found.number, found.first_on_node) == (nodes, number, first)
    assert found.node == f"{socket.gethostname()} {number}"


def sharing(workers: str, environ: dict[str, str], *, possible: bool = True) -> Sharing:
    return Sharing(EnsureWorkers(workers), Launch.of(environ), possible)


def test_large_checkpoints_are_divided_among_nodes() -> None:
    work = sharing("auto", TORCHRUN).among_nodes(SHARED_BYTES)
    assert work is not None
    assert (work.number, work.count) == (1, 2)
    assert sharing("auto", TORCHRUN).among_nodes(SHARED_BYTES - 1) is None
    assert sharing("nodes", TORCHRUN).among_nodes(1) is not None
    assert sharing("1", TORCHRUN).among_nodes(1 << 50) is None
    assert sharing("nodes", TORCHRUN, possible=False).among_nodes(1 << 50) is None
    # One node: its processes share one network. In an object store nobody elects one of them.
    alone = {**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert sharing("auto", alone).among_nodes(1 << 50) is None
    assert sharing("auto", alone).among_all(SHARED_BYTES) is not None
    assert sharing("auto", {}).among_all(1 << 50) is None


def test_only_another_node_helps() -> None:
    here = Launch.of(TORCHRUN).node
    assert sharing("auto", TORCHRUN).helps(here) is None
    assert sharing("auto", TORCHRUN).helps("another node 0") is not None
    assert sharing("1", TORCHRUN).helps("another node 0") is None


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="workers is 'all'"):
        reshard.ensure(tmp_path, dp=4, workers="all")


def test_a_helper_raises_the_error_of_the_owner_that_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = make_save(tmp_path / "save")
    reshard.ensure(save, dp=2)
    (record,) = (save / ".reshard").glob("*.json")
    record.unlink()
    records, key = Records(str(save)), record.stem
    owner = Election(str(record.with_suffix(".claim"))).claim()
    assert owner is not None
    layout = NativeLayout(dp=3)
    records.invite(key, Invitation(nonce=owner.nonce, node="another node 0", path="out", layout=layout))
    asked: list[str] = []
    held = ExitStack()
    held.enter_context(owner)

    def help_until_the_end(_self: LocalConverter, request: ConvertRequest, *_: object) -> None:
        asked.append(request.target)
        records.withdraw(key)
        records.tell_failure(key, owner.nonce, StorageError("storage.no_space", "full"))
        held.close()
        raise StorageError("storage.unavailable", "the helper's own")

    monkeypatch.setattr(LocalConverter, "help", help_until_the_end)
    with held, pytest.raises(StorageError, match="full"):
        reshard.ensure(save, dp=2)
    assert asked == [str(save / "out" / "global_step3")]
