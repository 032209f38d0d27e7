"""`reshard seal`: signed statements about checkpoints, the links between those of a conversion, and their verification.

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
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reshard.choices import POINTERS, SEALED as SUFFIX, OpaquePolicy
from reshard.errors import AROUND_TEXT, IntegrityError, RequestError, ReshardError, SourceError, may_be_key, printable
from reshard.local import install_line
from reshard.models.jobs import CastLoss, ConvertRequest, ConvertResult, NotCarried, Progress, VerifyProblem
from reshard.models.reports import FingerprintOptions, FingerprintReport, SealCheck, SealedStep, SealReport, Signing
from reshard.options import Options, SourceSpec
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import rules_of
from reshard_engine.formats.sources import find_checkpoint
from reshard_engine.integrity.checksums import Sha256
from reshard_engine.integrity.file_check import TargetCheck, sha256_of_each
from reshard_engine.integrity.manifest import MANIFEST_NAME, TOOL_VERSION, Manifest, parse_manifest
from reshard_engine.operations.diff import reading_threads
from reshard_engine.operations.proof.fingerprint import WHOLE, component_digest, fingerprint_of, whole_digest
from reshard_engine.operations.steps import named_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.local import not_files
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import ObjectInfo, join, parent_and_name, read_bytes
from reshard_engine.storage.texts import write_text
from reshard_engine.storage.urls import canonical_url, refuse_writing_outside

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
_NOT_SEALED = (".git", ".gitattributes", ".github", ".gitignore")
"""Names that verifiers of model-signing always leave out."""
_IN_STATEMENT = (*WHOLE[1:], "weights", "masters")
"""Components whose lines a statement has: values of `run` may be private."""
_MOST_BYTES = 1 << 30
_THREADS = 4
_MOST_NAMED = 8  # of the files that are not covered; the others are counted
_VERSION = 1
_ALGORITHM = "sha256"

Key = Any
"""A public key of securesystemslib, which exports no types."""
Signer = Any
"""A signer of securesystemslib."""
OnProgress = Callable[[Progress], None] | None
ShouldStop = Callable[[], bool] | None


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


def _signer(signing: Signing) -> Signer:
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
            return signer.Signer.from_priv_key_uri(signing.key, _public_key(signing.public_key or "", "--public-key"))
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


def _public_key(value: str, option: str) -> Key:
    """The public key that a path, a URL or a PEM text gives."""
    return _public(*_pem_of(value, option))


def _pem_of(value: str, option: str) -> tuple[bytes, str]:
    """The PEM text of a key, which is the value itself or is in the file of this name, and its name in errors.

    Raises:
        RequestError: `request.invalid` as `_small_file`.
        SourceError: `source.not_found`.
    """
    text = value.strip(AROUND_TEXT)
    if text.startswith(_PEM):
        return f"{text}\n".encode(), "the text of the key"
    return _small_file(value, option), value


def _small_file(url: str, option: str) -> bytes:
    """The bytes of a small file, which is a key or a certificate.

    Raises:
        RequestError: `request.invalid` if the value may be a key itself, which no error repeats.
        SourceError: `source.not_found`.
    """
    if may_be_key(url):
        raise RequestError(
            "request.invalid",
            f"the value of {option} is neither the path of a file nor a text in PEM",
            fix="give the path of its file, such as --key seal.key, or the whole text of the file",
        )
    location = open_location(url)
    info = location.store.stat(location.path)
    if info is None or info.size_bytes > _MOST_BYTES:
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
                "ignore_paths": list(_NOT_SEALED),
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
        raise _tampered(where, "it is not a bundle with a DSSE envelope") from None
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
        raise _tampered(where, "the statement is not the one that was signed") from None
    if envelope.payload_type != _PAYLOAD:
        raise _tampered(where, f"its payload is {printable(envelope.payload_type)}")
    return replace(_parsed(envelope.payload, where), key=key, payload=envelope.payload)


def _parsed(payload: bytes, where: str) -> Statement:
    try:
        body = _StatementText.model_validate(json.loads(payload))
        facts = Facts.model_validate(body.predicate.reshard)
    except (ValueError, RecursionError):
        raise _tampered(where, "it is signed, but is no statement of this version of reshard") from None
    files, subject = {resource.name: resource.digest for resource in body.predicate.resources}, body.subject[0]
    found = Statement(subject.name, subject.digest.sha256, files, facts)
    if facts.version != _VERSION:
        raise _tampered(where, f"it is signed, but of version {facts.version}; this release reads {_VERSION}")
    if other := sorted({resource.algorithm for resource in body.predicate.resources} - {_ALGORITHM}):
        raise _tampered(where, f"it is signed, but has digests of {printable(other[0])}; {_ALGORITHM} is computed")
    kind, whole = (body.kind, body.predicate_type), _contents(files)
    if kind != (_STATEMENT, _PREDICATE):
        raise _tampered(where, "it is signed, but is a statement of another kind")
    sound = all(component_digest(lines) == facts.state.components.get(n) for n, lines in facts.state.lines.items())
    if whole != found.contents or not sound or whole_digest(facts.state.components) != facts.state.digest:
        raise _tampered(where, "it contradicts itself")
    return found


def _contents(files: Mapping[str, str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in sorted(files.items()))).hexdigest()


def _tampered(where: str, why: str) -> IntegrityError:
    return IntegrityError(
        "integrity.signature",
        f"{printable(where)}: {why}",
        fix="get the certificate again from who sealed the checkpoint; do not trust this one",
    )


# Sealing: the files and the state of a checkpoint as they are now.


@dataclass(frozen=True, slots=True)
class _Seen:
    """A checkpoint, and what was read of it to state something about it."""

    checkpoint: Checkpoint
    rules: Mapping[str, Any] | None
    place: Location
    objects: Mapping[str, ObjectInfo]
    files: Mapping[str, str]
    report: FingerprintReport
    read_bytes: int
    not_covered: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A signed statement, with the objects that it is about as they were listed."""

    report: SealReport
    statement: Statement
    objects: Mapping[str, ObjectInfo]


