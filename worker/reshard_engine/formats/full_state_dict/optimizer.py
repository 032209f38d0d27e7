"""The optimizer in files with whole tensors: whose states are whose.

`Optimizer.state_dict()` numbers parameters; Accelerate and PyTorch's `get_optimizer_state_dict` name them. The numbers
count the parameters of the first group, then those of the second, as the optimizer was made. Lightning's full state
dicts of FSDP and `ModelParallelStrategy` count the model's parameters instead, so that a group's list is not a run of
numbers. Numbers get names

- from `param_names` in the groups, where the optimizer was made of named parameters;
- where each shape is of one number and of one tensor alone;
- in the model's order, where there is one group and the count and all shapes fit, or the lists count the model;
- else as the user says: `--param-order groups`, `model`, or a file. The shapes must leave no second way.

Otherwise the optimizer stays unread, and only targets that hold weights are written.

Source: torch 2.13.0 `optim/optimizer.py` (`state_dict`, `param_names`),
`distributed/optim/zero_redundancy_optimizer.py` (`consolidate_state_dict`: the same numbers); lightning 2.6.6
`pytorch/strategies/fsdp.py`, `pytorch/strategies/model_parallel.py` (`optimizer_state`); verified by running.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from reshard.choices import ParamOrder
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard_engine.checkpoint import ParamGroup, Question, Scalar, Undecided
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.model_weights import StoredNames, checked_state, listed_parameters
from reshard_engine.formats.numbered import (
    GROUPS,
    PARAMS,
    SAY_ORDER,
    STATE,
    WEIGHTS_ALONE,
    Form,
    Shape,
    Unread,
    in_models_order,
    of_these_forms,
    only_way,
    split_base,
)
from reshard_engine.pickles.nodes import Node, PList, PTensor, PTuple, kind_of, mapping_items, sequence_items
from reshard_engine.pickles.trees import foreign_paths
from reshard_engine.tensors.dtypes import BY_NAME

Order = ParamOrder | tuple[str, ...] | None
"""The user's word on the order of an optimizer's parameters."""
Key = str | int
"""The optimizer's key of a parameter: its name, or its number."""
_NAMES = "param_names"
_STEP = "step"
_OTHER_SAVE = "the files are of different saves: copy those of one save"


