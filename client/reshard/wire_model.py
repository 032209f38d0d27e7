"""The base of all wire models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MOST_BYTES = 1 << 62
"""The largest size in a request. A sum of it and a few others still fits into 64 bits."""


class WireModel(BaseModel):
    """Base of all wire models. They are frozen and refuse unknown fields."""

    # A command uses few of the models. Building each at its first use makes every start 50 ms faster.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
