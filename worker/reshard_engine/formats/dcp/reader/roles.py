"""Sorts the entries of a saved state: which are models, which are optimizers, and which optimizer trains which model.

Frameworks nest the same state dicts under different keys. An optimizer is found by its `param_groups`. It trains the
place that holds all of its parameters. If several places do (a model and its moving average, say), nothing in the files
tells which of them it trains: the user chooses.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`get_optimizer_state_dict`, `_flatten_optim_state_dict`),
`distributed/checkpoint/_traverse.py` (paths of `planner_data`); torchtitan 0.3 `components/optimizer.py`; verified by
running.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import RequestError, SourceError, listed, printable
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Question, Undecided
from reshard_engine.formats.dcp.facts import MODEL_DIRECTORY, OPTIMIZER_DIRECTORY
from reshard_engine.formats.dcp.reader.optimizer import GROUPS, NamesOfModel, NodeOf, OptimizerEntries, Shape
from reshard_engine.formats.dcp_files.metadata.model import KeyPath, TensorEntry
from reshard_engine.formats.dcp_files.saved_state import Item, SavedState, SavedTensor
from reshard_engine.pickles.nodes import PList, PTuple, is_mapping

_FLAT_PARAMETER = "_flat_param"
_EXTRA_STATE = "_extra_state"
_QUANTIZED = ("uint8", "int8")
LEAST_DIMS = 2
"""The dimensions of a matrix."""
ROOT = "."
"""The word by which users name the root of a state dict."""


@dataclass(slots=True)
class ModelEntries:
    """The entries of one model's state dict."""

    path: KeyPath
    weights: dict[str, list[SavedTensor]] = field(default_factory=dict[str, list[SavedTensor]])
    """Tensors by name. Tensors that several ranks hold are listed together."""
    extra_states: dict[KeyPath, list[Item]] = field(default_factory=dict[KeyPath, list[Item]])
    """Other entries, by their path in the model's state dict."""

    @property
    def names(self) -> NamesOfModel:
        """The names and shapes of its tensors."""
        return NamesOfModel({name: saved[0].entry.shape for name, saved in self.weights.items()})


@dataclass(frozen=True, slots=True)
class Pair:
    """A model and the optimizer that trains it; either may be missing."""

    model: ModelEntries | None
    optimizer: OptimizerEntries | None


@dataclass(frozen=True, slots=True)
class Roles:
    """The entries of a saved state by role."""

    pairs: tuple[Pair, ...]
    """All models and optimizers; the first pair is the one to read."""
    rest: Mapping[KeyPath, list[Item]]
    """Everything else, by its path."""
    passed_over: tuple[KeyPath, ...]
    """Places in the rest that may be models."""
    undecided: tuple[Undecided, ...] = ()


def key_of(path: KeyPath) -> str:
    """The key of a place, as users name it."""
    return ".".join(map(str, path)) or ROOT


def sort_roles(state: SavedState, choices: SourceChoices, node_of: NodeOf) -> Roles:
    """Sort the entries of a saved state.

    Args:
        state: The saved state.
        choices: The user's choice of a model and an optimizer.
        node_of: The value of an entry.

    Raises:
        SourceError: `source.unsupported` for FSDP's local state dicts, which keep neither names nor shapes;
            `checkpoint.incomplete` for an optimizer without a model; `checkpoint.malformed`.
        RequestError: `request.invalid` for a choice that is not there.
    """
    return _Sorting(state, choices, node_of).roles()


