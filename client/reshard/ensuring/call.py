"""`ensure`: compares the wanted layout with the source's, and has one process convert.

    trainer.train(resume_from_checkpoint=reshard.ensure(checkpoint))
    accelerator.load_state(reshard.ensure(checkpoint))
    engine.load_checkpoint(reshard.ensure(checkpoint))

It is a function and not a callback, because Trainer and Accelerate load DeepSpeed's state before their hooks run
(transformers 5.23.0 `trainer.py` `_prepare_for_training`, accelerate 1.15.0 `accelerator.py` `load_state`).
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Unpack

from pydantic import ValidationError

from reshard.choices import EnsureWorkers, OpaquePolicy, TargetFormat, WeightDtype, ZeroStage
from reshard.dcp_options import Framework
from reshard.declared import choices_of_source, declared_options, present_names
from reshard.ensuring.converters import Converter, Deadline, DirectLoader, LocalConverter, ServiceConverter, pauses_s
from reshard.ensuring.election import Election, Invitation, Records
from reshard.ensuring.local_checkpoints import (
    STEP,
    TRACKERS,
    LocalSource,
    find_source,
    finished,
    is_distributed,
    is_iteration,
    local_path,
    megatron_run,
    of_another_package,
    place_companions,
    place_schedulers,
    place_step,
    storage_error,
    track,
    writing,
)
from reshard.ensuring.together import LATE_S, Helper, Launch, Sharing
from reshard.ensuring.world import Loader, Wanted
from reshard.errors import IntegrityError, JobError, RequestError, ReshardError, SourceError, StorageError, printable
from reshard.filesystems import SourcePlace, located, refuse_for_service, text_of
from reshard.functions import source_of, takes_keywords
from reshard.installed_formats import known_targets, nested
from reshard.models.jobs import ConvertRequest, Inspection, Progress
from reshard.models.keywords import ChoiceKeywords
from reshard.models.resume import ResumeLayout
from reshard.option import size_of
from reshard.options import SourceSpec
from reshard.wire_model import invalid

_FILES_OF_RANKS = (TargetFormat.FSDP_RANKS, TargetFormat.TORCH_CHECKPOINTING)
_JOINED_LATER = {"family", "stage", "resume"}
"""Fields of an inspection that are no part of the keys of results, as earlier releases did not have them."""


class Outcome(StrEnum):
    """The ways in which `ensure` gets its result."""

    SOURCE = "source"
    """The source already has the wanted layout."""
    EARLIER = "earlier"
    """An earlier call, or another process, has made the result."""
    CONVERTED = "converted"


@dataclass(frozen=True, slots=True)
class Ensured:
    """A checkpoint in the wanted layout."""

    path: str
    outcome: Outcome
    wanted: ResumeLayout | None = None
    """The result of the conversion; None if nothing was converted."""


@takes_keywords(choices_of_source())
def ensure(  # noqa: PLR0913 - the options of the one call are its parameters
    src: SourcePlace,
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    zero_stage: ZeroStage | str | int | None = None,
    dtype: WeightDtype | str | None = None,
    to: str | None = None,
    framework: str | None = None,
    tag: str | int | None = None,
    out: str | os.PathLike[str] | None = None,
    rules: str | None = None,
    family: str | None = None,
    megatron_args: str | None = None,
    opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
    url: str | None = None,
    timeout_s: float | None = None,
    workers: EnsureWorkers | str = EnsureWorkers.AUTO,
    memory_limit: int | str | None = None,
    direct: bool = False,
    **given: Unpack[ChoiceKeywords],
) -> str:
    """Return the path of a checkpoint in the wanted layout. Every process of a run may call this; one converts.

    Args:
        src: A save directory (with `latest`), a Trainer's `checkpoint-N`, an Accelerate directory, or a tag directory.
            The result is of the same kind. A distributed checkpoint (FSDP) is returned as it is, for any world, unless
            `to` or `framework` asks for something else. Files of FSDP's ranks become those of `dp` ranks. A run of
            Megatron-core, or one iteration of it, that does not load at `tp`, `pp` and `ep` is written for any of them.
            Or, with `out`, a `UPath` or `fs.get_mapper("bucket/run")` of a file system with its own credentials.
        dp: Data-parallel ranks; by default the number of processes (`WORLD_SIZE` and the like) divided by tp x pp.
        tp: Tensor-parallel ranks; by default the source's, as for `pp` and `ep`.
        pp: Pipeline stages.
        ep: Expert-parallel ranks.
        zero_stage: 0, 1, 2, 3 or `bf16`; by default the source's.
        dtype: Element type of the model; by default the source's.
        to: `zero` for a DeepSpeed run, `dcp` for one of FSDP; by default the source's own kind.
        framework: Framework that will load a distributed checkpoint: `state-dict`, `torchtitan`, `accelerate`,
            `trainer` or `lightning`; by default the source's, or `state-dict`.
        tag: Tag of a save directory, a text or a number, as for `save_checkpoint`; by default the one that `latest`
            names.
        **given: Choices where the source's files leave several ways to read it.
        out: Save directory to create; by default one below `.reshard` in the source's save directory.
        rules: Rules as YAML: how tensor parallelism cuts parameters, if the source does not say.
        family: Built-in set of such rules.
        megatron_args: Arguments of Megatron-LM as JSON, for what a run of Megatron-core does not say and its conversion
            needs.
        opaque: Policy for objects of classes that are not on the allow-list: `refuse` (the default), `keep` (they are
            written again, unexecuted) or `drop` (None is written in their place).
        url: URL of a service that converts; by default `RESHARD_URL`. Without either, this process converts.
        timeout_s: Seconds to wait for other processes or for the conversion; by default there is no limit.
        workers: `auto`: one process of each node converts if the launcher tells of several nodes and the checkpoint has
            4 GiB or more, else one process; `1`: one process; `nodes`: one of each node, whatever the size.
        memory_limit: Memory for buffers and metadata of a process that converts: bytes, or a text such as `"1GiB"` (the
            default).
        direct: Convert nothing: return a path that this process, until it ends, loads from the source (see
            `reshard.direct`). `out`, `url`, `timeout_s` and `workers` have nothing to say then.

    Returns:
        `src` if it has the wanted layout; else the path of a finished conversion, an earlier one if it exists.

    Raises:
        SourceError: `checkpoint.incomplete`, and all errors of reading the source.
        RequestError: `request.invalid` if no `dp` is given and no launcher tells the number of processes;
            `request.target_exists` if `out` holds something else.
        JobError: `job.wait_timeout`.
    """
    name = None if tag is None else str(tag)
    wanted = _wanted(
        src, name, to, framework, given,
        {
            "dp": dp, "tp": tp, "pp": pp, "ep": ep, "zero_stage": zero_stage, "dtype": dtype, "rules": rules,
            "family": family, "megatron_args": megatron_args, "opaque": opaque,
            "memory_limit_bytes": None if memory_limit is None else size_of(memory_limit),
        },
    )  # fmt: skip
    if not direct:
        return ensured(src, wanted, tag=name, out=out, url=url, timeout_s=timeout_s, workers=workers).path
    if unused := next((n for n, v in (("out", out), ("url", url), ("timeout_s", timeout_s)) if v is not None), None):
        raise RequestError(
            "request.invalid", f"{unused} is for conversions, and direct=True makes none", fix="leave it out"
        )
    stack = ExitStack()
    path = stack.enter_context(_opened(src, wanted, name, compare=True))
    atexit.register(stack.close)
    return path


@takes_keywords(choices_of_source())
@contextmanager
def direct(  # noqa: PLR0913 - the options of the one call are its parameters
    src: SourcePlace,
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    zero_stage: ZeroStage | str | int | None = None,
    dtype: WeightDtype | str | None = None,
    to: str | None = None,
    framework: str | None = None,
    tag: str | int | None = None,
    rules: str | None = None,
    family: str | None = None,
    opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
    compare: bool = True,
    **given: Unpack[ChoiceKeywords],
) -> Generator[str]:
    """Resume from a checkpoint of another layout without a conversion: what `ensure` would write is loaded directly.

        with reshard.direct("run1/checkpoint-500") as path:
            trainer.train(resume_from_checkpoint=path)

    The path is a temporary directory with the names of the files. Within the block `torch.load` and torch's distributed
    checkpoints read their contents from the source, in this process; small files are real. Nothing is written below the
    source. Every process of the run must enter the block; each has a directory of its own.

    A problem on one process of a DeepSpeed or FSDP run ends the load on all: DeepSpeed's `load_checkpoint` raises the
    typed error on each of them, and torch a `CheckpointException` that holds it.

    Args:
        src: A local checkpoint, as for `ensure`.
        dp: Data-parallel ranks, as for `ensure`, and so are the next ones.
        tp: See `ensure`.
        pp: See `ensure`.
        ep: See `ensure`.
        zero_stage: See `ensure`.
        dtype: See `ensure`.
        to: See `ensure`.
        framework: See `ensure`.
        tag: See `ensure`.
        **given: Choices where the source's files leave several ways to read it.
        rules: See `ensure`.
        family: See `ensure`.
        opaque: See `ensure`.
        compare: Compare the copies and rounded masters of the source first, as conversions do. Rank 0 reads them.

    Returns:
        A context manager with the path: `src` itself if it has the wanted layout.

    Raises:
        SourceError: `checkpoint.incomplete`, and all errors of reading the source.
        RequestError: As `ensure`; `request.unsatisfiable` for a source that is not local.
    """
    name = None if tag is None else str(tag)
    wanted = _wanted(
        src, name, to, framework, given,
        {
            "dp": dp, "tp": tp, "pp": pp, "ep": ep, "zero_stage": zero_stage, "dtype": dtype, "rules": rules,
            "family": family, "opaque": opaque,
        },
    )  # fmt: skip
    with _opened(src, wanted, name, compare=compare) as path:
        yield path


@contextmanager
def _opened(src: SourcePlace, wanted: Wanted, tag: str | None, *, compare: bool) -> Generator[str]:
    """A directory of stubs in the wanted layout, which are served as long as the context lasts."""
    source, _ = located(src)
    path = local_path(source)
    if path is None:
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(source)} is not on this machine, and what lies beside it is not read from there",
            fix="convert it: reshard.ensure(URL, out=DIR); or load it: "
            "reshard.deepspeed.load_checkpoint(engine, URL), reshard.dcp.Reader(URL)",
        )
    found = find_source(path, tag, for_another_run=wanted.loader.kind is not None)
    maker = DirectLoader(compare=compare)
    with maker.home() as place:
        task = _Task(wanted, maker, Deadline(None), Sharing(EnsureWorkers.ONE, Launch.of({}), possible=False))
        path = _Local(task, source, found, place).open(place)
        with maker.serving():
            yield path


def _wanted(  # noqa: PLR0917 - names that both callers have
    src: SourcePlace,
    tag: str | None,
    to: str | None,
    framework: str | None,
    choices: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Wanted:
    """The layout that a call asks for; `choices` are those of the source, by their present or former names."""
    said: dict[str, Any] = {**choices, **({} if framework is None else {"framework": framework})}
    said = present_names(said, declared_options())
    return Wanted.of(
        given,
        environ=os.environ,
        loader=loader_of(src, tag, to=to, framework=said.pop("framework", None)),
        choices=source_of(src, {**said, "tag": tag}).given(),
    )


def loader_of(src: SourcePlace, tag: str | None, *, to: str | None = None, framework: str | None = None) -> Loader:
    """The program that will load the result of a source; a look into a local directory tells the source's own.

    Raises:
        RequestError: `request.invalid`.
    """
    path = local_path(located(src)[0])
    megatron = path is not None and megatron_run(path, tag) is not None
    place = None if path is None or megatron else path if tag is None else os.path.join(path, tag)
    own = place is not None and is_distributed(place)
    unread = path is None or (place is not None and not own and of_another_package(place))
    named = None if framework is None else str(framework)
    return Loader(to, named, source_is_distributed=own, source_is_megatron=megatron, source_is_unread=unread)


def ensured(
    src: SourcePlace,
    wanted: Wanted,
    *,
    tag: str | None = None,
    out: str | os.PathLike[str] | None = None,
    url: str | None = None,
    timeout_s: float | None = None,
    workers: EnsureWorkers | str = EnsureWorkers.AUTO,
    on_progress: Callable[[Progress], None] | None = None,
) -> Ensured:
    """Do as `ensure` does, and also return how the result was obtained."""
    source, filesystem = located(src)
    place = None if out is None else text_of(out, "out")
    service = url or os.environ.get("RESHARD_URL") or None
    if service is not None:
        refuse_for_service(source, filesystem)
    deadline = Deadline(timeout_s)
    chosen = _workers(workers)
    maker: Converter = LocalConverter(deadline, on_progress) if service is None else ServiceConverter(service, deadline)
    sharing = Sharing(chosen, Launch.of(os.environ), possible=service is None)
    task = _Task(wanted, maker, deadline, sharing, filesystem)
    path = local_path(source)
    if path is None or (place is not None and local_path(place) is None):
        return task.remote(source, tag, place)
    found = find_source(path, tag, for_another_run=wanted.loader.kind is not None)
    return _Local(task, source, found, None if place is None else local_path(place)).run()


@dataclass(frozen=True)
class _Task:
    """The wanted layout, and the engine or service that makes it."""

    wanted: Wanted
    maker: Converter
    deadline: Deadline
    sharing: Sharing
    filesystem: str | None = None
    """The profile of the source's file system, if the caller brought the file system."""

    def request(
        self, source: SourceSpec, target: str, wanted: ResumeLayout, beside: str | None = None
    ) -> ConvertRequest:
        """The request of the conversion; `beside` is the directory of a trainer's files, if the target keeps them."""
        asked, record = self.wanted, known_targets()[wanted.to]
        given = {"rules": asked.rules, "family": asked.family}
        given |= {"trainer_files": beside} if "trainer_files" in record.options else {}
        fields: dict[str, Any] = {
            "source": source,
            "target": target,
            "to": wanted.to,
            "dtype": wanted.dtype,
            "opaque": asked.opaque,
            "memory_limit_bytes": asked.memory_limit_bytes,
            "layout": wanted.asked,
            "options": wanted.options,
            **({"pointer": True} if record.is_tag else {}),
            **{name: value for name, value in given.items() if value is not None},
        }
        try:
            return ConvertRequest.model_validate(nested(fields))
        except ValidationError as error:
            raise invalid(error, {}, keywords=True) from None

    def _spec(self, url: str, tag: str | None) -> SourceSpec:
        return SourceSpec(url=url, tag=tag, profile=self.filesystem, **self.wanted.choices)

    def remote(self, source: str, tag: str | None, out: str | None) -> Ensured:
        """Handle an object store: processes elect no owner, and files beside the tag are not copied."""
        spec = self._spec(source, tag)
        try:
            found = self.maker.inspect(spec, self.wanted.launch())
        except SourceError as error:
            step = RemoteStep.of(source, error) if self.wanted.loader.kind is None else None
            if step is None:
                raise
            return self._remote_step(source, step, out, error)
        wanted = _wanted_of(found)
        if wanted.fits:
            return Ensured(source, Outcome.SOURCE)
        place = _said_place(source, out)
        own = found.tag or source.rstrip("/").rpartition("/")[2]
        tracker = known_targets()[wanted.to].tracker
        iterations = tracker in TRACKERS
        if iterations and not is_iteration(own):
            experts = f" --ep {wanted.layout.ep}" if wanted.layout.ep > 1 else ""
            raise RequestError(
                "request.invalid",
                f"{printable(source)} is of Megatron-core, and its tracker can name {printable(own)} in no result",
                fix=f"reshard convert {shlex.quote(source)} DST/iter_NNNNNNN --to {wanted.to}{experts}",
            )
        name = own if tracker else None
        self._convert_into(spec, found, wanted, place, name)
        # Who names an iteration gets an iteration, as of a local directory.
        named = iterations and found.tag is None
        return Ensured(f"{place.rstrip('/')}/{own}" if named else place, Outcome.CONVERTED, wanted)

    def _remote_step(self, source: str, step: RemoteStep, out: str | None, error: SourceError) -> Ensured:
        """Make a run of one step: each model, and the tracker, which is written last and makes the result complete.

        Raises:
            SourceError: `error` for models that are of another kind than files of ranks.
        """
        specs = [self._spec(step.home, f"{step.name}/{m}") for m in step.models]
        launch = self.wanted.launch()
        found = [self.maker.inspect(spec, launch) for spec in specs]
        wanted = [_wanted_of(f) for f in found]
        if not all(each.to in _FILES_OF_RANKS for each in wanted):
            raise error
        if all(each.fits for each in wanted):
            return Ensured(source, Outcome.SOURCE)
        place = _said_place(source, out).rstrip("/")
        here, maker = local_path(place), self.maker
        if here is None and not isinstance(maker, LocalConverter):
            raise RequestError(
                "request.invalid",
                f"{printable(source)} holds a step of a run, and the service writes no tracker into {printable(place)}",
                fix=f"convert here: unset RESHARD_URL; or name one model: --tag {specs[0].tag}",
            )
        for spec, one, each in zip(specs, found, wanted, strict=True):
            self._convert_into(spec, one, each, f"{place}/{spec.tag}")
        if here is not None:
            track(here, step.tracker, step.name)
        elif isinstance(maker, LocalConverter):
            maker.put_text(f"{place}/{step.tracker}", step.name.rpartition("_")[2])
        return Ensured(f"{place}/{step.name}" if step.is_source else place, Outcome.CONVERTED, wanted[-1])

    def _convert_into(
        self, spec: SourceSpec, found: Inspection, wanted: ResumeLayout, place: str, name: str | None = None
    ) -> None:
        """Convert a source of an object store into a place, or into the tag `name` of a save directory there."""
        key = _key(self.wanted.key(), spec.url, place, found.model_dump_json(exclude=_JOINED_LATER))
        here = local_path(place)
        work = self.sharing.among_all(found.total_bytes)
        if work is not None and not self.sharing.launch.first_on_node:
            self._leave_to_the_first(SourceSpec(url=place, tag=name))
        request = self.request(spec, place if name is None else f"{place.rstrip('/')}/{name}", wanted)
        if known_targets()[wanted.to].tracker:
            # The tracker is the last of the conversion's own files; a service writes it, too.
            request = request.model_copy(update={"pointer": True})
        tags = () if name is None else (name,)
        self.maker.convert(request, key, lambda: here is None or finished(here, tags), work)

    def _leave_to_the_first(self, result: SourceSpec) -> None:
        """Wait until the result can be read, or until the first process of this node may have been lost."""
        until, pauses = time.monotonic() + LATE_S, pauses_s()
        while time.monotonic() < until and not self.deadline.passed():
            # A checkpoint that is not committed cannot be read. The conversion itself then tells if it is the result.
            with suppress(ReshardError):
                if _wanted_of(self.maker.inspect(result, self.wanted.launch())).fits:
                    return
            time.sleep(next(pauses))


