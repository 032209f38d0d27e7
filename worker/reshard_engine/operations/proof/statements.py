"""Signed statements about checkpoints: their facts, keys, envelopes and bundles.

A statement is an in-toto statement with the predicate of model-signing, which lists the SHA-256 of every file. Its
member `reshard` has the fingerprint of the state and, of a target, the conversion that made it from a source whose
statement it names. The statement is signed in a DSSE envelope, which is stored in a bundle of Sigstore.

Source: in-toto attestation framework 1.0 (`Statement/v1`); DSSE 1.0.2; Sigstore bundle 0.3; model-signing 1.1.1
`_signing/signing.py` (`Payload`: verifiers of version 1.0 of the predicate ignore members that they do not know).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from reshard.errors import IntegrityError, RequestError, SourceError, printable
from reshard.extras import install_line
from reshard.models.jobs import CastLoss, NotCarried
from reshard.models.reports import Signing
from reshard_engine.integrity.checksums import Sha256
from reshard_engine.operations.proof.fingerprint import component_digest, whole_digest
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import read_bytes

PASSPHRASE = "RESHARD_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable
"""The environment variable with the passphrase of an encrypted private key."""
_PEM = "-----BEGIN "
SIGNING_KEY = "RESHARD_SIGNING_KEY"
"""The environment variable with the key that signs all conversions of a process."""
_KINDS = ("Ed25519", "secp256r1", "secp384r1", "secp521r1")
_NEW_KEY = "openssl genpkey -algorithm ed25519 -out seal.key && openssl pkey -in seal.key -pubout -out seal.pub"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_PAYLOAD = "application/vnd.in-toto+json"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
NOT_SEALED = (".git", ".gitattributes", ".github", ".gitignore")
"""Names that verifiers of model-signing always leave out."""
MOST_BYTES = 1 << 30
VERSION = 1
_ALGORITHM = "sha256"
_AROUND_TEXT = " \t\r\n\ufeff\"'"
"""What copying, shells and files of settings leave around a text."""
_LEAST_KEY_CHARS = 40
"""Characters of the shortest private key in Base64, without the last ones."""
_KEY_WITHOUT_HEADER = re.compile(rf"(?:\w+:)?[\w+/=\\\s-]{{{_LEAST_KEY_CHARS},}}")
"""Base64 or hexadecimal digits. No name of a file with an extension looks like them."""
_MOST_NAME_CHARS = 255

Key = Any
"""A public key of securesystemslib, which exports no types."""
Signer = Any
"""A signer of securesystemslib."""


class _Fact(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SealedState(_Fact):
    """The fingerprint in a statement."""

    digest: Sha256
    components: dict[str, Sha256 | None]
    lines: dict[str, tuple[str, ...]]
    weights_only: bool = False


class Origin(_Fact):
    """The conversion that made a target, and the source that it was made from."""

    statement: Sha256
    """SHA-256 of the payload of the source's statement."""
    contents: Sha256
    """The digest of the source's files."""
    fingerprint: Sha256
    plan_digest: Sha256
    to: str
    dtype: str | None
    """The type that weights were cast to; None for the types of the source."""
    casts: tuple[CastLoss, ...]
    not_carried: tuple[NotCarried, ...]


class Facts(_Fact):
    """The member `reshard` of the predicate."""

    version: int
    tool: str
    format: str
    tag: str | None
    step: int | None
    choices: dict[str, Any]
    """The user's choices where the files leave several ways to read them."""
    rules: dict[str, Any] | None
    """The rules by which the user said how tensor parallelism cut it; None if the checkpoint says it."""
    state: SealedState
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement whose signature was verified, or that is to be signed."""

    name: str
    contents: str
    """The digest of all files: SHA-256 of their digests, in the order of their names."""
    files: Mapping[str, str]
    """SHA-256 by path relative to the checkpoint."""
    facts: Facts
    key: str = ""
    """SHA-256 of the public key that verified it, as PEM."""
    payload: bytes = b""

    @property
    def digest(self) -> str:
        """SHA-256 of the payload, by which other statements name this one."""
        return hashlib.sha256(self.payload).hexdigest()


# What anyone can write: the documents around a statement, of which only what is read is looked at.


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class _SignatureText(_Read):
    keyid: str
    sig: str


class _EnvelopeText(_Read):
    payload: str
    payload_type: str = Field(alias="payloadType")
    signatures: list[_SignatureText]


class _BundleText(_Read):
    envelope: _EnvelopeText = Field(alias="dsseEnvelope")


class _Resource(_Read):
    name: str
    algorithm: str
    digest: Sha256


class _SubjectDigest(_Read):
    sha256: Sha256


class _Subject(_Read):
    name: str
    digest: _SubjectDigest


class _Predicate(_Read):
    resources: list[_Resource]
    reshard: dict[str, Any]


class _StatementText(_Read):
    kind: str = Field(alias="_type")
    predicate_type: str = Field(alias="predicateType")
    subject: list[_Subject] = Field(min_length=1, max_length=1)
    predicate: _Predicate


# Keys, envelopes and bundles.


class _Libraries(NamedTuple):
    """The modules that sign: `cryptography`'s serialization of keys, and three of `securesystemslib`."""

    serialization: Any
    dsse: Any
    signer: Any
    exceptions: Any


