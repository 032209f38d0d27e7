"""The one call: what is wanted, what is there, who converts.

    trainer.train(resume_from_checkpoint=reshard.ensure(checkpoint))
    accelerator.load_state(reshard.ensure(checkpoint))
    engine.load_checkpoint(reshard.ensure(checkpoint))

A function and no callback: Trainer and Accelerate load DeepSpeed's state before their hooks run (transformers 5.23.0
`trainer.py` `_prepare_for_training`, accelerate 1.15.0 `accelerator.py` `load_state`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from reshard.ensuring.election import Election
from reshard.ensuring.makers import Deadline, Here, Maker, Service, pauses_s
from reshard.ensuring.places import (
    LocalSource,
    find_source,
    finished,
    local_path,
    place_companions,
    storage_error,
    writing,
)
from reshard.ensuring.records import Records
from reshard.ensuring.world import Wanted, fits, name_of
from reshard.errors import IntegrityError, RequestError, ReshardError, SourceError, StorageError, printable
from reshard.models import (
    ConvertRequest,
    Inspection,
    NativeLayout,
    OpaquePolicy,
    Progress,
    SourceSpec,
    TargetFormat,
    WeightDtype,
    ZeroStage,
)


class Outcome(StrEnum):
    """How a checkpoint in the wanted layout was come by."""

    SOURCE = "source"
    """The source has that layout."""
    EARLIER = "earlier"
    """An earlier call, or another process, had made it."""
    CONVERTED = "converted"


@dataclass(frozen=True, slots=True)
class Ensured:
    """A checkpoint in the wanted layout."""

    path: str
    outcome: Outcome
    layout: NativeLayout | None = None
    """What was converted to; None where nothing was."""


def ensure(  # noqa: PLR0913 - the options of the one call are its parameters
    src: str | os.PathLike[str],
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    zero_stage: ZeroStage | str | int | None = None,
    dtype: WeightDtype | str | None = None,
    tag: str | None = None,
    out: str | os.PathLike[str] | None = None,
    rules: str | None = None,
    family: str | None = None,
    opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
    url: str | None = None,
    timeout_s: float | None = None,
) -> str:
    """The path of a checkpoint in the wanted layout; every process of a run may call it, one converts.

    Args:
        src: A save directory (with `latest`), a Trainer's `checkpoint-N`, an Accelerate directory, or a tag directory.
            The result is of the same kind.
        dp: Data-parallel ranks; by default what the visible world (`WORLD_SIZE` and the like) leaves after tp and pp.
        tp: Tensor-parallel ranks; by default the source's, as for `pp` and `ep`.
        pp: Pipeline stages.
        ep: Expert-parallel ranks.
        zero_stage: 0, 1, 2, 3 or `bf16`; by default the source's.
        dtype: Of the model; by default the source's.
        tag: Which tag of a save directory; by default what `latest` names.
        out: Save directory to create; by default one below `.reshard` in the source's.
        rules: How parameters are cut, as YAML, where the source does not say.
        family: A named pack of such rules.
        opaque: Objects of other classes than DeepSpeed and torch write are refused by default; `keep` writes them out
            again, unexecuted, `drop` None in their place.
        url: A service that converts; by default `RESHARD_URL`, and this process if there is none.
        timeout_s: For how long to wait, for others or for the conversion; for ever by default.

    Returns:
        `src` if it fits; else the path of a finished conversion, an earlier one if there is one.

    Raises:
        SourceError: `checkpoint.incomplete`, and what reading finds.
        RequestError: `request.invalid` if no `dp` is given and no world is visible; `request.target_exists` if `out`
            holds something else.
        JobError: `job.wait_timeout`.
    """
    axes = {"dp": dp, "tp": tp, "pp": pp, "ep": ep}
    wanted = Wanted.of(
        axes, zero_stage=zero_stage, dtype=dtype, rules=rules, family=family, opaque=opaque, environ=os.environ
    )
    return ensured(src, wanted, tag=tag, out=out, url=url, timeout_s=timeout_s).path


def ensured(
    src: str | os.PathLike[str],
    wanted: Wanted,
    *,
    tag: str | None = None,
    out: str | os.PathLike[str] | None = None,
    url: str | None = None,
    timeout_s: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Ensured:
    """As `ensure`, and how the result was come by."""
    source, place = os.fspath(src), None if out is None else os.fspath(out)
    service = url or os.environ.get("RESHARD_URL") or None
    deadline = Deadline(timeout_s)
    maker: Maker = Here(deadline, on_progress) if service is None else Service(service, deadline)
    task = _Task(wanted, maker, deadline)
    path = local_path(source)
    if path is None or (place is not None and local_path(place) is None):
        return task.remote(source, tag, place)
    return _Local(task, source, find_source(path, tag), None if place is None else local_path(place)).run()


@dataclass(frozen=True)
class _Task:
    """What is wanted, and who makes it."""

    wanted: Wanted
    maker: Maker
    deadline: Deadline

    def request(self, source: SourceSpec, target: str, layout: NativeLayout) -> ConvertRequest:
        """The conversion."""
        return ConvertRequest(
            source=source,
            target=target,
            to=TargetFormat.ZERO,
            layout=layout,
            dtype=self.wanted.dtype,
            rules=self.wanted.rules,
            family=self.wanted.family,
            opaque=self.wanted.opaque,
        )

    def remote(self, source: str, tag: str | None, out: str | None) -> Ensured:
        """Where a side is in a store that only the engine or the service can see: no claim, no companions."""
        spec = SourceSpec(url=source, tag=tag)
        found = self.maker.inspect(spec)
        layout = self.wanted.layout(found)
        if fits(found, layout, self.wanted.dtype):
            return Ensured(source, Outcome.SOURCE)
        if out is None:
            raise RequestError(
                "request.invalid",
                f"{printable(source)} is not on this machine, and its layout is another one",
                fix="say where the result goes: --out DIR, or reshard.ensure(src, out=DIR)",
            )
        name = found.tag or source.rstrip("/").rpartition("/")[2]
        key = _key(self.wanted.key(), source, out, found.model_dump_json())
        target = f"{out.rstrip('/')}/{name}"
        here = local_path(out)
        self.maker.convert(self.request(spec, target, layout), key, lambda: here is None or finished(here, (name,)))
        return Ensured(out, Outcome.CONVERTED, layout)


class _Local:
    """A local source and a local result: one process works, the others wait for its record."""

    def __init__(self, task: _Task, src: str, source: LocalSource, out: str | None) -> None:
        self._task, self._src, self._source, self._out = task, src, source, out
        self._home = out or source.home
        self._records = Records(self._home)
        # Without paths: hosts may see the directory, in which the records lie, under different ones.
        self._facts = (*source.tags, source.fingerprint(), "" if out is None else "out")
        self._asked = _key(task.wanted.key(), *self._facts)
        """Key of this call: what others that ask in the same words wait for."""

    def run(self) -> Ensured:
        """The result, made by this process or by another one.

        Raises:
            ReshardError: Why it cannot be made, also if that was another process's error while this one waited for it.
        """
        if (known := self._known(self._asked)) is not None:
            return known
        try:
            self._records.prepare()
        except OSError as error:
            return self._fits_or(storage_error(error, self._home))
        election, pauses = Election(self._records.claim(self._asked)), pauses_s()
        while True:
            with writing(self._records.folder):
                claim = election.claim()
            if claim is not None:
                with claim:
                    return self._as_winner(claim.nonce)
            if self._task.deadline.passed():
                raise self._task.deadline.error(f"another process's conversion of {printable(self._src)}")
            time.sleep(next(pauses))
            if (known := self._known(self._asked)) is not None:
                return known
            self._records.raise_told(self._asked, election.watched)

    def _as_winner(self, nonce: str) -> Ensured:
        try:
            made = self._known(self._asked) or self._make()
        except ReshardError as error:
            self._records.tell_failure(self._asked, nonce, error)
            raise
        self._records.forget_failure(self._asked)
        return made

    def _fits_or(self, error: Exception) -> Ensured:
        """Where nothing can be written: the source if it fits, else why not."""
        found = self._inspected()[-1]
        if fits(found, self._task.wanted.layout(found), self._task.wanted.dtype):
            return Ensured(self._src, Outcome.SOURCE)
        raise error

    def _inspected(self) -> list[Inspection]:
        """What the tags are.

        Raises:
            StorageError: `storage.unavailable` if whoever looks does not see what this process sees.
        """
        try:
            return [self._task.maker.inspect(SourceSpec(url=self._source.home, tag=tag)) for tag in self._source.tags]
        except SourceError as error:
            if error.code != "source.not_found":
                raise
            # Job scripts start from nothing at that code, and here something is.
            raise StorageError(
                "storage.unavailable",
                f"{printable(self._source.home)} is here, and not where it would be converted: {error.message}",
                fix="check that the service sees the same file system, or convert here: unset RESHARD_URL",
            ) from error

    def _known(self, key: str) -> Ensured | None:
        """What an earlier call found or made, if it is still there."""
        record = self._records.read(key)
        if record is None or not record.finished:
            return None
        if (place := self._records.place(record)) is None:
            return Ensured(self._src, Outcome.SOURCE)
        return Ensured(self._returned(place), Outcome.EARLIER) if finished(place, self._source.tags) else None

    def _returned(self, save_directory: str) -> str:
        """A path of the kind that the caller named."""
        return os.path.join(save_directory, self._source.tag) if self._source.names_tag else save_directory

    def _make(self) -> Ensured:
        wanted, found = self._task.wanted, self._inspected()
        if all(fits(f, wanted.layout(f), wanted.dtype) for f in found):
            self._records.write(self._asked, None, finished=True)
            return Ensured(self._src, Outcome.SOURCE)
        layout = wanted.layout(found[-1])
        # Calls in other words may mean this result too: `--dp 4`, or a world of four processes.
        wishes = (wanted.dtype or "", wanted.rules or "", wanted.family or "", wanted.opaque)
        key = _key(layout.model_dump_json(), *wishes, *self._facts)
        name = name_of(self._source.tag, layout, wanted.dtype, key)
        target = self._out or os.path.join(self._records.folder, name)
        made = self._known(key)
        if made is None:
            self._refuse_foreign(target, key)
            self._records.write(key, target, finished=False)
            self._convert(target, layout, _key(key, self._home))
            self._records.write(key, target, finished=True)
            made = Ensured(self._returned(target), Outcome.CONVERTED, layout)
        self._records.write(self._asked, target, finished=True)
        return made

    def _convert(self, target: str, layout: NativeLayout, key: str) -> None:
        """Fill a save directory: what lies beside the tags first, then the tags, `latest` last."""
        task, tags = self._task, self._source.tags
        with writing(target):
            os.makedirs(target, exist_ok=True)
        place_companions(self._source, target, layout.dp * layout.tp * layout.pp)
        # Each conversion names its tag in `latest` when it is committed; nothing comes after that but our record.
        for tag in tags:
            request = task.request(SourceSpec(url=self._source.home, tag=tag), os.path.join(target, tag), layout)
            task.maker.convert(request, _key(key, tag), lambda: finished(target, tags))
        if not finished(target, tags):
            raise IntegrityError(
                "integrity.mismatch",
                f"{printable(target)} is not whole after its conversion: `latest` or a manifest is missing",
                fix="call again; if a service converted, check that it sees the same file system",
            )

    def _refuse_foreign(self, target: str, key: str) -> None:
        """Refuse a directory of the user that holds another checkpoint, before its neighbours are replaced.

        Raises:
            RequestError: `request.target_exists`.
        """
        if self._out is None or self._records.read(key) is not None:
            return
        if any(os.path.lexists(os.path.join(target, n)) for n in (*self._source.tags, "latest")):
            raise RequestError(
                "request.target_exists",
                f"{printable(target)} holds a checkpoint that is not of this source, tag and layout",
                fix="name another directory: --out DIR, or leave it out",
            )


def _key(*facts: str) -> str:
    """Equal for equal facts."""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
