"""Files that are no checkpoint, told by their first bytes: what each of them is, and what its owner can do.

Source: git-lfs `docs/spec.md` (pointers: `version` first, then sorted keys); POSIX.1-2017 `pax` (`ustar` at byte 257);
RFC 1952 (gzip); RFC 8878 (Zstandard); ggml `docs/gguf.md`; numpy 2.4 `lib/format.py`; HDF5 file format 3.0; Apache
Parquet file format.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from reshard.errors import SourceError, format_size, printable
from reshard_engine.containers.source_file import SourceFile

HEAD_BYTES = 512
"""So many first bytes of a file tell what it is."""
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_POINTED_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)
_PAGE = re.compile(rb"\s*(?:<!doctype html|<html|<head|<\?xml|<error)", re.IGNORECASE)
_TAR, _TAR_AT = b"ustar", 257
_PACKED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
_ZIP, _NAME_LENGTH_AT, _NAME_AT = b"PK\x03\x04", 26, 30
"""The first local header of a zip archive. Source: PKWARE APPNOTE 6.3, 4.3.7."""
_WEIGHTS = "name the directory of the weights that it was made from"
_OTHERS = (
    (b"GGUF", "a GGUF file of llama.cpp, which holds quantized weights, and is not read", _WEIGHTS),
    (b"\x93NUMPY", "an array of numpy, which is not read", "load it with numpy, and save a state dict with torch.save"),
    (b"\x89HDF\r\n", "an HDF5 file, which is not read", "load it with its own library, and save a state dict"),
    (b"PAR1", "a Parquet table, not a checkpoint", "name the directory of the checkpoint"),
)


def foreign_file(file: SourceFile, read: Callable[[int, int], bytes]) -> SourceError | None:
    """The error for a file that is no checkpoint; None if its first bytes do not tell that.

    Args:
        file: The file.
        read: Reads bytes of it, from an offset on, so many.
    """
    head, name, size_bytes = read(0, min(HEAD_BYTES, file.size_bytes)), file.name, file.size_bytes
    # The command of a fix is for this machine: a file of a store is copied here first.
    path = file.objects[0].path if file.store.scheme == "file" and file.objects else name
    shown, word = printable(name), shlex.quote(printable(path, max_chars=1_024))
    if head.startswith(_POINTER):
        size = _POINTED_SIZE.search(head)
        whole = f" ({format_size(int(size[1]))})" if size is not None else ""
        return _error(
            f"{shown} is a Git LFS pointer of {size_bytes} bytes, not the file itself{whole}",
            "run `git lfs pull` in the clone, or `hf download` of the repository, and name what that wrote; "
            "a bucket that was filled from a clone without LFS holds pointers: copy it again from the repository",
        )
    if _PAGE.match(head):
        return _error(
            f"{shown} is an HTML or XML page of {size_bytes} bytes, which a server sent in place of the file",
            "download the file again; read the page to learn what the server refused",
        )
    if head[_TAR_AT:].startswith(_TAR):
        return _error(
            f"{shown} is a tar archive{' (of NeMo)' if name.endswith('.nemo') else ''}",
            f"unpack it, and name the directory: tar -xf {word}",
        )
    for magic, kind in _PACKED:
        if head.startswith(magic):
            tar = re.search(r"\.(?:tar\.\w+|tgz|tbz2|txz)$", name) is not None
            with_ = f"tar -xf {word}" if tar else f"{kind} -d {word}"
            return _error(f"{shown} is packed with {kind}", f"unpack it, and name what is in it: {with_}")
    if (zipped := _zip_of(head, shown, word)) is not None:
        return zipped
    for magic, what, fix in _OTHERS:
        if head.startswith(magic):
            return _error(f"{shown} is {what}", fix)
    return None


def _zip_of(head: bytes, shown: str, word: str) -> SourceError | None:
    """The error for a zip archive of numpy, or one that its name calls an archive; None for others."""
    if not head.startswith(_ZIP):
        return None
    length = int.from_bytes(head[_NAME_LENGTH_AT : _NAME_LENGTH_AT + 2], "little")
    first = head[_NAME_AT : _NAME_AT + length]
    if first.endswith(b".npy"):
        return _error(
            f"{shown} is an archive of numpy arrays (.npz), which is not read",
            "load it with numpy, and save a state dict with torch.save",
        )
    if shown.endswith(".zip"):
        return _error(f"{shown} is a zip archive", f"unpack it, and name what is in it: unzip {word}")
    return None


def _error(text: str, fix: str) -> SourceError:
    return SourceError("source.unknown_kind", text, fix=fix)
