"""The reviewed allow-list of names in a checkpoint, and the standard library's values in one form.

No name on the list is imported or called here. A name is listed because DeepSpeed, Megatron, numpy or torch really
write it, and because calling it only builds a value: programs that load *our* output do call it. An opaque value that
is written unchanged is a risk of its own, because it carries the source's names into our output.

Source: names seen in checkpoints written by deepspeed 0.19.8, Megatron-DeepSpeed (July 2025),
torch 2.13.0, torchao 0.18.0, numpy 2.4 and their older spellings (`numpy.core` before numpy 2); plain values of
CPython's standard library as 3.8 to 3.13 write them (`tests/data/pickles`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import TypeAlias

from reshard.choices import OpaquePolicy
from reshard.errors import SourceError, printable
from reshard_engine.pickles.nodes import Global, Node, PBytearray, PDict, PList, PObject, PSet, PTuple
from reshard_engine.tensors.dtypes import BY_NAME, BY_STORAGE_CLASS

# Plain values of Python's standard library (paths, dates, collections), in one form for all Python versions.
#
# One path is `('/', 'a')` of `pathlib` to one Python and `('/a',)` of `pathlib._local` to another. Nodes have one form
# of it, which every Python from 3.8 on reads.
#
# Source: CPython 3.8 to 3.13 `Lib/pathlib` (`PurePath.__reduce__`; `pathlib._local` in 3.13 only), `Lib/datetime.py`
# (`__reduce_ex__`), `Lib/collections/__init__.py`; CPython 2.7 `Lib/collections.py` (`OrderedDict.__reduce__`).

Check: TypeAlias = Callable[[tuple[Node, ...]], bool]

_BYTEARRAYS = frozenset({"builtins.bytearray", "__builtin__.bytearray"})
_PATH_CLASSES = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
PATHS = frozenset(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES)
_PATH_CHARS = 32_767
"""Largest number of characters of a path; Windows has the longest paths."""
FACTORIES = frozenset({"bool", "dict", "float", "int", "list", "long", "str", "tuple", "unicode"})
"""Built-in types that are default factories of defaultdicts; pickles only name them. Protocol 2 has the old names."""


def _is_path(items: tuple[Node, ...]) -> bool:
    return all(isinstance(i, str) for i in items) and sum(map(len, items)) <= _PATH_CHARS


def _is_pairs(items: tuple[Node, ...]) -> bool:
    # Python 2.7 gives the entries as a list of lists.
    if not items:
        return True
    content = items[0]
    return (
        len(items) == 1
        and isinstance(content, PTuple | PList)
        and all(isinstance(pair, PTuple | PList) and len(pair.items) == 2 for pair in content.items)
    )


def _is_counts(items: tuple[Node, ...]) -> bool:
    return not items or (len(items) == 1 and isinstance(items[0], PDict))


def _is_deque(items: tuple[Node, ...]) -> bool:
    # Python 2.7 gives what it holds; later ones give an empty tuple, and APPENDS follow.
    content, bound = (*items, None, None)[:2]
    held = content is None or isinstance(content, PTuple | PList)
    return held and len(items) <= 2 and (bound is None or (type(bound) is int and 0 <= bound < 1 << 62))


def _is_packed(items: tuple[Node, ...], count: int) -> bool:
    """True if these are the packed bytes of a date or a time, perhaps followed by its time zone."""
    if not 1 <= len(items) <= 2 or not (len(items) == 1 or isinstance(items[1], PObject)):
        return False
    packed = items[0]
    if isinstance(packed, PObject) and isinstance(packed.cls, Global) and packed.cls.dotted == "_codecs.encode":
        packed = packed.args.items[0]  # Protocol 2 writes bytes as text of one character per byte; Python 2 as text.
    return isinstance(packed, bytes | str) and len(packed) == count


def _is_zone(items: tuple[Node, ...]) -> bool:
    offset = items[0] if 1 <= len(items) <= 2 else None
    delta = isinstance(offset, PObject) and isinstance(offset.cls, Global) and offset.cls.dotted == "datetime.timedelta"
    return delta and all(isinstance(i, str) for i in items[1:])


def _never(_items: tuple[Node, ...]) -> bool:
    return False


CHECKS: dict[str, Check] = {
    **dict.fromkeys(PATHS, _is_path),
    **{f"{b}.{name}": _never for b in ("builtins", "__builtin__") for name in FACTORIES},
    "collections.OrderedDict": _is_pairs,
    "collections.Counter": _is_counts,
    "collections.deque": _is_deque,
    "types.SimpleNamespace": lambda items: not items,
    "datetime.date": lambda items: _is_packed(items, 4),
    "datetime.time": lambda items: _is_packed(items, 6),
    "datetime.datetime": lambda items: _is_packed(items, 10),
    "datetime.timezone": _is_zone,
}
"""Checks of the arguments that the standard library's own reductions give, by function."""


def normal_form(func: Global, args: PTuple) -> PObject | PBytearray | None:
    """The one form of a call whose arguments were checked; None for calls that every Python writes alike.

    Raises:
        SourceError: `pickle.forbidden_call` for text that the encoding named with it does not have.
    """
    if func.dotted in _BYTEARRAYS:
        data = _bytes_of(args.items)
        return None if data is None else PBytearray(data)
    if func.dotted in PATHS:
        pure = PureWindowsPath if "Windows" in func.name else PurePosixPath
        return PObject("reduce", Global("pathlib", func.name), PTuple((str(pure(*args.items)),)), depth=2)
    if func.dotted == "collections.OrderedDict" and args.items:
        entries = [part for pair in args.items[0].items for part in pair.items]
        return PObject("reduce", func, PTuple(), items=entries, depth=args.depth + 1)
    if func.dotted == "collections.deque" and args.items and args.items[0].items:
        held, *bound = args.items
        empty = PTuple((PTuple(), *bound)) if bound else PTuple()
        return PObject("reduce", func, empty, appends=list(held.items), depth=args.depth + 1)
    return None


