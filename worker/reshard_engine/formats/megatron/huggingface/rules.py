"""Rules that map the parameters of Megatron-core to those of a Hugging Face architecture, and back, as data.

A family is a YAML document: those that reshard brings are beside this module, and a user may give one of their own
(docs/formats/megatron-hf.md). A rule names a parameter of Megatron-core and the one or several parameters of Hugging
Face that hold the same elements. Names, and the order of rows, are all that a rule can say. So each direction of it
moves every element exactly once, and both directions are read from the same numbers.

Source: Megatron-Bridge 0.3.1 `models/llama`, `models/qwen`, `models/deepseek` (names); transformers 5.23.0
`models/*/modeling_*.py`; verified by the logits of both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, cast

from reshard.errors import RequestError, listed, printable
from reshard_engine.containers.source_file import parse_yaml

_PAGE = "docs/formats/megatron-hf.md"
_LAYER, _EXPERT = "{layer}", "{expert}"
_PLACES = (_LAYER, _EXPERT)
_PATTERN = re.compile(r"(?:[A-Za-z0-9_]+|\{layer\}|\{expert\})(?:\.(?:[A-Za-z0-9_]+|\{layer\}|\{expert\}))*")
_NUMBER = re.compile(r"0|[1-9]\d{0,5}")
_WORD = re.compile(r"[A-Za-z0-9_]{1,64}")
_FAMILY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_FAMILIES = "families"
_SOME_LAYERS = "in-some-layers"
"""The word for a parameter that some layers have and others have not, such as a router."""
_MOST_RULES, _MOST_NUMBERED = 1 << 10, 6
"""Rules of a family; parts of a name that are numbers."""


class Rows(StrEnum):
    """How the rows of Megatron-core's parameter become those of the parts."""

    WHOLE = "whole"
    """There is one part, and its rows are in the same order."""
    STACKED = "stacked"
    """The parts have equally many rows and lie one after another: gate and up."""
    QKV = "qkv"
    """For each group its queries, its key and its value; the parts are all queries, all keys, all values. One part
    holds these one after another."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A parameter of Megatron-core, and the parameters of Hugging Face that have its elements."""

    megatron: tuple[str, ...]
    """Its name in Megatron-core's own layers, and that in Transformer Engine's where it is another one."""
    parts: tuple[str, ...]
    rows: Rows = Rows.WHOLE
    transposed: bool = False
    """True if the parts are transposed, as those of `Conv1D` are."""
    optional: bool = False
    """True if a layer may be without it, or the model if it is in no layer."""
    somewhere: bool = False
    """True if at least one layer has it."""


Value = Any
"""A value of `config.json`: a constant, a list of values, or a mapping with one of the keys of `_VALUES`."""


@dataclass(frozen=True, slots=True)
class Family:
    """The rules of one architecture."""

    name: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    """The values of `model_type` in the `config.json` of its models."""
    arguments: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """The values that arguments of Megatron's run may have; None stands for an argument that the run does not have."""
    heads: str = "num_attention_heads"
    """The key of `config.json` for the number of attention heads."""
    prefix: str = ""
    """The beginning of names that the files of a model without head lack."""
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of Hugging Face that are others' where Megatron has no parameter for them, and those others."""
    left_out: tuple[str, ...] = ()
    """Names on either side that hold nothing to keep: they are recomputed."""
    config: Mapping[str, Value] = field(default_factory=dict[str, Value])


def _bad(what: str, text: str) -> RequestError:
    return RequestError("request.invalid", f"{what}: {text}", fix=f"write it as in {_PAGE}")


# Reading of documents.


@cache
def families() -> Mapping[str, Family]:
    """The families that reshard brings, by their names."""
    found = [
        f
        for f in (files("reshard_engine.formats.megatron.huggingface") / _FAMILIES).iterdir()
        if f.name.endswith(".yaml")
    ]
    names = {f.name.removesuffix(".yaml"): f for f in found}
    return {name: parse_family(name, names[name].read_text("utf-8"), what=names[name].name) for name in sorted(names)}


