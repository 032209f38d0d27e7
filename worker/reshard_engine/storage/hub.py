"""The Hugging Face hub: model repositories, read at one commit by exact ranges, and written by one commit.

A branch can move while it is read. So each store asks once which commit a revision names, and every listing and range
names that commit. A file's pin is its content: the SHA-256 of a large file, the git object of a small one.

`HfFileSystem` is not used, for two reasons (huggingface_hub 2.4.0, `hf_file_system.py`): its files read ahead by blocks
of 5 MiB, and its paths keep the branch's name. URLs, tokens, endpoint, proxies and the offline mode are the library's.

Source: huggingface_hub 2.4.0 (`hf_api.py`, `file_download.py`, `utils/_http.py`, `_commit_api.py`, `lfs.py`); git-lfs
`docs/api/batch.md`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import BinaryIO, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # that of whichever HTTP library this release uses
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.lfs import UploadInfo
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]  # a bare `dict` among its arguments
    disable_progress_bars,
    hf_raise_for_status,
)
from huggingface_hub.utils.sha import git_hash

from reshard.errors import RequestError, ReshardError, SourceError, StorageError, conceal, printable
from reshard_engine.storage.protocol import Listing, ObjectInfo, changed, join, refuse_unclear_path

ResultT = TypeVar("ResultT")

_TRIES = 5
"""Calls of one request before its failure is reported."""
_MOST_WAIT_S = 300.0
"""Longest wait that an answer of the hub can ask for: its rate limits count windows of 5 minutes."""
_MOST_REDIRECTS = 8
_EXPIRED = (401, 403, 404, 410)
"""Statuses of a signed address that is not valid any more."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_RESET = re.compile(r"\bt=(\d+)")
"""Seconds until a rate limit ends, in the header `RateLimit` (huggingface_hub, `parse_ratelimit_headers`)."""
_SIGN_IN = "export HF_TOKEN=... (https://huggingface.co/settings/tokens), or run: hf auth login"
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """True if a revision is a commit, which no push changes."""
    return _COMMIT.fullmatch(revision) is not None


@dataclass(frozen=True, slots=True)
class HubPath:
    """A path of a hub store, `ORG/NAME[@REVISION][/PATH]`, in its parts."""

    repository: str
    revision: str
    path: str

    @classmethod
    def of(cls, path: str) -> HubPath:
        """Parse a canonical path (`storage.urls`).

        Raises:
            SourceError: `name.invalid` as `refuse_unclear_path`.
        """
        refuse_unclear_path(path, "hf")
        owner, _, rest = path.partition("/")
        named, _, inner = rest.partition("/")
        name, _, revision = named.partition("@")
        return cls(f"{owner}/{name}", unquote(revision) or constants.DEFAULT_REVISION, inner)


# Typed errors in place of the library's.


def _typed(error: BaseException, path: str) -> ReshardError:
    """The typed error for an exception of huggingface_hub or of its HTTP library."""
    where = f"hf://{printable(path)}"
    if isinstance(error, OfflineModeIsEnabled):
        return RequestError(
            "request.invalid", f"{where}: HF_HUB_OFFLINE forbids requests to the hub", fix="unset HF_HUB_OFFLINE"
        )
    if isinstance(error, HFValidationError):
        return RequestError("request.invalid", f"{where}: {printable(str(error))}", fix="write hf://ORG/NAME")
    if isinstance(error, GatedRepoError):
        return StorageError(
            "storage.denied",
            f"{where}: the repository is gated, and this token has no access",
            fix=f"ask for access on the repository's page, then {_SIGN_IN}",
        )
    if isinstance(error, RepositoryNotFoundError):
        return SourceError(
            "source.not_found",
            f"{where}: the hub shows no such repository to this token",
            fix=f"correct the name; if the repository is private: {_SIGN_IN}",
            details={"missing": "repository"},
        )
    if isinstance(error, RevisionNotFoundError):
        return SourceError(
            "source.not_found",
            f"{where}: the repository has no such revision",
            fix="name a branch, a tag or a commit of 40 digits: hf://ORG/NAME@REVISION",
            details={"missing": "revision"},
        )
    if isinstance(error, EntryNotFoundError):
        return SourceError("source.not_found", f"{where} does not exist", fix="correct the path in the repository")
    if isinstance(error, HfHubHTTPError):
        return _of_status(error, where)
    if isinstance(error, HTTPError | OSError):
        late = "Timeout" in type(error).__name__
        reason = "it did not answer in time" if late else printable(_NUMBER.sub("", str(error)))
        return StorageError(
            "storage.unavailable",
            f"{where}: the hub cannot be reached: {reason}",
            fix="check HF_ENDPOINT and the network, then run the same command again",
        )
    return StorageError("storage.protocol", f"{where}: the hub's answer is malformed: {printable(str(error)[:300])}")


