"""The files of FSDP's ranks in one directory: whose they are, of how many ranks, and whether all are there.

verl and SkyRL name the number of ranks and the rank; Accelerate names the rank alone, so that only the meshes in the
files tell how many there were.

Source: verl 0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py` (names, `fsdp_config.json`); SkyRL 0.3.0
`backends/skyrl_train/distributed/fsdp_strategy.py` (the same names; another `fsdp_config.json`); accelerate 1.15.0
`utils/fsdp_utils.py` (`use_dcp=False`, LOCAL_STATE_DICT); verified by running all three. skyrl-train 0.3.1
`distributed/fsdp_strategy.py`, the package before SkyRL 0.3.0: by its source alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from reshard.choices import MANIFEST, RankFramework
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard.options import SourceChoices
from reshard_engine.containers.source_file import SourceFile, parse_json
from reshard_engine.formats.rank_states import SavedRun
from reshard_engine.formats.trainer_files import FULL, TrainerFacts, chosen_model, full_pair
from reshard_engine.storage.locations import Location, refuse_hub_link_elsewhere
from reshard_engine.storage.protocol import Listing, ObjectInfo, read_bytes

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
CONFIG = "fsdp_config.json"
VERSION, STRATEGY = "FSDP_version", "fsdp_strategy"
"""The keys by which verl and SkyRL say in it which FSDP saved."""
FSDP, FSDP2 = "fsdp", "fsdp2"
"""SkyRL's words. The first one does not say the version: FSDP1 in skyrl-train, and FSDP2 since SkyRL 0.3.0."""
SCHEDULER, RNG, CLIENT = "lr_scheduler", "rng", "client_state"
"""Keys of the extra state; SkyRL alone has the last one."""
_NUMBER = r"(\d{1,6})"
_VERL = re.compile(rf"({MODEL}|{OPTIMIZER}|{EXTRA})_world_size_{_NUMBER}_rank_{_NUMBER}\.pt")
_ACCELERATE = re.compile(rf"(pytorch_model_fsdp|optimizer)_(\d{{1,4}})_rank{_NUMBER}\.bin")
_LOCAL = re.compile(rf"(?:pytorch_model_fsdp|optimizer)_rank{_NUMBER}\.bin")
_CONFIG_LIMIT_BYTES = 64 << 10
_ONE_PLACE = "copy the files of all ranks into one directory: each node may have kept its own on its disk"


@dataclass(frozen=True, slots=True)
class RankSet:
    """The files of one model and its optimizer, by rank."""

    framework: RankFramework
    world: int
    """The number of ranks whose files are there."""
    model: tuple[SourceFile, ...]
    optimizer: tuple[SourceFile, ...]
    """One for each rank; none if the save left the optimizer out."""
    extra: tuple[SourceFile, ...]
    """One for each rank; none if the save left it out."""
    others: tuple[str, ...]
    """Names of the files and directories beside them that are not read."""
    number: int = 0
    """The number of Accelerate's model."""
    fsdp: int | None = None
    """The version of FSDP that the configuration beside the files names."""
    strategy: str = ""
    """SkyRL's word in it; empty for none."""

    @property
    def label(self) -> str:
        """The format's name for people, with that of the framework."""
        return f"fsdp-ranks-{self.framework}"

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files, in the order in which the shard map numbers them."""
        return (*self.model, *self.optimizer, *self.extra)


# Files under names that a script chose.

RANK, ITEM, _ANY_TEXT = "{rank}", "{item}", "*"
_PLACES = re.compile(r"\{rank\}|\{item\}|\*")
_OF_PLACE = {RANK: r"(?<![0-9])(?P<rank>[0-9]{1,6})(?![0-9])", ITEM: r"(?P<item>[^/]+?)"}
_MOST_TEXTS = 2
"""Texts of any length in a pattern: with more of them, a long name takes long to compare."""
_NAMED_AT_MOST = 9
"""Missing files that a refusal makes names for: as many as it shows, and one more."""


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """The files of all ranks under names of a pattern."""

    world: int
    """The number of ranks whose files are there."""
    items: Mapping[str, tuple[SourceFile, ...]]
    """By the text of `{item}`, the files by rank; one item with an empty name for a pattern without it."""
    others: tuple[str, ...]
    """Names of the files and directories beside them."""
    pattern: str

    def missing(self, world: int) -> SourceError:
        """The refusal of a save of which the files of some ranks are not there."""
        names = {item: (files[0].name, range(self.world, world)) for item, files in self.items.items()}
        return _missing(self.pattern, names, world)


def _name_of(pattern: str, first: str, rank: int) -> str:
    """The name of another rank's file, given that of rank 0."""
    match = _named(pattern).fullmatch(first)
    begin, end = (0, 0) if match is None else match.span("rank")
    return f"{first[:begin]}{rank:0{end - begin}d}{first[end:]}"


