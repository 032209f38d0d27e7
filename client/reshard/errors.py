"""Typed errors with stable codes: the one table that the CLI, the API and the SDK share.

The class says *who can fix it*, the code says *what happened*, and the table below says
what each code means to HTTP, to a shell and to a retry loop::

    ReshardError
    |-- RequestError     the caller
    |-- SourceError      the owner of the checkpoint
    |-- StorageError     the operator of the storage (or of the service)
    |-- IntegrityError   us: what we wrote does not verify
    `-- JobError         the life of a job (cancelled, lost, timed out)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

MAX_TEXT_CHARS = 2_000


class ExitCode(IntEnum):
    """Exit codes of `reshard`, frozen: scripts and schedulers depend on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    SOURCE = 3
    AUTH = 4
    CONFLICT = 5
    RETRYABLE = 6
    MISMATCH = 7
    REFUSED = 8
    WAIT_TIMEOUT = 124
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class CodeEntry:
    """What one stable code means to each surface."""

    http_status: int
    exit_code: ExitCode
    meaning: str
    retryable: bool = False


def _source(meaning: str) -> CodeEntry:
    return CodeEntry(422, ExitCode.SOURCE, meaning)


CODES: Mapping[str, CodeEntry] = {
    # Requests: the caller can fix them.
    "request.invalid": CodeEntry(422, ExitCode.USAGE, "A field of the request is wrong."),
    "request.unknown_scheme": CodeEntry(422, ExitCode.USAGE, "No storage backend serves this URL scheme."),
    "request.target_exists": CodeEntry(409, ExitCode.CONFLICT, "The target holds something else already."),
    "request.target_busy": CodeEntry(409, ExitCode.CONFLICT, "Another conversion owns the target now."),
    "request.overlap": CodeEntry(422, ExitCode.USAGE, "Source and target overlap."),
    "request.budget_too_small": CodeEntry(422, ExitCode.REFUSED, "No plan fits the memory limit."),
    "request.unsatisfiable": CodeEntry(422, ExitCode.REFUSED, "The target cannot hold this source."),
    "request.root_forbidden": CodeEntry(403, ExitCode.AUTH, "The URL is outside the service's roots."),
    "request.unknown_profile": CodeEntry(422, ExitCode.USAGE, "No storage profile has this name."),
    "request.idempotency_conflict": CodeEntry(409, ExitCode.CONFLICT, "A request with this key is in flight."),
    "request.idempotency_mismatch": CodeEntry(422, ExitCode.CONFLICT, "The key was used for another request."),
    "request.unauthorized": CodeEntry(401, ExitCode.AUTH, "The token is missing or not valid."),
    "request.not_found": CodeEntry(404, ExitCode.SOURCE, "The service has no such resource."),
    "request.engine_missing": CodeEntry(422, ExitCode.USAGE, "Local work needs the `worker` extra."),
    # Sources: the owner of the checkpoint can fix them.
    "source.not_found": _source("Nothing is there."),
    "source.unknown_kind": _source("Not a file or directory of a known kind."),
    "source.unsupported": CodeEntry(422, ExitCode.REFUSED, "A known kind that is not supported."),
    "source.unsupported_version": CodeEntry(422, ExitCode.REFUSED, "A file shape of an unsupported version."),
    "source.too_slow": CodeEntry(422, ExitCode.REFUSED, "Planning takes longer than the worker allows."),
    "source.changed": CodeEntry(409, ExitCode.RETRYABLE, "An object changed while it was read.", True),
    "checkpoint.incomplete": _source("Files or parts of tensors are missing."),
    "checkpoint.bad_latest": _source("`latest` does not name a checkpoint."),
    "checkpoint.ambiguous": _source("Two things claim the same name."),
    "checkpoint.mixed": _source("Files of different checkpoints are mixed."),
    "checkpoint.coverage": _source("The parts of a tensor do not add up."),
    "checkpoint.malformed": _source("Metadata of the checkpoint has the wrong shape."),
    "checkpoint.too_large": _source("Declared sizes pass the limits."),
    "checkpoint.bad_index": _source("An index of weights files is not what the files hold."),
    "checkpoint.unexplained": CodeEntry(422, ExitCode.REFUSED, "No rule says how parameters are cut."),
    "checkpoint.disagreement": _source("Copies that must agree do not."),
    "rules.invalid": _source("Rules that cannot be read."),
    "rules.ambiguous": _source("Two rules claim one parameter."),
    "rules.contradiction": _source("A rule does not fit the parameter's parts."),
    "name.invalid": _source("A name that must not become a path."),
    "pickle.too_large": _source("The pickle passes the size limit."),
    "pickle.too_much_work": _source("The pickle passes the opcode limit."),
    "pickle.too_much_memory": _source("The pickle passes the memory limit."),
    "pickle.bad_memo": _source("Bad memo index."),
    "pickle.too_deep": _source("Nested too deep."),
    "pickle.truncated": _source("The pickle ends early."),
    "pickle.malformed": _source("Not a well-formed pickle."),
    "pickle.bad_number": _source("A number that no writer writes."),
    "pickle.bad_frame": _source("Bad framing."),
    "pickle.trailing": _source("Bytes after the end of the pickle."),
    "pickle.forbidden_global": _source("A class or function that is not on the allow-list."),
    "pickle.forbidden_call": _source("A call that is not on the allow-list."),
    "pickle.forbidden_build": _source("State for an object that may not have any."),
    "pickle.ext_forbidden": _source("Extension registry codes are never read."),
    "pickle.bad_persistent_id": _source("Bad persistent id."),
    "pickle.type_confusion": _source("An operation on the wrong kind of value."),
    "pickle.unsupported_op": _source("Unknown or out-of-band opcode."),
    "pickle.ambiguous_key": _source("Dictionary keys that Python would merge."),
    "tensor.bad_extent": _source("A tensor reaches outside its storage."),
    "tensor.amplification": _source("Tensors repeat a storage far beyond its size."),
    "tensor.overflow": CodeEntry(422, ExitCode.REFUSED, "Elements are too large for the type that was asked for."),
    "tensor.unsupported": CodeEntry(422, ExitCode.REFUSED, "A tensor kind that is not supported."),
    "zip.bad_directory": _source("The zip directory does not describe the file."),
    "zip.bad_record": _source("A record of the archive is not what torch writes."),
    "zip.ambiguous": _source("Readers would disagree about this archive."),
    "zip.overlap": _source("Records overlap."),
    "zip.bomb": _source("A record expands beyond its limits."),
    "zip.unsupported": _source("A zip feature that torch never writes."),
    "zip.too_many": _source("Too many records."),
    "zip.crc": _source("A record does not match its CRC."),
    "safetensors.header_size": _source("The safetensors header is longer than the file or the format allows."),
    "safetensors.header": _source("The safetensors header is not what the format says."),
    "safetensors.offsets": _source("Offsets of a tensor do not fit its type and shape."),
    "safetensors.overlap": _source("Tensors of a safetensors file overlap."),
    "safetensors.coverage": _source("Bytes of a safetensors file belong to no tensor, or are missing."),
    # Storage: the operator can fix them.
    "storage.unavailable": CodeEntry(503, ExitCode.RETRYABLE, "The store timed out or throttled.", True),
    "storage.denied": CodeEntry(403, ExitCode.AUTH, "The store refused these credentials."),
    "storage.no_bucket": CodeEntry(422, ExitCode.SOURCE, "The bucket does not exist."),
    "storage.no_space": CodeEntry(507, ExitCode.REFUSED, "The store is full."),
    "storage.no_room": CodeEntry(507, ExitCode.REFUSED, "The target needs more bytes than are free."),
    "storage.protocol": CodeEntry(502, ExitCode.FAILED, "The store answered against its protocol."),
    "storage.conflict": CodeEntry(409, ExitCode.CONFLICT, "Someone else wrote the object first."),
    # Our output.
    "integrity.mismatch": CodeEntry(500, ExitCode.MISMATCH, "What was written is not what was planned."),
    "integrity.no_manifest": CodeEntry(422, ExitCode.SOURCE, "No `reshard.json`: not an output of reshard."),
    "integrity.journal": CodeEntry(500, ExitCode.MISMATCH, "The journal does not belong to this plan."),
    # The life of a job.
    "job.cancelled": CodeEntry(409, ExitCode.INTERRUPTED, "The job was cancelled."),
    "job.lost": CodeEntry(503, ExitCode.RETRYABLE, "The worker died; the job can be retried.", True),
    "job.attempts_exhausted": CodeEntry(500, ExitCode.FAILED, "Every allowed attempt was lost."),
    "job.not_finished": CodeEntry(409, ExitCode.CONFLICT, "The job has no result yet."),
    "job.finished": CodeEntry(409, ExitCode.CONFLICT, "The job has ended already."),
    "job.wait_timeout": CodeEntry(504, ExitCode.WAIT_TIMEOUT, "The job did not end in time."),
    "service.unavailable": CodeEntry(503, ExitCode.RETRYABLE, "The service cannot be reached.", True),
    "service.port_in_use": CodeEntry(409, ExitCode.CONFLICT, "Another process listens on the port."),
    "service.protocol": CodeEntry(502, ExitCode.FAILED, "The service answered against its schema."),
    "service.wrong_host": CodeEntry(503, ExitCode.CONFLICT, "The job database belongs to another host."),
    "service.schema_version": CodeEntry(503, ExitCode.FAILED, "The job database has another schema version."),
    "internal.error": CodeEntry(500, ExitCode.FAILED, "A bug in reshard; please report it."),
}


