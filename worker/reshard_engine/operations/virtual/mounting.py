"""A target that is never written as read-only files, for programs that read nothing else: a mount of FUSE.

The kernel's requests are read from `/dev/fuse` and answered here, without libfuse. A read-only tree needs seven kinds
of requests, and no package of the registry brings libfuse along: each would need it from the system, where many
training images have none. Measured beside mfusepy 3.1.1 with libfuse 3.14: see docs/mount.md.

Source: Linux 6.18 `include/uapi/linux/fuse.h` (protocol 7.x: layouts of requests and answers), `fs/fuse/dev.c` (reads
of the device), `fs/fuse/inode.c` (`process_init_reply`: what the kernel takes of an answer to INIT), `fs/fuse/file.c`
(`fuse_file_open`: files need no OPEN where it is answered ENOSYS, and their pages are kept); libfuse 3.14
`lib/mount.c` and `util/fusermount.c` (`_FUSE_COMMFD`). Verified by running under Linux 6.18.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import shlex
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from reshard.errors import JobError, RequestError, ReshardError, StorageError, printable
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint

# The tree of files.

_ROOT = 1


@dataclass(slots=True)
class _Node:
    """A directory, or a file with its size; a file's bytes are known, or are those of a file of the layout."""

    number: int
    parent: int
    size_bytes: int = 0
    known: bytes | None = None
    path: str | None = None
    """Path in the layout."""
    entries: dict[bytes, _Node] | None = None
    """The entries of a directory, by name."""


def _tree(layout: VirtualCheckpoint) -> list[_Node]:
    """The nodes by number, from 1 on: what a conversion into an empty directory leaves there, less the manifest."""
    nodes = [_Node(0, 0), _Node(_ROOT, _ROOT, entries={})]
    pointer = layout.layout.pointer
    for file in layout.files:
        path = file.path if pointer is None else f"{pointer.tag}/{file.path}"
        node = _add(nodes, path)
        node.size_bytes, node.path = file.size_bytes, file.path
    for name, content in () if pointer is None else (*pointer.beside, (pointer.name, pointer.content)):
        node = _add(nodes, name)
        node.size_bytes, node.known = len(content), content
    return nodes


def _add(nodes: list[_Node], path: str) -> _Node:
    at = nodes[_ROOT]
    parts = os.fsencode(path).split(b"/")
    for part in parts:
        if at.entries is None:
            at.entries = {}
        if part not in at.entries:
            at.entries[part] = _Node(len(nodes), at.number)
            nodes.append(at.entries[part])
        at = at.entries[part]
    return at


# The protocol of the kernel.

_LOOKUP, _FORGET, _GETATTR, _READ, _STATFS, _INIT = 1, 2, 3, 15, 17, 26
_OPENDIR, _READDIR, _RELEASEDIR, _DESTROY, _BATCH_FORGET = 27, 28, 29, 38, 42
_UNANSWERED = (_FORGET, _BATCH_FORGET)
_REQUEST = struct.Struct("=IIQQIIIHH")
_ANSWER = struct.Struct("=IiQ")
_INIT_IN = struct.Struct("=IIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHH32x")
_READ_IN = struct.Struct("=QQIIQII")
_ATTRIBUTES = struct.Struct("=6Q10I")
_ENTRY = struct.Struct("=QQQQII")
_VALID = struct.Struct("=QII")
_OPENED = struct.Struct("=QIi")
_DIRENT = struct.Struct("=QQII")
_STATFS_OUT = struct.Struct("=5Q4I24x")

_MAJOR, _LEAST_MINOR, _MINOR = 7, 23, 31
_ASYNC_READ, _PARALLEL_DIROPS, _MAX_PAGES = 1 << 0, 1 << 18, 1 << 22
_KEEP_CACHE, _CACHE_DIR = 1 << 1, 1 << 3
_FOREVER_S = 10**9
"""Names, attributes and pages never change, so the kernel may keep them."""
_PAGE_BYTES = 4096
_MOST_PAGES = 256
_READ_BYTES = _PAGE_BYTES * _MOST_PAGES
"""The longest read: a kernel takes at most 256 pages, if nobody has raised `fs.fuse.max_pages_limit`."""
_REQUEST_BYTES = 64 << 10
_MOST_WAITING = 64
_THREADS = 8
_MOST_TOLD = 100


