"""The files that trainers keep beside the shards.

Source: accelerate 1.15.0 `checkpointing.py` (`save_accelerator_state`, `load_accelerator_state`), transformers 5.23.0
`trainer.py` (`_load_optimizer_and_scheduler`, `_load_rng_state`), `trainer_callback.py` (`TrainerState`: every field
has a default); pytorch-lightning 2.6.6 `trainer/connectors/checkpoint_connector.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.dcp_options import Grammar
from reshard.models import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats import not_written
from reshard_engine.formats.dcp.facts import facts_of
from reshard_engine.formats.dcp.names import META, TRAINER_STATE
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PList, mapping_of
from reshard_engine.pickles.plain import node_of
from reshard_engine.tensors.layout import TargetFile, literal_template

_INTERVALS = {"logging_steps": 500, "eval_steps": 500, "save_steps": 500}
"""The Trainer's defaults. Those of a checkpoint take the place of its arguments."""
_CONTROL = dict.fromkeys(
    ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"), False
)
"""The state of a Trainer's control flow at rest: the next save looks for this entry."""
MADE_STATE = (
    f"{TRAINER_STATE} was made, as the source has none: the Trainer takes logging_steps, eval_steps and save_steps "
    "(500 each) from it, and the epoch begins at 0; edit it, or name a checkpoint-N: --trainer-files DIR"
)
MADE_META = f"{META} was made, as the source has none: the epoch begins at 0"
_RANDOM_STATE = {Grammar.TRAINER: "python", Grammar.ACCELERATE: "random_state"}
"""The key of Python's random state in a rank's file."""
_FILE = re.compile(r"[a-z_]{1,64}(?:_\d{1,4})?\.(?:pkl|bin|pt)")
"""Keys of the client state that are names of files of Accelerate."""
_OTHER_RANDOM_STATES = "random states of another framework"
_NO_PLACE = "trainers keep it in no file of a checkpoint"
_VERSION = "pytorch-lightning_version"
_OLDEST_LIGHTNING = "2.0.0"
"""Lightning migrates checkpoints of older versions. 2.0 is the first whose keys are today's."""


def trainer_files(
    checkpoint: Checkpoint, request: ConvertRequest, grammar: Grammar, schedulers: Mapping[int, Node]
) -> Iterator[TargetFile]:
    """Schedulers, random states and objects of the script, one file each; for the Trainer also its own state."""

    def file(name: str, node: Node) -> TargetFile:
        template, slots = tree_template(name.rpartition(".")[0], node, checkpoint.shard_map, opaque=request.opaque)
        return TargetFile(name, template, slots)

    trainer = grammar is Grammar.TRAINER
    for number, node in schedulers.items():
        yield file("scheduler.pt" if trainer else f"scheduler{f'_{number}' if number else ''}.bin", node)
    states_of = rank_states(checkpoint, grammar)
    for rank, states in enumerate(states_of):
        name = f"rng_state{f'_{rank}' if len(states_of) > 1 else ''}.pth" if trainer else f"random_states_{rank}.pkl"
        yield file(name, mapping_of({**states}))
    for key, node in checkpoint.client_state.items():
        if _FILE.fullmatch(str(key)):
            yield file(str(key), node)
    if trainer:
        facts = facts_of(checkpoint)
        text = facts.texts.get(TRAINER_STATE) if facts is not None else None
        yield TargetFile(TRAINER_STATE, literal_template(text or _trainer_state(steps_of(checkpoint) or 0)), ())


def makes_trainer_state(checkpoint: Checkpoint, grammar: Grammar) -> bool:
    """True if a target for the Trainer gets a state of the Trainer that no run wrote."""
    facts = facts_of(checkpoint)
    return grammar is Grammar.TRAINER and (facts is None or TRAINER_STATE not in facts.texts)


def left_out(checkpoint: Checkpoint) -> Iterator[NotCarried]:
    """The parts of the run's state that no file of a trainer holds."""
    yield from not_written.named(dict.fromkeys(k for r in checkpoint.rng for k in r), _OTHER_RANDOM_STATES)
    yield from not_written.named((str(k) for k in checkpoint.client_state if not _FILE.fullmatch(str(k))), _NO_PLACE)


def lightning_meta(checkpoint: Checkpoint, request: ConvertRequest, schedulers: Sequence[Node]) -> TargetFile:
    """`meta.pt`: the checkpoint of Lightning without weights and optimizers."""
    facts = facts_of(checkpoint)
    own = facts is not None and facts.grammar is Grammar.LIGHTNING
    steps = steps_of(checkpoint) or 0
    made: dict[str | int, Node] = {
        "epoch": 0, "global_step": steps, _VERSION: _OLDEST_LIGHTNING, "loops": node_of(_loops(steps)),
    }  # fmt: skip
    entries = {**({} if own else made), **checkpoint.client_state, "lr_schedulers": PList([*schedulers])}
    template, slots = tree_template("meta", mapping_of(entries), checkpoint.shard_map, opaque=request.opaque)
    return TargetFile(META, template, slots, commit=True)


def _loops(steps: int) -> dict[str, Any]:
    """The progress of Lightning's loops: it takes the number of steps from here, and not from `global_step`.

    Source: pytorch-lightning 2.6.6 `loops/training_epoch_loop.py` (`global_step`), `loops/progress.py`; verified by
    resuming: other entries may be absent.
    """
    ready: dict[str, Any] = {"ready": steps, "completed": steps}
    zeroed: dict[str, Any] = {"ready": steps, "started": steps, "completed": steps}
    optimizer = {
        "step": {"total": ready, "current": dict(ready)},
        "zero_grad": {"total": zeroed, "current": dict(zeroed)},
    }
    return {"fit_loop": {"epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer}}}


def rank_states(checkpoint: Checkpoint, grammar: Grammar) -> tuple[Mapping[str, Node], ...]:
    """The random states by rank if they are this framework's own or have the keys that it looks up; else none.

    Source: transformers 5.23.0 `trainer.py` (`_load_rng_state`), accelerate 1.15.0 `checkpointing.py`.
    """
    facts, key = facts_of(checkpoint), _RANDOM_STATE.get(grammar)
    if facts is None or key is None:
        return ()
    fit = facts.grammar is grammar or all(key in states for states in facts.rank_states)
    return facts.rank_states if fit else ()


def steps_of(checkpoint: Checkpoint) -> int | None:
    """The steps that the run counted, or those of the parameter that was updated most often; None if nothing counts."""
    if checkpoint.counters.steps is not None:
        return checkpoint.counters.steps
    return max((int(p.scalars["step"].value) for p in checkpoint.trained if "step" in p.scalars), default=None)


def _trainer_state(steps: int) -> bytes:
    """A state for a source without one: the steps, and what a resumed Trainer reads from it in any case."""
    state: dict[str, Any] = {
        "global_step": steps, "log_history": [], **_INTERVALS, "train_batch_size": 1,
        "stateful_callbacks": {"TrainerControl": {"args": _CONTROL, "attributes": {}}},
    }  # fmt: skip
    return json.dumps(state, indent=2).encode() + b"\n"
