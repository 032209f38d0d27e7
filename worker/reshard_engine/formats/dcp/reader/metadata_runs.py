"""Recognises runs of equal records in a `.metadata`: chunks in a list, and places in the dict `storage_data`.

Five million chunks are ten million objects; as nodes they would take thirty gigabytes. A run of them becomes columns.
Records are regular if they are byte for byte what the pickler writes for torch's dataclasses once their names are in
the memo; all others are left to the interpreter. The memo of such a stream only grows, so equal bytes mean the same.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`MetadataIndex.__init__` sets fqn, index, offset in this order),
`distributed/checkpoint/filesystem.py` (`_StorageInfo`); CPython 3.11 `Modules/_pickle.c` (`save_reduce`).
"""

from __future__ import annotations