class _Failed(Exception):  # noqa: N818 - it is an answer
    """The answer to a request is an error of the system."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Server:
    """Answers the requests of one connection with the kernel, from several threads.

    One thread at a time waits for a request; it hands the wait on before it answers. So a slow read holds up no other.
    """

    def __init__(self, layout: VirtualCheckpoint, device: int, on_error: Callable[[ReshardError], None]) -> None:
        self._layout = layout
        self._nodes = _tree(layout)
        self._device = device
        self._on_error = on_error
        self._told: set[tuple[str, str]] = set()
        self._turn = threading.Lock()
        self._stop, self._stopped = os.pipe()
        self._owner = (os.getuid(), os.getgid())
        self._since = time.time_ns()
        self.ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"fuse-{n}", daemon=True) for n in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def close(self, wait_s: float) -> None:
        """Answer nothing more. Threads that wait for the source are left behind after `wait_s` seconds."""
        os.write(self._stopped, b"x")
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for descriptor in (self._device, self._stop, self._stopped):
                os.close(descriptor)

    def _run(self) -> None:
        request = bytearray(_REQUEST_BYTES)
        data = memoryview(bytearray(_READ_BYTES))
        while (count := self._next(request)) is not None:
            if count:
                self._answer(memoryview(request)[:count], data)
        self.ended.set()

    def _next(self, request: bytearray) -> int | None:
        """Read a request; returns its length, 0 if there is none after all, and None at the end."""
        with self._turn:
            waiting = select.poll()
            for descriptor in (self._device, self._stop):
                waiting.register(descriptor, select.POLLIN)
            if any(found == self._stop for found, _ in waiting.poll()):
                return None
            try:
                return os.readv(self._device, [request])
            except OSError as error:
                # ENOENT: the process that asked has been killed meanwhile. ENODEV: unmounted.
                return 0 if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN) else None

    def _answer(self, request: memoryview, data: memoryview) -> None:
        _, opcode, unique, number, *_ = _REQUEST.unpack_from(request)
        failed, answer = 0, memoryview(b"")
        try:
            answer = memoryview(self._answer_to(opcode, number, request[_REQUEST.size :], data))
        except _Failed as error:
            failed = error.number
        except ReshardError as error:
            failed = errno.EIO
            self._tell(error)
        except Exception as error:  # noqa: BLE001 - a bug too must end as an error for whoever reads
            failed = errno.EIO
            self._tell(JobError("internal.error", printable(f"{type(error).__name__}: {error}")))
        if opcode not in _UNANSWERED:
            # It fails where the process that asked has been killed, or at the end.
            with suppress(OSError):
                os.writev(self._device, [_ANSWER.pack(_ANSWER.size + len(answer), -failed, unique), answer])

    def _answer_to(self, opcode: int, number: int, body: memoryview, data: memoryview) -> bytes | memoryview:
        if opcode == _READ:
            return self._read(self._nodes[number], body, data)
        if opcode == _LOOKUP:
            return self._lookup(self._nodes[number], bytes(body).partition(b"\0")[0])
        if opcode == _GETATTR:
            # Those of the root are asked for each time, so that a dead mount is seen as one.
            return _VALID.pack(0 if number == _ROOT else _FOREVER_S, 0, 0) + self._attributes(self._nodes[number])
        if opcode == _READDIR:
            return self._read_directory(self._nodes[number], body)
        if opcode == _OPENDIR:
            return _OPENED.pack(0, _KEEP_CACHE | _CACHE_DIR, 0)
        if opcode == _STATFS:
            return self._statistics()
        if opcode == _INIT:
            return _first_answer(body)
        if opcode in (_RELEASEDIR, _DESTROY, *_UNANSWERED):
            return b""
        raise _Failed(errno.ENOSYS)

    def _read(self, node: _Node, body: memoryview, data: memoryview) -> bytes | memoryview:
        _, offset, size, *_ = _READ_IN.unpack_from(body)
        count = max(0, min(size, node.size_bytes - offset))
        if node.known is not None:
            return node.known[offset : offset + count]
        if node.path is None:
            raise _Failed(errno.EISDIR)
        found = data[:count] if count <= len(data) else memoryview(bytearray(count))
        self._layout.read_into(node.path, offset, found)
        return found

    def _lookup(self, parent: _Node, name: bytes) -> bytes:
        node = (parent.entries or {}).get(name)
        if node is None:
            # Number 0: the kernel keeps that there is no such name, too.
            return _ENTRY.pack(0, 0, _FOREVER_S, _FOREVER_S, 0, 0) + bytes(_ATTRIBUTES.size)
        return _ENTRY.pack(node.number, 0, _FOREVER_S, _FOREVER_S, 0, 0) + self._attributes(node)

    def _attributes(self, node: _Node) -> bytes:
        second, rest = divmod(self._since, 10**9)
        kind = stat.S_IFREG | 0o444 if node.entries is None else stat.S_IFDIR | 0o555
        links = 1 if node.entries is None else 2 + sum(e.entries is not None for e in node.entries.values())
        blocks = -(-node.size_bytes // 512)
        times, parts = (second,) * 3, (rest,) * 3
        return _ATTRIBUTES.pack(
            node.number, node.size_bytes, blocks, *times, *parts, kind, links, *self._owner, 0, _PAGE_BYTES, 0
        )

    def _read_directory(self, node: _Node, body: memoryview) -> bytes:
        _, offset, size, *_ = _READ_IN.unpack_from(body)
        entries = node.entries or {}
        listed = [(b".", node.number, True), (b"..", node.parent, True)]
        listed += [(name, entry.number, entry.entries is not None) for name, entry in entries.items()]
        out = bytearray()
        for at, (name, number, is_directory) in enumerate(listed[offset:], offset + 1):
            padded = name + bytes(-len(name) % 8)
            if len(out) + _DIRENT.size + len(padded) > size:
                break
            kind = (stat.S_IFDIR if is_directory else stat.S_IFREG) >> 12
            out += _DIRENT.pack(number, at, len(name), kind) + padded
        return bytes(out)

    def _statistics(self) -> bytes:
        total = sum(-(-node.size_bytes // _PAGE_BYTES) for node in self._nodes)
        return _STATFS_OUT.pack(total, 0, 0, len(self._nodes) - 1, 0, _PAGE_BYTES, 255, _PAGE_BYTES, 0)

    def _tell(self, error: ReshardError) -> None:
        """Tell of an error, once: the kernel and readers try the same bytes again."""
        key = error.code, error.message
        if key not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(key)
            self._on_error(error)


def _first_answer(body: memoryview) -> bytes:
    major, minor, ahead_bytes, offered = _INIT_IN.unpack_from(body)
    if major != _MAJOR or minor < _LEAST_MINOR:
        raise _Failed(errno.EPROTO)
    taken = offered & (_ASYNC_READ | _PARALLEL_DIROPS | _MAX_PAGES)
    crowded = _MOST_WAITING * 3 // 4
    return _INIT_OUT.pack(
        _MAJOR, min(minor, _MINOR), ahead_bytes, taken, _MOST_WAITING, crowded, _PAGE_BYTES, 1, _MOST_PAGES, 0
    )


# Mounting: by the system call where this process may, else by fusermount3, as libfuse does.

_DEVICE = "/dev/fuse"
_MOUNTS = "/proc/self/mountinfo"
_TYPE = "reshard"
_READ_ONLY, _NO_SUID, _NO_DEVICES, _DETACH = 1, 2, 4, 2
_HELPERS = ("fusermount3", "fusermount")
_AHEAD_KB = 4 * _READ_BYTES >> 10
_LOOK_S = 0.2
_CLOSE_S = 5.0
_MOST_LINKS = 40
_ANSWER_S = 20.0
"""How long a mount that is already there may take to answer. Its attributes need nothing of the source."""
_GUARD = """\
trap '' INT TERM HUP
read -r _
[ -d "$1" ] && exit
grep -q "^$3 " /proc/self/mountinfo || exit
if [ -n "$2" ]; then "$2" -u -q -z -- "$1"; else umount -l -- "$1"; fi
"""
"""A shell that waits for the death of the process that mounted, which closes the pipe. It unmounts the directory if
nobody answers for it: the root's attributes are asked for each time."""


