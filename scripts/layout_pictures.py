"""Draws the layouts that the documents show, from a real checkpoint and from conversions of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import reshard

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "tests" / "data" / "tutorial_zero2"
PICTURES = REPOSITORY / "docs" / "images" / "layouts"
WIDE, NARROW = 800, 380
"""The widths of the pictures for a page beside its navigation, and for a phone."""
RULES = """\
parameter_with_column_parallelism_patterns: ['up\\.(weight|bias)']
parameter_with_row_parallelism_patterns: ['down\\.weight']
tp_replicated_parameter_patterns: ['down\\.bias']
"""
_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tutorial": ("up.bias", "run1_on_3/global_step4", {"to": "zero", "dp": 3}),
    "zero3": ("up.weight", "on_4/global_step4", {"to": "zero", "dp": 4, "zero_stage": "3"}),
    "tensor-parallel": ("down.weight", "tp_2/global_step4", {"to": "zero", "dp": 1, "tp": 2}),
    "universal": ("up.weight", "run1/global_step4_universal", {"to": "universal"}),
}
"""By name of the picture: the tensor that is followed, the target's name, the options of the conversion."""


def pictures() -> Iterator[tuple[Path, str]]:
    """Every picture as it should be: its file and its text, wide and narrow."""
    with tempfile.TemporaryDirectory() as scratch:
        rules = Path(scratch, "rules.yaml")
        rules.write_text(RULES, encoding="utf-8")
        yield from _both("zero2", _named(reshard.picture(SOURCE)))
        for name, (tensor, target, options) in _CASES.items():
            place = Path(scratch, target)
            reshard.convert(SOURCE, place, progress=False, rules=rules if "tp" in options else None, **options)
            yield from _both(name, _named(reshard.picture(SOURCE, tensor=tensor, beside=place), target))


def _named(picture: reshard.Picture, target: str = "") -> reshard.Picture:
    """The picture with places that a reader has, too."""
    source = picture.source.model_copy(update={"url": "run1/global_step4"})
    other = picture.target and picture.target.model_copy(update={"url": target})
    return replace(picture, source=source, target=other)


def _both(name: str, picture: reshard.Picture) -> Iterator[tuple[Path, str]]:
    yield PICTURES / f"{name}.svg", picture.svg(width=WIDE)
    yield PICTURES / f"{name}-narrow.svg", picture.svg(width=NARROW)
