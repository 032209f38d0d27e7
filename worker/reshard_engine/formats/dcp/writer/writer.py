"""Distributed checkpoints under the keys, and with the files, that a framework loads.

Source: accelerate 1.15.0 `utils/fsdp_utils.py`, `checkpointing.py`; transformers 5.23.0 `trainer.py`;
pytorch-lightning 2.6.6 `strategies/fsdp.py`; torchtitan 0.3.0 `components/checkpoint.py`; verified by loading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from reshard.choices import OpaquePolicy, ParamOrder
from reshard.dcp_options import DcpOptions, Framework
from reshard.errors import RequestError, counted, listed
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint, Counters
from reshard_engine.containers.safetensors import safetensors_template
from reshard_engine.formats import carried
from reshard_engine.formats.dcp.facts import DcpFacts, facts_of, framework_of_source
from reshard_engine.formats.dcp.optimizers import STEP, flattened_scheduler, groups_to_write, plain_scheduler
from reshard_engine.formats.dcp.state_tree import (
    OF_ONE_FILE,
    TARGET_KEYS,
    StateTree,
    TorchSaveWriter,
    model_entries,
    numbered_optimizer,
    odd_states,
    optimizers_of,
    other_keys,
    refuse_changes,
)
from reshard_engine.formats.dcp.writer.state_dict import Places, StateDict
from reshard_engine.formats.dcp_files.metadata.model import KeyPath
from reshard_engine.formats.dcp_files.shards import (
    OpaqueEntry,
    ShardOptions,
    Shards,
    StateEntry,
    TensorEntry,
    key_of,
)
from reshard_engine.formats.numbered import numbers_parameters
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.formats.trainer_files import (
    FULL_MODEL,
    META,
    NUMBERED_OPTIMIZER,
    OPTIMIZERS,
    RANK_STATES,
    TRAINER_STATE,
    WEIGHTS,
    is_scheduler,
    made_scheduler,
    steps_and_updates,
    trainer_facts,
)
from reshard_engine.pickles.nodes import Node, PList, PTensorRef, mapping_items, mapping_of, node_of
from reshard_engine.tensors.layout import TargetFile, TargetLayout, literal_template

# The files that trainers keep beside the shards.
#
# Source: accelerate 1.15.0 `checkpointing.py` (`save_accelerator_state`, `load_accelerator_state`), transformers 5.23.0
# `trainer.py` (`_load_optimizer_and_scheduler`, `_load_rng_state`), `trainer_callback.py` (`TrainerState`: every field
# has a default); pytorch-lightning 2.6.6 `trainer/connectors/checkpoint_connector.py`.

_INTERVALS = {"logging_steps": 500, "eval_steps": 500, "save_steps": 500}
"""The Trainer's defaults. Those of a checkpoint take the place of its arguments."""
_CONTROL = dict.fromkeys(
    ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"), False
)
"""The state of a Trainer's control flow at rest: the next save looks for this entry."""
MADE_STATE = (
    f"{TRAINER_STATE} was made, as none was read: the Trainer takes logging_steps, eval_steps and save_steps "
    "(500 each) from it, and the epoch begins at 0; edit it, or name the checkpoint-N that has one: --trainer-files DIR"
)
MADE_SCHEDULER = (
    "scheduler.pt was made, as none was read and the Trainer loads no optimizer without it: the run's "
    "scheduler goes on as after {updates}, and one that remembers more than a count begins anew; to keep its own, "
    "name a checkpoint-N: --trainer-files DIR"
)
MADE_META = f"{META} was made, as none was read: the epoch begins at 0"
_RANDOM_STATE = {Framework.TRAINER: "python", Framework.ACCELERATE: "random_state"}
"""The key of Python's random state in a rank's file."""
_FILE = re.compile(r"[a-z_]{1,64}(?:_\d{1,4})?\.(?:pkl|bin|pt)")
"""Keys of the client state that are names of files of Accelerate."""
_OTHER_RANDOM_STATES = "random states of another framework"
_NO_FILE_FOR = "trainers keep it in no file of a checkpoint"
_VERSION = "pytorch-lightning_version"
_OLDEST_LIGHTNING = "2.0.0"
"""Lightning migrates checkpoints of older versions. 2.0 is the first whose keys are today's."""


