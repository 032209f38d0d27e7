"""Typed errors in place of botocore's exceptions.

Source: Amazon S3 API reference (error codes); botocore 1.43 (exceptions).
"""

# botocore has no type information: its results are checked where they are used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import http.client
from collections.abc import Generator
from contextlib import contextmanager

import botocore.exceptions
import botocore.parsers

from reshard.errors import ReshardError, SourceError, StorageError, printable

_RAISED = (
    botocore.exceptions.ClientError,
    botocore.exceptions.BotoCoreError,
    botocore.parsers.ResponseParserError,
    http.client.HTTPException,
    OSError,
    RecursionError,
)
"""Exceptions of botocore. The last one means that a redirect leads to itself (1.43, `utils.S3RegionRedirectorv2`)."""
_DENIED = {
    "403",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "Forbidden",
    "AllAccessDisabled",
}
_WRONG_TIME = {"RequestTimeTooSkewed", "RequestExpired"}
_NOT_FOUND = {"404", "NoSuchKey", "NotFound"}
_PASSING = {"SlowDown", "RequestTimeout", "Throttling", "BadDigest", "XAmzContentChecksumMismatch"}
"""Codes of transient failures. Two of them mean that the store received other bytes than were sent."""
_FULL = {"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage"}
"""Codes by which MinIO, Ceph and other stores report that they are full. Amazon S3 has no such code."""
_CONFLICT = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}


def _typed(error: BaseException, path: str) -> ReshardError:
    """The typed error for an exception of botocore."""
    where = f"s3://{printable(path)}"
    if isinstance(error, botocore.exceptions.ClientError):
        facts = error.response.get("Error", {})
        code = str(facts.get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        text = f"{where}: {printable(code)}: {printable(str(facts.get('Message', '')))}"
        if code == "NoSuchUpload":
            return StorageError(
                "storage.conflict",
                f"{where}: the upload no longer exists: another conversion took over the target",
                fix="wait until the other conversion has ended, then run the same command again",
            )
        if code == "NoSuchBucket":
            bucket = path.partition("/")[0]
            return StorageError(
                "storage.no_bucket", f"bucket {printable(bucket)!r} does not exist", fix="check the bucket's name"
            )
        if code in _DENIED or status in (401, 403):
            return _denied(code, text)
        if code in _NOT_FOUND or status == 404:
            return SourceError(
                "source.not_found", f"{where} does not exist", fix="correct the URL: a key is compared letter by letter"
            )
        if code in _CONFLICT:
            return StorageError(
                "storage.conflict", f"{where} already exists", fix="choose another target, or --overwrite"
            )
        return _failed(code, status, text)
    if isinstance(error, botocore.exceptions.NoCredentialsError | botocore.exceptions.PartialCredentialsError):
        return StorageError(
            "storage.denied",
            f"{where}: no credentials",
            fix="export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..., or name a storage profile; to see what is "
            "found: reshard doctor",
        )
    if isinstance(error, botocore.parsers.ResponseParserError | botocore.exceptions.PaginationError):
        return StorageError("storage.protocol", f"{where}: the store's reply is malformed")
    if isinstance(error, RecursionError):
        return StorageError("storage.protocol", f"{where}: the store redirects without end")
    return StorageError(
        "storage.unavailable",
        f"{where}: {type(error).__name__}: {printable(str(error))}",
        fix="check AWS_ENDPOINT_URL and the network",
    )


def _denied(code: str, text: str) -> StorageError:
    if code in _WRONG_TIME:
        return StorageError("storage.denied", text, fix="set this host's clock: it differs from the store's by minutes")
    return StorageError(
        "storage.denied", text, fix="check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a --profile"
    )


def _failed(code: str, status: int, text: str) -> StorageError:
    if code in _FULL or status == 507:
        return StorageError("storage.no_space", text)
    if status >= 500 or code in _PASSING:
        return StorageError("storage.unavailable", text, fix="run the same command again: it resumes")
    return StorageError("storage.protocol", text)


@contextmanager
def translated(path: str) -> Generator[None]:
    """Turn exceptions of botocore into typed errors that name the object."""
    try:
        yield
    except _RAISED as error:
        raise _typed(error, path) from error
