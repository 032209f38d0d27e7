"""The cut of each parameter, from the lists of a `universal_checkpoint_info`, a model family, or the user's document.

The rules of users (`parse_rules`) and the named packs of rules (`family_rules`) have the same keys, so that the rules
of one checkpoint can be pasted for another.

Source: deepspeed 0.19.8 `checkpoint/constants.py`, `checkpoint/ds_to_universal.py` (`merge_tp_slices`: precedence; a
parameter that no list names is cut along dimension 0), `checkpoint/universal_checkpoint.py` (`SubparamShape`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, cast

import re2

from reshard.errors import RequestError, SourceError, printable
from reshard.options import DeepSpeedOptions
from reshard_engine.checkpoint import Parameter
from reshard_engine.containers.source_file import parse_yaml
from reshard_engine.tensors.cuts import Cut, CutError

# Patterns of parameter names, from checkpoints and from users: matched in linear time, or refused.
#
# They mean the same as in Python's `re.match`: a match at the beginning of the name, not of the whole name. In Python's
# matcher, one short pattern of a hostile checkpoint could run for years. RE2 matches every pattern in linear time. RE2
# has no backreferences and no lookaround; no writer of these patterns uses them.
#
# Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`re.match`, at most one match within a list).

MAX_PATTERNS = 1 << 18
"""The limit over all lists: tools that describe each parameter write several patterns for each."""
MAX_PATTERN_CHARS = 2_048
_MEMORY_BYTES = 1 << 20


# The package has no types.
_RE2: Any = re2
_compile = _RE2.compile
_ERROR: type[Exception] = _RE2.error


def _options() -> Any:
    options = _RE2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY_BYTES
    return options


@dataclass(frozen=True, slots=True)
class _Compiled:
    text: str
    matcher: Any

    def matches(self, name: str) -> bool:
        return self.matcher.match(name) is not None


class Patterns:
    """One list of patterns of which at most one may match a name."""

    def __init__(self, texts: Iterable[str], what: str) -> None:
        """Compile the patterns.

        Raises:
            SourceError: `rules.invalid` for a pattern that is too long or that RE2 does not read.
        """
        self.what = what
        self.texts = tuple(texts)
        # Most patterns are one escaped name between anchors. A table holds these, so that n names take n steps.
        self._exact: dict[str, str] = {}
        self._others: list[_Compiled] = []
        for text in self.texts:
            if len(text) > MAX_PATTERN_CHARS:
                raise SourceError("rules.invalid", f"{what}: a pattern of {len(text)} characters")
            name = _literal(text)
            if name is not None:
                self._exact[name] = text
                continue
            try:
                self._others.append(_Compiled(text, _compile(text, _options())))
            except _ERROR as error:
                raise SourceError(
                    "rules.invalid",
                    f"{what}: {printable(text)!r} is not a pattern: {printable(str(error), max_chars=120)}",
                    fix="patterns are regular expressions without lookaround and backreferences (RE2)",
                ) from None

    def match(self, name: str) -> str | None:
        """The pattern that matches a name, if one does.

        Raises:
            SourceError: `rules.ambiguous` if several do.
        """
        found = [self._exact[name]] if name in self._exact else []
        found += [p.text for p in self._others if p.matches(name)]
        if len(found) > 1:
            raise SourceError(
                "rules.ambiguous",
                f"{self.what}: {printable(name)} matches {printable(found[0])!r} and {printable(found[1])!r}",
                fix="give rules of your own: --rules FILE",
            )
        return found[0] if found else None

    def __len__(self) -> int:
        """The number of patterns."""
        return len(self.texts)


def _literal(text: str) -> str | None:
    r"""The one name that a pattern like `^layers\.0\.weight$` matches; None for others."""
    if not (text.startswith("^") and text.endswith("$") and len(text) > 1):
        return None
    name: list[str] = []
    at, body = 0, text[1:-1]
    while at < len(body):
        char = body[at]
        if char == "\\":
            if at + 1 == len(body) or body[at + 1].isalnum():
                return None
            name.append(body[at + 1])
            at += 2
            continue
        if not (char.isalnum() or char in "_-"):
            return None
        name.append(char)
        at += 1
    return "".join(name)


# Conversions of metadata from checkpoints and users to the types that it must have.

MAX_ITEMS = 1 << 18


def as_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """A mapping; None is an empty one.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SourceError("rules.invalid", f"{what} is not a mapping")
    return cast("Mapping[str, Any]", value)


