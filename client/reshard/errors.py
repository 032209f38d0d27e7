"""Typed errors with stable codes: the one table that the CLI, the API and the SDK share.

The class names *who can fix the problem*, and the code names *the problem*. The table below gives each code its
HTTP status and exit code, and says if a retry can help::

    ReshardError
    |-- RequestError     the caller
    |-- SourceError      the owner of the checkpoint
    |-- StorageError     the operator of the storage (or of the service)
    |-- IntegrityError   us: what we wrote does not verify
    `-- JobError         the life of a job (cancelled, lost, timed out)
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, quote_plus, unquote

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
    """The HTTP status, exit code, meaning and retry rule of one error code."""

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
    "request.target_exists": CodeEntry(
        409,
        ExitCode.CONFLICT,
        "The target exists and is not the result of this conversion, or `latest` beside it names a later step.",
    ),
    "request.plan_changed": CodeEntry(
        409, ExitCode.CONFLICT, "The source, or the release, is not the one that the saved plan was made with."
    ),
    "request.target_busy": CodeEntry(409, ExitCode.CONFLICT, "Another conversion is writing the target."),
    "request.overlap": CodeEntry(422, ExitCode.USAGE, "Source and target overlap."),
    "request.run_directory": CodeEntry(
        422, ExitCode.USAGE, "The source is the directory of a run, and not one checkpoint."
    ),
    "request.budget_too_small": CodeEntry(422, ExitCode.REFUSED, "No plan fits the memory limit."),
    "request.above_maximum": CodeEntry(
        422, ExitCode.REFUSED, "The request asks for more memory or threads than the operator allows."
    ),
    "request.unsatisfiable": CodeEntry(422, ExitCode.REFUSED, "The source cannot be converted to this target."),
    "request.root_forbidden": CodeEntry(403, ExitCode.AUTH, "The URL is outside the service's roots."),
    "request.unknown_profile": CodeEntry(422, ExitCode.USAGE, "No storage profile has this name."),
    "request.idempotency_conflict": CodeEntry(
        409, ExitCode.RETRYABLE, "The first request with this idempotency key, or job id, is still looked at.", True
    ),
    "request.idempotency_mismatch": CodeEntry(
        422, ExitCode.CONFLICT, "The idempotency key was used for another request."
    ),
    "request.job_exists": CodeEntry(409, ExitCode.CONFLICT, "A job with this id, made by another request, exists."),
    "request.unauthorized": CodeEntry(401, ExitCode.AUTH, "The token is missing or not valid."),
    "request.forbidden": CodeEntry(403, ExitCode.AUTH, "The token has no right to do this."),
    "request.quota_jobs": CodeEntry(429, ExitCode.RETRYABLE, "The tenant has too many waiting jobs.", True),
    "request.quota_bytes": CodeEntry(
        429, ExitCode.REFUSED, "The tenant's conversions of the last 24 hours write too many bytes."
    ),
    "request.tenant_exists": CodeEntry(409, ExitCode.CONFLICT, "A tenant with this name exists."),
    "request.tenant_busy": CodeEntry(409, ExitCode.CONFLICT, "The tenant has jobs whose files a worker must remove."),
    "request.too_many_tokens": CodeEntry(429, ExitCode.AUTH, "Too many wrong tokens came from one address."),
    "request.wrong_host": CodeEntry(421, ExitCode.AUTH, "The service is not served under the name in the URL."),
    "request.address_forbidden": CodeEntry(403, ExitCode.AUTH, "The service sends no webhooks to this address."),
    "request.not_found": CodeEntry(404, ExitCode.SOURCE, "The service has no such resource."),
    "request.gone": CodeEntry(410, ExitCode.SOURCE, "The layout has expired, or was removed."),
    "request.range": CodeEntry(416, ExitCode.USAGE, "The file has none of the bytes, or the ranges are too many."),
    "request.precondition": CodeEntry(412, ExitCode.CONFLICT, "The file is not the one that `If-Match` names."),
    "request.engine_missing": CodeEntry(422, ExitCode.USAGE, "Conversions on this machine need the `worker` extra."),
    "request.bad_format": CodeEntry(422, ExitCode.USAGE, "A format of another package cannot be used."),
    # Sources: the owner of the checkpoint can fix them.
    "source.not_found": _source("Nothing exists at the source's path or URL."),
    "source.unknown_kind": _source("The source is not a file or directory of a known kind."),
    "source.unsupported": CodeEntry(422, ExitCode.REFUSED, "The source is of a known kind that is not supported."),
    "source.unsupported_version": CodeEntry(
        422, ExitCode.REFUSED, "The file was written by a version that is not supported."
    ),
    "source.too_slow": CodeEntry(422, ExitCode.REFUSED, "Planning takes longer than the worker allows."),
    "source.changed": CodeEntry(409, ExitCode.RETRYABLE, "An object changed while it was read.", True),
    "checkpoint.incomplete": _source("Files or parts of tensors are missing."),
    "checkpoint.bad_latest": _source("`latest` does not name a checkpoint."),
    "checkpoint.ambiguous": _source("The files leave several ways to read them: the user must choose."),
    "checkpoint.mixed": _source("Files of different checkpoints are mixed."),
    "checkpoint.coverage": _source("The parts of a tensor leave gaps or overlap."),
    "checkpoint.malformed": _source("Metadata of the checkpoint does not have the expected structure."),
    "checkpoint.too_large": _source("Declared sizes exceed the limits."),
    "checkpoint.bad_index": _source("An index of weights files does not match the files."),
    "checkpoint.unexplained": CodeEntry(
        422, ExitCode.REFUSED, "No rule says how tensor parallelism cuts the parameters."
    ),
    "checkpoint.disagreement": _source("Copies of a value that must be equal differ."),
    "checkpoint.damaged": _source("Optimizer states are not those of the weights beside them."),
    "rules.invalid": _source("The rules file cannot be read."),
    "rules.ambiguous": _source("Two rules match one parameter."),
    "rules.contradiction": _source("A rule does not fit the parameter's parts."),
    "name.invalid": _source("A name in the checkpoint is not safe as a file name."),
    "pickle.too_large": _source("The pickle exceeds the size limit."),
    "pickle.too_much_work": _source("The pickle exceeds the opcode limit."),
    "pickle.too_much_memory": _source("The pickle exceeds the memory limit."),
    "pickle.bad_memo": _source("The pickle has a bad memo index."),
    "pickle.too_deep": _source("The pickle is nested too deep."),
    "pickle.truncated": _source("The pickle ends early."),
    "pickle.malformed": _source("The file is not a well-formed pickle."),
    "pickle.bad_number": _source("The pickle has a number in a form that no known writer produces."),
    "pickle.bad_frame": _source("The pickle has bad framing."),
    "pickle.trailing": _source("Bytes follow the end of the pickle."),
    "pickle.forbidden_global": _source("The pickle names a class or function that is not on the allow-list."),
    "pickle.forbidden_call": _source("The pickle makes a call that is not on the allow-list."),
    "pickle.forbidden_build": _source("The pickle sets state on an object that may not have any."),
    "pickle.ext_forbidden": _source("The pickle uses extension registry codes, which are never read."),
    "pickle.bad_persistent_id": _source("The pickle has a bad persistent id."),
    "pickle.type_confusion": _source("The pickle applies an operation to a value of the wrong kind."),
    "pickle.unsupported_op": _source("The pickle has an unknown or out-of-band opcode."),
    "pickle.ambiguous_key": _source("The pickle has dictionary keys that Python would merge."),
    "tensor.bad_extent": _source("A tensor reaches outside its storage."),
    "tensor.amplification": _source("Tensors expand a storage far beyond its size."),
    "tensor.overflow": CodeEntry(422, ExitCode.REFUSED, "Elements are too large for the requested type."),
    "tensor.unsupported": CodeEntry(422, ExitCode.REFUSED, "The tensor is of a kind that is not supported."),
    "zip.bad_directory": _source("The zip directory does not describe the file."),
    "zip.bad_record": _source("A record of the archive is not what torch writes."),
    "zip.ambiguous": _source("Different zip readers would read different contents from the archive."),
    "zip.overlap": _source("Records of the archive overlap."),
    "zip.bomb": _source("A record expands beyond its limits."),
    "zip.unsupported": _source("The archive uses a zip feature that torch never writes."),
    "zip.too_many": _source("The archive has too many records."),
    "zip.crc": _source("A record does not match its CRC."),
    "safetensors.header_size": _source("The safetensors header is longer than the file or the format allows."),
    "safetensors.header": _source("The safetensors header does not follow the format."),
    "safetensors.offsets": _source("Offsets of a tensor do not fit its type and shape."),
    "safetensors.overlap": _source("Tensors of a safetensors file overlap."),
    "safetensors.coverage": _source("Bytes of a safetensors file belong to no tensor, or are missing."),
    # Storage: the operator can fix them.
    "storage.unavailable": CodeEntry(503, ExitCode.RETRYABLE, "The store timed out or throttled.", True),
    "storage.denied": CodeEntry(403, ExitCode.AUTH, "The store refused these credentials."),
    "storage.no_bucket": CodeEntry(422, ExitCode.SOURCE, "The bucket does not exist."),
    "storage.no_space": CodeEntry(507, ExitCode.REFUSED, "The store is full."),
    "storage.no_room": CodeEntry(507, ExitCode.REFUSED, "The target needs more bytes than are free."),
    "storage.protocol": CodeEntry(502, ExitCode.FAILED, "The store's answer violates its protocol."),
    "storage.no_fuse": CodeEntry(422, ExitCode.REFUSED, "This machine, or this process, cannot mount with FUSE."),
    "storage.conflict": CodeEntry(409, ExitCode.CONFLICT, "Another writer wrote the object first."),
    # Integrity: the output does not verify.
    "integrity.mismatch": CodeEntry(500, ExitCode.MISMATCH, "The output does not match the plan."),
    "integrity.no_manifest": CodeEntry(
        422, ExitCode.SOURCE, "The directory has no `reshard.json`, so it is not an output of reshard."
    ),
    "integrity.signature": CodeEntry(422, ExitCode.MISMATCH, "A signed statement, or its signature, was changed."),
    "integrity.wrong_key": CodeEntry(422, ExitCode.MISMATCH, "None of the given keys signed the statement."),
    "integrity.sealed": CodeEntry(422, ExitCode.MISMATCH, "The checkpoint is not the one that was sealed."),
    "integrity.chain": CodeEntry(
        422, ExitCode.MISMATCH, "A statement about a source is missing, or is about another source."
    ),
    "integrity.journal": CodeEntry(500, ExitCode.MISMATCH, "The journal does not belong to this plan."),
    # The life of a job.
    "job.cancelled": CodeEntry(409, ExitCode.INTERRUPTED, "The job was cancelled."),
    "job.failed": CodeEntry(409, ExitCode.FAILED, "The job failed, so it has no result; `details.error` says why."),
    "job.lost": CodeEntry(503, ExitCode.RETRYABLE, "The worker was lost; the job can be retried.", True),
    "job.attempts_exhausted": CodeEntry(500, ExitCode.FAILED, "The job lost its worker in every allowed attempt."),
    "job.not_finished": CodeEntry(409, ExitCode.CONFLICT, "The job has no result yet."),
    "job.finished": CodeEntry(409, ExitCode.CONFLICT, "The job has ended already."),
    "job.wait_timeout": CodeEntry(504, ExitCode.WAIT_TIMEOUT, "The job did not end in time."),
    "job.host_exhausted": CodeEntry(
        503, ExitCode.RETRYABLE, "The host allows no more threads, processes or open files.", True
    ),
    "job.peer_failed": CodeEntry(503, ExitCode.FAILED, "Another process of the training run failed, or is gone."),
    "service.unavailable": CodeEntry(503, ExitCode.RETRYABLE, "The service cannot be reached.", True),
    "service.busy": CodeEntry(503, ExitCode.RETRYABLE, "All engine processes of the service are in use.", True),
    "service.port_in_use": CodeEntry(409, ExitCode.CONFLICT, "Another process listens on the port."),
    "service.protocol": CodeEntry(502, ExitCode.FAILED, "The service's answer violates its schema."),
    "service.wrong_host": CodeEntry(503, ExitCode.CONFLICT, "The job database belongs to another host."),
    "service.schema_behind": CodeEntry(503, ExitCode.FAILED, "The job database needs an upgrade."),
    "service.schema_version": CodeEntry(
        503, ExitCode.FAILED, "A later release has upgraded the job database, or no release of reshard made it."
    ),
    "internal.error": CodeEntry(500, ExitCode.FAILED, "A bug in reshard; please report it."),
}


_COPY_AGAIN = "copy the checkpoint again from where it was written, then: reshard inspect SRC"
SEE_HELP = "see the command's --help"
"""A placeholder; the command line replaces it by the help of the command that was run."""
_DEFAULT_FIXES: Mapping[str, str] = {
    "request": SEE_HELP,
    "source": _COPY_AGAIN,
    "source.unsupported": "this release does not read it; please report it with the program and version that wrote it",
    "source.unsupported_version": "save it with a version that docs/supported.md lists, or report the version",
    "checkpoint": _COPY_AGAIN,
    "checkpoint.bad_latest": "write the name of the checkpoint's directory into it, or name that directory itself",
    "checkpoint.ambiguous": "keep one of the two and move the other away; if one file holds both, save it again",
    "checkpoint.malformed": f"{_COPY_AGAIN}; if it fails again, report the version of the program that wrote it",
    "checkpoint.mixed": "copy one whole save into an empty directory, then: reshard inspect SRC",
    "checkpoint.too_large": f"{_COPY_AGAIN}; if the size is right, please report it: the limit is reshard's own",
    "rules": "correct them as in docs/rules.md, or give others: --rules FILE",
    "name": "save the checkpoint again without this name",
    "pickle": "copy the file again; if it still fails, do not load it with torch.load either",
    "tensor": "copy the file again; if it still fails, do not load it with torch.load either",
    "tensor.unsupported": "the file may be sound: save these tensors in another type, or report the type",
    "zip": "copy the file again; if it still fails, do not load it with torch.load either",
    "safetensors": "copy the file again",
    "storage": "run the same command again: it resumes",
    "storage.conflict": "wait until the other conversion has ended, then run the same command again",
    "storage.protocol": "run the same command again; if it fails again, report the name and version of the store",
    "storage.no_space": "free space there, or have the quota raised, then run the same command again: it resumes",
    "storage.no_fuse": "without a mount, `reshard convert` writes the files with the same options, and "
    "reshard.open_layout reads them in Python",
    "integrity": "run the same command again with --overwrite; if it fails again, please report it",
    "job": "reshard jobs list",
    "job.lost": "the service tries the job again, as often as it may; to see it: reshard jobs list",
    "service.busy": "send the request again after `Retry-After`, or ask the operator to raise RESHARD_LAYOUT_ENGINES",
    "service": "check RESHARD_URL and run the same command again",
    "internal": "please report it with the output of the command",
}
"""The fix of an error that was raised without one, by code or by branch."""


# Secrets of this process: no error, log line or answer shows them.
#
# Clients of stores quote requests in their exceptions: URLs with signatures and passwords. A store may quote the
# headers that it received. Errors reach people who must not know the operator's credentials, so every `ReshardError`
# hides them.

_HIDDEN = "[hidden]"
PROFILES_VARIABLE = "RESHARD_PROFILES"
"""The environment variable with the path of the operator's storage profiles."""
_SECRET_NAME = re.compile(
    r"(?:token|secret|password|passphrase|_pass|_pwd|_auth|_keys?|connection_string)$", re.IGNORECASE
)
_KEY_OR_FILE = re.compile(r"SIGNING_(?:PUBLIC_)?KEY$")
"""Variables whose values are keys or paths of their files; an error that hides the path of a file helps nobody."""
_PASSWORD_IN_URL = re.compile(r"://[^/@\s:]*:([^/\s]+)@")
_TOKEN_IN_URL = re.compile(r"(?i:https?)://([^/\s:?#]+):?@")
"""A user without a password: in URLs of HTTP a token, elsewhere a container (abfs://NAME@HOST) or a name."""
_USER_IN_URL = re.compile(r"(?:://[^/\s:@\"'<>]*:[^/\s\"'<>]*|(?i:(?<=http)|(?<=https))://[^/\s\"'<>?#]+)@")
_PARAMETER = re.compile(r"[?&;]([\w.~%-]+)=([^&;#\s\"'<>]+)")
_SECRET_PARAMETER = r"[\w.~%-]*(?:key|token|secret|password|passwd|pwd|signature|credential|auth)|sig|pass"  # noqa: S105 - names
_IN_CONNECTION_STRING = re.compile(r"(?i)(?:^|;)\s*(?:AccountKey|SharedAccessSignature)=([^;]+)")
_SIGNED = re.compile(
    r"(?i:\b(X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)[\"']?\s?[=:]\s?[\"']?))[^&\s\"'<>,]+"
    r"|(?i:\b((?:sig|signature|token|access_token|accountkey)=))[^&\s\"'<>]+"
    rf"|(?i:([?&](?!page_token|continuation-token)(?:{_SECRET_PARAMETER})=))[^&\s\"'<>]+"
    r"|((?i:bearer)\s+)[^\s\"'<>,]{8,}"
    # English words follow `basic` as well; a credential has a digit, a capital or a sign.
    r"|((?i:basic)\s+)(?=[^\s\"'<>,]*[A-Z0-9=])[^\s\"'<>,]{6,}"
)
_LEAST_SECRET_CHARS = 8
"""A shorter value would hide words that have nothing to do with it."""
_concealed: set[str] = set()


