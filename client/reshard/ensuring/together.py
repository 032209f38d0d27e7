"""The processes of a launch that convert one checkpoint together: one of each node. The others share its network."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.choices import EnsureWorkers
from reshard.ensuring.world import visible_processes

if TYPE_CHECKING:
    from reshard.shared_work import SharedWork

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
        from reshard.shared_work import shared_work  # most processes only wait

        return shared_work(f"{self.launch.nodes}", self.launch.number % self.launch.nodes, os.environ)