def _of_status(error: HfHubHTTPError, where: str) -> StorageError:
    status = error.response.status_code
    text = f"{where}: {status} {printable(error.server_message or error.response.reason_phrase)}"
    if status in (401, 403):
        return StorageError("storage.denied", text, fix=_SIGN_IN)
    if status in (409, 412):
        return StorageError(
            "storage.conflict",
            f"{where}: the branch has moved since this conversion began ({status})",
            fix="run the same command again: it looks at what the branch holds now",
        )
    if status == 429:
        wait_s = _asked_wait_s(error.response.headers)
        asked = "" if wait_s is None else f"; the hub asks to wait {wait_s:.0f} s"
        return StorageError(
            "storage.unavailable",
            f"{where}: the hub's rate limit is reached (429){asked}",
            fix="run the same command again later; a token has a higher limit than none: export HF_TOKEN=...",
            details={} if wait_s is None else {"wait_s": wait_s},
        )
    if status == 408 or status >= 500:
        return StorageError("storage.unavailable", text, fix="run the same command again later")
    return StorageError("storage.protocol", text)


def _asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """The seconds that an answer asks to wait; None if it names none."""
    said = headers.get("Retry-After", "")
    found = _RESET.search(headers.get("RateLimit", ""))
    seconds = said if said.isdigit() else found[1] if found else None
    return None if seconds is None else min(float(seconds) + 1, _MOST_WAIT_S)


@contextmanager
def _translated(path: str) -> Generator[None]:
    """Turn exceptions of huggingface_hub into typed errors that name the place."""
    try:
        yield
    except (HTTPError, OSError) as error:
        raise _typed(error, path) from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        # An upload wraps what went wrong in a thread, which may be an error of ours about the source.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ReshardError | HTTPError | OSError):
            cause = cause.__cause__
        if isinstance(cause, ReshardError):
            raise cause from None
        raise _typed(error if cause is None else cause, path) from error


def _tried(path: str, call: Callable[[], ResultT]) -> ResultT:
    """The result of a call that may be made again, after the wait that the hub asks for."""
    for attempt in range(1, _TRIES):
        try:
            with _translated(path):
                return call()
        except StorageError as error:
            if not error.retryable:
                raise
            time.sleep(error.details.get("wait_s", min(0.5 * 2**attempt, 8.0)))
    with _translated(path):
        return call()


# The store: listings and ranges of pinned commits.