def as_items(value: Any, what: str) -> Sequence[Any]:
    """A list or tuple; None is an empty one.

    Raises:
        SourceError: `rules.invalid` for anything else, and for more than `MAX_ITEMS` items.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise SourceError("rules.invalid", f"{what} is not a list")
    found = cast("Sequence[Any]", value)
    if len(found) > MAX_ITEMS:
        raise SourceError("rules.invalid", f"{what} has more than {MAX_ITEMS} items")
    return found


def as_texts(value: Any, what: str) -> list[str]:
    """A list of texts, or the keys of a mapping.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    items = list(as_mapping(value, what)) if isinstance(value, Mapping) else list(as_items(value, what))
    if not all(isinstance(i, str) for i in items):
        raise SourceError("rules.invalid", f"{what} holds something that is not text")
    return items


def as_count(value: Any, what: str) -> int:
    """A positive integer.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    if type(value) is not int or not 0 < value < 1 << 48:
        raise SourceError("rules.invalid", f"{what} is not a positive number")
    return value


def as_number(value: Any, what: str) -> float:
    """A number.

    Raises:
        SourceError: `rules.invalid` for anything else, and for a NaN.
    """
    if (type(value) is not int and type(value) is not float) or value != value:  # noqa: PLR0124 - a nan
        raise SourceError("rules.invalid", f"{what} is not a number")
    return float(value)


def as_lengths(value: Any, what: str, *, max_items: int = 16, least: int = 0) -> tuple[int, ...]:
    """A list of integers that are lengths, offsets or strides.

    Raises:
        SourceError: `rules.invalid` for anything else.
    """
    items = as_items(value, what) if value is not None else (None,)
    if len(items) > max_items or not all(type(n) is int and least <= n < 1 << 48 for n in items):
        raise SourceError("rules.invalid", f"{what} is not a list of lengths")
    return tuple(items)


# The keys of a `universal_checkpoint_info`, and the cuts that its lists give.

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROW = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
TWO_SECTIONS = "parameter_with_2_sub_params_cat_dim_0"
SECTIONS = "parameter_with_sub_params"
SECTION_WIDTHS = "sub_param_shard_widths"
PIPELINE_REPLICATED = "pipeline_replicated_parameter_patterns"
UNSUPPORTED = "autotp_unsupported_parameter_patterns"
ORIGINAL_VOCAB = "original_vocab_size"
PADDED_VOCAB = "padded_vocab_size"
VERSION = "universal_checkpoint_version"
AFFINE = "affine_map"
# Keys of our own, for facts that DeepSpeed's metadata cannot state.
HEADS = "parameter_with_heads"
COLUMN = "parameter_with_column_parallelism_patterns"
VOCAB_DIVISOR = "make_vocab_size_divisible_by"
DEFAULT = "default"
BEHIND = "family"
"""The key of a family's rules, which come after those of a request. Documents do not have it."""
PATTERN_LISTS = (REPLICATED, AVERAGED, ROW, VOCABULARY, TWO_SECTIONS, PIPELINE_REPLICATED, COLUMN)
MAX_VERSION = 0.4


@dataclass(frozen=True, slots=True)
class _Sections:
    patterns: Patterns
    shape: tuple[int | tuple[int, ...], ...]
    dim: int


