"""Google Cloud Storage through its JSON API: listings, pinned ranged reads, conditional puts, uploads in parts.

google-auth finds and refreshes the credentials and sends the requests; its client is synchronous and runs in our own
threads. Why no client of whole objects is used, and what each of them measured, is in docs/adr/0030.

An object is pinned by its generation, which the service gives anew to each write of a name. Each write carries the
CRC32C of its bytes, which the service compares before the object exists.

Source: Cloud Storage's JSON API v1 reference and documentation, November 2026 (`objects: insert`, `list`, `get`,
`delete`, `compose`; request preconditions; data validation; composite objects); google-auth 2.63.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import field
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import quote

import google.auth
import google.auth.exceptions
import google_crc32c
import requests
import urllib3
from google.auth.transport.requests import AuthorizedSession
from google.oauth2 import service_account
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from requests.adapters import HTTPAdapter

from reshard.errors import PROFILES_VARIABLE, ReshardError, SourceError, StorageError, printable
from reshard_engine.storage.crc32 import PIECE_BYTES, crc32 as crc32_of
from reshard_engine.storage.profiles import profile_named
from reshard_engine.storage.protocol import (
    Listing,
    ObjectInfo,
    PartInfo,
    Store,
    already_exists,
    bucket_and_key,
    bucket_and_prefix,
    changed,
    delete_each,
    fill,
    join,
    no_bucket,
    read_pinned,
    refuse_unclear_path,
    upload_gone,
)

# google-auth and requests have no complete type information: their results are checked where they are used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

# What the service answers, and typed errors in place of refusals and exceptions.


@dataclass(frozen=True, slots=True)
class _Resource:
    """The fields of an object that we ask for (`Objects resource`). Numbers are texts in JSON."""

    name: str
    size: int
    generation: int
    created: datetime | None = Field(default=None, alias="timeCreated")
    md5: str = Field(default="", alias="md5Hash")
    """No composite object has one."""
    crc32c: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


_FIELDS = "name,size,generation,timeCreated,md5Hash,crc32c,metadata"


@dataclass(frozen=True, slots=True)
class _Page:
    items: list[_Resource] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    following: str = Field(default="", alias="nextPageToken")


_RESOURCE = TypeAdapter(_Resource)
_PAGE = TypeAdapter(_Page)
_ERROR = TypeAdapter(dict[str, Any])

_RAISED = (
    requests.exceptions.RequestException,
    google.auth.exceptions.GoogleAuthError,
    urllib3.exceptions.HTTPError,
    OSError,
)
_BUSY = {"rateLimitExceeded", "userRateLimitExceeded"}
"""Reasons of refusals with status 403 that pass."""


def _where(path: str) -> str:
    return f"gs://{printable(path)}"


@contextmanager
def _translated(path: str) -> Generator[None]:
    """Turn exceptions of google-auth, requests and pydantic into typed errors that name the object."""
    try:
        yield
    except google.auth.exceptions.TransportError as error:
        raise StorageError(
            "storage.unavailable", f"{_where(path)}: {printable(str(error))}", fix="check the network"
        ) from error
    except google.auth.exceptions.GoogleAuthError as error:
        raise StorageError(
            "storage.denied",
            f"{_where(path)}: no credentials: {printable(str(error))}",
            fix=GcsStore.credentials_fix,
        ) from error
    except ValidationError as error:
        raise StorageError("storage.protocol", f"{_where(path)}: the store's reply is malformed") from error
    except _RAISED as error:
        raise StorageError(
            "storage.unavailable",
            f"{_where(path)}: {type(error).__name__}: {printable(str(error))}",
            fix=f"check {_EMULATOR} and the network",
        ) from error


def _refusal(answer: requests.Response, path: str, passing: Sequence[int]) -> ReshardError:
    """The typed error for an answer that is none of the expected ones; `passing` are further statuses that pass."""
    status, reason, message = answer.status_code, "", ""
    try:
        facts = _ERROR.validate_json(answer.content[:_MOST_ERROR_BYTES]).get("error", {})
        message = str(facts.get("message", ""))
        reason = str(facts["errors"][0]["reason"])
    except (ValidationError, AttributeError, LookupError, TypeError):
        pass
    text = f"{_where(path)}: {status} {printable(reason)}: {printable(message)}"
    if status in {408, 429, *passing} or status >= 500 or reason in _BUSY:
        return StorageError("storage.unavailable", text, fix="run the same command again: it resumes")
    if status in (401, 403):
        return StorageError(
            "storage.denied",
            text,
            fix="ask for the role Storage Object User on the bucket; to see who asks: gcloud auth list",
        )
    if status == 404:
        return SourceError(
            "source.not_found",
            f"{_where(path)} does not exist",
            fix="correct the URL: a name is compared letter by letter",
        )
    if status in (409, 412):
        return already_exists(_where(path))
    return StorageError("storage.protocol", text)


# The names of the objects that an upload in parts consists of.
#
# The service has no upload in parts that its JSON API knows, and the one of its XML API takes no preconditions. So a
# part is an object, and `compose` makes the object of the parts. Part objects lie beside the object that they are for,
# where whoever may write the one may write the others. Their directory begins with a dot. No listing of this store
# shows it, and `list_uploads` finds it.

_UPLOAD = re.compile(
    r"(?P<head>(?:.*/)?)\.(?P<name>[^/]+)\.reshard-upload/(?P<id>[0-9a-f]{32})/(?P<rest>[^/]+)", re.DOTALL
)
_DIRECTORY = re.compile(r"\.[^/]+\.reshard-upload", re.DOTALL)
_BEGUN = "begun"
"""The object that says that an upload exists, with the metadata of the object to come. It is empty."""
_PART = re.compile(r"part-([0-9]{5})")
_CRC_KEY = "reshard-crc32"
_UPLOAD_KEY = "reshard-upload"
"""Metadata key of objects that an upload made; its value is the id of the upload, which is over then."""
_MOST_SOURCES = 32
"""Most objects that one `compose` joins (composite objects, Cloud Storage documentation)."""


def _upload_of(key: str) -> tuple[str, str, str] | None:
    """(key of the object to come, upload id, name within the upload) of an object that belongs to an upload."""
    found = _UPLOAD.fullmatch(key)
    return None if found is None else (found["head"] + found["name"], found["id"], found["rest"])


def _upload_directory(path: str, upload_id: str) -> str:
    refuse_unclear_path(path, "gs")  # the directory of `run/..` would be `run/....reshard-upload`, a name like others
    head, _, name = path.rpartition("/")
    return f"{head}/.{name}.reshard-upload/{upload_id}"


# The store of one service.

_MOST_ERROR_BYTES = 1 << 16
_THREADS = 8
_PAGE_OBJECTS = 1000
"""Objects of one page of a listing: the most that the service returns (`objects: list`, `maxResults`)."""
MAX_PAGES = 20_000
"""Most pages of one listing: 20 million objects."""
_RETRIES = urllib3.Retry(
    total=4,
    status_forcelist=(408, 429, 500, 502, 503, 504),
    # Each of our writes is the same when it happens twice: it writes the same bytes, or only if nothing is there.
    allowed_methods=None,
    backoff_factor=0.25,
    backoff_jitter=0.25,
    raise_on_status=False,
    redirect=False,
    # The service documents exponential backoff and no such header; a server could name an hour.
    respect_retry_after_header=False,
)
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_EMULATOR = "STORAGE_EMULATOR_HOST"


@dataclass(frozen=True, slots=True)
class GcsProfile:
    """The endpoint and the credentials of one service."""

    endpoint_url: str | None = None
    """By default that of the credentials' universe, such as `https://storage.googleapis.com`. One with `http://` is a
    server for tests, which gets no credentials."""
    service_account_file: str | None = None
    """The key of a service account, as JSON; by default application default credentials are used."""

    @classmethod
    def from_environment(cls) -> GcsProfile:
        """The profile without a name, with a server for tests where google-cloud-storage 3.17 and gcsfs look for it."""
        given = os.environ.get(_EMULATOR)
        return cls(given if not given or "://" in given else f"http://{given}")


class GcsStore:
    """One service. Paths are `bucket/key`."""

    scheme = "gs"
    min_part_bytes = 5 << 20
    """The service joins parts of any size. Smaller ones than those of other stores would only be more objects."""
    profiles = GcsProfile
    credentials_fix = (
        "gcloud auth application-default login, or export GOOGLE_APPLICATION_CREDENTIALS=/path/to/key.json, or a "
        f"profile in {PROFILES_VARIABLE}"
    )

    def __init__(self, profile: GcsProfile, *, connections: int = 64) -> None:
        """Nothing is sent, and no credentials are looked for, until the first call."""
        self.profile = profile
        self._connections = connections
        self._lock = threading.Lock()
        self._opened: tuple[requests.Session, str] | None = None

    @classmethod
    def of_profile(cls, name: str | None, beside: Store | None = None) -> GcsStore:
        """See `ServiceStore`."""
        profile = GcsProfile.from_environment() if name is None else profile_named(name, GcsProfile)
        return beside if isinstance(beside, GcsStore) and beside.profile == profile else cls(profile)

    @staticmethod
    def credentials() -> str | None:
        """See `ServiceStore`."""
        if endpoint := GcsProfile.from_environment().endpoint_url:
            return f"GCS: none, for {printable(endpoint)} of {_EMULATOR}"
        try:
            found: Any = google.auth.default(scopes=_SCOPES)[0]
        except google.auth.exceptions.DefaultCredentialsError as error:
            if "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ:
                return None
            fix = "correct GOOGLE_APPLICATION_CREDENTIALS, or unset it"
            raise StorageError("storage.denied", f"GCS: {printable(str(error))}", fix=fix) from None
        return f"GCS: {type(found).__module__.removeprefix('google.')}, for {printable(_address(found))}"

    def _session(self) -> tuple[requests.Session, str]:
        """The session, and the address of the service."""
        with self._lock:
            if self._opened is None:
                session, address = self._open()
                adapter = HTTPAdapter(pool_maxsize=self._connections, max_retries=_RETRIES)
                session.mount("https://", adapter)
                session.mount("http://", adapter)
                self._opened = session, address
            return self._opened

    def _open(self) -> tuple[requests.Session, str]:
        endpoint, file = self.profile.endpoint_url, self.profile.service_account_file
        if endpoint and endpoint.startswith("http:"):
            if file:
                raise StorageError(
                    "storage.denied",
                    f"{printable(endpoint)} is not encrypted, so no credentials are sent there",
                    fix="write https:// in the profile's endpoint_url, or remove its service_account_file",
                )
            return requests.Session(), endpoint.rstrip("/")
        found: Any = _key_of(file) if file else google.auth.default(scopes=_SCOPES)[0]
        return AuthorizedSession(found), (endpoint or _address(found)).rstrip("/")

    def _send(
        self,
        method: str,
        place: str,
        path: str,
        *,
        expected: Sequence[int] = (200,),
        passing: Sequence[int] = (),
        **options: Any,
    ) -> requests.Response:
        """Send a request; returns the answer, which has one of the expected statuses."""
        with _translated(path):
            session, address = self._session()
            answer = session.request(method, address + place, timeout=(10, 60), allow_redirects=False, **options)
            if answer.status_code not in expected:
                with answer:
                    raise _refusal(answer, path, passing)
            return answer

    def _get(self, path: str) -> _Resource | None:
        try:
            answer = self._send("GET", _object(path), path, params={"fields": _FIELDS})
        except SourceError as error:
            if error.code != "source.not_found":
                raise
            return None
        return self._resource(answer, path)

    @staticmethod
    def _resource(answer: requests.Response, path: str) -> _Resource:
        with _translated(path):
            return _RESOURCE.validate_json(answer.content)

    # -- names and listings -----------------------------------------------------------------------

    def _pages(self, path: str, prefix: str, *, delimiter: str = "") -> Iterator[_Page]:
        """Each page of the listing of a prefix in the bucket of a path.

        Raises:
            StorageError: `storage.protocol` for a reply that is not a listing, and for pages out of order or without
                end; `storage.no_bucket`.
        """
        bucket = bucket_and_key(path, "gs")[0]
        asked: dict[str, Any] = {"prefix": prefix, "maxResults": _PAGE_OBJECTS}
        asked |= {"fields": f"items({_FIELDS}),prefixes,nextPageToken"} | (
            {"delimiter": delimiter} if delimiter else {}
        )
        last, token, number = b"", "", 0
        for number in range(1, MAX_PAGES + 1):
            try:
                answer = self._send("GET", f"/storage/v1/b/{_quoted(bucket)}/o", path, params=asked)
            except SourceError as error:
                raise no_bucket(path) from error
            with _translated(path):
                page = _PAGE.validate_json(answer.content)
            names = [item.name.encode(errors="surrogatepass") for item in page.items]
            if any(not item.name.startswith(prefix) for item in page.items) or (names and min(names) <= last):
                raise StorageError(
                    "storage.protocol", f"{_where(bucket)}: page {number} of the listing is out of order"
                )
            yield page
            if not page.following:
                return
            if page.following == token:
                break
            asked["pageToken"] = token = page.following
            last = max([last, *names])
        raise StorageError("storage.protocol", f"{_where(bucket)}: the listing does not end ({number} pages)")

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a prefix, any `most` of them at the most; empty if there is none."""
        files: list[ObjectInfo] = []
        directories: set[str] = set()
        bucket, prefix = bucket_and_prefix(path, "gs")
        for page in self._pages(path, prefix, delimiter="/"):
            # An object with the name of the directory itself is a placeholder that a web console made.
            files += [_info(bucket, item) for item in page.items if item.name != prefix]
            names = {name[len(prefix) : -1] for name in page.prefixes}
            directories |= {name for name in names if _DIRECTORY.fullmatch(name) is None}
            if most is not None and len(files) + len(directories) >= most:
                files = files[:most]
                directories = set(sorted(directories)[: most - len(files)])
                break
        return Listing.of(files, directories)

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every object below a prefix, sorted by path; empty if there is none. Parts of uploads are not listed."""
        bucket, prefix = bucket_and_prefix(path, "gs")
        found = (item for page in self._pages(path, prefix) for item in page.items)
        return sorted((_info(bucket, i) for i in found if _upload_of(i.name) is None), key=lambda f: f.path)

    def stat(self, path: str) -> ObjectInfo | None:
        """The object at exactly this key, or None."""
        found = self._get(path)
        return None if found is None else _info(bucket_and_key(path, "gs")[0], found)

    def metadata(self, path: str) -> Mapping[str, str] | None:
        """User metadata of an object, or None if there is no object."""
        found = self._get(path)
        return None if found is None else {k: v for k, v in found.metadata.items() if k != _UPLOAD_KEY}

    # -- bytes ----------------------------------------------------------------------------

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; the object must still have the pinned generation."""
        read_pinned(info, lambda: self._read_once(info, offset, buffer))

    def _read_once(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        generation = info.pin.removeprefix("generation:")
        # Without this header the service unpacks objects whose content encoding is gzip, and ignores the range.
        headers = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}", "Accept-Encoding": "gzip"}
        asked = {"alt": "media", "ifGenerationMatch": generation}
        options: dict[str, Any] = {"params": asked, "headers": headers, "stream": True}
        with self._send("GET", _object(info.path), info.path, expected=(200, 206), **options) as answer:
            if answer.headers.get("x-goog-generation") != generation:
                raise changed(info)
            if answer.status_code != 206 and offset:
                raise StorageError("storage.protocol", f"{_where(info.path)}: the store ignores ranges")
            with _translated(info.path):
                fill(answer.raw.stream(PIECE_BYTES, decode_content=False), buffer, _where(info.path))

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        metadata: Mapping[str, str],
        if_absent: bool,
        crc32: int | None = None,
    ) -> ObjectInfo:
        """Write a whole object, with a CRC32C that the store checks."""
        return _info(bucket_and_key(path, "gs")[0], self._put(path, data, metadata, if_absent=if_absent, crc32=crc32))

    def _put(
        self,
        path: str,
        data: bytes | memoryview,
        metadata: Mapping[str, str],
        *,
        if_absent: bool,
        crc32: int | None = None,
    ) -> _Resource:
        bucket, key = bucket_and_key(path, "gs")
        checksum = _crc32c(data)
        # The CRC32C was computed first. So bytes that change in memory at any time fail one of the two checks.
        if crc32 is not None and crc32_of(data) != crc32:
            raise StorageError("storage.unavailable", f"{_where(path)}: the bytes to write have another CRC-32")
        body = _Related({"crc32c": checksum, "metadata": dict(metadata)}, data)
        asked: dict[str, Any] = {"uploadType": "multipart", "name": key, "fields": _FIELDS}
        asked |= {"ifGenerationMatch": 0} if if_absent else {}
        place, headers = f"/upload/storage/v1/b/{_quoted(bucket)}/o", {"Content-Type": body.content_type}
        try:
            # A body with another CRC32C than was told is a bad request.
            answer = self._send("POST", place, path, passing=(400,), params=asked, data=body, headers=headers)
        except SourceError as error:
            raise no_bucket(path) from error
        found = self._resource(answer, path)
        if (found.name, found.size, found.crc32c) != (key, len(data), checksum):
            self._delete_one(path, generation=found.generation)
            raise StorageError("storage.unavailable", f"{_where(path)}: the store received other bytes than were sent")
        return found

    def delete(self, paths: Sequence[str], *, in_order: bool = True) -> None:
        """Remove objects. A missing object is not an error."""
        delete_each(paths, self._delete_one, in_order=in_order, threads=_THREADS)

    def _delete_one(self, path: str, *, generation: int | None = None) -> None:
        asked = {} if generation is None else {"ifGenerationMatch": generation}
        self._send("DELETE", _object(path), path, expected=(200, 204, 404), params=asked)

    # -- uploads in parts -------------------------------------------------------------------------

    def create_multipart(self, path: str, *, metadata: Mapping[str, str]) -> str:
        """Begin an upload; returns its id."""
        upload_id = uuid.uuid4().hex
        # Nobody else knows the id, so the request may be repeated.
        self._put(join(_upload_directory(path, upload_id), _BEGUN), b"", metadata, if_absent=False)
        return upload_id

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """Upload one part as an object, with a CRC32C that the store checks."""
        directory = _upload_directory(path, upload_id)
        known = crc32_of(data) if crc32 is None else crc32
        place = join(directory, f"part-{number:05d}")
        found = self._put(place, data, {_CRC_KEY: f"{known:08x}"}, if_absent=False, crc32=known)
        # Whoever ends the upload removes its beginning first and then the parts that a listing shows. So either that
        # listing shows this part, or the beginning is gone now.
        if self._get(join(directory, _BEGUN)) is None:
            self._delete_one(place, generation=found.generation)
            raise upload_gone(_where(path))
        return _part(number, found)

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        """Return None: the service copies and joins whole objects only (`objects: rewrite`, `compose`)."""
        return None

    def _in_upload(self, path: str, upload_id: str) -> dict[str, _Resource]:
        """The objects of an upload by their names within it."""
        directory = bucket_and_key(_upload_directory(path, upload_id), "gs")[1]
        found = (item for page in self._pages(path, f"{directory}/") for item in page.items)
        return {item.name[len(directory) + 1 :]: item for item in found}

    def list_parts(self, path: str, upload_id: str) -> list[PartInfo] | None:
        """The parts of an upload in number order, or None if the upload is gone."""
        found = self._in_upload(path, upload_id)
        if _BEGUN not in found:
            return None
        # A process may have died after the object was made, and before the last part was removed.
        made = self._get(path)
        if made is not None and made.metadata.get(_UPLOAD_KEY) == upload_id:
            return None
        return _parts(found)

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """(path, upload id) of every unfinished upload below a prefix."""
        bucket, key = bucket_and_key(prefix, "gs")
        found: set[tuple[str, str]] = set()
        for page in self._pages(prefix, key[: key.rfind("/") + 1]):
            uploads = (_upload_of(item.name) for item in page.items)
            found |= {(f"{bucket}/{u[0]}", u[1]) for u in uploads if u is not None and u[0].startswith(key)}
        return sorted(found)

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        """Make the object of the parts, unless an object of this name exists. Then remove the parts.

        Raises:
            StorageError: `storage.conflict` if the upload is gone or the object exists, `storage.protocol` if the store
                holds other parts.
        """
        held = self._in_upload(path, upload_id)
        if _BEGUN not in held:
            raise upload_gone(_where(path))
        listed = {p.number: (p.size_bytes, p.etag) for p in _parts(held)}
        if not parts or any(listed.get(p.number) != (p.size_bytes, p.etag) for p in parts):
            raise StorageError("storage.protocol", f"{_where(path)}: the store holds other parts")
        directory = _upload_directory(path, upload_id)
        sources = [held[f"part-{p.number:05d}"] for p in parts]
        while len(sources) > _MOST_SOURCES:
            groups = [sources[at : at + _MOST_SOURCES] for at in range(0, len(sources), _MOST_SOURCES)]
            with ThreadPoolExecutor(_THREADS) as pool:
                sources = list(pool.map(partial(self._joined, directory), groups))
        # An upload that was ended meanwhile has no beginning, or the listing of who ended it shows all that was joined.
        if self._get(join(directory, _BEGUN)) is None:
            raise upload_gone(_where(path))
        facts = held[_BEGUN].metadata | {_UPLOAD_KEY: upload_id}
        made = self._compose(path, sources, facts, delete_sources=True)
        if made.size != sum(p.size_bytes for p in parts):
            raise StorageError("storage.protocol", f"{_where(path)}: the store joined {made.size} bytes")
        self.abort_multipart(path, upload_id)

    def _joined(self, directory: str, group: Sequence[_Resource]) -> _Resource:
        """The object that joins some parts. Its name tells their contents, so whoever made it made the same."""
        if len(group) == 1:
            return group[0]
        told = "\n".join(f"{item.name} {item.size} {_etag(item)}" for item in group)
        path = join(directory, f"joined-{hashlib.sha256(told.encode()).hexdigest()[:32]}")
        try:
            return self._compose(path, group, {})
        except StorageError as error:
            if error.code != "storage.conflict" or (there := self._get(path)) is None:
                raise
            return there

    def _compose(
        self, path: str, sources: Sequence[_Resource], metadata: Mapping[str, str], *, delete_sources: bool = False
    ) -> _Resource:
        request: dict[str, Any] = {
            "sourceObjects": [
                {"name": item.name, "objectPreconditions": {"ifGenerationMatch": str(item.generation)}}
                for item in sources
            ],
            "destination": {"contentType": "application/octet-stream", "metadata": dict(metadata)},
        }
        if delete_sources:
            # Removed so, parts cost no early deletion fee and are not kept as soft-deleted ones.
            request["deleteSourceObjects"] = True
        asked = {"ifGenerationMatch": 0, "fields": _FIELDS}
        try:
            answer = self._send("POST", f"{_object(path)}/compose", path, params=asked, json=request)
        except SourceError as error:
            raise upload_gone(_where(path)) from error
        return self._resource(answer, path)

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Remove an upload: its beginning first, then its parts. An upload that no longer exists is not an error."""
        directory = _upload_directory(path, upload_id)
        self._delete_one(join(directory, _BEGUN))
        self.delete([join(directory, name) for name in self._in_upload(path, upload_id)], in_order=False)


def _key_of(file: str) -> Any:
    try:
        return service_account.Credentials.from_service_account_file(file, scopes=_SCOPES)
    except (OSError, ValueError) as error:
        raise StorageError(
            "storage.denied",
            f"{printable(file)} is not the key of a service account: {printable(str(error))}",
            fix=f"correct service_account_file in the file that {PROFILES_VARIABLE} names",
        ) from None


def _address(credentials: Any) -> str:
    """The address of the service in the universe (Google's cloud, or one of its partners') of some credentials."""
    return f"https://storage.{getattr(credentials, 'universe_domain', 'googleapis.com')}"


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def _object(path: str) -> str:
    bucket, key = bucket_and_key(path, "gs")
    return f"/storage/v1/b/{_quoted(bucket)}/o/{_quoted(key)}"


def _info(bucket: str, found: _Resource) -> ObjectInfo:
    created = None if found.created is None else found.created.timestamp()
    return ObjectInfo(f"{bucket}/{found.name}", found.size, f"generation:{found.generation}", created)


def _etag(found: _Resource) -> str:
    """A text that tells the content: parts that are sent twice have the same."""
    return found.md5 or f"crc32c={found.crc32c}"


def _part(number: int, found: _Resource) -> PartInfo:
    text = found.metadata.get(_CRC_KEY, "")
    crc = int(text, 16) if re.fullmatch("[0-9a-f]{8}", text) else None
    return PartInfo(number, found.size, _etag(found), crc)


def _parts(found: Mapping[str, _Resource]) -> list[PartInfo]:
    numbers = ((_PART.fullmatch(name), item) for name, item in found.items())
    return sorted((_part(int(n[1]), item) for n, item in numbers if n is not None), key=lambda p: p.number)


def _crc32c(data: bytes | memoryview) -> str:
    """The CRC32C as the API spells it. google-crc32c 1.9 takes read-only bytes, so pieces are copied."""
    view, value = memoryview(data), 0
    for at in range(0, len(view), PIECE_BYTES):
        value = google_crc32c.extend(value, bytes(view[at : at + PIECE_BYTES]))
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class _Related:
    """A body of type multipart/related, with the resource as JSON and then the bytes, which are sent without a copy."""

    def __init__(self, resource: Mapping[str, Any], data: bytes | memoryview) -> None:
        boundary = uuid.uuid4().hex
        self.content_type = f"multipart/related; boundary={boundary}"
        kind = "Content-Type: application/"
        head = f"--{boundary}\r\n{kind}json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
        head += f"--{boundary}\r\n{kind}octet-stream\r\n\r\n"
        self._pieces: tuple[bytes | memoryview, ...] = (head.encode(), data, f"\r\n--{boundary}--\r\n".encode())

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return sum(map(len, self._pieces))
