"""Azure Blob Storage through the official client: pinned reads, conditional puts, and uploads as lists of blocks.

Azure has no multipart uploads with ids. A blob has one list of uncommitted blocks, which all writers share. A commit
names the blocks that make the blob, and discards all others. So the name of each block says to which upload it
belongs, which part it is and the CRC-32 of its bytes, and a commit names the blocks of its own upload only. Two
conversions into one blob can take the blob from one another, but never mix their bytes.

The service checks the CRC-64 of each block and of each whole blob that it receives (`x-ms-content-crc64`), and nothing
else: the content of a finished blob is what the blocks held. Reads are checked by the engine.

Source: Azure Blob Storage REST API (Put Block, Put Block List, Get Block List, Put Blob, List Blobs);
azure-storage-blob 12.31.1. Verified by running against Azurite 3.37.0, which is Microsoft's emulator.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode
from xml.etree.ElementTree import ParseError  # the exception alone: the client parses

from azure.core import MatchConditions, exceptions
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobBlock, BlobServiceClient, ExponentialRetry
from azure.storage.extensions import checksums
from requests import Session
from requests.adapters import HTTPAdapter

from reshard.errors import PROFILES_VARIABLE, ReshardError, SourceError, StorageError, printable
from reshard_engine.storage.crc32 import PIECE_BYTES, crc32
from reshard_engine.storage.profiles import profile_named
from reshard_engine.storage.protocol import (
    Body,
    Listing,
    ObjectInfo,
    PartInfo,
    Store,
    already_exists,
    bucket_and_key,
    bucket_and_prefix,
    changed,
    delete_each,
    upload_gone,
)

# The client's types are partly unknown: its results are checked where they are used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_T = TypeVar("_T")

# Typed errors in place of the client's exceptions.
#
# Source: Azure Blob Storage REST API (error codes); azure-core 1.41 (exceptions).

_RAISED = (exceptions.AzureError, OSError, ParseError)
_NO_CONTAINER = {
    *("ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"),
    # The name cannot be that of a container: too short, or with other characters.
    *("InvalidResourceName", "OutOfRangeInput"),
}
_CONFLICT = {"BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet"}
_PASSING = {"Md5Mismatch", "Crc64Mismatch", "ServerBusy", "OperationTimedOut", "InternalError"}
"""Codes of transient failures. Two of them mean that the service received other bytes than were sent."""
_KEYS_FIX = "AZURE_STORAGE_CONNECTION_STRING=..., or AZURE_STORAGE_ACCOUNT_NAME=... AZURE_STORAGE_ACCOUNT_KEY=..."
_FIX = f"export {_KEYS_FIX}, or name a storage profile; to see what is found: reshard doctor"


def _code(error: BaseException) -> str:
    found = getattr(error, "error_code", None)
    return str(getattr(found, "value", found) or "")


def _typed(error: BaseException, path: str) -> ReshardError:
    """The typed error for an exception of the client."""
    where = f"az://{printable(path)}"
    if isinstance(error, exceptions.DecodeError | ParseError):
        return StorageError("storage.protocol", f"{where}: the store's reply is malformed")
    if isinstance(error, exceptions.TooManyRedirectsError):
        return StorageError("storage.protocol", f"{where}: the store redirects without end")
    if isinstance(error, exceptions.ClientAuthenticationError):
        return StorageError("storage.denied", f"{where}: {_summary(error)}", fix=_FIX)
    if isinstance(error, exceptions.HttpResponseError) and error.status_code is not None:
        return _refused(_code(error), error.status_code, path, f"{where}: {_summary(error)}")
    return StorageError(
        "storage.unavailable",
        f"{where}: {type(error).__name__}: {_summary(error)}",
        fix="check the endpoint in AZURE_STORAGE_CONNECTION_STRING, or the account's name, and the network",
    )


def _summary(error: BaseException) -> str:
    """The code and the first line of a reply: what follows names the request, and quotes the whole reply."""
    return printable(f"{_code(error)}: {str(error).partition(chr(10))[0]}".removeprefix(": "))


def _refused(code: str, status: int, path: str, text: str) -> ReshardError:
    container = printable(path.partition("/")[0])
    if code == "InvalidBlockList":
        return upload_gone(f"az://{printable(path)}")
    if code in _NO_CONTAINER:
        return StorageError(
            "storage.no_bucket", f"container {container!r} does not exist", fix="check the container's name"
        )
    if code == "InvalidBlobOrBlock":
        return StorageError(
            "storage.conflict",
            f"{text}: another program began an upload to this blob, with names of blocks of another length",
            fix="choose another target: the service drops unfinished uploads after a week",
        )
    if status in (401, 403):
        return StorageError("storage.denied", text, fix=_FIX)
    if status == 404:
        return SourceError(
            "source.not_found",
            f"az://{printable(path)} does not exist",
            fix="correct the URL: the name of a blob is compared letter by letter",
        )
    if code in _CONFLICT or status == 412:
        return already_exists(f"az://{printable(path)}")
    if status == 507:
        return StorageError("storage.no_space", text)
    if status >= 500 or status in (408, 429) or code in _PASSING:
        return StorageError("storage.unavailable", text, fix="run the same command again: it resumes")
    return StorageError("storage.protocol", text)


@contextmanager
def translated(path: str) -> Generator[None]:
    """Turn exceptions of the client into typed errors that name the blob."""
    try:
        yield
    except _RAISED as error:
        raise _typed(error, path) from error


@contextmanager
def parsed(path: str) -> Generator[None]:
    """Like `translated`, around calls whose reply the client parses.

    It does not check what it parses: a malformed reply ends in whichever exception its code meets first.
    """
    try:
        with translated(path):
            yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StorageError("storage.protocol", f"az://{printable(path)}: the store's reply is malformed") from error


# Accounts and their credentials.


@dataclass(frozen=True, slots=True)
class AzureProfile:
    """One storage account and its credentials. The secrets never appear in `repr`.

    A connection string says all. Otherwise the account has its name, or its URL where it is in no public cloud, and a
    key, a SAS token, or what azure-identity's `DefaultAzureCredential` finds: a service principal in the environment, a
    workload or managed identity, or the login of `az`.
    """

    connection_string: str | None = field(default=None, repr=False)
    account_name: str | None = None
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None

    @classmethod
    def from_environment(cls) -> AzureProfile:
        """The profile without a name: the variables of adlfs 2026.8, and those of the Azure command line."""

        def first(*names: str) -> str | None:
            return next((value for name in names if (value := os.environ.get(f"AZURE_STORAGE_{name}"))), None)

        return cls(
            connection_string=first("CONNECTION_STRING"),
            account_name=first("ACCOUNT_NAME", "ACCOUNT"),
            account_key=first("ACCOUNT_KEY", "KEY"),
            sas_token=first("SAS_TOKEN"),
        )

    @property
    def method(self) -> str | None:
        """A description of the credentials, without secrets; None if no account is named."""
        if self.connection_string is not None:
            keyless = not re.search(r"(?i)(^|;)\s*(AccountKey|SharedAccessSignature)=", self.connection_string)
            return f"a connection string{' and azure-identity' if keyless else ''}"
        if self.account_name is None and self.endpoint_url is None:
            return None
        if self.account_key is not None:
            return "an account key"
        return "a SAS token" if self.sas_token is not None else "azure-identity"

    def client(self, **options: Any) -> BlobServiceClient:
        """The client of the account."""
        method = self.method
        if method is None:
            raise StorageError("storage.denied", "az://: no storage account is named", fix=_FIX)
        credential: Any = self.sas_token if self.account_key is None else self.account_key
        if method.endswith("azure-identity"):
            from azure.identity import DefaultAzureCredential  # 0.4 s to import: only where nothing else is named

            credential = DefaultAzureCredential()
        try:
            if self.connection_string is not None:
                return BlobServiceClient.from_connection_string(
                    self.connection_string, credential if method.endswith("azure-identity") else None, **options
                )
            url = self.endpoint_url or f"https://{self.account_name}.blob.core.windows.net"
            if self.account_key is not None and self.account_name is not None:
                credential = {"account_name": self.account_name, "account_key": self.account_key}
            return BlobServiceClient(url, credential, **options)
        except ValueError as error:
            # The message of the client may quote what it was given.
            raise StorageError("storage.denied", f"az://: {type(error).__name__} in {method}", fix=_FIX) from None


# The names of blocks: 64 bytes, the longest that the service takes, for all blocks of a blob need one length.
#
# A part is `reshard`, the tag of its upload, its number, and the CRC-32 of its bytes. Part 0 stands for the beginning
# of the upload: its names hold the upload's id, from which whoever ends the upload knows the metadata. The last number
# stands for its end.
#
# Source: Put Block (a block's name has at most 64 bytes before base64, all of a blob have one length; at most 100,000
# uncommitted blocks; a blob without a commit is dropped one week after its last block).

_MAGIC = "reshard"
_TAG_CHARS, _REST_CHARS, _PIECE_CHARS = 12, 40, 39
_NAME = re.compile(rf"{_MAGIC}([\w-]{{{_TAG_CHARS}}})(\d{{5}})(.{{{_REST_CHARS}}})")
_ABORTED = 99_999


@dataclass(frozen=True, slots=True)
class _Block:
    """The facts in the name of a block."""

    tag: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{_MAGIC}{self.tag}{self.number:05}{self.rest:<{_REST_CHARS}}"


def _beginning(upload_id: str) -> list[_Block]:
    """The blocks that stand for the beginning of an upload: together they hold its id."""
    tag, text = upload_id[:_TAG_CHARS], upload_id[_TAG_CHARS:]
    pieces = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)] or [""]
    return [_Block(tag, 0, f"{chr(ord('a') + n)}{piece}") for n, piece in enumerate(pieces)]


def _part(upload_id: str, number: int, checksum: int) -> _Block:
    return _Block(upload_id[:_TAG_CHARS], number, f"{checksum:08x}")


@dataclass(frozen=True, slots=True)
class _Uploads:
    """The unfinished uploads of one blob, as the names of its uncommitted blocks tell them."""

    blocks: Mapping[str, tuple[_Block, int]]
    """Each block and its size, by its name."""

    @classmethod
    def of(cls, blocks: Iterable[BlobBlock]) -> _Uploads:
        found = [(str(b.id), _NAME.fullmatch(str(b.id)), b.size) for b in blocks]
        return cls({name: (_Block(m[1], int(m[2]), m[3].rstrip()), int(size)) for name, m, size in found if m})

    def has(self, upload_id: str) -> bool:
        """True if the upload was begun here, and neither ended nor aborted."""
        return self._ended(upload_id[:_TAG_CHARS]) not in self.blocks and all(
            str(block) in self.blocks for block in _beginning(upload_id)
        )

    @staticmethod
    def _ended(tag: str) -> str:
        return str(_Block(tag, _ABORTED, ""))

    def ids(self) -> list[str]:
        """The ids of the uploads that were not aborted."""
        begun = sorted((b.tag, b.rest) for b, _ in self.blocks.values() if b.number == 0)
        tags = sorted({tag for tag, _ in begun if self._ended(tag) not in self.blocks})
        return [tag + "".join(rest[1:] for other, rest in begun if other == tag) for tag in tags]

    def parts(self, upload_id: str) -> list[PartInfo]:
        """The parts of an upload, in number order."""
        mine = [(b, n) for b, n in self.blocks.values() if b.tag == upload_id[:_TAG_CHARS] and 0 < b.number < _ABORTED]
        return [PartInfo(b.number, n, b.rest, int(b.rest, 16)) for b, n in sorted(mine, key=lambda m: m[0].number)]


# The store of one account.

_CONNECTIONS = 64
_READ_BYTES = 4 << 20
"""Bytes that the client takes from the network at a time. The 4 KiB of azure-core's transport cost three times as much
CPU time (docs/adr/0030-stores.md)."""
_ONE_REQUEST_BYTES = 1 << 40
_DELETING_THREADS = 16
_MAX_PAGES = 20_000


class AzureStore:
    """One storage account. Paths are `container/name`."""

    scheme = "az"
    min_part_bytes = 1 << 20
    """The service takes any block. A small one costs a request like a large one."""
    profiles = AzureProfile
    credentials_fix = f"export {_KEYS_FIX}, or a profile in {PROFILES_VARIABLE}"

    def __init__(self, profile: AzureProfile) -> None:
        """Nothing is sent until the first call."""
        self.profile = profile

    @classmethod
    def of_profile(cls, name: str | None, beside: Store | None = None) -> AzureStore:
        """See `ServiceStore`."""
        profile = AzureProfile.from_environment() if name is None else profile_named(name, AzureProfile)
        return beside if isinstance(beside, AzureStore) and beside.profile == profile else cls(profile)

    @staticmethod
    def credentials() -> str | None:
        """See `ServiceStore`."""
        profile = AzureProfile.from_environment()
        if profile.method is None:
            return None
        return f"Azure: from {profile.method}, for {printable(profile.client().url.partition('?')[0])}"

    @cached_property
    def _client(self) -> BlobServiceClient:
        session = Session()
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS, max_retries=False))
        transport = RequestsTransport(
            session=session,
            session_owner=False,
            connection_timeout=10,
            read_timeout=60,
            connection_data_block_size=_READ_BYTES,
        )
        return self.profile.client(
            transport=transport,
            # Without these the first retry waits 15 s.
            retry_policy=ExponentialRetry(initial_backoff=1, increment_base=2, retry_total=3, random_jitter_range=1),
            max_single_get_size=_ONE_REQUEST_BYTES,
            max_single_put_size=_ONE_REQUEST_BYTES,
        )

    def _blob(self, path: str) -> Any:
        container, name = bucket_and_key(path, "az")
        return self._client.get_blob_client(container, name)

    # -- names and listings -----------------------------------------------------------------------

    def _pages(self, container: str, prefix: str, *, deep: bool, unfinished: bool = False) -> Iterator[Any]:
        """Each entry of a listing; of directories of a hierarchical namespace, only those that hold something."""
        client = self._client.get_container_client(container)
        include = ["metadata", *(["uncommittedblobs"] if unfinished else [])]
        found: Any = (client.list_blobs if deep else client.walk_blobs)(prefix, include=include).by_page()
        asked: set[str | None] = set()
        for page in found:
            for entry in page:
                # A directory of a hierarchical namespace is also listed as an empty blob with this mark.
                if (getattr(entry, "metadata", None) or {}).get("hdi_isfolder") != "true":
                    yield entry
            token = found.continuation_token
            if token and (token in asked or len(asked) >= _MAX_PAGES):
                raise StorageError("storage.protocol", f"az://{printable(container)}: the listing does not end")
            asked.add(token)

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a prefix, any `most` of them at the most; empty if there is none."""
        container, prefix = bucket_and_prefix(path, "az")
        files: list[ObjectInfo] = []
        directories: list[str] = []
        with parsed(path):
            for entry in self._pages(container, prefix, deep=False):
                if most is not None and len(files) + len(directories) >= most:
                    break
                name = str(entry.name)
                if name.endswith("/") and not hasattr(entry, "etag"):
                    directories.append(name[len(prefix) : -1])
                elif name != prefix:  # a placeholder with the name of the directory itself
                    files.append(_info(container, entry))
        return Listing.of(files, directories)

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every blob below a prefix, sorted by path; empty if there is none."""
        container, prefix = bucket_and_prefix(path, "az")
        with parsed(path):
            found = [_info(container, entry) for entry in self._pages(container, prefix, deep=True)]
        return sorted(found, key=lambda f: f.path)

    def stat(self, path: str) -> ObjectInfo | None:
        """The blob at exactly this name, or None."""
        found = self._properties(path)
        return None if found is None else _info(bucket_and_key(path, "az")[0], found)

    def metadata(self, path: str) -> Mapping[str, str] | None:
        """User metadata of a blob, or None if there is no blob."""
        found = self._properties(path)
        return None if found is None else {_decoded(k): str(v) for k, v in (found.metadata or {}).items()}

    def _properties(self, path: str) -> Any:
        if not bucket_and_key(path, "az")[1]:
            return None
        found = _unless_absent(path, lambda: self._blob(path).get_blob_properties())
        return None if found is None or found.metadata.get("hdi_isfolder") == "true" else found

    # -- bytes ----------------------------------------------------------------------------

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; the blob must still have the pinned ETag. The client tries again."""
        sink = _Filled(buffer)
        try:
            with translated(info.path):
                self._blob(info.path).download_blob(
                    offset, len(buffer), etag=_etag(info.pin), match_condition=MatchConditions.IfNotModified
                ).readinto(sink)
        except (StorageError, SourceError) as error:
            if error.code in ("storage.conflict", "source.not_found"):
                raise changed(info) from error
            raise
        if sink.at != len(buffer):
            raise StorageError(
                "storage.unavailable", f"az://{printable(info.path)}: {sink.at} of {len(buffer)} bytes arrived"
            )

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        metadata: Mapping[str, str],
        if_absent: bool,
        crc32: int | None = None,
    ) -> ObjectInfo:
        """Write a whole blob. The service checks its CRC-64; a CRC-32 is compared before that."""
        _checked(path, data, crc32)
        whole = bytes(data)  # a small blob
        with translated(path):
            answer = self._blob(path).upload_blob(
                whole, length=len(whole), metadata=_encoded(metadata), overwrite=not if_absent, validate_content="crc64"
            )
        return ObjectInfo(path, len(whole), _pin(answer.get("etag"), path))

    def delete(self, paths: Sequence[str], *, in_order: bool = True) -> None:
        """Remove blobs with one request each. A missing blob is not an error."""
        delete_each(paths, self._delete, in_order=in_order, threads=_DELETING_THREADS)

    def _delete(self, path: str) -> None:
        _unless_absent(path, lambda: self._blob(path).delete_blob())

    # -- uploads --------------------------------------------------------------------------------------

    def create_multipart(self, path: str, *, metadata: Mapping[str, str]) -> str:
        """Begin an upload; returns its id, which holds the metadata: a process that knows the id can end the upload."""
        upload_id = secrets.token_urlsafe(_TAG_CHARS * 3 // 4) + urlencode(metadata)
        for block in reversed(_beginning(upload_id)):
            self._stage(path, block, b"\0")
        return upload_id

    def _stage(self, path: str, block: _Block, data: bytes | memoryview, crc64: int | None = None) -> None:
        own = checksums.crc64.compute(bytes(data), 0) if crc64 is None else crc64
        with translated(path):
            # With a checksum of ours the client does not read the body, of which it would ask for a copy.
            self._blob(path).stage_block(
                str(block), Body(memoryview(data)), len(data), transactional_content_crc64=own.to_bytes(8, "little")
            )

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """Stage one block. The service checks its CRC-64; a CRC-32 is compared before that."""
        checksum, crc64 = _checked(path, data, crc32)
        block = _part(upload_id, number, checksum)
        self._stage(path, block, data, crc64)
        return PartInfo(number, len(data), block.rest, checksum)

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        """None: a source within Azure would need a signed URL of its own, which not all credentials can make."""
        del path, upload_id, number, source, offset, length
        return None

    def _uploads(self, path: str) -> _Uploads:
        found = _unless_absent(path, lambda: self._blob(path).get_block_list("uncommitted"))
        return _Uploads.of(() if found is None else found[1])

    def list_parts(self, path: str, upload_id: str) -> list[PartInfo] | None:
        """The parts of an upload in number order, or None if the upload is gone."""
        uploads = self._uploads(path)
        return uploads.parts(upload_id) if uploads.has(upload_id) else None

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """(path, upload id) of every unfinished upload below a prefix, of blobs that hold nothing yet.

        The service lists no others. An upload to a blob that holds something vanishes with the next commit, or after a
        week.
        """
        container, key = bucket_and_key(prefix, "az")
        with parsed(prefix):
            empty = [e for e in self._pages(container, key, deep=True, unfinished=True) if e.size == 0]
        paths = [f"{container}/{entry.name}" for entry in empty]
        return [(path, upload_id) for path in paths for upload_id in self._uploads(path).ids()]

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        """Make the blob visible, if nobody else has written it since this call began."""
        before = self.stat(path)
        if not self._uploads(path).has(upload_id):
            raise upload_gone(f"az://{printable(path)}")
        condition: dict[str, Any] = {"match_condition": MatchConditions.IfMissing}
        if before is not None:
            condition = {"match_condition": MatchConditions.IfNotModified, "etag": _etag(before.pin)}
        blocks = [BlobBlock(f"{_Block(upload_id[:_TAG_CHARS], p.number, p.etag)}") for p in parts]
        metadata = _encoded(dict(parse_qsl(upload_id[_TAG_CHARS:], keep_blank_values=True)))
        with translated(path):
            self._blob(path).commit_block_list(blocks, metadata=metadata, validate_content="crc64", **condition)

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Mark an upload as aborted; what it holds vanishes with the next commit, or a week after its last block.

        The service can drop blocks only by a commit, which would show a file. A commit that was sent before the mark
        may still succeed.
        """
        if any(i.startswith(upload_id[:_TAG_CHARS]) for i in self._uploads(path).ids()):
            self._stage(path, _Block(upload_id[:_TAG_CHARS], _ABORTED, ""), b"\0")


def _unless_absent(path: str, call: Callable[[], _T]) -> _T | None:
    """The result of a call; None if the blob does not exist."""
    try:
        with parsed(path):
            return call()
    except SourceError as error:
        if error.code == "source.not_found":
            return None
        raise


def _info(container: str, entry: Any) -> ObjectInfo:
    path, written = f"{container}/{entry.name}", entry.last_modified
    if entry.size is None:
        raise StorageError("storage.protocol", f"az://{printable(path)}: the store gives no size")
    return ObjectInfo(path, int(entry.size), _pin(entry.etag, path), None if written is None else written.timestamp())


def _pin(etag: Any, path: str) -> str:
    if not etag:
        raise StorageError("storage.protocol", f"az://{printable(path)}: the store gives no ETag")
    return "etag:" + str(etag).strip('"')


def _etag(pin: str) -> str:
    return f'"{pin.removeprefix("etag:")}"'


def _encoded(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata with keys that Azure takes: identifiers of C#, which have no hyphen. Ours have no underscore."""
    return {key.replace("-", "_"): value for key, value in metadata.items()}


def _decoded(key: str) -> str:
    return key.replace("_", "-")


def _checked(path: str, data: bytes | memoryview, known: int | None) -> tuple[int, int]:
    """The CRC-32 of bytes, which must be the known one, and the CRC-64 of the same, which goes to the service.

    Both are taken of one copy of a piece: bytes that change in memory between the two are found.
    """
    view, found, crc64 = memoryview(data), 0, 0
    for at in range(0, len(view), PIECE_BYTES):
        piece = bytes(view[at : at + PIECE_BYTES])
        found, crc64 = crc32(piece, found), checksums.crc64.compute(piece, crc64)
    if known is not None and found != known:
        raise StorageError(
            "storage.unavailable",
            f"az://{printable(path)}: the bytes changed in memory before they were sent",
            fix="run the same command again: it resumes",
        )
    return found, crc64


class _Filled:
    """A stream into a buffer, which notes how far it came."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.at = 0

    def write(self, data: bytes) -> int:
        end = self.at + len(data)
        if end > len(self._buffer):
            raise exceptions.DecodeError("more bytes than were asked for")
        self._buffer[self.at : end] = data
        self.at = end
        return len(data)
