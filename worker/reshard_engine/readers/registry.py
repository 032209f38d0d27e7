"""Which readers there are, and how a URL becomes a checkpoint.

Users name what they have: the directory they save into (with `latest`), one tag in it, a Hugging Face
`checkpoint-N`, an Accelerate or Lightning directory. All of them hold a tag directory one level down.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.readers.deepspeed.reader import DeepSpeedReader
from reshard_engine.readers.protocol import Reader
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes

READERS: tuple[Reader, ...] = (DeepSpeedReader(),)
_LATEST_LIMIT_BYTES = 1_024


@dataclass(frozen=True, slots=True)
class Found:
    """A directory that a reader recognises."""

    location: Location
    listing: Listing
    tag: str | None
    reader: Reader


def _recognise(location: Location, tag: str | None) -> Found | None:
    listing = location.store.list_directory(location.path)
    for reader in READERS:
        if reader.recognises(listing):
            return Found(location, listing, tag, reader)
    return None


def find_checkpoint(location: Location, tag: str | None) -> Found:
    """The checkpoint directory that the user means.

    Raises:
        SourceError: `source.not_found`, `source.unknown_kind`, `checkpoint.bad_latest`.
    """
    listing = location.store.list_directory(location.path)
    if not listing.files and not listing.directories:
        if location.store.stat(location.path) is not None:
            raise SourceError(
                "source.unknown_kind",
                f"{printable(location.url)} is a file; a checkpoint is a directory",
                fix="name the directory that holds `latest` or the rank files",
            )
        raise SourceError(
            "source.not_found", f"nothing is at {printable(location.url)}", fix="check the path and the profile"
        )
    if tag is not None:
        return _tagged(location, listing, tag, code="source.not_found", said_by="--tag")
    here = _recognise(location, None)
    if here is not None:
        return here
    latest = next((f for f in listing.files if f.path.rpartition("/")[2] == "latest"), None)
    if latest is not None:
        if latest.size_bytes > _LATEST_LIMIT_BYTES:
            raise SourceError("checkpoint.bad_latest", f"`latest` has {latest.size_bytes} bytes; it holds one name")
        text = read_bytes(location.store, latest).decode("utf-8", "replace").strip()
        return _tagged(location, listing, text, code="checkpoint.bad_latest", said_by="`latest`")
    raise SourceError(
        "source.unknown_kind",
        f"{printable(location.url)} holds no checkpoint of a known kind ({len(listing.files)} files, "
        f"directories: {_some(listing.directories)})",
        fix=_tag_fix(location, listing) or "name the directory that holds `latest` or the rank files",
    )


def _tagged(location: Location, listing: Listing, tag: str, *, code: str, said_by: str) -> Found:
    parts = tag.split("/")
    if not tag or len(tag) > 512 or not tag.isprintable() or any(p in ("", ".", "..") for p in parts) or "\\" in tag:
        raise SourceError("checkpoint.bad_latest", f"{said_by} says {printable(tag)!r}, which is no directory name")
    found = _recognise(location.child(*parts), tag)
    if found is None:
        raise SourceError(
            code,
            f"{said_by} names {printable(tag)!r}, where no checkpoint of a known kind is",
            fix=_tag_fix(location, listing) or "copy the checkpoint again",
            details={"tag": printable(tag)},
        )
    return found


def _tag_fix(location: Location, listing: Listing) -> str:
    tags = [d for d in listing.directories if _recognise(location.child(d), d) is not None]
    return f"name one that is there: --tag {tags[-1]} (there are: {_some(tags)})" if tags else ""


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(printable(n) for n in names[:8])
    return (shown + (", ..." if len(names) > 8 else "")) or "none"


def read_checkpoint(location: Location, tag: str | None, ledger: OpaqueLedger) -> Checkpoint:
    """The checkpoint that a location and an optional tag name.

    Raises:
        SourceError: As `find_checkpoint`, and everything that the reader finds.
    """
    found = find_checkpoint(location, tag)
    return found.reader.read(found.location, found.listing, tag=found.tag, ledger=ledger)
