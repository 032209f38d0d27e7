"""Local checkpoints as directories: finds the tag, checks that it is complete, and copies the files beside it.

Source: transformers 5.23.0 `trainer.py` (`_save_checkpoint`, `_load_rng_state`), `trainer_jit_checkpoint.py` (the
sentinel), accelerate 1.15.0 `checkpointing.py` (`load_accelerator_state`), `accelerator.py` (`load_state`: one tag
`pytorch_model`, `pytorch_model_1`, ... per model), deepspeed 0.19.8 `runtime/engine.py` (`latest`); verl 0.9.1
`trainer/ppo/ray_trainer.py` and `utils/checkpoint/checkpoint_manager.py` (a run's steps and its tracker), SkyRL
0.3.0 `train/trainer.py` (the same under another tracker's name); Megatron-LM `training/checkpointing.py` (a run's
iterations and its tracker).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from reshard.choices import INCOMPLETE, MANIFEST, POINTERS, RECORDS
from reshard.engine import load_engine
from reshard.errors import ReshardError, SourceError, StorageError, listed, printable, storage_code
from reshard.installed_formats import OWN_ENTRY_POINTS, installed_formats

_MAX_POINTER_BYTES = 1_024
_COPIED_BYTES = 16 << 20
"""Largest size of a file that is copied; larger ones are linked."""
_MODEL_TAG = re.compile(r"pytorch_model(?:_(\d+))?")
_RANK_FILE = re.compile(r"(rng_state|random_states)(?:_(\d{1,7}))?(\.pth|\.pkl)")
_SHARDS = re.compile(r"\.metadata|__\d+\.metadata|pytorch_model_fsdp_\d+")
_SHARD_FOLDERS = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
_OPTIMIZER = re.compile(r"optimizer(_\d+)?\.(bin|pt)")
_OF_TRAINER = "optimizer.pt"
_WEIGHTS = re.compile(r"(?:model\.safetensors|pytorch_model\.bin)(?:\.index\.json)?")
_FULL_MODEL = re.compile(r"pytorch_model_fsdp(_[0-9]+)?\.bin")
"""A model under FULL_STATE_DICT. Source: accelerate 1.15.0 `utils/fsdp_utils.py`."""
_SINGLE = (".pt", ".pth", ".ckpt", ".pth.tar")
"""Suffixes of the names that scripts and Lightning give a file of `torch.save` that holds everything."""
_SCHEDULER = re.compile(r"scheduler(_\d+)?\.(bin|pt)")
_TRAINER_STATE = "trainer_state.json"
_OF_RANK = re.compile(
    r"model_world_size_[0-9]+_rank_[0-9]+\.pt|pytorch_model_fsdp_[0-9]+_rank[0-9]+\.bin"
    r"|optimizer_[0-9]+\.pt|metadata\.pkl"
)
"""A file of one rank of FSDP: verl's and SkyRL's, Accelerate's without DCP, torch_checkpointing's; or its metadata."""
STEP = re.compile(r"global_step_([0-9]+)")
"""The name of a step of verl or SkyRL."""
ITERATION = re.compile(r"iter_([0-9]{7,18})")
"""The name of an iteration of Megatron-core."""
RELEASE = "release"
"""The name of a checkpoint of Megatron-core that begins a run of others, and the text of the tracker that names it."""
_MEGATRON_RANK = re.compile(r"mp_rank_[0-9]{2,}(?:_[0-9]{3,}){0,2}")
_MEGATRON_DESCRIPTION = "metadata.json"
TRACKERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
"""The files in which verl (also Megatron-core) and SkyRL name the number of the step that a run resumes from."""


def local_path(url: str) -> str | None:
    """The local path that a URL or path names; None for URLs of object stores."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return os.path.abspath(os.path.expanduser(url))
    return os.path.abspath(rest) if scheme == "file" and rest.startswith("/") else None