def seal(
    source: SourceSpec,
    signing: Signing,
    options: Options,
    *,
    on_progress: OnProgress = None,
    should_stop: ShouldStop = None,
) -> SealReport:
    """Sign a statement about a checkpoint.

    Raises:
        RequestError: `request.invalid` for a key that cannot sign, `request.engine_missing` without the extra `sign`.
        SourceError: As `fingerprint_of`; `source.changed` if a file changed meanwhile.
    """
    see = partial(_see, source, options, on_progress=on_progress, should_stop=should_stop)
    return _seal(source, _signer(signing), see).report


def _seal(source: SourceSpec, signer: Signer, see: Callable[[], _Seen], origin: Origin | None = None) -> _Sealed:
    started = time.monotonic()
    seen = see()
    checkpoint, report = seen.checkpoint, seen.report
    state = SealedState(
        digest=report.digest,
        components=report.components,
        lines={name: report.lines[name] for name in _IN_STATEMENT if name in report.lines},
        weights_only=report.weights_only,
    )
    facts = Facts(
        version=_VERSION,
        tool=TOOL_VERSION,
        format=checkpoint.format,
        tag=checkpoint.tag,
        step=checkpoint.counters.steps,
        choices=source.model_dump(mode="json", include={*source.given()}),
        rules=None if seen.rules is None else {**seen.rules},
        state=state,
        origin=origin,
    )
    name = parent_and_name(seen.place.path)[1]
    text, statement = bundle_of(Statement(name, _contents(seen.files), seen.files, facts), signer)
    done = SealReport(
        url=seen.place.url,
        format=checkpoint.format,
        name=name,
        contents=statement.contents,
        fingerprint=report.digest,
        statement=statement.digest,
        key=statement.key,
        files=len(seen.files),
        read_bytes=seen.read_bytes,
        weights_only=report.weights_only,
        not_covered=tuple(map(printable, seen.not_covered[:_MOST_NAMED])),
        not_covered_count=len(seen.not_covered),
        certificate=text,
        seconds=time.monotonic() - started,
    )
    return _Sealed(done, statement, seen.objects)


