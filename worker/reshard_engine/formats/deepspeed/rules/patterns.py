"""Patterns of parameter names, from checkpoints and from users: matched in linear time, or refused.

They mean the same as in Python's `re.match`: a match at the beginning of the name, not of the whole name. In Python's
matcher, one short pattern of a hostile checkpoint could run for years. RE2 matches every pattern in linear time. RE2
has no backreferences and no lookaround; no writer of these patterns uses them.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`re.match`, at most one match within a list).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import re2

from reshard.errors import SourceError, printable

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
                    f"{what}: {printable(text)!r} is no pattern: {printable(str(error), max_chars=120)}",
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
