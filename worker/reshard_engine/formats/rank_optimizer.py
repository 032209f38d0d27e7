"""The optimizer in files of FSDP's ranks: whose states are whose, and where their elements lie.

- Accelerate names parameters. verl and SkyRL save `optimizer.state_dict()`, which numbers them. Their optimizer is made
  of `module.parameters()`, so number i is the i-th parameter in the order of the model's file, without buffers and
  without the second name of a tied pair. The shapes of all states must say the same.
- FSDP2 keeps each state as a sharded tensor of the parameter's shape.
- FSDP1 with `use_orig_params=True` keeps one-dimensional slices of each parameter: those of all ranks in the order of
  the mesh are the parameter's elements. Their lengths must add up.
- FSDP1 with `use_orig_params=False` keeps one state for each flat parameter: those of a unit one after another, padded
  to a multiple of the ranks. Unit 0 is the rest of the model, then each layer is one. The lengths must add up.

Where numbers and lengths do not fit, the optimizer stays unread, and only targets that hold weights are written.

Source: verl 0.9.1 `workers/config/optimizer.py` (`build_optimizer`), `utils/fsdp_utils.py` (`get_fsdp_wrap_policy`);
torch 2.13.0 `distributed/fsdp/_flat_param.py` (`flatten_tensors`, `_get_shard`: padding at the end),
`optim/optimizer.py` (`state_dict`), `nn/modules/module.py` (`named_parameters` yields a tied parameter once); verified
by running.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from reshard.choices import ParamOrder
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard_engine.checkpoint import ParamGroup, Question, Scalar, Undecided
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.dtensors import Held, RankFile, Shape
from reshard_engine.formats.model_weights import StoredNames, listed_parameters, plain_name
from reshard_engine.formats.numbered import (
    SAY_ORDER,
    WEIGHTS_ALONE,
    Form,
    Unread,
    frozen_by_peft,
    of_these_forms,
    only_way,
    split_base,
)
from reshard_engine.formats.torch_archive import scalar_node
from reshard_engine.pickles.nodes import Node, PList, PLiteral, PTensor, PTuple, kind_of, mapping_items, sequence_items
from reshard_engine.pickles.trees import TensorsAt, compare_trees, foreign_paths
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32, Dtype
from reshard_engine.tensors.shard_map import is_packed

Order = ParamOrder | tuple[str, ...] | None
"""The user's word on the order of an optimizer's parameters."""
Key = str | int
"""The optimizer's key of a parameter: its name, or its number."""
PARAMS, _NAMES = "params", "param_names"
STEP = "step"
_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")
_WEIGHTS_OF_OLDER = "remove it from the param groups before the save, or name the directory of an older save"
_MOST_ELEMENTS = 64
"""The most elements of a tensor among hyper-parameters: a learning rate, or a pair of betas."""
_OTHER_SAVE = "the files are of different saves: copy those of one save"