def requested_family(said: str) -> Family:
    """The family of `--hf-rules`: one of ours by its name, or the text of a document.

    Raises:
        RequestError: `request.invalid`.
    """
    if _FAMILY.fullmatch(said) is None:
        return parse_family("the rules of --hf-rules", said, what="--hf-rules")
    if (known := families().get(said)) is None:
        raise RequestError(
            "request.invalid",
            f"--hf-rules: there is no family {printable(said)!r}",
            fix=f"name one of {', '.join(families())}, or a file: {_PAGE}",
        )
    return known


_KEYS = frozenset({"model_types", "arguments", "heads", "prefix", "names", "tied", "left_out", "config"})
_RULE_KEYS = frozenset({"megatron", "hugging_face", "rows", "transposed", "optional"})


def parse_family(name: str, text: str, *, what: str) -> Family:
    """The family in a document.

    Args:
        name: Its name, for messages.
        text: YAML.
        what: The name of the document, for messages.

    Raises:
        RequestError: `request.invalid` for anything that is not such a document, or contradicts itself.
    """
    try:
        found = parse_yaml(text)
    except ValueError as error:
        raise _bad(what, f"not a YAML document of this kind: {printable(str(error), max_chars=200)}") from None
    facts = _mapping(found, what, "the document", _KEYS)
    rules = tuple(_rule(one, what) for one in _items(facts.get("names"), what, "names"))
    if not rules or len(rules) > _MOST_RULES:
        raise _bad(what, f"it has {len(rules)} names, and may have 1 to {_MOST_RULES}")
    said = _words(facts.get("arguments"), what, "arguments")
    arguments = {key: tuple(_several(value)) for key, value in said.items()}
    tied = {key: _pattern(value, what) for key, value in _words(facts.get("tied"), what, "tied", names=True).items()}
    config = _words(facts.get("config"), what, "config")
    for key, value in config.items():
        _check_value(value, what, f"config: {key}")
    family = Family(
        name,
        rules,
        tuple(_word(v, what, "model_types") for v in _items(facts.get("model_types"), what, "model_types")),
        arguments,
        _word(facts.get("heads", "num_attention_heads"), what, "heads"),
        _pattern(facts["prefix"].rstrip("."), what) + "." if isinstance(facts.get("prefix"), str) else "",
        tied,
        tuple(_pattern(v, what) for v in _items(facts.get("left_out"), what, "left_out")),
        config,
    )
    _check_names(family, what)
    return family