SEE_HELP = "see the command's --help"
"""Stands for the one command that was run; the command line puts it in."""
_DEFAULT_FIXES: Mapping[str, str] = {
    "request": SEE_HELP,
    "source": "copy the checkpoint again from where it was written, then: reshard inspect SRC",
    "checkpoint": "copy the checkpoint again from where it was written, then: reshard inspect SRC",
    "rules": "see docs/rules.md",
    "name": "save the checkpoint again without this name",
    "pickle": "copy the file again; if it still fails, do not load it with torch.load either",
    "tensor": "copy the file again; if it still fails, do not load it with torch.load either",
    "zip": "copy the file again; if it still fails, do not load it with torch.load either",
    "safetensors": "copy the file again",
    "storage": "run the same command again: it resumes",
    "storage.no_space": "free space there, or have the quota raised, then run the same command again: it resumes",
    "integrity": "run the same command again with --overwrite; if it fails again, please report it",
    "job": "reshard jobs list",
    "service": "check RESHARD_URL and run the same command again",
    "internal": "please report it with the output of the command",
}
"""What to do where the place that raised the error knows nothing better, by code or by branch."""


def printable(text: object, *, max_chars: int = 256) -> str:
    """`text` as one safe line: control, bidi and surrogate characters escaped, length cut.

    Names in errors come from checkpoints; a log line or a terminal must not obey them.
    """
    raw = text if isinstance(text, str) else repr(text)
    cut = raw[:max_chars]
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in cut)
    return safe if len(raw) <= max_chars else f"{safe}... ({len(raw)} characters)"


