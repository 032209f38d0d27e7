"""Sets of rules in order of precedence: the user's file, then a family's rules, then the checkpoint's own rules.

Each set of rules is a layer. A parameter takes its cut from the first layer that names it. Other layers add facts that
this layer lacks: that the parameter is a vocabulary, or how many heads it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard_engine.formats.deepspeed.rules.cut_rules import CutRules
from reshard_engine.tensors.cuts import Cut


class RuleLayers:
    """Several sets of rules as one."""

    def __init__(self, layers: Sequence[CutRules]) -> None:
        """Take at least one layer, in order of precedence."""
        self._layers = tuple(layers)
        self.vocab_divisor = next((r.vocab_divisor for r in layers if r.vocab_divisor is not None), None)
        self.vocab_rows = next((r.padded_vocab_size for r in layers if r.padded_vocab_size is not None), None)
        """Rows of the vocabulary with padding in the run that the metadata describe."""

    def first_stage_counts(self, name: str) -> bool:
        """True if only the first stage's copy of a parameter is used; False for vocabularies, which are equal."""
        staged = any(rules.is_staged(name) for rules in self._layers)
        return staged and not any(rules.is_vocabulary(name) for rules in self._layers)

    def cut_of(self, name: str, locals_: Sequence[tuple[int, ...]]) -> Cut | None:
        """The cut of a parameter whose parts on the ranks have these shapes; None if no rule says it.

        Raises:
            SourceError: As `CutRules.cut_of`.
        """
        # A layer may cut parameters that it does not name: it is asked only if no layer names the parameter.
        naming = [rules for rules in self._layers if rules.names(name)][:1]
        asked = naming or self._layers
        cut = next((c for c in (rules.cut_of(name, locals_) for rules in asked) if c is not None), None)
        return cut if cut is None or cut.dim is None else self._completed(name, cut)

    def _completed(self, name: str, cut: Cut) -> Cut:
        if cut.units is None:
            counts = [n for rules in self._layers if (n := rules.units_of(name)) is not None]
            cut = replace(cut, units=min(counts, default=None))
        known = [r.original_vocab_size for r in self._layers if r.is_vocabulary(name) and not r.automatic]
        if cut.vocabulary is None and cut.dim == 0 and not cut.sections and not cut.near_even and known:
            cut = replace(cut, vocabulary=known[0])
        return cut