def steps_of(result: Node) -> int:
    """The number of items or characters that a call copied; many calls may share the same arguments."""
    if isinstance(result, PBytearray):
        return len(result.data)
    if isinstance(result, PSet):
        return len(result.items)
    if not isinstance(result, PObject):
        return 0
    path = result.args.items[0] if isinstance(result.cls, Global) and result.cls.dotted in PATHS else ""
    return len(result.items) + len(result.appends) + len(path)


def _bytes_of(items: tuple[Node, ...]) -> bytes | None:
    """The bytes of a bytearray's arguments: nothing, bytes, or text with its encoding; None for a list of numbers."""
    if not items:
        return b""
    first, *encoding = items
    if isinstance(first, PObject):  # `_codecs.encode`
        first, *encoding = first.args.items
    if isinstance(first, str) and encoding:
        try:
            return first.encode(encoding[0])
        except UnicodeEncodeError:
            raise SourceError("pickle.forbidden_call", f"text that {encoding[0]} does not have, as bytes") from None
    return first.data if isinstance(first, PBytearray) else first if isinstance(first, bytes) else None


# The allow-list, and the ledger of opaque values.

_CALLABLE = frozenset(
    {
        "collections.OrderedDict",
        "collections.defaultdict",
        "torch.Size",
        "torch.device",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_wrapper_subclass",
        "torch.serialization._get_layout",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.bf16_optimizer.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "argparse.Namespace",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.core.numeric._frombuffer",
        "numpy._core.numeric._frombuffer",  # arrays at protocol 5
        "numpy.dtype",
        "numpy.ndarray",
        "_codecs.encode",
        "__builtin__.set",
        "builtins.set",
        "__builtin__.frozenset",
        "builtins.frozenset",
        "__builtin__.bytes",  # the form of empty bytes in protocol 2
        "builtins.bytes",
        "__builtin__.bytearray",
        "builtins.bytearray",
        "__builtin__.complex",
        "builtins.complex",
        "datetime.timedelta",
        "datetime.date",
        "datetime.time",
        "datetime.datetime",
        "datetime.timezone",
        "collections.Counter",
        "collections.deque",
        "types.SimpleNamespace",
        *PATHS,
    }
)
_PLAIN = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.float8_e4m3fn", "torch.storage.UntypedStorage"}
    # Quantized states of optimizers: tensors made of tensors, which nothing here looks into.
    | {
        f"{package}.subclass_{kind}.OptimState{suffix}"
        for package in ("torchao.optim", "torchao.prototype.low_bit_optim")
        for kind, suffix in (("8bit", "8bit"), ("4bit", "4bit"), ("fp8", "Fp8"))
    }
    # The default factories of defaultdicts.
    | {f"{b}.{name}" for b in ("builtins", "__builtin__") for name in FACTORIES}
    | {f"torch.{name}" for name in BY_STORAGE_CLASS}
    | {f"torch.{name}" for name in BY_NAME}
)
# Enumerations of Megatron: pure values, rebuilt by calling the class with an integer or a string.
_ENUMS = re.compile(r"megatron\.(?:core\.)?(?:model\.|transformer\.)?enums\.[A-Z][A-Za-z0-9]{0,63}")


def is_listed(name: Global) -> bool:
    """True if the name is on the allow-list."""
    dotted = name.dotted
    if dotted not in _CALLABLE and dotted not in _PLAIN and _ENUMS.fullmatch(dotted) is None:
        return False
    # No listed name is nested in a class, and before protocol 4 no unpickler follows dots.
    return "." not in name.name


_VALUES = {
    f"{module}.{name}": f"contains a {kind} object of Python: it "
    for module in ("builtins", "__builtin__")
    for name, kind in (("range", "range"), ("xrange", "range"), ("slice", "slice"))
}
"""Plain values that users know by other names than those in a pickle: protocol 2 calls a range `__builtin__.xrange`."""


@dataclass(slots=True)
class OpaqueLedger:
    """Applies the policy to names that are not listed, and collects them for the manifest."""

    policy: OpaquePolicy
    foreign: dict[str, str] = field(default_factory=dict[str, str])
    """The names, each with the code of the error that refuses it."""
    known: frozenset[str] = frozenset()
    """Names that the reader itself turns into plain numbers, so that no target names them. They stay off the list:
    whoever writes a tree with one of them is refused."""

    def meet(self, name: Global, *, code: str) -> None:
        """Record a name that is not on the list.

        Raises:
            SourceError: `code` under the policy `refuse`.
        """
        if name.dotted in self.known:
            return
        # Metadata names a class once for each of millions of objects: what is known is not made printable again.
        safe = name.dotted if name.dotted in self.foreign else printable(name.dotted)
        self.foreign.setdefault(safe, code)
        if self.policy is OpaquePolicy.REFUSE:
            raise self.refusal(safe)

    def refusal(self, name: str) -> SourceError:
        """The error that refuses a name which was recorded."""
        return refusal(name, self.foreign[name])


def refusal(name: str, code: str = "pickle.forbidden_global") -> SourceError:
    """The error that refuses a name off the allow-list, in its printable form."""
    return SourceError(
        code,
        f"the checkpoint {_VALUES.get(name, '')}names {name}, which is not on the allow-list; nothing "
        "of it was executed",
        fix="if you trust its origin: --opaque keep writes such objects out again, unexecuted; "
        "--opaque drop writes None in their place",
        details={"global": name},
    )
