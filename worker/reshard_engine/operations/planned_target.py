"""The target of a conversion that has not run, as a checkpoint: its readers read the layout instead of files.

A layout knows every byte but those of tensors, and readers read only metadata. So the picture of a planned target is
made by the code that makes the picture of a finished one.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import ReshardError, StorageError, printable
from reshard.models import ConvertRequest, OpaquePolicy
from reshard.pictures import FileShare, LayoutPair, LayoutPicture
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.conversion import Conversion
from reshard_engine.operations.layout_map import picture_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, join
from reshard_engine.tensors.layout import TargetFile, TargetLayout


def planned_pictures(request: ConvertRequest, tensor: str | None) -> LayoutPair:
    """The layouts of the source and of the target that a conversion would write; nothing is written.

    Args:
        request: The conversion.
        tensor: `NAME` or `NAME/STATE` of a tensor of the source whose parts to list on both sides; None for the
            largest one of those that the most files share.

    Raises:
        ReshardError: As planning does; `request.invalid` for a name that the source does not have.
    """
    conversion = Conversion.prepare(request)
    source = conversion.checkpoint
    wanted = _most_divided(source) if tensor is None else tensor
    return LayoutPair(source=picture_of(source, wanted), target=_picture_of_target(conversion, wanted))


def _picture_of_target(conversion: Conversion, wanted: str | None) -> LayoutPicture:
    layout, target = conversion.layout, conversion.target
    store = PlannedStore(target.path, layout)
    try:
        planned = read_checkpoint(Location(store, target.path, target.url), None, OpaqueLedger(OpaquePolicy.KEEP))
    except ReshardError:
        # A format that can be written and not read: its files are all that can be said.
        files = tuple(
            FileShare(file=printable(f.path), rank="", size_bytes=f.size_bytes, bytes_by_state={}) for f in layout.files
        )
        return LayoutPicture(url=target.url, format=conversion.request.to, world={}, files=files)
    return _pictured(planned, wanted)


def _pictured(target: Checkpoint, wanted: str | None) -> LayoutPicture:
    """The layout of a target with the parts of a tensor of the source, in the state that holds its elements there."""
    fqns = {p.fqn for p in target.parameters} | {b.fqn for b in target.buffers} | set(target.shared)
    head, _, tail = (wanted or "").rpartition("/")
    # Names may have slashes: the whole text is tried as a name first.
    name, state = next(((n, s) for n, s in ((wanted, ""), (head, tail)) if n in fqns), (None, ""))
    picture = picture_of(target, name)
    for held in (state, "weight"):
        # Weights without masters hold what the masters held.
        if state and (found := tuple(t for t in picture.tensors if t.state == held)):
            return picture.model_copy(update={"tensors": found})
    return picture


def _most_divided(checkpoint: Checkpoint) -> str | None:
    """The tensor whose picture says most: of those in the most files, the largest; None without parameters."""
    shard_map = checkpoint.shard_map

    def said(number: int) -> tuple[int, int]:
        numel = shard_map.tensors[number].numel
        return len(set(shard_map.pieces(number, 0, numel).file.tolist())), numel

    found: list[tuple[tuple[int, int], str]] = []
    for parameter in checkpoint.parameters:
        # One state is enough: the others of an optimizer lie as it does.
        held = dict(parameter.states) or ({} if parameter.weight is None else {"weight": parameter.weight})
        state = "fp32" if "fp32" in held else next(iter(held), None)
        if state is not None:
            found.append((said(held[state]), f"{parameter.fqn}/{state}"))
    return max(found, key=lambda pair: pair[0])[1] if found else None


class PlannedStore:
    """A store whose only files are those of a layout. Tensors and checksums that no one knows yet are zeros.

    Args:
        path: The path of the target's directory.
        layout: The files of the target.
    """

    scheme = "planned"

    def __init__(self, path: str, layout: TargetLayout) -> None:
        self._path = path
        self._files: dict[str, TargetFile] = {join(path, f.path): f for f in layout.files}

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a directory of the target."""
        below = [(i, i.path[len(path.rstrip("/")) + 1 :]) for i in self.list_tree(path)]
        files = tuple(info for info, name in below if "/" not in name)
        directories = sorted({name.partition("/")[0] for _, name in below if "/" in name})
        return Listing(files[:most], tuple(directories[:most]))

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every file below a directory, sorted by path."""
        head = path.rstrip("/") + "/"
        found: Sequence[str] = sorted(p for p in self._files if p.startswith(head))
        return [ObjectInfo(p, self._files[p].size_bytes, "planned") for p in found]

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at exactly this path, or None."""
        file = self._files.get(path)
        return None if file is None else ObjectInfo(path, file.size_bytes, "planned")

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what the layout says of these bytes.

        Raises:
            StorageError: `storage.protocol` for bytes outside of the file.
        """
        file = self._files.get(info.path)
        end = offset + len(buffer)
        if file is None or offset < 0 or end > file.size_bytes:
            raise StorageError("storage.protocol", f"{printable(info.path)}: {offset}:{end} is outside of the layout")
        buffer[:] = bytes(len(buffer))
        for at, data in file.template.literals_in(offset, end):
            first, last = max(at, offset), min(at + len(data), end)
            if first < last:
                buffer[first - offset : last - offset] = data[first - at : last - at]
