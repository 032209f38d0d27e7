"""Files that are no checkpoint: each is called what it is, and the fix is what its owner can do."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shlex
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from house.promises import command
from reshard_engine.containers.foreign import HEAD_BYTES, foreign_file
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import ObjectInfo

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n".encode()
PAGE = b"<!DOCTYPE html><html><body>Access denied</body></html>" * 10


def _tar(mode: str = "w") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        info = tarfile.TarInfo("pytorch_model.bin")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"data"))
    return packed.getvalue()


def _zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("pytorch_model.bin", b"data")
    return packed.getvalue()


def _npz() -> bytes:
    packed = io.BytesIO()
    np.savez(packed, a=np.zeros(3))
    return packed.getvalue()


FILES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a pointer for safetensors": ("model.safetensors", lambda: POINTER, "is a Git LFS pointer of 135 bytes"),
    "a pointer for torch": ("pytorch_model.bin", lambda: POINTER, "not the file itself (4.63 GiB)"),
    "a page for safetensors": ("model.safetensors", lambda: PAGE, "is an HTML or XML page of 540 bytes"),
    "an error of S3": ("pytorch_model.bin", lambda: b"<?xml version='1.0'?><Error/>", "is an HTML or XML page"),
    "NeMo": ("model.nemo", _tar, "is a tar archive (of NeMo)"),
    "tar": ("ckpt.tar", _tar, "is a tar archive"),
    "tar.gz": ("ckpt.tar.gz", lambda: _tar("w:gz"), "is packed with gzip"),
    "tar.xz": ("ckpt.tar.xz", lambda: _tar("w:xz"), "is packed with xz"),
    "gz": ("model.pt.gz", lambda: gzip.compress(b"data"), "is packed with gzip"),
    "bz2": ("model.pt.bz2", lambda: bz2.compress(b"data"), "is packed with bzip2"),
    "xz": ("model.pt.xz", lambda: lzma.compress(b"data"), "is packed with xz"),
    "zip": ("ckpt.zip", _zip, "is a zip archive"),
    "GGUF": ("m.gguf", lambda: b"GGUF" + bytes(100), "is a GGUF file of llama.cpp"),
    "GGUF under torch's name": ("m.pt", lambda: b"GGUF" + bytes(100), "is a GGUF file of llama.cpp"),
    "npz": ("w.npz", _npz, "is an archive of numpy arrays"),
    "npz under torch's name": ("w.pt", _npz, "is an archive of numpy arrays"),
    "HDF5": ("w.h5", lambda: b"\x89HDF\r\n\x1a\n" + bytes(100), "is an HDF5 file"),
}


def _fix(place: Path) -> tuple[str, str]:
    code, _, err = command("inspect", str(place))
    assert code == 3, err
    error, _, fix = err.partition("\nfix: ")
    return error, fix.strip()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    file, content, told = FILES[name]
    (tmp_path / file).write_bytes(content())
    error, fix = _fix(tmp_path / file)
    assert "source.unknown_kind" in error
    assert told in error
    assert fix
    assert "name the directory that holds it" not in fix


@pytest.mark.parametrize("name", ["NeMo", "tar.gz", "tar.xz", "gz", "bz2", "xz"])
def test_the_command_of_a_fix_unpacks_the_file(name: str, tmp_path: Path) -> None:
    file, content, _ = FILES[name]
    (tmp_path / "a place").mkdir()
    place = tmp_path / "a place" / file
    place.write_bytes(content())
    _, fix = _fix(place)
    words = shlex.split(fix.rpartition(": ")[2])
    subprocess.run(words, cwd=place.parent, check=True)
    assert {path.read_bytes() for path in place.parent.iterdir() if path != place} == {b"data"}


def test_a_pointer_among_shards_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(POINTER)
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    error, fix = _fix(tmp_path)
    assert "model-00001-of-00001.safetensors is a Git LFS pointer" in error
    assert "git lfs pull" in fix


def test_a_pickled_module_needs_its_own_code(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    torch.save(model, tmp_path / "whole.pt")
    torch.save({"model": model, "optimizer": torch.optim.Adam(model.parameters())}, tmp_path / "objects.pt")
    for name in ("whole.pt", "objects.pt"):
        error, fix = _fix(tmp_path / name)
        assert "an object of torch.nn.modules.linear.Linear" in error
        assert "torch.save(model.state_dict(), FILE)" in fix


@pytest.mark.parametrize("file", ["state.pt", "meta.pt", "pytorch_model.bin"])
def test_tensors_without_values_are_counted(file: str, tmp_path: Path) -> None:
    state = {**torch.nn.Linear(4, 4).state_dict(), "ghost": torch.empty(3, device="meta")}
    nested = file == "meta.pt"
    torch.save({"model": state} if nested else state, tmp_path / file)
    error, _ = _fix(tmp_path / file if file != "pytorch_model.bin" else tmp_path)
    assert "checkpoint.incomplete" in error
    assert "1 of 3 tensors are on the device `meta`, so no values were saved: ghost" in error


def test_a_buffer_that_expand_made_is_read(tmp_path: Path) -> None:
    model = {**torch.nn.Linear(4, 4).state_dict(), "mask": torch.arange(4.0).expand(3, 4)}
    torch.save({"model": model}, tmp_path / "expanded.pt")
    code, _, err = command("convert", str(tmp_path / "expanded.pt"), str(tmp_path / "out"), "--to", "torch", "-q")
    assert code == 0, err
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(written["mask"], model["mask"])


def test_a_few_bytes_do_not_expand_without_bound(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1).expand(1 << 11, 1 << 11)}}, tmp_path / "one.pt")
    many = {f"w{n}": torch.ones(1).expand(1 << 10, 1 << 10) for n in range(600)}
    torch.save({"model": many}, tmp_path / "many.pt")
    for name in ("one.pt", "many.pt"):
        code, _, err = command("convert", str(tmp_path / name), str(tmp_path / "out"), "--to", "torch", "-q")
        assert (code, "tensor.amplification" in err) == (3, True), err


@pytest.mark.parametrize("length", [0x8B1F, 0x685A42])
def test_a_length_of_a_header_is_not_the_magic_of_gzip_or_bzip2(length: int, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode().ljust(length)
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + bytes(8))
    code, _, err = command("inspect", str(tmp_path))
    assert code == 0, err


@given(head=st.binary(max_size=HEAD_BYTES + 8))
def test_no_beginning_of_a_file_breaks_the_look(head: bytes) -> None:
    info = ObjectInfo("/nowhere/name.pt", len(head), "")
    file = SourceFile(open_location("/nowhere").store, "name.pt", (info,))
    found = foreign_file(file, lambda offset, length: head[offset : offset + length])
    assert found is None or found.code == "source.unknown_kind"
