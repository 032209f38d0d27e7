"""The functions of `import reshard`: those of the command line, with its flags as keyword arguments.

Each runs in this process, with the `worker` extra. With `url=` a service does the same work, and the function waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reshard._wire import invalid
from reshard.choices import (
    NameScheme,
    OpaquePolicy,
    OverflowPolicy,
    ReplicaPolicy,
    RngPolicy,
    ServerCopyPolicy,
    TargetFormat,
    VerifyLevel,
    WeightDtype,
    ZeroStage,
)
from reshard.cli.sizes import parse_percent, parse_size
from reshard.diffs import DiffOptions, DiffReport
from reshard.drawn import Drawn
from reshard.errors import SEE_HELP, JobError, RequestError, printable
from reshard.local import load_engine
from reshard.models import (
    ConvertRequest,
    ConvertResult,
    Inspection,
    PlanSummary,
    Progress,
    SourceSpec,
    VerifyReport,
)
from reshard.nested_options import nested
from reshard.options import DeepSpeedOptions, Options
from reshard.pictures import LayoutPicture, Picture
from reshard.progress import progress_of
from reshard.shared_work import shared_work

if TYPE_CHECKING:
    from reshard.client import Client

PathLike = str | os.PathLike[str]
"""A local path, or a URL such as `s3://bucket/key` as text."""
OnProgress = Callable[[Progress], None]
_SIZES = {"max_shard_size": "max_shard_bytes", "memory_limit": "memory_limit_bytes", "part_size": "part_bytes"}
_KEYWORDS = {**{field: keyword for keyword, field in _SIZES.items()}, "url": "source"}
"""Fields of requests whose keyword arguments have other names."""
_MAX_RULES_BYTES = 1 << 16


def inspect(
    source: PathLike,
    *,
    tag: str | None = None,
    profile: str | None = None,
    url: str | None = None,
    token: str | None = None,
) -> Inspection:
    """Describe a checkpoint from its metadata: format, step, ranks, tensors, possible targets. Nothing in it runs.

    Args:
        source: A directory or URL: a save directory, a tag directory, or a directory of weights.
        tag: Checkpoint tag; by default what `latest` (or `latest_universal`) names.
        profile: Storage profile of the source (see `RESHARD_PROFILES`).
        url: URL of a service that reads it, in place of this process.
        token: Token of the service; by default `RESHARD_TOKEN`.

    Returns:
        The description. A notebook shows it with the picture of the layout.

    Raises:
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.
        RequestError: `request.engine_missing` without the `worker` extra.

    Example:
        >>> found = inspect("tests/data/zero2_tiny")
        >>> found.format, found.world, found.step
        ('deepspeed-zero2', {'dp': 2, 'tp': 1, 'pp': 1}, 3)
    """
    if url is not None:
        with _client(url, token) as client:
            return client.inspect(_for_service(source), tag=tag, profile=profile)
    spec = _source(source, tag, profile)
    found = load_engine().inspect(spec)
    found._drawn = Drawn(spec)  # noqa: SLF001 - the model's own base declares it for this
    return found


def picture(
    source: PathLike,
    *,
    tensor: str | None = None,
    beside: PathLike | None = None,
    tag: str | None = None,
    profile: str | None = None,
) -> Picture:
    """Draw what each rank of a checkpoint holds and, with `tensor`, which rank holds which part of a tensor.

    Args:
        source: A checkpoint, as for `inspect`.
        tensor: `NAME` or `NAME/STATE` of a tensor to draw.
        beside: Another checkpoint, such as the one that `source` was converted to, to draw on the right.
        tag: Checkpoint tag of `source`.
        profile: Storage profile of both.

    Returns:
        The picture. A notebook shows it; `svg()` is its text, and `save("moves.svg")` writes it.

    Raises:
        RequestError: `request.invalid` for a name that `source` does not have.
        ReshardError: As `inspect`.

    Example:
        >>> drawn = picture("tests/data/zero2_tiny", tensor="embed.weight", beside="tests/data/zero3_tiny")
        >>> drawn.svg()[:5]
        '<svg '
    """
    engine = load_engine()
    here = engine.picture(_source(source, tag, profile), tensor)
    if beside is None:
        return Picture(here)
    return Picture(here, _beside(_source(beside, None, profile), tensor))


def plan(
    source: PathLike,
    target: PathLike,
    *,
    to: TargetFormat | str,
    tag: str | None = None,
    dtype: WeightDtype | str | None = None,
    max_shard_size: int | str | None = None,
    exclude_frozen: bool = False,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    zero_stage: ZeroStage | str | int | None = None,
    partition_method: str | None = None,
    pipeline_layers: int | None = None,
    vocab_divisor: int | None = None,
    round_robin_gradients: bool | None = None,
    parameter_alignment: bool | None = None,
    sub_group_size: int | None = None,
    rng: RngPolicy | str = RngPolicy.KEEP,
    rules: PathLike | None = None,
    family: str | None = None,
    names: NameScheme | str | None = None,
    replicas: ReplicaPolicy | str = ReplicaPolicy.ERROR,
    model_files: PathLike | None = None,
    merge_adapter: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
    base: PathLike | None = None,
    on_overflow: OverflowPolicy | str = OverflowPolicy.INF,
    opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
    overwrite: bool = False,
    verify: VerifyLevel | str = VerifyLevel.DEFAULT,
    memory_limit: int | str | None = None,
    part_size: int | str | None = None,
    threads: int | None = None,
    server_copy: ServerCopyPolicy | str = ServerCopyPolicy.AUTO,
    profile: str | None = None,
    target_profile: str | None = None,
    options: Mapping[str, Any] | None = None,
    url: str | None = None,
    token: str | None = None,
) -> PlanSummary:
    """Show the reads, writes and memory of `convert` with the same arguments; nothing is written.

    Args:
        source: A checkpoint, as for `inspect`.
        target: The target; for `universal` and `zero`, the tag directory.
        to: The format to write: `universal`, `zero`, `safetensors`, `torch`, `peft`.
        tag: Checkpoint tag; by default what `latest` (or `latest_universal`) names.
        dtype: Type of weights: `fp32`, `bf16`, `fp16`. By default fp32 from the masters, else as stored; with
            `to="zero"` as in the source.
        max_shard_size: Largest weights file: bytes, or a text such as `"5GB"`.
        exclude_frozen: True to leave out frozen parameters.
        dp: Data-parallel ranks, with `to="zero"`.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        ep: Expert-parallel ranks.
        zero_stage: 0, 1, 2, 3 or `bf16`; by default as in the source.
        partition_method: Pipeline stages: `uniform`, `parameters`, `type:REGEX`, or each stage's first layer: `0,3,6`.
        pipeline_layers: Number of layers, for `partition_method="uniform"`.
        vocab_divisor: Pad the vocabulary to a multiple of this times `tp`.
        round_robin_gradients: As in the ds_config of the target run; by default as in the source.
        parameter_alignment: As in the ds_config of the target run; by default as in the source.
        sub_group_size: As in the ds_config of the target run; by default as in the source.
        rng: Random states: `keep` gives rank r those of source rank r mod N; `drop`.
        rules: File of rules (YAML) for a tensor-parallel source that does not say how it is cut.
        family: Built-in set of rules: `gpt-megatron`, `llama-megatron`, `bloom`.
        names: Names of a model with or without pipeline; by default as in the source.
        replicas: If copies that must be equal differ: `error`, or `first` to take the first.
        model_files: Directory whose configuration, tokenizer and generation files are copied beside the weights.
        merge_adapter: True to merge a LoRA adapter into the weights.
        adapter: Adapter to write or to merge, if the source has several.
        lora_alpha: Scale of an adapter that has no adapter_config.json.
        base: Weights of the base model, if the source was saved without frozen parameters.
        on_overflow: Elements too large for `dtype`: `inf`, `saturate`, `error`.
        opaque: Policy for objects of classes that are not on the allow-list: `refuse`, `keep`, `drop`.
        overwrite: True to replace the target. Its old contents are lost, even if the run fails.
        verify: `full` also reads all of the source and of the output.
        memory_limit: Memory for buffers and metadata: bytes, or a text such as `"1GiB"` (the default).
        part_size: Size of a unit of work and of a multipart part; by default 64 MiB.
        threads: Units in parallel; by default one per core, more for object stores.
        server_copy: `never`: no server-side copies; read and send every byte.
        profile: Storage profile of the source (see `RESHARD_PROFILES`).
        target_profile: Storage profile of the target.
        options: Options of formats of other packages, by format.
        url: URL of a service that plans, in place of this process.
        token: Token of the service; by default `RESHARD_TOKEN`.

    Returns:
        The plan. A notebook shows it with the layouts of source and target, and one tensor on its way.

    Raises:
        RequestError: The arguments do not go together, or not with the source; `request.engine_missing`.
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.

    Example:
        >>> found = plan("tests/data/zero2_tiny", "run-dp4", to="zero", dp=4)
        >>> found.source_format, found.to, len(found.files)
        ('deepspeed-zero2', <TargetFormat.ZERO: 'zero'>, 5)
    """
    given = dict(locals())
    url, token = given.pop("url"), given.pop("token")
    request = _request(given, "see help(reshard.plan)", to_service=url is not None)
    if url is not None:
        with _client(url, token) as client:
            return client.plan_request(request)
    summary = load_engine().plan(request)
    summary._drawn = Drawn(request)  # noqa: SLF001
    return summary


def convert(
    source: PathLike,
    target: PathLike,
    *,
    to: TargetFormat | str,
    tag: str | None = None,
    dtype: WeightDtype | str | None = None,
    max_shard_size: int | str | None = None,
    exclude_frozen: bool = False,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    zero_stage: ZeroStage | str | int | None = None,
    partition_method: str | None = None,
    pipeline_layers: int | None = None,
    vocab_divisor: int | None = None,
    round_robin_gradients: bool | None = None,
    parameter_alignment: bool | None = None,
    sub_group_size: int | None = None,
    rng: RngPolicy | str = RngPolicy.KEEP,
    rules: PathLike | None = None,
    family: str | None = None,
    names: NameScheme | str | None = None,
    replicas: ReplicaPolicy | str = ReplicaPolicy.ERROR,
    model_files: PathLike | None = None,
    merge_adapter: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
    base: PathLike | None = None,
    on_overflow: OverflowPolicy | str = OverflowPolicy.INF,
    opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
    overwrite: bool = False,
    verify: VerifyLevel | str = VerifyLevel.DEFAULT,
    memory_limit: int | str | None = None,
    part_size: int | str | None = None,
    threads: int | None = None,
    server_copy: ServerCopyPolicy | str = ServerCopyPolicy.AUTO,
    profile: str | None = None,
    target_profile: str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int | str | None = None,
    worker: int | None = None,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
    wait_timeout: float | None = None,
    url: str | None = None,
    token: str | None = None,
) -> ConvertResult:
    """Convert a checkpoint, and return when the target is verified and committed.

    The same call resumes an interrupted conversion. A finished one is recognised and not repeated. Ctrl-C in this
    process (`KeyboardInterrupt`) keeps what is finished; a job of a service goes on without its caller.

    Args:
        source: A checkpoint, as for `inspect`.
        target: The target; for `universal` and `zero`, the tag directory.
        to: The format to write: `universal`, `zero`, `safetensors`, `torch`, `peft`.
        tag: As for `plan`, and so are all arguments up to `options`.
        dtype: Type of weights.
        max_shard_size: Largest weights file.
        exclude_frozen: True to leave out frozen parameters.
        dp: Data-parallel ranks, with `to="zero"`.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        ep: Expert-parallel ranks.
        zero_stage: 0, 1, 2, 3 or `bf16`.
        partition_method: Division into pipeline stages.
        pipeline_layers: Number of layers, for `partition_method="uniform"`.
        vocab_divisor: Pad the vocabulary to a multiple of this times `tp`.
        round_robin_gradients: As in the ds_config of the target run.
        parameter_alignment: As in the ds_config of the target run.
        sub_group_size: As in the ds_config of the target run.
        rng: Random states: `keep` or `drop`.
        rules: File of rules (YAML).
        family: Built-in set of rules.
        names: Names of a model with or without pipeline.
        replicas: If copies that must be equal differ: `error` or `first`.
        model_files: Directory whose configuration and tokenizer files are copied beside the weights.
        merge_adapter: True to merge a LoRA adapter into the weights.
        adapter: Adapter to write or to merge.
        lora_alpha: Scale of an adapter that has no adapter_config.json.
        base: Weights of the base model.
        on_overflow: Elements too large for `dtype`: `inf`, `saturate`, `error`.
        opaque: Objects of classes that are not on the allow-list: `refuse`, `keep`, `drop`.
        overwrite: True to replace the target. Its old contents are lost, even if the run fails.
        verify: `full` also reads all of the source and of the output.
        memory_limit: Memory for buffers and metadata.
        part_size: Size of a unit of work.
        threads: Units in parallel.
        server_copy: `never`: no server-side copies.
        profile: Storage profile of the source.
        target_profile: Storage profile of the target.
        options: Options of formats of other packages, by format.
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
            `request.target_busy`; `request.engine_missing`.
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed; the same call resumes.
        IntegrityError: The output does not verify.
        JobError: `job.wait_timeout`, `job.cancelled`, or what else ended the job of a service.

    Example:
        >>> done = convert("tests/data/zero2_tiny", "weights", to="safetensors")
        >>> [file.path for file in done.files]
        ['model.safetensors']
    """
    given = dict(locals())
    own = ("workers", "worker", "on_progress", "progress", "wait_timeout", "url", "token")
    for name in own:
        del given[name]
    request = _request(given, "see help(reshard.convert)", to_service=url is not None)
    if url is not None:
        if workers is not None or worker is not None:
            raise RequestError(
                "request.invalid",
                "workers and worker divide a conversion of this process, and url names a service",
                fix="leave them out: the service's own workers help one another",
            )
        with _client(url, token) as client, progress_of(on_progress, progress) as show:
            return _by_service(client, request, show, wait_timeout)
    work = shared_work(None if workers is None else str(workers), worker, os.environ)
    with progress_of(on_progress, progress) as show:
        result = _by_engine(partial(load_engine().convert, request, work=work, on_progress=show), request, wait_timeout)
    result._drawn = Drawn(request)  # noqa: SLF001
    return result


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
        IntegrityError: `integrity.no_manifest`: it is no output of reshard.
        StorageError: The storage refused or failed.

    Example:
        >>> done = convert("tests/data/zero2_tiny", "run-dp3", to="zero", dp=3)
        >>> verify("run-dp3").ok
        True
    """
    return load_engine().verify(os.fspath(target), profile=profile, sample=_fraction(sample))


