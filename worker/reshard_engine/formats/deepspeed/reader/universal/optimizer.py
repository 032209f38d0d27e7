"""`zero/optimizer_state.pt`: hyper-parameters by group, the loss scaler, and at stage 3 the step counters.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`_save_optimizer_state`: rank 0's optimizer state
without its flat tensors, with `param_groups`; `_save_optimizer_state_stage3`: the whole of it).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Scalar
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.deepspeed.names import OPTIMIZER_STATE
from reshard_engine.formats.deepspeed.reader.native.optim_states import (
    BASE_KEYS,
    EXTRA_KEYS,
    PARTITION_KEYS,
    read_scalar,
)
from reshard_engine.formats.deepspeed.reader.native.slices import group_of_subgroup
from reshard_engine.formats.deepspeed.reader.native.stage0 import EXTRA_KEYS as STAGE0_EXTRA_KEYS
from reshard_engine.formats.deepspeed.reader.universal.atoms import STEP
from reshard_engine.pickles.nodes import Node, is_mapping, mapping_items, sequence_items

_KEPT = (*EXTRA_KEYS, *STAGE0_EXTRA_KEYS)


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """The parsed file."""

    torch_file: TorchFile
    group_nodes: tuple[Node, ...]
    param_groups: tuple[Mapping[str | int, Node], ...]
    extras: Mapping[str, Node]
    states: Mapping[str | int, Node]
    """Per (sub-)group its states, by number."""
    unread: tuple[str, ...] = ()
    """Keys of the file that nothing here knows, as paths from its top."""

    def groups_of(self, count: int) -> list[int]:
        """Per entry of `param_shapes` its optimizer group.

        The `params` of the groups are numbers of those entries. At stage 0 they are numbers of parameters instead, and
        each group has one entry.

        Raises:
            SourceError: `checkpoint.malformed` if the groups do not fit.
        """
        numbered = sum(len(getattr(g.get("params"), "items", ())) for g in self.param_groups)
        if numbered != count and len(self.param_groups) == count:
            return list(range(count))
        return group_of_subgroup(self.param_groups, count)

    def step_of(self, index: int) -> Scalar | None:
        """The step counter of a (sub-)group, or None if there is none."""
        entry = self.states.get(index)
        step = mapping_items(entry, what="state").get(STEP) if is_mapping(entry) else None
        return None if step is None else read_scalar(step, self.torch_file, what="state: step")

    def unread_states(self, atoms: Container[str]) -> Iterator[str]:
        """The paths of rank 0's states that no atom holds. Its other states are parts of the atoms' tensors."""
        for index, group in self.states.items():
            keys = mapping_items(group, what="state") if is_mapping(group) else {}
            yield from (f"optimizer_state_dict.state.{index}.{k}" for k in keys if k != STEP and str(k) not in atoms)


def parse_optimizer_file(torch_file: TorchFile) -> OptimizerFile:
    """The optimizer state beside the atoms.

    Raises:
        SourceError: `checkpoint.malformed`.
    """
    name = printable(torch_file.file.name)
    entries = mapping_items(torch_file.root, what=name)
    nodes = tuple(sequence_items(entries.get("param_groups"), what=f"{name}: param_groups"))
    if not nodes:
        raise SourceError("checkpoint.malformed", f"{name} has no param_groups")
    inner = entries.get(OPTIMIZER_STATE)
    state = mapping_items(inner, what=name).get("state") if is_mapping(inner) else None
    return OptimizerFile(
        torch_file,
        nodes,
        tuple(mapping_items(n, what=f"{name}: param_groups") for n in nodes),
        {str(k): v for k, v in entries.items() if k in _KEPT},
        mapping_items(state, what=f"{name}: state") if is_mapping(state) else {},
        tuple(_unread(entries, inner)),
    )


def _unread(entries: Mapping[str | int, Node], inner: Node) -> Iterator[str]:
    """Keys that the reader does not keep, without those that describe the ranks' partitions."""
    known = {*_KEPT, *PARTITION_KEYS, "param_groups"}
    yield from (str(k) for k in entries if k not in known)
    if is_mapping(inner):
        yield from (f"optimizer_state_dict.{k}" for k in mapping_items(inner, what="state") if k not in BASE_KEYS)