def trainer_files(
    checkpoint: Checkpoint, request: ConvertRequest, framework: Framework, schedulers: Mapping[int, Node]
) -> Iterator[TargetFile]:
    """Schedulers, random states and objects of the script, one file each; for the Trainer also its own state."""

    def file(name: str, node: Node) -> TargetFile:
        template, slots = tree_template(name.rpartition(".")[0], node, checkpoint.shard_map, opaque=request.opaque)
        return TargetFile(name, template, slots)

    trainer = framework is Framework.TRAINER
    for number, node in schedulers.items():
        yield file("scheduler.pt" if trainer else f"scheduler{f'_{number}' if number else ''}.bin", node)
    if makes_scheduler(checkpoint, framework, schedulers):
        yield file("scheduler.pt", made_scheduler(steps_and_updates(checkpoint)[1] or 0))
    states_of = rank_states(checkpoint, framework)
    for rank, states in enumerate(states_of):
        name = f"rng_state{f'_{rank}' if len(states_of) > 1 else ''}.pth" if trainer else f"random_states_{rank}.pkl"
        yield file(name, mapping_of({**states}))
    for key, node in checkpoint.client_state.items():
        if _FILE.fullmatch(str(key)):
            yield file(str(key), node)
    if trainer:
        text = trainer_facts(checkpoint).texts.get(TRAINER_STATE)
        yield TargetFile(TRAINER_STATE, literal_template(text or _trainer_state(steps_of(checkpoint) or 0)), ())


def makes_trainer_state(checkpoint: Checkpoint, framework: Framework) -> bool:
    """True if a target for the Trainer gets a state of the Trainer that no run wrote."""
    return framework is Framework.TRAINER and TRAINER_STATE not in trainer_facts(checkpoint).texts


def makes_scheduler(checkpoint: Checkpoint, framework: Framework, schedulers: Mapping[int, Node]) -> bool:
    """True if a target for the Trainer gets the state of a scheduler that no run saved.

    Without the file, the Trainer does not load the optimizer either, and does not say so.

    Source: transformers 5.23.0 `trainer.py` (`_load_optimizer_and_scheduler`); verified by resuming.
    """
    return framework is Framework.TRAINER and not schedulers and checkpoint.optimizer is not None


def left_out(checkpoint: Checkpoint) -> Iterator[NotCarried]:
    """The parts of the run's state that no file of a trainer holds."""
    yield from carried.named(dict.fromkeys(k for r in checkpoint.rng for k in r), _OTHER_RANDOM_STATES)
    yield from carried.named((str(k) for k in checkpoint.client_state if not _FILE.fullmatch(str(k))), _NO_FILE_FOR)


def lightning_meta(checkpoint: Checkpoint, request: ConvertRequest, schedulers: Sequence[Node]) -> TargetFile:
    """`meta.pt`: the checkpoint of Lightning without weights and optimizers."""
    facts = facts_of(checkpoint)
    own = facts is not None and facts.framework is Framework.LIGHTNING
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


def rank_states(checkpoint: Checkpoint, framework: Framework) -> tuple[Mapping[str, Node], ...]:
    """The random states by rank if they are this framework's own or have the keys that it looks up; else none.

    Source: transformers 5.23.0 `trainer.py` (`_load_rng_state`), accelerate 1.15.0 `checkpointing.py`.
    """
    facts, key, held = facts_of(checkpoint), _RANDOM_STATE.get(framework), trainer_facts(checkpoint).rank_states
    if key is None:
        return ()
    own = facts is not None and facts.framework is framework
    return held if own or all(key in states for states in held) else ()


def steps_of(checkpoint: Checkpoint) -> int | None:
    """The steps that the run counted, or those of the parameter that was updated most often; None if nothing counts."""
    return steps_and_updates(checkpoint)[0]


def _trainer_state(steps: int) -> bytes:
    """A state for a source without one: the steps, and what a resumed Trainer reads from it in any case."""
    state: dict[str, Any] = {
        "global_step": steps, "log_history": [], **_INTERVALS, "train_batch_size": 1,
        "stateful_callbacks": {"TrainerControl": {"args": _CONTROL, "attributes": {}}},
    }  # fmt: skip
    return json.dumps(state, indent=2).encode() + b"\n"