def diff(
    a: PathLike,
    b: PathLike,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    states: str = "all",
    weights_only: bool = False,
    common: bool = False,
    ignore: Iterable[str] | None = None,
    sample: float | str | None = None,
    rules: PathLike | None = None,
    family: str | None = None,
    profile_a: str | None = None,
    profile_b: str | None = None,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
) -> DiffReport:
    """Compare two checkpoints by logical tensor, bit by bit, across layouts and formats.

    Args:
        a: A checkpoint, as for `inspect`.
        b: The checkpoint to compare it with.
        tag_a: Checkpoint tag of `a`; by default what `latest` names.
        tag_b: Checkpoint tag of `b`.
        states: `all`, or `weights` to skip optimizer states, counters and client state.
        weights_only: Short for `states="weights"`.
        common: True to ignore tensors and values that only one side has.
        ignore: Patterns of names to leave out, such as `["*.bias", "*/exp_avg*"]`.
        sample: Compare only a random part of the elements: a fraction such as `0.02`, or `"2%"`.
        rules: File of rules (YAML) for tensor-parallel sides that do not say how they are cut.
        family: Built-in set of rules, such as `gpt-megatron`.
        profile_a: Storage profile of `a`.
        profile_b: Storage profile of `b`.
        on_progress: Called with each `Progress`, from one thread at a time.
        progress: True for a bar, False for none; by default as for `convert`.

    Returns:
        The report; `equal` is the verdict, and `differences` has the worst first. Nothing is raised for a difference.

    Raises:
        RequestError: `request.invalid`.
        SourceError: A checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.

    Example:
        >>> diff("tests/data/zero2_tiny", "tests/data/zero2_tiny").equal
        True
    """
    if states not in ("all", "weights"):
        raise RequestError("request.invalid", f"states is {printable(states)!r}", fix="states is one of: all, weights")
    sides = _source(a, tag_a, profile_a), _source(b, tag_b, profile_b)
    deepspeed = DeepSpeedOptions(rules=None if rules is None else _rules(rules), family=family)
    try:
        asked = DiffOptions(
            weights_only=weights_only or states == "weights",
            common=common,
            ignore=tuple(ignore or ()),
            sample=_fraction(sample),
            options=Options(deepspeed=deepspeed),
        )
    except ValidationError as error:
        raise invalid(error, _KEYWORDS, keywords=True) from None
    with progress_of(on_progress, progress) as show:
        return load_engine().diff(*sides, asked, on_progress=show)