def mount(
    layout: VirtualCheckpoint,
    directory: str,
    *,
    allow_other: bool = False,
    on_error: Callable[[ReshardError], None] = lambda _: None,
) -> Mount:
    """Show the files of a layout below a directory, until the result is closed or this process dies.

    Args:
        layout: The files.
        directory: An empty directory, or one to create. A mount that a dead process left there is removed.
        allow_other: Let other users read. Without root this needs `user_allow_other` in /etc/fuse.conf.
        on_error: Called once with each error for which readers got `EIO`, from any thread.

    No thread of this process may map a file of the mount: a page fault keeps the interpreter's lock, which the answer
    needs.

    Raises:
        RequestError: `request.target_exists`: the directory is not empty, or not a directory.
        StorageError: `storage.no_fuse`: this machine, or this process, cannot mount.
    """
    place = _resolved(directory)
    if not os.path.exists(_DEVICE):
        if not sys.platform.startswith("linux"):
            raise StorageError("storage.no_fuse", f"a mount needs FUSE of Linux, and this is {sys.platform}")
        raise StorageError(
            "storage.no_fuse",
            f"there is no {_DEVICE}",
            fix="load it: modprobe fuse; a container needs this device; without a mount, `reshard convert` writes the "
            "files with the same options, and reshard.open_layout reads them in Python",
        )
    made = _prepare(place)
    options = ["default_permissions", *(["allow_other"] if allow_other else [])]
    try:
        device, helper = _mounted_by_call(place, options) or _mounted_by_helper(place, options)
    except StorageError:
        if made:
            os.rmdir(place)
        raise
    mounted = _mount_at(place)
    server, guard = _Server(layout, device, on_error), _guard(place, helper, mounted)
    found = Mount(layout, place, server, helper, guard, made, mounted)
    found.check()
    return found