# The keys that each framework loads, and the writer of distributed checkpoints.

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_{}", "optimizer_{}"
_PLACES: Mapping[Framework, tuple[KeyPath, KeyPath, bool]] = {
    Framework.STATE_DICT: (("model",), ("optimizer",), False),
    Framework.TORCHTITAN: ((), ("optimizer",), True),
    Framework.ACCELERATE: (("model",), ("optimizer",), False),
    Framework.TRAINER: (("model",), ("optimizer",), False),
    Framework.LIGHTNING: (("model",), ("optimizer_0",), False),
    Framework.TORCHTUNE: (("model",), ("optimizer",), False),
}
"""The places of model and optimizer, and True where the optimizer's state dict is flattened."""
_IN_FOLDERS = (Framework.ACCELERATE, Framework.TRAINER)
_KEEPS_OTHERS = (Framework.STATE_DICT, Framework.TORCHTITAN, Framework.ACCELERATE)
"""The frameworks that have places for further models and optimizers, whatever the source's."""
_ONE_SCHEDULER = (Framework.TRAINER, Framework.LIGHTNING)
"""The frameworks with one model, and so with one scheduler, unless the source is of the same framework."""
_JOINED = (
    "the source's optimizer is flattened and keeps no groups: parameters with equal hyper-parameters are one group, "
    "which makes {count}; a run with another number of groups does not load them"
)
_OTHER_SCHEDULER = "the learning-rate scheduler is none of torch's"
_NO_PLACE = "checkpoints of this kind have no place for it"
_TAKEN = "its place is that of the model or of the optimizer"
_SECOND_SCHEDULER = "checkpoints of this kind keep one scheduler"
_OF_PARTITIONS = "one number for each rank's partition, and a distributed checkpoint holds whole parameters"
_ONE_MODEL = "checkpoints of this kind keep one model"
_EPOCHS_RUN = "epochs_run"
_OF_RECIPE = (_EPOCHS_RUN, "seed", "total_epochs", "max_steps_per_epoch")
"""The keys without which a recipe of torchtune does not go on."""
_SCHEDULER_ANEW = "torchtune's recipes make their scheduler anew"


@dataclass(frozen=True, slots=True)
class _Target:
    """The places and options of one target."""

    checkpoint: Checkpoint
    request: ConvertRequest
    options: DcpOptions
    framework: Framework
    places: Places
    home: KeyPath
    """The place of what lies beside the model."""

    @property
    def own(self) -> bool:
        """True if the source has this framework, so that its own keys serve."""
        facts = facts_of(self.checkpoint)
        return facts is not None and facts.framework is self.framework

    @property
    def others(self) -> tuple[Checkpoint, ...]:
        """The further models and optimizers that the target holds."""
        facts = facts_of(self.checkpoint)
        return facts.others if facts is not None and (self.own or self.framework in _KEEPS_OTHERS) else ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, request: ConvertRequest) -> _Target:
        options, facts = request.options.of(DcpOptions), facts_of(checkpoint)
        framework = options.framework or framework_of_source(checkpoint) or Framework.STATE_DICT
        places, home = _places_of(checkpoint, framework), None
        if facts is not None and facts.framework is framework and options.target_model_key is None:
            home = facts.home
        model = places.model if options.target_model_key is None else _path(options.target_model_key)
        optimizer = places.optimizer if options.target_optimizer_key is None else _path(options.target_optimizer_key)
        found = replace(places, model=model, optimizer=optimizer)
        return cls(checkpoint, request, options, framework, found, model[:-1] if home is None else home)

    def places_of_other(self, other: Checkpoint) -> Places:
        """The places of a further model or optimizer: those of the source, or those within numbered directories."""
        facts = facts_of(other) or DcpFacts(None)
        names = (facts.model_names, facts.optimizer_names) if self.own else ()
        if self.framework in _IN_FOLDERS:
            return Places(*_PLACES[self.framework], *names)
        return Places(facts.model_path or (), facts.optimizer_path or (), facts.flat, *names)


def _places_of(checkpoint: Checkpoint, framework: Framework) -> Places:
    """The source's own places if it has this framework, else the framework's."""
    model, optimizer, flat = _PLACES[framework]
    facts = facts_of(checkpoint)
    if facts is None or facts.framework is not framework:
        return Places(model, optimizer, flat)
    names = facts.model_names, facts.optimizer_names
    if framework in _IN_FOLDERS:
        return Places(model, optimizer, flat, *names)
    model = model if facts.model_path is None else facts.model_path
    optimizer = optimizer if facts.optimizer_path is None else facts.optimizer_path
    return Places(model, optimizer, facts.flat, *names)


def _path(text: str) -> KeyPath:
    return tuple(p for p in text.split(".") if p)


class DcpWriter:
    """Lays out distributed checkpoints."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out the shards of models and optimizers, and the files of a trainer beside them.

        Raises:
            RequestError: `request.unsatisfiable` for a source whose optimizer keeps no param groups;
                `request.invalid` with `--dtype`.
            SourceError: `checkpoint.ambiguous`, `pickle.forbidden_global`.
        """
        if request.dtype is not None:
            raise RequestError(
                "request.invalid",
                "a distributed checkpoint holds the parameters as the optimizer has them: --dtype is for weights",
                fix="leave --dtype out",
            )
        if isinstance(checkpoint.facts, StateTree):
            return _lay_out_tree(checkpoint, checkpoint.facts.tree, request)
        _refuse_quantized(checkpoint)
        laid = _LaidOut(_Target.of(checkpoint, request))
        return laid.layout(laid.files())


