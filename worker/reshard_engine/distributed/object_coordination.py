"""The texts of a distributed conversion as objects of the journal beside a target in an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import SourceError, StorageError
from reshard_engine.distributed.coordination import refuse_large
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore, join, read_bytes

_TRIES = 8


class ObjectCoordination:
    """Texts as objects below one prefix."""

    def __init__(self, store: ObjectStore, root: str) -> None:
        """`root` is `bucket/key...` without a trailing slash; it need not exist."""
        self._store = store
        self._root = root
        self._listed: Mapping[str, ObjectInfo] = {}
        """The objects that the last listing showed: those need not be looked up before they are read."""

    def create(self, name: str, text: bytes) -> bool:
        """Put an object if it is absent."""
        try:
            self._store.put(join(self._root, name), text, metadata={}, if_absent=True)
        except StorageError as error:
            if error.code != "storage.conflict" and not error.retryable:
                raise
            there = self.read(name)
            if there is None:
                # The put failed and left nothing, or the object was removed: the caller looks again.
                if error.retryable:
                    raise
                return False
            return there == text
        return True

    def put(self, name: str, text: bytes) -> None:
        """Put an object."""
        self._store.put(join(self._root, name), text, metadata={}, if_absent=False)

    def read(self, name: str) -> bytes | None:
        """Read an object that other workers may replace at any moment."""
        path = join(self._root, name)
        listed = self._listed.get(path)
        for _ in range(_TRIES):
            info, listed = listed or self._store.stat(path), None
            if info is None:
                return None
            refuse_large(path, info.size_bytes)
            try:
                return read_bytes(self._store, info)
            except SourceError as error:
                if error.code not in ("source.changed", "source.not_found"):
                    raise
        raise StorageError("storage.unavailable", f"{path} was replaced each time it was read")

    def names(self) -> Mapping[str, str]:
        """List the objects; their versions are their pins."""
        head = len(self._root) + 1
        self._listed = {i.path: i for i in self._store.list_tree(self._root)}
        return {i.path[head:]: i.pin for i in self._listed.values()}

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        self._store.delete([join(self._root, name) for name in names])
