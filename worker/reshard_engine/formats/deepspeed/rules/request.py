"""The rules that the options of a request give: those of its document, then those of a family."""

from __future__ import annotations

from typing import Any

from reshard.options import DeepSpeedOptions
from reshard_engine.formats.deepspeed.rules.cut_rules import BEHIND
from reshard_engine.formats.deepspeed.rules.families import family_rules


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
    from reshard_engine.formats.deepspeed.rules.documents import (
        parse_rules,  # brings a YAML parser, which few commands need
    )

    return parse_rules(options.rules) | behind