class WholeFilesWriter:
    """Lays out files of `torch.save` with whole tensors: one file, or those of Accelerate, the Trainer, torchtune."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out `pytorch_model_fsdp.bin` with `optimizer.bin` for the two, and one file for all others.

        For the Trainer and a file `optimizer.pt`, lay out what it saves without FSDP: `model.safetensors` beside it.
        For torchtune, lay out the weights of an epoch and the state of the recipe.

        Raises:
            RequestError: As `TorchSaveWriter.lay_out`; `request.invalid` for names and keys that these files have
                themselves; `request.unsatisfiable` for quantized states.

        Source: accelerate 1.15.0 `utils/fsdp_utils.py` (FULL_STATE_DICT: `save_fsdp_model`, `save_fsdp_optimizer`);
        verified by loading.
        """
        options = request.options.of(DcpOptions)
        tune = options.framework is Framework.TORCHTUNE
        if not (tune or options.framework in _IN_FOLDERS) or isinstance(checkpoint.facts, StateTree):
            return TorchSaveWriter().lay_out(checkpoint, request, name=name)
        refuse_changes(request)
        numbered = _without_fsdp(options)
        by_place = tune and options.target_param_order is ParamOrder.GROUPS
        asked = set(OF_ONE_FILE) - ({"target_param_order"} if by_place else set[str]())
        fixed = ("files", *(() if numbered else ("torch_file",)), *TARGET_KEYS, *asked)
        if given := [f"--{n.replace('_', '-')}" for n in options.given() if n in fixed]:
            raise RequestError(
                "request.invalid",
                f"the full files of {options.framework} have names of their own, and {listed(given)} asks for others",
                fix=f"leave {listed(given)} out",
            )
        _refuse_quantized(checkpoint)
        laid = _LaidOut(_Target.of(checkpoint, request))
        if tune:
            return laid.layout(laid.files_of_torchtune(numbered=by_place))
        return laid.layout(laid.files_without_fsdp() if numbered else laid.full_files())


def _without_fsdp(options: DcpOptions) -> bool:
    """True for the Trainer's files without FSDP and DeepSpeed, which its own name of the optimizer's asks for."""
    return options.framework is Framework.TRAINER and options.torch_file == NUMBERED_OPTIMIZER


def writes_named_files(request: ConvertRequest) -> bool:
    """True for full files whose optimizer names parameters: of Accelerate, the Trainer under FSDP, torchtune."""
    options = request.options.of(DcpOptions)
    if options.framework is Framework.TORCHTUNE:
        return request.to == "torch_save" and options.target_param_order is None
    return request.to == "torch_save" and options.framework in _IN_FOLDERS and not _without_fsdp(options)