def as_text(value: Any) -> Any:
    """A JSON value that UTF-8 can spell: halves of surrogate pairs, which names of files may have, are escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {as_text(name): as_text(part) for name, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [as_text(part) for part in cast("list[Any]", value)]
    return value


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first of some names, safe to show, and whether there are more."""
    return ", ".join(printable(n) for n in names[:most]) + (", ..." if len(names) > most else "")


def format_size(size_bytes: float) -> str:
    """A size in binary units, three digits."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


class ReshardError(Exception):
    """Root of all errors that a user meets.

    Attributes:
        code: Stable code, a key of `CODES`.
        message: What happened, with the numbers.
        fix: What the user can do, pasteable where possible.
        details: Machine-readable facts (JSON values).
    """

    def __init__(self, code: str, message: str, *, fix: str = "", details: Mapping[str, Any] | None = None) -> None:
        if code not in CODES:
            raise AssertionError(f"error code {code!r} is not in the table")
        super().__init__(message)
        self.code = code
        self.message = message[:MAX_TEXT_CHARS]
        self.fix = (fix or _DEFAULT_FIXES.get(code) or _DEFAULT_FIXES[code.partition(".")[0]])[:MAX_TEXT_CHARS]
        self.details: dict[str, Any] = dict(details or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """How the error goes to another process: ranks tell one another, and pools of processes do."""
        return _again, (type(self), self.code, self.message, self.fix, self.details)

    @property
    def entry(self) -> CodeEntry:
        """The row of the table for this code."""
        return CODES[self.code]

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of a command that ends with this error."""
        return self.entry.exit_code

    @property
    def retryable(self) -> bool:
        """Whether the same request can succeed later without a change."""
        return self.entry.retryable

    def to_problem(self) -> dict[str, Any]:
        """The error as an RFC 9457 problem object (JSON values only)."""
        problem = {
            "type": f"urn:reshard:error:{self.code}",
            "title": self.entry.meaning,
            "status": self.entry.http_status,
            "detail": self.message,
            "code": self.code,
            "fix": self.fix,
            "retryable": self.retryable,
            "details": self.details,
        }
        return as_text(problem)

    def __str__(self) -> str:
        """Message with its code, one line."""
        return f"{self.code}: {self.message}"