class CutRules:
    """One set of rules that gives each parameter's cut by its name."""

    def __init__(self, facts: Mapping[str, Any], *, complete: bool, what: str, stated: bool = False) -> None:
        """Check and compile rules.

        Args:
            facts: The lists, by DeepSpeed's keys; plain values.
            complete: True if a parameter that no list names is cut along dimension 0, as in DeepSpeed.
            what: The origin of the rules, for messages.
            stated: True if a request states `complete`. Stated in a checkpoint's metadata, it holds only if the run cut
                something.

        Raises:
            SourceError: `rules.invalid`, `source.unsupported_version`.
        """
        self.what = what
        self._complete, self._stated = complete, stated
        self.version = as_number(facts.get(VERSION, 0.0), VERSION)
        if self.version > MAX_VERSION:
            raise SourceError(
                "source.unsupported_version", f"{what} is of version {self.version}; known are up to {MAX_VERSION}"
            )
        lists = {key: as_texts(facts.get(key), f"{what}: {key}") for key in PATTERN_LISTS}
        if sum(map(len, lists.values())) > MAX_PATTERNS:
            raise SourceError("rules.invalid", f"{what} has more than {MAX_PATTERNS} patterns")
        self._lists = {key: Patterns(texts, f"{what}: {key}") for key, texts in lists.items()}
        self._unsupported = Patterns(as_texts(facts.get(UNSUPPORTED), what), f"{what}: {UNSUPPORTED}")
        self._sections = [_sections(entry, what) for entry in as_items(facts.get(SECTIONS), f"{what}: {SECTIONS}")]
        self._widths = as_mapping(facts.get(SECTION_WIDTHS), f"{what}: {SECTION_WIDTHS}")
        self._heads = [
            (
                Patterns(as_texts(entry.get("patterns"), f"{what}: {HEADS}"), f"{what}: {HEADS}"),
                as_count(entry.get("heads"), f"{what}: {HEADS}: heads"),
            )
            for entry in (as_mapping(e, f"{what}: {HEADS}") for e in as_items(facts.get(HEADS), f"{what}: {HEADS}"))
        ]
        self.automatic = UNSUPPORTED in facts
        """True if AutoTP cut the model: only AutoTP writes this list."""
        size = facts.get(ORIGINAL_VOCAB)
        self.original_vocab_size = None if size is None else as_count(size, f"{what}: {ORIGINAL_VOCAB}")
        rows = facts.get(PADDED_VOCAB)
        self.padded_vocab_size = None if rows is None else as_count(rows, f"{what}: {PADDED_VOCAB}")
        divisor = facts.get(VOCAB_DIVISOR)
        self.vocab_divisor = None if divisor is None else as_count(divisor, f"{what}: {VOCAB_DIVISOR}")
        if len(self._lists[VOCABULARY]) and self.original_vocab_size is None:
            raise SourceError(
                "rules.invalid",
                f"{what} names vocabulary parameters, and no {ORIGINAL_VOCAB}",
                fix=f"add {ORIGINAL_VOCAB}: N",
            )

    @property
    def says_how_to_cut(self) -> bool:
        """True if any list tells cut parameters from whole ones: runs without tensor parallelism leave these empty.

        Gated halves prove nothing: Megatron-DeepSpeed names them whatever its tensor parallelism is, and the other
        lists only where it is above 1 (`megatron/model/gpt_model.py`, `UniversalCheckpointInfo`).
        """
        return any(len(self._lists[k]) for k in (REPLICATED, ROW, COLUMN))

    def names(self, name: str) -> bool:
        """True if a list that says how parameters are cut names this one."""
        listed = (REPLICATED, AVERAGED, TWO_SECTIONS, ROW, COLUMN, VOCABULARY)
        if any(self._lists[k].match(name) is not None for k in listed):
            return True
        return any(entry.patterns.match(name) is not None for entry in self._sections)

    def is_vocabulary(self, name: str) -> bool:
        """True if a parameter's rows are a vocabulary's."""
        return self._lists[VOCABULARY].match(name) is not None

    def is_staged(self, name: str) -> bool:
        """True if several pipeline stages hold a parameter."""
        return self._lists[PIPELINE_REPLICATED].match(name) is not None

    def units_of(self, name: str) -> int | None:
        """The number of heads in a parameter's cut dimension; None where no rule says it."""
        return min((heads for patterns, heads in self._heads if patterns.match(name) is not None), default=None)

    def cut_of(self, name: str, locals_: Sequence[tuple[int, ...]]) -> Cut | None:
        """The cut of a parameter whose parts on the ranks have these shapes; None if no rule says it.

        Raises:
            SourceError: `rules.ambiguous`, `rules.contradiction` if the rule cannot be right for these shapes,
                `source.unsupported`.
        """
        if (pattern := self._unsupported.match(name)) is not None:
            raise SourceError(
                "source.unsupported",
                f"{printable(name)}: {self.what} says that its layout cannot be described ({printable(pattern)})",
            )
        try:
            cut = self._cut_of(name, locals_)
        except CutError as error:
            if len(locals_) == 1:
                return None  # an uncut parameter needs no rule until a target cuts it
            raise SourceError(
                "rules.contradiction",
                f"{printable(name)}: {self.what} does not fit its parts: {error}",
                fix="give rules that fit the parameter's parts: --rules FILE, or --family NAME",
            ) from None
        if cut is None or cut.dim is None:
            return cut
        units = self.units_of(name)
        vocabulary = self.original_vocab_size if self.is_vocabulary(name) else None
        if self.automatic:
            # AutoTP pads no vocabulary: where rows do not divide, the first ranks hold one more.
            vocabulary = None
        if self.automatic and units is None and cut.widths:
            # Widths that differ by one unit have this unit as common divisor: heads that share keys stay together.
            units = sum(cut.widths[0]) // gcd(*cut.widths[0])
        return replace(cut, vocabulary=vocabulary, units=units, near_even=self.automatic)

    def _cut_of(self, name: str, locals_: Sequence[tuple[int, ...]]) -> Cut | None:
        if self._lists[REPLICATED].match(name) is not None:
            return Cut()
        if self._lists[AVERAGED].match(name) is not None:
            return Cut(averaged=True)
        if self._lists[TWO_SECTIONS].match(name) is not None:
            total = sum(s[0] for s in locals_ if s)
            if any(not s or s[0] % 2 for s in locals_):
                raise CutError(f"two halves of {[list(s) for s in locals_]}")
            halves = tuple(s[0] // 2 for s in locals_)
            return Cut(0, (total // 2, total // 2), widths=_uneven((halves, halves)))
        for entry in self._sections:
            if (pattern := entry.patterns.match(name)) is not None:
                return self._section_cut(entry, pattern, locals_)
        row = self._lists[ROW].match(name) is not None
        column = self._lists[COLUMN].match(name) is not None or self._lists[VOCABULARY].match(name) is not None
        # A run that cut nothing leaves all lists empty. A parameter that no list names is then unknown, not column-cut.
        complete = self._complete and (len(locals_) > 1 or self._stated or self.says_how_to_cut)
        if not row and not column and not complete:
            return None
        dim = 1 if row else 0
        if any(len(s) <= dim for s in locals_):
            raise CutError(f"dimension {dim} of {[list(s) for s in locals_]}")
        return Cut(dim, widths=_uneven((tuple(s[dim] for s in locals_),)))

    def _section_cut(self, entry: _Sections, pattern: str, locals_: Sequence[tuple[int, ...]]) -> Cut:
        ranks, numel = len(locals_), sum(prod(s) for s in locals_)
        sizes = entry.shape[entry.dim]
        shape = [sum(n) if isinstance(n, tuple) else n for n in entry.shape]
        if not isinstance(sizes, tuple):
            # Before 0.4 a number at the cut dimension counted equal sections, whose lengths the parts give.
            count = sizes
            shape[entry.dim] = -1 if shape.count(-1) == 0 else shape[entry.dim]
            length = sum(s[entry.dim] for s in locals_ if len(s) > entry.dim)
            if count <= 0 or length % count:
                raise CutError(f"{count} equal sections in a dimension of {length}")
            sizes = (length // count,) * count
            shape[entry.dim] = length
        if shape.count(-1) > 1:
            raise CutError(f"the shape {shape} leaves two dimensions open")
        if -1 in shape:
            known = prod(n for n in shape if n != -1)
            if known <= 0 or numel % known:
                raise CutError(f"{numel} elements as {shape}")
            shape[shape.index(-1)] = numel // known
        if prod(shape) != numel:
            raise CutError(f"{numel} elements as {shape}")
        # One part is a whole parameter: the widths are those of the run that it was joined from, and do not apply.
        widths = self._widths.get(pattern) if ranks > 1 else None
        return Cut(
            entry.dim,
            tuple(sizes),
            tuple(shape),
            widths=_uneven(_width_table(widths, len(sizes), ranks)) if widths is not None else (),
        )


def _uneven(widths: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The widths where ranks differ; empty where an even cut gives the same widths."""
    return widths if any(len(set(section)) > 1 for section in widths) else ()


def _width_table(value: Any, sections: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    rows = [as_lengths(row, SECTION_WIDTHS, max_items=1 << 12) for row in as_items(value, SECTION_WIDTHS)]
    if len(rows) != sections or any(len(r) != ranks for r in rows):
        raise CutError(f"{SECTION_WIDTHS} must give {sections} sections of {ranks} widths")
    return tuple(rows)


def _sections(entry: Any, what: str) -> _Sections:
    facts = as_mapping(entry, f"{what}: {SECTIONS}")
    dim, shape = facts.get("partition_dim"), facts.get("shape")
    sizes: list[int | tuple[int, ...]] = []
    for item in as_items(shape, f"{what}: {SECTIONS}: shape"):
        if type(item) is int and -1 <= item < 1 << 48:
            sizes.append(item)
        else:
            sizes.append(as_lengths(item, f"{what}: {SECTIONS}: shape", max_items=1 << 12))
    if type(dim) is not int or not 0 <= dim < len(sizes):
        raise SourceError("rules.invalid", f"{what}: {SECTIONS}: partition_dim is not a dimension of the shape")
    patterns = Patterns(as_texts(facts.get("patterns"), f"{what}: {SECTIONS}"), f"{what}: {SECTIONS}")
    return _Sections(patterns, tuple(sizes), dim)


# Named packs of rules for model families whose checkpoints do not say how their parameters are cut.
#
# Source: Megatron-DeepSpeed (main, July 2025) `megatron/model/gpt_model.py` (`universal_checkpoint_info`),
# `megatron/model/transformer.py`, `megatron/core/tensor_parallel/layers.py`; BLOOM: bigscience/Megatron-DeepSpeed
# `megatron/checkpointing.py` and DeepSpeed's `blogs` of universal checkpoints 0.1.


# A layer's prefix: `7.` in pipelines, `language_model.encoder.layers.3.` without.
_LAYER = r"(\d+\.|language_model\.encoder\.layers\.\d+\.)"
_EMBEDDINGS = (r"tied_modules\.\w+\.", r"\d+\.", r"language_model\.embedding\.")
_WORDS = [rf"{p}word_embeddings\.weight" for p in _EMBEDDINGS]
_POSITIONS = [rf"{p}position_embeddings\.weight" for p in _EMBEDDINGS]
_NORMS = rf"{_LAYER}(input_layernorm|post_attention_layernorm)\.(weight|bias)$"
_LAST_NORM = r"(\d+|language_model\.encoder\.final_layernorm)\.(weight|bias)$"

_GPT: Mapping[str, Any] = {
    VOCABULARY: [*_WORDS, r"\d+\.lm_head\.weight", r"language_model\.output_layer\.weight"],
    PIPELINE_REPLICATED: [r"tied_modules\.\w+\.(word|position)_embeddings\.weight"],
    REPLICATED: [
        _NORMS,
        _LAST_NORM,
        *_POSITIONS,
        rf"{_LAYER}self_attention\.dense\.bias",
        rf"{_LAYER}mlp\.dense_4h_to_h\.bias",
    ],
    ROW: [rf"{_LAYER}self_attention\.dense\.weight", rf"{_LAYER}mlp\.dense_4h_to_h\.weight"],
    COLUMN: [
        rf"{_LAYER}self_attention\.(query_key_value|query|key_value|key|value)\.(weight|bias)",
        rf"{_LAYER}mlp\.dense_h_to_4h\.(weight|bias)",
    ],
}
_LLAMA: Mapping[str, Any] = {
    **_GPT,
    TWO_SECTIONS: [rf"{_LAYER}mlp\.dense_h_to_4h\.(weight|bias)"],
    COLUMN: [rf"{_LAYER}self_attention\.(query_key_value|query|key_value|key|value)\.(weight|bias)"],
}
_BLOOM: Mapping[str, Any] = {
    **_GPT,
    # BLOOM normalises its embeddings.
    REPLICATED: [*_GPT[REPLICATED], r"(tied_modules\.\w+\.|\d+\.)word_embeddings\.norm\.(weight|bias)"],
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {"gpt-megatron": _GPT, "llama-megatron": _LLAMA, "bloom": _BLOOM}
HEADED = [rf"{_LAYER}self_attention\.(query_key_value|query|key_value|key|value|dense)\."]
"""Parameters whose cut dimension consists of attention heads."""

_UNUSED_COPY = re.compile(r"tied_modules\.embed\.position_embeddings\.weight")


def is_unused_copy(name: str) -> bool:
    """True if the last stage of Megatron's pipelines holds a copy of a parameter that it never uses.

    The last stage ties the embedding module for its word embeddings alone. Its position embeddings get no gradient, and
    drift from those of the first stage.
    """
    return _UNUSED_COPY.fullmatch(name) is not None


SECTIONED_WARNING = (
    "query_key_value is declared as plain slices; Megatron-DeepSpeed since December 2024 stores [Q | K | V] in each "
    "slice and still declares plain slices: then a change of tensor parallelism needs parameter_with_sub_params "
    "(docs/rules.md)"
)


def may_be_sectioned(parameter: Parameter) -> bool:
    """True for a fused query_key_value with the plain cut that some versions of Megatron-DeepSpeed declare wrongly."""
    plain = parameter.cut is not None and parameter.cut.dim == 0 and not parameter.cut.sections
    return plain and "self_attention.query_key_value." in parameter.fqn


def family_rules(name: str) -> Mapping[str, Any]:
    """The rules of a pack.

    Raises:
        RequestError: `request.invalid` if no pack has this name.
    """
    found = FAMILIES.get(name)
    if found is None:
        raise RequestError(
            "request.invalid",
            f"no family is called {printable(name)!r}",
            fix=f"known are {', '.join(sorted(FAMILIES))}",
        )
    return found


# Rules as users write them: a small YAML document with the keys of `universal_checkpoint_info`, see docs/rules.md.

KNOWN = frozenset(
    {*PATTERN_LISTS, SECTIONS, SECTION_WIDTHS, ORIGINAL_VOCAB, PADDED_VOCAB, VERSION, HEADS, VOCAB_DIVISOR, DEFAULT}
)


def parse_rules(text: str) -> dict[str, Any]:
    """The rules in a document.

    Raises:
        RequestError: `request.invalid` if it is not a mapping of known keys.
    """
    try:
        found = parse_yaml(text)
    except ValueError as error:
        reason = printable(str(error), max_chars=200)
        raise RequestError(
            "request.invalid",
            f"--rules: not a YAML document of this kind: {reason}",
            fix="write it as in docs/rules.md: a mapping of names to lists of patterns",
        ) from None
    if not isinstance(found, dict):
        raise RequestError("request.invalid", "--rules: the document is not a mapping", fix="see docs/rules.md")
    facts = {str(k): v for k, v in cast("dict[Any, Any]", found).items()}
    unknown = sorted(k for k in facts if k not in KNOWN)
    if unknown:
        raise RequestError(
            "request.invalid",
            f"--rules: unknown key {printable(unknown[0])!r}",
            fix=f"known are {', '.join(sorted(KNOWN))}",
        )
    if facts.get(DEFAULT) not in (None, "refuse", "column"):
        raise RequestError(
            "request.invalid",
            f"--rules: {DEFAULT} is `refuse` or `column`",
            fix=f"write `{DEFAULT}: refuse` or `{DEFAULT}: column`",
        )
    return facts


# The rules that the options of a request give: those of its document, then those of a family.


def requested_rules(options: DeepSpeedOptions) -> dict[str, Any] | None:
    """Rules by DeepSpeed's keys, a family's under `BEHIND`; None if the options give none.

    Raises:
        RequestError: `request.invalid`.
    """
    if options.family is None and options.rules is None:
        return None
    behind = {BEHIND: dict(family_rules(options.family))} if options.family is not None else {}
    if options.rules is None:
        return behind

    return parse_rules(options.rules) | behind