def _missing(pattern: str, lacking: Mapping[str, tuple[str, Sequence[int]]], world: int) -> SourceError:
    """The refusal of files that are not there.

    Args:
        pattern: The pattern of the names.
        lacking: For each item the name of one of its files, and the ranks of those that are missing.
        world: The number of ranks.
    """
    count = sum(len(ranks) for _, ranks in lacking.values())
    names = [_name_of(pattern, some, rank) for some, ranks in lacking.values() for rank in ranks[:_NAMED_AT_MOST]]
    are = "is" if count == 1 else "are"
    text = f"{counted(count, 'file')} of {world} ranks {are} missing: {listed(list(map(printable, names)))}"
    return SourceError("checkpoint.incomplete", text, fix=_ONE_PLACE)


def _named(pattern: str) -> re.Pattern[str]:
    """The names that a pattern means.

    Raises:
        RequestError: `request.invalid` for a pattern without `{rank}`, with a place twice, or with a directory.
    """
    places = _PLACES.findall(pattern)
    why = ""
    if places.count(RANK) != 1 or places.count(ITEM) > 1:
        why = f"{RANK} stands in it once, and {ITEM} once at most"
    elif places.count(_ANY_TEXT) > _MOST_TEXTS:
        why = f"`*` stands in it {_MOST_TEXTS} times at most"
    elif "/" in pattern or "\\" in pattern:
        why = "files lie in the directory that SRC names, and it names no other"
    elif re.search(r"[0-9]\{rank\}|\{rank\}[0-9]", pattern):
        why = f"no digit stands beside {RANK}: the number of a rank ends where digits end"
    if why:
        text = f"--rank-files {printable(pattern)!r}: {why}"
        raise RequestError("request.invalid", text, fix="such as --rank-files 'ckpt_{rank}.pt'")
    parts = (_OF_PLACE.get(p, "(.*)") if _PLACES.fullmatch(p) else re.escape(p) for p in _split(pattern))
    return re.compile("".join(parts))


def _split(pattern: str) -> list[str]:
    return [part for part in re.split(r"(\{rank\}|\{item\}|\*)", pattern) if part]


def named_files(location: Location, listing: Listing, pattern: str) -> NamedFiles:
    """The files of a directory that a pattern names.

    Raises:
        SourceError: `source.not_found` if it names none, `checkpoint.ambiguous` for files of several saves,
            `checkpoint.incomplete` if a rank's file is missing, `checkpoint.mixed` for two files of one rank.
        RequestError: `request.invalid` for a pattern that is none.
    """
    known, infos, where = _named(pattern), listing.by_name, printable(location.url)
    found = {n: m for n in sorted(infos) if n != MANIFEST and (m := known.fullmatch(n)) is not None}
    if not found:
        text = f"no file in {where} has a name as --rank-files {printable(pattern)!r} says; there is "
        fix = suggested_patterns(infos) or "say the names as they are, with {rank} in place of the rank's number"
        raise SourceError("source.not_found", f"{text}{listed(sorted(infos)) or 'none'}", fix=fix)
    saves: dict[tuple[str, ...], dict[str, dict[int, str]]] = {}
    for name, match in found.items():
        item = match["item"] if ITEM in pattern else ""
        texts = tuple(match[i] for i in range(1, known.groups + 1) if i not in known.groupindex.values())
        by_rank = saves.setdefault(texts, {}).setdefault(item, {})
        if (other := by_rank.setdefault(int(match["rank"]), name)) != name:
            text = f"{where} holds {printable(other)} and {printable(name)} of one rank"
            raise SourceError("checkpoint.mixed", text, fix="move the files of the other save away")
    if len(saves) > 1:
        patterns = [shlex.quote(printable(_filled(pattern, texts))) for texts in saves]
        raise SourceError(
            "checkpoint.ambiguous",
            f"{where} holds files of {len(saves)} saves under names as {printable(pattern)!r}: `*` is one text for all "
            "files of a save",
            fix=", or ".join(f"--rank-files {p}" for p in patterns[:8]),
        )
    (items,) = saves.values()
    world = 1 + max(rank for by_rank in items.values() for rank in by_rank)
    ranks = {item: [r for r in range(world) if r not in by_rank] for item, by_rank in items.items()}
    lacking = {item: (next(iter(by_rank.values())), ranks[item]) for item, by_rank in items.items() if ranks[item]}
    if lacking:
        raise _missing(pattern, lacking, world)
    files = {
        item: tuple(SourceFile(location.store, by_rank[r], (infos[by_rank[r]],)) for r in range(world))
        for item, by_rank in items.items()
    }
    return NamedFiles(world, files, _others(listing, found), pattern)