def _mapping(value: Any, what: str, where: str, keys: frozenset[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _bad(what, f"{where} is not a mapping")
    found = {str(k): v for k, v in cast("dict[Any, Any]", value).items()}
    if unknown := sorted(found.keys() - keys):
        raise _bad(what, f"{where} has the unknown key {printable(unknown[0])!r}; known are {', '.join(sorted(keys))}")
    return found


def _words(value: Any, what: str, where: str, *, names: bool = False) -> dict[str, Any]:
    """A mapping whose keys are plain words, or names; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _bad(what, f"{where} is not a mapping")
    found = cast("dict[Any, Any]", value)
    return {_pattern(k, what) if names else _word(k, what, where): v for k, v in found.items()}


def _items(value: Any, what: str, where: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _bad(what, f"{where} is not a list")
    return cast("list[Any]", value)


def _several(value: Any) -> Sequence[Any]:
    """A list as it is; anything else alone in one."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _word(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str) or _WORD.fullmatch(value) is None:
        raise _bad(what, f"{where}: {printable(str(value))!r} is not a word of letters, digits and _")
    return value


def _pattern(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > 512 or _PATTERN.fullmatch(value) is None:
        raise _bad(
            what,
            f"{printable(str(value))!r} is not a name: words between dots, with {_LAYER} and {_EXPERT} for numbers",
        )
    parts = value.split(".")
    if sum(p in _PLACES or p.isdigit() for p in parts) > _MOST_NUMBERED or any(parts.count(p) > 1 for p in _PLACES):
        raise _bad(what, f"{printable(value)!r} has a place twice, or too many numbers")
    if _EXPERT in parts and _LAYER not in parts[: parts.index(_EXPERT)]:
        raise _bad(what, f"{printable(value)!r} has {_EXPERT} and no {_LAYER} before it")
    return value


def _rule(value: Any, what: str) -> Rule:
    facts = _mapping(value, what, "an entry of names", _RULE_KEYS)
    sides = [facts.get(key) for key in ("megatron", "hugging_face")]
    names = [tuple(_pattern(n, what) for n in _several(side)) for side in sides]
    megatron, parts = names
    where = f"the entry of {printable(megatron[0] if megatron else '')!r}"
    if not megatron or not parts:
        raise _bad(what, f"{where} has no name of either side")
    if len({frozenset(p for p in n.split(".") if p in _PLACES) for n in (*megatron, *parts)}) > 1:
        raise _bad(what, f"{where} has {_LAYER} or {_EXPERT} in some of its names only")
    said = facts.get("rows", Rows.WHOLE)
    if said not in tuple(Rows):
        raise _bad(what, f"{where}: rows is one of {', '.join(Rows)}")
    transposed, optional = facts.get("transposed", False), facts.get("optional", False)
    if not isinstance(transposed, bool) or not (isinstance(optional, bool) or optional == _SOME_LAYERS):
        raise _bad(what, f"{where}: transposed is true or false, and so is optional, or {_SOME_LAYERS}")
    rows = Rows(said)
    counts = {Rows.WHOLE: (1,), Rows.QKV: (1, 3), Rows.STACKED: range(2, 65)}[rows]
    if len(parts) not in counts:
        raise _bad(what, f"{where}: rows of the kind {rows} do not go into {len(parts)} parameters")
    return Rule(megatron, parts, rows, transposed, bool(optional), optional == _SOME_LAYERS)


def _check_names(family: Family, what: str) -> None:
    """Refuse two rules for one name, and ties in circles.

    Raises:
        RequestError: `request.invalid`.
    """
    rules = family.rules
    for side in ([n for rule in rules for n in rule.megatron], [n for rule in rules for n in rule.parts]):
        alike: dict[str, list[str]] = {}
        for name in (*side, *family.left_out):
            alike.setdefault(_shape_of(name), []).append(name)
        for names in alike.values():
            if any(_overlap(one, other) for at, one in enumerate(names) for other in names[:at]):
                raise _bad(what, f"two entries are for {printable(names[-1])!r}")
    owners = {n for rule in rules for n in rule.parts}
    for alias, owner in family.tied.items():
        if owner in family.tied:
            text = f"tied: {printable(alias)!r} is {printable(owner)!r}, which is tied itself: a chain, or a circle"
            raise _bad(what, text)
        if owner not in owners:
            raise _bad(what, f"tied: nothing has the name {printable(owner)!r}")


def _shape_of(name: str) -> str:
    return ".".join("#" if p in _PLACES or p.isdigit() else p for p in name.split("."))


def _overlap(one: str, other: str) -> bool:
    """True if one name may be that of both patterns, which have numbers at the same places."""
    return all(a == b or a in _PLACES or b in _PLACES for a, b in zip(one.split("."), other.split("."), strict=True))


# Values of `config.json`.

_VALUES: Mapping[str, frozenset[str]] = {
    "argument": frozenset({"else"}),
    "rows": frozenset(),
    "columns": frozenset(),
    "absent": frozenset(),
    "layers_with": frozenset(),
    "leading_layers_with": frozenset(),
    "layout": frozenset(),
    "ratio": frozenset(),
    "dtype": frozenset(),
    "all": frozenset(),
    "cases": frozenset(),
}
"""The kinds of values, and the keys beside that of the kind."""
LAYOUT = ("layers", "heads", "groups", "head_size")


def kind_of_value(facts: Mapping[str, Any]) -> str | None:
    """The kind of a value that is a mapping; None for one that is of no kind."""
    found = [k for k in facts if k in _VALUES]
    return found[0] if len(found) == 1 and facts.keys() - {found[0]} <= _VALUES[found[0]] else None


def _check_value(value: Any, what: str, where: str) -> None:
    """Check a value of `config`.

    Raises:
        RequestError: `request.invalid`.
    """
    if isinstance(value, list):
        for one in cast("list[Any]", value):
            _check_value(one, what, where)
    if not isinstance(value, dict):
        return
    facts = cast("dict[str, Any]", value)
    kind = kind_of_value(facts)
    if kind is None:
        raise _bad(what, f"{where}: a mapping has one of the keys {', '.join(_VALUES)}, and no other")
    for inner in _inner_values(kind, facts, what, where):
        _check_value(inner, what, where)


def _inner_values(kind: str, facts: Mapping[str, Any], what: str, where: str) -> list[Any]:
    """The values within a value that is a mapping, which is checked.

    Raises:
        RequestError: `request.invalid`.
    """
    inner = facts[kind]
    if kind == "all":
        return [*_words(inner, what, where).values()]
    if kind == "cases":
        cases = [_mapping(one, what, where, _CASE_KEYS) for one in _items(inner, what, where)]
        for case in cases:
            _words(case.get("when"), what, where)
        return [case.get("value") for case in cases]
    if kind in ("argument", "ratio"):
        words = _items(inner, what, where) if kind == "ratio" else [inner]
        if kind == "ratio" and len(words) != 2:
            raise _bad(what, f"{where}: ratio has two arguments")
        for one in words:
            _word(one, what, where)
        return [facts.get("else")]
    if kind == "layout" and inner not in LAYOUT:
        raise _bad(what, f"{where}: layout is one of {', '.join(LAYOUT)}")
    if kind not in ("layout", "dtype"):
        _pattern(inner, what)
    return []


_CASE_KEYS = frozenset({"when", "value"})


# Values of arguments.


def accepts(allowed: Any, value: Any) -> bool:
    """True if an argument's value is one of those that a family or a case names; None stands for no such argument."""
    choices: Sequence[Any] = cast("Sequence[Any]", allowed) if isinstance(allowed, list | tuple) else (allowed,)
    return any(one == value and isinstance(one, bool) is isinstance(value, bool) for one in choices)


def contradicted(family: Family, args: Mapping[str, Any]) -> list[str]:
    """The arguments of a run whose values are not those of a family's models, each with its value."""
    said = ((name, allowed, args.get(name)) for name, allowed in family.arguments.items())
    return [f"{name}={value}" for name, allowed, value in said if value is not None and not accepts(allowed, value)]


def unsaid(family: Family, args: Mapping[str, Any]) -> list[str]:
    """The arguments that tell a family from others, and that a run does not say."""
    return [name for name, allowed in family.arguments.items() if args.get(name) is None and None not in allowed]


# Names of a checkpoint, and the entries that they are of.


@dataclass(frozen=True, slots=True)
class Matched:
    """An entry of a family, for one layer and one expert."""

    rule: Rule
    megatron: str
    parts: tuple[str, ...]


class UnmappedError(ValueError):
    """Names that the rules of a family do not explain; the text names them."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    rule: int
    """-1 for a name that is left out."""
    part: int
    pattern: str


class _Names:
    """The patterns of one side of a family, found by a name."""

    def __init__(self, patterns: Iterable[_Pattern]) -> None:
        self._by_text = {_placed(p.pattern): p for p in patterns}

    def find(self, name: str) -> tuple[_Pattern, tuple[int, ...]] | None:
        """The pattern of a name, and its numbers of layer and expert; None if it has none."""
        parts = name.split(".")
        at = [i for i, p in enumerate(parts) if _NUMBER.fullmatch(p)]
        if len(at) > _MOST_NUMBERED:
            return None
        for taken in product((True, False), repeat=len(at)):
            places = {i for i, one in zip(at, taken, strict=True) if one}
            text = ".".join("#" if i in places else p for i, p in enumerate(parts))
            if (found := self._by_text.get(text)) is not None:
                numbers = dict(zip((p for p in found.pattern.split(".") if p in _PLACES), sorted(places), strict=True))
                return found, tuple(int(parts[numbers[p]]) for p in _PLACES if p in numbers)
        return None


def _placed(pattern: str) -> str:
    return ".".join("#" if p in _PLACES else p for p in pattern.split("."))


def _filled(pattern: str, numbers: Sequence[int]) -> str:
    places: dict[str, str] = dict(zip(_PLACES, map(str, numbers), strict=False))
    return ".".join(places.get(p, p) for p in pattern.split("."))


def of_megatron(family: Family, names: Iterable[str]) -> tuple[list[Matched], list[str]]:
    """The entries of Megatron-core's names, in their order, and the names that are left out.

    Raises:
        UnmappedError: The rules do not explain a name, or a name that they need is not there.
    """
    sides = _Names([
        *(_Pattern(r, p, n) for r, rule in enumerate(family.rules) for p, n in enumerate(rule.megatron)),
        *(_Pattern(-1, 0, n) for n in family.left_out),
    ])  # fmt: skip
    found: dict[tuple[int, tuple[int, ...]], str] = {}
    unknown, left_out = list[str](), list[str]()
    for name in names:
        match = sides.find(name)
        if match is None:
            unknown.append(name)
        elif match[0].rule < 0:
            left_out.append(name)
        elif (other := found.setdefault((match[0].rule, match[1]), name)) != name:
            raise UnmappedError(f"both {printable(other)} and {printable(name)} are there, of which a model has one")
    _require_known(unknown, "Megatron-core")
    missing = [_filled(family.rules[rule].megatron[0], at) for rule, at in _missing(family, found)]
    _require_all(missing)
    return [_matched(family.rules[rule], name, at) for (rule, at), name in found.items()], left_out


def of_hugging_face(family: Family, names: Iterable[str], *, local: bool = True) -> tuple[list[Matched], list[str]]:
    """The entries of Hugging Face's names, in the order of the first part, and the names that are left out.

    Args:
        family: The family.
        names: The names.
        local: True for the names of Megatron-core's own layers, False for those of Transformer Engine.

    Raises:
        UnmappedError: As `of_megatron`.
    """
    sides = _Names([
        *(_Pattern(r, p, n) for r, rule in enumerate(family.rules) for p, n in enumerate(rule.parts)),
        *(_Pattern(-1, 0, n) for n in family.left_out),
    ])  # fmt: skip
    found: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    unknown, left_out = list[str](), list[str]()
    for name in names:
        match = sides.find(name)
        if match is None:
            unknown.append(name)
        elif match[0].rule < 0:
            left_out.append(name)
        else:
            found.setdefault((match[0].rule, match[1]), set()).add(match[0].part)
    _require_known(unknown, "Hugging Face")
    missing = [
        _filled(family.rules[rule].parts[part], at)
        for rule, at in [*found, *_missing(family, found)]
        for part in range(len(family.rules[rule].parts))
        if part not in found.get((rule, at), ())
    ]
    _require_all(missing)
    rules, which = family.rules, 0 if local else -1
    return [_matched(rules[rule], _filled(rules[rule].megatron[which], at), at) for rule, at in found], left_out


def _matched(rule: Rule, megatron: str, at: Sequence[int]) -> Matched:
    return Matched(rule, megatron, tuple(_filled(p, at) for p in rule.parts))


def _missing(family: Family, found: Iterable[tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The entries that a model has, and these names do not: of every layer, and of every expert of a layer."""
    there = {*found}
    layers = _counted({at[0] for _, at in there if at}, "layers")
    of_layers: dict[int, set[int]] = {}
    for _, at in there:
        if len(at) == 2:
            of_layers.setdefault(at[0], set()).add(at[1])
    experts = Counter({layer: _counted(numbers, f"experts of layer {layer}") for layer, numbers in of_layers.items()})
    held = {rule for rule, _ in there}
    for number, rule in enumerate(family.rules):
        places = {p for p in rule.megatron[0].split(".") if p in _PLACES}
        if _EXPERT in places:
            wanted = [(layer, e) for layer in range(layers) for e in range(experts[layer])]
            # A layer has all of its experts, or it has none.
            wanted = wanted if not rule.optional or number in held else []
            wanted += [(layer, 0) for layer in range(layers) if not rule.optional and not experts[layer]]
        elif rule.optional:
            wanted = [(0,)] if rule.somewhere and number not in held else []
        else:
            wanted = [(layer,) for layer in range(layers)] if places else [()]
        yield from ((number, at) for at in wanted if (number, at) not in there)
    if not layers and any(_LAYER in rule.megatron[0] for rule in family.rules):
        raise UnmappedError("there are no layers")


def _counted(numbers: set[int], what: str) -> int:
    """The count of numbers from 0 on.

    Raises:
        UnmappedError: Numbers are left out: a name may say any number, and nothing is made of so many.
    """
    if numbers and max(numbers) + 1 != len(numbers):
        lost = next(n for n in range(len(numbers)) if n not in numbers)
        raise UnmappedError(f"of the {what}, up to number {max(numbers)}, number {lost} is not there")
    return len(numbers)


def _require_known(names: Sequence[str], side: str) -> None:
    if names:
        raise UnmappedError(f"no rule maps {side}'s {listed(list(names), 8)}")


def _require_all(names: Sequence[str]) -> None:
    if names:
        raise UnmappedError(f"{listed(list(names), 8)} {'is' if len(names) == 1 else 'are'} not there")


def matching(pattern: str, names: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names that are of a pattern, each with its numbers of layer and expert."""
    known = _Names([_Pattern(0, 0, pattern)])
    for name in names:
        if (found := known.find(name)) is not None:
            yield name, found[1]


# The order of rows.


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a parameter of Megatron-core, and their place in a part."""

    whole: int
    """The first row in Megatron-core's parameter."""
    part: int
    """The number of the part."""
    at: int
    """The first row in the part."""
    rows: int


@dataclass(frozen=True, slots=True)
class Attention:
    """The sizes of an attention: `heads` queries in `groups`, each group with a key and a value of `size` elements."""

    heads: int
    groups: int
    size: int


def spans(rule: Rule, rows: int, attention: Attention | None) -> list[Span]:
    """The places of all rows of a parameter of Megatron-core.

    Args:
        rule: Its rule.
        rows: Its number of rows.
        attention: Its sizes, for rows of queries, keys and values.

    Raises:
        ValueError: The rows do not divide as the rule says.
    """
    count = len(rule.parts)
    if rule.rows is Rows.STACKED:
        each, rest = divmod(rows, count)
        if rest:
            raise ValueError(f"{rows} rows do not divide by {count}")
        return [Span(part * each, part, 0, each) for part in range(count)]
    if rule.rows is Rows.WHOLE or attention is None:
        return [Span(0, 0, 0, rows)]
    heads, groups, size = attention.heads, attention.groups, attention.size
    if groups < 1 or heads % groups or (heads + 2 * groups) * size != rows:
        raise ValueError(f"{rows} rows are not those of {heads} heads in {groups} groups of {size} elements")
    queries = heads // groups
    begins = (0, 0, 0) if count == 3 else (0, heads * size, (heads + groups) * size)
    found: list[Span] = []
    for group in range(groups):
        at = group * (queries + 2) * size
        for part, (begin, wide) in enumerate(((0, queries), (queries, 1), (queries + 1, 1))):
            place = begins[part] + group * wide * size
            found.append(Span(at + begin * size, part if count == 3 else 0, place, wide * size))
    return found


def part_rows(spans_: Sequence[Span], count: int) -> list[int]:
    """The rows of each part."""
    return [sum(s.rows for s in spans_ if s.part == part) for part in range(count)]
