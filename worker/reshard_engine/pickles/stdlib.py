"""Plain values of Python's standard library (paths, dates, collections), in one form for all Python versions.

One path is `('/', 'a')` of `pathlib` to one Python and `('/a',)` of `pathlib._local` to another. Nodes have one form
of it, which every Python from 3.8 on reads.

Source: CPython 3.8 to 3.13 `Lib/pathlib` (`PurePath.__reduce__`; `pathlib._local` in 3.13 only), `Lib/datetime.py`
(`__reduce_ex__`), `Lib/collections/__init__.py`; CPython 2.7 `Lib/collections.py` (`OrderedDict.__reduce__`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import TypeAlias

from reshard.errors import SourceError
from reshard_engine.pickles.nodes import Global, Node, PBytearray, PDict, PList, PObject, PSet, PTuple

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