def _see(
    source: SourceSpec,
    options: Options,
    *,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    committed: Manifest | None = None,
) -> _Seen:
    """Read a checkpoint: its state, then the bytes of all its files.

    Args:
        source: The checkpoint.
        options: The rules of tensor parallelism, if the user gave any.
        on_progress: Called with the progress.
        should_stop: Returns true to stop.
        committed: The manifest of the conversion that wrote the checkpoint, which its files are compared with.

    Raises:
        IntegrityError: `integrity.mismatch` if the files are not those that the conversion wrote.
    """
    ledger, rules = OpaqueLedger(OpaquePolicy.KEEP), rules_of(options)
    checkpoint = named_checkpoint(open_location(source.url, source.profile), source, ledger, rules)
    place = open_location(checkpoint.url, source.profile)
    _refuse_others(place, committed)
    objects = _objects(place)
    _refuse_uncovered(checkpoint, place, objects)
    digest = partial(fingerprint_of, checkpoint, on_progress=on_progress, should_stop=should_stop)
    asked = FingerprintOptions(lines=True)
    try:
        report = digest(asked)
    except SourceError as error:
        if error.code != "checkpoint.ambiguous":
            raise
        # The files leave open what their optimizer's numbers mean: the statement is about the model, and says so.
        report = digest(asked.model_copy(update={"weights_only": True}))
    if committed is None:
        files = sha256_of_each(place.store, objects, reading_threads(checkpoint))
    else:
        files = _hashed_as_written(committed, open_location(source.url, source.profile), place, objects)
    if _objects(place) != objects:
        raise _changed(place)
    _refuse_others(place, committed)
    size_bytes = sum(info.size_bytes for info in objects.values())
    beside = _not_covered(open_location(source.url, source.profile), place)
    return _Seen(checkpoint, rules, place, objects, files, report, report.read_bytes + size_bytes, beside)


def _changed(place: Location) -> SourceError:
    return SourceError(
        "source.changed",
        f"files of {printable(place.url)} changed while they were read",
        fix="wait until nothing writes there, then run the same command again",
    )


def _objects(place: Location) -> dict[str, ObjectInfo]:
    """The files below a location, or the one file that it is, by their paths relative to it."""
    found = {path: info for path, info in place.files().items() if path.partition("/")[0] not in _NOT_SEALED}
    if not found and (info := place.store.stat(place.path)) is not None:
        found = {parent_and_name(place.path)[1]: info}
    return dict(sorted(found.items()))


def _not_covered(top: Location, place: Location) -> list[str]:
    """The files of a directory beside that of its tag, which a seal does not cover: of a Trainer's, its own state.

    The names in a statement are relative to the directory of the tag, as verifiers of model-signing read them. Pointers
    are left out: one that leads elsewhere leads to files that are not those that were sealed.
    """
    same = os.path.realpath if place.store.scheme == "file" else str  # a location leads through links, or past them
    if same(top.path) == same(place.path):
        return []
    names = {*top.store.list_directory(top.path).by_name} - {*POINTERS, parent_and_name(place.path)[1]}
    return sorted(name for name in names if not name.endswith(SUFFIX))


def _others(place: Location) -> dict[str, str]:
    """What the entries of a local checkpoint are that a seal cannot list, by path: FIFOs, sockets, dead links."""
    if place.store.scheme != "file":
        return {}
    return {path: kind for path, kind in not_files(place.path).items() if path.partition("/")[0] not in _NOT_SEALED}


def _refuse_others(place: Location, committed: Manifest | None) -> None:
    """Reject a checkpoint with an entry that is no file: what a reader gets from it can change under the seal.

    Raises:
        RequestError: `request.unsatisfiable`.
        IntegrityError: `integrity.mismatch` for the target of a conversion, which writes none.
    """
    for path, kind in _others(place).items():
        if committed is not None:
            raise _not_written(place, path, f"({kind}) was added")
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(place.url)}: {printable(path)} is {kind}, and a seal lists the bytes of files only",
            fix=f"put a file in its place, or remove it: `rm {shlex.quote(printable(join(place.path, path)))}`",
        )


def _refuse_uncovered(checkpoint: Checkpoint, place: Location, objects: Mapping[str, ObjectInfo]) -> None:
    """Reject a checkpoint whose reader opens a file that its seal does not list.

    Raises:
        RequestError: `request.unsatisfiable`.
        SourceError: `source.changed` if a file is no longer the file that the reader opened.
    """
    # The directory of a tag may be a link: the reader's paths lead through it, those of a location do not.
    top = checkpoint.url if place.store.scheme == "file" else place.path
    for info in (info for file in checkpoint.files for info in file.objects):
        inner = info.path.removeprefix(f"{top}/") if info.path != top else parent_and_name(place.path)[1]
        listed = objects.get(inner)
        if listed is None:
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(info.path)} is a part of the checkpoint, and a seal of {printable(place.url)} does not "
                f"list it: it lies outside that directory, or in one of {', '.join(_NOT_SEALED)}",
                fix="copy the file into the directory of the checkpoint, under a name that is sealed",
            )
        if (listed.size_bytes, listed.pin) != (info.size_bytes, info.pin):
            raise _changed(place)


