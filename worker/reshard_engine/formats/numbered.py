"""Optimizers as `Optimizer.state_dict()` saves them: names of the parameters that they number, and whose they are.

Names are proven as far as the shapes of the states leave one way to give them. Of several models an optimizer may be
that of each one that has all of its parameters.

Source: torch 2.13.0 `optim/optimizer.py` (`state_dict`).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.choices import NO_SCHEDULER
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard.options import SourceChoices
from reshard_engine.checkpoint import Question, Undecided
from reshard_engine.formats.model_weights import StoredNames, plain_name, shown_names
from reshard_engine.formats.trainer_files import is_scheduler
from reshard_engine.pickles.nodes import Node, PList, PTensor, PTuple, mapping_items
from reshard_engine.pickles.rebuild import made_of_tensors
from reshard_engine.pickles.trees import is_extra_state
from reshard_engine.tensors.dtypes import BY_NAME

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The shape of a tensor, and the kind of its elements.

    The moments of a complex parameter are complex, and those of any other parameter are not.

    Source: torch 2.13.0 `optim/adam.py` (`torch.zeros_like(p)`, and `torch.view_as_real` for each step), as all
    optimizers of `torch.optim`; verified by running.
    """

    shape: Shape
    complex: bool = False

    def __str__(self) -> str:
        """The shape as messages show it."""
        return f"complex {self.shape}" if self.complex else str(self.shape)

    @classmethod
    def of_states(cls, forms: Collection[Form]) -> Form | None:
        """The form of the parameter whose states have these forms, which are of one shape; None if there are none."""
        return max(forms, key=lambda form: form.complex, default=None)

    def may_be_of(self, parameter: Form) -> bool:
        """True if states of this form may be those of a parameter that the user or the file names."""
        return self.shape == parameter.shape and (parameter.complex or not self.complex)


STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_NAMES = "param_names"
"""The names that a group keeps if the optimizer was made of named parameters."""
_ADAPTER = (".lora_", ".modules_to_save.")
"""Parts of the names of parameters that PEFT trains; it freezes all others.

Source: peft 0.21.2 `tuners/tuners_utils.py` (`_mark_only_adapters_as_trainable`)."""


SAY_ORDER = "--param-order FILE with the names of all parameters in the optimizer's order, one a line"
"""The end of every fix where nothing tells the names of an optimizer's numbers."""
WEIGHTS_ALONE = "the weights alone can be had: --to safetensors"
"""The end of every fix where an optimizer stays unread."""


class Unread(Exception):  # noqa: N818 - the optimizer stays unread, which is no error of the source
    """The optimizer cannot be read; the text says why, and the fix what helps."""

    def __init__(self, text: str, fix: str, question: Question = Question.ORDER) -> None:
        super().__init__(text)
        self.text, self.fix, self.question = text, fix, question


def entries_of(node: Node) -> dict[str | int, Node]:
    """The entries of a mapping with plain keys; none of any other value, such as a script's mapping of tuples."""
    try:
        return mapping_items(node, what="a value")
    except SourceError:
        return {}


def below(key: str | int, node: Node) -> Iterator[tuple[str, Node]]:
    """The items of a list or a mapping, each with its place."""
    if isinstance(node, PList | PTuple):
        yield from ((f"{key}.{number}", item) for number, item in enumerate(node.items))
    else:
        yield from ((f"{key}.{k}", item) for k, item in entries_of(node).items())


def is_optimizer(node: Node) -> bool:
    """True for the state dict of an optimizer: a mapping with `state` and `param_groups`."""
    return {STATE, GROUPS} <= entries_of(node).keys()


def optimizers_in(root: Node) -> list[Node]:
    """The state dicts of optimizers in a file's mapping: its entries, and the items of lists and mappings in it."""
    found: list[Node] = []
    for key, node in entries_of(root).items():
        found += [node] if is_optimizer(node) else [item for _, item in below(key, node) if is_optimizer(item)]
    return found


