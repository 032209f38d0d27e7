"""Requests as tests write them: options of formats stand beside the fields of the request, as keyword arguments do."""

from __future__ import annotations

from typing import Any

from reshard.choices import TargetFormat
from reshard.installed_formats import nested
from reshard.models.jobs import ConvertRequest
from reshard.options import RunLayout


def asked(**fields: Any) -> ConvertRequest:
    """The request with these fields; options of formats, and `layout`, are moved below `options`."""
    return ConvertRequest.model_validate(nested(fields))


def needed_by(to: TargetFormat) -> dict[str, Any]:
    """The options without which a target of three ranks is refused, for a source that does not say them."""
    if to is TargetFormat.FSDP_RANKS:
        return {"layout": RunLayout(dp=3), "rank_framework": "verl", "device_type": "cpu"}
    if to is TargetFormat.TORCH_CHECKPOINTING:
        return {"layout": RunLayout(dp=3), "device_type": "cpu"}
    return {"layout": RunLayout(dp=3)} if to is TargetFormat.ZERO else {}