@dataclass
class Mount:
    """A layout below a directory, as read-only files, until `close`.

    It holds what `convert` leaves in an empty directory, less the manifest: the tag directory and the pointer beside
    it, or the files themselves where the target has no pointer.
    """

    layout: VirtualCheckpoint
    directory: str
    """Absolute path of the directory."""
    server: _Server
    helper: str | None
    """The program that unmounts; None if this process may."""
    guard: subprocess.Popen[bytes] | None = field(repr=False)
    made: bool
    """True if `mount` created the directory."""
    mounted: _Mounted | None = field(repr=False)
    """The mount itself, as the kernel lists it."""

    @property
    def pointer(self) -> str | None:
        """Name of the pointer in the directory, such as `latest`."""
        return None if self.layout.layout.pointer is None else self.layout.layout.pointer.name

    @property
    def target(self) -> str:
        """Path of the directory with the files of the target."""
        pointer = self.layout.layout.pointer
        return self.directory if pointer is None else os.path.join(self.directory, pointer.tag)

    def check(self) -> None:
        """Wait until the files are there, and let the kernel read ahead as far as one request reaches.

        Raises:
            StorageError: `storage.no_fuse`: the kernel speaks another protocol.
        """
        try:
            found = os.stat(self.directory)
        except OSError as error:
            self.close()
            raise StorageError(
                "storage.no_fuse", f"{printable(self.directory)}: the kernel refused the mount: {error.strerror}"
            ) from None
        device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
        # 128 KiB by default, which only root may raise: each request costs the same, however long it is.
        with suppress(OSError), open(f"/sys/class/bdi/{device}/read_ahead_kb", "w", encoding="ascii") as ahead:
            ahead.write(str(_AHEAD_KB))

    def wait(self, stop: threading.Event) -> None:
        """Wait until `stop` is set, or until somebody else has unmounted the directory."""
        while not stop.is_set() and not self.server.ended.is_set():
            stop.wait(_LOOK_S)

    def close(self) -> None:
        """Unmount, also while files are open: whoever reads one gets an error.

        Under something that somebody else has mounted since, the mount stays, dead; the next `mount` removes it.
        """
        if not self.server.ended.is_set():
            _unmount(self.mounted, self.helper)
        self.server.close(_CLOSE_S)
        if self.guard is not None and self.guard.stdin is not None:
            self.guard.stdin.close()
            self.guard.wait()
        if self.made:
            with suppress(OSError):
                os.rmdir(self.directory)

    def __enter__(self) -> Self:
        """The mount itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Unmount."""
        self.close()


