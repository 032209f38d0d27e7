"""Functions of `import reshard` that plan and run conversions: the flags of the command line are their arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from reshard.arguments import OnProgress, client_of, request_of, takes_keywords
from reshard.choices import TargetFormat
from reshard.declared import declared_options
from reshard.errors import JobError, RequestError, printable
from reshard.keywords import ConversionKeywords
from reshard.local import load_engine
from reshard.models import ConvertRequest, ConvertResult, PlanSummary
from reshard.option import PathLike
from reshard.progress import progress_of
from reshard.shared_work import shared_work

if TYPE_CHECKING:
    from reshard.client import Client


@takes_keywords(declared_options())
def plan(
    source: PathLike,
    target: PathLike,
    *,
    to: TargetFormat | str,
    options: Mapping[str, Any] | None = None,
    url: str | None = None,
    token: str | None = None,
    **given: Unpack[ConversionKeywords],
) -> PlanSummary:
    """Show the reads, writes and memory of `convert` with the same arguments; nothing is written.

    Args:
        source: A checkpoint, as for `inspect`.
        target: The target; for `universal` and `zero`, the tag directory.
        to: The format to write: `universal`, `zero`, `safetensors`, `torch`, `peft`, `dcp`.
        **given: The options, as the flags of `reshard convert`.
        options: Options of formats of other packages, by format.
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
            return client.plan_request(request)
    return load_engine().plan(request).drawn_from(request)


@takes_keywords(declared_options())
def convert(
    source: PathLike,
    target: PathLike,
    *,
    to: TargetFormat | str,
    options: Mapping[str, Any] | None = None,
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
        to: The format to write: `universal`, `zero`, `safetensors`, `torch`, `peft`, `dcp`.
        **given: The options, as the flags of `reshard convert`.
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

    Examples:
        >>> done = convert("tests/data/zero2_tiny", "weights", to="safetensors")
        >>> [file.path for file in done.files]
        ['model.safetensors']
    """
    named = {"source": source, "target": target, "to": to, "options": options}
    request = request_of(given, "see help(reshard.convert)", to_service=url is not None, named=named)
    if url is not None:
        if workers is not None or worker is not None:
            raise RequestError(
                "request.invalid",
                "workers and worker divide a conversion of this process, and url names a service",
                fix="leave them out: the service's own workers help one another",
            )
        with client_of(url, token) as client, progress_of(on_progress, progress) as show:
            return _by_service(client, request, show, wait_timeout)
    work = shared_work(None if workers is None else str(workers), worker, os.environ)
    with progress_of(on_progress, progress) as show:
        result = _by_engine(partial(load_engine().convert, request, work=work, on_progress=show), request, wait_timeout)
    return result.drawn_from(request)


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
            fix="install the same release of reshard as the service has: reshard --version",
        )
    return result