_NUMBERS = (
    "the file keeps its own keys, and its optimizer numbers parameters, which FSDP2 does not load; to give them names: "
    f"--framework {Framework.STATE_DICT}"
)


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    """Refuse optimizer states that only another format's files hold.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    optimizer = checkpoint.optimizer
    if optimizer is not None and optimizer.unread and facts_of(checkpoint) is None:
        raise RequestError(
            "request.unsatisfiable",
            f"the optimizer keeps {listed(optimizer.unread)}, which only the source's own format holds",
            fix="write the weights alone: --to safetensors; or go on with the source's own files on as many ranks",
        )


def _lay_out_tree(checkpoint: Checkpoint, tree: Node, request: ConvertRequest) -> TargetLayout:
    """A state dict that was saved as one file, under its own keys."""
    options = request.options.of(DcpOptions)
    if given := [f"--{n.replace('_', '-')}" for n in other_keys(options)]:
        raise RequestError(
            "request.invalid",
            f"a file of torch.save keeps its own keys, and {listed(given)} asks for others",
            fix=f"leave {listed(given)} out; to write a training checkpoint under other keys, name its directory",
        )
    state_dict = StateDict(checkpoint, Places((), (), flat=False))
    items = mapping_items(tree, what="the state dict").items()
    entries = [entry for key, node in items for entry in state_dict.values((str(key),), node)]
    shards = Shards(ShardOptions(checkpoint.shard_map, request.opaque, options.files))
    numbered = any(map(numbers_parameters, optimizers_of(checkpoint)))
    return TargetLayout(tuple(shards.lay_out(entries)), None, (_NUMBERS,) if numbered else ())


_Part = TypeVar("_Part")
"""A model or an optimizer, as entries or as one value."""


class _LaidOut:
    """The files of one target, with what is to be said about them."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._shards = Shards(ShardOptions(target.checkpoint.shard_map, target.request.opaque, target.options.files))
        self._counters = _counted(target.checkpoint.counters)
        self.warnings: list[str] = []
        self.left_out: list[NotCarried] = []

    def files(self) -> Iterator[TargetFile]:
        """All files."""
        target = self._target
        model, optimizer = self._entries(target.checkpoint, target.places)
        if target.framework in _IN_FOLDERS:
            pairs = [(model, optimizer), *(self._entries(o, target.places_of_other(o)) for o in target.others)]
            for number, (one, other) in enumerate(self._numbered(pairs)):
                if one:
                    yield from self._shards.lay_out(one, folder=MODEL_FOLDER.format(number))
                if other:
                    folder = OPTIMIZER_FOLDER.format(number)
                    yield from self._shards.lay_out(other, folder=folder, counters=self._counters)
            yield from trainer_files(target.checkpoint, target.request, target.framework, _schedulers(target))
            return
        beside: list[StateEntry] = []
        for other in target.others:
            beside += [entry for part in self._entries(other, target.places_of_other(other)) for entry in part]
        if target.framework is Framework.LIGHTNING:
            yield lightning_meta(target.checkpoint, target.request, list(_schedulers(target).values()))
        else:
            state_dict = StateDict(target.checkpoint, target.places)
            beside += [e for key, node in _beside(target) for e in state_dict.values(key, node)]
        taken = {e.path for e in (*model, *optimizer)}
        guarded = bool(optimizer) or not target.own  # the source's own keys are its own optimizer's
        free = [e for e in beside if _is_free(target.places, e, taken, guarded=guarded)]
        lost = dict.fromkeys(key_of(e.path[len(target.home) :][:1]) for e in beside if e not in free)
        self.left_out += carried.named(lost, _TAKEN)
        yield from self._shards.lay_out([*model, *optimizer, *free], counters=self._counters)

    def full_files(self) -> Iterator[TargetFile]:
        """All files of Accelerate or the Trainer under FULL_STATE_DICT: a model and an optimizer are one file each."""
        target = self._target
        pairs = [(target.checkpoint, target.places), *((o, target.places_of_other(o)) for o in target.others)]
        for number, (model, optimizer) in enumerate(self._numbered([self._trees(*pair) for pair in pairs])):
            # Without its file, Accelerate does not load the directory.
            for stem, tree in ((FULL_MODEL, model), (OPTIMIZERS, optimizer)):
                if tree is not None:
                    yield self._torch_file(f"{stem}{f'_{number}' if number else ''}.bin", tree)
        schedulers = _schedulers(target, plain=False)
        yield from trainer_files(target.checkpoint, target.request, target.framework, schedulers)

    def files_without_fsdp(self) -> Iterator[TargetFile]:
        """The Trainer's files without FSDP and DeepSpeed: an optimizer of numbers beside weights.

        Source: transformers 5.23.0 `trainer.py` (`_save_optimizer_and_scheduler`), `modeling_utils.py`
        (`save_pretrained`: of tied tensors one is stored); verified by resuming.
        """
        target, checkpoint = self._target, self._target.checkpoint
        stored = {n: t.index for n, t in model_entries(checkpoint).items() if isinstance(t, PTensorRef)}
        tied = {*checkpoint.shared, *checkpoint.copies}
        weights = {n: checkpoint.shard_map.tensors[i] for n, i in stored.items() if n not in tied}
        entries = [(n, t.dtype, t.shape, t.numel) for n, t in weights.items()]
        template = safetensors_template(entries, {"format": "pt"})
        yield TargetFile(WEIGHTS, template, tuple(stored[n] for n in weights), commit=True)
        self.left_out += carried.extra_states(checkpoint)
        facts = facts_of(checkpoint)
        self.left_out += carried.named(facts.places(), _ONE_MODEL) if facts is not None and target.others else ()
        if checkpoint.optimizer is not None:
            groups, warnings = groups_to_write(checkpoint, needs_initial_lr=False)
            self.warnings += warnings
            yield self._torch_file(
                NUMBERED_OPTIMIZER, numbered_optimizer(checkpoint, groups, odd=odd_states(checkpoint))
            )
        yield from trainer_files(checkpoint, target.request, target.framework, _schedulers(target, plain=False))

    def files_of_torchtune(self, *, numbered: bool) -> Iterator[TargetFile]:
        """The output directory of torchtune: weights of an epoch under the source's names, and the recipe's state.

        Args:
            numbered: The optimizer numbers parameters, as the recipes for one device load it; else it names them, as
                the distributed recipes do.

        Raises:
            RequestError: `request.unsatisfiable` for a source without the state of a recipe.

        Source: torchtune 0.6.1 `training/checkpointing/_checkpointer.py` (`FullModelTorchTuneCheckpointer`),
        `recipes/full_finetune_distributed.py`, `recipes/full_finetune_single_device.py`; verified by resuming.
        """
        target, checkpoint = self._target, self._target.checkpoint
        state, epochs = checkpoint.client_state, checkpoint.client_state.get(_EPOCHS_RUN)
        lost = [key for key in _OF_RECIPE if key not in state]
        if lost or type(epochs) is not int or epochs < 1:
            raise RequestError(
                "request.unsatisfiable",
                f"the source holds no {listed(lost or [_EPOCHS_RUN])} of torchtune's recipe, which goes on from them",
                fix=f"--framework {Framework.STATE_DICT} writes one file of a script",
            )
        model, optimizer = self._trees(checkpoint, target.places)
        if numbered and checkpoint.optimizer is not None:
            groups, _ = groups_to_write(checkpoint, needs_initial_lr=False)
            optimizer = numbered_optimizer(checkpoint, groups, odd=odd_states(checkpoint))
        self.left_out += carried.named(
            [f"lr_scheduler[{i}]" for i, s in enumerate(checkpoint.schedulers) if is_scheduler(s)], _SCHEDULER_ANEW
        )
        yield self._torch_file(f"epoch_{epochs - 1}/model-00001-of-00001.bin", model)
        recipe = {**state, **({} if optimizer is None else {"optimizer": optimizer})}
        yield self._torch_file("recipe_state/recipe_state.pt", mapping_of(recipe))

    def _torch_file(self, name: str, tree: Node) -> TargetFile:
        target, root = self._target, name.rpartition("/")[2].rpartition(".")[0]
        template, slots = tree_template(root, tree, target.checkpoint.shard_map, opaque=target.request.opaque)
        return TargetFile(name, template, slots, commit=True)

    def _trees(self, checkpoint: Checkpoint, places: Places) -> tuple[Node, Node]:
        """The state dict of a model, and that of its optimizer; None for one that is not there."""
        state_dict = StateDict(checkpoint, replace(places, model=(), optimizer=(), flat=False))
        model = None if _is_alone(checkpoint) else state_dict.model_tree()
        if checkpoint.optimizer is None:
            return model, None
        groups, warnings = groups_to_write(checkpoint, needs_initial_lr=False)
        optimizer = state_dict.optimizer_tree(groups, self._target.request.missing_moments)
        facts = facts_of(checkpoint)
        self.warnings += [_JOINED.format(count=len(groups))] if facts is not None and facts.flat else []
        self.warnings += [*warnings, *state_dict.warnings]
        return model, optimizer

    def layout(self, files: Iterable[TargetFile]) -> TargetLayout:
        """These files with all that is to be said about them."""
        target, checkpoint = self._target, self._target.checkpoint
        laid = list(files)
        warnings = [*dict.fromkeys(self.warnings)]
        warnings += [MADE_STATE] if makes_trainer_state(checkpoint, target.framework) else []
        if makes_scheduler(checkpoint, target.framework, _schedulers(target)):
            updates = steps_and_updates(checkpoint)[1] or 0
            warnings.append(MADE_SCHEDULER.format(updates=counted(updates, "update")))
        warnings += [MADE_META] if target.framework is Framework.LIGHTNING and not target.own else []
        warnings += _made_counters(target)
        warnings += [carried.padding_left_out(checkpoint)] if checkpoint.padding_rows else []
        # Files without which loaders refuse the directory are published last.
        ordered = [*(f for f in laid if not f.commit), *(f for f in laid if f.commit)]
        left_out = (*_not_carried(target), *self.left_out)
        return TargetLayout(tuple(ordered), None, tuple(warnings), not_carried=left_out)

    def _entries(self, checkpoint: Checkpoint, places: Places) -> tuple[list[StateEntry], list[StateEntry]]:
        """The entries of a model, and those of its optimizer."""
        target, facts = self._target, facts_of(checkpoint)
        state_dict = StateDict(checkpoint, places)
        alone = _is_alone(checkpoint)
        # All of a model without an optimizer is frozen, such as a moving average.
        exclude = target.request.exclude_frozen and checkpoint.optimizer is not None
        model = [] if alone else list(state_dict.model(exclude_frozen=exclude))
        if checkpoint.optimizer is None:
            return model, []
        needs_rate = target.framework is Framework.TORCHTITAN and not target.own
        groups, warnings = groups_to_write(checkpoint, needs_initial_lr=needs_rate)
        optimizer = list(state_dict.optimizer(groups, target.request.missing_moments))
        if facts is not None and facts.flat and not places.flat:
            self.warnings.append(_JOINED.format(count=len(groups)))
        if target.request.opaque is OpaquePolicy.DROP:  # named by the request's reader, as all that is dropped
            optimizer = [e for e in optimizer if not (isinstance(e, OpaqueEntry) and e.tensor.is_foreign)]
        self.warnings += [*warnings, *state_dict.warnings]
        return model, optimizer

    def _numbered(self, pairs: Sequence[tuple[_Part, _Part]]) -> list[tuple[_Part, _Part]]:
        """Models with their optimizers in the order of their numbers: the source's, or the model to read first."""
        checkpoints = (self._target.checkpoint, *self._target.others)
        if self._target.own:
            return [
                pair for _, pair in sorted(zip(map(_number_of, checkpoints), pairs, strict=True), key=lambda p: p[0])
            ]
        alone = [p for p in pairs[1:] if not p[0]]
        names = [
            ".".join(map(str, f.model_path)) for c in checkpoints if (f := facts_of(c)) and f.model_path is not None
        ]
        if len(pairs) > 1:
            self.warnings.append(f"models are numbered in the order {listed(names)}: prepare them in this order")
        for other in self._target.others:
            facts = facts_of(other)
            if facts is not None and facts.model_path is None and facts.optimizer_path is not None:
                self.left_out += carried.named([key_of(facts.optimizer_path)], "Accelerate keeps one optimizer a model")
        return [p for p in pairs if p not in alone]