class HubStore:
    """Model repositories of one hub. Paths are `ORG/NAME[@REVISION][/PATH]`; a revision's `/` is written `%2F`."""

    scheme = "hf"

    def __init__(self) -> None:
        """Nothing is sent until the first call."""
        self._api = HfApi(library_name="reshard", library_version=version("reshard"))
        # The library may read it from a file of its user, which is not part of the environment.
        conceal(get_token())
        self._lock = threading.Lock()
        self._commits: dict[tuple[str, str], str] = {}
        self._trees: dict[tuple[str, str], dict[str, ObjectInfo]] = {}
        self._addresses: dict[str, str] = {}
        """Signed addresses of large files, by path, as the hub gave them. It counts requests for them."""

    @classmethod
    def of_profile(cls, _profile: str | None, beside: object = None) -> HubStore:
        """The store that serves locations of this process, whatever the profile: the library finds its own token."""
        return beside if isinstance(beside, cls) else cls()

    def commit_of(self, path: str) -> str:
        """The commit that the path's revision named when this store first asked.

        Raises:
            SourceError: `source.not_found` if there is no such repository or revision.
        """
        named = HubPath.of(path)
        key = (named.repository, named.revision)
        with self._lock:
            if key not in self._commits:
                info = _tried(path, lambda: self._api.model_info(named.repository, revision=named.revision))
                if info.sha is None or not is_commit(info.sha):
                    raise StorageError("storage.protocol", f"hf://{printable(path)}: the hub names no commit")
                self._commits[key] = info.sha
            return self._commits[key]

    def commit_if_any(self, path: str) -> str | None:
        """The commit that the path's revision named, or None if there is no such repository or revision."""
        try:
            return self.commit_of(path)
        except SourceError as error:
            if "missing" in error.details:
                return None
            raise

    def _tree(self, path: str) -> dict[str, ObjectInfo]:
        """All files of the path's commit, by path in the repository. The prefix of their own paths is the caller's."""
        named, commit = HubPath.of(path), self.commit_of(path)
        prefix = path.removesuffix(f"/{named.path}") if named.path else path
        with self._lock:
            if (prefix, commit) not in self._trees:
                self._trees[prefix, commit] = _tried(path, lambda: dict(self._listed(named, commit, prefix)))
            return self._trees[prefix, commit]

    def _listed(self, named: HubPath, commit: str, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
        for entry in self._api.list_repo_tree(named.repository, recursive=True, revision=commit):
            # The hub's own record of which files are large is no content.
            if isinstance(entry, RepoFile) and entry.path != ".gitattributes":
                pin = f"git:{entry.blob_id}" if entry.lfs is None else f"sha256:{entry.lfs.sha256}"
                yield entry.path, ObjectInfo(join(prefix, entry.path), entry.size, pin)

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a directory, any `most` of them at the most; empty if there is none."""
        files: list[ObjectInfo] = []
        directories: set[str] = set()
        for info in self.list_tree(path):
            name, mark, _ = info.path[len(path) + 1 :].partition("/")
            if mark:
                directories.add(name)
            else:
                files.append(info)
        files = files[:most]
        names = sorted(directories)[: None if most is None else most - len(files)]
        return Listing.of(files, names)

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every file below a directory, sorted by path; empty if there is none."""
        return sorted((i for i in self._tree(path).values() if i.path.startswith(f"{path}/")), key=lambda i: i.path)

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at exactly this path, or None."""
        return self._tree(path).get(HubPath.of(path).path)

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, with the bytes of the pinned commit's file."""
        try:
            _tried(info.path, lambda: self._fetch(info, offset, buffer))
        except SourceError as error:
            if error.code == "source.not_found":  # the repository, or its history, was removed meanwhile
                raise changed(info) from error
            raise

    def _fetch(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        if (address := self._addresses.get(info.path)) is not None:
            try:
                self._get(info, address, {}, offset, buffer)
                return
            except HfHubHTTPError as error:
                if error.response.status_code not in _EXPIRED:
                    raise
                self._addresses.pop(info.path, None)
        named = HubPath.of(info.path)
        url = hf_hub_url(named.repository, named.path, revision=self.commit_of(info.path), endpoint=self._api.endpoint)
        headers = build_hf_headers(library_name="reshard", library_version=version("reshard"))
        hub = urlsplit(url).netloc
        for _ in range(_MOST_REDIRECTS):
            following = self._get(info, url, headers, offset, buffer)
            if following is None:
                if urlsplit(url).netloc != hub:
                    self._addresses[info.path] = url
                return
            url = urljoin(url, following)
            if urlsplit(url).netloc != hub:
                headers = {}  # a token is for the hub alone
        raise StorageError("storage.protocol", f"hf://{printable(info.path)}: the hub redirects without end")

    def _get(
        self, info: ObjectInfo, url: str, headers: Mapping[str, str], offset: int, buffer: memoryview
    ) -> str | None:
        """Fill the buffer from this address; or return the address to which it redirects."""
        asked = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}", "Accept-Encoding": "identity"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream(
            "GET", url, headers={**headers, **asked}, follow_redirects=False, timeout=timeout
        ) as answer:
            if headers:
                _refuse_other_content(info, answer.headers)
            if answer.status_code // 100 == 3 and "Location" in answer.headers:
                return str(answer.headers["Location"])
            if answer.status_code == 416:
                raise changed(info)
            hf_raise_for_status(answer)
            _refuse_other_range(info, answer.status_code, answer.headers.get("Content-Range", ""), offset, len(buffer))
            done = 0
            for part in answer.iter_bytes():
                if done + len(part) > len(buffer):
                    raise StorageError(
                        "storage.protocol",
                        f"hf://{printable(info.path)}: more than the {len(buffer)} bytes from {offset} on were sent",
                    )
                buffer[done : done + len(part)] = part
                done += len(part)
        if done != len(buffer):
            raise StorageError(
                "storage.unavailable",
                f"hf://{printable(info.path)}: {done} of {len(buffer)} bytes from {offset} on were sent",
                fix="run the same command again",
            )
        return None

    # -- one commit -----------------------------------------------------------------------------------

    def publish(self, path: str, additions: Sequence[CommitOperationAdd], gone: Sequence[str], message: str) -> str:
        """Write files into a branch by one commit; returns it. Content that the hub has already is not sent again.

        A repository that does not exist is created, private; a branch that does not exist begins at `main`.

        Args:
            path: `ORG/NAME[@BRANCH]`.
            additions: The files, with the content that they had when they were made.
            gone: Paths of files to remove.
            message: First line of the commit's message.

        Raises:
            StorageError: `storage.conflict` if the branch is not at the commit that this store knows. Nothing is
                changed then.
        """
        named, parent = HubPath.of(path), self._parent_of(path)

        def commit() -> str:
            self._api.preupload_lfs_files(
                named.repository,
                additions,
                revision=named.revision,
                free_memory=False,
                # Nothing is left out: a model without its weights would be committed otherwise.
                gitignore_content="",
            )
            made = self._api.create_commit(
                named.repository,
                [*additions, *(CommitOperationDelete(name) for name in gone)],
                commit_message=message,
                revision=named.revision,
                parent_commit=parent,
            )
            return made.oid

        disable_progress_bars()  # reshard shows its own
        try:
            made = _tried(path, commit)
        except StorageError as error:
            # The answer to a commit can be lost, and then its second try finds the branch moved, by itself.
            found = error.code in ("storage.conflict", "storage.protocol")
            made = HubStore().commit_if_any(path) if found else None
            if made is None or not self.holds(f"{named.repository}@{made}", additions):
                raise
        with self._lock:
            self._commits[named.repository, named.revision] = made
        if not self.holds(path, additions):
            raise StorageError("storage.protocol", f"hf://{printable(path)}: commit {made} does not hold what was sent")
        return made

    def _parent_of(self, path: str) -> str:
        named = HubPath.of(path)
        if (known := self.commit_if_any(path)) is not None:
            return known
        is_main = named.revision == constants.DEFAULT_REVISION
        if is_main or self.commit_if_any(named.repository) is None:
            _tried(path, lambda: self._api.create_repo(named.repository, private=True))
        if not is_main:
            begin = self.commit_of(named.repository)
            _tried(path, lambda: self._api.create_branch(named.repository, branch=named.revision, revision=begin))
        return self.commit_of(path)

    def holds(self, path: str, additions: Sequence[CommitOperationAdd]) -> bool:
        """True if the commit of a path has files of these names and contents; it may have others."""
        return all(
            (info := self.stat(join(path, a.path_in_repo))) is not None and pin_of(a, info) == info.pin
            for a in additions
        )