class _Sorting:
    def __init__(self, state: SavedState, choices: SourceChoices, node_of: NodeOf) -> None:
        _refuse_flat_parameters(state)
        self._choices, self._node_of = choices, node_of
        # Ranks write what they hold, so the metadata's order is not that of the state dict.
        numbers = {path: i for i, path in enumerate(state.order)}
        self._items = sorted((*state.tensors, *state.values), key=lambda i: numbers.get(i.path, len(numbers)))
        self._optimizers = _optimizers(i for i in self._items if not self._is_other_value(i))
        self._places = _places(i for i in self._items if self._optimizer_of(i.path) is None)

    def roles(self) -> Roles:
        self._rest: dict[KeyPath, list[Item]] = {}
        for item in self._items:
            place = self._optimizer_of(item.path)
            if place is not None and not self._optimizers[place].add(item):
                self._rest.setdefault(item.path, []).append(item)
        for optimizer in self._optimizers.values():
            optimizer.read_groups(self._node_of)
        fitting = {
            o: [m for m, names in self._places.items() if _may_train(o, m) and e.fits(names)]
            for o, e in self._optimizers.items()
        }
        chosen, undecided = self._decided(fitting)
        pairs = self._paired(chosen, fitting)
        models = {model: ModelEntries(model) for model, _ in pairs if model is not None}
        for item in self._items:
            if self._optimizer_of(item.path) is None:
                self._place(item, models)
        return Roles(
            tuple(Pair(None if m is None else models[m], None if o is None else self._optimizers[o]) for m, o in pairs),
            self._rest,
            tuple(p for p in self._places if p and p not in models),
            undecided,
        )

    def _is_other_value(self, item: Item) -> bool:
        """True for a value that is called as param groups are, and is none: an entry of a configuration, say."""
        if isinstance(item, SavedTensor) or item.path[-1] != GROUPS:
            return False
        node = self._node_of([item])
        return not isinstance(node, PList | PTuple) or not all(map(is_mapping, node.items))

    def _optimizer_of(self, path: KeyPath) -> KeyPath | None:
        return next((place for place, optimizer in self._optimizers.items() if optimizer.owns(path)), None)

    def _decided(
        self, fitting: Mapping[KeyPath, Sequence[KeyPath]]
    ) -> tuple[tuple[KeyPath | None, KeyPath | None], tuple[Undecided, ...]]:
        """The model to read and its optimizer, and what is left open."""
        model = self._chosen(self._choices.model_key, self._places, "model")
        optimizer = self._chosen(self._choices.optimizer_key, self._optimizers, "optimizer")
        possible = [
            (m, o)
            for o, found in fitting.items()
            for m in found
            if (model is None or m == model) and (optimizer is None or o == optimizer)
        ]
        if not possible:
            return self._without_fit(model, optimizer)
        models = list(dict.fromkeys(m for m, _ in possible))
        optimizers = list(dict.fromkeys(o for m, o in possible if m == models[0]))
        undecided: list[Undecided] = []
        if len(models) > 1:
            undecided.append(_which(Question.MODEL, models, "places hold all parameters of an optimizer"))
        elif len(optimizers) > 1:
            undecided.append(_which(Question.OPTIMIZER, optimizers, f"optimizers train {key_of(models[0])}"))
        return (models[0], optimizers[0]), tuple(undecided)

    def _without_fit(
        self, model: KeyPath | None, optimizer: KeyPath | None
    ) -> tuple[tuple[KeyPath | None, KeyPath | None], tuple[Undecided, ...]]:
        """The choice where no optimizer fits a model: there is none, or it is of another save, or keeps too little."""
        if model is not None and optimizer is None:
            return (model, None), ()
        left = [optimizer] if optimizer is not None else list(self._optimizers)
        if not self._places:
            if left:
                raise SourceError(
                    "checkpoint.incomplete",
                    "it holds an optimizer's states and no model",
                    fix="name the directory that holds both, such as that of Accelerate's save_state",
                )
            return (None, None), ()
        models = [model] if model is not None else list(self._places)
        if left:
            named = {m: self._optimizers[left[0]].named_by(self._places[m]) for m in models}
            models = [m for m, count in named.items() if count == max(named.values())]
            if not any(named.values()) and optimizer is None and all(not e.numbered for e in self._optimizers.values()):
                # It may train several places together.
                asked = [_which(Question.MODEL, models, "places could be the model")] if len(models) > 1 else []
                return (models[0], None), (*asked, self._of_no_place(left[0]))
        # Reading them together says what does not fit.
        undecided = [_which(Question.MODEL, models, "places could be the model")] if len(models) > 1 else []
        undecided += [_which(Question.OPTIMIZER, left, "optimizers fit no model")] if len(left) > 1 else []
        return (models[0], left[0] if left else None), tuple(undecided)

    def _of_no_place(self, place: KeyPath) -> Undecided:
        names = listed([m for g in self._optimizers[place].groups for m in g.members])
        text = (
            f"the optimizer at {key_of(place)} trains {names}, which no place in the state dict has under these names"
        )
        return Undecided(Question.OPTIMIZER, text, "save the model and the optimizer under the names of one module")

    def _chosen(self, key: str | None, places: Iterable[KeyPath], what: str) -> KeyPath | None:
        """The place that the user named; None if the user named none."""
        if key is None:
            return None
        known_places = list(places)
        exact = [p for p in known_places if key_of(p) == key]
        below = [p for p in known_places if p and key_of(p[:1]) == key]
        if exact or len(below) == 1:
            return (exact or below)[0]
        raise no_such_place(what, key, list(map(key_of, known_places)))

    def _paired(
        self, first: tuple[KeyPath | None, KeyPath | None], fitting: Mapping[KeyPath, Sequence[KeyPath]]
    ) -> list[tuple[KeyPath | None, KeyPath | None]]:
        """The pair to read, and behind it every other optimizer with its model, then models that no optimizer trains.

        Where there is an optimizer, a place that holds none of an optimizer's parameters is not a model, but something
        else that the script saved.
        """
        found = [first]
        taken = {first[0]}
        for optimizer, models in fitting.items():
            if optimizer == first[1]:
                continue
            # One that numbers its parameters stays as it is, and so needs no names.
            sure = len(models) == 1 and models[0] not in taken and not self._optimizers[optimizer].numbered
            model = models[0] if sure else None
            taken.add(model)
            found.append((model, optimizer))
        trained = dict.fromkeys(m for models in fitting.values() for m in models)
        others = [
            m for m in self._places if not fitting or m in trained or (m and MODEL_DIRECTORY.fullmatch(str(m[0])))
        ]
        found += [(model, None) for model in others if model not in taken]
        return found

    def _place(self, item: Item, models: Mapping[KeyPath, ModelEntries]) -> None:
        """Add an entry to the model in whose state dict it lies, or to the rest."""
        path = item.path
        model = max((m for m in models if _within(path, m)), key=len, default=None)
        if model is None:
            self._rest.setdefault(path, []).append(item)
            return
        inner = path[len(model) :]
        extra = any(_EXTRA_STATE in str(part) for part in inner)
        if isinstance(item, SavedTensor) and not extra and (len(inner) == 1 or model):
            models[model].weights.setdefault(".".join(map(str, inner)), []).append(item)
        elif model or extra:
            models[model].extra_states.setdefault(inner, []).append(item)
        else:
            self._rest.setdefault(path, []).append(item)


