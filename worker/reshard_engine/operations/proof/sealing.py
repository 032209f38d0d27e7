"""`reshard seal`: certificates of checkpoints, the links between those of a conversion, and their verification."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from reshard.choices import POINTERS, SEALED as SUFFIX, OpaquePolicy
from reshard.errors import IntegrityError, RequestError, ReshardError, SourceError, printable
from reshard.models.jobs import ConvertRequest, ConvertResult, Progress, VerifyProblem
from reshard.models.reports import FingerprintOptions, FingerprintReport, SealCheck, SealedStep, SealReport, Signing
from reshard.options import Options, SourceSpec
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import rules_of
from reshard_engine.formats.sources import find_checkpoint
from reshard_engine.integrity.file_check import TargetCheck, sha256_of_each
from reshard_engine.integrity.manifest import MANIFEST_NAME, TOOL_VERSION, Manifest, parse_manifest
from reshard_engine.operations.diff import reading_threads
from reshard_engine.operations.proof.fingerprint import WHOLE, fingerprint_of
from reshard_engine.operations.proof.statements import (
    MOST_BYTES,
    NOT_SEALED,
    VERSION,
    Facts,
    Key,
    Origin,
    SealedState,
    Signer,
    Statement,
    bundle_of,
    contents_digest,
    open_bundle,
    public_key_of,
    signer_of,
    small_file,
    tampered,
)
from reshard_engine.operations.runs.steps import named_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.local import not_files
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import ObjectInfo, join, parent_and_name, read_bytes
from reshard_engine.storage.texts import write_text
from reshard_engine.storage.urls import canonical_url, refuse_writing_outside

_IN_STATEMENT = (*WHOLE[1:], "weights", "masters")
"""Components whose lines a statement has: values of `run` may be private."""
_THREADS = 4
_MOST_NAMED = 8  # of the files that are not covered; the others are counted
OnProgress = Callable[[Progress], None] | None
ShouldStop = Callable[[], bool] | None


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
    return _seal(source, signer_of(signing), see).report


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
        version=VERSION,
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
    text, statement = bundle_of(Statement(name, contents_digest(seen.files), seen.files, facts), signer)
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
    digest = partial(fingerprint_of, checkpoint, refuse_damaged=True, on_progress=on_progress, should_stop=should_stop)
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
    found = {path: info for path, info in place.files().items() if path.partition("/")[0] not in NOT_SEALED}
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
    return {path: kind for path, kind in not_files(place.path).items() if path.partition("/")[0] not in NOT_SEALED}


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
                f"list it: it lies outside that directory, or in one of {', '.join(NOT_SEALED)}",
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
    signer = signer_of(signing)
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
    keys = [public_key_of(url, "--trust") for url in signing.trusted] or [signer_of(signing).public_key]
    known = open_bundle(small_file(signing.certificate, "--cert"), keys, signing.certificate)
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
    known = [public_key_of(url, "--key") for url in keys]
    first, *others = [open_bundle(small_file(url, "--cert"), known, url) for url in certificates]
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
            if name.endswith(SUFFIX) and info.size_bytes <= MOST_BYTES:
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
        raise tampered(statement.name, "it is signed, but its choices are none of this version of reshard") from None


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
