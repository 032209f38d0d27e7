"""The processes of a launch that convert one checkpoint together: one of each node."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass

from reshard.choices import EnsureWorkers
from reshard.ensuring.converters import Converter, LocalConverter
from reshard.ensuring.election import Election, Invitation, Records
from reshard.ensuring.local_checkpoints import writing
from reshard.ensuring.world import visible_processes
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.models.resume import ResumeLayout
from reshard.shared_work import SharedWork, shared_work

SHARED_BYTES = 4 << 30
"""Size of the smallest checkpoint that nodes convert together by default. A second node begins after some 3 s: it looks
at the invitation, imports the engine and plans. A node alone converts this much in 4 s to 40 s (1 GB/s to 100 MB/s)."""
LATE_S = 20.0
"""Seconds that the other processes of a node leave the work to its first one, where no records elect a process."""
_NODES = (
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),
    ("CROSS_RANK", "CROSS_SIZE"),
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NODEID", "SLURM_NNODES"),
)
"""Variables with the number of a node and of all nodes: torchrun (torch 2.13 `local_elastic_agent.py`), DeepSpeed's
launcher (deepspeed 0.19.8 `launcher/launch.py`), Slurm."""
_PROCESSES_OF_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_NUMBER_ON_NODE = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Launch:
    """The place of this process in its launch."""

    nodes: int
    """Number of nodes; 1 if no launcher tells."""
    node: str
    """A name of this node that no other node has."""
    number: int
    """Number of this node, or 0."""
    first_on_node: bool
    processes: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch:
        """Read the variables of the launcher."""
        processes = visible_processes(environ) or 1
        number = nodes = None
        for rank, size in _NODES:
            number = _count(environ, rank) if number is None else number
            nodes = nodes or _count(environ, size)
        for name in _PROCESSES_OF_NODE:
            if nodes is None and (of_node := _count(environ, name)):
                nodes = -(-processes // of_node)
        here = next((n for name in _NUMBER_ON_NODE if (n := _count(environ, name)) is not None), 0)
        # A task of Slurm that is alone in its step sees the nodes of the whole job.
        nodes = 1 if processes == 1 else max(nodes or 1, 1)
        # Containers may have one host name, and a launcher of our own may have passed its own number to all.
        node = f"{socket.gethostname()} {number or 0}"
        return cls(nodes, node, number or 0, here == 0, processes)


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True)
class Sharing:
    """The rule by which processes convert together or alone."""

    workers: EnsureWorkers
    launch: Launch
    possible: bool
    """False if a service converts."""

    def among_nodes(self, size_bytes: int) -> SharedWork | None:
        """The work of this process if it invites others to convert with it; None if it converts alone."""
        return self._work() if self._worth_it(size_bytes, self.launch.nodes) else None

    def among_all(self, size_bytes: int) -> SharedWork | None:
        """The work of this process if all processes convert at once, because nobody elects one."""
        return self._work() if self._worth_it(size_bytes, self.launch.processes) else None

    def helps(self, node: str) -> SharedWork | None:
        """The work of this process if it helps one of that node; None if it is of the same node."""
        allowed = self.possible and self.workers is not EnsureWorkers.ONE and node != self.launch.node
        return self._work() if allowed else None

    def _worth_it(self, size_bytes: int, workers: int) -> bool:
        large = size_bytes >= SHARED_BYTES and workers > 1
        return self.possible and (self.workers is EnsureWorkers.NODES or (self.workers is EnsureWorkers.AUTO and large))

    def _work(self) -> SharedWork | None:
        return shared_work(f"{self.launch.nodes}", self.launch.number % self.launch.nodes, os.environ)


# Helps the process that converts: another node of the same launch takes a part of the work while it waits.

_LOOK_S = 0.5
"""Seconds between two looks of a helper at its invitation."""


class Helper:
    """One process that waits for a key, and helps once with each conversion that it is invited to.

    Args:
        records: The records with the invitation.
        key: The key that this process waits for.
        sharing: The rule by which processes convert together.
        requests: Makes the requests of a conversion from the save directory and what its result is.
    """

    def __init__(
        self,
        records: Records,
        key: str,
        sharing: Sharing,
        requests: Callable[[str, ResumeLayout], list[ConvertRequest]],
    ) -> None:
        self._records, self._key, self._sharing, self._requests = records, key, sharing, requests
        self._election = Election(records.helper_claim(key, sharing.launch.node))
        self._helped: set[str] = set()

    def help(self, maker: Converter, watched: Set[str]) -> bool:
        """Convert together with the owner of a claim, if it asks for that and no process of this node helps it yet.

        True if this process helped. Errors are those of the owner, too, which tells them to all that wait.
        """
        invitation = self._records.invitation(self._key)
        if invitation is None or invitation.nonce not in watched or invitation.nonce in self._helped:
            return False
        work = self._sharing.helps(invitation.node)
        if work is None or not isinstance(maker, LocalConverter):
            return False
        with writing(self._records.folder):
            claim = self._election.claim()
        if claim is None:
            return False
        self._helped.add(invitation.nonce)
        target, watch = self._records.absolute(invitation.path), _Watch(self._records, self._key, invitation)
        with claim, suppress(ReshardError):
            for request in self._requests(target, invitation.wanted):
                maker.help(request, work, watch.ended)
        return True


class _Watch:
    """Tells a helper that the conversion has ended: its invitation is gone, or is for another one."""

    def __init__(self, records: Records, key: str, invitation: Invitation) -> None:
        self._records, self._key, self._invitation = records, key, invitation
        self._looked_at = time.monotonic()
        self._ended = False

    def ended(self) -> bool:
        """True if there is nothing to help with. Asked between units; looks once in a while."""
        now = time.monotonic()
        if not self._ended and now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._ended = not self._invitation.same_work(self._records.invitation(self._key))
        return self._ended
