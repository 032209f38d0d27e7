"""Reads typed values from the inert nodes of a `.metadata`: attributes of objects, sizes, numbers, texts.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py`: dataclasses, whose pickled state is a dict of attributes;
`torch/csrc/Size.cpp` (`THPSize_reduce`: `torch.Size` is called with one tuple).
"""

from __future__ import annotations

from typing import TypeVar

from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.pickles.nodes import Global, Node, PDict, PObject, PTuple, kind_of, mapping_items
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

MAX_NUMBER = 1 << 62
"""Offsets, sizes and lengths are below it, so that the sum of two of them fits 64 bits."""
MAX_DIMS = 64
MAX_KEY_CHARS = 4_096
_LAYOUTS = frozenset({names.LAYOUT})
_Kind = TypeVar("_Kind", str, bool)


def malformed(what: str, node: Node, wanted: str) -> SourceError:
    """The error for a value of another kind than `wanted`."""
    return SourceError("checkpoint.malformed", f"{what} is {_shown(node)}, not {wanted}")


def _shown(node: Node) -> str:
    scalar = node is None or isinstance(node, bool | int | float | str | bytes)
    return printable(repr(node), max_chars=60) if scalar else kind_of(node)


def class_of(node: Node) -> str:
    """The dotted name of the class of an object; empty for anything else."""
    if isinstance(node, PObject) and node.how == "newobj" and isinstance(node.cls, Global):
        return node.cls.dotted
    return ""


def attributes_of(node: Node, kind: str, known: frozenset[str], what: str) -> dict[str, Node]:
    """The attributes of an object of the class `kind`. Those whose values are the class's defaults can be absent.

    Raises:
        SourceError: `checkpoint.malformed` for another class, a state that is not a dict of attributes, or an attribute
            that is not known: a later torch may have given it a meaning.
    """
    if class_of(node) != kind or node.args.items or node.kwargs is not None or node.items or node.appends:
        raise malformed(what, node, f"a plain {kind}")
    if not node.has_state:
        return {}
    if not isinstance(node.state, PDict):
        raise malformed(f"the state of {what}", node.state, "a dict")
    found: dict[str, Node] = {}
    pairs = node.state.pairs
    for at in range(0, len(pairs), 2):
        key = pairs[at]
        if type(key) is not str or key not in known or key in found:
            raise SourceError(
                "checkpoint.malformed",
                f"{what} has the attribute {_shown(key)}, which no known version of torch writes there",
                fix="please report the version of the writer",
            )
        found[key] = pairs[at + 1]
    return found


def number_of(node: Node, what: str) -> int:
    """An offset, a size or a length.

    Raises:
        SourceError: `checkpoint.malformed` for anything but an int, `tensor.bad_extent` for one out of range.
    """
    if type(node) is not int:
        raise malformed(what, node, "an integer")
    if not 0 <= node < MAX_NUMBER:
        raise SourceError("tensor.bad_extent", f"{what} is {printable(hex(node), max_chars=40)}")
    return node


def size_of(node: Node, what: str) -> tuple[int, ...]:
    """The numbers of a `torch.Size` or a tuple.

    Raises:
        SourceError: as `number_of`; `tensor.bad_extent` for more than 64 dimensions.
    """
    inner = node
    if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == names.SIZE:
        if node.how != "reduce" or node.has_state or node.items or node.appends:
            raise malformed(what, node, "a plain torch.Size")
        inner = node.args.items[0] if node.args.items else PTuple()
    if not isinstance(inner, PTuple):
        raise malformed(what, node, "a torch.Size")
    if len(inner.items) > MAX_DIMS:
        raise SourceError("tensor.bad_extent", f"{what} has {len(inner.items)} dimensions, the limit is {MAX_DIMS}")
    return tuple(number_of(item, what) for item in inner.items)


def scalar_of(node: Node, kind: type[_Kind], what: str) -> _Kind:
    """A text or a flag.

    Raises:
        SourceError: `checkpoint.malformed` for anything else.
    """
    if type(node) is not kind:
        raise malformed(what, node, f"a {kind.__name__}")
    return node


def key_of(node: Node, what: str) -> str:
    """A key of the state dict: free text, but bounded. Names that become parts of paths are checked by their readers.

    Raises:
        SourceError: `checkpoint.malformed` for anything but a text, `name.invalid`.
    """
    key = scalar_of(node, str, what)
    if len(key) > MAX_KEY_CHARS:
        raise SourceError("name.invalid", f"{what} has {len(key)} characters, the limit is {MAX_KEY_CHARS}")
    return key


def text_items(node: Node, what: str) -> dict[str, Node]:
    """The entries of a dict whose keys are keys of the state dict.

    Raises:
        SourceError: `checkpoint.malformed`, `name.invalid`, `pickle.ambiguous_key`.
    """
    return {key_of(key, f"a key of {what}"): value for key, value in mapping_items(node, what=what).items()}


def properties_of(node: Node, what: str) -> tuple[Dtype, bool]:
    """The element type and `requires_grad` from a `TensorProperties`.

    Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`TensorProperties.__getstate__`, a tuple of dtype,
    layout, requires_grad, memory format and pin_memory since torch 1.10).

    Raises:
        SourceError: `checkpoint.malformed`; `tensor.unsupported` for another element type or layout.
    """
    if class_of(node) not in names.PROPERTIES or node.args.items or node.items or node.appends:
        raise malformed(f"the properties of {what}", node, "TensorProperties")
    state = node.state
    if not isinstance(state, PTuple) or len(state.items) != 5:
        raise malformed(f"the properties of {what}", state, "a tuple of five values")
    dtype, layout, requires_grad, memory_format, pin_memory = state.items
    required = bool(scalar_of(requires_grad, bool, f"requires_grad of {what}"))
    scalar_of(pin_memory, bool, f"pin_memory of {what}")
    _check_layout(layout, what)
    _check_memory_format(memory_format, what)
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise malformed(f"the dtype of {what}", dtype, "a torch.dtype")
    if dtype.name in names.OTHER_DTYPES:
        raise SourceError("tensor.unsupported", f"{what} has elements of type {dtype.dotted}")
    if dtype.name not in BY_NAME:
        raise malformed(f"the dtype of {what}", dtype, "a torch.dtype")
    return BY_NAME[dtype.name], required


def _argument_of(node: Node, functions: frozenset[str], what: str) -> Node:
    """The one argument of a call of one of the functions."""
    name = node.cls.dotted if isinstance(node, PObject) and isinstance(node.cls, Global) else ""
    if name in functions and node.how == "reduce" and not node.has_state and len(node.args.items) == 1:
        return node.args.items[0]
    raise malformed(what, node, "as torch writes it")


def _check_layout(node: Node, what: str) -> None:
    layout = scalar_of(_argument_of(node, _LAYOUTS, f"the layout of {what}"), str, f"the layout of {what}")
    if layout != "torch.strided":
        raise SourceError(
            "tensor.unsupported",
            f"{what} has the layout {printable(layout, max_chars=60)}; only dense tensors can be converted",
            fix="call .to_dense() on the tensor before saving",
        )


def _check_memory_format(node: Node, what: str) -> None:
    # The format says nothing about the record: each record has the strides of its tensor.
    if isinstance(node, Global) and node.dotted in names.MEMORY_FORMAT_MEMBERS:
        return
    value = _argument_of(node, names.MEMORY_FORMATS, f"the memory format of {what}")
    if type(value) is not int or value not in (0, 1, 2):
        raise malformed(f"the memory format of {what}", value, "0, 1 or 2")