@dataclass(frozen=True)
class LocalSource:
    """A checkpoint in a local save directory."""

    home: str
    """The save directory: it holds tags, `latest`, and a trainer's own files."""
    tags: tuple[str, ...]
    """The tags to convert; the requested one comes last. Accelerate has one tag for each model."""
    names_tag: bool
    """True if the caller named the tag directory itself."""
    distributed: bool = False
    """True for a checkpoint that is the save directory itself, and whose one tag is only a name: a distributed one,
    files of ranks, or full files."""
    full: bool = False
    """True for full files of a trainer, which no result takes over."""
    step: str = ""
    """The directory of a step of verl or SkyRL, which holds a checkpoint for each model; these are the tags."""
    megatron: bool = False
    """True for an iteration of Megatron-core, which is the tag, in its run."""

    @property
    def tag(self) -> str:
        """The requested tag."""
        return self.tags[-1]

    @property
    def is_trainers(self) -> bool:
        """True for a `checkpoint-N` of the Trainer."""
        return os.path.isfile(os.path.join(self.home, _TRAINER_STATE))

    @property
    def has_trainer_files(self) -> bool:
        """True if a trainer's files lie beside the tags of a checkpoint that is not distributed."""
        if self.distributed or self.step:
            return False
        return self.is_trainers or any(map(_RANK_FILE.fullmatch, os.listdir(self.home)))

    def fingerprint(self) -> str:
        """A digest of the names, sizes and modification times of the tags' files."""
        digest = hashlib.sha256()
        for top in [self.home] if self.distributed else [os.path.join(self.home, tag) for tag in self.tags]:
            for path, info in _files_below(top, set()):
                name = os.fsencode(os.path.relpath(path, self.home))
                digest.update(b"%s\0%d\0%d\n" % (name, info.st_size, info.st_mtime_ns))
        return digest.hexdigest()


