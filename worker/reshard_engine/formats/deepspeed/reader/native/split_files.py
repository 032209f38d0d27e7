"""Files that DeepSpeed's FAST writer left in parts: copies of one archive, or byte ranges of one stream.

Source: deepspeed 0.19.8 `runtime/model_checkpointing/writer_factory.py` (names `<file>-<writer>.<writers>`),
`io/fast_file_writer.py`; verified by running: with stock torch every part is a complete archive, the
byte-range form comes from `save_torch_storage_object_list`, whose first part alone begins the stream.
"""

from __future__ import annotations

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.storage.protocol import read_bytes

_ZIP_MAGIC = b"PK\x03\x04"
_EOCD_BYTES = 22


def joined_parts(file: SourceFile) -> SourceFile:
    """The whole file that the parts of a split file make up; a file that is not split is returned as it is."""
    if len(file.objects) == 1:
        return file
    return whole_copy(file) or file


def whole_copy(file: SourceFile) -> SourceFile | None:
    """The first part, if every part is a complete archive; None if the parts are byte ranges of one stream."""
    if all(_is_whole_archive(file, index) for index in range(len(file.objects))):
        return SourceFile(file.store, file.name, file.objects[:1])
    return None


def _is_whole_archive(file: SourceFile, index: int) -> bool:
    info = file.objects[index]
    if info.size_bytes < _EOCD_BYTES:
        return False
    head = read_bytes(file.store, info, 0, 4)
    tail = read_bytes(file.store, info, info.size_bytes - _EOCD_BYTES, 4)
    return head == _ZIP_MAGIC and tail == b"PK\x05\x06"