def _filled(pattern: str, texts: Sequence[str]) -> str:
    """The pattern with a text in place of each `*`."""
    left = iter(texts)
    return "".join(next(left) if part == _ANY_TEXT else part for part in _split(pattern))


_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl")


def suggested_patterns(names: Iterable[str]) -> str:
    """Flags to paste for names that differ in a number alone, which counts from 0; empty if there are none."""
    found: dict[str, set[int]] = {}
    for name in names:
        if name.endswith(_SUFFIXES) and not _PLACES.search(name):
            for match in re.finditer(r"[0-9]{1,6}", name):
                found.setdefault(f"{name[: match.start()]}{RANK}{name[match.end() :]}", set()).add(int(match[0]))
    counting = [p for p, ranks in sorted(found.items()) if len(ranks) > 1 and ranks == {*range(len(ranks))}]
    counting = [one] if (one := _with_item(counting)) else counting
    return ", or ".join(f"--rank-files {shlex.quote(printable(p))}" for p in counting[:3])


def _with_item(patterns: Sequence[str]) -> str:
    """The pattern with `{item}` for patterns that differ in one word; empty if they differ in more, or in numbers."""
    if len(patterns) < 2:
        return ""
    head = re.sub(r"[^\W_]+$", "", patterns[0][: _alike(patterns)])
    ends = [p[len(head) :][::-1] for p in patterns]
    tail = re.sub(r"^[^\W_]+", "", ends[0][: _alike(ends)][::-1])
    words = [p[len(head) : len(p) - len(tail)] for p in patterns]
    whole = f"{head}{ITEM}{tail}"
    plain = all(word and RANK not in word and not re.search(r"\d", word) for word in words)
    return whole if plain and whole.count(RANK) == 1 else ""


def _alike(texts: Sequence[str]) -> int:
    """The number of characters with which all texts begin alike."""
    differing = (i for i, chars in enumerate(zip(*texts, strict=False)) if len({*chars}) > 1)
    return next(differing, min(map(len, texts)))


# How the run saved them, for a target of the same kind.


@dataclass(frozen=True, slots=True)
class SavedRanks:
    """How a run saved its ranks' files. Parameters are named by the numbers of their weights in the shard map."""

    run: SavedRun
    framework: RankFramework
    number: int
    """The number of Accelerate's model."""
    fsdp: int | None
    """The version of FSDP; None if nothing says it."""
    units: tuple[tuple[int, ...], ...]
    """The parameters of each flat parameter of FSDP1 by number; empty for `use_orig_params=True`, and for FSDP2."""
    cuts: Mapping[int, Sequence[Mapping[int, int]]]
    """Under FSDP1 the elements of a parameter's states by rank, without ranks that hold none: one where all agree."""
    has_extra: bool
    """True if the save has the extra state."""
    strategy: str = ""
    """SkyRL's word for FSDP; empty for none."""
    beside: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The contents of small files beside the ranks', by path: configuration and tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts(TrainerFacts):
    """The facts that only files of FSDP's ranks keep."""

    saved: SavedRanks | None = None
    """How the run saved it, for a target of the same kind."""


_BESIDE = "huggingface"
_LORA = "lora_train_meta.json"
_WEIGHTS_OR_INDEX = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_BESIDE_LIMIT_BYTES = 128 << 20