class KnownFile(CommitOperationAdd):
    """A file for the hub that is read when it is sent, as often as it is sent. Its digest is known before."""

    def __init__(self, path: str, file: BinaryIO, *, size_bytes: int, sha256: bytes, sample: bytes) -> None:
        """`sample` is the beginning of the content, 512 bytes at most."""
        self.path_in_repo = path
        self.path_or_fileobj = file
        self.upload_info = UploadInfo(size_bytes, sample, sha256)


def pin_of(addition: CommitOperationAdd, info: ObjectInfo) -> str:
    """The pin of a file's content, in the way in which the hub keeps the file: large, or as an object of git."""
    if info.pin.startswith("sha256:"):
        return f"sha256:{addition.upload_info.sha256.hex()}"
    if addition.upload_info.size != info.size_bytes:
        return ""
    with addition.as_file() as file:
        body = file.read()
    return f"git:{git_hash(body)}"


def _refuse_other_content(info: ObjectInfo, headers: Mapping[str, str]) -> None:
    """Refuse an answer of the hub that is about other content than the pinned one."""
    tag = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/").strip('"')
    if tag and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", tag) and tag != info.pin.partition(":")[2]:
        raise changed(info)


def _refuse_other_range(info: ObjectInfo, status: int, said: str, offset: int, length: int) -> None:
    found = _RANGE.fullmatch(said)
    if status == 206 and found is not None:
        begin, last, size = map(int, found.groups())
        if size != info.size_bytes:
            raise changed(info)
        if (begin, last) == (offset, offset + length - 1):
            return
    elif status == 200 and (offset, length) == (0, info.size_bytes):
        return
    raise StorageError(
        "storage.protocol",
        f"hf://{printable(info.path)}: bytes {offset}-{offset + length - 1} were asked for, and the answer is "
        f"{status} {printable(said)!r}",
        fix="check HF_ENDPOINT: this server, or a proxy before it, does not serve ranges",
    )