def _prepare(place: str) -> bool:
    """Make an empty directory to mount on; True if there was none.

    Raises:
        RequestError: `request.target_exists`.
    """
    held = _mount_at(place)
    if held is not None and held.is_ours:
        failed = _looked_at(place)
        if failed is None:
            raise RequestError(
                "request.target_exists",
                f"a mount on {printable(place)} does not answer: its process is stopped, or waits for the source",
                fix=f"end that process, or detach the mount: umount -l {shlex.quote(place)}; or name another directory",
            )
        if failed in (errno.ENOTCONN, errno.ECONNABORTED):
            _unmount(held, None)
    try:
        os.mkdir(place)
    except FileExistsError:
        pass
    except OSError as error:
        raise RequestError(
            "request.invalid", f"{printable(place)}: {error.strerror}", fix="name a directory in one that exists"
        ) from None
    else:
        return True
    try:
        entries = os.listdir(place)
    except OSError as error:
        raise RequestError(
            "request.target_exists",
            f"{printable(place)}: {error.strerror}",
            fix="name an empty directory, or a new one; a dead mount is removed by: umount -l DIR",
        ) from None
    if held is not None and held.is_ours and _mount_at(place) == held:
        raise RequestError(
            "request.target_exists",
            f"{printable(place)} is mounted already",
            fix="unmount it, if nobody reads from it: umount DIR; or name another directory",
        )
    if entries:
        raise RequestError(
            "request.target_exists", f"{printable(place)} is not empty", fix="name an empty directory, or a new one"
        )
    return False


@dataclass(frozen=True, slots=True)
class _Mounted:
    """A mount in the table of this process."""

    number: int
    """The kernel's number of the mount. A number is used again after the end of its mount only."""
    path: str
    is_ours: bool
    """True if a program like this one mounted it, alive or dead."""


def _mount_at(place: str) -> _Mounted | None:
    """The mount that lies uppermost at a path, which is asked nothing: it may not answer."""
    found: _Mounted | None = None
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as listed:
        for line in listed:
            words, _, rest = line.partition(" - ")
            number, _, _, _, escaped, *_ = words.split(" ")
            # Octal escapes: proc(5). Later lines lie above earlier ones.
            path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), escaped)
            if path == place:
                found = _Mounted(int(number), path, rest.startswith(f"fuse.{_TYPE} "))
    return found


def _resolved(directory: str) -> str:
    """The path without links. What is mounted there is asked nothing: it may not answer."""
    path = os.path.abspath(directory)
    for _ in range(_MOST_LINKS):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if _mount_at(path) is not None or not os.path.islink(path):
            return path
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
    raise RequestError(
        "request.invalid", f"{printable(directory)}: too many links", fix="name a directory in one that exists"
    )


