"""Files of other kinds under a checkpoint's names, and legacy torch streams that lie."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from typing import Any

from adversarial.corpus import carriers, opcodes as op
from adversarial.corpus.archives import Record, archive
from adversarial.corpus.entry import OK, Entry
from adversarial.corpus.pickle_code import CALL, COMMAND, SYSTEM

_KIND = "source.unknown_kind"
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
SYSTEM_INFO = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def legacy(
    *,
    magic: Any = MAGIC,
    protocol: Any = PROTOCOL,
    info: Any = None,
    keys: Any = None,
    count: int = 12,
    more: bytes = b"",
) -> bytes:
    """The model states as a legacy stream: five pickles, then each storage as a count and its bytes."""
    file = carriers.model_states()
    module = {n: _old_tensor(k, s) for n, k, s in (("w", "0", (4, 3)), ("b", "1", (3,)))}
    file.entries["module"] = op.ordered(module)
    values = (
        magic,
        protocol,
        SYSTEM_INFO if info is None else info,
        file.entries,
        ["0", "1"] if keys is None else keys,
    )
    storages = struct.pack("<q", count) + file.storages["0"] + struct.pack("<q", 3) + file.storages["1"]
    return b"".join(map(op.stream, values)) + storages + more


def _old_tensor(key: str, shape: tuple[int, ...]) -> op.Code:
    numel = shape[0] * (shape[1] if len(shape) > 1 else 1)
    pid = ("storage", op.name("torch", "FloatStorage"), key, "cpu", numel, None)
    return op.tensor(op.Code(op.push(pid) + b"Q"), shape)


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("storages", "tensors", "pickle"):
            data = b"\x80\x02" + op.call(SYSTEM, COMMAND) + b"."
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _raw(number: int, name: str, data: bytes, expected: str = _KIND, *, why: str = "") -> Entry:
    return Entry(number, name, expected, carriers.raw(data), why=why)


def _npy() -> bytes:
    header = b"{'descr': __import__('os').system('touch reshard-canary'), 'fortran_order': False, 'shape': (1,), }\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


ENTRIES = (
    _raw(93, "torch-tar", _tar()),
    _raw(94, "legacy-good", legacy(), OK),
    _raw(94, "legacy-wrong-magic", legacy(magic=MAGIC + 1), _KIND, why="a pickle that begins with another value is not a torch stream"),
    _raw(94, "legacy-magic-is-list", legacy(magic=[MAGIC]), _KIND, why="as above"),
    _raw(94, "legacy-wrong-protocol", legacy(protocol=1002), "pickle.malformed"),
    _raw(94, "legacy-big-endian", legacy(info={**SYSTEM_INFO, "little_endian": False}), "zip.bad_record", why="the code for another byte order, whatever the container"),
    _raw(94, "legacy-info-is-list", legacy(info=[]), "checkpoint.malformed", why="metadata of the wrong shape"),
    _raw(94, "legacy-count-2-62", legacy(count=1 << 62), "tensor.bad_extent", why="the count contradicts the pickle, which names the storage's size"),
    _raw(94, "legacy-count-negative", legacy(count=-1), "tensor.bad_extent", why="as above"),
    _raw(94, "legacy-keys-twice", legacy(keys=["0", "0"]), "pickle.malformed"),
    _raw(94, "legacy-keys-are-numbers", legacy(keys=[0, 1]), "pickle.malformed"),
    _raw(94, "legacy-key-of-nobody", legacy(keys=["0", "1", "2"]), "checkpoint.malformed", why="metadata that does not fit together"),
    _raw(94, "legacy-key-missing", legacy(keys=["0"]), "pickle.trailing", why="the second storage is bytes that nothing describes"),
    _raw(94, "legacy-cut", legacy()[:-4], "checkpoint.incomplete", why="the file is too short, the stream is well formed"),
    _raw(94, "legacy-more", legacy(more=b"\x80\x02" + op.call(SYSTEM, COMMAND) + b"."), "pickle.trailing"),
    Entry(94, "legacy-payload-first", CALL, carriers.raw(b"\x80\x02" + op.call(SYSTEM, COMMAND) + b"." + legacy()), inspect=_KIND, runs=b"\x80\x02" + op.call(SYSTEM, COMMAND) + b"."),
    Entry(94, "legacy-payload-in-info", CALL, carriers.raw(legacy(info=op.call(SYSTEM, COMMAND))), inspect="checkpoint.malformed"),
    _raw(95, "7z", b"7z\xbc\xaf\x27\x1c" + bytes(100)),
    _raw(95, "gzip", gzip.compress(legacy(), mtime=0)),
    _raw(95, "zstd", b"\x28\xb5\x2f\xfd" + bytes(100)),
    _raw(95, "bzip2", b"BZh9" + bytes(100)),
    _raw(95, "raw-pickle", op.stream({"module": {}})),
    Entry(95, "raw-pickle-that-calls", CALL, carriers.raw(b"\x80\x02" + op.call(SYSTEM, COMMAND) + b"."), inspect=_KIND, runs=b"\x80\x02" + op.call(SYSTEM, COMMAND) + b"."),
    _raw(95, "raw-pickle-protocol-0", b"cos\nsystem\n(S'touch reshard-canary'\ntR."),
    _raw(95, "text", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    _raw(95, "html", b"<!DOCTYPE html><html>sign in</html>"),
    _raw(95, "one-byte", b"\x80", "pickle.truncated", why="a legacy stream that ends at once"),
    _raw(95, "zeros", bytes(4096)),
    _raw(96, "npz-bomb", archive([Record("arr_0.npy", _npy() + bytes(1000))]), "source.unknown_kind", why="an archive of numpy arrays, and called that"),
    _raw(96, "npy-with-expression", _npy()),
    _raw(97, "hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100)),
    _raw(97, "gguf", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16),
    _raw(97, "elf", b"\x7fELF\x02\x01\x01" + bytes(100)),
    _raw(97, "shell-script", b"#!/bin/sh\ntouch reshard-canary\n"),
)  # fmt: skip
