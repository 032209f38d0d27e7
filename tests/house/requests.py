"""Requests as tests write them: options of formats stand beside the fields of the request, as keyword arguments do."""

from __future__ import annotations

from typing import Any

from reshard.installed_formats import nested
from reshard.models.jobs import ConvertRequest


def asked(**fields: Any) -> ConvertRequest:
    """The request with these fields; options of formats, and `layout`, are moved below `options`."""
    return ConvertRequest.model_validate(nested(fields))
