"""Pickles that are not well formed, or on which two readers would disagree."""

from __future__ import annotations

import struct

from adversarial.corpus import carriers, opcodes as op
from adversarial.corpus.entry import OK, Entry

_CONFUSED, _MALFORMED, _NUMBER = "pickle.type_confusion", "pickle.malformed", "pickle.bad_number"
_STORAGE = op.storage("FloatStorage", "0", 12)


def _value(number: int, name: str, code: bytes, expected: str, *, why: str = "") -> Entry:
    return Entry(number, name, expected, carriers.payload(code), why=why)


def _whole(number: int, name: str, data: bytes, expected: str, *, why: str = "") -> Entry:
    return Entry(number, name, expected, carriers.pickled(data), why=why)


def _good() -> bytes:
    return carriers.model_states().data_pkl()


def _truncated() -> tuple[Entry, ...]:
    # The runner cuts one at every byte; the corpus holds sixteen of them.
    good = _good()
    cuts = sorted({len(good) * k // 16 for k in range(1, 16)} | {len(good) - 1})
    return tuple(_whole(27, f"truncated-at-{cut:04}", good[:cut], "pickle.truncated") for cut in cuts)


def _framed(length: int, body: bytes) -> bytes:
    return b"\x80\x04\x95" + struct.pack("<Q", length) + body


def _keys(*keys: object) -> bytes:
    return b"}(" + b"".join(op.push(k) + b"N" for k in keys) + b"u"


def _group(keys: bytes) -> carriers.Build:
    def change(state: dict[str, object], _rank: int) -> None:
        base = {"state": {}, "param_groups": [op.Code(keys)]}
        state["base_optimizer_state"] = base

    return carriers.ranked(change)


def _persistent(pid: object) -> op.Code:
    return op.Code(op.push(pid) + b"Q")


def _float_storage(key: object = "0", numel: object = 12, location: object = "cpu") -> op.Code:
    return op.storage("FloatStorage", key, numel, location=location)


_PID = "pickle.bad_persistent_id"

ENTRIES = (
    _whole(26, "empty", b"", "pickle.truncated"),
    *_truncated(),
    _whole(28, "no-stop", b"\x80\x02N", "pickle.truncated", why="the stream ends where an opcode is wanted"),
    _whole(28, "stack-underflow", b"\x80\x02N\x87.", _MALFORMED),
    _value(28, "pop-of-mark", b"(\x85", _MALFORMED),
    _value(28, "two-values-at-stop", b"NN", _CONFUSED, why="the second value makes the pairs of the mapping odd"),
    _whole(28, "two-values-left", b"\x80\x02NN.", _MALFORMED),
    _whole(28, "mark-at-stop", b"\x80\x02(.", _MALFORMED),
    _value(28, "mark-missing", b"t0N", _MALFORMED),
    _whole(28, "tuple-without-mark", b"\x80\x02Nt.", _MALFORMED),
    _whole(28, "utf8-broken", b"\x80\x02X\x01\x00\x00\x00\xff.", _MALFORMED),
    _value(29, "setitem-on-list", b"]NNs", _CONFUSED),
    _value(29, "setitem-on-storage", _STORAGE + b"NNs", _CONFUSED),
    _value(29, "setitem-on-tensor", op.tensor(_STORAGE, (3,)) + b"NNs", _CONFUSED),
    _value(29, "setitems-on-tuple", b")(NNu", _CONFUSED),
    _value(30, "setitems-odd", b"}(NNNu", _CONFUSED),
    _value(30, "dict-odd", b"(NNNd", _CONFUSED),
    _value(31, "append-to-tuple", b")Na", _CONFUSED),
    _value(31, "append-to-dict", b"}Na", _CONFUSED),
    _value(31, "appends-to-text", op.push("x") + b"(Ne", _CONFUSED),
    _value(31, "additems-to-list", b"](N\x90", _CONFUSED),
    _value(31, "additems-to-frozenset", b"(N\x91(N\x90", _CONFUSED),
    _value(32, "get-unset", b"h\x07", "pickle.bad_memo"),
    _value(32, "long-get-unset", b"j\xff\xff\xff\xff", "pickle.bad_memo"),
    _value(32, "text-get-negative", b"g-1\n", "pickle.bad_memo"),
    _value(32, "text-get-digits-of-another-script", "g\u0663\n".encode(), "pickle.bad_memo"),
    _whole(33, "second-pickle", _good() + b"\x80\x02N.", "pickle.trailing"),
    _whole(33, "one-byte-more", _good() + b"\0", "pickle.trailing"),
    _whole(34, "proto-6", b"\x80\x06N.", _MALFORMED),
    _whole(34, "proto-255", b"\x80\xffN.", _MALFORMED),
    _whole(34, "proto-twice", b"\x80\x02\x80\x02N.", _MALFORMED),
    _value(34, "proto-late", b"\x80\x02N", _MALFORMED),
    _whole(35, "frame-beyond-end", _framed(1 << 40, b"N."), "pickle.bad_frame"),
    _whole(35, "frame-nested", _framed(11, b"\x95" + struct.pack("<Q", 2) + b"N."), "pickle.bad_frame"),
    _whole(35, "frame-crossed", _framed(2, b"X\x04\x00\x00\x00abcd0N."), "pickle.bad_frame"),
    _value(36, "opcode-ff", b"\xff", "pickle.unsupported_op"),
    _value(37, "next-buffer", b"\x97", "pickle.unsupported_op"),
    _value(37, "readonly-buffer", b"N\x98", "pickle.unsupported_op"),
    _value(38, "binstring-negative", b"T\xff\xff\xff\xff", "pickle.truncated"),
    _value(39, "long4-negative", b"\x8b\xff\xff\xff\xff", _NUMBER),
    _value(39, "long4-long", b"\x8b" + struct.pack("<i", 5_000) + b"\x01" * 5_000, _NUMBER),
    _value(40, "int-million-digits", b"I" + b"9" * 1_000_000 + b"\n", "pickle.truncated", why="the line is longer than any line may be; it is not looked at"),
    _value(40, "int-4000-digits", b"I" + b"9" * 4_000 + b"\n", OK, why="4,300 digits is Python's own limit: below it a number is a number"),
    _value(40, "long-hexadecimal", b"L0x10L\n", _NUMBER),
    _value(40, "int-underscores", b"I1_0\n", _NUMBER),
    _value(40, "int-empty", b"I\n", _NUMBER),
    _value(40, "int-spaces", b"I 1 \n", _NUMBER),
    _value(40, "int-digits-of-another-script", "I\u0663\n".encode(), _NUMBER),
    _value(41, "float-nan-as-size", op.Code(b"c" + b"torch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\0(Fnan\nt(K\x01t\x89" + op.ordered({}) + b"tR"), _CONFUSED),
    _value(41, "float-huge-as-size", op.Code(b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\0(F1e99999\nt(K\x01t\x89" + op.ordered({}) + b"tR"), _CONFUSED),
    _value(41, "float-words", b"Fvery much\n", _NUMBER),
    _value(41, "float-underscores", b"F1_0.0\n", _NUMBER),
    *(
        Entry(42, f"name-{label}", "name.invalid", carriers.module({name: carriers.f32("0", 4, 3)}, {}))
        for label, name in {
            "surrogate": "a\ud800", "nul": "a\0b", "million": "a" * 1_000_000, "right-to-left": "a\u202etp.b",
            "terminal": "\x1b]0;owned\x07\x1b[31m", "newline": "a\nlevel=ERROR b", "empty": "", "parent": "../w",
            "absolute": "/tmp/w", "backslash": "..\\w", "bell": "\x07", "zero-width": "w\u200b",
        }.items()
    ),
    Entry(43, "param-group-keys-merge", "checkpoint.malformed", _group(_keys(1, True, 1.0)), why="keys that are neither text nor integers come first"),
    Entry(43, "param-group-key-twice", "pickle.ambiguous_key", _group(_keys("params", "lr", "params"))),
    Entry(43, "module-key-twice", "pickle.ambiguous_key", carriers.entry("module", op.Code(op.call(op.name("collections", "OrderedDict")) + b"(" + op.push("w") + carriers.f32("0", 4, 3) + op.push("w") + carriers.f32("0", 4, 3) + b"u"))),
    Entry(43, "top-level-key-twice", "pickle.ambiguous_key", carriers.pickled(_good()[:-2] + op.push("module") + b"Nu.")),
    Entry(43, "int-keys-twice", "pickle.ambiguous_key", _group(_keys(7, 7))),
    Entry(44, "param-group-key-nan", "checkpoint.malformed", _group(_keys(float("nan"), float("nan"))), why="a key that is neither text nor an integer is refused whatever its value"),
    _value(45, "persid-text", b"P../../etc/passwd\n", _PID),
    _value(45, "pid-is-text", _persistent("storage"), _PID),
    _value(45, "pid-is-short", _persistent(("storage",)), _PID),
    _value(45, "pid-of-foreign-class", _persistent(("storage", op.name("os", "system"), "0", "cpu", 12)), _PID),
    _value(45, "pid-of-module-kind", _persistent(("module", op.name("torch", "FloatStorage"), "0", "cpu", 12)), _PID),
    _value(45, "key-is-path", _float_storage("../../etc/passwd"), _PID),
    _value(45, "key-is-absolute", _float_storage("/etc/passwd"), _PID),
    _value(45, "key-is-dots", _float_storage(".."), _PID),
    _value(45, "key-is-int", _float_storage(0), _PID),
    _value(45, "key-is-long", _float_storage("0" * 65), _PID),
    _value(45, "numel-negative", _float_storage(numel=-1), _PID),
    _value(45, "numel-2-63", _float_storage(numel=1 << 63), _PID),
    _value(45, "numel-bool", _float_storage(numel=True), _PID),
    _value(45, "numel-float", _float_storage(numel=12.0), _PID),
    _value(45, "location-long", _float_storage(location="x" * 1_000_000), _PID),
    _value(45, "location-none", _float_storage(location=None), _PID),
    _value(45, "view-outside", _persistent(("storage", op.name("torch", "FloatStorage"), "0", "cpu", 12, ("v", 8, 8))), "tensor.bad_extent"),
)  # fmt: skip