@dataclass(frozen=True, slots=True)
class Number:
    """A state that is one number: a value of Python, or a tensor of one element in a file."""

    value: int | float | None = None
    """The number of Python; None for a tensor."""
    file: SourceFile | None = None
    at: int = 0
    dtype: Dtype | None = None
    shape: Shape = ()
    sum: int | None = None
    """CRC-32 of the element's bytes, where the file's directory has it."""
    held: Held | None = None
    """The tensor, which of a parameter without dimensions may be a state like any other."""

    def raw(self) -> bytes:
        """The bytes of the element."""
        if self.file is None or self.dtype is None:
            return b""
        return self.file.read(self.at, self.dtype.itemsize_bytes)

    def equals(self, other: Number) -> bool:
        """True for the same number. The CRC-32s of at most four bytes are equal for equal bytes alone."""
        if (self.value, self.dtype, self.shape) != (other.value, other.dtype, other.shape) or self.dtype is None:
            return self.value == other.value and self.dtype == other.dtype
        if self.dtype.itemsize_bytes <= 4 and self.sum is not None and other.sum is not None:
            return self.sum == other.sum
        return self.raw() == other.raw()

    def scalar(self) -> Scalar | None:
        """The number for a checkpoint; None for element types that hold no plain number."""
        if self.dtype is None:
            return None if self.value is None else Scalar(self.value)
        return Scalar.of_element(self.raw(), self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class RankStates:
    """The optimizer in one rank's file."""

    groups: Node
    states: Mapping[Key, Mapping[str, Held | Number]]
    odd: Mapping[str, str]
    """States that are neither a tensor nor a number, by name, each with its kind."""
    parsed: TorchFile
    """The file, without its value; `groups` has tensors of it where a learning rate is a tensor."""


def states_of_rank(file: RankFile) -> RankStates:
    """The optimizer's states in one file, with places in place of tensors.

    Raises:
        SourceError: `checkpoint.malformed`, and as `RankFile.held`.
    """
    root = mapping_items(file.parsed.root, what=file.name)
    if "state" not in root or "param_groups" not in root:
        raise SourceError(
            "checkpoint.malformed",
            f"{file.name} has the keys {listed([printable(str(k)) for k in root])}, and an optimizer's state dict has "
            "`state` and `param_groups`",
        )
    states: dict[Key, dict[str, Held | Number]] = {}
    odd: dict[str, str] = {}
    for key, node in mapping_items(root["state"], what=f"{file.name}: state").items():
        found, owner = states.setdefault(key, {}), printable(str(key))
        for state, value in mapping_items(node, what=f"{file.name}: state of {owner}").items():
            name = str(state)
            held = _state_of(file, value, f"{printable(name)} of {owner}")
            if held is None:
                odd[name] = kind_of(value)
            else:
                found[name] = held
    return RankStates(root["param_groups"], states, odd, replace(file.parsed, root=None))


def _state_of(file: RankFile, value: Node, what: str) -> Held | Number | None:
    if type(value) is int or type(value) is float:
        return Number(value)
    held = file.held(value, what)
    if held is None or held.shape != () or not held.parts:
        return held
    part = held.parts[0]
    return Number(None, file.parsed.file, part.at, held.dtype, (), part.sum, held)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model, as far as the optimizer's keys are concerned."""

    name: str
    shape: Shape
    sharded: bool
    twin: str = ""
    """The earlier name of the same memory: the second name of a tied pair."""
    equal: str = ""
    """An earlier name with the same elements, by the sums of the files: perhaps a tied pair."""
    coordinates: tuple[int | None, ...] = ()
    """For each rank its place along the only axis of the mesh that shards the tensor."""
    complex: bool = False
    """True if its elements are complex numbers."""

    @property
    def form(self) -> Form:
        """The form of the tensor."""
        return Form(self.shape, self.complex)


@dataclass(frozen=True, slots=True)
class Slice:
    """A run of elements of a flattened tensor in one rank's file."""

    rank: int
    begin: int
    """First element of the run in the flattened tensor."""
    end: int
    at: int
    """Byte offset in the file."""


Elements = tuple[Held, ...] | tuple[Slice, ...]
"""The elements of one state of one parameter: boxes of all ranks, or slices of its flattened elements."""


@dataclass(slots=True)
class ReadOptimizer:
    """The optimizer under the model's names."""

    groups: tuple[ParamGroup, ...] = ()
    members: dict[str, int] = field(default_factory=dict[str, int])
    """The group of each parameter that it owns, in its order."""
    states: dict[str, dict[str, tuple[Dtype, Elements]]] = field(
        default_factory=dict[str, dict[str, tuple[Dtype, Elements]]]
    )
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict[str, dict[str, Scalar]])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    """Second names of tied pairs, each with the first one, that the optimizer tells by their number."""
    counts_all: bool = False
    """True if it numbers all parameters of the model, so that all other tensors are buffers."""
    frozen: tuple[str, ...] = ()
    """Parameters in its groups that PEFT froze."""
    adapter_alone: bool = False
    """True if the model's file holds an adapter alone, and the optimizer numbers the base model, too."""
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    """The number of each parameter; empty where names are the keys, and of flat parameters."""
    lists: tuple[tuple[int, ...], ...] = ()
    """The numbers in each param group, in its order."""
    flat: bool = False
    """True for FSDP1, whose states are slices of flattened parameters."""
    units: tuple[tuple[str, ...], ...] = ()
    """The parameters of each flat parameter in the order of their numbers; empty where states are the parameters'."""
    undecided: tuple[Undecided, ...] = ()
    assumed: tuple[Undecided, ...] = ()
    warnings: tuple[str, ...] = ()
    unread: str = ""
    """The reason why it was not read, a part of a sentence; empty if it was."""


