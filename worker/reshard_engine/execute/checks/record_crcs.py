"""CRC-32s of the records of target files: computed from items, and written to the CRC slots of the files."""

from __future__ import annotations

from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.execute.journal import RecordSpan
from reshard_engine.integrity.crc import CrcBoard
from reshard_engine.plan.write_items import WriteItem
from reshard_engine.storage.checksums import crc32


class AbandonedError(Exception):
    """Another unit failed, so a CRC that this unit waits for will never come."""


class RecordCrcs:
    """Computes the CRC-32s of records in the items of one unit, and puts them on the board for other units."""

    def __init__(self, board: CrcBoard, *, proven: bool) -> None:
        """`proven` is true if the CRC-32s of the unit's records are already known from the source."""
        self._board = board
        self._proven = proven
        self.spans: dict[tuple[int, int], RecordSpan] = {}
        """The summed spans by file and record; the part of a record in one unit is contiguous."""

    def add(self, item: WriteItem, data: ByteArray) -> None:
        """Sum the records in an item and fill its CRC slots. The items of a file must be added in order.

        Raises:
            AbandonedError: The unit cannot be finished.
        """
        if not self._proven and item.length_bytes == item.file.size_bytes:
            self._add_file(item, data)
            return
        if not self._proven:
            self._add_records(item, data)
        self._fill_slots(item, data)

    def _add_file(self, item: WriteItem, data: ByteArray) -> None:
        """Sum the records of a whole file and fill its CRC slots. No other unit needs or provides these sums."""
        template, bytes_, file = item.file.template, data.data, item.chunk.file
        sums = [crc32(bytes_[offset : offset + length]) for offset, length in template.records]
        for offset, record in template.crc_slots:
            bytes_[offset : offset + 4] = sums[record].to_bytes(4, "little")
        for number, (record, crc) in enumerate(zip(template.records, sums, strict=True)):
            self.spans[file, number] = (file, number, 0, record[1], crc)

    def _add_records(self, item: WriteItem, data: ByteArray) -> None:
        begin, end, file = item.begin, item.begin + item.length_bytes, item.chunk.file
        template = item.file.template
        for number in template.records_in(begin, end):
            offset, length = template.records[number]
            low, high = max(offset, begin), min(offset + length, end)
            _, _, first, held, crc = self.spans.get((file, number), (file, number, low - offset, 0, 0))
            crc = crc32(data.data[low - begin : high - begin], crc)
            self.spans[file, number] = (file, number, first, held + high - low, crc)
            self._board.put(file, number, [(first, held + high - low, crc)])

    def _fill_slots(self, item: WriteItem, data: ByteArray) -> None:
        begin, end, template = item.begin, item.begin + item.length_bytes, item.file.template
        for offset, record in template.slots_in(begin, end):
            crc = self._board.wait_for(item.chunk.file, record, template.records[record][1])
            if crc is None:
                raise AbandonedError
            low, high = max(offset, begin), min(offset + 4, end)
            data.data[low - begin : high - begin] = crc.to_bytes(4, "little")[low - offset : high - offset]
