"""Native DeepSpeed checkpoints: any stage, on any number of ranks, from any source with optimizer states.

Loaders refuse a tag without its model states, so these are the commit files; `latest` comes last.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_optimizer_ckpt_name`,
`_save_zero_checkpoint`); what loaders read is in docs/formats/deepspeed-zero.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.models import ConvertRequest, RngPolicy
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.layout import Pointer, TargetFile, TargetLayout
from reshard_engine.pickles.nodes import Node, mapping_of
from reshard_engine.writers.optimizer_states import require_optimizer, states_to_write
from reshard_engine.writers.trees import tree_template
from reshard_engine.writers.zero.flat import FlatStates
from reshard_engine.writers.zero.local import local_models
from reshard_engine.writers.zero.model import LocalModel
from reshard_engine.writers.zero.model_states import RNG_KEYS, ModelStatesFiles, run_state_of
from reshard_engine.writers.zero.optimizer import Groups, trained_groups
from reshard_engine.writers.zero.sharded import ShardedStates
from reshard_engine.writers.zero.target import Target, resolve
from reshard_engine.writers.zero.whole import whole_optimizer

LATEST = "latest"


class ZeroWriter:
    """Lays out the files of a DeepSpeed run for its next world."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Optimizer files rank by rank, then the model states.

        Raises:
            RequestError: `request.invalid` without a layout, `request.unsatisfiable` if the target cannot hold the
                source.
        """
        require_optimizer(checkpoint, "a native checkpoint")
        target = resolve(checkpoint, request)
        groups = Groups(checkpoint, states_to_write(checkpoint))
        state = run_state_of(checkpoint)
        warnings = _rng_warnings(state, checkpoint, target)
        if target.layout.rng is RngPolicy.DROP:
            state = {k: v for k, v in state.items() if k not in RNG_KEYS}
        files = _Files(checkpoint, request, target, groups, state)
        for model in local_models(checkpoint, target):
            files.add(model)
        return TargetLayout((*files.bodies, *files.commits), Pointer(LATEST, name.encode()), tuple(warnings))


class _Files:
    """Collects the files of all ranks."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        request: ConvertRequest,
        target: Target,
        groups: Groups,
        state: Mapping[str | int, Node],
    ) -> None:
        self._checkpoint, self._request, self._target = checkpoint, request, target
        self._groups, self._state = groups, state
        self.bodies: list[TargetFile] = []
        self.commits: list[TargetFile] = []

    def _file(self, name: str, node: Node, *, commit: bool) -> TargetFile:
        root = name.removesuffix(".pt")
        template, slots = tree_template(root, node, self._checkpoint.shard_map, opaque=self._request.opaque)
        return TargetFile(name, template, slots, commit=commit)

    def add(self, model: LocalModel) -> None:
        """The files of one model-parallel rank."""
        target = self._target
        mp = f"mp_rank_{model.pp * target.layout.tp + model.tp:02d}"
        states: FlatStates | ShardedStates | None = None
        optimizer: Node = None
        if target.stage == 0:
            optimizer = whole_optimizer(self._groups, model, target)
        else:
            kind = ShardedStates if target.stage == 3 else FlatStates
            states = kind(self._groups, model, target)
        shapes = states.shapes() if states else trained_groups(model, self._groups.count)
        for rank in range(target.dp if states else 0):
            assert states is not None
            outer = mapping_of(
                {
                    "optimizer_state_dict": states.optimizer_of(rank),
                    "ds_config": target.config,
                    "ds_version": target.version,
                }
            )
            name = f"{target.prefix}zero_pp_rank_{rank}_{mp}_optim_states.pt"
            self.bodies.append(self._file(name, outer, commit=False))
        model_files = ModelStatesFiles(self._checkpoint, model, target, shapes)
        for rank in range(target.dp if target.stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_{mp}_model_states.pt" if target.stage == 3 else f"{mp}_model_states.pt"
            entries = model_files.entries_of(rank, self._state, optimizer)
            self.commits.append(self._file(name, entries, commit=True))


def _rng_warnings(state: Mapping[str | int, Node], checkpoint: Checkpoint, target: Target) -> list[str]:
    there = [key for key in RNG_KEYS if state.get(key) is not None]
    layout = target.layout
    world = (layout.dp, layout.tp, layout.pp)
    if not there or world == tuple(checkpoint.world.get(axis, 1) for axis in ("dp", "tp", "pp")):
        return []
    if layout.rng is RngPolicy.DROP:
        return [f"random states ({', '.join(there)}) were left out, as asked"]
    return [f"random states ({', '.join(there)}) have no one answer on other ranks: r has those of source rank r mod N"]