def read_optimizer(
    ranks: Sequence[RankStates],
    model: Sequence[ModelTensor],
    files: Sequence[str],
    order: Order,
    *,
    of_model: bool = True,
) -> ReadOptimizer:
    """The optimizer of all ranks under the model's names.

    Args:
        ranks: What each rank's file holds.
        model: The tensors of the model, in the order of its file.
        files: The names of the optimizer's files, for messages.
        order: The user's word on the order of numbered parameters.
        of_model: True if the framework makes its optimizer of `model.parameters()`, so that numbers count these.

    Raises:
        SourceError: `checkpoint.mixed` where ranks contradict one another, `checkpoint.malformed`.
        RequestError: `request.invalid` for an order that does not fit.
    """
    groups = _groups(ranks, files)
    try:
        return _Reading(ranks, model, files, order, groups, of_model=of_model).read()
    except Unread as reason:
        undecided = Undecided(reason.question, reason.text, reason.fix)
        return ReadOptimizer(undecided=(undecided,), unread=reason.text)


def _groups(ranks: Sequence[RankStates], files: Sequence[str]) -> list[dict[Key, Node]]:
    """The param groups, which all ranks must have alike."""
    if strange := foreign_paths(ranks[0].groups, "param_groups"):
        raise SourceError(
            "checkpoint.malformed", f"{printable(files[0])}: {printable(strange[0])} holds an object, not a value"
        )
    for number, other in enumerate(ranks[1:], 1):
        for difference in compare_trees(ranks[0].groups, other.groups, "param_groups"):
            if isinstance(difference, TensorsAt):
                if _elements(difference.a, ranks[0].parsed) == _elements(difference.b, other.parsed):
                    continue
                text = "tensors"
            else:
                text = f"{difference.a} and {difference.b}"
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(files[0])} and {printable(files[number])} differ at {difference.path}: {text}",
                fix=_OTHER_SAVE,
            )
    nodes = sequence_items(ranks[0].groups, what=f"{printable(files[0])}: param_groups")
    return [mapping_items(node, what=f"{printable(files[0])}: a param group") for node in nodes]


def _elements(tensor: Node, parsed: TorchFile) -> object:
    """The type, the shape and the bytes of a small tensor among hyper-parameters, such as a learning rate.

    Raises:
        SourceError: `source.unsupported` for other tensors.
    """
    if not isinstance(tensor, PTensor) or tensor.numel > _MOST_ELEMENTS or not is_packed(tensor.shape, tensor.stride):
        raise SourceError(
            "source.unsupported",
            f"{printable(parsed.file.name)} holds a tensor among its hyper-parameters that is no number",
            fix=_WEIGHTS_OF_OLDER,
        )
    size = tensor.numel * BY_NAME[tensor.dtype].itemsize_bytes
    return tensor.dtype, tensor.shape, parsed.file.read(parsed.tensor_offset(tensor), size)