def _hashed_as_written(
    committed: Manifest, target: Location, place: Location, objects: Mapping[str, ObjectInfo]
) -> dict[str, str]:
    """SHA-256 of each file of a target, whose bytes are compared with all that its conversion recorded of them.

    CRC-32s alone prove nothing about who wrote a file: four bytes are easily chosen so that it keeps its own. What
    counts is the manifest that the conversion made in this process. The one beside the files can be changed with them.

    Raises:
        IntegrityError: `integrity.mismatch` if a file was added, changed or written again, or is missing, or if the
            manifest beside the files is another manifest.
    """
    inner = f"{place.path[len(target.path) + 1 :]}/" if place.path != target.path else ""
    written = {f.path: n for n, f in enumerate(committed.files) if f.path.startswith(inner)}
    listing = {f"{inner}{path}": info for path, info in objects.items()}
    for path in sorted({*written, *listing} - ({MANIFEST_NAME} if not inner else set())):
        info, number = listing.get(path), written.get(path)
        if info is None or number is None:
            raise _not_written(place, path.removeprefix(inner), "is missing" if info is None else "was added")
    check = TargetCheck(committed, should_stop=lambda: None)
    check.read(place.store, listing, list(written.values()))
    check.conclude()
    for problem in check.problems:
        raise _not_written(place, problem.path.removeprefix(inner), f"was changed ({problem.problem})")
    for path, number in written.items():
        # No digest but that of `--verify full` covers the bytes between tensors.
        if listing[path].pin != committed.files[number].pin:
            raise _not_written(place, path.removeprefix(inner), "was written again")
    manifest = objects.get(MANIFEST_NAME)
    stored = None if manifest is None else parse_manifest(read_bytes(place.store, manifest))
    if not inner and (stored is None or stored.without_pins() != committed.without_pins()):
        raise _not_written(place, MANIFEST_NAME, "was replaced")
    digests = {path.removeprefix(inner): digest for path, digest in check.sha256.items()}
    rest = {path: info for path, info in objects.items() if path not in digests}
    return dict(sorted({**digests, **sha256_of_each(place.store, rest, _THREADS)}.items()))


def _not_written(place: Location, path: str, what: str) -> IntegrityError:
    return IntegrityError(
        "integrity.mismatch",
        f"{printable(place.url)}: {printable(path)} {what} after the conversion's commit: the target is not signed",
        fix="find out what writes there, then run the same command with --overwrite",
        details={"path": printable(path)},
    )


# Conversions that leave a statement about their target, with a link to that of their source.


def convert_sealed(
    request: ConvertRequest,
    signing: Signing,
    convert: Callable[[Callable[[Manifest], None]], ConvertResult],
    *,
    on_progress: OnProgress = None,
    should_stop: ShouldStop = None,
) -> ConvertResult:
    """Convert, and write certificates beside the target: of the target, and of the source unless there is one.

    Returns:
        The result of the conversion with the URLs of the certificates, that of the target first.

    Raises:
        RequestError: `request.root_forbidden` if this process may not write beside the target.
        SourceError: `source.changed` if the source is not the one that was sealed.
        IntegrityError: `integrity.mismatch` if the target was changed after its commit.
        ReshardError: As `seal`, and as the conversion.
    """
    refuse_writing_outside(f"{request.target}{SUFFIX}", "certificates stand beside the target, and this service signs")
    signer = _signer(signing)
    see = partial(_see, on_progress=on_progress, should_stop=should_stop)
    sealed = _seal(request.source, signer, partial(see, request.source, request.options))
    statement, parents = sealed.statement, [(f"{request.target}.source{SUFFIX}", sealed.report.certificate)]
    if signing.certificate is not None:
        statement, parents = _given(sealed, signing), []
    manifests: list[Manifest] = []
    result = convert(manifests.append)
    place = open_location(sealed.report.url, request.source.profile)
    if _objects(place) != sealed.objects:
        raise _changed(place)
    origin = Origin(
        statement=statement.digest,
        contents=statement.contents,
        fingerprint=statement.facts.state.digest,
        plan_digest=result.plan_digest,
        to=str(result.to),
        dtype=None if request.dtype is None else request.dtype.value,
        casts=result.casts,
        not_carried=result.not_carried,
    )
    target = SourceSpec(url=result.target, profile=request.target_profile)
    made = _seal(target, signer, partial(see, target, Options(), committed=manifests[-1]), origin)
    written = [(f"{result.target}{SUFFIX}", made.report.certificate), *parents]
    for url, text in written:
        write_text(open_location(url, request.target_profile), text.encode())
    return result.model_copy(update={"certificates": tuple(url for url, _ in written)})