def _libraries() -> _Libraries:
    """The libraries of the extra `sign`.

    Raises:
        RequestError: `request.engine_missing`.
    """
    try:
        from cryptography.hazmat.primitives import serialization
        from securesystemslib import dsse, exceptions, signer
    except ModuleNotFoundError as error:
        raise RequestError(
            "request.engine_missing",
            f"signatures need {error.name!r}, which is not installed",
            fix=install_line("sign"),
        ) from None
    return _Libraries(serialization, dsse, signer, exceptions)


def _public(pem: bytes, what: str) -> Key:
    """A public key, whose id is the SHA-256 of its PEM text: so does model-signing name keys in its bundles."""
    serialization, _, signer, _ = _libraries()
    try:
        key = serialization.load_pem_public_key(pem)
        _refuse_other_kind(key, what)
        whole = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        return signer.SSlibKey.from_crypto(key, keyid=hashlib.sha256(whole).hexdigest())
    except ValueError as error:
        raise _bad_key(what, "public", error) from None


def _refuse_other_kind(key: Any, what: str) -> None:
    """Refuse keys that are neither ed25519 nor on a curve of NIST: docs/seal.md names no others, such as RSA.

    Raises:
        RequestError: `request.invalid`.
    """
    curve = getattr(key, "curve", None)
    kind = type(key).__name__.removesuffix("PublicKey").lstrip("_") if curve is None else curve.name
    if kind not in _KINDS:
        raise RequestError(
            "request.invalid",
            f"{printable(what)} is a key of the kind {printable(kind)}; certificates are signed with ed25519 or a "
            "curve of NIST (P-256, P-384, P-521)",
            fix=_NEW_KEY,
        )


def _bad_key(what: str, kind: str, error: Exception) -> RequestError:
    return RequestError(
        "request.invalid",
        f"{printable(what)} is not a {kind} key in PEM: {printable(str(error), max_chars=200)}",
        fix=_NEW_KEY,
    )


def signer_of(signing: Signing) -> Signer:
    """The signer of a private key in a file, or of a key that a service keeps (`awskms:...`).

    Raises:
        RequestError: `request.invalid`, `request.engine_missing`.
        SourceError: `source.not_found`.
    """
    serialization, _, signer, _ = _libraries()
    option = SIGNING_KEY if signing.key == os.environ.get(SIGNING_KEY) else "the private key (--key or --sign)"
    scheme = signing.key.partition(":")[0]
    if scheme in signer.SIGNER_FOR_URI_SCHEME and signing.public_key is None:
        raise RequestError(
            "request.invalid",
            f"{printable(signing.key)} is kept by a service, and its public key is needed as well",
            fix="add --public-key PUB",
        )
    name = option
    try:
        if scheme in signer.SIGNER_FOR_URI_SCHEME:
            return signer.Signer.from_priv_key_uri(signing.key, public_key_of(signing.public_key or "", "--public-key"))
        pem, name = _pem_of(signing.key, option)
        passphrase = os.environ.get(PASSPHRASE)
        secret = None if passphrase is None else passphrase.encode()
        key = serialization.load_pem_private_key(pem, secret)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return signer.CryptoSigner(key, _public(public, name))
    except (ValueError, TypeError) as error:
        raise _bad_key(name, "private", error) from None


def public_key_of(value: str, option: str) -> Key:
    """The public key that a path, a URL or a PEM text gives."""
    return _public(*_pem_of(value, option))


def _pem_of(value: str, option: str) -> tuple[bytes, str]:
    """The PEM text of a key, which is the value itself or is in the file of this name, and its name in errors.

    Raises:
        RequestError: `request.invalid` as `small_file`.
        SourceError: `source.not_found`.
    """
    text = value.strip(_AROUND_TEXT)
    if text.startswith(_PEM):
        return f"{text}\n".encode(), "the text of the key"
    return small_file(value, option), value


def _may_be_key(value: str) -> bool:
    """True if a value may be a private key, and is not a path: damaged PEM, some of its lines, or Base64."""
    if os.path.isfile(value):
        return False
    directory, name = os.path.split(value)
    is_path = len(name) < _LEAST_KEY_CHARS and os.path.isdir(directory)
    return "\n" in value or (
        "://" not in value
        and (
            "BEGIN" in value
            or (_KEY_WITHOUT_HEADER.fullmatch(value.strip(_AROUND_TEXT)) is not None and not is_path)
            or max(map(len, value.split("/"))) > _MOST_NAME_CHARS
        )
    )


