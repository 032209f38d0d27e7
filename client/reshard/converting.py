"""Functions of `import reshard` that plan and run conversions: the flags of the command line are their arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard.arguments import OnProgress, Order, PathLike, client_of, request_of
from reshard.choices import (
    NameScheme,
    OpaquePolicy,
    OverflowPolicy,
    ReplicaPolicy,
    RngPolicy,
    ServerCopyPolicy,
    TargetFormat,
    VerifyLevel,
    WeightDecayGroups,
    WeightDtype,
    ZeroStage,
)
from reshard.errors import JobError, RequestError, printable
from reshard.local import load_engine
from reshard.models import ConvertRequest, ConvertResult, PlanSummary
from reshard.progress import progress_of
from reshard.shared_work import shared_work

if TYPE_CHECKING:
    from reshard.client import Client


def plan(
    source: PathLike,
    target: PathLike,
    *,
    to: TargetFormat | str,
    tag: str | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    scheduler_key: str | None = None,
    param_order: Order | None = None,
    buffers: str | None = None,
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
    weight_decay_groups: WeightDecayGroups | str = WeightDecayGroups.STAGE,
    replicas: ReplicaPolicy | str = ReplicaPolicy.ERROR,
    model_files: PathLike | None = None,
    merge_adapter: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
    base: PathLike | None = None,
    grammar: str | None = None,
    files: int | None = None,
    target_model_key: str | None = None,
    target_optimizer_key: str | None = None,
    trainer_files: PathLike | None = None,
    torch_file: str | None = None,
    missing_moments: str | None = None,
    on_overflow: OverflowPolicy | str = OverflowPolicy.INF,
    opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
    overwrite: bool = False,
    pointer: bool | None = None,
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
        to: The format to write: `universal`, `zero`, `safetensors`, `torch`, `peft`, `dcp`.
        tag: Checkpoint tag; by default what `latest` (or `latest_universal`) names.
        model_key: Model to read, if the source's state dict holds several, such as `unet`; `.` is its root.
        optimizer_key: Optimizer to read, if there are several.
        scheduler_key: Learning-rate scheduler of that optimizer, if there are several.
        param_order: Order of parameters that the source's files number and do not name: `model` (as in the model),
            `groups` (as in the model within each group), a list of names, or a file with a name a line.
        buffers: Buffers that the source's files do not tell from frozen parameters: `NAME,…` with `*` for any text, or
            `none`. Only `zero_stage=3` and `exclude_frozen` ask for them.
        dtype: Type of weights: `fp32`, `bf16`, `fp16`. By default nothing is cast: masters where there are any, all
            else as it is stored; with `to="zero"` as in the source.
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
        weight_decay_groups: Param groups of Megatron-DeepSpeed: as it makes them at the target's `stage`, or `keep`.
        replicas: If copies that must be equal differ: `error`, or `first` to take the first.
        model_files: Directory whose configuration, tokenizer and generation files are copied beside the weights.
        merge_adapter: True to merge a LoRA adapter into the weights.
        adapter: Adapter to write or to merge, if the source has several.
        lora_alpha: Scale of an adapter that has no adapter_config.json.
        base: Weights of the base model, if the source was saved without frozen parameters.
        grammar: With `to="dcp"`, the framework that loads it: `state-dict`, `torchtitan`, `accelerate`, `trainer`,
            `lightning`; by default the source's, or `accelerate`.
        files: Number of `.distcp` files; by default one for each 4 GB.
        target_model_key: Place of the model in the target, such as `app.model`; by default that of `grammar`.
        target_optimizer_key: Place of the optimizer in the target; by default that of `grammar`.
        trainer_files: Directory of a trainer's files (`trainer_state.json`, schedulers, random states) for the target.
        torch_file: With `to="torch_save"`, the name of the file; by default `checkpoint.pt`.
        missing_moments: Trained parameters without optimizer states: `zero` (the default), `omit`, `refuse`.
        on_overflow: Elements too large for `dtype`: `inf`, `saturate`, `error`.
        opaque: Policy for objects of classes that are not on the allow-list: `refuse`, `keep`, `drop`.
        overwrite: True to replace the target. Its old contents are lost, even if the run fails.
        pointer: True to write `latest` beside the target, False not to; by default if its parent is a save directory.
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

    Examples:
        >>> found = plan("tests/data/zero2_tiny", "run-dp4", to="zero", dp=4)
        >>> found.source_format, found.to, len(found.files)
        ('deepspeed-zero2', <TargetFormat.ZERO: 'zero'>, 5)
    """
    given = dict(locals())
    url, token = given.pop("url"), given.pop("token")
    request = request_of(given, "see help(reshard.plan)", to_service=url is not None)
    if url is not None:
        with client_of(url, token) as client:
            return client.plan_request(request)
    return load_engine().plan(request).drawn_from(request)


