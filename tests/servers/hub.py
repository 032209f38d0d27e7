"""A stand-in for the Hugging Face hub: the part of its API that models are read and uploaded with.

It is written from huggingface_hub 2.4.0 (`hf_api.py`, `_commit_api.py`, `lfs.py`, `file_download.py`,
`utils/_http.py`: paths, bodies, headers and error codes) and git-lfs `docs/api/batch.md`. The real client talks to it.
What no source of the client says is a choice of ours: which files are large (`LARGE_BYTES`, or by suffix), the rules of
`/api/validate-yaml` (the front matter is YAML, `base_model` an id), and the texts of errors. Xet is not served: set
`HF_HUB_DISABLE_XET=1`. Large files are kept under another host name, as on the hub, at addresses that can expire.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import close_session, validate_repo_id

LARGE_BYTES = 64 << 10
PART_BYTES = 100_000
TOKEN = "hf_of_the_tests"
READER = "hf_that_only_reads"
_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass
class Blob:
    """One file of a commit."""

    data: bytes
    large: bool

    @cached_property
    def oid(self) -> str:
        """The id of its object in git: that of a large file is of its pointer."""
        body = self.data
        if self.large:
            body = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
                self.sha256.encode(),
                len(body),
            )
        return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def tag(self) -> str:
        return self.sha256 if self.large else self.oid


@dataclass
class Repository:
    """One model repository."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict[str, dict[str, Blob]])
    refs: dict[str, str] = field(default_factory=dict[str, str])
    messages: list[str] = field(default_factory=list[str])

    def commit(self, ref: str, files: Mapping[str, Blob], message: str) -> str:
        """Add a commit to a branch."""
        names = json.dumps([self.refs.get(ref), message, sorted((p, b.oid) for p, b in files.items())])
        oid = hashlib.sha1(names.encode()).hexdigest()
        self.commits[oid] = dict(files)
        self.refs[ref] = oid
        self.messages.append(message)
        return oid

    def files(self, ref: str = "main") -> dict[str, Blob]:
        return self.commits[self.refs[ref]]


@dataclass
class Request:
    """A request that the hub has seen."""

    method: str
    path: str
    range: str | None
    authorized: bool
    sent_bytes: int = 0


@dataclass
class Fault:
    """What happens to the next requests that match: a status with headers, a body cut short, or a call of the test.

    A call that returns True lets the request do nothing, and its connection end.
    """

    method: str
    path: str
    times: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    cut: bool = False
    call: Callable[[], object] | None = None