def _looked_at(place: str) -> int | None:
    """The number of the error that a look at a directory ends with, 0 for none; None if there is no answer in time.

    Another process looks: a thread that waits for the kernel would keep this one from ending.
    """
    code = "import os, sys\ntry: os.stat(sys.argv[1])\nexcept OSError as error: sys.exit(error.errno)"
    look = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, place], stderr=subprocess.DEVNULL, cwd="/")
    try:
        return look.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        look.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel may keep it until the mount answers
            look.wait(1)
        return None


def _mounted_by_call(place: str, options: Sequence[str]) -> tuple[int, str | None] | None:
    """Mount by the system call; returns the connection with the kernel, or None if this process may not.

    Raises:
        StorageError: `storage.no_fuse`.
    """
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            return None
        raise StorageError("storage.no_fuse", f"{_DEVICE}: {error.strerror}") from None
    data = ",".join([f"fd={device}", "rootmode=40000", f"user_id={os.getuid()}", f"group_id={os.getgid()}", *options])
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _READ_ONLY | _NO_SUID | _NO_DEVICES
    if libc.mount(_TYPE.encode(), os.fsencode(place), f"fuse.{_TYPE}".encode(), flags, data.encode()) == 0:
        return device, None
    number = ctypes.get_errno()
    os.close(device)
    if number in (errno.EPERM, errno.EACCES):
        return None
    raise StorageError("storage.no_fuse", f"{printable(place)} cannot be mounted on: {os.strerror(number)}")


def _mounted_by_helper(place: str, options: Sequence[str]) -> tuple[int, str | None]:
    """Mount by the program that may; returns the connection with the kernel, and the program's name.

    Raises:
        StorageError: `storage.no_fuse`.
    """
    helper = _helper()
    if helper is None:
        raise StorageError(
            "storage.no_fuse",
            "this process may not mount, and there is no fusermount3",
            fix="install the package fuse3, or mount as root, in a container with the capability SYS_ADMIN; without "
            "a mount, `reshard convert` writes the files with the same options, and reshard.open_layout reads them in "
            "Python",
        )
    words = ",".join(["ro", "nosuid", "nodev", f"fsname={_TYPE}", f"subtype={_TYPE}", *options])
    ours, its = socket.socketpair()
    with ours, its:
        ran = subprocess.run(
            [helper, "-o", words, "--", place],
            env={**os.environ, "_FUSE_COMMFD": str(its.fileno())},
            pass_fds=[its.fileno()],
            stderr=subprocess.PIPE,
            check=False,
        )
        its.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if ran.returncode != 0 or not descriptors:
        said = ran.stderr.decode(errors="replace").strip().removeprefix(f"{helper}: ")
        raise StorageError(
            "storage.no_fuse",
            f"{helper}: {printable(said)}",
            fix="do what it asks for, or mount as root; without a mount, `reshard convert` writes the files with the "
            "same options, and reshard.open_layout reads them in Python",
        )
    os.set_inheritable(descriptors[0], False)
    return descriptors[0], helper


def _helper() -> str | None:
    """The program of this machine that may mount and unmount."""
    return next((name for name in _HELPERS if shutil.which(name)), None)


def _unmount(mounted: _Mounted | None, helper: str | None) -> None:
    """Unmount, at once for new readers; what is open goes with the connection.

    The system takes a path, and detaches what lies uppermost there. So nothing is done if that is another mount.
    """
    if mounted is None or _mount_at(mounted.path) != mounted:
        return
    place = mounted.path
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(place), _DETACH) != 0:
        helper = helper or _helper()
        if helper is not None:
            subprocess.run([helper, "-u", "-q", "-z", "--", place], check=False)


def _guard(place: str, helper: str | None, mounted: _Mounted | None) -> subprocess.Popen[bytes] | None:
    """Start what unmounts when this process is killed; None where there is no shell."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "reshard-mount", place, helper or "", str(mounted.number if mounted else "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except OSError:
        return None