class _Reading:
    """One optimizer being read."""

    def __init__(
        self,
        ranks: Sequence[RankStates],
        model: Sequence[ModelTensor],
        files: Sequence[str],
        order: Order,
        groups: Sequence[Mapping[Key, Node]],
        *,
        of_model: bool,
    ) -> None:
        self._of_model = of_model
        self._ranks, self._model, self._files, self._order = ranks, model, files, order
        self._shapes = {t.name: t.shape for t in model}
        self._forms = {t.name: t.form for t in model}
        self._others: tuple[str, ...] = ()
        """Tensors that may be parameters, but are none of this optimizer's, by the forms of its states."""
        self._stored = StoredNames({t.name: plain_name(t.name) for t in model})
        self._groups = groups
        self._members: dict[Key, int] = {}
        for number, group in enumerate(groups):
            for key in sequence_items(group.get(PARAMS), what=f"{printable(files[0])}: params of a param group"):
                if type(key) is not int and type(key) is not str:
                    raise SourceError("checkpoint.malformed", f"a param group has the member {kind_of(key)}")
                if key in self._members:
                    raise SourceError("checkpoint.malformed", f"{printable(str(key))} is in the param groups twice")
                self._members[key] = number
        if len({*map(type, self._members)}) > 1:
            raise SourceError("checkpoint.malformed", "param groups have names and numbers as members")
        if strangers := sorted({str(k) for r in ranks for k in r.states if k not in self._members}):
            raise SourceError(
                "checkpoint.malformed",
                f"the optimizer has states of {counted(len(strangers), 'parameter')} of no param group: "
                f"{listed(list(map(printable, strangers)))}",
                fix=_OTHER_SAVE,
            )
        self._found = ReadOptimizer(tuple(ParamGroup({k: v for k, v in g.items() if k != PARAMS}) for g in groups))

    @property
    def _numbered(self) -> bool:
        return any(type(key) is int for key in self._members)

    def read(self) -> ReadOptimizer:
        if odd := {n: k for r in self._ranks for n, k in r.odd.items()}:
            said = listed([f"{printable(n)} ({k})" for n, k in odd.items()])
            raise Unread(f"the optimizer keeps states that are neither tensors nor numbers: {said}", WEIGHTS_ALONE)
        if self._numbered and sorted(k for k in self._members if type(k) is int) != list(range(len(self._members))):
            raise SourceError("checkpoint.malformed", "the numbers of the optimizer's parameters leave gaps")
        if not self._numbered:
            return self._with_boxes({key: self._named(str(key)) for key in self._members})
        if self._of_model and self._is_flat():
            self._found.flat = True
            return self._fsdp1()
        return self._with_boxes(self._names_of_numbers(self._forms_of_numbers()))

    # Names.

    def _named(self, key: str) -> str:
        found = self._stored.of(key)
        if found is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"the optimizer names {printable(key)}, and the model has no such parameter",
                fix=_OTHER_SAVE,
            )
        return found

    def _forms_of_numbers(self) -> dict[Key, Form]:
        """The form of the parameter of each number that has a state with a shape of its own."""
        found: dict[Key, Form] = {}
        for key in self._members:
            states = [h for r in self._ranks for h in r.states.get(key, {}).values() if isinstance(h, Held)]
            shapes = {h.shape for h in states}
            if len(shapes) > 1:
                text = f"number {key} has states of the shapes {listed(list(map(str, sorted(shapes))))}"
                raise Unread(f"the optimizer keeps states of several shapes: {text}", WEIGHTS_ALONE, Question.OPTIMIZER)
            if (form := Form.of_states([Form(h.shape, h.dtype.complex) for h in states])) is not None:
                found[key] = form
        return found

    def _candidates(self, forms: Mapping[Key, Form] | None = None) -> tuple[list[str], dict[str, str]]:
        """The model's parameters in order, and ties by equal elements that the count of numbers asks for.

        Where a mesh shards tensors, parameters are what it shards: FSDP shards each of them. Of more parameters than
        there are numbers, such as those of a model with an adapter, those of other forms than the states are not its.

        Args:
            forms: The forms of the numbers that have states.
        """
        any_sharded = any(t.sharded for t in self._model)
        names = [t for t in self._model if not t.twin and (t.sharded or not any_sharded)]
        if len(names) <= len(self._members):
            return [t.name for t in names], {}
        if forms is not None:
            own = of_these_forms({t.name: t.form for t in names}, [forms.get(key) for key in self._members])
            self._others = tuple(t.name for t in names if t.name not in own)
            names = [t for t in names if t.name in own]
        ties = {t.name: t.equal for t in names if t.equal}
        if len(names) - len(ties) == len(self._members):
            return [t.name for t in names if t.name not in ties], ties
        return [t.name for t in names], {}

    def _names_of_numbers(self, forms: Mapping[Key, Form], lengths: Mapping[Key, int] | None = None) -> dict[Key, str]:
        """The name of each number, if the counts and all shapes say that the numbers are in the model's order.

        Args:
            forms: The form of numbers that have one.
            lengths: The number of elements of numbers that have slices, in place of forms.
        """
        names, ties = self._candidates(forms if lengths is None else None)
        parameters, keys, own = [*names, *self._others], sorted(self._members, key=int), self._own_names()
        if told := own or self._told(keys, names, forms if lengths is None else None):
            names, ties = list(map(self._named, told)), {}
        elif len(names) != len(keys):
            if (adapter := self._of_adapter(names, forms)) is not None:
                return adapter
            text = (
                f"the optimizer numbers {counted(len(keys), 'parameter')}, and the model's files hold "
                f"{counted(len(parameters), 'parameter')}"
            )
            raise Unread(text, f"{SAY_ORDER}; {WEIGHTS_ALONE}")
        elif len(self._groups) > 1 and self._order is not ParamOrder.MODEL:
            text = (
                f"the optimizer numbers its {counted(len(keys), 'parameter')} over {len(self._groups)} param groups, "
                "and nothing says which parameters are in which group"
            )
            model = "--param-order model if the groups take the model's parameters one after another"
            raise Unread(text, f"{SAY_ORDER}; {model}")
        found: dict[Key, str] = dict(zip(keys, names, strict=True))
        for key, name in found.items():
            held = forms.get(key) if lengths is None else lengths.get(key)
            form = self._forms[name]
            wanted = form if lengths is None else prod(form.shape)
            if held is not None and not (held.may_be_of(form) if isinstance(held, Form) else held == wanted):
                text = (
                    f"the optimizer's number {key} has states of {held}{'' if lengths is None else ' elements'}, and "
                    f"the parameter in its place, {printable(name)}, has {wanted}"
                )
                if isinstance(self._order, tuple):
                    raise RequestError("request.invalid", f"--param-order: {text}", fix=SAY_ORDER)
                raise Unread(f"{text}: the numbers do not count the model's parameters in order", SAY_ORDER)
        self._found.ties = ties
        self._found.counts_all = {*names} == {*parameters}
        self._found.frozen = frozen_by_peft(names, [n for n in parameters if n not in names])
        have_forms = len(forms if lengths is None else lengths) == len(keys)
        if not own and self._order is None and not (have_forms and self._proven(names)):
            if not self._of_model:
                text = "the optimizer numbers its parameters, and their shapes alone do not tell which is which"
                model = "--param-order model if the run made its optimizer of model.parameters()"
                raise Unread(text, f"{SAY_ORDER}; {model}")
            self._found.assumed = (_IN_ORDER,)
        return found

    def _told(self, keys: Sequence[Key], names: Sequence[str], forms: Mapping[Key, Form] | None) -> list[str]:
        """The names that the user lists, or that shapes prove where nobody knows how the run made its optimizer."""
        if isinstance(self._order, tuple):
            return self._said(len(keys))
        if self._of_model or self._order is not None or forms is None:
            return []
        return only_way([forms.get(key) for key in keys], {name: self._forms[name] for name in names}) or []

    def _own_names(self) -> list[str]:
        """The names that the groups keep, of an optimizer that was made of named parameters; none if one keeps none.

        Source: torch 2.13.0 `optim/optimizer.py` (`param_names`).
        """
        found: dict[int, str] = {}
        for group in self._groups:
            names = group.get(_NAMES)
            held = list(names.items) if isinstance(names, PList | PTuple) else []
            members = sequence_items(group.get(PARAMS), what=PARAMS)
            if len(held) != len(members) or not all(isinstance(n, str) for n in held):
                return []
            found |= dict(zip(members, held, strict=True))
        return [found[number] for number in sorted(found)]

    def _said(self, count: int) -> list[str]:
        """The names that the user listed."""
        return listed_parameters(self._order, self._stored, count) if isinstance(self._order, tuple) else []

    def _proven(self, names: Sequence[str]) -> bool:
        """True if all parameters have forms of their own, so that forms alone tell which number is which."""
        forms = [self._forms[n] for n in names]
        return len({*forms}) == len(forms)

    def _of_adapter(self, names: Sequence[str], forms: Mapping[Key, Form]) -> dict[Key, str] | None:
        """The names of numbers with states where the model's file holds an adapter alone; None if it does not.

        The optimizer counts the base model's parameters, too, which are in no file. Those that were trained come in the
        order of the adapter's names, and all shapes must fit.
        """
        trained = [k for k in sorted(self._members, key=int) if k in forms]
        if not names or not all(".lora_" in f".{n}" for n in names) or len(trained) != len(names):
            return None
        found = dict(zip(trained, names, strict=True))
        if any(not forms[k].may_be_of(self._forms[n]) for k, n in found.items()):
            return None
        if not self._of_model and not self._proven(names):
            return None
        self._found.adapter_alone = True
        self._found.assumed = (_OF_ADAPTER,)
        return found

    # States as boxes.

    def _with_boxes(self, names: Mapping[Key, str]) -> ReadOptimizer:
        found = self._found
        self._note_numbers(names)
        for key, name in names.items():
            found.members[name] = self._members[key]
            held = [r.states.get(key, {}) for r in self._ranks]
            if lacking := [i for i, h in enumerate(held) if h.keys() != held[0].keys()]:
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(self._files[lacking[0]])} has the states {listed(list(held[lacking[0]])) or 'none'} "
                    f"of {printable(str(key))}, and {printable(self._files[0])} has {listed(list(held[0])) or 'none'}",
                    fix=_OTHER_SAVE,
                )
            for state in held[0]:
                values = [h[state] for h in held]
                if self._shapes[name] == () and state != STEP:
                    values = [v.held if isinstance(v, Number) and v.held is not None else v for v in values]
                boxes = tuple(v for v in values if isinstance(v, Held))
                if len(boxes) != len(values):
                    self._add_number(name, state, values)
                elif boxes[0].shape == self._shapes[name]:
                    found.states.setdefault(name, {})[state] = (boxes[0].dtype, boxes)
                else:
                    text = (
                        f"the optimizer's state {printable(state)} of {printable(name)} is {boxes[0].shape}, and the "
                        f"parameter is {self._shapes[name]}"
                    )
                    raise Unread(text, WEIGHTS_ALONE, Question.OPTIMIZER)
        if self._numbered:
            self._freeze_base()
        return found

    def _add_number(self, name: str, state: str, values: Sequence[Held | Number]) -> None:
        numbers = [v for v in values if isinstance(v, Number)]
        first = numbers[0]
        if other := [i for i, n in enumerate(values) if not isinstance(n, Number) or not n.equals(first)]:
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(state)} of {printable(name)} is another number in {printable(self._files[other[0]])} "
                f"than in {printable(self._files[0])}",
                fix=_OTHER_SAVE,
            )
        scalar = first.scalar()
        if scalar is None:
            raise Unread(f"the optimizer's {printable(state)} of {printable(name)} is no plain number", WEIGHTS_ALONE)
        self._found.scalars.setdefault(name, {})[state] = scalar

    def _freeze_base(self) -> None:
        found = self._found
        updated = [n for n in found.members if found.states.get(n) or found.scalars.get(n)]
        found.members, frozen, found.warnings = split_base(found.members, updated)
        found.frozen += frozen

    # FSDP1: slices of flattened parameters.

    def _is_flat(self) -> bool:
        """True if all states are one-dimensional and whole, although the model's tensors are sharded."""
        held = [h for r in self._ranks for s in r.states.values() for h in s.values() if isinstance(h, Held)]
        return bool(held) and all(h.plain and len(h.shape) == 1 for h in held) and any(t.sharded for t in self._model)

    def _fsdp1(self) -> ReadOptimizer:
        rows = range(len(self._ranks))
        if any(t.sharded and t.coordinates != tuple(rows) for t in self._model):
            raise Unread(
                "the optimizer keeps slices of FSDP1, and the model's mesh does not shard over all ranks in their "
                "order (HYBRID_SHARD)",
                f"save with FSDP2 (strategy fsdp2 of verl); {WEIGHTS_ALONE}",
                Question.OPTIMIZER,
            )
        names, _ = self._candidates()
        if len(names) == len(self._members):
            lengths = {key: n for key in self._members if (n := self._sliced_length(key)) is not None}
            return self._with_slices(self._names_of_numbers({}, lengths))
        return self._with_units(names)

    def _sliced_length(self, key: Key) -> int | None:
        """The elements that all ranks hold of a number's states together; None for a number without states."""
        totals: dict[str, int] = {}
        for rank in self._ranks:
            for state, held in rank.states.get(key, {}).items():
                if isinstance(held, Held):
                    totals[state] = totals.get(state, 0) + held.shape[0]
        if len({*totals.values()}) > 1:
            raise SourceError(
                "checkpoint.coverage",
                f"the states of the optimizer's number {key} have {listed([f'{n} ({s})' for s, n in totals.items()])} "
                "elements",
                fix=_OTHER_SAVE,
            )
        return next(iter(totals.values()), None)

    def _note_numbers(self, names: Mapping[Key, str]) -> None:
        """Keep the numbers of parameters, also of those without states, for a target that has them again."""
        if self._numbered:
            groups = range(len(self._groups))
            self._found.numbers = {name: int(key) for key, name in names.items()}
            self._found.lists = tuple(tuple(int(k) for k, g in self._members.items() if g == n) for n in groups)

    def _with_slices(self, names: Mapping[Key, str]) -> ReadOptimizer:
        self._note_numbers(names)
        for key, name in names.items():
            self._found.members[name] = self._members[key]
            for state, (dtype, slices) in self._slices(key).items():
                self._found.states.setdefault(name, {})[state] = (dtype, slices)
            self._add_numbers_of(key, [name])
        if self._numbered:
            self._freeze_base()
        return self._found

    def _add_numbers_of(self, key: Key, names: Sequence[str]) -> None:
        """The states of a number that are single numbers, of those ranks that have any."""
        held = [r.states.get(key, {}) for r in self._ranks]
        for state in dict.fromkeys(s for h in held for s, v in h.items() if isinstance(v, Number)):
            values = [h[state] for h in held if state in h]
            for name in names:
                self._add_number(name, state, values)

    def _slices(self, key: Key) -> dict[str, tuple[Dtype, tuple[Slice, ...]]]:
        """The slices of each state of a number, one after another in the order of ranks."""
        found: dict[str, list[Slice]] = {}
        dtypes: dict[str, Dtype] = {}
        for number, rank in enumerate(self._ranks):
            for state, held in rank.states.get(key, {}).items():
                if not isinstance(held, Held):
                    continue
                if dtypes.setdefault(state, held.dtype) is not held.dtype or held.parts[0].stride is not None:
                    raise SourceError(
                        "checkpoint.mixed",
                        f"{printable(state)} of the optimizer's number {key} is {dtypes[state].name} and "
                        f"{held.dtype.name}, or not packed",
                        fix=_OTHER_SAVE,
                    )
                slices = found.setdefault(state, [])
                begin = slices[-1].end if slices else 0
                slices.append(Slice(number, begin, begin + held.shape[0], held.parts[0].at))
        return {state: (dtypes[state], tuple(slices)) for state, slices in found.items()}

    def _with_units(self, names: Sequence[str]) -> ReadOptimizer:
        """The states of flat parameters, cut into those of the parameters of each unit."""
        if isinstance(self._order, tuple):
            raise RequestError(
                "request.invalid",
                "--param-order lists parameters, and this optimizer numbers the flat parameters of FSDP1",
                fix="leave --param-order out",
            )
        equal = {t.name: t.equal for t in self._model if t.equal and not t.twin}
        keys = sorted(self._members, key=int)
        for without in ({}, equal) if equal else ({},):
            units = _units([n for n in names if n not in without])
            if len(units) == len(keys) and all(self._fits(k, u) for k, u in zip(keys, units, strict=True)):
                self._found.ties = dict(without)
                break
        else:
            units = _units(names)
            text = (
                f"the optimizer keeps {counted(len(keys), 'flat parameter')} of FSDP1 (use_orig_params=False) with "
                f"{listed([str(self._sliced_length(k)) for k in keys])} elements, and the model's root and layers have "
                f"{listed([str(self._numel(u)) for u in units])}"
            )
            raise Unread(
                text,
                f"save with use_orig_params=True or with FSDP2 (strategy fsdp2 of verl); {WEIGHTS_ALONE}",
                Question.OPTIMIZER,
            )
        if len(self._groups) > 1:
            raise Unread("the optimizer groups flat parameters of FSDP1", WEIGHTS_ALONE, Question.OPTIMIZER)
        self._found.counts_all = True
        self._found.units = tuple(map(tuple, units))
        for key, unit in zip(keys, units, strict=True):
            self._cut_unit(key, unit)
        # Units come in another order than the parameters that a run with other units numbers.
        self._found.members = {n: self._found.members[n] for n in self._shapes if n in self._found.members}
        self._found.assumed = (_OF_UNITS,)
        return self._found

    def _numel(self, names: Sequence[str]) -> int:
        return sum(prod(self._shapes[n]) for n in names)

    def _fits(self, key: Key, unit: Sequence[str]) -> bool:
        """True if each rank holds the same share of a unit, padded at the end to a multiple of the ranks."""
        share = -(-self._numel(unit) // len(self._ranks))
        lengths = {v.shape[0] for r in self._ranks for v in r.states.get(key, {}).values() if isinstance(v, Held)}
        return lengths <= {share}

    def _cut_unit(self, key: Key, unit: Sequence[str]) -> None:
        found, at = self._found, 0
        slices = self._slices(key)
        for name in unit:
            end = at + prod(self._shapes[name])
            found.members[name] = self._members[key]
            for state, (dtype, held) in slices.items():
                inner = tuple(
                    Slice(
                        s.rank,
                        max(s.begin, at) - at,
                        min(s.end, end) - at,
                        s.at + (max(s.begin, at) - s.begin) * dtype.itemsize_bytes,
                    )
                    for s in held
                    if max(s.begin, at) < min(s.end, end)
                )
                found.states.setdefault(name, {})[state] = (dtype, inner)
            at = end
        self._add_numbers_of(key, unit)


def _units(names: Sequence[str]) -> list[list[str]]:
    """The units of FSDP1 that wraps each layer: the rest of the model, then each layer in its order."""
    rest: list[str] = []
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        (rest if match is None else layers.setdefault(match[0], [])).append(name)
    return [*([rest] if rest else []), *layers.values()]


_IN_ORDER = Undecided(
    Question.ORDER,
    "the optimizer numbers its parameters, and numbers are taken for the model's order, as verl and SkyRL make it of "
    "model.parameters(); counts and shapes fit",
    f"{SAY_ORDER}, if the run made its optimizer in another way",
)
_OF_UNITS = Undecided(
    Question.ORDER,
    "the optimizer keeps flat parameters of FSDP1, which are cut as FSDP1 flattens each layer and the rest of the "
    "model; their lengths fit",
    "save with FSDP2 if the run wraps other modules",
)
_OF_ADAPTER = Undecided(
    Question.ORDER,
    "the model's files hold an adapter alone and the optimizer numbers the base model, too; those numbers that have "
    "states are taken for the adapter's parameters in order, and all shapes fit",
    "save with the base model (save_lora_only: false) for names that need no such step",
)


def number_node(name: str, scalar: Scalar) -> Node:
    """A number of a parameter, to be written; torch's optimizers keep the step as a tensor of fp32.

    Raises:
        SourceError: `checkpoint.malformed` for a step beyond fp32.

    Source: torch 2.13.0 `optim/adam.py` (`__setstate__`).
    """
    if name != STEP or scalar.dtype is not None:
        return scalar_node(scalar)
    try:
        return PLiteral(FLOAT32.name, (), struct.pack("<f", scalar.value))
    except OverflowError as error:
        raise SourceError("checkpoint.malformed", f"the step of a parameter is {scalar.value}") from error