def _is_alone(checkpoint: Checkpoint) -> bool:
    """True for an optimizer whose model is another checkpoint's."""
    facts = facts_of(checkpoint)
    return facts is not None and facts.model_path is None and facts.optimizer_path is not None


def _number_of(checkpoint: Checkpoint) -> int:
    """The number of a model of Accelerate, by the directory that held it; 0 for the only one."""
    facts = facts_of(checkpoint)
    path = () if facts is None else facts.model_path or facts.optimizer_path or ()
    digits = str(path[0]).rpartition("_")[2] if path else ""
    return int(digits) if digits.isdecimal() else 0


def _counted(counters: Counters) -> dict[str, int]:
    return {f.name: value for f in fields(counters) if (value := getattr(counters, f.name)) is not None}


def _schedulers(target: _Target, *, plain: bool = True) -> dict[int, Node]:
    """The state dicts of torch's schedulers, by their place in the target; `plain` where torch flattens them.

    Under the source's own keys all stay as they are. Elsewhere the first place is that of the model to read first: its
    scheduler takes it, or none does.
    """
    checkpoint = target.checkpoint
    nodes = [plain_scheduler(s) if plain and is_scheduler(s) else s for s in checkpoint.schedulers]
    numbers = [i for i, s in enumerate(checkpoint.schedulers) if is_scheduler(s)]
    if target.own and target.framework is not Framework.TRAINER:
        return {place: nodes[i] for place, i in enumerate(numbers)}
    own = checkpoint.own_scheduler
    others = [] if target.framework in _ONE_SCHEDULER else [i for i in numbers if i != own]
    order = [*([own] if own in numbers else []), *others]
    first = 0 if own in numbers else 1
    return {place: nodes[i] for place, i in enumerate(order, first)}