def conceal(secret: str | None) -> None:
    """Hide a secret of this process that is not in its environment, such as a token from a file of its user."""
    if secret is not None and len(secret) >= _LEAST_SECRET_CHARS:
        _concealed.add(secret)


def without_secrets(text: str) -> str:
    """`text` with `[hidden]` in place of passwords, signatures, and secrets of this process in any usual encoding."""
    for form in _forms(tuple(os.environ.items()), _profiles_version(os.environ), tuple(_concealed)):
        text = text.replace(form, _HIDDEN)
    text = _USER_IN_URL.sub(f"://{_HIDDEN}@", text)
    return _SIGNED.sub(lambda found: f"{found[found.lastindex or 0]}{_HIDDEN}", text)


def secrets_of(env: Mapping[str, str]) -> set[str]:
    """The secrets in the environment of a process, in its URLs, and in the file of storage profiles."""
    found = {value for name, value in env.items() if _SECRET_NAME.search(name) and not _KEY_OR_FILE.search(name)}
    for name, value in env.items():
        if _KEY_OR_FILE.search(name) and not os.path.isfile(value):
            # A program may quote the lines between the headers, or one of them.
            found |= {value, value.strip(), *(line for line in value.splitlines() if not line.startswith("-----"))}
        found.update(_within(value))
        if name.endswith("_KEYS"):
            found.update(part.strip() for part in value.split(","))
        if name.startswith("OTEL_") and name.endswith("_HEADERS"):
            # `api-key=...,authorization=Bearer%20...`
            found.update(unquote(pair.partition("=")[2]).strip() for pair in value.split(","))
    found.update(_secrets_of_profiles(env))
    return {value for value in found if len(value) >= _LEAST_SECRET_CHARS}


