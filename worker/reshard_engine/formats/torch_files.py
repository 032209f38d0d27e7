"""The format that `reshard slim` reads and writes: plain torch files with any contents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.choices import TargetFormat
from reshard.errors import RequestError, SourceError, printable
from reshard.models.jobs import ConvertRequest
from reshard_engine.checkpoint import FILE_STATE, Checkpoint, FormatFacts
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import SharedPickles, TorchFile, add_whole_tensor, open_torch_file, place_of
from reshard_engine.formats.dcp_files.metadata.model import SUFFIX
from reshard_engine.formats.format import Completion, Format, Writer
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PTensor, PTensorRef, collector_paused, mapping_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.dtypes import UINT8
from reshard_engine.tensors.layout import Body, FileTemplate, TargetFile, TargetLayout
from reshard_engine.tensors.shard_map import ShardMapBuilder


class _Completion(Completion):
    """The checkpoint that a request means, in the terms of this format."""

    def read_for(self, request: ConvertRequest, location: Location, ledger: OpaqueLedger) -> Checkpoint | None:
        """Read all files of the source for a conversion to `slim`."""
        if request.to not in TorchFiles.targets:
            return None
        if request.source.tag is not None:
            raise RequestError(
                "request.invalid", "--to slim takes files as they are: no tag", fix="name the tag's directory"
            )

        return replace(read_torch_files(location, ledger), family=TorchFiles.name)


class TorchFiles(Format):
    """Any tree with its tensors. No directory is recognised as this format: only a conversion to `slim` reads it."""

    name = "torch_files"
    completion = _Completion()
    targets = (TargetFormat.SLIM,)

    def writer(self, target: str) -> Writer:
        """The writer of torch files whose storages are as long as their tensors."""
        return SlimWriter()


# The trees of torch files, which are not a training state that any other format knows.


@dataclass(frozen=True, slots=True)
class TorchFilesFacts(FormatFacts):
    """Files as trees."""

    files: Mapping[str, Node]
    """By path: the value that torch saved, with `PTensorRef`s in place of tensors, or a reference to all bytes."""

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """The trees of all files."""
        yield mapping_of({**self.files}), ""


def files_of(checkpoint: Checkpoint) -> Mapping[str, Node]:
    """The trees of a checkpoint by path; none of one that came from elsewhere."""
    return checkpoint.facts.files if isinstance(checkpoint.facts, TorchFilesFacts) else {}


# Reads torch files with any contents, and all other files as bytes.
#
# This is all that is needed to write them again with only their own tensors. No checkpoint format is recognised.

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
    facts, shard_map, foreign = TorchFilesFacts(trees), builder.build(), ledger.foreign
    return Checkpoint.of_trees(
        facts, url=location.url, kind="torch-files", files=files, shard_map=shard_map, foreign=foreign
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

    Files of distributed checkpoints are copied, too: they are sequences of archives, and a chunk has no more storage
    than its tensor, which torch clones before it saves it.

    Source: torch 2.13.0 `serialization.py` (`_save`: `data.pkl` is the first record of an archive),
    `distributed/checkpoint/filesystem.py` (`_write_item`).
    """
    if file.name.endswith(SUFFIX):
        return False
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
                fix="keep this file as it is: only plain dense tensors are rewritten",
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


# Lays out torch files whose storages are exactly as long as their tensors, as `torch.save` of clones writes them.


class SlimWriter:
    """Lays out files under their own names."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Torch files with compact storages, everything else byte for byte.

        Raises:
            RequestError: `request.invalid` for options that would change what tensors hold.
        """
        if request.dtype is not None or request.exclude_frozen:
            raise RequestError(
                "request.invalid",
                "files keep their tensors: no --dtype, and nothing is left out",
                fix="leave --dtype and --exclude-frozen out",
            )
        files: list[TargetFile] = []
        for path, tree in files_of(checkpoint).items():
            if isinstance(tree, PTensorRef) and checkpoint.shard_map.tensors[tree.index].state == FILE_STATE:
                size = checkpoint.shard_map.tensors[tree.index].numel
                template = FileTemplate(size, (), (Body(0, 0, 0, size, UINT8, None),))
                files.append(TargetFile(str(path), template, (tree.index,)))
                continue
            root = str(path).rpartition("/")[2].rpartition(".")[0] or "archive"
            template, slots = tree_template(root, tree, checkpoint.shard_map, opaque=request.opaque)
            files.append(TargetFile(str(path), template, slots))
        return TargetLayout(tuple(files), None)
