"""The functions of `import reshard`: convert and plan, inspect, verify, diff, seal and others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from pydantic import ValidationError

from reshard.api.plan_files import read_plan, run_as_planned, save_plan
from reshard.choices import TargetFormat
from reshard.declared import Declared, declared_options, options_of_layout, options_of_source, present_names
from reshard.draw.layout import Picture
from reshard.engine import VirtualCheckpoint, load_client, load_engine
from reshard.errors import SEE_HELP, JobError, RequestError, printable
from reshard.filesystems import SourcePlace, located, refuse_for_service, text_of
from reshard.installed_formats import nested, options_of, target_names
from reshard.models.jobs import ConvertRequest, ConvertResult, Inspection, PlanSummary, Progress, VerifyReport
from reshard.models.keywords import ChoiceKeywords, ConversionKeywords, SourceKeywords, TwoSourceKeywords
from reshard.models.reports import (
    DiffOptions,
    DiffReport,
    FingerprintOptions,
    FingerprintReport,
    LayoutPicture,
    PushResult,
    SealCheck,
    SealReport,
    Signing,
)
from reshard.option import PathLike, parse_percent, read_rules, renamed_argument
from reshard.options import Options, SourceSpec
from reshard.progress import progress_of
from reshard.shared_work import shared_work
from reshard.wire_model import invalid

if TYPE_CHECKING:
    from reshard.api.client import Client


# The keyword arguments of the functions of `import reshard`: their signatures and texts, and the models they make.

OnProgress = Callable[[Progress], None]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_LISTED = "    **given: "
_TYPES: Mapping[str, Any] = {
    **ConversionKeywords.__annotations__,
    **ChoiceKeywords.__annotations__,
    **TwoSourceKeywords.__annotations__,
}


def keywords() -> dict[str, str]:
    """Fields of requests whose keyword arguments have other names."""
    return {"url": "source", **{o.field: o.name for o in declared_options().values() if o.name != o.field}}


_ONE_OF_TARGETS = "by a name of `reshard.targets`."
"""What docstrings have in place of the names of all targets."""


def _targets() -> str:
    return "one of " + ", ".join(f"`{name}`" for name in target_names()) + "."


def takes_keywords(options: Mapping[str, Declared]) -> Callable[[FunctionT], FunctionT]:
    """Give a function that takes these options as `**given` a signature and a docstring that list them.

    They stand where the docstring has `**given`. Type checkers know them from `reshard.models.keywords`, which is
    generated from the same fields.
    """

    def listing(function: FunctionT) -> FunctionT:
        # Python 3.13 takes the indentation out of docstrings when it compiles them; with -OO there are none.
        own, text = signature(function), cleandoc(function.__doc__ or "").replace(_ONE_OF_TARGETS, _targets())
        begin = text.find(_LISTED)
        made = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=o.default, annotation=_type_of(name, o))
            for name, o in options.items()
        ]
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        before = [p for p in named if f"\n    {p.name}: " in text[:begin]]
        parameters = [*before, *made, *(p for p in named if p not in before)]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        if begin >= 0:
            lines = "".join(f"    {name}: {_meaning(name, o)}\n" for name, o in options.items())
            function.__doc__ = text[:begin] + lines + text[text.index("\n", begin) + 1 :]
        return function

    return listing


def of_two_sources() -> dict[str, Declared]:
    """The options of two sources, which have the letter of their side behind their names."""
    return {f"{name}_{side}": option for side in "ab" for name, option in options_of_source().items()}


def of_side(given: Mapping[str, Any], side: str) -> dict[str, Any]:
    """The options of one of two sources, by the names that they have for one.

    Raises:
        TypeError: No option has this name.
    """
    if unknown := next((name for name in given if name not in of_two_sources()), None):
        raise TypeError(f"got an unexpected keyword argument {unknown!r}")
    return {n.removesuffix(f"_{side}"): value for n, value in given.items() if n.endswith(f"_{side}")}


def request_of(given: Mapping[str, Any], fix: str, *, to_service: bool, named: Mapping[str, Any]) -> ConvertRequest:
    """The wire model of a conversion, from the arguments of a function.

    Args:
        given: The options by the names of their keyword arguments.
        fix: The fix of an error that has none of its own.
        to_service: True if another process will read and write.
        named: The other arguments: `source`, `target`, `to`, `options`.

    Raises:
        RequestError: `request.invalid`.
        TypeError: No option has this name.
    """
    of_source = options_of_source()
    source = _of_service(named["source"]) if to_service else named["source"]
    target = text_of(named["target"], "target")
    target = for_service(target) if to_service else target
    others = {n: v for n, v in given.items() if n not in of_source}
    said = _fields_of(others, declared_options(), to_service=to_service)
    said |= {"to": named["to"], "options": {} if named["options"] is None else named["options"], "target": target}
    said["source"] = source_of(source, {n: v for n, v in given.items() if n in of_source})
    try:
        return ConvertRequest.model_validate(nested(said))
    except ValidationError as error:
        found = invalid(error, keywords(), keywords=True)
        found.fix = fix if found.fix == SEE_HELP else found.fix
        raise found from None


def _fields_of(given: Mapping[str, Any], known: Mapping[str, Declared], *, to_service: bool = False) -> dict[str, Any]:
    """The values of fields, from keyword arguments; None stands for the default of its field."""
    found = present_names(given, known)
    if unknown := next((name for name in found if name not in known), None):
        raise TypeError(f"got an unexpected keyword argument {unknown!r}")
    said = {known[name]: value for name, value in found.items() if value is not None}
    return {
        option.field: for_service(value) if to_service and option.names_place else option.value(value)
        for option, value in said.items()
    }


def source_of(place: SourcePlace, given: Mapping[str, Any]) -> SourceSpec:
    """The wire model of a source.

    Args:
        place: The checkpoint. A file system of fsspec becomes a profile of this process.
        given: The options of the source, by the names of their keyword arguments.

    Raises:
        RequestError: `request.invalid`.
    """
    url, filesystem = located(place)
    said = _fields_of(given, options_of_source())
    if filesystem is not None:
        if said.get("profile") is not None:
            raise RequestError(
                "request.invalid",
                f"profile is {printable(str(said['profile']))}, and the source brings a file system with credentials",
                fix="`profile=None`, or name the source by its URL as text",
            )
        said["profile"] = filesystem
    try:
        return SourceSpec.model_validate({"url": url, **said})
    except ValidationError as error:
        raise invalid(error, keywords(), keywords=True) from None


def _of_service(place: SourcePlace) -> str:
    """A source as a service reads it.

    Raises:
        RequestError: `request.invalid` for a file system of this process.
    """
    url, filesystem = located(place)
    refuse_for_service(url, filesystem)
    return for_service(url)


def for_service(place: PathLike) -> str:
    """A local path as an absolute one: the service may have another working directory and home directory."""
    text = os.fspath(place)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def fraction_of(sample: float | str | None) -> float | None:
    """A fraction that is given as a number, or as a text such as `2%`.

    Raises:
        RequestError: `request.invalid`.
    """
    return parse_percent(sample) if isinstance(sample, str) else sample


def client_of(url: str, token: str | None) -> Client:
    """A client of the service at `url`. It is imported here: httpx takes longer to import than all else."""
    return load_client()(url, token)


def _type_of(name: str, option: Declared) -> Any:
    found = _TYPES.get(name, option.kind)
    return getattr(found, "__forward_arg__", found)


def _meaning(name: str, option: Declared) -> str:
    return option.meaning if name == option.name else f"{name[-1].upper()}: {option.meaning}"


@takes_keywords(declared_options())
def plan(
    source: SourcePlace,
    target: PathLike,
    *,
    to: TargetFormat | str,
    options: Mapping[str, Any] | None = None,
    out: PathLike | None = None,
    url: str | None = None,
    token: str | None = None,
    **given: Unpack[ConversionKeywords],
) -> PlanSummary:
    """Show the reads, writes and memory of `convert` with the same arguments; nothing is written but the file `out`.

    Args:
        source: A checkpoint, as for `inspect`.
        target: The target; for `universal` and `zero`, the tag directory.
        to: The format to write, by a name of `reshard.targets`.
        **given: The options, as the flags of `reshard convert`.
        options: Options of formats of other packages, by format.
        out: A file to save the plan in: `convert(plan=...)` runs exactly that.
        url: URL of a service that plans, in place of this process.
        token: Token of the service; by default `RESHARD_TOKEN`.

    Returns:
        The plan. A notebook shows it with the layouts of source and target, and one tensor on its way.

    Raises:
        RequestError: The arguments do not go together, or not with the source; `request.engine_missing`.
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.

    Examples:
        >>> found = plan("tests/data/zero2_tiny", "run-dp4", to="zero", dp=4)
        >>> found.source_format, found.to, len(found.files)
        ('deepspeed-zero2', <TargetFormat.ZERO: 'zero'>, 5)
    """
    named = {"source": source, "target": target, "to": to, "options": options}
    request = request_of(given, "see help(reshard.plan)", to_service=url is not None, named=named)
    if url is not None:
        with client_of(url, token) as client:
            found = client.plan_request(request)
    else:
        found = load_engine().plan(request).drawn_from(request)
    if out is not None:
        save_plan(out, request, found)
    return found


@takes_keywords(declared_options())
def convert(
    source: SourcePlace | None = None,
    target: PathLike | None = None,
    *,
    to: TargetFormat | str | None = None,
    plan: PathLike | None = None,
    options: Mapping[str, Any] | None = None,
    sign: PathLike | None = None,
    cert: PathLike | None = None,
    trust: Sequence[PathLike] | None = None,
    public_key: PathLike | None = None,
    workers: int | str | None = None,
    worker: int | None = None,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
    wait_timeout: float | None = None,
    url: str | None = None,
    token: str | None = None,
    **given: Unpack[ConversionKeywords],
) -> ConvertResult:
    """Convert a checkpoint, and return when the target is verified and committed.

    The same call resumes an interrupted conversion. A finished one is recognised and not repeated. Ctrl-C in this
    process (`KeyboardInterrupt`) keeps what is finished; a job of a service goes on without its caller.

    Args:
        source: A checkpoint, as for `inspect`.
        target: The target; for `universal` and `zero`, the tag directory.
        to: The format to write, by a name of `reshard.targets`.
        **given: The options, as the flags of `reshard convert`.
        plan: A file of `plan(out=...)` or `reshard plan --out`, in place of `source`, `target`, `to` and the
            options that decide bytes. A conversion that would be another one now is refused (`request.plan_changed`).
        options: Options of formats of other packages, by format.
        sign: Private key, as for `seal`: certificates of target and source are written beside the target.
        cert: With `sign`: the certificate that the source has already.
        trust: Public keys that signed `cert`, if it is not that of `sign`.
        public_key: Public key of a key that a service keeps.
        workers: Number of processes that make this call together, each with its `worker`; `auto`: the launcher's.
        worker: Number of this process, from 0 to `workers` - 1.
        on_progress: Called with each `Progress`, from one thread at a time.
        progress: True for a bar, False for none; by default a bar in a terminal or a notebook, if nobody else is told.
        wait_timeout: Seconds after which the call stops waiting (`job.wait_timeout`). Finished work is kept.
        url: URL of a service that converts, in place of this process. For labels, priorities and attempts: `Client`.
        token: Token of the service; by default `RESHARD_TOKEN`.

    Returns:
        The result: files, bytes, seconds, warnings, lossy casts. A notebook shows it with the picture.

    Raises:
        RequestError: The arguments do not go together, or not with the source; `request.target_exists`,
            `request.target_busy`; `request.plan_changed`; `request.engine_missing`.
        TypeError: Neither a plan nor all of source, target and `to` are given.
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed; the same call resumes.
        IntegrityError: The output does not verify.
        JobError: `job.wait_timeout`, `job.cancelled`, or what else ended the job of a service.

    Examples:
        >>> done = convert("tests/data/zero2_tiny", "weights", to="safetensors")
        >>> [file.path for file in done.files]
        ['model.safetensors']
    """
    named = {"source": source, "target": target, "to": to, "options": options}
    request = _planned(plan, given, named) or request_of(
        given, "see help(reshard.convert)", to_service=url is not None, named=named
    )
    if url is not None:
        if workers is not None or worker is not None:
            raise RequestError(
                "request.invalid",
                "workers and worker divide a conversion of this process, and url names a service",
                fix="leave them out: the service's own workers help one another",
            )
        if sign is not None:
            raise RequestError(
                "request.invalid",
                "sign names a key of this machine, and url a service",
                fix="leave it out: a service with RESHARD_SIGNING_KEY signs all of its conversions",
            )
        with client_of(url, token) as client, progress_of(on_progress, progress) as show:
            return _by_service(client, request, show, wait_timeout)
    work = shared_work(None if workers is None else str(workers), worker, os.environ)
    signing = None if sign is None else _signing_of(sign, public_key, cert, trust)
    with progress_of(on_progress, progress) as show:
        run = partial(load_engine().convert, request, work=work, signing=signing, on_progress=show)
        result = _by_engine(run, request, wait_timeout)
    return result.drawn_from(request)


def _planned(plan: PathLike | None, given: Mapping[str, Any], named: Mapping[str, Any]) -> ConvertRequest | None:
    """The request of a plan file, if one is named, with the options of the run that are given beside it.

    Raises:
        RequestError: `request.invalid`.
        TypeError: Neither a plan nor what stands for one is given, or an option has an unknown name.
    """
    said = [name for name, value in named.items() if value is not None]
    if plan is None:
        if missing := [name for name in ("source", "target", "to") if named[name] is None]:
            raise TypeError(f"convert() needs {', '.join(missing)}, or a plan")
        return None
    options = present_names({n: v for n, v in given.items() if v is not None}, declared_options())
    if unknown := next((name for name in options if name not in declared_options()), None):
        raise TypeError(f"got an unexpected keyword argument {unknown!r}")
    return run_as_planned(read_plan(plan), {**dict.fromkeys(said), **options}, {})


def _by_engine(run: Callable[..., ConvertResult], request: ConvertRequest, wait_timeout: float | None) -> ConvertResult:
    if wait_timeout is None:
        return run()
    until = time.monotonic() + wait_timeout
    try:
        return run(should_stop=lambda: time.monotonic() >= until)
    except JobError as error:
        if error.code != "job.cancelled":
            raise
        raise JobError(
            "job.wait_timeout",
            f"the conversion into {printable(request.target)} has not finished after {wait_timeout:g} s",
            fix="call again: finished work is kept",
        ) from None


def _by_service(
    client: Client, request: ConvertRequest, show: OnProgress | None, wait_timeout: float | None
) -> ConvertResult:
    job = client.submit_request(request)
    try:
        for event in client.watch(job.id, timeout_s=wait_timeout):
            if show is not None and event.progress is not None:
                show(event.progress)
    except KeyboardInterrupt as error:
        error.add_note(f"job {job.id} goes on: reshard.Client({client.url!r}).wait({job.id!r})")
        raise
    result = client.result(job.id)
    if not isinstance(result, ConvertResult):
        raise JobError(
            "service.protocol",
            "a conversion has no result",
            fix="install the release that the service runs",
        )
    return result


def layout_request(given: Mapping[str, Any], fix: str, named: Mapping[str, Any]) -> ConvertRequest:
    """The request of a target that is never written. Arguments and errors are those of `request_of`."""
    if unknown := next((n for n in given if n not in options_of_layout()), None):
        raise TypeError(f"got an unexpected keyword argument {unknown!r}")
    return request_of(given, fix, to_service=False, named=named)


@takes_keywords(options_of_layout())
def open_layout(
    source: SourcePlace,
    *,
    to: TargetFormat | str,
    name: str | None = None,
    exact_crcs: bool = False,
    compare: bool = True,
    options: Mapping[str, Any] | None = None,
    **given: Unpack[ConversionKeywords],
) -> VirtualCheckpoint:
    """Open the target that `convert` with the same arguments would write. Nothing is written, not even a copy.

    The source is read when files of the target are. It is pinned by this call: a source that changes later is
    `source.changed`.

    Args:
        source: A checkpoint, as for `inspect`.
        to: The format of the files, as for `convert`.
        **given: The options, as the flags of `reshard convert`.
        name: The last name of the target's directory; by default the tag of the source.
        exact_crcs: Compute the CRC-32 fields of torch's archives, which are zero otherwise. torch does not read them;
            `unzip` does. Whoever reads such a field waits until its record has been read.
        compare: Compare the copies and rounded masters of the source first, as `convert` does. It reads them.
        options: Options of formats of other packages, by format.

    Returns:
        The files, their bytes in any ranges, and all of them as a file system of fsspec.

    Raises:
        RequestError: The arguments do not go together, or not with the source; `request.engine_missing`.
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.

    Examples:
        >>> with open_layout("tests/data/zero2_tiny", to="safetensors") as weights:
        ...     [file.path for file in weights.files], weights.read("model.safetensors", 8, 2)
        (['model.safetensors'], b'{"')
    """
    named = {"source": source, "target": name or "-", "to": to, "options": options}
    request = layout_request(given, "see help(reshard.open_layout)", named)
    return load_engine().open_layout(request, exact_crcs=exact_crcs, compare=compare)


# Functions of `import reshard` that look at checkpoints: `inspect`, `picture`, `verify`, `diff`, `fingerprint`.


@takes_keywords(options_of_source())
def inspect(
    source: SourcePlace,
    *,
    compare: bool = False,
    url: str | None = None,
    token: str | None = None,
    **given: Unpack[SourceKeywords],
) -> Inspection:
    """Describe a checkpoint from its metadata: format, step, ranks, tensors, possible targets. Nothing in it runs.

    Args:
        source: A directory or URL: a save directory, a tag directory, or a directory of weights. Or a place on a file
            system of fsspec with its own credentials: a `UPath`, or `fs.get_mapper("bucket/run")`.
        compare: True to read and compare the tensors that must agree, as every conversion does: copies, and masters
            with weights.
        **given: The options of the source.
        url: URL of a service that reads it, in place of this process.
        token: Token of the service; by default `RESHARD_TOKEN`.

    Returns:
        The description. A notebook shows it with the picture of the layout.

    Raises:
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.
        RequestError: `request.engine_missing` without the `worker` extra.

    Examples:
        >>> found = inspect("tests/data/zero2_tiny")
        >>> found.format, found.world, found.step
        ('deepspeed-zero2', {'dp': 2, 'tp': 1, 'pp': 1}, 3)
    """
    place = source if url is None else _of_service(source)
    spec = source_of(place, given)
    if url is not None and compare:
        raise RequestError(
            "request.invalid",
            "compare: a service reads no tensors to inspect",
            fix="leave url out, or run `reshard inspect SRC --compare`, on a machine near the checkpoint",
        )
    if url is not None:
        with client_of(url, token) as client:
            return client.inspect(spec)
    return load_engine().inspect(spec, compare=compare).drawn_from(spec)


@takes_keywords(options_of_source())
def picture(
    source: SourcePlace,
    *,
    tensor: str | None = None,
    beside: SourcePlace | None = None,
    **given: Unpack[SourceKeywords],
) -> Picture:
    """Draw what each rank of a checkpoint holds and, with `tensor`, which rank holds which part of a tensor.

    Args:
        source: A checkpoint, as for `inspect`.
        tensor: `NAME` or `NAME/STATE` of a tensor to draw.
        beside: Another checkpoint, such as the one that `source` was converted to, to draw on the right.
        **given: The options of `source`. Its storage profile is that of both.

    Returns:
        The picture. A notebook shows it; `svg()` is its text, and `save("moves.svg")` writes it.

    Raises:
        RequestError: `request.invalid` for a name that `source` does not have.
        ReshardError: As `inspect`.

    Examples:
        >>> drawn = picture("tests/data/zero2_tiny", tensor="embed.weight", beside="tests/data/zero3_tiny")
        >>> drawn.svg()[:5]
        '<svg '
    """
    engine = load_engine()
    here = engine.picture(source_of(source, given), tensor)
    if beside is None:
        return Picture(here)
    # A place that brings its own file system has no storage profile.
    profile = given.get("profile") if isinstance(beside, str | os.PathLike) else None
    return Picture(here, _beside(source_of(beside, {"profile": profile}), tensor))


def verify(target: PathLike, *, sample: float | str | None = None, profile: str | None = None) -> VerifyReport:
    """Read every byte of a target and compare its checksums and tensor digests with its manifest.

    Args:
        target: A target that `convert` wrote; or a directory whose `latest` names one.
        sample: Read only a random part of a huge target: a fraction such as `0.02`, or `"2%"`.
        profile: Storage profile of the target.

    Returns:
        The report; `ok` says if everything matches, and `problems` what does not. Nothing is raised for that.

    Raises:
        SourceError: `source.not_found`.
        IntegrityError: `integrity.no_manifest`: it is not an output of reshard.
        StorageError: The storage refused or failed.

    Examples:
        >>> import reshard
        >>> done = reshard.convert("tests/data/zero2_tiny", "run-dp3", to="zero", dp=3)
        >>> verify("run-dp3").ok
        True
    """
    return load_engine().verify(os.fspath(target), profile=profile, sample=fraction_of(sample))


@takes_keywords(of_two_sources())
def diff(
    a: SourcePlace,
    b: SourcePlace,
    *,
    states: str = "all",
    weights_only: bool = False,
    common: bool = False,
    ignore: Iterable[str] | None = None,
    sample: float | str | None = None,
    rules: PathLike | None = None,
    family: str | None = None,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
    **given: Unpack[TwoSourceKeywords],
) -> DiffReport:
    """Compare two checkpoints by logical tensor, bit by bit, across layouts and formats.

    Args:
        a: A checkpoint, as for `inspect`.
        b: The checkpoint to compare it with.
        **given: The options of both sources.
        states: `all`, or `weights` to skip optimizer states, counters and client state.
        weights_only: Short for `states="weights"`.
        common: True to ignore tensors and values that only one side has.
        ignore: Patterns of names to leave out, such as `["*.bias", "*/exp_avg*"]`.
        sample: Compare only a random part of the elements: a fraction such as `0.02`, or `"2%"`.
        rules: File of rules (YAML) for tensor-parallel sides that do not say how they are cut.
        family: Built-in set of rules, such as `gpt-megatron`.
        on_progress: Called with each `Progress`, from one thread at a time.
        progress: True for a bar, False for none; by default as for `convert`.

    Returns:
        The report; `equal` is the verdict, and `differences` has the worst first. Nothing is raised for a difference.

    Raises:
        RequestError: `request.invalid`.
        SourceError: A checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.

    Examples:
        >>> diff("tests/data/zero2_tiny", "tests/data/zero2_tiny").equal
        True
    """
    only = _weights_only(states)
    sides = (source_of(a, of_side(given, "a")), source_of(b, of_side(given, "b")))
    options = _cuts_of(rules, family)
    try:
        asked = DiffOptions(
            weights_only=weights_only or only,
            common=common,
            ignore=tuple(ignore or ()),
            sample=fraction_of(sample),
            options=options,
        )
    except ValidationError as error:
        raise invalid(error, keywords(), keywords=True) from None
    with progress_of(on_progress, progress) as show:
        return load_engine().diff(*sides, asked, on_progress=show)


@takes_keywords(options_of_source())
def fingerprint(
    source: SourcePlace,
    *,
    states: str = "all",
    tensors: bool = False,
    rules: PathLike | None = None,
    family: str | None = None,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
    **given: Unpack[SourceKeywords],
) -> FingerprintReport:
    """Digest the state of a checkpoint: equal digests for equal states, in every layout and format.

    Args:
        source: A checkpoint, as for `inspect`.
        **given: The options of the source.
        states: `all`, or `weights` for the model alone, as of a file of weights.
        tensors: True for the lines that are digested as well: one for each tensor and value.
        rules: File of rules (YAML) for a tensor-parallel source that does not say how it is cut.
        family: Built-in set of rules, such as `gpt-megatron`.
        on_progress: Called with each `Progress`, from one thread at a time.
        progress: True for a bar, False for none; by default as for `convert`.

    Returns:
        The report; `digest` is that of the whole state, and `components` has that of each part.

    Raises:
        RequestError: `request.invalid`.
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.

    Examples:
        >>> one, other = fingerprint("tests/data/zero2_tiny"), fingerprint("tests/data/zero2_python3112")
        >>> one.digest == other.digest
        True
    """
    spec = source_of(source, given)
    options = FingerprintOptions(weights_only=_weights_only(states), lines=tensors, options=_cuts_of(rules, family))
    with progress_of(on_progress, progress) as show:
        return load_engine().fingerprint(spec, options, on_progress=show)


@takes_keywords(options_of_source())
def seal(
    source: SourcePlace,
    *,
    key: PathLike,
    public_key: PathLike | None = None,
    rules: PathLike | None = None,
    family: str | None = None,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
    **given: Unpack[SourceKeywords],
) -> SealReport:
    """Sign a statement about a checkpoint: the SHA-256 of its files, and the fingerprint of its state.

    Args:
        source: A checkpoint, as for `inspect`.
        key: Private key in PEM (ed25519, or an elliptic curve of NIST), or the URI of a key that a service keeps.
        public_key: Public key of a key that a service keeps.
        **given: The options of the source.
        rules: File of rules (YAML) for a tensor-parallel source that does not say how it is cut.
        family: Built-in set of rules, such as `gpt-megatron`.
        on_progress: Called with each `Progress`, from one thread at a time.
        progress: True for a bar, False for none; by default as for `convert`.

    Returns:
        The report; `certificate` is the text to keep. Nothing is written.

    Raises:
        RequestError: `request.invalid` for a key that cannot sign; `request.engine_missing` without the extra `sign`.
        SourceError: The checkpoint is missing, damaged or changes meanwhile, or the key is missing.
        StorageError: The storage refused or failed.
    """
    spec = source_of(source, given)
    signing = _signing_of(key, public_key)
    with progress_of(on_progress, progress) as show:
        return load_engine().seal(spec, signing, _cuts_of(rules, family), on_progress=show)


def _signing_of(
    key: PathLike, public_key: PathLike | None, cert: PathLike | None = None, trust: Sequence[PathLike] | None = None
) -> Signing:
    return Signing(
        key=os.fspath(key),
        public_key=None if public_key is None else os.fspath(public_key),
        certificate=None if cert is None else os.fspath(cert),
        trusted=tuple(os.fspath(url) for url in trust or ()),
    )


def push(
    directory: PathLike, target: str | None = None, *, overwrite: bool = False, url: str | None = None
) -> PushResult:
    """Upload weights that `convert` wrote to the Hugging Face hub, by one commit: all files appear at once, or none.

    What the hub has already is not sent again, and a branch that holds all of it gets no commit. To upload without a
    copy on a disk, give `convert` the target `hf://ORG/NAME`.

    Args:
        directory: A local directory that `convert` wrote, to `safetensors`, `torch` or `peft`.
        target: `hf://ORG/NAME` or `hf://ORG/NAME@BRANCH`. A repository that does not exist is created, private; a
            branch that does not exist begins at `main`. The token is that of `HF_TOKEN` or of `hf auth login`.
        overwrite: True to replace other content under these names, and to remove weights under other names. The
            history of the repository keeps it.
        url: The former name of `target`.

    Returns:
        The commit.

    Raises:
        RequestError: `request.target_exists` if the branch holds another model; `request.invalid`,
            `request.unsatisfiable`; `request.unknown_scheme` without the extra `hub`.
        SourceError: `source.not_found` if the directory is no output of `convert`.
        StorageError: `storage.denied`, `storage.unavailable`; `storage.conflict` if the branch moved meanwhile.
    """
    place = renamed_argument("target", target, "url", url)
    return load_engine().push(os.fspath(directory), place, overwrite=overwrite)


def verify_sealed(
    target: PathLike,
    certificates: Sequence[PathLike],
    keys: Sequence[PathLike],
    *,
    profile: str | None = None,
) -> SealCheck:
    """Compare a checkpoint with its certificate: signature, chain of sources, files and state.

    Args:
        target: The checkpoint.
        certificates: Its certificate, then those of its sources. Certificates beside the first one are found.
        keys: Public keys in PEM. Each may have signed any of the certificates.
        profile: Storage profile of the checkpoint.

    Returns:
        The outcome; `ok` says if everything matches, `problems` which files and tensors do not, and `chain` has the
        statement of each step.

    Raises:
        IntegrityError: `integrity.signature`, `integrity.wrong_key`, `integrity.chain`.
        SourceError: The checkpoint, a key or a certificate is missing.
        RequestError: `request.invalid` for a key; `request.engine_missing` without the extra `sign`.
    """
    spec = source_of(target, {"profile": profile})
    return load_engine().verify_sealed(spec, [os.fspath(c) for c in certificates], [os.fspath(k) for k in keys])


def _weights_only(states: str) -> bool:
    if states not in ("all", "weights"):
        raise RequestError("request.invalid", f"states is {printable(states)!r}", fix="states is one of: all, weights")
    return states == "weights"


def _cuts_of(rules: PathLike | None, family: str | None) -> Options:
    """The options that say how tensor parallelism cut a checkpoint."""
    return options_of({"rules": None if rules is None else read_rules(Path(rules)), "family": family})


def _beside(spec: SourceSpec, tensor: str | None) -> LayoutPicture:
    """The layout of another checkpoint, with the tensor of this name in whatever states it has there."""
    engine = load_engine()
    for name in () if tensor is None else (tensor, tensor.rpartition("/")[0]):
        try:
            return engine.picture(spec, name)
        except RequestError as error:
            if error.code != "request.invalid":
                raise
    return engine.picture(spec)
