"""The facts of a DeepSpeed run that no other format knows."""

from __future__ import annotations

from dataclasses import dataclass

from reshard_engine.checkpoint import Checkpoint, FormatFacts


@dataclass(frozen=True, slots=True)
class DeepSpeedFacts(FormatFacts):
    """What a reader of DeepSpeed's files notes for its writers, and for people."""

    zero_stage: int | None = None
    """The ZeRO stage; None for a universal form, which is the same for all of them."""
    stage_layers: tuple[int, ...] = ()
    """Of a pipeline: the first layer with parameters of each stage."""
    vocab_divisor: int | None = None
    """Vocabularies are padded to a multiple of this times the tensor-parallel ranks; None where nothing says."""
    vocab_rows: int | None = None
    """Rows of the vocabulary in the source, with padding."""


def facts_of(checkpoint: Checkpoint) -> DeepSpeedFacts:
    """The facts of a checkpoint; none are known of one that came from elsewhere."""
    return checkpoint.facts if isinstance(checkpoint.facts, DeepSpeedFacts) else DeepSpeedFacts()