def files_beside(location: Location) -> tuple[dict[str, bytes], list[str]]:
    """The contents of the small files that verl and SkyRL keep beside the ranks': configuration, tokenizer, LoRA.

    Weights in `huggingface/` are a copy of the model; their paths are the second result.

    Raises:
        SourceError: `checkpoint.too_large`; a file that cannot be read.
    """
    listing = location.store.list_directory(location.path)
    found = {n: i for n, i in listing.by_name.items() if n == _LORA}
    left: list[str] = []
    if _BESIDE in listing.directories:
        for name, info in location.store.list_directory(location.child(_BESIDE).path).by_name.items():
            path = f"{_BESIDE}/{name}"
            if name.endswith(_WEIGHTS_OR_INDEX):
                left.append(path)
            else:
                found[path] = info
    for info in found.values():
        refuse_hub_link_elsewhere(location, info.path)
    if (total := sum(i.size_bytes for i in found.values())) > _BESIDE_LIMIT_BYTES:
        text = f"configuration and tokenizer have {total} bytes, the limit is {_BESIDE_LIMIT_BYTES}"
        raise SourceError("checkpoint.too_large", text, fix="move large files out of huggingface/")
    return {path: read_bytes(location.store, info) for path, info in sorted(found.items())}, sorted(left)


def holds_rank_files(listing: Listing) -> bool:
    """True if a directory holds a file with a rank's name."""
    return any(p.fullmatch(n) for n in listing.by_name for p in (_VERL, _ACCELERATE, _LOCAL))


def rank_set(location: Location, listing: Listing, choices: SourceChoices) -> RankSet:
    """The files of a directory.

    Args:
        location: The directory.
        listing: Its children.
        choices: The user's choice among the models of Accelerate, such as `pytorch_model_fsdp_1`.

    Raises:
        SourceError: `checkpoint.incomplete` if a rank's file is missing, `checkpoint.mixed` for files of several saves,
            `checkpoint.ambiguous` for several models, `source.unsupported` for LOCAL_STATE_DICT.
        RequestError: `request.invalid` for a model that is not there.
    """
    infos = listing.by_name
    if local := sorted(n for n in infos if _LOCAL.fullmatch(n)):
        raise SourceError(
            "source.unsupported",
            f"{printable(location.url)} holds local state dicts of FSDP ({listed(local)}): flat parameters without the "
            "names and shapes within, which Accelerate itself does not load",
            fix="save with StateDictType.SHARDED_STATE_DICT",
        )
    verl = {n: m for n in infos if (m := _VERL.fullmatch(n)) is not None}
    accelerate = {n: m for n in infos if (m := _ACCELERATE.fullmatch(n)) is not None}
    if verl and accelerate:
        raise SourceError(
            "checkpoint.mixed",
            f"{printable(location.url)} holds files of verl ({listed(sorted(verl))}) and of Accelerate "
            f"({listed(sorted(accelerate))})",
            fix="move those of one of them into a directory of their own",
        )
    if (verl or accelerate) and full_pair(infos):
        full = sorted(n for n in infos if FULL.fullmatch(n))
        raise SourceError(
            "checkpoint.mixed",
            f"{printable(location.url)} holds files of ranks ({listed(sorted({**verl, **accelerate}))}) and full files "
            f"({listed(full)})",
            fix="move those of one of them into a directory of their own",
        )
    if verl:
        return _of_verl(location, listing, verl)
    return _of_accelerate(location, listing, accelerate, choices)


def _of_verl(location: Location, listing: Listing, found: Mapping[str, re.Match[str]]) -> RankSet:
    infos = listing.by_name
    worlds: dict[int, int] = {}
    for match in found.values():
        worlds[int(match[2])] = worlds.get(int(match[2]), 0) + 1
    if len(worlds) > 1:
        held = [f"{counted(n, 'file')} of a run of {w} ranks" for w, n in sorted(worlds.items())]
        least = min(worlds, key=lambda w: (worlds[w], w))
        here = shlex.quote(printable(location.url, max_chars=1_024))
        raise SourceError(
            "checkpoint.mixed",
            f"{printable(location.url)} holds {', and '.join(held)}: one save went over another",
            fix=f"move one run's files away, such as {here}/*_world_size_{least}_rank_*.pt, into a directory of "
            "their own",
        )
    world = next(iter(worlds))
    by_item: dict[str, dict[int, str]] = {}
    for name, match in found.items():
        by_item.setdefault(match[1], {})[int(match[3])] = name
    parts = {
        item: _by_rank(location, infos, by_item.get(item, {}), f"{item}_world_size_{world}_rank_{{}}.pt", world)
        for item in (MODEL, OPTIMIZER, EXTRA)
    }
    if not parts[MODEL]:
        raise _no_model(location, [*found])
    config = _config(infos, location)
    said = config.get("world_size")
    if type(said) is int and said != world:
        raise SourceError(
            "checkpoint.mixed",
            f"{CONFIG} says that {said} ranks saved, and the files' names say {world}",
            fix=f"they are of different saves: name the directory of one, or copy {CONFIG} of this one again",
        )
    framework = RankFramework.SKYRL if STRATEGY in config else RankFramework.VERL
    strategy = next((word for word in (FSDP, FSDP2) if config.get(STRATEGY) == word), "")
    version = config.get(VERSION, 2 if strategy == FSDP2 else None)
    others = _others(listing, found)
    fsdp = version if type(version) is int else None
    files = (parts[MODEL], parts[OPTIMIZER], parts[EXTRA])
    return RankSet(framework, world, *files, others, fsdp=fsdp, strategy=strategy)


