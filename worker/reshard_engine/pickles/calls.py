"""Checks the arguments of allow-listed calls: only arguments that known writers give pass.

A program that unpickles our output calls the names on the allow-list, so their arguments are checked here:
`bytearray(2_000_000_000)` builds two gigabytes from nine bytes.

Source: CPython 3.11 `Lib/pickle.py` (bytes before
protocol 3), torch 2.13.0 `torch/_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.errors import SourceError, printable
from reshard_engine.pickles import arrays, stdlib
from reshard_engine.pickles.nodes import Global, Node, PBytearray, PList, PObject, PTuple

_ENCODINGS = ("latin1", "latin-1", "ascii", "utf-8")
_LAYOUT = re.compile(r"torch\.[a-z_]{1,32}")


def _bytes_like(items: tuple[Node, ...]) -> bool:
    if not items:
        return True
    first = items[0]
    encoded = isinstance(first, PObject) and isinstance(first.cls, Global) and first.cls.dotted == "_codecs.encode"
    text = len(items) == 2 and isinstance(first, str) and items[1] in _ENCODINGS
    return text or (len(items) == 1 and (encoded or isinstance(first, bytes | PBytearray | PList)))


def _encode(items: tuple[Node, ...]) -> bool:
    return len(items) == 2 and isinstance(items[0], str) and isinstance(items[1], str) and items[1] in _ENCODINGS


def _never(_items: tuple[Node, ...]) -> bool:
    return False


def _numbers(items: tuple[Node, ...]) -> bool:
    return len(items) <= 3 and all(type(i) in (int, float) for i in items)


def _one_sequence(items: tuple[Node, ...]) -> bool:
    return not items or (len(items) == 1 and isinstance(items[0], PTuple | PList))


def _layout(items: tuple[Node, ...]) -> bool:
    return len(items) == 1 and isinstance(items[0], str) and _LAYOUT.fullmatch(items[0]) is not None


_CHECKS: dict[str, Callable[[tuple[Node, ...]], bool]] = {
    "_codecs.encode": _encode,
    "numpy.ndarray": _never,
    "numpy.dtype": arrays.is_dtype_call,
    "torch.Size": _one_sequence,
    "torch._utils._rebuild_wrapper_subclass": _never,  # an argument of `_rebuild_from_type_v2` alone
    "torch.serialization._get_layout": _layout,
    "datetime.timedelta": _numbers,
    **stdlib.CHECKS,
    **{f"{b}.{n}": _bytes_like for b in ("builtins", "__builtin__") for n in ("bytes", "bytearray")},
    **{f"{b}.complex": _numbers for b in ("builtins", "__builtin__")},
    **{f"numpy.{c}.multiarray._reconstruct": arrays.is_empty_array_call for c in ("core", "_core")},
    **{f"numpy.{c}.multiarray.scalar": arrays.is_scalar_call for c in ("core", "_core")},
    **{f"numpy.{c}.numeric._frombuffer": arrays.is_buffer_call for c in ("core", "_core")},
}
_NO_INSTANCES = frozenset(_CHECKS) - {"collections.OrderedDict"}
"""Functions, and classes that no writer instantiates by NEWOBJ."""


def check_call(func: Global, args: PTuple) -> None:
    """Refuse a call of a listed name with arguments that its writers never give.

    Raises:
        SourceError: `pickle.forbidden_call`.
    """
    check = _CHECKS.get(func.dotted)
    if check is not None and not check(args.items):
        raise SourceError("pickle.forbidden_call", f"{printable(func.dotted)} with arguments that no writer gives")


def check_instance(cls: Global, args: PTuple) -> None:
    """Refuse to instantiate a listed name that is only ever called, or an OrderedDict with entries as arguments.

    Raises:
        SourceError: `pickle.forbidden_build`.
    """
    if cls.dotted in _NO_INSTANCES or (cls.dotted in _CHECKS and args.items):
        raise SourceError(
            "pickle.forbidden_build", f"an instance of {printable(cls.dotted)}, which is only ever called"
        )