@dataclass(frozen=True)
class ModelOrder:
    """The ways in which the optimizer's numbers may count."""

    shapes: Mapping[str, Shape]
    """The tensors that may be parameters, in the order of the model's file, by name."""
    shown: Mapping[str, str]
    """For each of these names the one that `reshard inspect` lists."""
    complexes: Collection[str]
    """Those of these tensors whose elements are complex numbers."""
    equal: Mapping[str, str]
    """Second names of tensors with equal elements, each with the first one: perhaps tied pairs."""
    known: bool = True
    """True if the file keeps the model's order. safetensors sort their tensors."""
    counts_model: bool = True
    """True if an optimizer of one group is taken to be made of `model.parameters()`."""
    by_model: bool = False
    """True for a framework that may number the parameters in the model's order over all groups."""

    @cached_property
    def stored(self) -> StoredNames:
        """The names by every form that an optimizer or a user gives them."""
        return StoredNames({name: self.shown[name] for name in self.shapes})

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the tensors, by name."""
        return {name: Form(shape, name in self.complexes) for name, shape in self.shapes.items()}


@dataclass(slots=True)
class ReadOptimizer:
    """The optimizer under the model's names."""

    groups: tuple[ParamGroup, ...] = ()
    members: dict[str, int] = field(default_factory=dict[str, int])
    """The group of each parameter that it owns, in its order."""
    states: dict[str, dict[str, PTensor]] = field(default_factory=dict[str, dict[str, PTensor]])
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict[str, dict[str, Scalar]])
    ties: Mapping[str, str] = field(default_factory=dict[str, str])
    """Second names of tied pairs, each with the first one, that the optimizer tells by their number."""
    frozen: tuple[str, ...] = ()
    """Parameters in its groups that PEFT froze."""
    numbers: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of each parameter, where numbers do not count those of the groups one after another."""
    undecided: tuple[Undecided, ...] = ()
    assumed: tuple[Undecided, ...] = ()
    warnings: tuple[str, ...] = ()
    unread: str = ""
    """The reason why it was not read, a part of a sentence; empty if it was."""


def unread_optimizer(text: str, fix: str, question: Question) -> ReadOptimizer:
    """An optimizer that stays unread.

    Args:
        text: The reason, a part of a sentence.
        fix: What helps.
        question: What is open.
    """
    return ReadOptimizer(undecided=(Undecided(question, text, fix),), unread=text)


def read_optimizer(node: Node, parsed: TorchFile, what: str, model: ModelOrder, order: Order) -> ReadOptimizer:
    """The optimizer under the model's names.

    Args:
        node: Its state dict.
        parsed: The file that holds it.
        what: Its place, for messages, already safe.
        model: The tensors that its numbers may count.
        order: The user's word on the order of numbered parameters.

    Raises:
        SourceError: `checkpoint.malformed`, `checkpoint.incomplete`, `name.invalid`.
        RequestError: `request.invalid` for an order that does not fit.
    """
    reading = _Reading(node, parsed, what, model, order)
    try:
        return reading.read()
    except Unread as reason:
        return unread_optimizer(reason.text, reason.fix, reason.question)


class _Reading:
    """One optimizer being read."""

    def __init__(self, node: Node, parsed: TorchFile, what: str, model: ModelOrder, order: Order) -> None:
        self._parsed, self._what, self._model, self._order = parsed, what, model, order
        root = mapping_items(node, what=what)
        if STATE not in root or GROUPS not in root:
            raise SourceError(
                "checkpoint.malformed",
                f"{what} has the keys {listed([printable(str(k)) for k in root])}, and an optimizer's state dict has "
                f"`{STATE}` and `{GROUPS}`",
            )
        if strange := foreign_paths(root[GROUPS], GROUPS):
            raise SourceError("checkpoint.malformed", f"{what}: {printable(strange[0])} holds an object, not a value")
        nodes = sequence_items(root[GROUPS], what=f"{what}: {GROUPS}")
        self._groups = [mapping_items(group, what=f"{what}: a param group") for group in nodes]
        self._members = self._members_of_groups()
        states = mapping_items(root[STATE], what=f"{what}: {STATE}")
        if strangers := [printable(str(k)) for k in states if k not in self._members]:
            raise SourceError(
                "checkpoint.malformed",
                f"the optimizer has states of {counted(len(strangers), 'parameter')} of no param group: "
                f"{listed(sorted(strangers))}",
                fix=_OTHER_SAVE,
            )
        self._states = {
            key: mapping_items(value, what=f"{what}: state of {printable(str(key))}") for key, value in states.items()
        }
        groups = tuple(ParamGroup({k: v for k, v in g.items() if k != PARAMS}) for g in self._groups)
        self._found = ReadOptimizer(groups)

    def _members_of_groups(self) -> dict[Key, int]:
        found: dict[Key, int] = {}
        for number, group in enumerate(self._groups):
            for key in sequence_items(group.get(PARAMS), what=f"{self._what}: params of a param group"):
                if type(key) is not int and type(key) is not str:
                    raise SourceError("checkpoint.malformed", f"a param group has the member {kind_of(key)}")
                if key in found:
                    raise SourceError("checkpoint.malformed", f"{printable(str(key))} is in the param groups twice")
                found[key] = number
        if len({*map(type, found)}) > 1:
            raise SourceError("checkpoint.malformed", "param groups have names and numbers as members")
        return found

    def read(self) -> ReadOptimizer:
        """The optimizer, if its parameters have names."""
        kinds = {str(n): kind_of(v) for s in self._states.values() for n, v in s.items() if not _is_value(v)}
        if kinds:
            said = listed([f"{printable(name)} ({kind})" for name, kind in kinds.items()])
            raise Unread(f"the optimizer keeps states that are neither tensors nor numbers: {said}", WEIGHTS_ALONE)
        numbers = sorted(k for k in self._members if type(k) is int)
        if numbers and numbers != list(range(len(numbers))):
            raise SourceError("checkpoint.malformed", "the numbers of the optimizer's parameters leave gaps")
        if numbers:
            self._with_states(self._names_of(numbers))
            self._freeze_base()
        else:
            self._with_states({key: self._named(str(key)) for key in self._members})
        return self._found

    # Names.

    def _named(self, key: str) -> str:
        found = self._model.stored.of(key)
        if found is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"the optimizer names {printable(key)}, and the model has no such parameter",
                fix=_OTHER_SAVE,
            )
        return found

    def _form_of(self, number: int) -> Form | None:
        """The form of the parameter whose states a number has; None for a number without states of a shape."""
        states = self._states.get(number, {}).items()
        tensors = [v for n, v in states if isinstance(v, PTensor) and (v.shape != () or n != _STEP)]
        forms = {Form(v.shape, BY_NAME[v.dtype].complex) for v in tensors}
        shapes = {form.shape for form in forms} - {()}
        if len(shapes) > 1:
            text = f"number {number} has states of the shapes {listed(list(map(str, sorted(shapes))))}"
            raise Unread(f"the optimizer keeps states of several shapes: {text}", WEIGHTS_ALONE, Question.OPTIMIZER)
        # The states of a parameter without dimensions have none.
        return Form.of_states([form for form in forms if form.shape in shapes] if shapes else forms)

    def _names_of(self, numbers: Sequence[int]) -> dict[Key, str]:
        """The name of each number, in the order of the groups."""
        wanted = {number: self._form_of(number) for number in numbers}
        own = self._own_names()
        if own or isinstance(self._order, tuple):
            named = list(map(self._named, own)) if own else self._said(len(numbers))
            self._check(dict(zip(numbers, named, strict=True)), wanted)
        else:
            named = self._in_order(numbers, wanted)
        found = dict(zip(numbers, named, strict=True))
        if len({*named}) != len(named):
            raise SourceError("checkpoint.malformed", f"{self._what}: {_NAMES} has a name twice")
        if [*self._members] != list(numbers):
            self._found.numbers = {name: number for number, name in found.items()}
        return {key: found[key] for key in self._members if type(key) is int}

    def _own_names(self) -> list[str]:
        """The names that the groups keep, of an optimizer that was made of named parameters; none if one keeps none.

        Source: torch 2.13.0 `optim/optimizer.py` (`param_names`).
        """
        found: dict[int, str] = {}
        for group in self._groups:
            names = group.get(_NAMES)
            held = list(names.items) if isinstance(names, PList | PTuple) else []
            members = [m for m in sequence_items(group.get(PARAMS), what=PARAMS) if type(m) is int]
            texts = [n for n in held if isinstance(n, str)]
            if len(texts) != len(members) or len(held) != len(members):
                return []
            found |= dict(zip(members, texts, strict=True))
        return [found[number] for number in sorted(found)]

    def _said(self, count: int) -> list[str]:
        """The names that the user listed."""
        return listed_parameters(self._order, self._model.stored, count) if isinstance(self._order, tuple) else []

    def _misfit(self, found: Mapping[int, str], wanted: Mapping[int, Form | None]) -> str:
        """A statement about the first number whose states have another shape than its parameter; empty if all fit."""
        for number, name in found.items():
            states, own = wanted[number], self._model.forms[name]
            if states is not None and not states.may_be_of(own):
                return (
                    f"the optimizer's number {number} has states of {states}, and the parameter in its place, "
                    f"{printable(name)}, has {own}"
                )
        return ""

    def _check(self, found: Mapping[int, str], wanted: Mapping[int, Form | None]) -> None:
        """Refuse names of the user or of the file whose shapes are others."""
        if text := self._misfit(found, wanted):
            if isinstance(self._order, tuple):
                raise RequestError("request.invalid", f"--param-order: {text}", fix=SAY_ORDER)
            raise Unread(text, f"{SAY_ORDER}; {WEIGHTS_ALONE}")

    def _in_order(self, numbers: Sequence[int], wanted: Mapping[int, Form | None]) -> list[str]:
        """The names in the order of numbers, proven by shapes, or in an order that the files or the user say."""
        forms = self._candidates(wanted)
        sizes = [wanted[n] for n in numbers]
        if self._order is None and (proven := only_way(sizes, forms)) is not None:
            return proven
        if isinstance(self._order, ParamOrder):
            if (found := self._ordered(numbers, wanted, forms, self._order)) is not None:
                return found
            reason = "their shapes leave no way, or several, to name them" if self._model.known else _SORTED
            text = f"the optimizer numbers its {counted(len(numbers), 'parameter')}, and in the order of --param-order "
            raise Unread(f"{text}{self._order} {reason}", f"{SAY_ORDER}; {WEIGHTS_ALONE}")
        return self._likely(numbers, wanted, forms)

    def _candidates(self, wanted: Mapping[int, Form | None]) -> dict[str, Form]:
        """The tensors that the numbers may be of: where each number has a form, those of these forms.

        Second names of equal elements stay out where the count of numbers asks for that.
        """
        forms = of_these_forms(self._model.forms, wanted.values())
        ties = {a: o for a, o in self._model.equal.items() if a in forms}
        if len(forms) > len(wanted) and len(forms) - len(ties) == len(wanted):
            self._found.ties = ties
            return {n: f for n, f in forms.items() if n not in ties}
        return forms

    def _ordered(
        self, numbers: Sequence[int], wanted: Mapping[int, Form | None], forms: Mapping[str, Form], order: ParamOrder
    ) -> list[str] | None:
        """The names if the numbers, or those of each group, come in the model's order; None unless shapes allow it."""
        if not self._model.known:
            return None
        model = list(forms.items())
        if order is ParamOrder.MODEL:
            return in_models_order([wanted[n] for n in numbers], [len(numbers)], model)
        listing = [k for k in self._members if type(k) is int]
        spans = [sum(g == number for g in self._members.values()) for number in range(len(self._groups))]
        found = in_models_order([wanted[n] for n in listing], spans, model)
        return None if found is None else [dict(zip(listing, found, strict=True))[n] for n in numbers]

    def _likely(
        self, numbers: Sequence[int], wanted: Mapping[int, Form | None], forms: Mapping[str, Form]
    ) -> list[str]:
        """The names in the model's order, if nothing but the way in which the optimizer was made is left open."""
        model, native = self._model, [*self._members] == list(numbers)
        in_order = dict(zip(numbers, forms, strict=False))
        number_of = f"the optimizer numbers {counted(len(numbers), 'parameter')}"
        if len(forms) != len(numbers):
            held = counted(len(forms), "parameter")
            ways = self._ways(numbers, wanted, forms)
            # The files do not tell buffers from parameters: those that the user names are no candidates.
            ways += "--buffers NAME,… if some of them are buffers, or " if len(forms) > len(numbers) else ""
            raise Unread(f"{number_of}, and the model's files hold {held}", f"{ways}{SAY_ORDER}; {WEIGHTS_ALONE}")
        if model.known and (len(self._groups) == 1 or (model.by_model and not native)):
            if text := self._misfit(in_order, wanted):
                raise Unread(f"{text}: the numbers do not count the model's parameters in order", SAY_ORDER)
            if model.counts_model or not native:
                self._found.assumed = (_IN_ORDER if native else _BY_MODEL,)
                return list(forms)
        ways = self._ways(numbers, wanted, forms)
        if len(self._groups) > 1:
            text = (
                f"the optimizer numbers its {counted(len(numbers), 'parameter')} over {len(self._groups)} param "
                "groups, and nothing says which parameters are in which group"
            )
        else:
            text = "the optimizer numbers its parameters, and their shapes alone do not tell which is which"
        if not model.known:
            text = f"{text}: {_SORTED}"
        raise Unread(text, f"{ways}{SAY_ORDER}; {WEIGHTS_ALONE}")

    def _ways(self, numbers: Sequence[int], wanted: Mapping[int, Form | None], forms: Mapping[str, Form]) -> str:
        """The orders that leave one way, each with the words in which it is right; a part of a fix."""
        said = {
            ParamOrder.GROUPS: "if each group takes its parameters in the model's order",
            ParamOrder.MODEL: "if the run made its optimizer of model.parameters()",
        }
        if len(self._groups) == 1:
            del said[ParamOrder.GROUPS]
        ways = [f"--param-order {o} {w}, or " for o, w in said.items() if self._ordered(numbers, wanted, forms, o)]
        return "".join(ways)

    # States.

    def _with_states(self, names: Mapping[Key, str]) -> None:
        found = self._found
        for key, name in names.items():
            found.members[name] = self._members[key]
            shape = self._model.shapes[name]
            for state, value in self._states.get(key, {}).items():
                text = checked_state(state)
                if isinstance(value, PTensor) and (value.shape != () or (shape == () and text != _STEP)):
                    if value.shape != shape:
                        raise Unread(
                            f"the optimizer's state {printable(text)} of {printable(name)} is {value.shape}, and the "
                            f"parameter is {shape}",
                            WEIGHTS_ALONE,
                            Question.OPTIMIZER,
                        )
                    found.states.setdefault(name, {})[text] = value
                else:
                    found.scalars.setdefault(name, {})[text] = self._number(name, text, value)

    def _number(self, name: str, state: str, value: Node) -> Scalar:
        if not isinstance(value, PTensor):
            return Scalar(value if isinstance(value, float) else int(str(value)))
        raw = self._parsed.read_scalar_bytes(value)
        scalar = Scalar.of_element(raw, BY_NAME[value.dtype], value.shape)
        if scalar is None:
            raise Unread(f"the optimizer's {printable(state)} of {printable(name)} is no plain number", WEIGHTS_ALONE)
        return scalar

    def _freeze_base(self) -> None:
        found = self._found
        updated = [n for n in found.members if found.states.get(n) or found.scalars.get(n)]
        found.members, found.frozen, found.warnings = split_base(found.members, updated)


def _is_value(node: Node) -> bool:
    """True for a tensor or a number, of which states consist."""
    return isinstance(node, PTensor) or type(node) is int or type(node) is float


_SORTED = "the weights' files sort their tensors, so that they do not keep the model's order"
_IN_ORDER = Undecided(
    Question.ORDER,
    "the optimizer numbers its parameters, and numbers are taken for the model's order, as an optimizer of "
    "model.parameters() has them; counts and shapes fit",
    f"{SAY_ORDER}, if the run made its optimizer in another way",
)
_BY_MODEL = Undecided(
    Question.ORDER,
    "the lists of the param groups are no runs of numbers, so that numbers are taken for the model's order, in which "
    "Lightning numbers the parameters of a full state dict; counts and shapes fit",
    f"{SAY_ORDER}, if the run saved it in another way",
)