def convert(
    source: PathLike,
    target: PathLike,
    *,
    to: TargetFormat | str,
    tag: str | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    scheduler_key: str | None = None,
    param_order: Order | None = None,
    buffers: str | None = None,
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
    weight_decay_groups: WeightDecayGroups | str = WeightDecayGroups.STAGE,
    replicas: ReplicaPolicy | str = ReplicaPolicy.ERROR,
    model_files: PathLike | None = None,
    merge_adapter: bool = False,
    adapter: str | None = None,
    lora_alpha: float | None = None,
    base: PathLike | None = None,
    grammar: str | None = None,
    files: int | None = None,
    target_model_key: str | None = None,
    target_optimizer_key: str | None = None,
    trainer_files: PathLike | None = None,
    torch_file: str | None = None,
    missing_moments: str | None = None,
    on_overflow: OverflowPolicy | str = OverflowPolicy.INF,
    opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
    overwrite: bool = False,
    pointer: bool | None = None,
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
        to: The format to write: `universal`, `zero`, `safetensors`, `torch`, `peft`, `dcp`.
        tag: As for `plan`, and so are all arguments up to `options`.
        model_key: Model to read, if there are several.
        optimizer_key: Optimizer to read, if there are several.
        scheduler_key: Learning-rate scheduler of that optimizer, if there are several.
        param_order: Order of parameters that the source's files number.
        buffers: Buffers that the source's files do not tell from frozen parameters.
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
        weight_decay_groups: Param groups of Megatron-DeepSpeed: `stage` or `keep`.
        replicas: If copies that must be equal differ: `error` or `first`.
        model_files: Directory whose configuration and tokenizer files are copied beside the weights.
        merge_adapter: True to merge a LoRA adapter into the weights.
        adapter: Adapter to write or to merge.
        lora_alpha: Scale of an adapter that has no adapter_config.json.
        base: Weights of the base model.
        grammar: With `to="dcp"`, the framework that loads it: `state-dict`, `torchtitan`, `accelerate`, `trainer`,
            `lightning`; by default the source's, or `accelerate`.
        files: Number of `.distcp` files; by default one for each 4 GB.
        target_model_key: Place of the model in the target, such as `app.model`; by default that of `grammar`.
        target_optimizer_key: Place of the optimizer in the target; by default that of `grammar`.
        trainer_files: Directory of a trainer's files (`trainer_state.json`, schedulers, random states) for the target.
        torch_file: With `to="torch_save"`, the name of the file; by default `checkpoint.pt`.
        missing_moments: Trained parameters without optimizer states: `zero` (the default), `omit`, `refuse`.
        on_overflow: Elements too large for `dtype`: `inf`, `saturate`, `error`.
        opaque: Objects of classes that are not on the allow-list: `refuse`, `keep`, `drop`.
        overwrite: True to replace the target. Its old contents are lost, even if the run fails.
        pointer: True to write `latest` beside the target, False not to; by default if its parent is a save directory.
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

    Examples:
        >>> done = convert("tests/data/zero2_tiny", "weights", to="safetensors")
        >>> [file.path for file in done.files]
        ['model.safetensors']
    """
    given = dict(locals())
    own = ("workers", "worker", "on_progress", "progress", "wait_timeout", "url", "token")
    for name in own:
        del given[name]
    request = request_of(given, "see help(reshard.convert)", to_service=url is not None)
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
        raise JobError("service.protocol", "a conversion has no result")
    return result