def _request(given: dict[str, Any], fix: str, *, to_service: bool) -> ConvertRequest:
    """The wire model of a conversion, from the arguments of a function.

    Raises:
        RequestError: `request.invalid`.
    """
    said = dict(given)
    source, target, tag, profile = (said.pop(name) for name in ("source", "target", "tag", "profile"))
    for keyword, field in _SIZES.items():
        if (size := said.pop(keyword)) is not None:
            said[field] = size if isinstance(size, int) else parse_size(size)
    said["rules"] = None if said["rules"] is None else _rules(said["rules"])
    said["options"] = dict(said["options"] or {})
    for name in ("model_files", "base"):
        if said[name] is not None:
            said[name] = _for_service(said[name]) if to_service else os.fspath(said[name])
    if isinstance(said["zero_stage"], int):
        said["zero_stage"] = str(said["zero_stage"])
    spelled = _for_service if to_service else os.fspath
    said["source"] = {"url": spelled(source), "tag": tag, "profile": profile}
    said["target"] = spelled(target)
    try:
        return ConvertRequest.model_validate(nested(said))
    except ValidationError as error:
        found = invalid(error, _KEYWORDS, keywords=True)
        found.fix = fix if found.fix == SEE_HELP else found.fix
        raise found from None


def _source(place: PathLike, tag: str | None, profile: str | None) -> SourceSpec:
    try:
        return SourceSpec(url=os.fspath(place), tag=tag, profile=profile)
    except ValidationError as error:
        raise invalid(error, _KEYWORDS, keywords=True) from None


def _for_service(place: PathLike) -> str:
    """A local path as an absolute one: the service may have another working directory and home directory."""
    text = os.fspath(place)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _rules(place: PathLike) -> str:
    from reshard.cli.flags import read_rules

    return read_rules(Path(place))


def _fraction(sample: float | str | None) -> float | None:
    return parse_percent(sample) if isinstance(sample, str) else sample


def _client(url: str, token: str | None) -> Client:
    # httpx, which only a service needs, takes longer to import than all else.
    from reshard.client import Client

    return Client(url, token)


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
        raise JobError("service.protocol", "a conversion has no result")
    return result