def small_file(url: str, option: str) -> bytes:
    """The bytes of a small file, which is a key or a certificate.

    Raises:
        RequestError: `request.invalid` if the value may be a key itself, which no error repeats.
        SourceError: `source.not_found`.
    """
    if _may_be_key(url):
        raise RequestError(
            "request.invalid",
            f"the value of {option} is neither the path of a file nor a text in PEM",
            fix="give the path of its file, such as --key seal.key, or the whole text of the file",
        )
    location = open_location(url)
    info = location.store.stat(location.path)
    if info is None or info.size_bytes > MOST_BYTES:
        text = f"there is no key or certificate {printable(url)}, the value of {option}"
        raise SourceError("source.not_found", text, fix="check the path")
    return read_bytes(location.store, info)


def bundle_of(statement: Statement, signer: Signer) -> tuple[str, Statement]:
    """The bundle of a statement as JSON, and the statement with its payload and its key."""
    dsse = _libraries().dsse
    resources = [{"name": n, "algorithm": _ALGORITHM, "digest": d} for n, d in statement.files.items()]
    body = {
        "_type": _STATEMENT,
        "subject": [{"name": statement.name, "digest": {"sha256": statement.contents}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": _ALGORITHM,
                "allow_symlinks": True,
                "ignore_paths": list(NOT_SEALED),
            },
            "resources": resources,
            "reshard": statement.facts.model_dump(mode="json"),
        },
    }
    payload = json.dumps(body, separators=(",", ":")).encode()
    envelope = dsse.Envelope(payload, _PAYLOAD, {})
    key = envelope.sign(signer).keyid
    bundle: dict[str, Any] = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": key}, "tlogEntries": []},
        "dsseEnvelope": envelope.to_dict(),
    }
    return json.dumps(bundle) + "\n", replace(statement, payload=payload, key=key)


def open_bundle(data: bytes, keys: Sequence[Key], where: str) -> Statement:
    """The statement in a bundle that one of these keys signed.

    Raises:
        IntegrityError: `integrity.wrong_key` if none of the keys signed it; `integrity.signature` if the statement or
            its signature were changed, or it is no statement of reshard.
    """
    _, dsse, _, exceptions = _libraries()
    try:
        # JSON that is nested deeply ends in a RecursionError.
        text = _BundleText.model_validate(json.loads(data)).envelope
        envelope = dsse.Envelope.from_dict(text.model_dump(by_alias=True))
    except (ValueError, RecursionError, exceptions.Error):
        raise tampered(where, "it is not a bundle with a DSSE envelope") from None
    if not envelope.signatures.keys() & {key.keyid for key in keys}:
        raise IntegrityError(
            "integrity.wrong_key",
            f"{printable(where)}: signed with another key: "
            f"{', '.join(printable(k[:16]) for k in envelope.signatures) or 'none'}",
            fix="give the public key of who sealed it: --key PUB",
        )
    try:
        (key,) = envelope.verify(list(keys), 1)
    except (exceptions.VerificationError, ValueError):  # a lone surrogate in the type of the payload has no bytes
        raise tampered(where, "the statement is not the one that was signed") from None
    if envelope.payload_type != _PAYLOAD:
        raise tampered(where, f"its payload is {printable(envelope.payload_type)}")
    return replace(_parsed(envelope.payload, where), key=key, payload=envelope.payload)


def _parsed(payload: bytes, where: str) -> Statement:
    try:
        body = _StatementText.model_validate(json.loads(payload))
        facts = Facts.model_validate(body.predicate.reshard)
    except (ValueError, RecursionError):
        raise tampered(where, "it is signed, but is no statement of this version of reshard") from None
    files, subject = {resource.name: resource.digest for resource in body.predicate.resources}, body.subject[0]
    found = Statement(subject.name, subject.digest.sha256, files, facts)
    if facts.version != VERSION:
        raise tampered(where, f"it is signed, but of version {facts.version}; this release reads {VERSION}")
    if other := sorted({resource.algorithm for resource in body.predicate.resources} - {_ALGORITHM}):
        raise tampered(where, f"it is signed, but has digests of {printable(other[0])}; {_ALGORITHM} is computed")
    kind, whole = (body.kind, body.predicate_type), contents_digest(files)
    if kind != (_STATEMENT, _PREDICATE):
        raise tampered(where, "it is signed, but is a statement of another kind")
    sound = all(component_digest(lines) == facts.state.components.get(n) for n, lines in facts.state.lines.items())
    if whole != found.contents or not sound or whole_digest(facts.state.components) != facts.state.digest:
        raise tampered(where, "it contradicts itself")
    return found


def contents_digest(files: Mapping[str, str]) -> str:
    """The digest of the subject: SHA-256 of the files' SHA-256s, by path.

    Args:
        files: Hexadecimal SHA-256 by path.
    """
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in sorted(files.items()))).hexdigest()


def tampered(where: str, why: str) -> IntegrityError:
    """`integrity.signature`: the error for a certificate that is not as it was signed."""
    return IntegrityError(
        "integrity.signature",
        f"{printable(where)}: {why}",
        fix="get the certificate again from who sealed the checkpoint; do not trust this one",
    )