def numbers_parameters(optimizer: Node) -> bool:
    """True if an optimizer's states are keyed by numbers, as `Optimizer.state_dict()` keys them."""
    states = entries_of(entries_of(optimizer)[STATE])
    return bool(states) and all(type(key) is int for key in states)


def only_way(wanted: Sequence[Form | None], forms: Mapping[str, Form]) -> list[str] | None:
    """The names of numbered parameters if each has a form that one tensor of the model alone has; else None."""
    by_form: dict[Form, list[str]] = {}
    for name, form in forms.items():
        by_form.setdefault(form, []).append(name)
    held = Counter(wanted)
    found = [by_form.get(form, []) if form is not None and held[form] == 1 else [] for form in wanted]
    return [names[0] for names in found] if all(len(names) == 1 for names in found) else None


def in_models_order(
    wanted: Sequence[Form | None], spans: Sequence[int], model: Sequence[tuple[str, Form]]
) -> list[str] | None:
    """The names of parameters that come in the model's order within each span; None unless forms leave one way."""
    found: list[str] = []
    forms = [form for _, form in model]
    for begin, length in zip(_starts(spans), spans, strict=True):
        some = list(wanted[begin : begin + length])
        first = _matched(some, forms)
        last = _matched(some[::-1], forms[::-1])
        if first is None or last is None or first != [len(forms) - 1 - i for i in reversed(last)]:
            return None
        found += [model[i][0] for i in first]
    return found if len(set(found)) == len(found) else None


def of_these_forms(forms: Mapping[str, Form], wanted: Collection[Form | None]) -> dict[str, Form]:
    """The tensors that numbers may be of: where each number has a form, those of these forms, else all of them."""
    known = {*wanted}
    return {name: form for name, form in forms.items() if None in known or form in known}


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _matched(wanted: Sequence[Form | None], forms: Sequence[Form]) -> list[int] | None:
    """The first places of these forms in order; None if there are none. A form that is None fits everywhere."""
    found: list[int] = []
    at = 0
    for form in wanted:
        while at < len(forms) and form is not None and forms[at] != form:
            at += 1
        if at == len(forms):
            return None
        found.append(at)
        at += 1
    return found


# The entries of a file that a script saved, by what they are.


def is_model(node: Node) -> bool:
    """True for the state dict of a module: names, each with a tensor, at least one that can be trained."""
    items = entries_of(node)
    tensors = {k: v for k, v in items.items() if isinstance(v, PTensor) or made_of_tensors(v) is not None}
    trainable = any(not isinstance(v, PTensor) or BY_NAME[v.dtype].trainable for v in tensors.values())
    return trainable and all(isinstance(k, str) and (k in tensors or is_extra_state(k)) for k in items)


@dataclass(slots=True)
class Sections:
    """The entries of a file by what they are."""

    models: dict[str, Node] = field(default_factory=dict[str, Node])
    optimizers: dict[str, Node] = field(default_factory=dict[str, Node])
    schedulers: dict[str, Node] = field(default_factory=dict[str, Node])
    rest: dict[str | int, Node] = field(default_factory=dict[str | int, Node])

    @classmethod
    def of(cls, root: Mapping[str | int, Node]) -> Sections:
        """Sort the entries of a file's mapping."""
        found = cls()
        for key, node in root.items():
            inner = dict(below(key, node))
            if is_optimizer(node):
                found.optimizers[str(key)] = node
            elif _is_scheduler(node):
                found.schedulers[str(key)] = node
            elif is_model(node):
                found.models[str(key)] = node
            elif inner and all(map(is_optimizer, inner.values())):
                found.optimizers |= inner
            elif inner and all(map(_is_scheduler, inner.values())):
                found.schedulers |= inner
            else:
                found.rest[key] = node
        return found


def _is_scheduler(node: Node) -> bool:
    return bool(entries_of(node)) and is_scheduler(node)


