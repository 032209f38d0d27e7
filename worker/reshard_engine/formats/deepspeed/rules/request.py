"""The rules that a request gives: what its document says, and a family's behind it."""

from __future__ import annotations

from typing import Any

from reshard.diffs import DiffOptions
from reshard.models import ConvertRequest
from reshard_engine.formats.deepspeed.rules.cut_rules import BEHIND
from reshard_engine.formats.deepspeed.rules.families import family_rules


def requested_rules(request: ConvertRequest | DiffOptions) -> dict[str, Any] | None:
    """Rules by DeepSpeed's keys, a family's under `BEHIND`; None if the request gives none.

    Raises:
        RequestError: `request.invalid`.
    """
    if request.family is None and request.rules is None:
        return None
    behind = {BEHIND: dict(family_rules(request.family))} if request.family is not None else {}
    if request.rules is None:
        return behind
    from reshard_engine.formats.deepspeed.rules.documents import (
        parse_rules,  # brings a YAML parser, which few commands need
    )

    return parse_rules(request.rules) | behind