@dataclass(frozen=True, slots=True)
class RemoteStep:
    """A step of verl or SkyRL in an object store, with a checkpoint for each model."""

    home: str
    """The directory of the run."""
    name: str
    models: tuple[str, ...]
    tracker: str
    """The file in which the run names the step that it resumes from."""
    is_source: bool
    """True if the caller named the step, and not its run."""

    @classmethod
    def of(cls, source: str, error: SourceError) -> RemoteStep | None:
        """The step that the engine found in place of a checkpoint, by the details of its error; None for others."""
        models: list[str] = error.details.get("models", [])
        steps = {model.rpartition("/")[0] for model in models}
        if len(steps) != 1:
            return None
        above, _, last = source.rstrip("/").rpartition("/")
        is_source = not (step := steps.pop())
        if STEP.fullmatch(name := step or last) is None:
            return None
        names = tuple(model.rpartition("/")[2] for model in models)
        tracker = error.details.get("tracker") or TRACKERS[0]
        return cls(above if is_source else source.rstrip("/"), name, names, tracker, is_source)


def _said_place(source: str, out: str | None) -> str:
    if out is None:
        raise RequestError(
            "request.invalid",
            f"{printable(source)} is not on this machine, and its layout is another one",
            fix="say where the result goes: --out DIR, or reshard.ensure(src, out=DIR)",
        )
    return out