def _within(value: str, *, any_parameter: bool = False) -> set[str]:
    """Passwords in URLs, secret parameters of URLs, and the keys of connection strings in a value of the environment.

    Args:
        value: The value.
        any_parameter: True if each parameter of a URL counts as secret, whatever its name is.
    """
    found = {*_PASSWORD_IN_URL.findall(value), *_TOKEN_IN_URL.findall(value)}
    for name, parameter in _PARAMETER.findall(f"?{value}" if value.startswith("sv=") else value):
        if any_parameter or re.fullmatch(_SECRET_PARAMETER, name, re.IGNORECASE):
            found.add(parameter)
    for part in _IN_CONNECTION_STRING.findall(value):
        found |= {part, *_within(f"?{part}")}
    return found


def _secrets_of_profiles(env: Mapping[str, str]) -> set[str]:
    try:
        path = Path(env.get(PROFILES_VARIABLE, ""))
        # To read a pipe would block.
        profiles = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        # Whoever opens a profile gets the reason.
        return set()
    return _secrets_of_table(profiles)


def _secrets_of_table(table: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in table.items():
        if isinstance(value, dict):
            found |= _secrets_of_table(cast("dict[str, Any]", value))
        elif isinstance(value, str):
            found |= {value} if _SECRET_NAME.search(name) else set()
            found |= _within(f"?{value}" if name == "sas_token" else value, any_parameter=name == "endpoint_url")
    return found


def _profiles_version(env: Mapping[str, str]) -> tuple[int, int, int]:
    """A value that changes when the file of profiles does."""
    try:
        status = os.stat(env.get(PROFILES_VARIABLE, ""))
    except (OSError, ValueError):
        return (0, 0, 0)
    return (status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _forms(
    env: tuple[tuple[str, str], ...], _profiles: tuple[int, int, int], concealed: Iterable[str]
) -> tuple[str, ...]:
    """The secrets as they are, and as JSON, URLs and `repr` write them; the longest first."""
    known = {plain for secret in {*secrets_of(dict(env)), *concealed} for plain in (secret, unquote(secret))}
    forms = {
        form
        for secret in known
        if len(secret) >= _LEAST_SECRET_CHARS
        for form in (
            secret,
            json.dumps(secret)[1:-1],
            repr(secret)[1:-1],
            # A variable of the environment may hold bytes that are not UTF-8.
            quote(secret, errors="surrogateescape"),
            quote(secret, safe="", errors="surrogateescape"),
            quote_plus(secret, errors="surrogateescape"),
            # Some clients write the escapes in lower case.
            re.sub(
                "%[0-9A-F]{2}",
                lambda escape: escape[0].lower(),
                quote(secret, safe="", errors="surrogateescape"),
            ),
        )
    }
    return tuple(sorted(forms, key=len, reverse=True))


def _hidden_in(value: Any) -> Any:
    """A JSON value whose texts show no secret."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {name: _hidden_in(part) for name, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_hidden_in(part) for part in cast("list[Any]", value)]
    return tuple(map(_hidden_in, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value


def printable(text: object, *, max_chars: int = 256) -> str:
    """`text` as one safe line: control, bidi and surrogate characters are escaped, and the length is limited.

    Names in errors come from checkpoints; a log line or a terminal must not obey them.
    """
    raw = text if isinstance(text, str) else repr(text)
    if len(raw) > max_chars:
        # The first half of a secret would not be recognised as one later.
        raw = without_secrets(raw)
    cut = raw[:max_chars]
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in cut)
    return safe if len(raw) <= max_chars else f"{safe}... ({len(raw)} characters)"


def as_text(value: Any) -> Any:
    """A JSON value that can be encoded as UTF-8: lone surrogates, which names of files may contain, are escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {as_text(name): as_text(part) for name, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [as_text(part) for part in cast("list[Any]", value)]
    return value


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, escaped and joined by commas, and `...` if there are more."""
    return ", ".join(printable(n) for n in names[:most]) + (", ..." if len(names) > most else "")


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 file`, `4,096 elements`, `2 entries` (whose plural is not the noun and an s)."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_size(size_bytes: float) -> str:
    """A size in binary units, with three digits."""
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
        message: The problem, with its numbers.
        fix: A step that the user can take, if possible as a command to paste.
        details: Machine-readable facts (JSON values).

    None of them shows a secret of this process (`without_secrets`).
    """

    def __init__(self, code: str, message: str, *, fix: str = "", details: Mapping[str, Any] | None = None) -> None:
        if code not in CODES:
            raise AssertionError(f"error code {code!r} is not in the table")
        message = without_secrets(message)
        super().__init__(message)
        self.code = code
        self.message = message[:MAX_TEXT_CHARS]
        self.fix = (without_secrets(fix) or _DEFAULT_FIXES.get(code) or _DEFAULT_FIXES[code.partition(".")[0]])[
            :MAX_TEXT_CHARS
        ]
        self.details: dict[str, Any] = _hidden_in(dict(details or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error, so that ranks and pools of processes can pass it to other processes."""
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
        """True if the same request can succeed later without a change."""
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
        """The code, the message and the fix, on one line."""
        return f"{self.code}: {self.message}; fix: {self.fix}"


def _again(kind: type[ReshardError], code: str, message: str, fix: str, details: dict[str, Any]) -> ReshardError:
    error = kind.__new__(kind)
    # The constructor of the subclass may have other arguments.
    ReshardError.__init__(error, code, message, fix=fix, details=details)
    return error


class RequestError(ReshardError):
    """The caller's request cannot be served."""


class SourceError(ReshardError):
    """The checkpoint is missing, damaged, hostile or of an unsupported kind."""


class StorageError(ReshardError):
    """The storage refused or failed."""


class IntegrityError(ReshardError):
    """The output does not verify. It is never retried automatically."""


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

    A code that this version does not know becomes `service.protocol`. An older client thus keeps the text of an error
    of a newer service.
    """
    code = str(problem.get("code", ""))
    details = problem.get("details")
    facts: dict[str, Any] = dict(details) if isinstance(details, Mapping) else {}  # pyright: ignore[reportUnknownArgumentType]
    if code not in CODES:
        facts["problem"] = {k: problem[k] for k in ("title", "status", "code", "detail") if k in problem}
        text = str(problem.get("detail") or problem.get("title") or "the service sent an unknown error")
        return JobError("service.protocol", text, fix="upgrade the client", details=facts)
    return class_of(code)(code, str(problem.get("detail", "")), fix=str(problem.get("fix", "")), details=facts)


# Codes of the operating system's errors: one table for what the client and the engine write and read.

_EXHAUSTED = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""The system's errors for processes, memory and descriptors that its limits do not allow."""


def exhaustion_of(error: BaseException) -> ReshardError | None:
    """The typed error for an exception that a limit of the host has caused; None for any other exception.

    Python raises a bare `RuntimeError` for a thread that the system does not start (CPython 3.11 to 3.13,
    `Modules/_threadmodule.c`), so the place where it was raised identifies it: `threading.Thread.start`.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    of_thread = isinstance(error, RuntimeError) and trace is not None
    if of_thread and trace is not None and trace.tb_frame.f_code is threading.Thread.start.__code__:
        reason = "another thread"
    elif isinstance(error, OSError) and error.errno in _EXHAUSTED:
        reason = f"it ({error.strerror})"
    else:
        return None
    return JobError(
        "job.host_exhausted",
        f"a limit of this host on processes, address space or open files does not allow {reason}",
        fix="raise it (ulimit -u, -v and -n, or pids.max of the container), or take fewer threads: --threads 2",
    )


def storage_code(error: OSError) -> str:
    """The code of an error of the file system: `storage.denied`, `storage.no_space` or `storage.unavailable`."""
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return "storage.denied"
    return "storage.no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "storage.unavailable"