def own_scheduler(keys: Sequence[str], optimizers: int, chosen: str | None) -> tuple[int | None, tuple[Undecided, ...]]:
    """The index of the read optimizer's scheduler: the only one of the only optimizer, or the user's choice.

    Args:
        keys: The keys of all schedulers.
        optimizers: The number of optimizers in the save.
        chosen: The user's choice.

    Raises:
        RequestError: `request.invalid` for a scheduler that is not there.
    """
    flags = [*keys, NO_SCHEDULER]
    which = ", or ".join(f"--scheduler-key {_quoted(key)}" for key in flags)
    if chosen is not None:
        if chosen not in flags:
            text = f"the source has no scheduler at {printable(chosen)!r}; there is {_said(keys) or 'none'}"
            raise RequestError("request.invalid", text, fix=which)
        return (keys.index(chosen) if chosen in keys else None), ()
    if not keys or (len(keys) == 1 and optimizers < 2):
        return 0 if keys else None, ()
    unclear = (
        f"it has {counted(optimizers, 'optimizer')} and {counted(len(keys), 'learning-rate scheduler')}, and nothing "
        f"tells which is this optimizer's: {_said(keys)}"
    )
    return 0, (Undecided(Question.SCHEDULER, unclear, which),)


def frozen_by_peft(trained: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """The other parameters, which PEFT froze, if the trained ones are all parameters of an adapter; else none."""
    of_adapter = {name for name in (*trained, *others) if any(part in f".{name}" for part in _ADAPTER)}
    return tuple(others) if of_adapter and of_adapter == {*trained} else ()


def split_base(
    members: Mapping[str, int], updated: Collection[str]
) -> tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]:
    """Take parameters without states for frozen where an adapter of PEFT is what has states.

    Args:
        members: The group of each numbered parameter, by its name.
        updated: The names of those that have states.

    Returns:
        The members that are left, those that PEFT froze, and the warnings that say so. Nothing is taken for frozen
        unless the adapter's parameters, all of them and no others, have states.
    """
    frozen = frozen_by_peft(updated, [n for n in members if n not in updated])
    if not frozen:
        return {**members}, (), ()
    text = (
        f"the optimizer lists {counted(len(frozen), 'parameter')} of the base model that PEFT froze and that have no "
        "states; they are read as frozen"
    )
    return {n: group for n, group in members.items() if n not in frozen}, frozen, (text,)


# Which optimizer is which model's, where a save has several of them.


def fits(optimizer: Node, shapes: Mapping[str, Shape]) -> bool:
    """True if a model may have all parameters of an optimizer: their names, or as many tensors of their shapes.

    Args:
        optimizer: Its state dict.
        shapes: The shapes of the model's tensors by name.
    """
    entries = entries_of(optimizer)
    states, stored = entries_of(entries[STATE]), StoredNames(shown_names(shapes))
    named: dict[str, Node] = {}
    numbered: list[Node] = []
    for group in (entries_of(group) for _, group in below(GROUPS, entries[GROUPS])):
        names = [n for _, n in below(_NAMES, group.get(_NAMES))]
        keys = [m for _, m in below(PARAMS, group.get(PARAMS))] or names
        for key, name in zip(keys, names if len(names) == len(keys) else keys, strict=True):
            held = states.get(key) if isinstance(key, str | int) else None
            if isinstance(name, str):
                named[name] = held
            else:
                numbered.append(held)
    held = Counter(shape for node in numbered if (shape := _shape_of(node)) is not None)
    own = {name: stored.of(name) for name in named}
    same = all(n is not None and shapes[n] == (_shape_of(named[name]) or shapes[n]) for name, n in own.items())
    return same and len(numbered) <= len(shapes) and held <= Counter(shapes.values())


def shape_of(node: Node) -> Shape | None:
    """The shape of a tensor, of the whole one if it is sharded; None for any other value."""
    if isinstance(node, PTensor):
        return node.shape
    made = made_of_tensors(node)
    return None if made is None else made.shape


def _shape_of(states: Node) -> Shape | None:
    """The shape that all states of a parameter have; None if they have several, or none."""
    shapes = {shape for node in entries_of(states).values() if (shape := shape_of(node))}
    return next(iter(shapes)) if len(shapes) == 1 else None


