"""A format that another package brings: weights as raw files, cut by rows, with a JSON index.

This module is what a client needs to know; it imports no engine.
"""

from __future__ import annotations

from pydantic import Field

from reshard.installed_formats import InstalledFormat
from reshard.options import FormatOptions
from reshard.targets import Target


class RawRowsOptions(FormatOptions):
    """Options of raw rows."""

    rows_per_file: int | None = Field(default=None, ge=1, le=1 << 40, description="Rows of one file; default: all.")
    title: str | None = Field(default=None, max_length=200, description="A line of text for the index.")
    keep_ties: bool = Field(default=True, description="List further names of tied weights.")


RAW_ROWS = InstalledFormat(
    name="raw_rows",
    implementation="reshard_raw_rows.format:RawRows",
    targets={
        "raw_rows": Target(
            name="raw_rows",
            label="Raw rows",
            contains="raw files, cut by rows",
            options=("rows_per_file", "title", "keep_ties"),
        )
    },
    options=RawRowsOptions,
)
