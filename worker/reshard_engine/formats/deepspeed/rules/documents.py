"""Rules as users write them: a small YAML document with the keys of `universal_checkpoint_info`, see docs/rules.md."""

from __future__ import annotations

from typing import Any, cast

import yaml

from reshard.errors import RequestError, printable
from reshard_engine.formats.deepspeed.rules.cut_rules import (
    DEFAULT,
    HEADS,
    ORIGINAL_VOCAB,
    PADDED_VOCAB,
    PATTERN_LISTS,
    SECTION_WIDTHS,
    SECTIONS,
    VERSION,
    VOCAB_DIVISOR,
)

KNOWN = frozenset(
    {*PATTERN_LISTS, SECTIONS, SECTION_WIDTHS, ORIGINAL_VOCAB, PADDED_VOCAB, VERSION, HEADS, VOCAB_DIVISOR, DEFAULT}
)


class _Loader(yaml.SafeLoader):
    """A YAML loader without aliases, with which a few lines could expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, unless it is an alias."""
        if self.check_event(yaml.AliasEvent):  # pyright: ignore[reportUnknownMemberType]  # the package has no types
            raise yaml.YAMLError("aliases are not read here")
        return super().compose_node(parent, index)


def parse_rules(text: str) -> dict[str, Any]:
    """The rules in a document.

    Raises:
        RequestError: `request.invalid` if it is no mapping of known keys.
    """
    try:
        found = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = printable(" ".join(str(error).split()), max_chars=200)
        raise RequestError(
            "request.invalid",
            f"--rules: not a YAML document of this kind: {reason}",
            fix="write it as in docs/rules.md: a mapping of names to lists of patterns",
        ) from None
    if not isinstance(found, dict):
        raise RequestError("request.invalid", "--rules: the document is no mapping", fix="see docs/rules.md")
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