def _files_below(directory: str, visited: set[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    """The files below a directory with their status, also in linked directories, as conversions read them.

    A linked directory is an entry with its target, and each directory is entered once, so that links in a circle end.
    Whatever has no status is left out, such as a dead link: a conversion that needs it reports it.
    """
    directories: list[str] = []
    try:
        names = sorted(name for name in os.listdir(directory) if name != RECORDS)
    except OSError:
        return
    for path in (os.path.join(directory, name) for name in names):
        try:
            info = os.stat(path)
        except OSError:
            continue
        if not stat.S_ISDIR(info.st_mode):
            yield path, info
            continue
        if os.path.islink(path):
            # The time of the directory itself changes with entries that are none of the checkpoint's files.
            yield f"{path} -> {os.path.realpath(path)}", os.lstat(path)
        if (key := (info.st_dev, info.st_ino)) not in visited:
            visited.add(key)
            directories.append(path)
    for path in directories:
        yield from _files_below(path, visited)


def find_source(src: str, tag: str | None, *, for_another_run: bool = False) -> LocalSource:
    """Find the checkpoint of a tag and a path: a save directory, a Trainer's `checkpoint-N` or a tag directory.

    Args:
        src: The path.
        tag: The tag, if the caller names one.
        for_another_run: The caller says which kind of run will load the result, so that full files are converted.

    Raises:
        SourceError: `source.not_found` (also for an empty directory), `source.unknown_kind`, `checkpoint.bad_latest`,
            `checkpoint.incomplete`.
        StorageError: `storage.denied`, `storage.unavailable`: the directory cannot be read.
    """
    try:
        return _source(src, tag, for_another_run)
    except SourceError as error:
        fix = _newest_complete(src, tag)
        raise (SourceError(error.code, error.message, fix=fix) if fix else error) from error


def _newest_complete(src: str, tag: str | None) -> str:
    """A sentence that names the newest complete checkpoint of a run; empty if the engine is not here or knows none."""
    with suppress(ReshardError):
        listing = load_engine().run_around(os.path.realpath(src), tag) if os.path.isdir(src) else None
        if listing is not None and listing.newest is not None:
            newest, path = listing.newest, os.path.join(listing.url, listing.newest)
            if os.path.samefile(listing.url, src) and _holds_tag(path):
                complete = [s.name for s in listing.steps if s.complete]
                return (
                    f"name the newest complete checkpoint: --tag {shlex.quote(newest)} (complete: {listed(complete)})"
                )
            return f"name the newest complete checkpoint: {shlex.quote(printable(path, max_chars=1_024))}"
    return ""


def _source(src: str, tag: str | None, for_another_run: bool) -> LocalSource:  # noqa: FBT001 - as its caller's
    if os.path.isfile(src):
        raise _is_file(src)
    if not _names_in(src):
        raise SourceError("source.not_found", f"{printable(src)} does not exist, or is empty", fix="check the path")
    _refuse_incomplete(src)
    if (found := megatron_run(src, tag)) is not None:
        return _alone(found) if for_another_run else found
    if is_distributed(place := src if tag is None else os.path.join(src, tag)) or of_another_package(place):
        home = os.path.realpath(place)
        return LocalSource(home, (_tag_for(home),), names_tag=False, distributed=True)
    if (found := _of_ranks(src, tag)) is not None:
        return _of_one_model(found) if for_another_run else found
    if for_another_run and _full_files(place):
        home = os.path.realpath(place)
        return LocalSource(home, (_tag_for(home),), names_tag=False, distributed=True, full=True)
    asked = tag is not None
    if tag is None and (tag := _pointed(src)) is None:
        if not _holds_tag(src):
            raise _no_tag(src)
        home, name = os.path.split(os.path.realpath(src))
        _refuse_incomplete(home)
        return LocalSource(home, (name,), names_tag=True)
    if not _is_name(tag) or not os.path.isdir(os.path.join(src, tag)):
        said_by = "--tag" if asked else "`latest`"
        raise SourceError(
            "source.not_found" if asked else "checkpoint.bad_latest",
            f"{said_by} names {printable(tag)!r}, which is not a directory in {printable(src)}",
            fix=_tags_there(src) or "copy the checkpoint again",
        )
    return LocalSource(os.path.realpath(src), (*_other_models(src, tag), tag), names_tag=False)


def _of_ranks(src: str, tag: str | None) -> LocalSource | None:
    """Files of FSDP's ranks: one directory, or a step of verl or SkyRL with one for each model; None for others."""
    if tag is None and _holds_pointer(src):
        return None  # a save directory of DeepSpeed, whatever else lies in it
    place = os.path.realpath(src if tag is None else os.path.join(src, tag))
    if _holds_rank(place):
        return LocalSource(place, (os.path.basename(place),), names_tag=False, distributed=True)
    names_tag = tag is None and STEP.fullmatch(os.path.basename(place)) is not None
    if tag is None and not names_tag:
        if (number := _tracked(place)) is None:
            return None
        place = os.path.join(place, f"global_step_{number}")
    if STEP.fullmatch(os.path.basename(place)) is None or not os.path.isdir(place):
        return None
    home, step = os.path.split(place)
    models = sorted(n for n in os.listdir(place) if not n.startswith(".") and _holds_rank(os.path.join(place, n)))
    return LocalSource(home, tuple(f"{step}/{n}" for n in models), names_tag, step=step) if models else None


def of_another_package(directory: str) -> bool:
    """True for a directory that the format of another package recognises; its reader is asked only if there is one."""
    others = {known.name for known in installed_formats()} - OWN_ENTRY_POINTS
    return bool(others) and os.path.isdir(directory) and load_engine().format_at(directory) in others


def megatron_run(src: str, tag: str | None) -> LocalSource | None:
    """An iteration of Megatron-core: the one that the tag or a run's tracker names, or `src`; None for others."""
    if not os.access(src, os.R_OK | os.X_OK) or not os.path.isdir(src):
        return None
    if tag is None and _holds_pointer(src):
        return None  # a save directory of DeepSpeed, whatever else lies in it
    place = os.path.realpath(src if tag is None else os.path.join(src, tag))
    names_tag = tag is None and is_iteration(os.path.basename(place)) and _holds_megatron(place)
    if tag is None and not names_tag:
        if (found := _tracked_iteration(place)) is None:
            return None
        place = os.path.join(place, found)
    home, name = os.path.split(place)
    if not is_iteration(name) or not _holds_megatron(place):
        return None
    return LocalSource(home, (name,), names_tag, megatron=True)


def is_iteration(name: str) -> bool:
    """True for a name by which Megatron-core's tracker can name a directory."""
    return name == RELEASE or ITERATION.fullmatch(name) is not None


def _tracked_iteration(directory: str) -> str | None:
    """The directory that Megatron-core's tracker names; None without a tracker.

    Source: Megatron-LM `training/checkpointing.py` (`read_metadata`: a number, or `release`).
    """
    text = _tracker_text(directory, TRACKERS[0])
    return text if text == RELEASE else f"iter_{int(text):07d}" if text is not None and text.isdecimal() else None


def _alone(source: LocalSource) -> LocalSource:
    """An iteration of Megatron-core as a checkpoint that is a directory itself, for a run of another kind."""
    return LocalSource(os.path.join(source.home, source.tag), source.tags, names_tag=False, distributed=True)


def _holds_megatron(directory: str) -> bool:
    """True for `torch_dist`, whole or not, and for directories of ranks."""
    with suppress(OSError):
        names = os.listdir(directory)
        ranks = (n for n in names if _MEGATRON_RANK.fullmatch(n))
        return _MEGATRON_DESCRIPTION in names or any(os.path.isdir(os.path.join(directory, n)) for n in ranks)
    return False


def _of_one_model(source: LocalSource) -> LocalSource:
    """The only model of a step, for a run of another kind.

    Raises:
        SourceError: `checkpoint.ambiguous` for several.
    """
    places = [os.path.join(source.home, tag) for tag in source.tags]
    if source.step and len(places) > 1:
        raise SourceError(
            "checkpoint.ambiguous",
            f"{printable(os.path.join(source.home, source.step))} holds {len(places)} models",
            fix=f"name one of them: {printable(places[0])}",
        )
    return source if not source.step else LocalSource(places[0], (_tag_for(places[0]),), False, distributed=True)


def _holds_rank(directory: str) -> bool:
    with suppress(OSError):
        return any(_OF_RANK.fullmatch(n) for n in os.listdir(directory))
    return False


def _tracked(directory: str) -> str | None:
    """The number of the step that a run's tracker names; None without a tracker."""
    text = next((found for name in TRACKERS if (found := _tracker_text(directory, name)) is not None), "")
    return text if text.isdecimal() else None


def _tracker_text(directory: str, name: str) -> str | None:
    with suppress(FileNotFoundError, IsADirectoryError), open(os.path.join(directory, name), "rb") as file:
        return file.read(_MAX_POINTER_BYTES).decode("utf-8", "replace").strip()
    return None


def _full_files(directory: str) -> list[str]:
    """The names of a trainer's full files, a model and its optimizers; empty if there are not both, or tags are."""
    names = _names_in(directory)
    optimizers = sorted(n for n in names if _OPTIMIZER.fullmatch(n))
    model = _WEIGHTS if _OF_TRAINER in optimizers else _FULL_MODEL
    full = sorted(n for n in names if model.fullmatch(n))
    return [*full, *optimizers] if optimizers and full and not _tags_there(directory) else []


def _is_full(name: str) -> bool:
    """True for a full file whose tensors a result has itself."""
    return any(pattern.fullmatch(name) for pattern in (_OPTIMIZER, _FULL_MODEL))


def _is_file(src: str) -> SourceError:
    """The error for one file: job scripts that train from scratch where nothing is found must not do so here."""
    name = shlex.quote(printable(src, max_chars=1_024))
    return SourceError(
        "source.unknown_kind",
        f"{printable(src)} is a file, and `ensure` takes directories",
        fix="a run of one process or of DDP loads it as it is, on any number of ranks; for FSDP2: "
        f"reshard convert {name} DST --to dcp --framework state-dict; for DeepSpeed: --to zero --dp N; where they ask "
        "for more, `reshard inspect` of the file says what there is to choose",
    )


def _single(names: list[str]) -> str:
    """The name of the only file that may be a whole checkpoint of `torch.save`; empty for none and for several."""
    found = [n for n in names if n.endswith(_SINGLE) and not _OPTIMIZER.fullmatch(n) and not _SCHEDULER.fullmatch(n)]
    return found[0] if len(found) == 1 else ""


def _no_tag(src: str) -> SourceError:
    """The error for a directory without a tag and without `latest`."""
    names = os.listdir(src)
    weights = f"reshard convert {shlex.quote(printable(src, max_chars=1_024))} DST --to safetensors"
    tags = _tags_there(src)
    optimizers = sorted(n for n in names if _OPTIMIZER.fullmatch(n))
    if full := _full_files(src):
        return SourceError(
            "source.unknown_kind",
            f"{printable(src)} holds full files ({listed(full)}), and `ensure` writes none",
            fix=f"{'DDP and FSDP2 load' if _OF_TRAINER in full else 'FSDP2 loads'} them as they are, on any number of "
            f"ranks; for a run of DeepSpeed: --to zero; as shards: {weights.removesuffix('safetensors')}dcp",
        )
    if _TRAINER_STATE in names and not tags:
        if not optimizers and not any(map(_WEIGHTS.fullmatch, names)):
            return SourceError(
                "checkpoint.incomplete",
                f"{printable(src)} holds {_TRAINER_STATE}, and neither weights nor an optimizer",
                fix="resume from an older checkpoint",
            )
        if not optimizers:
            return SourceError(
                "source.unknown_kind",
                f"{printable(src)} was saved without an optimizer (save_only_model): no run can resume from it",
                fix=f"for the weights: {weights}",
            )
        return SourceError(
            "source.unknown_kind",
            f"{printable(src)} holds {listed(optimizers)}, and such optimizer states are not read yet",
            fix=f"DDP and FSDP2 load it as it is, on any number of ranks; for the weights: {weights}",
        )
    where = tags or _below(src)
    if not where and (single := _single(names)):
        return _is_file(os.path.join(src, single))
    return SourceError(
        "source.unknown_kind",
        f"{printable(src)} holds no `latest` and no files of DeepSpeed",
        fix=where or "name the directory that training saved into",
    )


def _below(directory: str) -> str:
    """A sentence that names the checkpoints one level down; empty if there are none."""
    found: list[str] = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                pointed = any(os.path.isfile(os.path.join(entry.path, name)) for name in POINTERS)
                if pointed or is_distributed(entry.path):
                    found.append(entry.path)
    return f"name a checkpoint below it: {listed(sorted(found))}" if found else ""


def _tag_for(directory: str) -> str:
    """The tag under which DeepSpeed finds what is made of a distributed checkpoint.

    Source: transformers 5.23.0 `integrations/deepspeed.py` (`deepspeed_load_checkpoint` looks for `global_step*`);
    accelerate 1.15.0 `accelerator.py` (`load_state`: the tag `pytorch_model`).
    """
    name = os.path.basename(directory)
    if any((match := _RANK_FILE.fullmatch(n)) and match[1] == "random_states" for n in os.listdir(directory)):
        return "pytorch_model"
    number = name.rpartition("-")[2]
    return f"global_step{number}" if number.isdecimal() and number != name else name


def is_distributed(directory: str) -> bool:
    """True for a directory of torch's distributed checkpoints, or a trainer's directory that holds such shards.

    Source: torch 2.13.0 `distributed/checkpoint/filesystem.py`, accelerate 1.15.0 `utils/fsdp_utils.py`.
    """
    with suppress(OSError):
        return any(_SHARDS.fullmatch(n) for n in os.listdir(directory))
    return False


def _names_in(directory: str) -> list[str]:
    """The names in a directory; an empty list if the directory does not exist.

    Job scripts train from scratch if no checkpoint exists. A file system that does not answer must therefore raise.
    """
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        code = "storage.denied" if isinstance(error, PermissionError) else "storage.unavailable"
        raise StorageError(code, f"{printable(directory)} cannot be read: {error.strerror or error}") from error


def _refuse_incomplete(directory: str) -> None:
    if not os.path.exists(os.path.join(directory, INCOMPLETE)):
        return
    raise SourceError(
        "checkpoint.incomplete",
        f"{printable(directory)} holds {INCOMPLETE}: the process that saved it did not finish",
        fix="resume from an older checkpoint",
    )


def _tags_there(directory: str) -> str:
    """A sentence that names the tags of a save directory, the newest first; empty if there are none."""
    found: list[tuple[float, str]] = []
    with suppress(OSError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if not name.startswith(".") and os.path.isdir(path) and _holds_tag(path):
                found.append((os.stat(path).st_mtime, name))
    names = [printable(name) for _, name in sorted(found, reverse=True)]
    return f"name an existing tag: --tag {names[0]} (there are: {', '.join(names[:8])})" if names else ""


def _pointed(directory: str) -> str | None:
    for name in POINTERS:
        path = os.path.join(directory, name)
        if os.path.isdir(path):
            return _tag_of_directory(directory, name)
        with suppress(FileNotFoundError):
            with open(path, "rb") as file:
                text = file.read(_MAX_POINTER_BYTES + 1)
            if len(text) > _MAX_POINTER_BYTES:
                raise SourceError("checkpoint.bad_latest", f"`{name}` is longer than any tag name")
            return text.decode("utf-8", "replace").strip()
    return None


def _holds_pointer(directory: str) -> bool:
    return any(os.path.lexists(os.path.join(directory, name)) for name in POINTERS)


def _tag_of_directory(directory: str, name: str) -> str:
    """The tag that a pointer names as a link to the tag's directory, as `ln -sfn global_step3 latest` makes it.

    Raises:
        SourceError: `checkpoint.bad_latest` for another directory.
    """
    path, top = os.path.join(directory, name), os.path.realpath(directory)
    tag = os.path.relpath(os.path.realpath(path), top)
    if os.path.islink(path) and tag != os.curdir and not tag.startswith(os.pardir):
        return tag
    what = f"a link to {printable(os.readlink(path))}" if os.path.islink(path) else "a directory"
    raise SourceError(
        "checkpoint.bad_latest",
        f"`{name}` in {printable(directory)} is {what}, and not a file with the name of a tag",
        fix=_tags_there(directory) or "name the directory of the checkpoint",
    )


def _is_name(tag: str) -> bool:
    return bool(tag) and tag.isprintable() and not any(p in ("", ".", "..") for p in tag.split("/"))


def _holds_tag(directory: str) -> bool:
    names = os.listdir(directory)
    return any(n.endswith("_states.pt") for n in names) or ("zero" in names and any(n.endswith(".pt") for n in names))


def _other_models(directory: str, tag: str) -> list[str]:
    if _MODEL_TAG.fullmatch(tag) is None:
        return []
    names = [n for n in os.listdir(directory) if _MODEL_TAG.fullmatch(n) and n != tag]
    return sorted(n for n in names if os.path.isdir(os.path.join(directory, n)))


# The files beside a tag.


def place_companions(source: LocalSource, target: str, ranks: int) -> None:
    """Copy the files that a trainer reads beside the tag: its state, scheduler, random states and weights.

    Random states are per rank: rank r gets those of the source's rank r mod N, as inside the tag. Every file appears
    whole. The function is idempotent.

    Args:
        source: The checkpoint with the files.
        target: The save directory to fill; it exists.
        ranks: Number of processes of the run that will read it.

    Raises:
        StorageError: `storage.denied`, `storage.no_space` and the like.
    """
    if source.distributed and not source.full and not any(map(_SHARD_FOLDERS.fullmatch, os.listdir(source.home))):
        return  # the shards lie in the directory itself, and no trainer's files do
    with os.scandir(source.home) as entries:
        found = [e for e in entries if not e.name.startswith(".") and e.name not in (*POINTERS, MANIFEST, INCOMPLETE)]
    files = {e.name: e.path for e in found if e.is_file() and not (source.full and _is_full(e.name))}
    by_rank: dict[tuple[str, str], dict[int, str]] = {}
    for name in list(files):
        if (match := _RANK_FILE.fullmatch(name)) is not None:
            # A run of one process saves `rng_state.pth`, without a number.
            by_rank.setdefault((match[1], match[3]), {})[int(match[2] or 0)] = files.pop(name)
    with writing(target):
        for name, path in files.items():
            _place(path, os.path.join(target, name))
        for (stem, suffix), states in by_rank.items():
            for name, path in _rekeyed(stem, suffix, states, ranks):
                _place(path, os.path.join(target, name))
        if by_rank or _TRAINER_STATE in files:
            # Only a trainer's own checkpoint: other save directories may hold any files, which are not copied.
            tops = {tag.partition("/")[0] for tag in source.tags}
            for entry in found:
                shards = source.distributed and _SHARD_FOLDERS.fullmatch(entry.name)
                if entry.is_dir() and entry.name not in tops and not shards and not _holds_tag(entry.path):
                    _place_tree(entry.path, os.path.join(target, entry.name))


def place_step(source: LocalSource, target: str) -> None:
    """Fill a result of verl or SkyRL with what lies beside the models of a step, and name the step in its tracker.

    The tracker, which is written last, makes the result complete. The function is idempotent.

    Args:
        source: A step with a checkpoint for each model.
        target: The directory of the result, which holds the models.

    Raises:
        StorageError: `storage.denied`, `storage.no_space` and the like.
    """
    step, models = os.path.join(source.home, source.step), {tag.partition("/")[2] for tag in source.tags}
    with writing(target):
        with os.scandir(step) as entries:
            beside = [e for e in entries if e.name not in models and not e.name.startswith(".")]
        for entry in beside:
            place = _place_tree if entry.is_dir() else _place
            place(entry.path, os.path.join(target, source.step, entry.name))
    own = [n for n in TRACKERS if os.path.isfile(os.path.join(source.home, n))]
    track(target, (own or list(TRACKERS))[0], source.step)


def track(target: str, tracker: str, step: str) -> None:
    """Name a step in the tracker of a result, whole.

    Args:
        target: The directory of the result.
        tracker: The name of the tracker.
        step: The name of the step's directory, which ends with its number; or `release`.

    Raises:
        StorageError: `storage.denied`, `storage.no_space` and the like.
    """
    with writing(target):
        temporary = os.path.join(target, f".{uuid.uuid4().hex[:8]}.part")
        with open(temporary, "w", encoding="ascii") as file:
            text = step.rpartition("_")[2]
            file.write(str(int(text)) if ITERATION.fullmatch(step) else text)
        os.replace(temporary, os.path.join(target, tracker))


def place_schedulers(target: str, tags: tuple[str, ...]) -> None:
    """Put a trainer's scheduler from a tag beside it: a conversion leaves one there if it changes the param groups.

    The function is idempotent.

    Args:
        target: The save directory of the result.
        tags: Its tags, the one to resume from last.

    Raises:
        StorageError: `storage.denied`, `storage.no_space` and the like.
    """
    with writing(target):
        for tag in tags:
            for name in filter(_SCHEDULER.fullmatch, os.listdir(os.path.join(target, tag))):
                _place(os.path.join(target, tag, name), os.path.join(target, name))


def _rekeyed(stem: str, suffix: str, states: dict[int, str], ranks: int) -> Iterator[tuple[str, str]]:
    count = max(states) + 1
    for rank in range(ranks):
        if (path := states.get(rank % count)) is not None:
            # transformers: no number in a run of one process. accelerate: always one.
            yield (f"{stem}{suffix}" if stem == "rng_state" and ranks == 1 else f"{stem}_{rank}{suffix}"), path


def _place_tree(source: str, target: str) -> None:
    for place, directories, names in os.walk(source):
        directories[:] = [d for d in directories if not d.startswith(".")]
        here = os.path.join(target, os.path.relpath(place, source))
        os.makedirs(here, exist_ok=True)
        for name in names:
            _place(os.path.join(place, name), os.path.join(here, name))
        for name in directories:
            if os.path.islink(linked := os.path.join(place, name)):  # `walk` does not enter it
                with suppress(FileExistsError):
                    os.symlink(os.path.realpath(linked), os.path.join(here, name))


def _place(source: str, target: str) -> None:
    """Place one file atomically: copy a small one, hard-link a large one, or symlink it across file systems."""
    temporary = f"{target}.{uuid.uuid4().hex[:8]}.part"
    real = os.path.realpath(source)
    if not os.path.exists(real):
        return  # a dead link, which says nothing about the checkpoint
    if os.path.getsize(real) <= _COPIED_BYTES:
        shutil.copy2(real, temporary)
    else:
        try:
            os.link(real, temporary)
        except OSError:
            os.symlink(real, temporary)
    os.replace(temporary, target)
    with suppress(FileNotFoundError):
        # `rename` leaves both names alone if they are links to one file already.
        os.unlink(temporary)


def finished(save_directory: str, tags: tuple[str, ...]) -> bool:
    """True if a result is complete.

    A save directory is, if every tag has a manifest, and `latest`, which is written last, exists; that of verl and of
    Megatron-core has its tracker in place of `latest`. A distributed checkpoint has no tags, and its manifest in
    itself.
    """
    if not tags:
        return os.path.isfile(os.path.join(save_directory, MANIFEST))
    whole = all(os.path.isfile(os.path.join(save_directory, t, MANIFEST)) for t in tags)
    step = tags[-1].partition("/")[0]
    if "/" in tags[-1] and (match := STEP.fullmatch(step)) is not None:
        return whole and _tracked(save_directory) == match[1]
    if is_iteration(tags[-1]) and _tracked_iteration(save_directory) == tags[-1]:
        return whole
    return whole and _pointed_latest(save_directory) in tags


def _pointed_latest(directory: str) -> str | None:
    return _pointed(directory) if os.path.isfile(os.path.join(directory, POINTERS[0])) else None


class writing:  # noqa: N801 - reads as a sentence: `with writing(path):`
    """Turns errors of the operating system into typed errors of the target."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            raise storage_error(error, self._path) from error


def storage_error(error: OSError, path: str) -> StorageError:
    """The typed error for an error of the file system."""
    code = storage_code(error)
    if code == "storage.denied":
        fix = "name a directory that can be written: --out DIR"
        return StorageError(code, f"{printable(path)} cannot be written: {error.strerror}", fix=fix)
    return StorageError(code, f"{printable(path)}: {error.strerror or error}")
