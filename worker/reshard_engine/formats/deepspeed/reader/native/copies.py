"""Buffers and extra states of modules: every tensor-parallel rank holds a copy, and no rule cuts them.

The checkpoint takes the first rank's copy. Values that are no tensors are compared at once, tensors before writing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import SourceError, printable
from reshard.models import OpaquePolicy
from reshard_engine.checkpoint import Agreement
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.deepspeed.reader.native.trees import ModelTrees
from reshard_engine.formats.not_carried import NotCarriedKeys
from reshard_engine.pickles.differences import TensorsAt, compare_trees
from reshard_engine.pickles.nodes import Node, PTensorRef
from reshard_engine.tensors.shard_map import ShardMapBuilder


class Copies:
    """Collects the pairs of tensors that must be equal."""

    def __init__(self, builder: ShardMapBuilder) -> None:
        """Share the builder of the checkpoint."""
        self._builder = builder
        self.agreements: list[Agreement] = []

    def compare(self, name: str, copies: Sequence[int], *, advisory: bool) -> None:
        """Note that the ranks' copies of a tensor should be equal.

        Args:
            name: Its name.
            copies: Each tensor-parallel rank's.
            advisory: True if a difference is only reported.

        Raises:
            SourceError: `source.unsupported` if their shapes or types differ.
        """
        first, *others = (self._builder.tensors[n] for n in copies)
        if any((o.shape, o.dtype) != (first.shape, first.dtype) for o in others):
            raise _differing(name)
        self.agreements += [
            Agreement(name, "value", copies[0], n, f"tensor-parallel rank {rank}", advisory=advisory)
            for rank, n in enumerate(copies[1:], start=1)
        ]

    def extra_states(
        self,
        tables: Sequence[Mapping[str, tuple[TorchFile, Node]]],
        trees: ModelTrees,
        policy: OpaquePolicy,
        noted: NotCarriedKeys,
    ) -> dict[str, Node]:
        """The extra states of all tensor-parallel ranks, by name.

        Args:
            tables: Each rank's, with the files that hold them.
            trees: Registers their tensors.
            policy: Under `drop`, extra states that differ are left out.
            noted: Collects the names of extra states that are left out.

        Raises:
            SourceError: `source.unsupported` if they differ and are not to be dropped.
        """
        found: dict[str, Node] = {}
        for name in dict.fromkeys(n for table in tables for n in table):
            copies = [trees.carried(table[name][1], table[name][0]) for table in tables if name in table]
            try:
                self._compare_trees(name, copies, ranks=len(tables))
            except SourceError:
                if policy is not OpaquePolicy.DROP:
                    raise
                noted.add(f"module.{name}", "tensor-parallel ranks hold different extra states")
                continue
            found[name] = copies[0]
        return found

    def _compare_trees(self, name: str, copies: Sequence[Node], *, ranks: int) -> None:
        if len(copies) != ranks:
            raise _differing(name)
        for copy in copies[1:]:
            for difference in compare_trees(copies[0], copy, name):
                if not isinstance(difference, TensorsAt):
                    raise _differing(difference.path)
                assert isinstance(difference.a, PTensorRef)
                assert isinstance(difference.b, PTensorRef)
                self.compare(difference.path, [difference.a.index, difference.b.index], advisory=False)


def _differing(name: str) -> SourceError:
    return SourceError(
        "source.unsupported",
        f"{printable(name)} differs between tensor-parallel ranks, and nothing says how to put its values together",
        fix="--opaque drop leaves such extra states out and names them; their modules then start with fresh ones",
    )