@dataclass(frozen=True, slots=True)
class Pair:
    """The model to read and its optimizer, and what is left open."""

    model: str
    optimizer: str | None
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class Several:
    """The models and optimizers of one save, by their keys."""

    where: str
    """The file or the directory, for messages."""
    models: Mapping[str, Mapping[str, Shape]]
    """The shapes of each model's tensors, the likely one first. There is at least one."""
    optimizers: Mapping[str, Node]
    usual: bool
    """True if the first model has the key that a model usually has."""

    def chosen(self, choices: SourceChoices) -> Pair:
        """The pair to read: the only one that fits, or the user's choice.

        Raises:
            RequestError: `request.invalid` for keys that are not there.
        """
        said, trains = self._said(choices.model_key, "model"), self._said(choices.optimizer_key, "optimizer")
        models = [m for m in self.models if said in (None, m)]
        optimizers = [o for o in self.optimizers if trains in (None, o)]
        fitting = [(m, o) for m in models for o in optimizers if self._fit(m, o)]
        proven = list(dict.fromkeys(m for m, _ in fitting)) if self.usual or said or trains else []
        possible = proven or models
        first = possible[0]
        own = [o for m, o in fitting if m == first]
        if len(possible) > 1:
            flags = self._flags(fitting or [(m, None) for m in models], choices)
            text = f"{self.where} holds {len(self.models)} models{self._alike()}: {_said(self.models)}{self._whose()}"
            return Pair(first, (own or [None])[0], (Undecided(Question.MODEL, text, flags),))
        if not own:  # reading both together says what does not fit
            own = optimizers if trains or len(self.models) == 1 else [o for o in optimizers if not self._of_another(o)]
        if len(own) > 1:
            text = f"{self.where} holds {len(self.optimizers)} optimizers: {_said(self.optimizers)}{self._whose()}"
            flags = self._flags([(first, o) for o in own], choices)
            return Pair(first, own[0], (Undecided(Question.OPTIMIZER, text, flags),))
        return Pair(first, own[0] if own else None)

    def _whose(self) -> str:
        """An end of a message: the models that each optimizer fits; empty where there is one model."""
        if len(self.models) == 1:
            return ""
        found = {o: [m for m in self.models if self._fit(m, o)] for o in self.optimizers}
        said = (f"{printable(o)} fits {' and '.join(map(printable, m)) or 'none of them'}" for o, m in found.items())
        return "".join(f"; {text}" for text in said)

    def _said(self, key: str | None, what: str) -> str | None:
        known = self.models if what == "model" else self.optimizers
        if key is None or key in known:
            return key
        text = f"no {what} is called {printable(key)!r} in {self.where}; there is {_said(known) or 'none'}"
        flags = [f"--{what}-key {printable(k)}" for k in known]
        raise RequestError("request.invalid", text, fix=", or ".join(flags) or f"leave --{what}-key out")

    def _fit(self, model: str, optimizer: str) -> bool:
        return fits(self.optimizers[optimizer], self.models[model])

    def _of_another(self, optimizer: str) -> bool:
        return any(self._fit(model, optimizer) for model in self.models)

    def _alike(self) -> str:
        names = [{*map(plain_name, shapes)} for shapes in self.models.values()]
        return " with the same names" if all(n == names[0] for n in names) else ""

    def _flags(self, pairs: Sequence[tuple[str, str | None]], choices: SourceChoices) -> str:
        """Flags to paste for each pair, without those that the user gave, and those that leave nothing to choose."""
        found: dict[str, None] = {}
        several = len({o for _, o in pairs}) > 1 and choices.optimizer_key is None
        for model, optimizer in pairs:
            flags = [f"--model-key {_quoted(model)}"] if len(self.models) > 1 and choices.model_key is None else []
            flags += [f"--optimizer-key {_quoted(optimizer)}"] if several and optimizer is not None else []
            found[" ".join(flags)] = None
        return ", or ".join(found)


def _said(keys: Iterable[str]) -> str:
    return listed([printable(key) for key in keys])


def _quoted(key: str) -> str:
    return shlex.quote(printable(key))