def _left_schedulers(target: _Target) -> Iterator[str]:
    """The keys of torch's schedulers for which the target has no place."""
    checkpoint = target.checkpoint
    if target.framework not in _ONE_SCHEDULER or (target.own and target.framework is not Framework.TRAINER):
        return
    keys = checkpoint.scheduler_keys or tuple(f"lr_scheduler[{i}]" for i in range(len(checkpoint.schedulers)))
    for number, (key, node) in enumerate(zip(keys, checkpoint.schedulers, strict=True)):
        if is_scheduler(node) and number != checkpoint.own_scheduler:
            yield key


def _beside(target: _Target) -> Iterator[tuple[KeyPath, Node]]:
    """Schedulers and everything else that the script saved, each with its place beside the model."""
    checkpoint, facts = target.checkpoint, facts_of(target.checkpoint)
    paths = facts.scheduler_paths if facts is not None and target.own else ()
    for number, node in _schedulers(target).items():
        default = (*target.home, "lr_scheduler" if not number else f"lr_scheduler_{number}")
        yield paths[number] if number < len(paths) else default, flattened_scheduler(node)
    state = {**trainer_facts(checkpoint).other_models, **checkpoint.client_state}
    counted = checkpoint.counters.steps is not None or checkpoint.counters.tokens is not None
    if target.framework is Framework.TORCHTITAN and (counted or not target.own) and "train_state" not in state:
        state["train_state"] = mapping_of({
            "step": steps_of(checkpoint) or 0, "ntokens_seen": checkpoint.counters.tokens or 0,
        })  # fmt: skip
    at_root = facts.at_root if facts is not None and target.own else frozenset[str]()
    for key, node in state.items():
        yield (*(() if str(key) in at_root else target.home), key), node