class _Local:
    """A call with a local source and a local result: one process converts, the others wait for its record."""

    def __init__(self, task: _Task, src: str, source: LocalSource, out: str | None) -> None:
        self._task, self._src, self._source, self._out = task, src, source, out
        self._home, named = out or source.home, "" if out is None else "out"
        if out is not None and self._is_directory:
            # The result is this directory itself, which the conversion makes anew: its record lies beside it.
            self._home, name = os.path.split(out.rstrip("/"))
            named = f"out {name}"
        self._records = Records(self._home)
        # The key contains no paths: hosts may see the directory of the records under different paths.
        self._facts = (*source.tags, source.fingerprint(), named)
        self._asked = _key(task.wanted.key(), *self._facts)
        """Key of this call. Other calls with the same arguments wait for its record."""
        self._nonce = ""

    def run(self) -> Ensured:
        """Return the result, made by this process or by another one.

        Raises:
            ReshardError: The result cannot be made; this may be the error of another process that this one waited for.
        """
        if (known := self._known(self._asked)) is not None:
            return known
        try:
            self._records.prepare()
        except OSError as error:
            return self._fits_or(storage_error(error, self._home))
        election, pauses = Election(self._records.claim(self._asked)), pauses_s()
        helper = Helper(self._records, self._asked, self._task.sharing, self._requests)
        while True:
            with writing(self._records.folder):
                claim = election.claim()
            if claim is not None:
                with claim:
                    return self._as_winner(claim.nonce)
            if self._task.deadline.passed():
                raise self._task.deadline.error(f"another process's conversion of {printable(self._src)}")
            if not helper.help(self._task.maker, election.watched):
                time.sleep(next(pauses))
            if (known := self._known(self._asked)) is not None:
                return known
            self._records.raise_told(self._asked, election.watched)

    def _requests(self, target: str, wanted: ResumeLayout) -> list[ConvertRequest]:
        """The conversions that fill a save directory, in their order; one if a directory is the checkpoint itself."""
        if self._is_directory:
            beside = self._source.home if self._source.has_trainer_files else None
            return [self._task.request(self._specs()[-1], target, wanted, beside)]
        specs = zip(self._source.tags, self._specs(), strict=True)
        return [self._task.request(spec, os.path.join(target, tag), wanted) for tag, spec in specs]

    def _specs(self) -> list[SourceSpec]:
        """The sources of the tags."""
        home, whole = self._source.home, self._source.distributed
        choices = self._task.wanted.choices
        return [SourceSpec(url=home, tag=None if whole else tag, **choices) for tag in self._source.tags]

    @property
    def _is_directory(self) -> bool:
        """True for a result that is a directory itself, and no tag in a save directory."""
        kind = self._task.wanted.loader.kind
        # A result of the source's own kind lies as the source does.
        return self._source.distributed if kind is None else not known_targets()[kind].is_tag

    @property
    def _made_tags(self) -> tuple[str, ...]:
        """The tags of a result; none in a checkpoint that is a directory itself."""
        return () if self._is_directory else self._source.tags

    def _as_winner(self, nonce: str) -> Ensured:
        self._nonce = nonce
        try:
            made = self._known(self._asked) or self._make()
        except ReshardError as error:
            self._records.tell_failure(self._asked, nonce, error)
            raise
        self._records.forget_failure(self._asked)
        return made

    def _fits_or(self, error: Exception) -> Ensured:
        """Return the source if it has the wanted layout, although nothing can be written; else raise `error`."""
        if _wanted_of(self._inspected()[-1]).fits:
            return Ensured(self._src, Outcome.SOURCE)
        raise error

    def _inspected(self) -> list[Inspection]:
        """Inspect the tags of the source.

        Raises:
            SourceError: All errors of reading the source.
            StorageError: `storage.unavailable` if the service does not find the source that this process sees.
        """
        try:
            launch = self._task.wanted.launch(beside=self._framework_beside)
            return [self._task.maker.inspect(spec, launch) for spec in self._specs()]
        except SourceError as error:
            if error.code != "source.not_found":
                raise
            # At `source.not_found` job scripts train from scratch, but here a checkpoint exists.
            if isinstance(self._task.maker, LocalConverter):
                raise SourceError("source.unknown_kind", error.message, fix=error.fix) from error
            raise StorageError(
                "storage.unavailable",
                f"{printable(self._source.home)} exists here, but the service does not see it: {error.message}",
                fix="check that the service sees the same file system, or convert here: unset RESHARD_URL",
            ) from error

    def _known(self, key: str) -> Ensured | None:
        """The result of an earlier call, if it still exists."""
        record = self._records.read(key)
        if record is None or not record.finished:
            return None
        if (place := self._records.place(record)) is None:
            return Ensured(self._src, Outcome.SOURCE)
        return Ensured(self._returned(place), Outcome.EARLIER) if finished(place, self._made_tags) else None

    def _returned(self, save_directory: str) -> str:
        """The path in a save directory that matches the kind of `src`: save directory or tag directory."""
        names_tag = self._source.names_tag and bool(self._made_tags)
        return os.path.join(save_directory, self._source.step or self._source.tag) if names_tag else save_directory

    def _make(self) -> Ensured:
        asked, found = self._task.wanted, self._inspected()
        if all(_wanted_of(f).fits for f in found):
            self._records.write(self._asked, None, finished=True)
            return Ensured(self._src, Outcome.SOURCE)
        wanted = _wanted_of(found[-1])
        # Calls with other arguments may mean this result, too: `--dp 4`, or a world of four processes.
        wishes = [asked.dtype or "", asked.rules or "", asked.family or "", asked.opaque]
        wishes += [w for w in (asked.megatron_args, asked.default_framework) if w is not None]
        key = _key(wanted.identity, *wishes, *self._facts)
        name = "-".join((self._source.tag.replace("/", "_"), wanted.label, key[:8]))
        target = self._out or os.path.join(self._records.folder, name)
        made = self._known(key)
        if made is None:
            self._refuse_foreign(target, key)
            self._records.write(key, target, finished=False)
            self._convert(target, wanted, _key(key, self._home), sum(f.total_bytes for f in found))
            self._records.write(key, target, finished=True)
            made = Ensured(self._returned(target), Outcome.CONVERTED, wanted)
        self._records.write(self._asked, target, finished=True)
        return made

    def open(self, place: str) -> str:
        """Fill a directory by a maker that writes no conversions; returns the path to load.

        Raises:
            ReshardError: As `run`.
        """
        found = self._inspected()
        if all(_wanted_of(f).fits for f in found):
            return self._src
        if self._is_directory:
            place = os.path.join(place, self._source.tag.replace("/", "_"))
        self._fill(place, _wanted_of(found[-1]), lambda request: self._task.maker.convert(request, "", lambda: False))
        return self._returned(place)

    @property
    def _framework_beside(self) -> str | None:
        """The framework whose files lie beside a source that is not distributed itself; None where there are none."""
        if self._source.distributed and not self._source.full:
            return None
        if self._source.is_trainers:
            return Framework.TRAINER
        return Framework.ACCELERATE if self._source.has_trainer_files else None

    def _convert(self, target: str, wanted: ResumeLayout, key: str, size_bytes: int) -> None:
        """Fill a save directory: first the files beside the tags, then the tags, and `latest` last."""
        task, tags = self._task, self._made_tags
        work = task.sharing.among_nodes(size_bytes)
        if work is not None:
            node, path = task.sharing.launch.node, self._records.relative(target)
            self._records.invite(self._asked, Invitation(nonce=self._nonce, node=node, path=path, wanted=wanted))

        def convert(request: ConvertRequest) -> None:
            own = _key(key, os.path.relpath(request.target, target))
            task.maker.convert(request, own, lambda: finished(target, tags), work)

        try:
            self._fill(target, wanted, convert)
        finally:
            self._records.withdraw(self._asked)
        if not finished(target, tags):
            raise IntegrityError(
                "integrity.mismatch",
                f"{printable(target)} is not whole after its conversion: `latest` or a manifest is missing",
                fix="call again; if a service converted, check that it sees the same file system",
            )

    def _fill(self, target: str, wanted: ResumeLayout, convert: Callable[[ConvertRequest], None]) -> None:
        """The files beside the tags, the tags, and what names them."""
        record = known_targets()[wanted.to]
        if record.is_tag:
            with writing(target):
                os.makedirs(target, exist_ok=True)
            place_companions(self._source, target, wanted.layout.world_size)
        # Each conversion writes its tag into `latest` when it commits. Only a record is written after that.
        for request in self._requests(target, wanted):
            convert(request)
        if record.is_tag:
            place_schedulers(target, self._made_tags)
        elif self._source.step:
            place_step(self._source, target)
        elif record.tracker:
            track(target, record.tracker, self._source.tag)

    def _refuse_foreign(self, target: str, key: str) -> None:
        """Refuse a directory of the user that holds another checkpoint, before its neighbours are replaced.

        Raises:
            RequestError: `request.target_exists`.
        """
        if self._out is None or self._records.read(key) is not None:
            return
        trackers = TRACKERS if self._source.megatron else ()
        if any(os.path.lexists(os.path.join(target, n)) for n in (*self._source.tags, "latest", *trackers)):
            raise RequestError(
                "request.target_exists",
                f"{printable(target)} holds a checkpoint that is not of this source, tag and layout",
                fix="name another directory: --out DIR, or leave it out",
            )


def _wanted_of(found: Inspection) -> ResumeLayout:
    """The result that the launch loads, from the inspection that was made for it.

    Raises:
        JobError: `service.unavailable`: the service is of a release that does not know launches.
    """
    if found.resume is None:
        raise JobError(
            "service.unavailable",
            "the service describes no layout for a launch: it is older than this client",
            fix="upgrade the service; or convert here: leave --url out, or unset RESHARD_URL",
        )
    return found.resume


def _workers(text: str) -> EnsureWorkers:
    try:
        return EnsureWorkers(text)
    except ValueError:
        raise RequestError(
            "request.invalid", f"workers is {printable(text)!r}", fix=f"workers is one of: {', '.join(EnsureWorkers)}"
        ) from None


def _key(*facts: str) -> str:
    """A key that is the same for equal facts."""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
