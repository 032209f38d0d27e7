"""Reads torch files with any contents, and all other files as bytes.

This is all that is needed to write them again with only their own tensors. No checkpoint format is recognised.
"""

from __future__ import annotations

from reshard.errors import RequestError, SourceError, printable
from reshard_engine.checkpoint import FILE_STATE, Checkpoint
from reshard_engine.containers.opening import open_all
from reshard_engine.containers.shared_pickles import SharedPickles
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.containers.torch_tensors import add_whole_tensor, place_of
from reshard_engine.formats.torch_files.facts import TorchFilesFacts
from reshard_engine.pickles.collector import collector_paused
from reshard_engine.pickles.nodes import Node, PTensor, PTensorRef
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rewrite import rewrite
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.dtypes import UINT8
from reshard_engine.tensors.shard_map import ShardMapBuilder

_LEGACY_HEAD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickle of torch's magic number. Source: torch 2.13.0 `serialization.py` (`MAGIC_NUMBER`)."""
_HEAD_BYTES = 4 << 10


def read_torch_files(location: Location, ledger: OpaqueLedger) -> Checkpoint:
    """Read a file, or all files below a directory, as a checkpoint whose facts map paths to trees.

    The tree of a file that torch did not write is a reference to its bytes.

    Raises:
        SourceError: `source.not_found`; `zip.*`, `pickle.*` and `tensor.*` for torch files that are damaged.
    """
    sources = _sources(location)
    shared = SharedPickles(ledger)

    def parse(file: SourceFile) -> TorchFile | SourceFile:
        if not _is_torchs(file):
            return file
        try:
            return open_torch_file(file, ledger, pickles=shared)
        except SourceError as error:
            if error.code == "source.unknown_kind":  # TorchScript begins as it does
                return file
            raise

    builder = ShardMapBuilder()
    trees: dict[str, Node] = {}
    files: list[SourceFile] = []
    with collector_paused():
        for number, parsed in enumerate(open_all(sources, parse)):
            file = parsed.file if isinstance(parsed, TorchFile) else parsed
            files.append(file)
            trees[file.name] = (
                _tree(builder, parsed, number) if isinstance(parsed, TorchFile) else _bytes(builder, file, number)
            )
    return Checkpoint(
        url=location.url,
        tag=None,
        format="torch-files",
        framework_version=None,
        world={},
        files=tuple(files),
        shard_map=builder.build(),
        parameters=(),
        buffers=(),
        shared={},
        optimizer=None,
        facts=TorchFilesFacts(trees),
        foreign_globals=tuple(sorted(ledger.foreign)),
        warnings=(),
    )


def _sources(location: Location) -> list[SourceFile]:
    single = location.store.stat(location.path)
    if single is not None:
        return [SourceFile(location.store, location.path.rpartition("/")[2], (single,))]
    found = location.files()
    if not found:
        here = location.store.scheme == "file"
        raise SourceError(
            "source.not_found",
            f"nothing exists at {printable(location.url)}",
            fix="check the path" if here else "check the path and the profile",
        )
    return [SourceFile(location.store, name, (info,)) for name, info in found.items()]


def _is_torchs(file: SourceFile) -> bool:
    """True if a file begins as torch's do. Other zip archives and other pickles are copied as bytes.

    Source: torch 2.13.0 `serialization.py` (`_save`: `data.pkl` is the first record of an archive).
    """
    head = file.read(0, min(_HEAD_BYTES, file.size_bytes)) if file.size_bytes else b""
    if head.startswith(_LEGACY_HEAD):
        return True
    length = int.from_bytes(head[26:28], "little")
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + length].endswith(b"/data.pkl")


def _tree(builder: ShardMapBuilder, parsed: TorchFile, number: int) -> Node:
    """The value with references in place of tensors; tensors with the same elements share one reference."""
    known: dict[tuple[object, ...], PTensorRef] = {}

    def reference(tensor: Node) -> Node:
        if not isinstance(tensor, PTensor):
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(parsed.file.name)} holds tensors of another kind",
                fix="reshard slim rewrites plain dense tensors only; keep this file as it is",
            )
        place = place_of(tensor)
        if place not in known:
            name = f"{parsed.file.name}#{len(known)}"
            known[place] = PTensorRef(add_whole_tensor(builder, name, "value", tensor, torch_file=parsed, file=number))
        return known[place]

    return rewrite(parsed.root, reference, lambda foreign: foreign)


def _bytes(builder: ShardMapBuilder, file: SourceFile, number: int) -> Node:
    tensor = builder.tensor(file.name, FILE_STATE, UINT8, (file.size_bytes,))
    builder.whole(tensor, file=number, offset=0)
    return PTensorRef(tensor)