def _given(sealed: _Sealed, signing: Signing) -> Statement:
    """The statement in the certificate that the user has of a source.

    Raises:
        IntegrityError: `integrity.sealed` if the source is another one now; as `open_bundle`.
    """
    assert signing.certificate is not None
    keys = [_public_key(url, "--trust") for url in signing.trusted] or [_signer(signing).public_key]
    known = open_bundle(_small_file(signing.certificate, "--cert"), keys, signing.certificate)
    now = sealed.statement
    if (known.contents, known.facts.state.digest) != (now.contents, now.facts.state.digest):
        where = printable(signing.certificate)
        raise IntegrityError(
            "integrity.sealed",
            f"{printable(sealed.report.url)} is not the checkpoint that {where} is about",
            fix=f"see what differs: reshard verify SRC --cert {where} --key PUB",
        )
    return known


# Verification.


def verify_sealed(source: SourceSpec, certificates: Sequence[str], keys: Sequence[str]) -> SealCheck:
    """Compare a checkpoint with its certificate: signature, files, state, and the chain of sources that it names.

    Args:
        source: The checkpoint.
        certificates: URLs of certificates. The first one is about the checkpoint. Those of the sources are taken from
            the others, and from certificates in the same directories.
        keys: URLs of public keys, each of which may have signed any of the certificates.

    Raises:
        IntegrityError: As `open_bundle`; `integrity.chain` if a certificate of the chain is missing, or names another
            source than the one before it is about.
        SourceError: The checkpoint, a key or a certificate does not exist.
    """
    started = time.monotonic()
    known = [_public_key(url, "--key") for url in keys]
    first, *others = [open_bundle(_small_file(url, "--cert"), known, url) for url in certificates]
    chain = _chain(first, {s.digest: s for s in (*others, *_beside(certificates, known))})
    problems, read, place = _differing(source, first)
    beside = _not_covered(open_location(source.url, source.profile), place)
    return SealCheck(
        target=source.url,
        ok=not problems,
        files=len(first.files),
        read_bytes=read,
        problems=tuple(problems),
        covered=place.url,
        not_covered=tuple(map(printable, beside[:_MOST_NAMED])),
        not_covered_count=len(beside),
        chain=tuple(chain),
        seconds=time.monotonic() - started,
    )


def _beside(certificates: Sequence[str], keys: Sequence[Key]) -> Iterator[Statement]:
    """The statements in other certificates of the same directories, without those that cannot be read or opened."""
    for url in {parent_and_name(canonical_url(url))[0] for url in certificates}:
        place = open_location(url)
        for name, info in place.store.list_directory(place.path).by_name.items():
            if name.endswith(SUFFIX) and info.size_bytes <= _MOST_BYTES:
                with suppress(ReshardError):
                    yield open_bundle(read_bytes(place.store, info), keys, info.path)


def _chain(first: Statement, known: Mapping[str, Statement]) -> list[SealedStep]:
    """The statements from the newest to that of the first source.

    Raises:
        IntegrityError: `integrity.chain`.
    """
    steps: list[SealedStep] = []
    statement: Statement | None = first
    while statement is not None:
        origin = statement.facts.origin
        parent = None if origin is None else known.get(origin.statement)
        if origin is not None and parent is None:
            raise IntegrityError(
                "integrity.chain",
                f"the statement {origin.statement[:16]} about the source of {printable(statement.name)} is missing",
                fix="give the source's certificate as well: --cert TARGET --cert SOURCE",
            )
        if origin is not None and parent is not None:
            said = (origin.contents, origin.fingerprint)
            if said != (parent.contents, parent.facts.state.digest):
                raise IntegrityError(
                    "integrity.chain",
                    f"{printable(statement.name)} was made from {origin.contents[:16]}, "
                    f"and the statement that it names is about {parent.contents[:16]}",
                )
        steps.append(_step(statement, parent))
        statement = parent
    return steps