def _is_free(places: Places, entry: StateEntry, taken: Container[KeyPath], *, guarded: bool) -> bool:
    """True if readers cannot take an entry for a part of the model, or of the optimizer where that is `guarded`."""
    path, depth = entry.path, len(places.optimizer)
    if path in taken:
        return False
    head = str(path[depth]).partition(".")[0] if len(path) > depth and path[:depth] == places.optimizer else ""
    if guarded and (head in ("state", "param_groups") or path == places.optimizer):
        return False
    if not places.model:
        return len(path) > 1 or not isinstance(entry, TensorEntry)
    return path[: len(places.model)] != places.model


def _made_counters(target: _Target) -> Iterator[str]:
    """Warnings about counters that a framework insists on and the source does not have."""
    titan, counters = target.framework is Framework.TORCHTITAN, target.checkpoint.counters
    if target.own or (titan and "train_state" in target.checkpoint.client_state):
        return
    if titan and counters.tokens is None:
        yield "train_state.ntokens_seen is 0, as the source counts no tokens"
    counted = {p.scalars[STEP].value for p in target.checkpoint.trained if STEP in p.scalars}
    if counters.steps is None and len(counted) > 1 and target.framework is not Framework.STATE_DICT:
        low, high = min(counted), max(counted)
        yield f"parameters were updated {low:g} to {high:g} times, and the number of steps is taken to be {high:g}"
    if steps_of(target.checkpoint) is None and target.framework in (Framework.TORCHTITAN, Framework.LIGHTNING):
        yield "the number of steps is 0, as the source counts none: set it after loading"


def _not_carried(target: _Target) -> Iterator[NotCarried]:
    checkpoint = target.checkpoint
    one = len(checkpoint.schedulers) == 1
    others = [
        "lr_scheduler" if one else f"lr_scheduler[{i}]"
        for i, s in enumerate(checkpoint.schedulers)
        if not is_scheduler(s)
    ]
    yield from carried.named(others, _OTHER_SCHEDULER)
    yield from carried.named(_left_schedulers(target), _SECOND_SCHEDULER)
    facts = facts_of(checkpoint)
    if target.framework not in _IN_FOLDERS:
        yield from carried.named(dict.fromkeys(k for r in checkpoint.rng for k in r), _NO_PLACE)
    else:
        yield from left_out(checkpoint)
    if facts is not None and facts.rank_states and not rank_states(checkpoint, target.framework):
        yield from carried.named([RANK_STATES], _NO_PLACE)
    if facts is not None and target.framework is not Framework.TRAINER:
        yield from carried.named(facts.texts, _NO_PLACE)
    if target.framework in (*_IN_FOLDERS, Framework.LIGHTNING, Framework.TORCHTUNE):
        yield from carried.named(trainer_facts(checkpoint).other_models, carried.OF_ANOTHER)
    if facts is not None and not target.others:
        yield from carried.named(facts.places(), _ONE_MODEL)
    numbers = checkpoint.optimizer.rank_numbers if checkpoint.optimizer is not None else ()
    yield from carried.named((f"optimizer.{name}" for name in numbers), _OF_PARTITIONS)
    if facts is None:
        written = {RANK_STATES} if rank_states(checkpoint, target.framework) else set[str]()
        written |= {TRAINER_STATE} if target.framework is Framework.TRAINER else set[str]()
        written |= {*trainer_facts(checkpoint).other_models}
        others_own = carried.of_the_format(checkpoint, "only the source's framework has it")
        yield from (one for one in others_own if one.path not in written)
    for one in (checkpoint, *target.others) if target.request.exclude_frozen else ():
        if one.optimizer is not None:
            yield from carried.frozen_parameters(one)