class Hub:
    """The state of the stand-in, and what tests do to it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.generation = 0
        """Part of the addresses of large files; addresses of an earlier one have expired."""
        self.ranges = True
        self.damages = False
        """True to keep other bytes of large files than those that were sent."""
        self.uploaded_bytes = 0
        self.endpoint = self.files_endpoint = ""

    def repository(self, name: str, files: Mapping[str, bytes], **facts: Any) -> Repository:
        """Make a repository with one commit."""
        found = self.repositories.setdefault(name, Repository(**facts))
        found.commit("main", {path: self.blob(path, data) for path, data in files.items()}, "initial commit")
        return found

    def blob(self, path: str, data: bytes) -> Blob:
        found = Blob(data, path.endswith(_SUFFIXES) or len(data) >= LARGE_BYTES)
        if found.large:
            self.objects[found.sha256] = data
        return found

    def fail(self, method: str, path: str, **what: Any) -> None:
        """Let the next requests of a method, whose paths match, fail."""
        self.faults.append(Fault(method, path, **what))

    def seen(self, method: str, pattern: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and re.search(pattern, r.path)]

    def env(self, *, token: str | None = TOKEN) -> dict[str, str]:
        """The environment of a program that uses this hub."""
        kept = {n: v for n, v in os.environ.items() if n not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        return {
            **kept,
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **({} if token is None else {"HF_TOKEN": token}),
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    of_files: bool

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        self.url = urlsplit(self.path)
        self.place = unquote(self.url.path)
        size = self.headers.get("Content-Length")
        self.body = (
            self._chunked() if size is None and self.command in ("PUT", "POST") else self.rfile.read(int(size or 0))
        )
        said = self.headers.get("Authorization")
        self.seen = Request(self.command, self.path, self.headers.get("Range"), said is not None)
        self.writes = said == f"Bearer {TOKEN}"
        self.authorized = self.writes or said == f"Bearer {READER}"
        self.cut = False
        with self.hub.lock:
            self.hub.requests.append(self.seen)
            found = next(
                (f for f in self.hub.faults if f.method == self.command and re.search(f.path, self.path)), None
            )
            if found is not None:
                found.times -= 1
                if found.times <= 0:
                    self.hub.faults.remove(found)
        if found is not None:
            if found.call is not None and found.call() is True:
                self.close_connection = True
                return
            if found.status:
                self._answer(found.status, {"error": "as the test asked"}, **found.headers)
                return
            self.cut = found.cut
        if said is not None and not self.authorized and not self.of_files:
            self._answer(
                401,
                {"error": "Invalid credentials"},
                **{"X-Error-Message": "Invalid credentials in Authorization header"},
            )
            return
        with self.hub.lock:
            (self._file if self.of_files else self._api)()

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815 - names of the base class

    def _chunked(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            data = data[: len(data) // 2] if self.cut else data
            self.seen.sent_bytes += len(data)
            self.wfile.write(data)
        if self.cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, **{"X-Error-Code": code, "X-Error-Message": code})

    def _bytes(self, data: bytes, **headers: str) -> None:
        """A body, or the range of it that is asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or not self.hub.ranges:
            self._answer(200, data, **headers, **{"Accept-Ranges": "bytes"})
            return
        begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
        if begin >= len(data):
            self._answer(416, b"", **{"Content-Range": f"bytes */{len(data)}"})
            return
        said = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        self._answer(206, data[begin:end], **headers, **said)

    # -- files at signed addresses ------------------------------------------------------------------

    def _file(self) -> None:
        hub, (_, kind, *rest) = self.hub, self.place.split("/")
        if kind == "get":
            if rest[0] != str(hub.generation):
                self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
                return
            self._bytes(hub.objects[rest[1]], ETag='"of-the-store"')
        elif kind == "put":
            hub.uploaded_bytes += len(self.body)
            self.body = b"?" + self.body[1:] if hub.damages else self.body
            if len(rest) == 1:
                hub.parts[rest[0]] = {1: self.body}
            else:
                hub.parts.setdefault(rest[0], {})[int(rest[1])] = self.body
            self._answer(200, b"", ETag=f'"{hashlib.md5(self.body).hexdigest()}"')

    # -- the API --------------------------------------------------------------------------------------

    def _api(self) -> None:
        for pattern, call in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validate),
            (r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", self._write),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch)", self._write),
            (r"/([^/]+/[^/]+)/lfs-(complete|verify)/([0-9a-f]{64})", self._received),
            (r"/api/models/([^/]+/[^/]+)()()", self._read),
            (r"/api/models/([^/]+/[^/]+)/(revision|tree|refs|paths-info)/?(.*)", self._read),
            (r"/([^/]+/[^/]+)/(resolve)/(.+)", self._read),
        ):
            if (found := re.fullmatch(pattern, self.place)) is not None:
                call(*found.groups(default=""))
                return
        self._answer(404, {"error": f"the stand-in does not know {self.command} {self.path}"})

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self.writes:
            self._answer(403, {"error": "no right to create a repository"})
        elif name in self.hub.repositories:
            self._answer(409, {"error": "You already created this model repo"})
        else:
            private = asked.get("visibility") == "private" or asked.get("private") is True
            self.hub.repository(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
            self._answer(200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def _validate(self) -> None:
        text = json.loads(self.body)["content"]
        front = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        try:
            facts: Any = yaml.safe_load(front[1]) if front else None
            if facts and "base_model" in facts:
                validate_repo_id(facts["base_model"])
        except (yaml.YAMLError, ValueError) as error:
            self._answer(400, {"errors": [{"message": str(error)}], "warnings": []})
            return
        self._answer(200, {"errors": [], "warnings": []})

    def _visible(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self.authorized):
            self._refuse(404 if self.authorized else 401, "RepoNotFound")
            return None
        return found

    def _commit_named(self, found: Repository, revision: str) -> str | None:
        oid = found.refs.get(revision, revision)
        if oid not in found.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return oid

    def _read(self, name: str, what: str, rest: str) -> None:
        if (found := self._visible(name)) is None:
            return
        if what == "refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in found.refs.items()]
            self._answer(200, {"branches": branches, "tags": [], "converts": []})
            return
        # A revision is one escaped segment; the path behind it may be escaped as well.
        raw = self.url.path.split(f"/{what}/", 1)[1] if what else "main"
        revision, _, path = raw.partition("/")
        revision, path = unquote(revision), unquote(path)
        if (oid := self._commit_named(found, revision)) is None:
            return
        files = found.commits[oid]
        if what in ("", "revision"):
            siblings = [{"rfilename": p} for p in files]
            self._answer(
                200,
                {"id": name, "modelId": name, "sha": oid, "private": found.private, "siblings": siblings, "tags": []},
            )
        elif what == "tree":
            self._tree(files, path)
        elif what == "paths-info":
            asked = parse_qs(self.body.decode()).get("paths", [])
            self._answer(200, [_entry(p, files[p]) for p in asked if p in files])
        elif path not in files:
            self._refuse(404, "EntryNotFound")
        elif found.gated:
            self._refuse(403 if self.authorized else 401, "GatedRepo")
        else:
            self._resolve(oid, files[path])

    def _tree(self, files: Mapping[str, Blob], path: str) -> None:
        below = {p: b for p, b in files.items() if not path or p.startswith(f"{path}/")}
        if path and not below:
            self._refuse(404, "EntryNotFound")
            return
        query = parse_qs(self.url.query)
        at = len(path) + 1 if path else 0
        entries: dict[str, Any] = {}
        for name, blob in sorted(below.items()):
            inner = name[at:].split("/")
            for depth in range(1, len(inner)):
                folder = name[:at] + "/".join(inner[:depth])
                entries[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            entries[name] = _entry(name, blob)
        if query.get("recursive", ["false"])[0].lower() != "true":
            entries = {n: e for n, e in entries.items() if "/" not in n[at:]}
        # Pages of three, so that clients follow the links.
        first = int(query.get("cursor", ["0"])[0])
        listed, headers = list(entries.values())[first : first + 3], {}
        if first + 3 < len(entries):
            deep = query.get("recursive", ["false"])[0]
            more = f"{self.hub.endpoint}{self.url.path}?recursive={deep}&cursor={first + 3}"
            headers = {"Link": f'<{more}>; rel="next"'}
        self._answer(200, listed, **headers)

    def _resolve(self, oid: str, blob: Blob) -> None:
        said = {"X-Repo-Commit": oid, "ETag": f'"{blob.tag}"'}
        if blob.large:
            said = {"X-Repo-Commit": oid, "X-Linked-Etag": f'"{blob.tag}"', "X-Linked-Size": str(len(blob.data))}
            place = f"{self.hub.files_endpoint}/get/{self.hub.generation}/{blob.sha256}"
            self._answer(302, b"Found", Location=place, **said)
        else:
            self._bytes(blob.data, **said)

    def _write(self, name: str, what: str, rest: str = "") -> None:
        if (found := self._visible(name)) is None:
            return
        if not self.writes:
            self._answer(403, {"error": "no right to write"})
            return
        asked: Any = None if what == "commit" else json.loads(self.body or b"{}")
        if what == "branch":
            if rest in found.refs:
                self._answer(409, {"error": "Reference already exists"})
                return
            found.refs[rest] = found.refs.get(begin := asked.get("startingPoint", "main"), begin)
            self._answer(200, {})
        elif what == "batch":
            self._answer(200, {"transfer": "basic", "objects": [self._upload_of(name, o) for o in asked["objects"]]})
        elif (oid := self._commit_named(found, rest)) is not None:
            (self._preupload if what == "preupload" else self._commit)(name, found, rest, oid)

    def _received(self, _name: str, what: str, oid: str) -> None:
        """Put the parts of a large file together; or compare the content with its id, and keep it."""
        asked, parts = json.loads(self.body), self.hub.parts.get(oid, {})
        whole = b"".join(parts[n] for n in sorted(parts))
        if what == "complete":
            # Its address is signed: the client sends no token.
            tags = [hashlib.md5(parts[n]).hexdigest() for n in sorted(parts)]
            sound = [p["etag"].strip('"') for p in asked["parts"]] == tags
        else:
            sound = hashlib.sha256(whole).hexdigest() == oid and len(whole) == asked["size"]
            del self.hub.parts[oid]
        if not sound:
            self._answer(422, {"error": "the content is not that of the oid"})
            return
        if what == "verify":
            self.hub.objects[oid] = whole
        self._answer(200, {})

    def _upload_of(self, name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        oid, size = asked["oid"], asked["size"]
        if oid in self.hub.objects:
            return {"oid": oid, "size": size}
        place = f"{self.hub.files_endpoint}/put/{oid}"
        upload: dict[str, Any] = {"href": place, "header": {}}
        if size > PART_BYTES:
            count = -(-size // PART_BYTES)
            header = {"chunk_size": str(PART_BYTES), **{f"{n:05d}": f"{place}/{n}" for n in range(1, count + 1)}}
            upload = {"href": f"{self.hub.endpoint}/{name}/lfs-complete/{oid}", "header": header}
        verify: dict[str, Any] = {"href": f"{self.hub.endpoint}/{name}/lfs-verify/{oid}", "header": {}}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def _preupload(self, _name: str, found: Repository, _ref: str, oid: str) -> None:
        asked = json.loads(self.body)
        files = found.commits[oid]
        rules = asked.get("gitIgnore")
        if rules is None:
            rules = files[".gitignore"].data.decode() if ".gitignore" in files else ""
        self._answer(200, {"files": [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(_SUFFIXES) or f["size"] >= LARGE_BYTES else "regular",
                "shouldIgnore": any(f["path"].endswith(r.lstrip("*")) for r in rules.split()),
                **({"oid": files[f["path"]].tag} if f["path"] in files else {}),
            }
            for f in asked["files"]
        ]})  # fmt: skip

    def _commit(self, name: str, found: Repository, ref: str, oid: str) -> None:
        header, *lines = [json.loads(line) for line in self.body.splitlines()]
        if header["value"].get("parentCommit", oid) != oid:
            self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(found.commits[oid])
        for line in lines:
            value, path = line["value"], line["value"]["path"]
            if line["key"] == "file":
                files[path] = Blob(base64.b64decode(value["content"]), large=False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    self._answer(400, {"error": f"no object {value['oid']}"})
                    return
                files[path] = Blob(self.hub.objects[value["oid"]], large=True)
            elif line["key"] == "deletedFile":
                del files[path]
        made = found.commit(ref, files, header["value"]["summary"])
        self._answer(200, {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{made}", "commitOid": made})


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    large = {"lfs": {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}} if blob.large else {}
    return {"type": "file", "path": path, "oid": blob.oid, "size": len(blob.data), **large}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def hub_server() -> Generator[Hub]:
    """A hub of its own, and the server of its large files."""
    hub = Hub()
    servers: list[ThreadingHTTPServer] = []
    for of_files in (False, True):
        handler = type("Handler", (_Handler,), {"hub": hub, "of_files": of_files})
        server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    # Two names for one host: a client must not send its token to the second.
    hub.endpoint = f"http://127.0.0.1:{servers[0].server_port}"
    hub.files_endpoint = f"http://localhost:{servers[1].server_port}"
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@contextmanager
def hub_of_this_process(patch: pytest.MonkeyPatch, *, token: str | None = TOKEN) -> Generator[Hub]:
    """A hub that `huggingface_hub` of this process uses."""
    with hub_server() as hub:
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        place = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        if token is None:
            patch.delenv("HF_TOKEN", raising=False)
        else:
            patch.setenv("HF_TOKEN", token)
        try:
            yield hub
        finally:
            close_session()