def _again(kind: type[ReshardError], code: str, message: str, fix: str, details: dict[str, Any]) -> ReshardError:
    error = kind.__new__(kind)
    # Not by its own constructor, whose arguments are its own.
    ReshardError.__init__(error, code, message, fix=fix, details=details)
    return error


class RequestError(ReshardError):
    """The caller asked for something that cannot be."""


class SourceError(ReshardError):
    """The checkpoint is missing, damaged, hostile or of an unsupported kind."""


class StorageError(ReshardError):
    """The storage refused or failed."""


class IntegrityError(ReshardError):
    """Our output does not verify. Never retried blindly."""


class JobError(ReshardError):
    """A job ended without a result, or the service could not be used."""


_BRANCHES: Mapping[str, type[ReshardError]] = {
    "request": RequestError,
    "source": SourceError,
    "checkpoint": SourceError,
    "rules": SourceError,
    "name": SourceError,
    "pickle": SourceError,
    "tensor": SourceError,
    "zip": SourceError,
    "safetensors": SourceError,
    "storage": StorageError,
    "integrity": IntegrityError,
    "job": JobError,
    "service": JobError,
    "internal": JobError,
}


def class_of(code: str) -> type[ReshardError]:
    """The class whose branch owns `code`."""
    return _BRANCHES[code.split(".", 1)[0]]


def from_problem(problem: Mapping[str, Any]) -> ReshardError:
    """The typed error that `ReshardError.to_problem` described.

    A code that this version does not know becomes `service.protocol`, so that an older client keeps
    the text of a newer service's error.
    """
    code = str(problem.get("code", ""))
    details = problem.get("details")
    facts: dict[str, Any] = dict(details) if isinstance(details, Mapping) else {}  # pyright: ignore[reportUnknownArgumentType]
    if code not in CODES:
        facts["problem"] = {k: problem[k] for k in ("title", "status", "code", "detail") if k in problem}
        text = str(problem.get("detail") or problem.get("title") or "the service sent an unknown error")
        return JobError("service.protocol", text, fix="upgrade the client", details=facts)
    return class_of(code)(code, str(problem.get("detail", "")), fix=str(problem.get("fix", "")), details=facts)