def _config(infos: Mapping[str, ObjectInfo], location: Location) -> dict[str, Any]:
    info = infos.get(CONFIG)
    if info is None:
        return {}
    if info.size_bytes > _CONFIG_LIMIT_BYTES:
        raise SourceError("checkpoint.too_large", f"{CONFIG} has {info.size_bytes} bytes")
    found = parse_json(read_bytes(location.store, info), code="checkpoint.malformed", what=CONFIG)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _of_accelerate(
    location: Location, listing: Listing, found: Mapping[str, re.Match[str]], choices: SourceChoices
) -> RankSet:
    infos = listing.by_name
    by_place: dict[str, dict[int, str]] = {}
    for name, match in found.items():
        by_place.setdefault(f"{match[1]}_{int(match[2])}", {})[int(match[3])] = name
    models = sorted((p for p in by_place if p.startswith("pytorch_")), key=_number_of)
    if not models:
        raise _no_model(location, [*found])
    optimizers = sorted((p for p in by_place if p not in models), key=_number_of)
    chosen = chosen_model(printable(location.url), models, optimizers, choices)
    optimizer = f"optimizer_{_number_of(chosen)}"
    held = by_place.get(optimizer, {})
    world = 1 + max(*by_place[chosen], *held) if held else 1 + max(by_place[chosen])
    model = _by_rank(location, infos, by_place[chosen], f"{chosen}_rank{{}}.bin", world)
    states = _by_rank(location, infos, held, f"{optimizer}_rank{{}}.bin", world)
    read = {*by_place[chosen].values(), *held.values()}
    number = _number_of(chosen)
    return RankSet(RankFramework.ACCELERATE, world, model, states, (), _others(listing, read), number)


def _number_of(place: str) -> int:
    return int(place.rpartition("_")[2])


def _by_rank(
    location: Location, infos: Mapping[str, ObjectInfo], found: Mapping[int, str], pattern: str, world: int
) -> tuple[SourceFile, ...]:
    """The files of one item by rank; none if no rank has any."""
    if not found:
        return ()
    if beyond := sorted(r for r in found if r >= world):
        names = [found[r] for r in beyond]
        raise SourceError(
            "checkpoint.mixed",
            f"{listed(names)}: a run of {world} ranks has none of that number",
            fix="move the files of the other save into a directory of their own",
        )
    if missing := [pattern.format(r) for r in range(world) if r not in found]:
        raise SourceError(
            "checkpoint.incomplete",
            f"{counted(len(missing), 'file')} of {world} ranks {'is' if len(missing) == 1 else 'are'} missing in "
            f"{printable(location.url)}: {listed(missing)}",
            fix=_ONE_PLACE,
        )
    return tuple(SourceFile(location.store, found[r], (infos[found[r]],)) for r in range(world))


def _no_model(location: Location, names: Sequence[str]) -> SourceError:
    return SourceError(
        "checkpoint.incomplete",
        f"{printable(location.url)} holds {listed(sorted(names))} and no file of the model, which has the names and "
        "the shapes",
        fix="copy the model's files of all ranks into the same directory",
    )


def _others(listing: Listing, read: Mapping[str, object] | set[str]) -> tuple[str, ...]:
    names = (n for n in listing.by_name if n not in read and n not in (CONFIG, MANIFEST))
    return (*sorted(names), *(f"{d}/" for d in listing.directories if not d.startswith(".")))