def _step(statement: Statement, parent: Statement | None) -> SealedStep:
    facts, origin = statement.facts, statement.facts.origin
    changed: list[str] = []
    if parent is not None:
        one, other = ({**s.facts.state.components, "model": _model(s)} for s in (statement, parent))
        changed = [name for name in WHOLE if one.get(name) != other.get(name)]
    return SealedStep(
        name=statement.name,
        format=facts.format,
        step=facts.step,
        tool=facts.tool,
        key=statement.key,
        statement=statement.digest,
        contents=statement.contents,
        fingerprint=facts.state.digest,
        plan_digest=None if origin is None else origin.plan_digest,
        dtype=None if origin is None else origin.dtype,
        changed=tuple(changed),
        casts=() if origin is None else origin.casts,
        not_carried=() if origin is None else origin.not_carried,
    )


def _model(statement: Statement) -> str | None:
    components = statement.facts.state.components
    return components.get("masters") or components.get("weights")


def _differing(source: SourceSpec, statement: Statement) -> tuple[list[VerifyProblem], int, Location]:
    """The files and tensors that are not those of a statement, the number of bytes that were read, and where."""
    facts, place = statement.facts, open_location(source.url, source.profile)
    chosen = _chosen(source, statement)
    found: list[VerifyProblem] = []
    read = 0
    try:
        checkpoint = named_checkpoint(place, chosen, OpaqueLedger(OpaquePolicy.KEEP), facts.rules)
        place = open_location(checkpoint.url, source.profile)
        _refuse_uncovered(checkpoint, place, _objects(place))
        report = fingerprint_of(checkpoint, FingerprintOptions(weights_only=facts.state.weights_only, lines=True))
        read += report.read_bytes
        found += _tensors(facts.state, report)
    except ReshardError as error:
        # Damaged files may not be readable at all. Then the list of files says which.
        place = _directory(place, source.tag)
        found.append(_problem("", f"the state cannot be read: {error.code}: {error.message}"))
    objects, others = _objects(place), _others(place)
    files = sha256_of_each(place.store, objects, _THREADS)
    wrong: list[VerifyProblem] = []
    for path in sorted({*files, *statement.files, *others}):
        if path in others:
            wrong.append(_problem(path, f"is {others[path]}, which no seal lists"))
        elif files.get(path) != statement.files.get(path):
            strange = "was not sealed" if path not in statement.files else "has other bytes than those that were sealed"
            wrong.append(_problem(path, "is missing" if path not in files else strange))
    return [*wrong, *found], read + sum(info.size_bytes for info in objects.values()), place


def _chosen(source: SourceSpec, statement: Statement) -> SourceSpec:
    """The source with the choices of who sealed it.

    Raises:
        IntegrityError: `integrity.signature` if they are none of this version.
    """
    try:
        return SourceSpec.model_validate(
            {**source.model_dump(mode="json", exclude_none=True), **statement.facts.choices}
        )
    except ValidationError:
        raise _tampered(statement.name, "it is signed, but its choices are none of this version of reshard") from None


def _directory(location: Location, tag: str | None) -> Location:
    """The directory that a location leads to, as far as it can be found without reading a checkpoint."""
    with suppress(ReshardError):
        if location.store.stat(location.path) is None:
            return find_checkpoint(location, tag).location
    return location


def _tensors(state: SealedState, report: FingerprintReport) -> Iterable[VerifyProblem]:
    """The tensors and values whose lines differ, by component; a component without lines as a whole."""
    for name, digest in state.components.items():
        if report.components.get(name) == digest:
            continue
        ours, theirs = set(report.lines.get(name, ())), set(state.lines.get(name, ()))
        names = sorted({_tensor_of(line) for line in ours ^ theirs}) if name in state.lines else []
        for tensor in names:
            yield _problem("", f"{name} differ from what was sealed", printable(tensor))
        if not names:
            yield _problem("", f"{name} differs from what was sealed")


def _tensor_of(line: str) -> str:
    """The name in a line of a fingerprint; the line itself, if a statement has one of another form."""
    try:
        return str(json.loads(line)[0])
    except (ValueError, LookupError, TypeError, RecursionError):
        return line


def _problem(path: str, problem: str, tensor: str | None = None) -> VerifyProblem:
    return VerifyProblem(path=printable(path), offset=None, length_bytes=None, tensor=tensor, problem=problem)
