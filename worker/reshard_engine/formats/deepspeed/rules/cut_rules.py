"""The cut of each parameter, from the lists of a `universal_checkpoint_info`.

Rules of users (`documents`) and named packs of rules (`families`) have the same keys, so that the rules of one
checkpoint can be pasted for another.

Source: deepspeed 0.19.8 `checkpoint/constants.py`, `checkpoint/ds_to_universal.py` (`merge_tp_slices`: precedence; a
parameter that no list names is cut along dimension 0), `checkpoint/universal_checkpoint.py` (`SubparamShape`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from reshard.errors import SourceError, printable
from reshard_engine.formats.deepspeed.rules.facts import as_count, as_items, as_lengths, as_mapping, as_number, as_texts
from reshard_engine.formats.deepspeed.rules.patterns import MAX_PATTERNS, Patterns
from reshard_engine.tensors.cuts import Cut, CutError

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
        raise SourceError("rules.invalid", f"{what}: {SECTIONS}: partition_dim is no dimension of the shape")
    patterns = Patterns(as_texts(facts.get("patterns"), f"{what}: {SECTIONS}"), f"{what}: {SECTIONS}")
    return _Sections(patterns, tuple(sizes), dim)