def choose(question: Question, keys: Sequence[str], text: str) -> Undecided:
    """A question of which one of several things is meant, with their keys."""
    return Undecided(question, f"{text}: {listed(keys)}", _flags(question.value, keys))


def no_such_place(what: str, key: str, known_places: Sequence[str]) -> RequestError:
    """The error for a key of the user where nothing of the kind is: `model`, `optimizer` or `scheduler`."""
    text = f"the source has no {what} at {printable(key)!r}; there is {listed(known_places) or 'none'}"
    return RequestError("request.invalid", text, fix=_flags(what, known_places))


def _flags(what: str, keys: Sequence[str]) -> str:
    """Flags to paste that choose each of some keys."""
    some = [f"--{what}-key {shlex.quote(printable(key))}" for key in keys[:3]]
    return ", or ".join(some) + (f" ({len(keys)} are there)" if len(keys) > len(some) else "") or f"no --{what}-key"


def _which(question: Question, places: Sequence[KeyPath], what: str) -> Undecided:
    return choose(question, [key_of(p) for p in places], f"{len(places)} {what}")


def _may_train(optimizer: KeyPath, model: KeyPath) -> bool:
    """False for a model and an optimizer of Accelerate with different numbers.

    Source: accelerate 1.15.0 `checkpointing.py`, `accelerator.py` (`save_state`: optimizer i is that of model i).
    """
    numbers = [
        match[1]
        for path, name in ((model, MODEL_DIRECTORY), (optimizer, OPTIMIZER_DIRECTORY))
        if path and (match := name.fullmatch(str(path[0]))) is not None
    ]
    return len(numbers) < 2 or numbers[0] == numbers[1]


def _refuse_flat_parameters(state: SavedState) -> None:
    flat = [t.entry.key for t in state.tensors if str(t.path[-1]).rpartition(".")[2] == _FLAT_PARAMETER]
    if flat:
        raise SourceError(
            "source.unsupported",
            f"it holds flat parameters of FSDP (LOCAL_STATE_DICT), without the names and shapes within: {listed(flat)}",
            fix="save with StateDictType.SHARDED_STATE_DICT, or with torch.distributed.checkpoint.state_dict",
        )


def _within(path: KeyPath, place: KeyPath) -> bool:
    return len(path) > len(place) and path[: len(place)] == place


def _optimizers(items: Iterable[Item]) -> dict[KeyPath, OptimizerEntries]:
    """The optimizers by their places, in the order in which they come."""
    found: dict[KeyPath, OptimizerEntries] = {}
    for path in (i.path for i in items):
        for depth, part in enumerate(path):
            flat = isinstance(part, str) and part.startswith(f"{GROUPS}.") and depth == len(path) - 1
            if part == GROUPS or flat:
                found.setdefault(path[:depth], OptimizerEntries(path[:depth], flat=flat))
                break
    return found


def _places(items: Iterable[Item]) -> dict[KeyPath, NamesOfModel]:
    """The places that may be a model's state dict, with the names and shapes of their tensors.

    A model has a tensor that can be trained and has a dimension: FSDP refuses parameters without one. A model may also
    consist of quantized weights. Its keys are names; a list, whose keys are numbers, is none.
    """
    shapes: dict[KeyPath, dict[str, Shape]] = {}
    trainable: Counter[KeyPath] = Counter()
    for item in items:
        if not isinstance(item, SavedTensor) or isinstance(item.path[-1], int):
            continue
        extra = next((i for i, part in enumerate(item.path) if _EXTRA_STATE in str(part)), None)
        if extra is not None:
            continue
        place = item.path[:-1]
        shapes.setdefault(place, {})[str(item.path[-1])] = item.entry.shape
        entry = item.entry
        trainable[place] += may_be_quantized(entry) or (entry.shape != () and entry.dtype.trainable)
    return {
        place: NamesOfModel(found) for place, found in shapes.items() if trainable[place] or not any(trainable.values())
    }


def may_be_quantized(entry: TensorEntry) -> bool:
    """True for a matrix of bytes, as which quantized weights are saved. A vector of bytes is a random state, say."""
    return entry.dtype.name in _QUANTIZED and len(entry.shape) >= LEAST_DIMS
